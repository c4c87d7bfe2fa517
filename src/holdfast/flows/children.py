"""Children of flows: tasks, effects and flows that a step waits for.

The end of a child appends the outcome of its step to the parent's records and wakes the parent, in the commit that
ends the child. A flow that ends cancels its children, unless they were started with `parent_close="abandon"`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.errors import HoldfastError, NotFound
from holdfast.flows.model import (
    EFFECT,
    FLOW,
    OWNER,
    TASK,
    UNDO_FAILED,
    UNDO_PREFIX,
    FlowId,
    OpenStep,
    Parent,
    get_head,
    keys_of,
    pack_int,
    step_key,
)
from holdfast.flows.records import (
    FlowEnded,
    FlowRedriven,
    StepCompleted,
    StepFailure,
    UndoRedriven,
    decode_record,
)
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.unit_of_work import FlowUnit, OpenFlow
from holdfast.messages import FLOW_WORLD_PREFIX, Intent, IntentReceipt, ReceiptStatus
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.tasks import dependents
from holdfast.tasks.admin import cancel_within as cancel_task
from holdfast.tasks.leases import EXPIRIES_EXHAUSTED
from holdfast.tasks.model import TaskSpec, TaskStatusRow
from holdfast.tasks.model import pack_int as pack_task
from holdfast.tasks.owner_callbacks import callbacks_of
from holdfast.tasks.states import TaskState
from holdfast.tasks.submit import TaskToSubmit, create_within
from holdfast.tasks.unit_of_work import UNSUCCESSFUL, UnitOfWork
from holdfast.world import intents


def child_key(flow: OpenFlow, name: str, occurrence: int) -> str:
    return step_key(flow.body.generation, flow.seq, flow.head.run, name, occurrence)


# -- tasks -----------------------------------------------------------------------------------------


def start_task(
    unit: FlowUnit,
    flow: OpenFlow,
    step: tuple[str, int],
    spec: TaskSpec,
    new: TaskToSubmit,
) -> int:
    """Submit the child task of a step, which is (name, occurrence). After a redrive of the flow, take the last redrive of
    the former child instead: a task in progress, one that has completed, or a redrive of a failed one. So a
    redrive of the flow and one of its task run the function once."""
    former = _former_task(unit, flow, step, spec, new)
    if former:
        status = unit.tasks.status(pack_task(former))
        if status.state == TaskState.COMPLETED:
            return former
        if status.state in UNSUCCESSFUL:
            new, former = replace(new, redrive_of=former), 0
    [seq] = [former] if former else create_within(unit.tasks, spec, [new])
    listener = codec.pack([flow.seq, flow.head.run, *step])
    dependents.listen(unit.tasks, seq, OWNER, listener)
    return seq


def _former_task(
    unit: FlowUnit, flow: OpenFlow, step: tuple[str, int], spec: TaskSpec, new: TaskToSubmit
) -> int:
    """The last redrive of the task that this step had before a redrive of the flow; 0 if none has these arguments."""
    seqs = [seq for *found, seq in redriven_tasks(unit, flow) if tuple(found) == step]
    if not seqs:
        return 0
    last = seqs[-1]
    while redriven_by := unit.tasks.status(pack_task(last)).redriven_by:
        last = redriven_by
    if unit.tasks.body(pack_task(last)) is None:
        return 0
    body, found = unit.tasks.body_and_spec(pack_task(last))
    if found.name != spec.name:
        return 0
    args = blobs.get(unit.txn, body.blob) if body.blob else body.args
    return last if args == new.args else 0


def redriven_tasks(unit: FlowUnit, flow: OpenFlow) -> tuple[tuple[str, int, int], ...]:
    """The child tasks that the last redrive of the flow or of a compensation names: (name, occurrence, seq)."""
    if not flow.head.redriven_at:
        return ()
    prefix = unit.keys.records_of(flow.seq, flow.head.run)
    row = unit.txn.get(prefix + pack_int(flow.head.redriven_at))
    record = None if row is None else decode_record(row).record
    return record.tasks if isinstance(record, FlowRedriven | UndoRedriven) else ()


def on_child_done(unit: FlowUnit, flow: OpenFlow, step: tuple[str, int], seq: int) -> None:
    """Record the outcome of a child task that had completed before its step opened."""
    status = unit.tasks.status(pack_task(seq))
    if status.state == TaskState.COMPLETED:
        _resolve_by_task(unit, (flow.seq, flow.head.run, *step), status)


def on_task_end(tasks: UnitOfWork, listener: bytes, status: TaskStatusRow) -> None:
    """Record the outcome of a child task. Called in the commit that ends the task."""
    unit = FlowUnit(tasks.txn, tasks.keys.universe, tasks)
    flow_seq, run, name, occurrence = codec.unpack(listener)
    _resolve_by_task(unit, (flow_seq, run, name, occurrence), status)
    unit.close()


def _resolve_by_task(
    unit: FlowUnit, step: tuple[int, int, str, int], status: TaskStatusRow
) -> None:
    if status.state == TaskState.COMPLETED:
        value = blobs.get(unit.txn, status.blob) if status.blob else status.result
        resolve_step(unit, *step, value=value, attempts=status.attempt)
    else:
        resolve_step(
            unit,
            *step,
            code=status.reason or TaskState(status.state).name.lower(),
            error_type=_error_type(status.error),
            error=status.error,
            attempts=status.attempt,
        )


def _error_type(error: str) -> str:
    """The class name at the beginning of an error's text."""
    name, colon, _ = error.partition(":")
    return name if colon and name.replace(".", "_").isidentifier() else ""


# -- effects ---------------------------------------------------------------------------------------


def start_effect(unit: FlowUnit, intent: Intent) -> None:
    intents.dispatch(unit.txn, replace(intent, enqueued_at_ns=unit.now_ns))


def on_receipt(txn: Txn, intent: Intent, receipt: IntentReceipt) -> None:
    """Record the outcome of an effect. Called in the commit that ends the effect."""
    seq = intent.world_id.removeprefix(FLOW_WORLD_PREFIX)
    run, occurrence, name = (intent.correlation_id or "0/0/").split("/", 2)
    unit = FlowUnit(txn, intent.universe_id)
    if receipt.status is ReceiptStatus.OK:
        resolve_step(
            unit,
            int(seq),
            int(run),
            name,
            int(occurrence),
            value=receipt.value,
            attempts=receipt.attempts,
        )
    else:
        error = receipt.error or receipt.code
        resolve_step(
            unit,
            int(seq),
            int(run),
            name,
            int(occurrence),
            code=receipt.code or receipt.status.value,
            error_type=_error_type(error) or receipt.code,
            error=error,
            attempts=receipt.attempts,
        )
    unit.close()


def is_flow_gone(txn: Txn, universe: str, world_id: str) -> bool:
    """Whether the flow of an intent has ended or was removed. Its effects are dropped."""
    seq = int(world_id.removeprefix(FLOW_WORLD_PREFIX))
    try:
        return get_head(txn, keys_of(universe), seq).state in ENDED
    except NotFound:
        return True


# -- outcomes --------------------------------------------------------------------------------------


def resolve_step(
    unit: FlowUnit,
    flow_seq: int,
    run: int,
    name: str,
    occurrence: int,
    *,
    value: bytes = b"",
    code: str = "",
    error_type: str = "",
    error: str = "",
    attempts: int = 1,
) -> None:
    """Append the outcome of an open step and wake its flow. Without such a step nothing changes."""
    try:
        flow = unit.load(flow_seq)
    except NotFound:
        return
    if flow.head.run != run or flow.head.state in ENDED:
        return
    step = unit.open_step(flow, name, occurrence)
    if step is None:
        return
    unit.delete_open(flow, name, occurrence, step)
    if code and name.startswith(UNDO_PREFIX):
        code = UNDO_FAILED
    if code:
        unit.append(
            flow,
            StepFailure(
                name=name,
                occurrence=occurrence,
                position=step.position,
                digest=step.digest,
                code=code,
                error_type=error_type,
                error=error[:ERROR_TEXT_CHARS_MAX],
                attempts=attempts,
                began_ns=step.began_ns,
                child=step.child if step.kind == TASK else 0,
            ),
        )
    else:
        inline, blob = unit.inline_or_blob(value)
        unit.append(
            flow,
            StepCompleted(
                name=name,
                occurrence=occurrence,
                position=step.position,
                digest=step.digest,
                value=inline,
                blob=blob,
                attempts=attempts,
                began_ns=step.began_ns,
            ),
        )
    unit.wake(flow)


def notify_parent(unit: FlowUnit, flow: OpenFlow) -> None:
    """Record the end of a child flow in its parent."""
    parent, head = flow.body.parent, flow.head
    if parent is None:
        return
    if parent.intent:
        _answer_world(unit, flow, parent.intent)
        return
    if parent.schedule:
        callbacks_of("schedules").on_flow_end(unit, parent.schedule)
        return
    if not _is_awaited(unit, flow, parent):
        return
    if head.state == FlowState.COMPLETED:
        value = blobs.get(unit.txn, head.blob) if head.blob else head.result
        resolve_step(unit, parent.flow, parent.run, parent.name, parent.occurrence, value=value)
    else:
        resolve_step(
            unit,
            parent.flow,
            parent.run,
            parent.name,
            parent.occurrence,
            code=head.code or FlowState(head.state).name.lower(),
            # A child that timed out, was cancelled or lost its workers has no error of its code.
            error_type=head.error_type or "FlowFailed",
            error=head.error or _end_text(flow),
        )


def _end_text(flow: OpenFlow) -> str:
    state, code = FlowState(flow.head.state).name, flow.head.code
    return f"{FlowId(flow.body.generation, flow.seq)} is {state}: {code or state.lower()}"


def _is_awaited(unit: FlowUnit, flow: OpenFlow, parent: Parent) -> bool:
    """Whether the step of the parent waits for this child, not for one that replaced it after a redrive."""
    try:
        step = unit.open_step(unit.load(parent.flow), parent.name, parent.occurrence)
    except NotFound:
        return False
    return step is not None and step.child == flow.seq


def _answer_world(unit: FlowUnit, flow: OpenFlow, packed_intent: bytes) -> None:
    """Deliver the end of a flow to the world that started it, as a receipt."""
    from holdfast.messages import receipt_ingress
    from holdfast.world.ingress import put_ingress

    intent, head = codec.unpack_as(Intent, packed_intent), flow.head
    if intents.resolve(unit.txn, intent.universe_id, intent.intent_hash) is None:
        return  # the world has its receipt: it cancelled the flow, or an operator redrove it
    ok = head.state == FlowState.COMPLETED
    value = blobs.get(unit.txn, head.blob) if head.blob else head.result
    receipt = IntentReceipt(
        intent.intent_hash,
        intent.effect_kind,
        ReceiptStatus.OK if ok else ReceiptStatus.ERROR,
        value if ok else b"",
        code="" if ok else head.code or FlowState(head.state).name.lower(),
        error="" if ok else head.error,
        tag=intent.tag,
        redrive_of=intent.redrive_of,
    )
    ingress = receipt_ingress(receipt, correlation_id=intent.correlation_id)
    try:
        put_ingress(unit.txn, intent.universe_id, intent.world_id, None, ingress, intent.trace)
    except HoldfastError:
        return  # the world was deleted


# -- cancellation ----------------------------------------------------------------------------------

CancelFlow = Callable[[FlowUnit, OpenFlow], bool]


def cancel_open(
    unit: FlowUnit, flow: OpenFlow, name: str, occurrence: int, cancel_flow: CancelFlow
) -> None:
    """Cancel an open step: its timer, its receive or its child. No outcome is recorded."""
    step = unit.open_step(flow, name, occurrence)
    if step is None:
        return
    unit.delete_open(flow, name, occurrence, step)
    if step.kind == TASK and step.cancels_child:
        cancel_task(unit.tasks, step.child)
    elif step.kind == EFFECT:
        intents.cancel_silently(unit.txn, unit.universe, step.intent)
    elif step.kind == FLOW and step.cancels_child:
        cancel_flow(unit, unit.load(step.child))


def cancel_child(unit: FlowUnit, step: OpenStep, cancel_flow: CancelFlow) -> None:
    """Cancel the child of a step that exceeded its timeout."""
    if step.kind == TASK:
        cancel_task(unit.tasks, step.child)
    elif step.kind == EFFECT:
        intents.cancel_silently(unit.txn, unit.universe, step.intent)
    elif step.kind == FLOW:
        cancel_flow(unit, unit.load(step.child))


def close_children(unit: FlowUnit, flow: OpenFlow, cancel_flow: CancelFlow) -> None:
    """Cancel the child flows of a flow that ended, except abandoned ones."""
    prefix = unit.keys.children + pack_int(flow.seq)
    for key, _ in unit.txn.scan(prefix, tuples.prefix_end(prefix)):
        seq = tuples.unpack(key)[-1]
        assert isinstance(seq, int)
        try:
            child = unit.load(seq)
        except NotFound:
            continue
        parent = child.body.parent
        if parent is not None and parent.cancels and child.head.state not in ENDED:
            cancel_flow(unit, child)


# -- activation tasks ------------------------------------------------------------------------------


def on_activation_dead(
    tasks: UnitOfWork, args: bytes, task_seq: int, reason: str, finish: Callable[..., None]
) -> None:
    """End a flow whose activation died: its workers were lost too often, or an operator cancelled the task."""
    flow_seq, _ = codec.unpack(args)
    unit = FlowUnit(tasks.txn, tasks.keys.universe, tasks)
    try:
        flow = unit.load(flow_seq)
    except NotFound:
        return
    if flow.head.task != task_seq or flow.head.state in ENDED:
        return
    code = "worker_lost" if reason == EXPIRIES_EXHAUSTED else reason
    unit.append(flow, FlowEnded(FlowState.DEAD, code))
    finish(unit, flow)
    unit.close()
