"""Checkers of the run ledger accept a valid log and report each violation.

A `LedgerHistory` is built entry by entry. Each entry is one commit of the ledger service with its rows, in the
layout of the store.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from holdfast.clock import S
from holdfast.sim.history import History
from tests.simulation.check_ledger import findings
from tests.simulation.checkers import CHECKERS, check_all
from tests.simulation.model_ledger import MOVES, LedgerModel

Plain = dict[str, Any]
WriteHistory = Callable[["LedgerHistory"], object]

RUN = "job-1"
SIZE = 8
pack = msgspec.msgpack.encode


class LedgerHistory:
    """History of a run with eight rows in one page. Recorded values are valid unless a test overrides them."""

    def __init__(
        self, *, attempts_max: int = 2, retries_max: int = 0, ahead: int = 0, whole: bool = False
    ) -> None:
        self.history = History()
        self.history.add(0, "config", {"claims_whole": whole})
        self.height = 0
        self.entries: list[bytes] = []
        self._now_s = 0.0
        # The model only computes states here. Its violations are ignored.
        self._ledger = LedgerModel(RUN, lambda number, what: None)
        self.append("opened", SIZE, [attempts_max, retries_max, S, S, 8, 0, ahead, S, 2.0, S])

    def append(
        self,
        kind: str,
        *fields: Any,
        at_s: float | None = None,
        results: Plain | None = None,
        checkpoint: bytes | None = None,
        live: Plain | None = None,
        stored: bool = True,
    ) -> "LedgerHistory":
        """Commit one entry with its results. `stored` adds the outcomes without a result."""
        self._now_s = self._now_s + 0.1 if at_s is None else at_s
        body = pack([kind, int(self._now_s * S), *fields])
        self.entries.append(body)
        self._ledger.apply(body)
        self.height += 1
        self.record("ledger.live", height=self.height, **(live or {}))
        puts = []
        other_outcomes = _outcomes_without_result(kind, fields) if stored else []
        if results or other_outcomes:
            rows = [[int(seq[1:]), value] for seq, value in (results or {}).items()]
            batch = pack(rows) if rows else b""
            puts.append(
                [_chunk_key(self.height), pack([0, b"", batch, other_outcomes, [], 0.0, 0, []])]
            )
        args = {"bodies": [body], "puts": puts, "checkpoint": checkpoint}
        self.history.add(
            self._ns, "_write", args, actor="a", incarnation="1", commit_no=self.height
        )
        return self

    @property
    def _ns(self) -> int:
        return int(self._now_s * S)

    def record(self, op: str, **args: Any) -> "LedgerHistory":
        self.history.add(self._ns, op, {"run": RUN, **args}, actor="a", incarnation="1")
        return self

    # -- entries and events --------------------------------------------------------------------

    def leased(
        self, epoch: int, lo: int, hi: int, *, begun: int = 0, attempt: int = 1, alone: bool = False
    ) -> "LedgerHistory":
        started = [[lo, lo + begun]] if begun else []
        return self.append("leased", epoch, "t", [[lo, hi, attempt]], started, alone)

    def advanced(
        self, epoch: int, n: int, *, done: Any = (), retried: Any = (), begun: Any = (), **more: Any
    ) -> "LedgerHistory":
        fields = [epoch, n, b"d", done, retried, begun, ""]
        return self.append("advanced", *fields, **more)

    def succeeded(self, epoch: int, n: int, seq: int) -> "LedgerHistory":
        done = [[seq, seq + 1, 3, 0, 0]]
        return self.advanced(epoch, n, done=done, results={f"s{seq}": f"v{seq}"})

    def failed(self, epoch: int, n: int, seq: int, error: int) -> "LedgerHistory":
        return self.advanced(epoch, n, done=[[seq, seq + 1, 5, error, 0]])

    def retried(
        self, epoch: int, n: int, seq: int, *, error: int = 1, until_s: float = 0
    ) -> "LedgerHistory":
        return self.advanced(epoch, n, retried=[[seq, seq + 1, error, int(until_s * S)]])

    def reclaimed(
        self, epoch: int, *, suspects: Any = (), failed: Any = (), why: str = "closed", **more: Any
    ) -> "LedgerHistory":
        return self.append("reclaimed", epoch, why, suspects, failed, [], **more)

    def sink_committed(self, lo: int, hi: int, *rows: int) -> "LedgerHistory":
        return self.record("sink.commit", lo=lo, hi=hi, rows=[[seq, f"v{seq}"] for seq in rows])

    def called(self, epoch: int, seq: int, key: str = "") -> "LedgerHistory":
        key = key or f"{RUN}/{seq}"
        return self.record("ledger.call", seq=seq, attempt=1, epoch=epoch, key=key)

    def acked(self, epoch: int, n: int, held: int = 0) -> "LedgerHistory":
        return self.record("ledger.acked", epoch=epoch, n=n, digest=b"d", told={"held": held})

    def board(self, op: str = "ledger.opened", **wrong: Any) -> "LedgerHistory":
        return self.record(op, height=self.height, **{**self.board_state(), **wrong})

    def board_state(self) -> Plain:
        """State of the run scheduler after the last entry."""
        ledger = self._ledger
        counts = ledger.counts()
        return {
            "digest": f"{self.height}",
            "state": bytes(ledger.state),
            "attempts": bytes(ledger.attempts),
            "counts": counts,
            "counters": {
                "terminalCount": sum(counts[3:7]),
                "inFlightCount": counts[2],
                "dispatchedCount": counts[1],
                "committedCount": counts[7],
            },
            "ended": list(ledger.ended),
            "prefix": ledger.terminal_prefix(),
        }

    def encode_checkpoint(self, state: list[int] | None = None) -> bytes:
        """Encode a checkpoint of the current rows, or of `state`."""
        ledger = self._ledger
        rows = ledger.state if state is None else state
        runs = [[1, code, tries, 0] for code, tries in zip(rows, ledger.attempts, strict=True)]
        fields: list[Any] = [0] * 17
        fields[6], fields[15] = ledger.next_commit, [[runs, b""]]
        return pack(fields)

    def audit(self, *, floor: int = 1, entries: Any = None, states: Any = None) -> "LedgerHistory":
        all_entries = {at: {"body": body, "blob": b""} for at, body in enumerate(self.entries, 1)}
        all_entries = {at: entry for at, entry in all_entries.items() if at >= floor}
        head = {"height": self.height, "floor": floor}
        rows: Plain = {
            "queues": {}, "inboxes": {}, "dedupe": {}, "leases": {}, "worlds": {},
            "blobs": {"data": {}, "refs": {}, "idle": []}, "lease_log": [], "generation": 1,
            "journals": {f"run/{RUN}": {"head": head, "entries": all_entries if entries is None else entries}},
            "snapshots": {f"run/{RUN}": states or {"states": {}, "baseline": None}},
        }  # fmt: skip
        self.history.add(self._ns, "audit", value=rows)
        return self


def _outcomes_without_result(kind: str, fields: Sequence[Any]) -> list[list[Any]]:
    """Outcomes without a result of an entry."""
    ended = []
    if kind == "advanced":
        ended = [(lo, hi, code) for lo, hi, code, *_ in fields[3] if code != 3]
    elif kind == "reclaimed":
        ended = [(lo, hi, 5) for lo, hi in fields[3]]
    return [[seq, code, 1, 0, ""] for lo, hi, code in ended for seq in range(lo, hi)]


def _chunk_key(height: int) -> bytes:
    """Space 14, "o", the run, page 0, a height below 256: as `store/schema.py` lays it out."""
    return b"\x15\x0e\x02o\x00\x02" + RUN.encode() + b"\x00\x14\x15" + bytes([height])


def checkpoint(log: LedgerHistory, at: int) -> Plain:
    return {
        "states": {at: {"state": log.encode_checkpoint()}},
        "baseline": {"height": at, "hash": b""},
    }


RIGHT: dict[str, WriteHistory] = {
    "a run from its first row to its last": lambda log: (
        log.leased(1, 0, 4, begun=2)
        .called(1, 0)
        .called(1, 1)
        .succeeded(1, 1, 0)
        .acked(1, 1)
        .acked(1, 1)
        .retried(1, 2, 1, until_s=1.0)
        .advanced(1, 3, begun=[[2, 4]])
        .called(1, 2)
        .called(1, 3)
        .reclaimed(1, suspects=[[2, 4]])
        .board()
        .leased(2, 2, 3, attempt=2, alone=True)
        .advanced(2, 1, begun=[[2, 3]])
        .called(2, 2)
        .succeeded(2, 2, 2)
        .leased(3, 3, 4, attempt=2, alone=True)
        .advanced(3, 1, begun=[[3, 4]])
        .called(3, 3)
        .reclaimed(3, failed=[[3, 4]])
        .append("ripened", at_s=2.0)
        .leased(4, 1, 2, attempt=2)
        .advanced(4, 1, begun=[[1, 2]])
        .failed(4, 2, 1, 1)
        .sink_committed(0, 4, 0, 2)
        .append("committed", 4, 3)
        .append("cancelling", 5 * S, at_s=4.0)
        .sink_committed(4, 8)
        .append("committed", 8, 7)
        .board()
        .audit()
        .record("ledger.over", status="cancelled")
    ),
    "a checkpoint, and a log that was cut below it": lambda log: (
        log.leased(1, 0, 2)
        .append("ripened", checkpoint=log.encode_checkpoint())
        .audit(floor=2, states=checkpoint(log, 3))
    ),
    "halted by somebody who was careless": lambda log: log.record("ledger.careless").append(
        "halted", 0, "COMMITTED", "IN_FLIGHT", "t", ""
    ),
    "another driver, whose tasks are others": lambda log: (
        log.leased(1, 0, 2)
        .record("ledger.anew", epoch=1)
        .reclaimed(1, why="superseded")
        .leased(2, 0, 2)
    ),
}

# Checker number, description and violating history.
BAD: list[tuple[str, str, WriteHistory]] = [
    ("S1", "a row that nobody began ends", lambda log: log.leased(1, 0, 2).succeeded(1, 1, 0)),
    ("S1", "a row begun that another grant has", lambda log: (
        log.leased(1, 0, 2).leased(2, 2, 4).advanced(2, 1, begun=[[0, 1]]))),
    ("S1", "rows granted twice", lambda log: log.leased(1, 0, 2).leased(2, 1, 3)),
    ("S1", "committed, and not final", lambda log: log.sink_committed(0, 1).append("committed", 1, 0)),
    ("S1", "begun while cancelling", lambda log: (
        log.leased(1, 0, 2, begun=1).append("cancelling", int(1.3 * S), at_s=0.3)
        .advanced(1, 1, begun=[[1, 2]]))),
    ("S1", "a move after the run was halted", lambda log: (
        log.record("ledger.careless").append("halted", 0, "", "", "", "").leased(1, 0, 2))),
    ("S1", "an epoch given twice", lambda log: log.leased(1, 0, 2).leased(1, 2, 4)),
    ("S1", "finished by its record, cancelled by its log", lambda log: (
        log.append("cancelling", int(1.2 * S), at_s=0.2).sink_committed(0, 8).append("committed", 8, 7)
        .record("ledger.over", status="finished"))),
    ("S2", "a report counted twice", lambda log: (
        log.leased(1, 0, 2, begun=2).succeeded(1, 1, 0).succeeded(1, 1, 1))),
    ("S2", "a row ends twice in one attempt", lambda log: (
        log.leased(1, 0, 2, begun=2).succeeded(1, 1, 0).failed(1, 2, 0, 4))),
    ("S2", "a committed row ends again", lambda log: (
        log.leased(1, 0, 2, begun=2).succeeded(1, 1, 0).sink_committed(0, 1, 0).append("committed", 1, 0)
        .succeeded(1, 2, 0))),
    ("S2", "tried again as the same attempt", lambda log: (
        log.leased(1, 0, 2, begun=2).retried(1, 1, 0).leased(2, 0, 1, attempt=1))),
    ("S2", "one report, two answers", lambda log: (
        log.leased(1, 0, 2, begun=2).succeeded(1, 1, 0).acked(1, 1, 1).acked(1, 1, 0))),
    ("S2", "halted, and nobody was careless", lambda log: log.append("halted", 0, "", "", "", "")),
    ("S3", "tried again beyond its budget", lambda log: (
        log.leased(1, 0, 1, begun=1).retried(1, 1, 0).leased(2, 0, 1, attempt=2, begun=1)
        .retried(2, 1, 0))),
    ("S3", "given up with budget left", lambda log: log.leased(1, 0, 1, begun=1).failed(1, 1, 0, 1)),
    ("S3", "bad input tried again", lambda log: (
        log.leased(1, 0, 1, begun=1).retried(1, 1, 0, error=4))),
    ("S4", "a counter that is off", lambda log: log.leased(1, 0, 2).board(counts=[7, 1] + [0] * 6)),
    ("S4", "a prefix that is off by one", lambda log: (
        log.leased(1, 0, 2, begun=2).succeeded(1, 1, 0).board(prefix=2))),
    ("S5", "begun rows that a reclaim forgets", lambda log: (
        log.leased(1, 0, 2, begun=1).reclaimed(1))),
    ("S5", "failed instead of tried again", lambda log: (
        log.leased(1, 0, 2, begun=1).reclaimed(1, failed=[[0, 1]]))),
    ("S5", "expired before its time", lambda log: (
        log.leased(1, 0, 2).reclaimed(1, why="expired", at_s=0.9))),
    ("S5", "expired although it was promised more", lambda log: (
        log.leased(1, 0, 2).record("ledger.beat", epoch=1, expires_ns=2 * S, service="a/1")
        .reclaimed(1, why="expired", at_s=1.5))),
    ("S5", "a suspect among others", lambda log: (
        log.leased(1, 0, 2, begun=1).reclaimed(1, suspects=[[0, 1]])
        .append("leased", 2, "t", [[0, 1, 2], [1, 2, 1]], [], False))),
    ("S5", "two suspects at once", lambda log: (
        log.leased(1, 0, 2, begun=2).reclaimed(1, suspects=[[0, 2]])
        .leased(2, 0, 2, attempt=2, alone=True))),
    ("S5", "a grace that is over too soon", lambda log: (
        log.leased(1, 0, 2, begun=1).append("cancelling", int(1.3 * S), at_s=0.3)
        .append("cancelled", at_s=0.5))),
    ("S6", "a report of a grant that was reclaimed", lambda log: (
        log.leased(1, 0, 2, begun=1).reclaimed(1, suspects=[[0, 1]]).succeeded(1, 1, 0))),
    ("S6", "a report of a driver that is gone", lambda log: (
        log.leased(1, 0, 2, begun=1).record("ledger.anew", epoch=1).leased(2, 2, 4)
        .succeeded(1, 1, 0))),
    ("J1", "called before its begin is durable", lambda log: log.leased(1, 0, 2).called(1, 0)),
    ("J1", "acknowledged, and not in the log", lambda log: log.leased(1, 0, 2).acked(1, 1)),
    ("J1", "told that all is over, and it is not", lambda log: (
        log.leased(1, 0, 2).record("ledger.finished", lo=0, hi=None))),
    ("J1", "in the sink, and not final", lambda log: log.leased(1, 0, 2).sink_committed(0, 1)),
    ("J1", "a success without its result", lambda log: (
        log.leased(1, 0, 1, begun=1).advanced(1, 1, done=[[0, 1, 3, 0, 0]]))),
    ("J1", "a failure without its outcome", lambda log: (
        log.leased(1, 0, 1, begun=1).advanced(1, 1, done=[[0, 1, 5, 2, 0]], stored=False))),
    ("J1", "a skip that is stored as a failure", lambda log: (
        log.leased(1, 0, 2, begun=2).advanced(1, 1, done=[[0, 1, 4, 0, 0]], stored=False)
        .failed(1, 2, 1, 2))),
    ("J2", "an entry that is not what was committed", lambda log: (
        log.leased(1, 0, 2).audit(entries={
            1: {"body": log.entries[0], "blob": b""}, 2: {"body": b"x", "blob": b""}}))),
    ("J2", "a height that is missing", lambda log: (
        log.leased(1, 0, 2).audit(entries={2: {"body": log.entries[1], "blob": b""}}))),
    ("J4", "cut off, and nothing to begin from", lambda log: log.leased(1, 0, 2).audit(floor=2)),
    ("J5", "a board that is not what the log says", lambda log: (
        log.leased(1, 0, 2).board(state=bytes(8)))),
    ("J5", "rebuilt, and not what it was", lambda log: (
        log.leased(1, 0, 2).append("ripened", live={**log.board_state(), "digest": "x"}).board())),
    ("J5", "a checkpoint of other rows", lambda log: (
        log.leased(1, 0, 2).append("ripened", checkpoint=log.encode_checkpoint([0] * 8)))),
    ("J5", "a checkpoint at another height", lambda log: (
        log.leased(1, 0, 2).append("ripened", checkpoint=log.encode_checkpoint())
        .audit(states=checkpoint(log, 2)))),
    ("E3", "two calls under two keys", lambda log: (
        log.leased(1, 0, 1, begun=1).called(1, 0, "another"))),
    ("T1", "tried again before its time", lambda log: (
        log.leased(1, 0, 1, begun=1).retried(1, 1, 0, until_s=9).leased(2, 0, 1, attempt=2))),
    ("P1", "logged as committed, and not in the sink", lambda log: (
        log.leased(1, 0, 1, begun=1).succeeded(1, 1, 0).append("committed", 1, 0))),
    ("P1", "a success that the sink lacks", lambda log: (
        log.leased(1, 0, 1, begun=1).succeeded(1, 1, 0).sink_committed(0, 1))),
    ("P1", "a gap in the sink", lambda log: (
        log.leased(1, 0, 2, begun=2).succeeded(1, 1, 0).succeeded(1, 2, 1).sink_committed(1, 2, 1))),
    ("P1", "twice in the sink", lambda log: (
        log.leased(1, 0, 1, begun=1).succeeded(1, 1, 0).sink_committed(0, 1, 0).sink_committed(0, 1, 0))),
    ("P1", "over before its end", lambda log: log.record("ledger.over", status="finished")),
    ("P2", "handed out again after its end", lambda log: (
        log.leased(1, 0, 1, begun=1).succeeded(1, 1, 0).leased(2, 0, 1))),
    ("P2", "called twice by one grant", lambda log: (
        log.leased(1, 0, 1, begun=1).called(1, 0).called(1, 0))),
]  # fmt: skip


@pytest.mark.parametrize("tell", RIGHT.values(), ids=RIGHT)
def test_ledger_checkers_accept_a_valid_log(tell: WriteHistory) -> None:
    log = LedgerHistory()
    tell(log)
    assert check_all(log.history) == []


@pytest.mark.parametrize(
    ("number", "tell"),
    [(number, tell) for number, _, tell in BAD],
    ids=[f"{number}-{what}" for number, what, _ in BAD],
)
def test_ledger_checker_reports_a_violating_log(number: str, tell: WriteHistory) -> None:
    log = LedgerHistory()
    tell(log)
    assert number in {violation.number for violation in findings(log.history)}
    assert CHECKERS[number](log.history)


def test_ledger_checker_gives_the_retry_budget_to_the_lowest_rows() -> None:
    valid = LedgerHistory(retries_max=1).leased(1, 0, 2, begun=2)
    valid.reclaimed(1, suspects=[[0, 1]], failed=[[1, 2]])
    assert findings(valid.history) == []
    violating = LedgerHistory(retries_max=1).leased(1, 0, 2, begun=2)
    violating.reclaimed(1, suspects=[[1, 2]], failed=[[0, 1]])
    assert {violation.number for violation in findings(violating.history)} >= {"S5"}


def test_ledger_checker_reports_rows_too_far_ahead_of_the_commit() -> None:
    assert findings(LedgerHistory(ahead=2).leased(1, 0, 3).history) == []
    log = LedgerHistory(ahead=2).leased(1, 0, 3).leased(2, 3, 4)
    assert {violation.number for violation in findings(log.history)} == {"S3"}


def test_ledger_checker_reports_a_suspect_granted_too_late() -> None:
    log = (
        LedgerHistory(whole=True)
        .leased(1, 0, 2, begun=1)
        .reclaimed(1, suspects=[[0, 1]])
        .leased(2, 1, 2)
    )
    assert {violation.number for violation in findings(log.history)} == {"S5"}


def test_ledger_model_has_twelve_moves() -> None:
    assert len(MOVES) == 12
