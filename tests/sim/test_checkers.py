"""Every checker reports its violating histories and accepts a valid one."""

from typing import Any

import msgspec
import pytest

from holdfast.clock import S
from holdfast.sim.history import History
from tests.sim.test_check_effects import WRONG as EFFECTS
from tests.sim.test_check_flows import BAD as FLOWS
from tests.sim.test_check_ledger import BAD as LEDGERS
from tests.sim.test_check_tasks import WRONG as TASKS
from tests.sim.test_check_worlds import WRONG
from tests.sim.test_dispatch import BAD as DISPATCHES
from tests.simulation.check_journals import fold
from tests.simulation.checkers import CHECKERS, check_all

Plain = dict[str, Any]

CONFIG = {
    "budgets": {"q": {"failures_max": 2, "expiries_max": 2}},
    "retention_ns": 10 * S,
    "progress_ns": 1 * S,
    "rest_ns": 0,
}


class HistoryBuilder:
    """History builder. Each applied event is a separate commit."""

    def __init__(self) -> None:
        self.history = History()
        self.history.add(0, "config", CONFIG)
        self._commits = 0

    def committed(
        self, at_s: float, op: str, args: Plain, value: Any = None, **more: Any
    ) -> "HistoryBuilder":
        self._commits += 1
        more = {"actor": "a", "incarnation": "1", "commit_no": self._commits, **more}
        self.history.add(int(at_s * S), op, args, value=value, **more)
        return self

    def failed(self, at_s: float, op: str, args: Plain, code: str, **more: Any) -> "HistoryBuilder":
        more = {"actor": "a", "incarnation": "1", **more}
        self.history.add(int(at_s * S), op, args, result="fail", value={"code": code}, **more)
        return self

    def record(
        self, at_s: float, op: str, args: Plain | None = None, value: Any = None
    ) -> "HistoryBuilder":
        self.history.add(int(at_s * S), op, args, value=value, actor="a", incarnation="1")
        return self

    def audit(self, at_s: float, **parts: Any) -> "HistoryBuilder":
        empty: Plain = {
            "queues": {},
            "journals": {},
            "inboxes": {},
            "snapshots": {},
            "dedupe": {},
            "leases": {},
            "blobs": {"data": {}, "refs": {}, "idle": []},
            "lease_log": [],
            "generation": 1,
        }
        return self.record(at_s, "audit", value={**empty, **parts})

    # -- leases ----------------------------------------------------------------------------------

    def granted(
        self, at_s: float, worker: str, epoch: int, generation: int = 1
    ) -> "HistoryBuilder":
        args = {"resource": "w", "worker": worker, "incarnation": "1", "ttl_ns": 10 * S}
        return self.committed(
            at_s, "lease.acquire", args, lease(worker, epoch, at_s + 10, generation), actor=worker
        )

    def wrote(self, at_s: float, worker: str, epoch: int, op: str = "write") -> "HistoryBuilder":
        args = {"lease": lease(worker, epoch, 0)}
        return self.committed(at_s, op, args, actor=worker)

    # -- queues ----------------------------------------------------------------------------------

    def put(self, at_s: float, seq: int, not_before_s: float = 0) -> "HistoryBuilder":
        args = {"queue": "q", "payload": b"p", "not_before_ns": int(not_before_s * S)}
        return self.committed(at_s, "queue.put", args, seq)

    def claimed(self, at_s: float, seq: int, number: int, **counts: int) -> "HistoryBuilder":
        return self.committed(
            at_s, "queue.claim", {"queue": "q"}, [claim(at_s, seq, number, **counts)]
        )

    def acked(self, at_s: float, seq: int, number: int) -> "HistoryBuilder":
        return self.committed(at_s, "queue.ack", {"claims": [claim(0, seq, number)]})

    # -- worlds ----------------------------------------------------------------------------------

    def delivered(
        self,
        at_s: float,
        seq: int,
        key: str,
        body: bytes = b"x",
        already: bool = False,
        **more: Any,
    ) -> "HistoryBuilder":
        args = {"world": "w", "key": key, "body": body}
        return self.committed(at_s, "inbox.put", args, {"seq": seq, "already": already}, **more)

    def cycled(self, at_s: float, head: int, *ingress: tuple[int, str]) -> "HistoryBuilder":
        rows = [[seq, key, b"x"] for seq, key in ingress]
        args = {"world": "w", "expected_head": head, "ingress": rows, "effects": []}
        return self.committed(at_s, "host_cycle", args)


def lease(worker: str, epoch: int, expires_s: float, generation: int = 1) -> Plain:
    return {
        "resource": "w",
        "worker": worker,
        "incarnation": "1",
        "generation": generation,
        "epoch": epoch,
        "expires_ns": int(expires_s * S),
    }


def claim(at_s: float, seq: int, number: int, failures: int = 0, expiries: int = 0) -> Plain:
    return {
        "queue": "q",
        "seq": seq,
        "number": number,
        "owner": "a",
        "expires_ns": int((at_s + 10) * S),
        "failures": failures,
        "expiries": expiries,
        "payload": b"p",
        "blob": b"",
    }


def queue_rows(**parts: Any) -> Plain:
    counts = dict.fromkeys(("ready", "delayed", "claimed", "dead", "done"), 0)
    rows: Plain = {
        "items": {},
        "ready": [],
        "delayed": [],
        "expiry": [],
        "owners": [],
        "dead": {},
        "died": [],
        "last_seq": 9,
        "counts": {**counts, **parts.pop("counts", {})},
    }
    return {"q": {**rows, **parts}}


def item(**fields: Any) -> Plain:
    row = {"failures": 0, "expiries": 0, "expires_ns": 0, "owner": "", "not_before_ns": 0}
    return {**row, "payload": b"p", "blob": b"", **fields}


def letter(**fields: Any) -> Plain:
    row = {"payload": b"p", "blob": b"", "code": "failed", "died_ns": 1, "claims": 1, "failures": 1}
    return {**row, **fields}


def entry(seq: int, key: str) -> bytes:
    return msgspec.msgpack.encode([seq, key, b"x"])


def journal(*bodies: bytes, floor: int = 1) -> Plain:
    entries = {floor + at: {"body": body, "blob": b""} for at, body in enumerate(bodies)}
    head = {"height": floor - 1 + len(bodies), "floor": floor, "checkpoint": 0}
    return {"w": {"head": head, "entries": entries}}


def inbox(*seqs: int, cursor: int = 0, last_seq: int | None = None) -> Plain:
    rows = {seq: {"key": f"k{seq}", "body": b"x", "blob": b""} for seq in seqs}
    last = max([cursor, *seqs]) if last_seq is None else last_seq
    return {"w": {"rows": rows, "cursor": cursor, "last_seq": last}}


def log(*lines: tuple[str, int]) -> list[Plain]:
    return [
        {
            "resource": "w",
            "kind": kind,
            "generation": 1,
            "epoch": epoch,
            "decided_ns": 9,
            "expires_ns": 9,
        }
        for kind, epoch in lines
    ]


BAD: dict[str, list[HistoryBuilder]] = {
    "L1": [HistoryBuilder().granted(0, "a", 1).granted(5, "b", 2)],
    "L2": [
        HistoryBuilder().granted(0, "a", 2).granted(20, "b", 2),
        HistoryBuilder()
        .granted(0, "a", 1)
        .committed(5, "lease.release", {"lease": lease("a", 1, 10)})
        .granted(6, "b", 1),
        HistoryBuilder()
        .record(0, "backup", {"id": 1})
        .granted(1, "a", 5)
        .record(2, "restore", {"id": 1, "generation": 2})
        .granted(3, "b", 4),
    ],
    "L3": [
        HistoryBuilder().granted(0, "a", 1).wrote(11, "a", 1),
        HistoryBuilder().granted(0, "a", 1).granted(20, "b", 2).wrote(21, "a", 1),
        HistoryBuilder()
        .granted(0, "a", 1)
        .record(1, "backup", {"id": 1})
        .record(2, "restore", {"id": 1, "generation": 2})
        .wrote(3, "a", 1),
    ],
    "L4": [
        HistoryBuilder()
        .granted(0, "a", 1)
        .committed(
            11,
            "lease.renew",
            {"leases": [lease("a", 1, 10)], "ttl_ns": 10 * S},
            [lease("a", 1, 21)],
        ),
        HistoryBuilder()
        .granted(0, "a", 1)
        .committed(
            1, "lease.renew", {"leases": [lease("a", 1, 10)], "ttl_ns": 10 * S}, [lease("a", 2, 11)]
        ),
    ],
    "L5": [HistoryBuilder().audit(1, lease_log=log(("granted", 1), ("granted", 2)))],
    "L6": [
        HistoryBuilder()
        .granted(0, "a", 1)
        .failed(1, "write", {"lease": lease("a", 1, 10)}, "fenced")
        .wrote(2, "a", 1)
    ],
    "L7": [
        HistoryBuilder().granted(0, "a", 1).wrote(11, "a", 1, op="truncate_journal"),
        HistoryBuilder().put(0, 1).claimed(1, 1, 1).claimed(12, 1, 2, expiries=1).acked(13, 1, 1),
        HistoryBuilder().put(0, 1).claimed(1, 1, 1).acked(12, 1, 1),
        HistoryBuilder().put(0, 1).claimed(1, 1, 1).claimed(12, 1, 1, expiries=1),
        HistoryBuilder()
        .put(0, 1)
        .claimed(1, 1, 1)
        .committed(2, "queue.expire_overdue", {"queue": "q"}, 1),
    ],
    "L8": [
        HistoryBuilder().granted(0, "a", 1).granted(20, "b", 3),
        HistoryBuilder().failed(
            0,
            "lease.acquire",
            {"resource": "w", "worker": "a", "incarnation": "1", "ttl_ns": S},
            "held",
        ),
        HistoryBuilder()
        .granted(0, "a", 1)
        .committed(1, "lease.mark_stale", {"resource": "w"}, True),
        HistoryBuilder()
        .granted(0, "a", 1)
        .committed(1, "lease.release", {"lease": lease("b", 1, 10)}),
    ],
    "L9": [
        HistoryBuilder()
        .record(0, "progress", {"boot_ns": 0})
        .record(2, "renewing", {"boot_ns": 2 * S})
    ],
    "S1": [
        HistoryBuilder().audit(1, lease_log=log(("released", 1))),
        HistoryBuilder().audit(1, lease_log=log(("granted", 1), ("expired", 2))),
        HistoryBuilder().put(0, 1).claimed(1, 1, 1).acked(2, 1, 1).acked(3, 1, 1),
        HistoryBuilder().put(0, 1).claimed(1, 1, 1).acked(2, 1, 1).claimed(3, 1, 2),
        HistoryBuilder().put(0, 1).committed(1, "queue.redrive", {"queue": "q", "seqs": [1]}, [2]),
    ],
    "S3": [
        HistoryBuilder()
        .put(0, 1)
        .claimed(1, 1, 1)
        .committed(2, "queue.fail", {"claim": claim(1, 1, 1)}, "ready")
        .claimed(3, 1, 2, failures=1)
        .committed(4, "queue.fail", {"claim": claim(3, 1, 2)}, "ready"),
        HistoryBuilder()
        .put(0, 1)
        .claimed(1, 1, 1)
        .claimed(12, 1, 2, expiries=1)
        .claimed(23, 1, 3, expiries=2),
        HistoryBuilder().put(0, 1).claimed(1, 1, 1).claimed(12, 1, 2, expiries=0),
    ],
    "S4": [
        HistoryBuilder()
        .put(0, 1)
        .audit(1, queues=queue_rows(items={1: item()}, ready=[[0, 1]], counts={"ready": 2})),
        HistoryBuilder().audit(1, blobs={"data": {"ab": b""}, "refs": {"ab": 1}, "idle": []}),
        HistoryBuilder().audit(1, leases={"w": {"state": "held", "worker": "a", "by": ["b"]}}),
    ],
    "J1": [
        HistoryBuilder().committed(
            1,
            "queue.claim",
            {"queue": "fx"},
            [
                {
                    **claim(1, 1, 1),
                    "queue": "fx",
                    "payload": msgspec.msgpack.encode(["w", 1, 0]),
                }
            ],
        )
    ],
    "J2": [
        HistoryBuilder().delivered(0, 1, "k1").cycled(1, 1, (1, "k1")),
        HistoryBuilder()
        .delivered(0, 1, "k1")
        .cycled(1, 0, (1, "k1"))
        .audit(2, inboxes=inbox(cursor=1), journals={}),
        HistoryBuilder()
        .committed(0, "open_append", {"subject": "j", "body": b"1"}, 1)
        .committed(1, "open_append", {"subject": "j", "body": b"2"}, 1),
    ],
    "J4": [
        HistoryBuilder()
        .delivered(0, 1, "k1")
        .cycled(1, 0, (1, "k1"))
        .audit(2, inboxes=inbox(cursor=1), journals=journal(floor=2)),
        HistoryBuilder()
        .delivered(0, 1, "k1")
        .cycled(1, 0, (1, "k1"))
        .committed(2, "save_snapshot", {"world": "w", "height": 1, "state": b"wrong"}),
        HistoryBuilder()
        .delivered(0, 1, "k1")
        .cycled(1, 0, (1, "k1"))
        .audit(
            2,
            inboxes=inbox(cursor=1),
            journals=journal(entry(1, "k1")),
            snapshots={"w": {"states": {}, "baseline": {"height": 1, "hash": b""}}},
        ),
    ],
    "I1": [
        HistoryBuilder().delivered(0, 1, "k1").audit(1, inboxes=inbox(last_seq=0)),
        HistoryBuilder().delivered(0, 1, "k1").delivered(1, 1, "k2"),
    ],
    "I2": [
        HistoryBuilder().delivered(0, 1, "k1").delivered(0, 2, "k2").cycled(1, 0, (2, "k2")),
        HistoryBuilder()
        .delivered(0, 1, "k1")
        .cycled(1, 0, (1, "k1"))
        .audit(2, inboxes=inbox(1, cursor=0), journals=journal(entry(1, "k1"))),
    ],
    "I3": [
        HistoryBuilder().delivered(0, 1, "k1").audit(1, inboxes=inbox(cursor=1)),
        HistoryBuilder()
        .delivered(0, 1, "k1")
        .cycled(1, 0, (1, "k1"))
        .audit(2, inboxes=inbox(1, cursor=1), journals=journal(entry(1, "k1"))),
    ],
    "I4": [
        HistoryBuilder().delivered(0, 1, "k", result="unknown").delivered(1, 2, "k"),
        HistoryBuilder().audit(1, inboxes=inbox(1)),
        HistoryBuilder()
        .delivered(0, 1, "k", txn_no=7)
        .delivered(1, 1, "k", already=True, txn_no=7),
    ],
    "I5": [HistoryBuilder().delivered(0, 1, "k").delivered(1, 1, "k", body=b"other", already=True)],
    "T1": [
        HistoryBuilder().put(0, 1, not_before_s=5).claimed(4, 1, 1),
        HistoryBuilder().put(0, 1, not_before_s=1).claimed(2, 1, 1).acked(3, 1, 1).acked(4, 1, 1),
    ],
    "T2": [
        HistoryBuilder()
        .put(0, 1, not_before_s=1)
        .record(9, "quiet", {"waiting": []}, True)
        .audit(
            9,
            queues=queue_rows(
                items={1: item(not_before_ns=S)}, delayed=[[S, 1]], counts={"delayed": 1}
            ),
        )
    ],
    "D1": [
        HistoryBuilder()
        .put(0, 1)
        .claimed(1, 1, 1)
        .acked(2, 1, 1)
        .audit(3, queues=queue_rows(expiry=[[9, 1]], owners=[["a", 1]], counts={"claimed": 1})),
        HistoryBuilder()
        .put(0, 1)
        .claimed(1, 1, 1)
        .committed(2, "queue.fail", {"claim": claim(1, 1, 1), "retryable": False}, "dead")
        .audit(
            3, queues=queue_rows(dead={1: letter(payload=b"")}, died=[[1, 1]], counts={"dead": 1})
        ),
    ],
    "D2": [
        HistoryBuilder().put(0, 1).claimed(1, 1, 1).claimed(5, 1, 2),
        HistoryBuilder().put(0, 1).put(1, 1),
        HistoryBuilder().put(0, 1).audit(1, queues=queue_rows()),
        HistoryBuilder()
        .put(0, 1)
        .claimed(1, 1, 1)
        .committed(2, "queue.dead_letter", {"claim": claim(1, 1, 1)})
        .audit(
            3,
            queues=queue_rows(
                items={1: item()},
                ready=[[0, 1]],
                dead={1: letter(failures=0)},
                died=[[1, 1]],
                counts={"ready": 1, "dead": 1},
            ),
        ),
    ],
    "D3": [
        HistoryBuilder()
        .delivered(0, 1, "k")
        .committed(1, "dedupe.expire", {"scope": "inbox"}, 1)
        .delivered(2, 2, "k"),
        HistoryBuilder()
        .committed(
            0,
            "inbox.put",
            {"world": "w", "key": "k", "body": b"x", "issued_ns": 0},
            {"seq": 1, "already": False},
        )
        .committed(
            30,
            "inbox.put",
            {"world": "w", "key": "k", "body": b"x", "issued_ns": 0},
            {"seq": 2, "already": False},
        ),
    ],
    "R3": [HistoryBuilder().record(9, "quiet", {"waiting": ["q/1"]}, False)],
    "B1": [
        HistoryBuilder().record(
            0,
            "boot",
            {"marker": b"other", "bootstrap": True, "expected": b"ours"},
            {"outcome": "opened", "changed": False},
        ),
        HistoryBuilder().record(
            0,
            "boot",
            {"marker": b"other", "bootstrap": True, "expected": b"ours"},
            {"outcome": "schema_mismatch", "changed": True},
        ),
        HistoryBuilder().record(
            0,
            "boot",
            {"marker": None, "bootstrap": False, "expected": b"ours"},
            {"outcome": "opened", "changed": False},
        ),
    ],
}


@pytest.mark.parametrize(
    ("number", "story"),
    [(number, story) for number, stories in BAD.items() for story in stories],
    ids=[f"{number}-{n}" for number, stories in BAD.items() for n in range(len(stories))],
)
def test_checker_reports_a_violating_history(number: str, story: HistoryBuilder) -> None:
    violations = CHECKERS[number](story.history)
    assert violations
    assert {violation.number for violation in violations} == {number}
    assert not any("unreadable" in violation.what for violation in check_all(story.history))


def test_every_checker_has_a_violating_history() -> None:
    numbers_elsewhere = {number for number, _, _ in (*WRONG, *EFFECTS, *LEDGERS, *TASKS)}
    dispatches = {number for number, _ in (*DISPATCHES.values(), *FLOWS.values())}
    assert BAD.keys() | numbers_elsewhere | dispatches == CHECKERS.keys()


def test_checkers_accept_a_valid_history() -> None:
    state = fold(b"", entry(1, "k1"))
    story = (
        HistoryBuilder()
        .granted(0, "a", 1)
        .delivered(0, 1, "k1")
        .delivered(1, 1, "k1", already=True)
        .failed(1, "inbox.put", {"world": "w", "key": "k1", "body": b"other"}, "key_conflict")
        .failed(
            2,
            "lease.acquire",
            {"resource": "w", "worker": "b", "incarnation": "1", "ttl_ns": S},
            "held",
        )
        .cycled(2, 0, (1, "k1"))
        .committed(3, "save_snapshot", {"world": "w", "height": 1, "state": state})
        .put(3, 1)
        .claimed(4, 1, 1)
        .claimed(15, 1, 2, expiries=1)
        .acked(16, 1, 2)
        .granted(17, "b", 2)
        .record(18, "quiet", {"waiting": []}, True)
        .audit(
            18,
            queues=queue_rows(counts={"done": 1}),
            inboxes=inbox(cursor=1),
            journals=journal(entry(1, "k1")),
            lease_log=log(("granted", 1), ("expired", 1), ("granted", 2)),
        )
    )
    assert check_all(story.history) == []


def test_checkers_ignore_events_undone_by_a_restore() -> None:
    story = (
        HistoryBuilder()
        .delivered(0, 1, "k1")
        .record(1, "backup", {"id": 1})
        .delivered(2, 2, "k2")
        .audit(3, inboxes=inbox(1, 2))
        .record(3, "restore", {"id": 1, "generation": 2})
        .delivered(4, 2, "k3")
        .audit(5, inboxes={"w": {**inbox(1, 2)["w"]}})
    )
    assert check_all(story.history) == []


def test_unreadable_history_is_a_violation_not_an_error() -> None:
    story = HistoryBuilder().committed(0, "queue.claim", {"queue": "q"}, [{"nonsense": True}])
    assert any("unreadable" in violation.what for violation in check_all(story.history))
