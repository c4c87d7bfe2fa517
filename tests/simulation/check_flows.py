"""Checkers of flows: X1 and X2, on committed operations and on the rows of each audit.

The replay follows the leases of activation tasks. A commit of a flow needs the live lease of the
activation. A call of a step function by a worker with a live lease needs a step without a recorded
outcome. The audits show the records of each run: their order, their outcomes and their events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.row_decoder_flows import UNIVERSE, decode_activation, decode_received
from holdfast.sim.row_decoder_tasks import open_tasks
from tests.simulation.violation import Violation

Plain = dict[str, Any]
Findings = Iterator[tuple[str, str]]

UNDO = "undo:"
SLEEP_NAME, RECEIVE_NAME = "hf.sleep", "hf.receive"
RUNNING, WAITING, PARKED, COMPENSATING, COMPLETED, _, CANCELLED, DEAD = range(8)


class ActivationLease(NamedTuple):
    lease: int
    expires_ns: int


class _FlowReplay:
    """Replays the flow operations of one life of the store."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        # By task.
        self.leases: dict[int, ActivationLease] = {}
        # The tasks whose end was reported.
        self.ended_tasks: set[int] = set()
        # Steps with a committed outcome, by (flow, run).
        self.recorded: dict[tuple[int, int], set[tuple[str, int]]] = {}
        # The due times of sleeps and of timeouts, by (flow, run, name, occurrence).
        self.due: dict[tuple[int, int, str, int], int] = {}
        # The sent events, by (flow, number): type and value.
        self.sent: dict[tuple[int, int], tuple[str, bytes]] = {}
        self.cancelled: set[int] = set()
        # Records seen in former audits, by (run of a flow, number).
        self.seen: dict[tuple[str, int], Plain] = {}

    def step(self, event: HistoryEvent) -> None:
        if event.op == "audit":
            self._add(event, self._check_audit(event.value))
        elif event.op == "flow.call":
            self._add(event, self._check_call(event))
        elif event.applied and event.args.get("universe") == UNIVERSE and event.op in _STEPS:
            self._add(event, _STEPS[event.op](self, event))

    def _add(self, event: HistoryEvent, wrong: Findings) -> None:
        self.found += [Violation(number, what, event) for number, what in wrong]

    # -- operations ----------------------------------------------------------------------------

    def _on_lease(self, event: HistoryEvent) -> Findings:
        leased = event.value["leased"] if event.op == "tasks.report_and_lease" else event.value
        if event.op == "tasks.report_and_lease":
            yield from self._on_reports(event)
        for grant in leased["grants"]:
            self.leases[grant["seq"]] = ActivationLease(grant["lease"], grant["expires_ns"])

    def _on_reports(self, event: HistoryEvent) -> Findings:
        for report in event.args["reports"]:
            held = self.leases.get(report["seq"])
            if held is not None and held.lease == report["lease"]:
                del self.leases[report["seq"]]
        return iter(())

    def _is_live(self, task: int, lease: int, now_ns: int) -> bool:
        held = self.leases.get(task)
        return held is not None and held.lease == lease and now_ns < held.expires_ns

    def _on_commit(self, event: HistoryEvent) -> Findings:
        work = event.args["work"]
        flow, run = work["flow"], work["run"]
        if not self._is_live(work["task"], work["lease"], event.at_ns):
            yield "X1", f"flow {flow}: a commit without the live lease of task {work['task']}"
        recorded = self.recorded.setdefault((flow, run), set())
        for record in work["records"]:
            if "digest" not in record or "attempts" not in record:
                continue  # not an outcome
            identity = (record["name"], record["occurrence"])
            if identity in recorded:
                yield "X1", f"flow {flow}: the outcome of {identity} is committed again"
            recorded.add(identity)
        for request in work["opens"]:
            if request["wait_ns"] >= 0:
                identity = (flow, run, request["name"], request["occurrence"])
                self.due.setdefault(identity, event.at_ns + request["wait_ns"])

    def _on_send(self, event: HistoryEvent) -> Findings:
        mail = event.args["mail"]
        sent = (mail["type"], mail["value"])
        if self.sent.setdefault((event.args["flow_seq"], event.value), sent) != sent:
            yield "X2", f"flow {event.args['flow_seq']}: event {event.value} has another body"

    def _on_cancel(self, event: HistoryEvent) -> Findings:
        if event.value:
            self.cancelled.add(event.args["flow_seq"])
        return iter(())

    def _check_call(self, event: HistoryEvent) -> Findings:
        """A worker with a live lease calls only steps without a recorded outcome."""
        call = event.args
        identity = (call["name"], call["occurrence"])
        if self._is_live(call["task"], call["lease"], event.at_ns):
            if identity in self.recorded.get((call["flow"], call["run"]), ()):
                yield "X1", f"flow {call['flow']}: the recorded step {identity} runs again"

    # -- rows ----------------------------------------------------------------------------------

    def _check_audit(self, rows: Plain) -> Findings:
        flows = rows.get("flows", {}).get(UNIVERSE)
        if flows is None:
            return
        for flow, head in flows["heads"].items():
            if flow not in flows["bodies"]:
                yield "X1", f"flow {flow} has a head and no body"
                continue
            yield from self._check_flow(flows, flow, head)
        yield from _check_activations(flows, rows.get("tasks", {}).get(UNIVERSE))
        yield from _check_children(flows)

    def _check_flow(self, flows: Plain, flow: int, head: Plain) -> Findings:
        received: list[tuple[str, int]] = []
        for run in range(1, head["run"] + 1):
            path = f"{flow}/{run}"
            numbered = flows["records"].get(path, {})
            records = [numbered[number] for number in sorted(numbered)]
            if sorted(numbered) != list(range(1, len(numbered) + 1)):
                yield "X1", f"run {path} has the records {sorted(numbered)}"
            for number, record in numbered.items():
                if self.seen.setdefault((path, number), record) != record:
                    yield "X1", f"record {number} of run {path} has changed"
            yield from _check_outcomes(path, records)
            yield from _check_compensations(path, records)
            yield from self._check_times(flow, run, records)
            yield from self._check_events(flow, run, records, received, flows)
        if head["records"] != len(flows["records"].get(f"{flow}/{head['run']}", {})):
            yield "X1", f"flow {flow} counts {head['records']} records"
        yield from self._check_inbox(flow, head, received, flows["mail"].get(flow, {}))

    def _check_times(self, flow: int, run: int, records: list[Plain]) -> Findings:
        """No sleep and no timeout ends before its time."""
        for record in records:
            if record["kind"] == "completed" and record["name"] == SLEEP_NAME:
                due_ns = self.due.get((flow, run, SLEEP_NAME, record["occurrence"]))
                if due_ns is None or record["decided_ns"] < due_ns:
                    yield "X2", f"flow {flow}: sleep {record['occurrence']} ended before {due_ns}"

    def _check_events(
        self,
        flow: int,
        run: int,
        records: list[Plain],
        received: list[tuple[str, int]],
        flows: Plain,
    ) -> Findings:
        """Each event is received once, in the order of its type, with its own body."""
        stopped = any(record["kind"] in ("cancel", "timed_out") for record in records)
        last: dict[str, int] = {}
        for type, number in received:
            last[type] = max(last.get(type, 0), number)
        for record in records:
            if record["kind"] != "completed" or record["name"] != RECEIVE_NAME:
                continue
            number = record["mail"]
            type, value = decode_received(record["value"])
            if self.sent.get((flow, number)) != (type, value):
                yield "X2", f"flow {flow}: the received event {number} was not sent so"
            if (type, number) in received:
                # A cancelled receive returns its event to the inbox.
                if not stopped:
                    yield "X2", f"flow {flow}: event {number} is received twice"
            elif number <= last.get(type, 0):
                yield "X2", f"flow {flow}: event {number} of {type} is received out of order"
            received.append((type, number))
            last[type] = max(last.get(type, 0), number)

    def _check_inbox(
        self, flow: int, head: Plain, received: list[tuple[str, int]], mail: Plain
    ) -> Findings:
        """A sent event is received or in the inbox, never both and never lost."""
        taken = {number for _, number in received}
        if head["cancelled"] or head["timed_out"]:
            return
        for number in mail:
            if number in taken:
                yield "X2", f"flow {flow}: the received event {number} is in the inbox"
        lost = {number for seq, number in self.sent if seq == flow} - taken - mail.keys()
        if lost:
            yield "X2", f"flow {flow}: the events {sorted(lost)} are lost"

    def check_end(self, event: HistoryEvent, last_audit: HistoryEvent | None) -> None:
        """At rest a cancelled flow has ended, and no flow has work left."""
        rows = {} if last_audit is None else last_audit.value.get("flows", {}).get(UNIVERSE, {})
        heads = rows.get("heads", {})
        for flow in sorted(self.cancelled):
            if flow in heads and heads[flow]["state"] < COMPLETED:
                what = f"the cancelled flow {flow} is in state {heads[flow]['state']} at rest"
                self.found.append(Violation("X2", what, event))


def _check_outcomes(path: str, records: list[Plain]) -> Findings:
    """Each step has one outcome, except after a redrive, and nothing follows the end."""
    outcomes: set[tuple[str, int]] = set()
    ended = False
    for record in records:
        if record["kind"] == "redriven":
            ended = False
            outcomes.discard((record["name"], record["occurrence"]))
            continue
        if ended:
            yield "X1", f"run {path} has a record after its end: {record['kind']}"
        ended |= record["kind"] == "ended"
        if record["kind"] not in ("completed", "failure"):
            continue
        identity = (record["name"], record["occurrence"])
        if identity in outcomes:
            yield "X1", f"run {path} has two outcomes of {identity}"
        outcomes.add(identity)


def _check_compensations(path: str, records: list[Plain]) -> Findings:
    """Compensations run after their start, once each, in the reverse order of their registration."""
    registered: list[tuple[str, int]] = []
    expected: list[tuple[str, int]] | None = None
    for record in records:
        if record["kind"] == "undo":
            if expected is not None:
                yield "X2", f"run {path} registers a compensation after they started"
            registered.append((record["name"], record["occurrence"]))
        elif record["kind"] == "compensation":
            if expected is not None:
                yield "X2", f"run {path} starts its compensations twice"
            expected = list(reversed(registered))
        elif record["kind"] == "redriven":
            expected = None
        elif record["kind"] in ("completed", "failure") and record["name"].startswith(UNDO):
            identity = (record["name"].removeprefix(UNDO), record["occurrence"])
            if not expected or identity != expected[0]:
                yield "X2", f"run {path} compensates {identity}, not {(expected or [None])[0]}"
            else:
                del expected[0]
        elif record["kind"] == "ended" and record["state"] not in (COMPLETED, DEAD):
            if expected is None and registered:
                yield "X2", f"run {path} ends without its compensations"
            elif expected:
                yield "X2", f"run {path} ends before its compensations {expected}"


def _check_activations(flows: Plain, tasks: Plain | None) -> Findings:
    """A flow has at most one activation, and a flow that runs has one: it wakes once."""
    activations: dict[int, list[int]] = {}
    for seq in [] if tasks is None else open_tasks(tasks):
        assert tasks is not None
        activation = decode_activation(tasks["bodies"][seq]["args"])
        if activation is not None:
            activations.setdefault(activation[0], []).append(seq)
    for flow, head in flows["heads"].items():
        state, open_ = head["state"], activations.get(flow, [])
        # The worker reports the end of an activation after the commit that ended it.
        if head["task"] and head["task"] not in open_:
            yield "X2", f"flow {flow} in state {state} has the activation {head['task']}, not open"
        if state == RUNNING and not head["task"]:
            yield "X2", f"flow {flow} runs without an activation"
        if state in (WAITING, PARKED) and head["task"]:
            yield "X2", f"flow {flow} in state {state} has the activation {head['task']}"
        retries = any(due[1] == flow for due in flows["due"])
        if state == WAITING and not (flows["open"].get(flow) or retries):
            yield "X2", f"flow {flow} waits for nothing"
        for label, step in flows["open"].get(flow, {}).items():
            due = any(row[1] == flow and f"{row[2]}#{row[3]}" == label for row in flows["due"])
            if step["due_ns"] and not due:
                yield "X2", f"flow {flow}: {label} has no due row"
        if state >= COMPLETED and flows["open"].get(flow):
            yield "X2", f"flow {flow} has ended with the open steps {sorted(flows['open'][flow])}"


def _check_children(flows: Plain) -> Findings:
    """A child flow whose parent has ended is cancelled, unless it is abandoned."""
    for flow, body in flows["bodies"].items():
        parent, head = body.get("parent"), flows["heads"].get(flow)
        if parent is None or not parent["flow"] or not parent["cancels"] or head is None:
            continue
        parent_head = flows["heads"].get(parent["flow"])
        if parent_head is None or parent_head["state"] < COMPLETED or head["state"] >= COMPLETED:
            continue
        if not (head["cancelled"] or head["timed_out"] or head["end_state"]):
            yield "X2", f"the child flow {flow} of the ended flow {parent['flow']} goes on"


_STEPS: dict[str, Any] = {
    "tasks.lease": _FlowReplay._on_lease,
    "tasks.report_and_lease": _FlowReplay._on_lease,
    "tasks.apply_reports": _FlowReplay._on_reports,
    "flows.commit": _FlowReplay._on_commit,
    "flows.send": _FlowReplay._on_send,
    "flows.cancel": _FlowReplay._on_cancel,
}


def findings(history: History) -> list[Violation]:
    """Return all violations that the replay of each life finds, in order."""
    found: list[Violation] = []
    for life in history.store_lives():
        if not any(event.op.startswith("flow") for event in life):
            continue
        replay, last_audit = _FlowReplay(), None
        for event in life:
            replay.step(event)
            if event.op == "audit":
                last_audit = event
        if life[-1].op in ("quiet", "audit") and any(event.op == "quiet" for event in life):
            replay.check_end(life[-1], last_audit)
        found += replay.found
    return found
