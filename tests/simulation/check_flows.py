"""Checkers of flows: X1 and X2, on committed operations and on the rows of each audit.

The replay follows the leases of activation tasks. A commit of a flow needs the live lease of the
activation, and such a commit is not refused. A call of a step function by a worker with a live lease needs a step without
a recorded outcome. The audits show the records of each run: their order, their outcomes and their events
(`check_flow_records`), and the rows of children, effects and inboxes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec

from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.row_decoder_flows import UNIVERSE, decode_activation, decode_received
from holdfast.sim.row_decoder_tasks import open_tasks
from tests.simulation import check_flow_records as rules
from tests.simulation.check_flow_intents import WorldStarts
from tests.simulation.check_flow_records import (
    COMPLETED,
    PARKED,
    PRICED,
    RACE,
    RUNNING,
    UNDO,
    WAITING,
    Findings,
    Plain,
    StepName,
    identity_of,
)
from tests.simulation.lease_events import expand
from tests.simulation.violation import Violation

SLEEP_NAME, RECEIVE_NAME, PAY_NAME = "hf.sleep", "hf.receive", "pay"
UNDO_QUEUE = f"{UNIVERSE}/undo-failed"
NO_LETTERS: Plain = {"dead": {}}
FLOW_KIND = 4
CONTINUE, END, AGAIN, RETRY = 0, 2, 3, 4
ENDINGS = (END, AGAIN, RETRY)

_decode = msgspec.msgpack.Decoder().decode


class ActivationLease(NamedTuple):
    lease: int
    expires_ns: int
    # The number of the event that granted it.
    granted_at: int


class Payment(NamedTuple):
    """A call of the payment service, by a step: `flow-GENERATION-FLOW-RUN-NAME-OCCURRENCE`."""

    step: str
    key: str
    args: list[Any]


class _FlowReplay:
    """Replays the flow operations of one life of the store."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        # By task.
        self.leases: dict[int, ActivationLease] = {}
        # The activations whose last commit was applied.
        self.ended_activations: set[int] = set()
        # Steps with a committed outcome, by (flow, run), and the failures among them.
        self.recorded: dict[tuple[int, int], set[StepName]] = {}
        self.failed: dict[tuple[int, int], set[StepName]] = {}
        # The due times of sleeps and of timeouts, by (flow, run, name, occurrence).
        self.due: dict[tuple[int, int, str, int], int] = {}
        # The sent events, by (flow, number): type and value. The numbers of events by (flow, key).
        self.sent: dict[tuple[int, int], tuple[str, bytes]] = {}
        self.event_keys: dict[tuple[int, str], int] = {}
        # The receives whose events went back to the inbox: (flow, run, name, occurrence).
        self.returned: set[tuple[int, int, str, int]] = set()
        # The flows of keys, by (name, key).
        self.flow_keys: dict[tuple[str, str], int] = {}
        # The event that cancelled each flow, and the flows whose worker has learned of it.
        self.cancelled: dict[int, int] = {}
        self.ever_cancelled: set[int] = set()
        self.knows_cancel: set[int] = set()
        self.payments: dict[int, Payment] = {}
        self.world_starts = WorldStarts()
        # Records seen in former audits, by (run of a flow, number).
        self.seen: dict[tuple[str, int], Plain] = {}

    def step(self, event: HistoryEvent) -> None:
        if event.op == "audit":
            self._add(event, self._check_audit(event.value))
        elif event.op == "restore":
            # The leases of the former generation are void.
            self.leases.clear()
        elif event.op == "flow.call":
            self._add(event, self._check_call(event))
        elif event.op == "flow.payment":
            self._add(event, self._on_payment(event.args))
        elif event.op == "commit" and event.applied:
            self._add(event, self.world_starts.on_cycle(event))
        elif event.op == "flows.commit" and event.code == "fenced":
            self._add(event, self._check_refusal(event))
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
            self.leases[grant["seq"]] = ActivationLease(
                grant["lease"], grant["expires_ns"], event.i
            )

    def _on_reports(self, event: HistoryEvent) -> Findings:
        for report in event.args["reports"]:
            held = self.leases.get(report["seq"])
            if held is not None and held.lease == report["lease"]:
                del self.leases[report["seq"]]
        return iter(())

    def _is_live(self, task: int, lease: int, now_ns: int) -> bool:
        held = self.leases.get(task)
        return held is not None and held.lease == lease and now_ns < held.expires_ns

    def _on_start(self, event: HistoryEvent) -> Findings:
        for new, started in zip(event.args["new"], event.value, strict=True):
            key = (new["spec"]["name"], new["key"])
            if new["key"] and self.flow_keys.setdefault(key, started["seq"]) != started["seq"]:
                yield "X2", f"the key {key} starts the flow {started['seq']} as well"

    def _on_commit(self, event: HistoryEvent) -> Findings:
        work, answer = event.args["work"], event.value
        flow, run = work["flow"], work["run"]
        if not self._is_live(work["task"], work["lease"], event.at_ns):
            yield "X1", f"flow {flow}: a commit without the live lease of task {work['task']}"
        elif work["task"] in self.ended_activations:
            yield "X1", f"flow {flow}: a commit of the activation {work['task']}, which has ended"
        if (work["action"] != CONTINUE and answer["applied"]) or answer["suspended"]:
            self.ended_activations.add(work["task"])
        if flow in self.cancelled:
            self.knows_cancel.add(flow)
        recorded = self.recorded.setdefault((flow, run), set())
        for record in work["records"]:
            if "digest" not in record or "attempts" not in record:
                continue  # not an outcome
            if identity_of(record) in recorded:
                yield "X1", f"flow {flow}: the outcome of {identity_of(record)} is committed again"
            recorded.add(identity_of(record))
            if "error_type" in record:
                self.failed.setdefault((flow, run), set()).add(identity_of(record))
        self._note_returned_mail(flow, run, work, answer)
        for request in work["opens"]:
            if request["wait_ns"] >= 0:
                identity = (flow, run, request["name"], request["occurrence"])
                self.due.setdefault(identity, event.at_ns + request["wait_ns"])

    def _note_returned_mail(self, flow: int, run: int, work: Plain, answer: Plain) -> None:
        """The event of a receive goes back to the inbox if the code cancelled the receive first, or if the run ends and
        its code has not seen the event. Nothing goes back at the end of the flow."""
        is_again = work["action"] == AGAIN and answer["applied"]
        is_end = work["action"] in ENDINGS or any("state" in record for record in work["records"])
        if is_again or not is_end:
            self.returned |= {(flow, run, name, occurrence) for name, occurrence in work["cancels"]}
        if is_again:
            unseen = [record for record in answer["records"] if record.get("mail")]
            self.returned |= {(flow, run, *identity_of(record)) for record in unseen}

    def _check_refusal(self, event: HistoryEvent) -> Findings:
        """A commit under the live lease of the present activation is not refused."""
        work = event.args["work"]
        is_live = self._is_live(work["task"], work["lease"], event.at_ns)
        if is_live and work["task"] not in self.ended_activations:
            yield "X2", f"flow {work['flow']}: a commit of its activation {work['task']} is refused"

    def _on_send(self, event: HistoryEvent) -> Findings:
        flow, mail, number = event.args["flow_seq"], event.args["mail"], event.value
        sent = (mail["type"], mail["value"])
        if self.sent.setdefault((flow, number), sent) != sent:
            yield "X2", f"flow {flow}: event {number} has another body"
        if mail.get("key") and self.event_keys.setdefault((flow, mail["key"]), number) != number:
            yield "X2", f"flow {flow}: the key {mail['key']} sends event {number} as well"

    def _on_cancel(self, event: HistoryEvent) -> Findings:
        if event.value:
            self.cancelled[event.args["flow_seq"]] = event.i
            self.ever_cancelled.add(event.args["flow_seq"])
        return iter(())

    def _on_redrive(self, event: HistoryEvent) -> Findings:
        flow = event.args["flow_seq"]
        if event.value["seq"] == flow:
            self.cancelled.pop(flow, None)
            self.knows_cancel.discard(flow)
            for (seq, run), failed in self.failed.items():
                if seq == flow:
                    self.recorded[seq, run] -= failed
                    failed.clear()
        else:
            # The flow has compensated. Its key names the copy that replaces it.
            for key, seq in self.flow_keys.items():
                if seq == flow:
                    self.flow_keys[key] = event.value["seq"]
        return iter(())

    def _on_undo_redrive(self, event: HistoryEvent) -> Findings:
        for id in event.value:
            flow = int(id.rpartition("-")[2])
            for (seq, run), failed in self.failed.items():
                if seq == flow:
                    self.recorded[seq, run] -= failed
                    failed.clear()
        return iter(())

    def _check_call(self, event: HistoryEvent) -> Findings:
        """A worker with a live lease calls only steps without a recorded outcome, and none after a cancellation that it
        knows."""
        call = event.args
        flow, name = call["flow"], call["name"]
        if not self._is_live(call["task"], call["lease"], event.at_ns):
            return
        if (name, call["occurrence"]) in self.recorded.get((flow, call["run"]), ()):
            yield "X1", f"flow {flow}: the recorded step {name}#{call['occurrence']} runs again"
        if flow in self.cancelled and not name.startswith(UNDO):
            is_later = self.leases[call["task"]].granted_at > self.cancelled[flow]
            if is_later or flow in self.knows_cancel:
                yield "X2", f"flow {flow}: the step {name} runs after the cancellation"

    def _on_payment(self, call: Plain) -> Findings:
        """All calls of an effect step have one key, which no other step has."""
        made = Payment(call["step"], call["key"], call["args"])
        for other in self.payments.values():
            if (other.key == made.key) != (other[::2] == made[::2]):
                yield "X1", f"the payments {made} and {other} differ in their keys"
        self.payments[call["number"]] = made

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
        yield from _check_results(flows)
        yield from _check_letters(flows, rows.get("queues", {}).get(UNDO_QUEUE, NO_LETTERS)["dead"])
        yield from self.world_starts.check_audit(flows)

    def _check_flow(self, flows: Plain, flow: int, head: Plain) -> Findings:
        received: list[tuple[str, int]] = []
        body = flows["bodies"][flow]
        name = body["spec"]["name"]
        for run in range(1, head["run"] + 1):
            path = f"{flow}/{run}"
            numbered = flows["records"].get(path, {})
            records = [numbered[number] for number in sorted(numbered)]
            if sorted(numbered) != list(range(1, len(numbered) + 1)):
                yield "X1", f"run {path} has the records {sorted(numbered)}"
            for number, record in numbered.items():
                if self.seen.setdefault((path, number), record) != record:
                    yield "X1", f"record {number} of run {path} has changed"
            yield from rules.check_outcomes(path, records)
            yield from rules.check_compensations(path, records)
            yield from rules.check_cause(path, records, is_last=run == head["run"])
            yield from rules.check_divergence(path, name, records)
            self._note_outcomes(flow, run, records)
            copied = rules.copied_records(body, run, records)
            if copied:
                of_parent = runs_of(flows, body["fork_of"])
                yield from rules.check_fork(path, records[:copied], records[copied:], of_parent)
            own = records[copied:]
            yield from self._check_times(flow, run, own)
            yield from self._check_events(flow, run, own, received)
            yield from self._check_payments(f"flow-{body['generation']}-{flow}-{run}", own)
        parent = body.get("parent")
        is_abandoned = parent is not None and parent["flow"] and not parent["cancels"]
        if is_abandoned and head["cancelled"] and flow not in self.ever_cancelled:
            yield "X2", f"the abandoned child flow {flow} is cancelled"
        if head["records"] != len(flows["records"].get(f"{flow}/{head['run']}", {})):
            yield "X1", f"flow {flow} counts {head['records']} records"
        if name == RACE and head["state"] == COMPLETED and not body.get("fork_of"):
            texts = [_decode(self.sent[flow, number][1][1:]) for _, number in received]
            got = _decode(head["result"])
            if [text["text"] for text in texts] != got:
                yield "X2", f"flow {flow} received {texts}, and its code got {got}"
        yield from self._check_inbox(flow, received, flows["mail"].get(flow, {}))

    def _note_outcomes(self, flow: int, run: int, records: list[Plain]) -> None:
        """Take over the outcomes that other commits brought."""
        outcomes = rules.outcomes_after_redrives(records)
        self.recorded.setdefault((flow, run), set()).update(map(identity_of, outcomes))
        failures = {identity_of(one) for one in outcomes if one["kind"] == "failure"}
        self.failed.setdefault((flow, run), set()).update(failures)

    def _check_payments(self, run: str, records: list[Plain]) -> Findings:
        """The outcome of an effect step is the result of one of its calls."""
        for record in records:
            if record["kind"] == "completed" and record["name"] == PAY_NAME:
                call = self.payments.get(_decode(record["value"]))
                if call is None or call.step != f"{run}-{PAY_NAME}-{record['occurrence']}":
                    yield "X1", f"{run}: {identity_of(record)} has the payment {call}"

    def _check_times(self, flow: int, run: int, records: list[Plain]) -> Findings:
        """No sleep and no timeout ends before its time."""
        for record in records:
            if record["kind"] == "completed" and record["name"] == SLEEP_NAME:
                due_ns = self.due.get((flow, run, SLEEP_NAME, record["occurrence"]))
                if due_ns is None or record["decided_ns"] < due_ns:
                    yield "X2", f"flow {flow}: sleep {record['occurrence']} ended before {due_ns}"

    def _check_events(
        self, flow: int, run: int, records: list[Plain], received: list[tuple[str, int]]
    ) -> Findings:
        """Each event is received once, in the order of its type, with its own body."""
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
            if (flow, run, *identity_of(record)) in self.returned:
                continue
            if (type, number) in received:
                yield "X2", f"flow {flow}: event {number} is received twice"
            elif number <= last.get(type, 0):
                yield "X2", f"flow {flow}: event {number} of {type} is received out of order"
            received.append((type, number))
            last[type] = max(last.get(type, 0), number)

    def _check_inbox(self, flow: int, received: list[tuple[str, int]], mail: Plain) -> Findings:
        """A sent event is received or in the inbox, never both and never lost."""
        taken = {number for _, number in received}
        for number in mail:
            if number in taken:
                yield "X2", f"flow {flow}: the received event {number} is in the inbox"
        lost = {number for seq, number in self.sent if seq == flow} - taken - mail.keys()
        if lost:
            yield "X2", f"flow {flow}: the events {sorted(lost)} are lost"

    def check_end(self, event: HistoryEvent, last_audit: HistoryEvent | None) -> None:
        """At rest a cancelled flow has ended, no flow has work left, and each world has its receipts."""
        if missing := self.world_starts.without_receipt():
            self.found.append(Violation("X1", f"the intents {missing} have no receipt", event))
        rows = {} if last_audit is None else last_audit.value.get("flows", {}).get(UNIVERSE, {})
        heads = rows.get("heads", {})
        for flow in sorted(self.cancelled):
            if flow in heads and heads[flow]["state"] < COMPLETED:
                what = f"the cancelled flow {flow} is in state {heads[flow]['state']} at rest"
                self.found.append(Violation("X2", what, event))


def runs_of(flows: Plain, flow: int) -> list[list[Plain]]:
    """The records of the runs of a flow, in order."""
    found = {
        int(path.partition("/")[2]): list(numbered.values())
        for path, numbered in flows["records"].items()
        if path.startswith(f"{flow}/")
    }
    return [found[run] for run in sorted(found)]


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
        is_stopped = head["cancelled"] or head["timed_out"]
        waits_for_child = any(
            step["kind"] == FLOW_KIND for step in flows["open"].get(flow, {}).values()
        )
        if state == WAITING and is_stopped and not waits_for_child:
            yield "X2", f"flow {flow} waits after its cancellation or timeout"
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


def _check_letters(flows: Plain, dead: Plain) -> Findings:
    """Each compensation that failed has one dead letter until it is redriven."""
    letters: Counter[tuple[str, int, str, int]] = Counter()
    for letter in dead.values():
        found = msgspec.json.decode(letter["payload"])
        letters[found["flow"], found["run"], found["step"], found["occurrence"]] += 1
    expected: Counter[tuple[str, int, str, int]] = Counter()
    for path, numbered in flows["records"].items():
        flow, run = map(int, path.split("/"))
        generation = flows["bodies"][flow]["generation"]
        outcomes = rules.outcomes_after_redrives(numbered[n] for n in sorted(numbered))
        for record in outcomes:
            if record["kind"] == "failure" and record["name"].startswith(UNDO):
                expected[f"f{generation}-{flow}", run, *identity_of(record)] += 1
    if letters != expected:
        yield "X2", f"the dead letters of compensations are {letters}, expected {expected}"


def _check_results(flows: Plain) -> Findings:
    """The outcome of a step that is a flow is the result of a child of this step, in this run. A flow whose steps have
    other arguments in the other release completes with the outcomes of one release."""
    children: dict[tuple[int, int, str, int], list[Plain]] = {}
    for flow, body in flows["bodies"].items():
        head, parent = flows["heads"].get(flow), body.get("parent")
        if head is None or head["state"] != COMPLETED:
            continue
        if body["spec"]["name"] == PRICED and len(set(_decode(head["result"]))) > 1:
            yield "X1", f"flow {flow} has outcomes of two releases: {_decode(head['result'])}"
        if parent is not None and parent["flow"]:
            step = (parent["flow"], parent["run"], parent["name"], parent["occurrence"])
            children.setdefault(step, []).append(head["result"])
    for (flow, run, name, occurrence), results in children.items():
        for record in flows["records"].get(f"{flow}/{run}", {}).values():
            is_step = record["kind"] == "completed" and identity_of(record) == (name, occurrence)
            if is_step and record["value"] not in results:
                yield (
                    "X2",
                    f"flow {flow}/{run}: {name}#{occurrence} has the result of another child",
                )


_STEPS: dict[str, Any] = {
    "tasks.lease": _FlowReplay._on_lease,
    "tasks.report_and_lease": _FlowReplay._on_lease,
    "tasks.apply_reports": _FlowReplay._on_reports,
    "flows.start": _FlowReplay._on_start,
    "flows.redrive": _FlowReplay._on_redrive,
    "flows.redrive_undo": _FlowReplay._on_undo_redrive,
    "flows.commit": _FlowReplay._on_commit,
    "flows.send": _FlowReplay._on_send,
    "flows.cancel": _FlowReplay._on_cancel,
}


def is_flow_run(history: History) -> bool:
    """Whether the run has the workload of flows."""
    return any(event.op.startswith("flows.") for event in history)


def findings(history: History) -> list[Violation]:
    """Return all violations that the replay of each life finds, in order."""
    found: list[Violation] = []
    for life in history.store_lives():
        if not any(event.op.startswith("flow") for event in life):
            continue
        replay, last_audit = _FlowReplay(), None
        for event in expand(life):
            replay.step(event)
            if event.op == "audit":
                last_audit = event
        if life[-1].op in ("quiet", "audit") and any(event.op == "quiet" for event in life):
            replay.check_end(life[-1], last_audit)
        found += replay.found
    return found
