"""Checkers of flows and schedules: each one reports a hand-written bad history, and accepts the valid one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.sim.history import History
from holdfast.sim.row_decoder_flows import UNIVERSE
from tests.simulation import check_flows, check_schedules
from tests.simulation.violation import Violation

Plain = dict[str, Any]

RUNNING, WAITING, COMPLETED, FAILED = 0, 1, 4, 5
GRANT = {"seq": 7, "lease": 3, "expires_ns": 100}


def outcome(name: str, occurrence: int = 1, **fields: Any) -> Plain:
    step = {"name": name, "occurrence": occurrence, "position": 1, "digest": b"", "attempts": 1}
    return {"kind": "completed", "decided_ns": 10, "mail": 0, **step, **fields}


def record(kind: str, **fields: Any) -> Plain:
    return {"kind": kind, "decided_ns": 10, **fields}


def received(number: int, text: bytes = b"a") -> Plain:
    value = msgspec.msgpack.encode(["Note", text])
    return outcome("hf.receive", number, mail=number, value=value)


class FlowHistory:
    """Builder of a history of one flow, 1, with the activation task 7."""

    def __init__(self) -> None:
        self.history = History()
        self.commits = 0
        self.committed(0, "flows.start", [{"seq": 1, "generation": 1}])
        self.committed(0, "tasks.lease", {"grants": [GRANT]})

    def committed(self, at_ns: int, op: str, value: Any = None, **args: Any) -> FlowHistory:
        self.commits += 1
        arguments = {"universe": UNIVERSE, **args}
        self.history.add(at_ns, op, arguments, value=value, commit_no=self.commits)
        return self

    def work(self, at_ns: int, *records: Plain, lease: int = 3, opens: Any = ()) -> FlowHistory:
        work = {"flow": 1, "run": 1, "task": 7, "lease": lease, "opens": list(opens)}
        return self.committed(at_ns, "flows.commit", work={**work, "records": list(records)})

    def call(self, at_ns: int, name: str) -> FlowHistory:
        call = {"flow": 1, "run": 1, "name": name, "occurrence": 1, "task": 7, "lease": 3}
        self.history.add(at_ns, "flow.call", call)
        return self

    def send(self, number: int, text: bytes = b"a") -> FlowHistory:
        mail = {"type": "Note", "value": text}
        return self.committed(5, "flows.send", number, flow_seq=1, mail=mail)

    def audit(self, *records: Plain, state: int = COMPLETED, **more: Any) -> FlowHistory:
        head = {"state": state, "run": 1, "records": len(records), "task": 0, "cancelled": False,
                "timed_out": False, "end_state": 0, **more.pop("head", {})}  # fmt: skip
        flows = {
            "heads": {1: head}, "bodies": {1: {"parent": None}}, "open": {}, "due": [], "mail": {},
            "records": {"1/1": dict(enumerate(records, start=1))}, "children": [], **more,
        }  # fmt: skip
        tasks = {"bodies": {}, "statuses": {}}
        rows = {"flows": {UNIVERSE: flows}, "tasks": {UNIVERSE: tasks}}
        self.history.add(50, "audit", value=rows)
        return self


UNDO_A, UNDO_B = record("undo", name="a", occurrence=1), record("undo", name="b", occurrence=1)
STARTED = record("compensation", state=FAILED)
ENDED = record("ended", state=FAILED)
SLEEP = {"name": "hf.sleep", "occurrence": 1, "wait_ns": 30}


def undone(*names: str) -> list[Plain]:
    return [UNDO_A, UNDO_B, STARTED, *(outcome(f"undo:{name}") for name in names), ENDED]


def occurrence(seq: int, **fields: Any) -> Plain:
    return {"state": 2, "cause": "due", "decided_ns": 5, "reason": "", "seq": seq,
            "is_flow": False, **fields}  # fmt: skip


class ScheduleHistory:
    """Builder of a history of one schedule."""

    def __init__(self) -> None:
        self.history = History()
        self.history.add(0, "schedules.create", {"universe": UNIVERSE}, commit_no=1)

    def pause(self, at_ns: int, paused: bool) -> ScheduleHistory:
        arguments = {"universe": UNIVERSE, "name": "s", "paused": paused}
        self.history.add(at_ns, "schedules.set_paused", arguments, value=True, commit_no=2)
        return self

    def audit(
        self, *rows: Plain, overlap: str = "skip", keys: Any = None, ended: bool = True
    ) -> ScheduleHistory:
        schedule = {"definition": {"overlap": overlap}, "queued": 0}
        schedules = {
            "schedules": {"s": schedule}, "occurrences": {"s": dict(enumerate(rows, start=1))},
            "queue": {}, "due": [],
        }  # fmt: skip
        keys = {row["seq"]: f"s@{at}" for at, row in enumerate(rows) if row["seq"]} | (keys or {})
        tasks = {
            "bodies": {seq: {"key": key, "args": b"\x90"} for seq, key in keys.items()},
            "statuses": {seq: {"state": 2 if ended else 0} for seq in keys},
        }
        rows_of = {"schedules": {UNIVERSE: schedules}, "tasks": {UNIVERSE: tasks}}
        self.history.add(50, "audit", value=rows_of)
        return self


BAD: dict[str, tuple[str, FlowHistory | ScheduleHistory]] = {
    "commit after the lease": ("X1", FlowHistory().work(100)),
    "commit under another lease": ("X1", FlowHistory().work(10, lease=2)),
    "outcome committed twice": ("X1", FlowHistory().work(10, outcome("a")).work(11, outcome("a"))),
    "recorded step runs again": ("X1", FlowHistory().work(10, outcome("a")).call(11, "a")),
    "two outcomes of one step": ("X1", FlowHistory().audit(outcome("a"), outcome("a"))),
    "record after the end": ("X1", FlowHistory().audit(ENDED, outcome("a"))),
    "record that changes": ("X1", FlowHistory().audit(outcome("a")).audit(outcome("b"))),
    "compensations in order of registration": ("X2", FlowHistory().audit(*undone("a", "b"))),
    "compensation left out": ("X2", FlowHistory().audit(*undone("b"))),
    "failure without compensations": ("X2", FlowHistory().audit(UNDO_A, ENDED)),
    "compensation before its start": ("X2", FlowHistory().audit(UNDO_A, outcome("undo:a"))),
    "sleep that ends early": (
        "X2", FlowHistory().work(1, opens=[SLEEP]).audit(outcome("hf.sleep", decided_ns=30)),
    ),
    "flow that waits for nothing": ("X2", FlowHistory().audit(state=WAITING)),
    "flow that runs without an activation": ("X2", FlowHistory().audit(state=RUNNING)),
    "event received twice": ("X2", FlowHistory().send(1).audit(
        received(1), outcome("hf.receive", 2, mail=1, value=received(1)["value"]))),
    "events out of order": ("X2", FlowHistory().send(1).send(2).audit(received(2), received(1))),
    "event with another body": ("X2", FlowHistory().send(1, b"b").audit(received(1))),
    "lost event": ("X2", FlowHistory().send(1).audit()),
    "occurrence that starts again": ("X3", ScheduleHistory().audit(
        occurrence(3)).audit(occurrence(4))),
    "two occurrences with one task": ("X3", ScheduleHistory().audit(occurrence(3), occurrence(3))),
    "task without an occurrence": ("X3", ScheduleHistory().audit(keys={9: "s@9"})),
    "occurrences that overlap": ("X3", ScheduleHistory().audit(
        occurrence(3), occurrence(4), ended=False)),
    "occurrence used in a pause": ("X3", ScheduleHistory().pause(1, True).pause(9, False).audit(
        occurrence(3))),
    "backfilled occurrence that is skipped": ("X3", ScheduleHistory().audit(
        occurrence(0, state=3, cause="backfill", reason="overlap"))),
}  # fmt: skip


def find(history: History) -> list[Violation]:
    return [*check_flows.findings(history), *check_schedules.findings(history)]


@pytest.mark.parametrize("name", BAD)
def test_checker_of_flows_reports_a_violating_history(name: str) -> None:
    number, built = BAD[name]
    assert {violation.number for violation in find(built.history)} == {number}


def test_checkers_of_flows_accept_a_valid_history() -> None:
    flow = FlowHistory().call(1, "a").work(2, outcome("a"), opens=[SLEEP]).send(1).send(2)
    records = [
        outcome("a"), UNDO_A, UNDO_B, outcome("hf.sleep", decided_ns=32), received(1), received(2),
        STARTED, outcome("undo:b"), outcome("undo:a"), ENDED,
    ]  # fmt: skip
    flow.audit(*records, state=FAILED)
    schedule = ScheduleHistory().pause(6, True).audit(occurrence(3), occurrence(4))
    for built in (flow, schedule):
        assert not find(built.history)
