"""Flow operations: the only code that writes flow state.

    start      a new flow, or the flow of its key
    commit     the records of a worker under the lease of the flow's activation; suspend, end, again, park
    cancel     recorded once; the flow's code sees it at its next await
    resume     a PARKED flow runs again

`due_times.py`, `mailbox.py`, `commit_batch.py`, `redrive.py` and `fork.py` have more operations.

Each operation runs where commits are applied, so two of them never conflict. An outcome from outside (an event, a
timer, the end of a child) is its own record. It wakes the flow in the same commit: the commit also submits
the activation task.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.validation import check_limit
from holdfast.errors import Fenced, KeyConflict, NotFound
from holdfast.flows import children, mailbox
from holdfast.flows.model import (
    EFFECT,
    FLOW,
    RECEIVE,
    RECEIVE_NAME,
    TASK,
    FlowBodyRow,
    FlowHeadRow,
    FlowId,
    FlowSpec,
    OpenStep,
    Parent,
    StartedFlow,
    pack_int,
)
from holdfast.flows.new_flow import NewFlow, check_new
from holdfast.flows.records import (
    AnyRecord,
    AttemptRaised,
    CancelRequested,
    CompensationStarted,
    FlowEnded,
    FlowResumed,
    FlowTimedOut,
    StepCompleted,
    decode_record,
)
from holdfast.flows.redrive import redrive_within
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.unit_of_work import FlowUnit, OpenFlow
from holdfast.messages import Intent
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import encode_int
from holdfast.tasks.leases import is_live
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.model import pack_int as pack_task
from holdfast.tasks.submit import TaskToSubmit
from holdfast.world import load_admission

# Records in the answer to one commit. The worker asks again for the rest.
RECORDS_PAGE = 1_000


@operation("flows.start")
def start(txn: Txn, universe: str, new: list[NewFlow]) -> list[StartedFlow]:
    """Start flows atomically. For a key in use, returns its flow; other arguments are a conflict."""
    check_limit(len(new), "flows")
    for new_flow in new:
        check_new(universe, new_flow)
    unit = FlowUnit(txn, universe)
    before = txn.count(unit.keys.seq_counter)
    started = [start_within(unit, new_flow) for new_flow in new]
    unit.close()
    # A known key starts nothing, so the repeat of an accepted call is never refused.
    if txn.count(unit.keys.seq_counter) > before:
        judge_start(unit, {new_flow.spec.queue for new_flow in new})
    return started


def judge_start(unit: FlowUnit, queues: Collection[str], count: int = 0) -> None:
    """Refuse new flows if a load limit is exceeded. `count` activations are submitted after this."""
    limits = unit.tasks.load_limits
    if limits is not None:
        unit.tasks.judge_new_tasks(queues, count)
        load_admission.judge_emissions(unit.txn, unit.universe, limits)


def start_within(unit: FlowUnit, new_flow: NewFlow) -> StartedFlow:
    txn, keys, spec = unit.txn, unit.keys, new_flow.spec
    index_key = keys.keys + tuples.pack((spec.name, new_flow.key)) if new_flow.key else b""
    if index_key and (packed := txn.get(index_key)) is not None:
        existing = unit.load(tuples.unpack_last_int(packed, 0))
        if _args_of(txn, existing) != new_flow.args:
            id = FlowId(existing.body.generation, existing.seq)
            raise KeyConflict(what="flow", name=spec.name, key=new_flow.key, flow=str(id))
        return StartedFlow(existing.seq, existing.body.generation)
    seq = txn.count(keys.seq_counter) + 1
    txn.put(keys.seq_counter, encode_int(seq))
    args, blob = unit.inline_or_blob(new_flow.args)
    body = FlowBodyRow(
        spec,
        args,
        unit.now_ns,
        txn.generation,
        new_flow.key,
        blob,
        new_flow.parent,
        tag=new_flow.tag,
        trace=new_flow.trace,
    )
    flow = unit.create(seq, body, FlowHeadRow(run_started_ns=unit.now_ns))
    if index_key:
        txn.put(index_key, pack_int(seq))
    if new_flow.parent is not None and new_flow.parent.flow:
        txn.put(keys.children + tuples.pack((new_flow.parent.flow, seq)), b"")
    unit.put_timeout(flow)
    unit.activate(flow)
    return StartedFlow(seq, txn.generation)


# -- commits of a worker ---------------------------------------------------------------------------

CONTINUE, SUSPEND, END, AGAIN, RETRY, PARK, RENEW = range(7)


class OpenRequest(Record, frozen=True):
    """A step to start outside the worker: a sleep, a receive, a task, an effect or a flow."""

    kind: int
    name: str
    occurrence: int
    position: int
    digest: bytes
    # For a sleep and a timeout: the duration. -1: none.
    wait_ns: int = -1
    types: tuple[str, ...] = ()
    task: TaskSpec | None = None
    args: bytes = b""
    limit: str = ""
    flow: FlowSpec | None = None
    intent: bytes = b""
    cancels_child: bool = True
    # After a redrive: the digests of the other ways to write the arguments of a child flow.
    equal_args: tuple[bytes, ...] = ()
    tag: str = ""
    # The trace context of the flow's code, for a child.
    trace: bytes = b""


class FlowCommit(Record, frozen=True):
    """The records of a worker. `known` is the number of records that it has seen."""

    flow: int
    run: int
    task: int
    lease: int
    known: int
    records: list[AnyRecord]
    opens: tuple[OpenRequest, ...] = ()
    # Open steps to cancel: (name, occurrence).
    cancels: tuple[tuple[str, int], ...] = ()
    action: int = CONTINUE
    result: bytes = b""
    not_before_ns: int = 0


class FlowAnswer(Record, frozen=True):
    """`records` are all records after the known ones, in order, including those of this commit. `applied` means
    that the action was applied: a suspended flow must have seen all records."""

    records: list[AnyRecord]
    applied: bool
    more: bool = False
    # The flow was suspended instead: its compensations wait for child flows.
    suspended: bool = False
    # The records after the known ones are those of the commit, which the caller has. `records` is empty.
    only_own: bool = False
    # The commit ended the activation and completed its task: the worker reports nothing.
    reported: bool = False


class CommitOutcome(NamedTuple):
    """`whole` means that all records of the commit were appended, `ended` that the activation is over."""

    applied: bool
    suspended: bool
    whole: bool
    ended: bool


@operation("flows.commit")
def commit(txn: Txn, universe: str, generation: int, work: FlowCommit) -> FlowAnswer:
    """Append records and start steps, under the live lease of the flow's activation. A stale worker is fenced."""
    unit = FlowUnit(txn, universe)
    outcome = commit_within(unit, generation, work)
    unit.close()
    return answer_of(unit, work, outcome)


def commit_within(unit: FlowUnit, generation: int, work: FlowCommit) -> CommitOutcome:
    """Apply a commit. Returns whether its action was applied, and whether the flow was suspended instead."""
    flow = _require_lease(unit, generation, work)
    unseen = flow.head.records - work.known
    # A cancellation or a timeout came first: the code has to see it before the flow ends.
    stopped = bool(unseen) and _ends(work) and _has_cause(unit, flow, work.known, unseen)
    fails = any(isinstance(record, CompensationStarted) for record in work.records)
    answered = _answered_receives(unit, flow, work)
    waits = _cancel_steps(unit, flow, work, fails)
    if not _ends(work):
        mailbox.return_received(unit, flow, answered)
    for record in work.records:
        if not ((stopped or waits) and isinstance(record, _ENDINGS)):
            unit.append_value(flow, record)
    before = flow.head.records
    for request in work.opens:
        _open(unit, flow, request)
    resolved = flow.head.records > before
    applied = not stopped and (work.action != SUSPEND or not (unseen or resolved))
    suspended = waits and not unseen
    if suspended:
        unit.suspend(flow)
    elif applied:
        if work.action == AGAIN:
            # The receives of this run are closed before its unseen events return to the inbox.
            _cancel_all_open(unit, flow)
            mailbox.return_received(unit, flow, answered)
            mailbox.return_unseen(unit, flow, work.known, unseen)
        _apply_action(unit, flow, work)
    ended = suspended or (applied and work.action != CONTINUE)
    if ended:
        unit.complete_activation(work.task, work.lease)
    return CommitOutcome(applied, suspended, not (stopped or waits), ended)


def answer_of(unit: FlowUnit, work: FlowCommit, outcome: CommitOutcome) -> FlowAnswer:
    """The records after the known ones, in pages. Call it after the unit of work is closed."""
    applied, suspended, whole, ended = outcome
    head = unit.load(work.flow).head
    if whole and head.run == work.run and head.records == work.known + len(work.records):
        return FlowAnswer([], applied, suspended=suspended, only_own=True, reported=ended)
    prefix = unit.keys.records_of(work.flow, work.run)
    start, end = prefix + pack_int(work.known + 1), tuples.prefix_end(prefix)
    rows = unit.txn.scan(start, end, RECORDS_PAGE)
    records = [_with_value(unit.txn, decode_record(row).record) for _, row in rows]
    more = len(rows) == RECORDS_PAGE
    return FlowAnswer(records, applied, more, suspended, reported=ended)


def _cancel_steps(unit: FlowUnit, flow: OpenFlow, work: FlowCommit, fails: bool) -> bool:
    """Cancel open steps. Returns whether compensations have to wait for the end of child flows."""
    waits = False
    for name, occurrence in work.cancels:
        step = unit.open_step(flow, name, occurrence)
        if step is not None and fails and step.kind == FLOW and step.cancels_child:
            cancel_within(unit, unit.load(step.child))
            # Its end is recorded as the outcome of the step, possibly at once.
            waits |= unit.open_step(flow, name, occurrence) is not None
        else:
            children.cancel_open(unit, flow, name, occurrence, cancel_within)
    return waits


def _answered_receives(unit: FlowUnit, flow: OpenFlow, work: FlowCommit) -> set[tuple[str, int]]:
    """The receives that the code cancelled after an event or a timeout had come."""
    return {
        (name, occurrence)
        for name, occurrence in work.cancels
        if name == RECEIVE_NAME and unit.open_step(flow, name, occurrence) is None
    }


def _require_lease(unit: FlowUnit, generation: int, work: FlowCommit) -> OpenFlow:
    """Load the flow, or raise Fenced if the activation is not the current one or its lease is over."""
    try:
        flow = unit.load(work.flow)
    except NotFound:
        raise Fenced(resource=f"flow/{work.flow}", held=work.lease, current=0) from None
    # The commits of a worker share few range leases. A loaded one has the status of its tasks.
    unit.tasks.leases.get(work.lease)
    status = unit.tasks.status(pack_task(work.task))
    live = is_live(status, work.lease, unit.now_ns) and generation == unit.txn.generation
    if not live or flow.head.task != work.task or flow.head.run != work.run:
        raise Fenced(resource=f"flow/{work.flow}", held=work.lease, current=status.lease)
    return flow


_ENDINGS = (CompensationStarted, FlowEnded, AttemptRaised)


def _ends(work: FlowCommit) -> bool:
    return work.action in (END, AGAIN, RETRY) or any(
        isinstance(record, CompensationStarted) for record in work.records
    )


def _has_cause(unit: FlowUnit, flow: OpenFlow, known: int, unseen: int) -> bool:
    """Whether the unseen records contain a cancellation or a timeout of the flow."""
    prefix = unit.keys.records_of(flow.seq, flow.head.run)
    rows = unit.txn.scan(prefix + pack_int(known + 1), prefix + pack_int(known + unseen + 1))
    causes = (CancelRequested, FlowTimedOut)
    return any(isinstance(decode_record(row).record, causes) for _, row in rows)


def _open(unit: FlowUnit, flow: OpenFlow, request: OpenRequest) -> None:
    name, occurrence = request.name, request.occurrence
    if unit.open_step(flow, name, occurrence) is not None:
        return
    due_ns = unit.now_ns + request.wait_ns if request.wait_ns >= 0 else 0
    step = OpenStep(
        request.kind,
        request.position,
        request.digest,
        unit.now_ns,
        due_ns,
        request.types,
        cancels_child=request.cancels_child,
    )
    if request.kind == RECEIVE:
        taken = mailbox.take_mail(unit, flow, request.types)
        if taken is not None:
            unit.append_value(flow, mailbox.received(name, occurrence, step, *taken))
            return
    elif request.kind == TASK:
        assert request.task is not None
        child = children.start_task(
            unit,
            flow,
            (name, occurrence),
            request.task,
            TaskToSubmit(request.args, limit=request.limit, trace=request.trace, tag=request.tag),
        )
        step = replace(step, child=child)
        if flow.head.redriven_at:
            unit.put_open(flow, name, occurrence, step)
            children.on_child_done(unit, flow, (name, occurrence), child)
            return
    elif request.kind == FLOW:
        child_flow = _start_child(unit, flow, request)
        step = replace(step, child=child_flow.seq)
        if child_flow.head.state in ENDED:
            unit.put_open(flow, name, occurrence, step)
            children.notify_parent(unit, child_flow)
            return
    elif request.kind == EFFECT:
        intent = codec.unpack_as(Intent, request.intent)
        children.start_effect(unit, intent)
        step = replace(step, intent=intent.intent_hash)
    unit.put_open(flow, name, occurrence, step)


def _start_child(unit: FlowUnit, flow: OpenFlow, request: OpenRequest) -> OpenFlow:
    """Start the child flow of a step. A redriven parent asks again for a step whose child exists: a failed child is
    redriven, a running or completed one is taken, a cancelled one is replaced."""
    assert request.flow is not None
    parent = Parent(
        flow.seq, flow.head.run, request.name, request.occurrence, request.cancels_child
    )
    key = children.child_key(flow, request.name, request.occurrence)
    new_flow = NewFlow(request.flow, request.args, key, parent, request.tag, request.trace)
    index_key = unit.keys.keys + tuples.pack((request.flow.name, key))
    if (packed := unit.txn.get(index_key)) is not None:
        former = unit.load(tuples.unpack_last_int(packed, 0))
        args = _args_of(unit.txn, former)
        if args == request.args or codec.digest(args) in request.equal_args:
            if former.head.state in (FlowState.FAILED, FlowState.DEAD):
                return redrive_within(unit, former)
            if not former.head.cancelled:
                return former
        unit.txn.delete(index_key)
    return unit.load(start_within(unit, new_flow).seq)


def _args_of(txn: Txn, flow: OpenFlow) -> bytes:
    return blobs.get(txn, flow.body.blob) if flow.body.blob else flow.body.args


def _apply_action(unit: FlowUnit, flow: OpenFlow, work: FlowCommit) -> None:
    match work.action:
        case 1:  # SUSPEND
            unit.suspend(flow)
        case 2:  # END
            result, blob = unit.inline_or_blob(work.result)
            flow.head = replace(flow.head, result=result, blob=blob, task=0)
            finish(unit, flow)
        case 3:  # AGAIN
            _start_next_run(unit, flow, work.result)
        case 4:  # RETRY
            unit.suspend(flow)
            unit.put_retry(flow, work.not_before_ns)
        case 5:  # PARK
            flow.head = replace(flow.head, task=0)
        case 6:  # RENEW
            unit.suspend(flow)
            unit.wake(flow)


def _cancel_all_open(unit: FlowUnit, flow: OpenFlow) -> None:
    for name, occurrence, _ in unit.open_steps(flow):
        children.cancel_open(unit, flow, name, occurrence, cancel_within)


def finish(unit: FlowUnit, flow: OpenFlow) -> None:
    """Clean up after the end of a flow: its open steps, its timeout, its children, its parent."""
    _cancel_all_open(unit, flow)
    unit.delete_timeout(flow)
    children.close_children(unit, flow, cancel_within)
    children.notify_parent(unit, flow)


def _start_next_run(unit: FlowUnit, flow: OpenFlow, args: bytes) -> None:
    """End the run and start the next one, with the same id, inbox and published values."""
    unit.delete_timeout(flow)
    until_ns = unit.now_ns + flow.body.spec.retain_ns
    unit.txn.put(unit.keys.retained_runs + tuples.pack((until_ns, flow.seq, flow.head.run)), b"")
    if flow.head.args_blob:
        blobs.release.fn(unit.txn, flow.head.args_blob)
    inline, blob = unit.inline_or_blob(args)
    flow.head = FlowHeadRow(
        run=flow.head.run + 1,
        run_started_ns=unit.now_ns,
        mail=flow.head.mail,
        unread=flow.head.unread,
        args=inline,
        args_blob=blob,
        state=flow.head.state,
    )
    unit.put_timeout(flow)
    unit.activate(flow)


def _with_value(txn: Txn, record: AnyRecord) -> AnyRecord:
    if isinstance(record, StepCompleted) and record.blob:
        return replace(record, value=blobs.get(txn, record.blob))
    return record


# -- cancellation ----------------------------------------------------------------------------------


@operation("flows.cancel")
def cancel(txn: Txn, universe: str, flow_seq: int, generation: int) -> bool:
    """Record a cancellation. Returns whether this call caused it."""
    unit = FlowUnit(txn, universe)
    flow = unit.load(flow_seq)
    if flow.body.generation != generation:
        raise NotFound(what="flow", flow=str(FlowId(generation, flow_seq)))
    caused = cancel_within(unit, flow)
    unit.close()
    return caused


def cancel_within(unit: FlowUnit, flow: OpenFlow) -> bool:
    head = flow.head
    if head.state == FlowState.PARKED:
        # Its code does not fit the record, so no compensation can run.
        if not head.cancelled:
            unit.append(flow, CancelRequested())
        unit.append(flow, FlowEnded(FlowState.CANCELLED, "cancelled"))
        finish(unit, flow)
        return True
    if head.state in ENDED or head.cancelled or head.end_state:
        return False
    unit.append(flow, CancelRequested())
    unit.wake(flow)
    return True


# -- operators -------------------------------------------------------------------------------------


@operation("flows.resume")
def resume(txn: Txn, universe: str, flow_seq: int, code_version: str = "") -> bool:
    """Run a PARKED flow again. With a code version, only if other code had parked it. Returns whether it resumed."""
    unit = FlowUnit(txn, universe)
    flow = unit.load(flow_seq)
    if flow.head.state != FlowState.PARKED:
        return False
    if code_version and flow.head.code_version == code_version:
        return False
    unit.append(flow, FlowResumed())
    unit.activate(flow)
    unit.close()
    return True
