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

RUNNING, WAITING, COMPLETED, FAILED, CANCELLED = 0, 1, 4, 5, 6
CONTINUE, SUSPEND, AGAIN = 0, 1, 3
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
        # The dead letters of failed compensations.
        self.letters: list[Plain] = []
        self.start(1)
        self.committed(0, "tasks.lease", {"grants": [GRANT]})

    def committed(self, at_ns: int, op: str, value: Any = None, **args: Any) -> FlowHistory:
        self.commits += 1
        arguments = {"universe": UNIVERSE, **args}
        self.history.add(at_ns, op, arguments, value=value, commit_no=self.commits)
        return self

    def start(self, seq: int, key: str = "") -> FlowHistory:
        new = [{"spec": {"name": "order"}, "key": key}]
        return self.committed(0, "flows.start", [{"seq": seq, "generation": 1}], new=new)

    def work(
        self, at_ns: int, *records: Plain, opens: Any = (), known: Any = (), **more: Any
    ) -> FlowHistory:
        """A commit of the worker. `known` are the records of the answer."""
        answer = {"applied": True, "suspended": False, "records": list(known)}
        return self.committed(at_ns, "flows.commit", answer, work=work_of(records, opens, **more))

    def refused(self, at_ns: int) -> FlowHistory:
        arguments = {"universe": UNIVERSE, "work": work_of((), ())}
        self.history.add(at_ns, "flows.commit", arguments, result="fail", value={"code": "fenced"})
        return self

    def letter(self, step: str) -> FlowHistory:
        payload = {"flow": "f1-1", "run": 1, "step": step, "occurrence": 1}
        self.letters.append({"payload": msgspec.json.encode(payload)})
        return self

    def cancel(self, at_ns: int) -> FlowHistory:
        return self.committed(at_ns, "flows.cancel", True, flow_seq=1)

    def pay(self, number: int, key: str, occurrence: int = 1) -> FlowHistory:
        step = f"flow-1-1-1-pay-{occurrence}"
        self.history.add(
            5, "flow.payment", {"number": number, "step": step, "key": key, "args": [1]}
        )
        return self

    def call(self, at_ns: int, name: str) -> FlowHistory:
        call = {"flow": 1, "run": 1, "name": name, "occurrence": 1, "task": 7, "lease": 3}
        self.history.add(at_ns, "flow.call", call)
        return self

    def send(self, number: int, text: bytes = b"a", key: str = "") -> FlowHistory:
        mail = {"type": "Note", "value": text, "key": key}
        return self.committed(5, "flows.send", number, flow_seq=1, mail=mail)

    def audit(self, *records: Plain, state: int = COMPLETED, **more: Any) -> FlowHistory:
        """An audit. `body` and `head` are fields of flow 1, `others` other flows: (body, head, records)."""
        head = {**HEAD, "state": state, "records": len(records), **more.pop("head", {})}
        flows: Plain = {
            "heads": {1: head}, "bodies": {1: {**BODY, **more.pop("body", {})}}, "open": {},
            "due": [], "mail": {}, "records": {"1/1": dict(enumerate(records, start=1))},
            "children": [],
        }  # fmt: skip
        for seq, (body, fields, others) in enumerate(more.pop("others", ()), start=2):
            flows["bodies"][seq] = {**BODY, **body}
            flows["heads"][seq] = {**HEAD, "records": len(others), **fields}
            flows["records"][f"{seq}/1"] = dict(enumerate(others, start=1))
        flows |= more
        tasks = {"bodies": {}, "statuses": {}}
        queues = {f"{UNIVERSE}/undo-failed": {"dead": dict(enumerate(self.letters))}}
        rows = {"flows": {UNIVERSE: flows}, "tasks": {UNIVERSE: tasks}, "queues": queues}
        self.history.add(50, "audit", value=rows)
        return self


BODY: Plain = {"parent": None, "spec": {"name": "order"}, "generation": 1}
HEAD: Plain = {
    "state": COMPLETED, "run": 1, "records": 0, "task": 0, "cancelled": False, "timed_out": False,
    "end_state": 0, "result": b"",
}  # fmt: skip
CHILD_OF_1 = {"flow": 1, "run": 1, "name": "label", "occurrence": 1, "cancels": True}


def work_of(records: Any, opens: Any, **more: Any) -> Plain:
    return {
        "flow": 1, "run": 1, "task": 7, "lease": 3, "opens": list(opens), "records": list(records),
        "action": CONTINUE, "cancels": [], **more,
    }  # fmt: skip


def of_payment(number: int, occurrence: int = 1) -> Plain:
    return outcome("pay", occurrence, value=msgspec.msgpack.encode(number))


def cancelled_end(state: int, code: str) -> list[Plain]:
    return [record("cancel"), record("ended", state=state, code=code)]


UNDO_A, UNDO_B = record("undo", name="a", occurrence=1), record("undo", name="b", occurrence=1)
STARTED = record("compensation", state=FAILED, code="raised")
ENDED = record("ended", state=FAILED, code="raised")
FAILED_UNDO = [UNDO_A, STARTED, outcome("undo:a", kind="failure", code="undo_failed"), ENDED]
FORK = {"fork_of": 1}
FORKED = record("forked", position=2, taken=1, undos=[])
# A step, its compensation, and a fork behind both.
COMPENSATED = [outcome("a", position=1), record("undo", name="a", occurrence=1, position=2)]
FORKED_BEHIND = record("forked", position=3, taken=1, undos=[["a", 1, 2]], decided_ns=40)
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

    def refuse(self, code: str) -> ScheduleHistory:
        self.history.add(5, "schedules.fire_due", {}, result="fail", value={"code": code})
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
    "failed compensation without a letter": ("X2", FlowHistory().audit(*FAILED_UNDO)),
    "failed compensation with two letters": (
        "X2", FlowHistory().letter("undo:a").letter("undo:a").audit(*FAILED_UNDO),
    ),
    "letter of a redriven compensation": ("X2", FlowHistory().letter("undo:a").audit(
        *FAILED_UNDO, record("undo_redriven", name="undo:a", occurrence=1), outcome("undo:a"), ENDED)),
    "redriven compensation that does not run": ("X2", FlowHistory().audit(
        *FAILED_UNDO, record("undo_redriven", name="undo:a", occurrence=1), ENDED)),
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
    "commit of an ended activation": ("X1", FlowHistory().work(1, action=SUSPEND).work(2)),
    "refused commit of the present activation": ("X2", FlowHistory().refused(10)),
    "key that starts two flows": ("X2", FlowHistory().start(2, "k").start(3, "k")),
    "key that sends two events": ("X2", FlowHistory().send(1, key="k").send(2, key="k")),
    "step after a cancellation": ("X2", FlowHistory().cancel(5).work(6).call(7, "a")),
    "cancelled flow that waits": ("X2", FlowHistory().audit(
        record("cancel"), state=WAITING, head={"cancelled": True},
        open={1: {"a#1": {"kind": 0, "due_ns": 0}}})),
    "cancelled flow that completes": ("X2", FlowHistory().audit(*cancelled_end(COMPLETED, ""))),
    "cancelled flow that fails": ("X2", FlowHistory().audit(*cancelled_end(FAILED, "raised"))),
    "cancelled flow with a next run": ("X2", FlowHistory().audit(
        record("cancel"), head={"run": 2, "records": 0})),
    "cancelled end without a cancellation": ("X2", FlowHistory().audit(
        record("ended", state=CANCELLED, code="cancelled"))),
    "timeout of a flow that compensates": ("X2", FlowHistory().audit(
        UNDO_A, STARTED, record("timed_out"), state=3, head={"task": 7})),
    "parked flow whose code did not change": ("X1", FlowHistory().audit(record("parked"))),
    "outcomes of two releases": ("X1", FlowHistory().audit(
        body={"spec": {"name": "priced"}}, head={"result": msgspec.msgpack.encode([1, 2])})),
    "payment under two keys": ("X1", FlowHistory().pay(1, "k").pay(2, "l")),
    "one key of two payments": ("X1", FlowHistory().pay(1, "k").pay(2, "k", 2)),
    "payment of another step": ("X1", FlowHistory().pay(1, "k", 2).audit(of_payment(1))),
    "payment that was not made": ("X1", FlowHistory().audit(of_payment(9))),
    "result of another child": ("X2", FlowHistory().audit(
        outcome("label", value=b"a"), others=[({"parent": CHILD_OF_1}, {"result": b"b"}, [])])),
    "abandoned child that is cancelled": ("X2", FlowHistory().audit(
        others=[({"parent": {**CHILD_OF_1, "cancels": False}}, {"cancelled": True}, [])])),
    "fork with an outcome of no parent": ("X1", FlowHistory().audit(
        outcome("a", value=b"a"), others=[(FORK, {}, [FORKED, outcome("a", value=b"b")])])),
    "fork with the step of the fork": ("X1", FlowHistory().audit(
        outcome("a", position=2), others=[(FORK, {}, [FORKED, outcome("a", position=2)])])),
    "fork that compensates its parent": ("X2", FlowHistory().audit(*COMPENSATED, others=[
        (FORK, {}, [FORKED_BEHIND, {**COMPENSATED[0], "decided_ns": 40}, {**COMPENSATED[1], "decided_ns": 45}])])),
    "fork that does not know a compensation": ("X2", FlowHistory().audit(*COMPENSATED, others=[
        (FORK, {}, [{**FORKED_BEHIND, "undos": []}, {**COMPENSATED[0], "decided_ns": 40}])])),
    "fork that claims a compensation": ("X2", FlowHistory().audit(COMPENSATED[0], others=[
        (FORK, {}, [FORKED_BEHIND, {**COMPENSATED[0], "decided_ns": 40}])])),
    "fork that counts other records": ("X1", FlowHistory().audit(*COMPENSATED, others=[
        (FORK, {}, [{**FORKED_BEHIND, "taken": 0}, {**COMPENSATED[0], "decided_ns": 40}])])),
    "event that the ended run has not seen, lost": ("X2", FlowHistory().send(1).work(
        6, action=AGAIN, known=[received(1)]).audit(received(1))),
    "event of a cancelled receive, lost": ("X2", FlowHistory().send(1).work(
        6, cancels=[["hf.receive", 1]]).audit(received(1))),
    "occurrence that the table refuses": ("X3", ScheduleHistory().refuse("illegal_transition")),
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
    redriven = record("undo_redriven", name="undo:a", occurrence=1)
    again = FlowHistory().letter("undo:a").audit(*FAILED_UNDO, state=FAILED)
    again.letters.clear()
    again.audit(*FAILED_UNDO, redriven, outcome("undo:a"), ENDED, state=FAILED)
    flow.audit(*records, state=FAILED)
    schedule = ScheduleHistory().pause(6, True).audit(occurrence(3), occurrence(4))
    for built in (flow, again, schedule):
        assert not find(built.history)
