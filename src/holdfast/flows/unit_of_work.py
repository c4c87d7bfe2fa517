"""The unit of work of one flow operation: heads, records, indexes, counters and activation tasks, in one commit.

`FlowUnit` loads each head once and writes it at the end. It moves flows between states, appends their records and
submits activation tasks through the unit of work of tasks, so that both logs change in the same commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES
from holdfast.durable import error_groups, load_limits, tags
from holdfast.durable.ended_counts import FLOW, EndedDeltas
from holdfast.errors import NotFound
from holdfast.flows import compensation_dead_letters, head_fold, inbox_bytes, name_index
from holdfast.flows.model import (
    OWNER,
    RETRY_NAME,
    TASK_PREFIX,
    TIMEOUT_NAME,
    FlowBodyRow,
    FlowCounts,
    FlowHeadRow,
    FlowKeys,
    FlowSpec,
    OpenStep,
    decode_body,
    decode_head,
    decode_open,
    get_body,
    keys_of,
    pack_int,
)
from holdfast.flows.records import AnyRecord, Published, RecordRow, StepCompleted
from holdfast.flows.states import ENDED, FlowEvent, FlowState
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.tasks.model import LOOP, TaskSpec
from holdfast.tasks.reports import TaskReport, complete_within
from holdfast.tasks.submit import TaskToSubmit, create_each_within
from holdfast.tasks.unit_of_work import UnitOfWork

# The result of an activation task.
NO_RESULT = codec.pack(None)
# The counter of each state in `FlowCounts`.
_COUNTERS = [state.name.lower() for state in FlowState]
_UNSUCCESSFUL = (FlowState.FAILED, FlowState.DEAD)
# A lease is extended while the worker's loop runs, for this long without a recorded step.
ACTIVATION_WINDOW_NS = 7 * 86_400 * S


@dataclass
class OpenFlow:
    """A flow that an operation changes."""

    seq: int
    body: FlowBodyRow
    stored: FlowHeadRow | None
    head: FlowHeadRow


class FlowUnit:
    def __init__(self, txn: Txn, universe: str, tasks: UnitOfWork | None = None) -> None:
        """`tasks` is the open unit of work of tasks, if the operation runs inside one."""
        self.txn = txn
        self.universe = universe
        self.keys: FlowKeys = keys_of(universe)
        self.now_ns = txn.now_ns
        self._owns_tasks = tasks is None
        self.tasks = UnitOfWork(txn, universe) if tasks is None else tasks
        self._flows: dict[int, OpenFlow] = {}
        # By seq, in the order of the activations.
        self._wakes: dict[int, OpenFlow] = {}
        # Activation tasks that this operation ends.
        self._ended_activations: list[TaskReport] = []
        self._count_deltas: dict[str, dict[str, int]] = {}
        self._ended = EndedDeltas()

    # -- flows ---------------------------------------------------------------------------------

    def load(self, seq: int) -> OpenFlow:
        flow = self._flows.get(seq)
        if flow is None:
            body_row = self.txn.get(self.keys.bodies + pack_int(seq))
            head_row = self.txn.get(self.keys.heads + pack_int(seq))
            if body_row is None or head_row is None:
                raise NotFound(what="flow", flow=seq)
            head = decode_head(head_row)
            flow = self._flows[seq] = OpenFlow(seq, decode_body(body_row), head, head)
        return flow

    def create(self, seq: int, body: FlowBodyRow, head: FlowHeadRow) -> OpenFlow:
        self.txn.put(self.keys.bodies + pack_int(seq), codec.pack(body))
        tags.add(self.txn, self.keys.tags, body.tag, pack_int(seq))
        name_index.add(self.txn, self.universe, body.spec.name, seq)
        flow = self._flows[seq] = OpenFlow(seq, body, None, head)
        return flow

    def append(self, flow: OpenFlow, record: AnyRecord) -> None:
        """Append a record and apply it to the head."""
        flow.head = head_fold.apply_record(flow.head, record, self.now_ns)
        key = self.keys.records_of(flow.seq, flow.head.run) + pack_int(flow.head.records)
        self.txn.put(key, codec.pack(RecordRow(self.now_ns, record)))
        compensation_dead_letters.add_if_compensation_failed(
            self.txn, self.universe, flow.seq, flow.body, flow.head.run, record
        )

    def append_value(self, flow: OpenFlow, record: AnyRecord) -> None:
        """Append a record. A large value goes into a blob, and a published value into its row."""
        if isinstance(record, StepCompleted) and record.value:
            value, blob = self.inline_or_blob(record.value)
            record = replace(record, value=value, blob=blob)
        self.append(flow, record)
        if isinstance(record, Published):
            self.txn.put(self.keys.published + tuples.pack((flow.seq, record.name)), record.value)
            self.txn.notify(self.keys.topic(flow.seq))

    def wake(self, flow: OpenFlow) -> None:
        """Submit an activation for a flow that has none. A running flow is notified instead."""
        if flow.head.task:
            self.txn.notify(self.keys.topic(flow.seq))
            return
        if flow.head.state in (FlowState.WAITING, FlowState.COMPENSATING):
            flow.head = head_fold.move(flow.head, FlowEvent.WAKE)
        if flow.head.state in (FlowState.RUNNING, FlowState.COMPENSATING):
            self.activate(flow)

    def activate(self, flow: OpenFlow) -> None:
        self._wakes[flow.seq] = flow
        # Replaced by the seq of the task in `close`.
        flow.head = replace(flow.head, task=-1)

    def complete_activation(self, task: int, lease: int) -> None:
        """Complete the task of an activation that is over, in the commit that ends it."""
        self._ended_activations.append(TaskReport(task, lease, result=NO_RESULT))

    def activation_count(self) -> int:
        """The number of activations that `close` submits."""
        return len(self._wakes)

    def suspend(self, flow: OpenFlow) -> None:
        flow.head = replace(head_fold.move(flow.head, FlowEvent.SUSPEND), task=0)

    def inline_or_blob(self, value: bytes) -> tuple[bytes, bytes]:
        if len(value) > BLOB_THRESHOLD_BYTES:
            return b"", blobs.put(self.txn, value)
        return value, b""

    def forget(self, flow: OpenFlow) -> None:
        """Delete the body, the head and the index row of a flow past its retention."""
        packed_seq = pack_int(flow.seq)
        self.txn.delete(self.keys.bodies + packed_seq)
        self.txn.delete(self.keys.heads + packed_seq)
        tags.remove(self.txn, self.keys.tags, flow.body.tag, packed_seq)
        name_index.remove(self.txn, self.universe, flow.body.spec.name, flow.seq)
        self.txn.delete(self.keys.state_key(flow.head.state, flow.seq))
        self._count(flow.body.spec.name, flow.head.state, -1)
        self._group_error(flow.seq, flow.stored, None)
        self._remove_end(flow, flow.stored)
        del self._flows[flow.seq]

    # -- open steps and due times --------------------------------------------------------------

    def open_step(self, flow: OpenFlow, name: str, occurrence: int) -> OpenStep | None:
        row = self.txn.get(self.keys.open_key(flow.seq, name, occurrence))
        return None if row is None else decode_open(row)

    def put_open(self, flow: OpenFlow, name: str, occurrence: int, step: OpenStep) -> None:
        self.txn.put(self.keys.open_key(flow.seq, name, occurrence), codec.pack(step))
        flow.head = replace(flow.head, open_steps=flow.head.open_steps + 1)
        if step.due_ns:
            self.put_due(step.due_ns, flow.seq, name, occurrence)

    def delete_open(self, flow: OpenFlow, name: str, occurrence: int, step: OpenStep) -> None:
        self.txn.delete(self.keys.open_key(flow.seq, name, occurrence))
        flow.head = replace(flow.head, open_steps=flow.head.open_steps - 1)
        if step.due_ns:
            self.txn.delete(self.keys.due_key(step.due_ns, flow.seq, name, occurrence))

    def open_steps(self, flow: OpenFlow) -> list[tuple[str, int, OpenStep]]:
        if not flow.head.open_steps:
            return []
        prefix = self.keys.open_steps + pack_int(flow.seq)
        found: list[tuple[str, int, OpenStep]] = []
        for key, row in self.txn.scan(prefix, tuples.prefix_end(prefix)):
            *_, name, occurrence = tuples.unpack(key)
            assert isinstance(name, str)
            assert isinstance(occurrence, int)
            found.append((name, occurrence, decode_open(row)))
        return found

    def put_due(self, due_ns: int, seq: int, name: str, occurrence: int = 0) -> None:
        self.txn.put(self.keys.due_key(due_ns, seq, name, occurrence), b"")
        self.txn.notify(self.keys.due_topic)

    def timeout_ns(self, flow: OpenFlow) -> int:
        """The time at which the present run times out, 0 if never."""
        limit_ns = flow.body.spec.timeout_ns
        return flow.head.run_started_ns + limit_ns if limit_ns else 0

    def delete_timeout(self, flow: OpenFlow) -> None:
        if due_ns := self.timeout_ns(flow):
            self.txn.delete(self.keys.due_key(due_ns, flow.seq, TIMEOUT_NAME, 0))

    def put_timeout(self, flow: OpenFlow) -> None:
        if due_ns := self.timeout_ns(flow):
            self.put_due(due_ns, flow.seq, TIMEOUT_NAME)

    def put_retry(self, flow: OpenFlow, due_ns: int) -> None:
        self.put_due(due_ns, flow.seq, RETRY_NAME)

    # -- the end of the operation --------------------------------------------------------------

    def close(self) -> None:
        if self._ended_activations:
            complete_within(self.tasks, self._ended_activations)
        self._submit_activations()
        for flow in self._flows.values():
            self._save(flow)
        self._save_counts()
        self._ended.save(self.txn, self.universe, FLOW, self.now_ns)
        if self._owns_tasks:
            self.tasks.close()

    def _submit_activations(self) -> None:
        """Submit the activations together: consecutive ones of one spec share an index row and a lease row."""
        woken = [flow for flow in self._wakes.values() if flow.head.task == -1]
        for first in range(0, len(woken), BATCH_MAX):
            page = woken[first : first + BATCH_MAX]
            specs = [activation_spec(flow.body.spec) for flow in page]
            new = [
                TaskToSubmit(codec.pack([flow.seq, flow.head.run]), trace=flow.body.trace)
                for flow in page
            ]
            for flow, seq in zip(page, create_each_within(self.tasks, specs, new), strict=True):
                flow.head = replace(flow.head, task=seq)

    def _save(self, flow: OpenFlow) -> None:
        stored, head = flow.stored, flow.head
        if stored == head:
            return
        packed_seq = pack_int(flow.seq)
        self.txn.put(self.keys.heads + packed_seq, codec.pack(head))
        name = flow.body.spec.name
        if stored is None or stored.state != head.state:
            if stored is not None:
                self.txn.delete(self.keys.state_key(stored.state, flow.seq))
                self._count(name, stored.state, -1)
            self.txn.put(self.keys.state_key(head.state, flow.seq), b"")
            self._count(name, head.state, 1)
        if head.state in _UNSUCCESSFUL or (stored is not None and stored.state in _UNSUCCESSFUL):
            self._group_error(flow.seq, stored, head)
        was_ended = stored is not None and stored.state in ENDED
        if was_ended and head.state not in ENDED:
            self._remove_end(flow, stored)
        if head.unread and was_ended != (head.state in ENDED):
            # The events of an ended flow are not in flight. A redrive brings them back.
            self._count_inbox(flow, 1 if was_ended else -1)
        if head.state in ENDED and not was_ended:
            self._ended.add(flow.body.spec.queue, FlowState(head.state).name.lower())
            until_ns = head.ended_ns + flow.body.spec.retain_ns
            self.txn.put(self.keys.retained + tuples.pack((until_ns, flow.seq)), b"")
            self.txn.notify(self.keys.topic(flow.seq))
            self.txn.notify(self.keys.due_topic)
        flow.stored = head

    def _remove_end(self, flow: OpenFlow, stored: FlowHeadRow | None) -> None:
        """Note that an ended flow is removed, or runs again."""
        if stored is not None and stored.state in ENDED:
            outcome = FlowState(stored.state).name.lower()
            self._ended.remove(flow.body.spec.queue, stored.ended_ns, outcome)

    def _group_error(self, seq: int, stored: FlowHeadRow | None, head: FlowHeadRow | None) -> None:
        """Move a flow from the group of its former error to that of its error."""
        was, now = error_of(stored), error_of(head)
        if was == now:
            return
        if was is not None:
            error_groups.remove(self.txn, self.universe, error_groups.FLOW, *was, (seq,))
        if now is not None:
            error_groups.add(self.txn, self.universe, error_groups.FLOW, *now, (seq,))

    def _count_inbox(self, flow: OpenFlow, sign: int) -> None:
        limits = self.tasks.load_limits
        if limits is not None and limits.bytes_in_flight:
            size = inbox_bytes.of_flow(self.txn, self.keys, flow.seq, limits.bytes_since_ns)
            load_limits.add_to(self.txn, self.universe, load_limits.BYTES, sign * size)

    def count_event(self, flow: OpenFlow, sign: int, size: int, sent_ns: int) -> None:
        """Count an event that comes into the inbox, or that leaves it."""
        flow.head = replace(flow.head, unread=max(flow.head.unread + sign, 0))
        limits = self.tasks.load_limits
        if limits is not None and limits.bytes_in_flight and sent_ns >= limits.bytes_since_ns:
            load_limits.add_to(self.txn, self.universe, load_limits.BYTES, sign * size)

    def _count(self, name: str, state: int, n: int) -> None:
        deltas = self._count_deltas.setdefault(name, {})
        field = _COUNTERS[state]
        deltas[field] = deltas.get(field, 0) + n

    def _save_counts(self) -> None:
        for name, deltas in self._count_deltas.items():
            counts = get_counts(self.txn, self.keys, name)
            changed = {field: getattr(counts, field) + n for field, n in deltas.items()}
            after = replace(counts, **changed)
            key = self.keys.counts + tuples.pack((name,))
            if after == FlowCounts():
                self.txn.delete(key)
            else:
                self.txn.put(key, codec.pack(after))
        self._count_deltas = {}


def get_counts(txn: Txn, keys: FlowKeys, name: str) -> FlowCounts:
    row = txn.get(keys.counts + tuples.pack((name,)))
    return FlowCounts() if row is None else codec.unpack_as(FlowCounts, row)


def error_of(head: FlowHeadRow | None) -> tuple[str, int] | None:
    """The text of the error group of an unsuccessful flow, and the time of its end; None for any other flow."""
    if head is None or head.state not in _UNSUCCESSFUL or head.redriven_by:
        return None
    error = f"{head.error_type}: {head.error}" if head.error_type else head.error
    return error_groups.group_text(head.code, error), head.ended_ns


@lru_cache(1024)
def activation_spec(spec: FlowSpec) -> TaskSpec:
    """The spec of the tasks under whose leases workers run a flow."""
    return TaskSpec(
        TASK_PREFIX + spec.name,
        queue=spec.queue,
        priority=spec.priority,
        lease_ns=spec.lease_ns,
        # Failures of the flow's code are counted by the flow.
        attempts=1_000_000,
        expiries_max=spec.expiries_max,
        window_ns=ACTIVATION_WINDOW_NS,
        retain_ns=0,
        kind=LOOP,
        owner=OWNER,
    )


def load_body(txn: Txn, universe: str, seq: int) -> FlowBodyRow:
    return get_body(txn, keys_of(universe), seq)
