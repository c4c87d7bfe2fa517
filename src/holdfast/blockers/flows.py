"""Why a flow does not move: its open steps, its activation, its failed or parked code, its failed compensations, and threads
that still run."""

from __future__ import annotations

from holdfast.blockers import limits, tasks
from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker
from holdfast.blockers.runbooks import PARKED_FLOW
from holdfast.errors import NotFound
from holdfast.flows import compensation_dead_letters, step_threads
from holdfast.flows.execution import Divergence
from holdfast.flows.model import (
    EFFECT,
    FLOW,
    RECEIVE,
    SLEEP,
    TASK,
    UNDO_FAILED,
    FlowId,
    OpenStep,
    decode_open,
    get_body,
    get_head,
    keys_of,
    pack_int,
    parse_flow_id,
)
from holdfast.flows.queries import FlowDetails, get_details
from holdfast.flows.states import ENDED, FlowState
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks import queries as task_queries
from holdfast.tasks.model import keys_of as task_keys_of
from holdfast.tasks.model import pack_int as pack_task
from holdfast.value_versions import UnreadableValue

# Open steps that an answer lists.
STEPS_MAX = 100
_PARKED_CODES = (Divergence.code, UnreadableValue.code)
_KINDS = {TASK: "task", EFFECT: "effect", FLOW: "flow"}


def explain(txn: Txn, universe: str, id: str) -> WhyAnswer:
    flow = parse_flow_id(id)
    details = get_details(txn, universe, flow.seq)
    if details.body.generation != flow.generation:
        raise NotFound(what="flow", flow=id, universe=universe)
    state = FlowState(details.head.state).name.lower()
    return answer("flow", id, state, list_blockers(txn, universe, flow.seq))


def list_blockers(txn: Txn, universe: str, seq: int) -> list[Blocker]:
    """What the flow waits for, the reason of its failure, and the threads of its timed-out steps."""
    details = get_details(txn, universe, seq)
    flow = str(FlowId(details.body.generation, seq))
    names = {"flow": flow, "universe": universe}
    names["resume"] = f"holdfast flows resume {flow} --universe {universe}"
    found = _waits(txn, universe, details, names)
    if details.head.state not in ENDED:
        figures = limits.flow_inbox_figures(txn, universe, details.head.unread)
        found += limits.reached(universe, figures)
    found += _failed_compensations(txn, universe, seq)
    return [*found, *_thread_blockers(txn, universe, seq)]


def _failed_compensations(txn: Txn, universe: str, seq: int) -> list[Blocker]:
    """A dead letter that an operator has dropped blocks no more."""
    queue = compensation_dead_letters.queue_of(universe)
    return [
        blocker(
            UNDO_FAILED,
            f"the compensation {letter.step} failed: {letter.error}",
            letter.died_ns,
            names={"queue": queue, "seq": str(letter.seq)},
        )
        for letter in compensation_dead_letters.list_letters(txn, universe, seq, STEPS_MAX)
    ]


def _thread_blockers(txn: Txn, universe: str, seq: int) -> list[Blocker]:
    return [
        blocker(
            "thread_still_running",
            f"step {row.step}, attempt {thread.attempt}, timed out, but its thread still runs on worker "
            f"{row.worker}; its outcome is dropped, and it keeps one of the worker's threads",
            row.timed_out_ns,
        )
        for thread, row in step_threads.list_running(txn, universe, seq)
    ]


def _waits(txn: Txn, universe: str, details: FlowDetails, names: dict[str, str]) -> list[Blocker]:
    head = details.head
    if head.state in (FlowState.FAILED, FlowState.DEAD) and not head.redriven_by:
        at = f" at step {head.step}" if head.step else ""
        text = f"{FlowState(head.state).name}{at}, {head.code}: {head.error}"
        return [blocker("flow_failed", text, head.ended_ns, names=names)]
    if head.state in ENDED:
        return []
    if head.state == FlowState.PARKED:
        text = f"parked at step {head.step}: {head.error}"
        code = head.code if head.code in _PARKED_CODES else Divergence.code
        return [blocker(code, text, names=names, page=PARKED_FLOW)]
    if head.task:
        return _activation_blockers(txn, universe, details)
    prefix = keys_of(universe).open_steps + pack_int(details.seq)
    found: list[Blocker] = []
    for key, row in txn.scan(prefix, tuples.prefix_end(prefix), STEPS_MAX):
        *_, name, occurrence = tuples.unpack(key)
        found.append(
            _step_blocker(txn, universe, decode_open(row), f"{name!s}#{occurrence!s}", names)
        )
    if not found:
        attempts = f"attempt {head.failures + 1} of {details.body.spec.attempts}"
        text = f"its code raised {head.error_type}; it runs again after a delay, {attempts}"
        found.append(blocker("waits_for_retry", text))
    return found


def _step_blocker(
    txn: Txn, universe: str, step: OpenStep, label: str, names: dict[str, str]
) -> Blocker:
    until = step.due_ns or None
    if step.kind == SLEEP:
        return blocker("sleeping", "sleeps", step.began_ns, until)
    if step.kind == RECEIVE:
        text = f"waits for an event: {', '.join(step.types)}"
        return blocker("waits_for_event", text, step.began_ns, until, names=names)
    unserved = _unserved_child(txn, universe, step, label)
    if unserved is not None:
        return unserved
    kind = _KINDS[step.kind]
    child = _child_id(txn, universe, step)
    text = f"waits for the {kind} of step {label}"
    return blocker(f"waits_for_{kind}", text, step.began_ns, until, names={**names, "child": child})


def _child_id(txn: Txn, universe: str, step: OpenStep) -> str:
    if step.kind == EFFECT:
        return step.intent.hex()
    if step.kind == FLOW:
        return str(FlowId(get_body(txn, keys_of(universe), step.child).generation, step.child))
    row = task_queries.get_row(txn, task_keys_of(universe), pack_task(step.child))
    return "" if row is None else str(row.id)


def _unserved_child(txn: Txn, universe: str, step: OpenStep, label: str) -> Blocker | None:
    """The blocker of a child task or flow that no worker declares, if it is one."""
    kind, task = "task", step.child
    if step.kind == FLOW:
        kind, task = "flow", get_head(txn, keys_of(universe), step.child).task
    if step.kind not in (TASK, FLOW) or not task:
        return None
    if task_queries.where_is(txn, universe, task) != "stray":
        return None
    text = f"no worker of its queue declares the {kind} of step {label}"
    return blocker(f"no_worker_for_{kind}", text, step.began_ns)


def _activation_blockers(txn: Txn, universe: str, details: FlowDetails) -> list[Blocker]:
    """The blockers of the task under whose lease a worker runs the flow."""
    name, queue = details.body.spec.name, details.body.spec.queue
    row = task_queries.get_row(txn, task_keys_of(universe), pack_task(details.head.task))
    if row is not None and row.where == "leased" and txn.now_ns < row.status.expires_ns:
        return [blocker("running", "a worker runs it now")]
    if row is not None and row.where == "stray":
        text = f"no worker of queue {queue} declares the flow {name}"
        return [blocker("no_worker_for_flow", text)]
    if row is None:
        return [blocker("waits_for_worker", f"waits for a worker of queue {queue}")]
    return tasks.blockers_of(txn, universe, row)
