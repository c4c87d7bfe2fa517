"""The unit of work of one schedule operation: schedules, occurrences, their indexes, and the tasks and flows that
they start, in one commit.

`ScheduleUnit` loads each schedule once and writes it at the end, with its due row. It starts tasks and flows through
their own units of work, so that an occurrence and its task are one commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Invalid, NotFound, Overloaded
from holdfast.flows.model import Parent
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.operations import judge_start, start_within
from holdfast.flows.states import ENDED
from holdfast.flows.unit_of_work import FlowUnit
from holdfast.schedules import policies
from holdfast.schedules.model import (
    CHANGES_MAX,
    OCCURRENCE_RETAIN_NS,
    ChangeRow,
    OccurrenceRow,
    ScheduleRow,
    decode_occurrence,
    decode_schedule,
    get_schedule,
    keys_of,
    occurrence_key,
)
from holdfast.schedules.states import OCCURRENCE_TRANSITIONS, OccurrenceEvent, OccurrenceState
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks import dependents
from holdfast.tasks.model import TaskSpec, pack_int, unpack_seq
from holdfast.tasks.states import TaskState
from holdfast.tasks.submit import TaskToSubmit, create_within

# The owner in `tasks.owner_callbacks`.
OWNER = "schedules"
# Old rows of occurrences that one fired occurrence removes.
REMOVED_MAX = 10
_OPEN_TASK = (TaskState.WAITING, TaskState.LEASED)


@dataclass
class OpenSchedule:
    """A schedule that an operation changes."""

    name: str
    stored: ScheduleRow | None
    row: ScheduleRow


class ScheduleUnit:
    def __init__(self, txn: Txn, universe: str, flows: FlowUnit | None = None) -> None:
        """`flows` is the open unit of work of flows, if the operation runs inside one."""
        self.txn = txn
        self.universe = universe
        self.keys = keys_of(universe)
        self.now_ns = txn.now_ns
        self._owns_flows = flows is None
        self.flows = FlowUnit(txn, universe) if flows is None else flows
        self._schedules: dict[str, OpenSchedule] = {}

    # -- schedules -----------------------------------------------------------------------------

    def load(self, name: str) -> OpenSchedule:
        schedule = self._schedules.get(name)
        if schedule is None:
            row = get_schedule(self.txn, self.universe, name)
            schedule = self._schedules[name] = OpenSchedule(name, row, row)
        return schedule

    def find(self, name: str) -> OpenSchedule | None:
        if name in self._schedules or self.txn.get(self.keys.schedule(name)) is not None:
            return self.load(name)
        return None

    def load_all(self) -> list[OpenSchedule]:
        prefix = self.keys.schedules
        rows = self.txn.scan(prefix, tuples.prefix_end(prefix))
        return [self.load(decode_schedule(row).definition.name) for _, row in rows]

    def create(self, row: ScheduleRow) -> OpenSchedule:
        name = row.definition.name
        schedule = self._schedules[name] = OpenSchedule(name, None, row)
        return schedule

    def record_change(self, schedule: OpenSchedule, action: str, detail: str = "") -> None:
        number = schedule.row.changes + 1
        schedule.row = replace(schedule.row, changes=number)
        change = ChangeRow(self.now_ns, action, detail)
        self.txn.put(self.keys.changes + tuples.pack((schedule.name, number)), codec.pack(change))
        self.txn.delete(self.keys.changes + tuples.pack((schedule.name, number - CHANGES_MAX)))

    # -- occurrences ---------------------------------------------------------------------------

    def occurrence(self, name: str, occurrence_ns: int) -> OccurrenceRow | None:
        row = self.txn.get(self.keys.occurrence(name, occurrence_ns))
        return None if row is None else decode_occurrence(row)

    def use(
        self, schedule: OpenSchedule, occurrence_ns: int, cause: str, *, accepted: bool = False
    ) -> OccurrenceRow:
        """Start, queue or skip an occurrence, as the overlap policy decides. No load limit refuses an accepted one."""
        row = schedule.row
        decision = policies.judge_overlap(
            row.definition.overlap,
            cause,
            last_is_open=self.is_last_open(row),
            queued=row.queued,
        )
        if decision.event is OccurrenceEvent.START and not accepted:
            try:
                self._judge_start(schedule)
            except Overloaded:
                if cause != policies.DUE:
                    raise
                decision = policies.OverlapDecision(OccurrenceEvent.SKIP, policies.OVERLOADED)
        return self.apply(schedule, occurrence_ns, cause, decision.event, decision.reason)

    def judge_backfill(self, schedule: OpenSchedule, count: int) -> None:
        """Refuse a backfill of this many new occurrences if they exceed a load limit or the queue of the schedule."""
        row = schedule.row
        if row.definition.overlap == "allow":
            if count:
                self._judge_start(schedule, count)
            return
        starts = 0 if row.queued or self.is_last_open(row) else 1
        if row.queued + count - starts > policies.QUEUED_MAX:
            raise queue_full(schedule.name, row.queued, count)

    def _judge_start(self, schedule: OpenSchedule, starts: int = 1) -> None:
        """Refuse occurrences that start if a load limit is exceeded."""
        definition, count = schedule.row.definition, self.flows.activation_count() + starts
        if definition.task is not None:
            self.flows.tasks.judge_new_tasks([definition.task.queue], count)
        elif definition.flow is not None:
            judge_start(self.flows, [definition.flow.queue], count)

    def apply(
        self,
        schedule: OpenSchedule,
        occurrence_ns: int,
        cause: str,
        event: OccurrenceEvent,
        reason: str = "",
    ) -> OccurrenceRow:
        """Move an occurrence to its next state. A started one creates its task or flow here."""
        name = schedule.name
        before = self.occurrence(name, occurrence_ns)
        state = OCCURRENCE_TRANSITIONS.next(
            OccurrenceState.DUE if before is None else OccurrenceState(before.state),
            event,
            schedule=name,
            occurrence=occurrence_ns,
        )
        after = OccurrenceRow(state, cause, self.now_ns, reason)
        if before is not None and before.state == OccurrenceState.QUEUED:
            self.txn.delete(self.keys.queued(name, occurrence_ns))
            schedule.row = replace(schedule.row, queued=schedule.row.queued - 1)
        if state == OccurrenceState.QUEUED:
            self.txn.put(self.keys.queued(name, occurrence_ns), b"")
            schedule.row = replace(schedule.row, queued=schedule.row.queued + 1)
            self._listen_to_last(schedule)
        elif state == OccurrenceState.STARTED:
            after = self._start(schedule, occurrence_ns, after)
        self.txn.put(self.keys.occurrence(name, occurrence_ns), codec.pack(after))
        return after

    def start_queued(self, name: str) -> None:
        """Start the first queued occurrence if the last one has ended."""
        schedule = self.find(name)
        if schedule is None or not schedule.row.queued or self.is_last_open(schedule.row):
            return
        prefix = self.keys.queue + tuples.pack((name,))
        for key, _ in self.txn.scan(prefix, tuples.prefix_end(prefix), 1):
            occurrence_ns = tuples.unpack(key)[-1]
            assert isinstance(occurrence_ns, int)
            queued = self.occurrence(name, occurrence_ns)
            assert queued is not None, "a queue row has its occurrence"
            self.apply(schedule, occurrence_ns, queued.cause, OccurrenceEvent.START)
        if schedule.row.queued:
            self._listen_to_last(schedule)

    def remove_old_occurrences(self, schedule: OpenSchedule) -> None:
        """Remove a few rows of occurrences past their retention, the oldest first."""
        retain_ns = max(OCCURRENCE_RETAIN_NS, 2 * schedule.row.definition.retain_ns)
        prefix = self.keys.occurrences + tuples.pack((schedule.name,))
        for key, packed in self.txn.scan(prefix, tuples.prefix_end(prefix), REMOVED_MAX):
            row = decode_occurrence(packed)
            # A backfilled occurrence is old, but its row may be new.
            if row.state == OccurrenceState.QUEUED or row.decided_ns + retain_ns > self.now_ns:
                return
            occurrence_ns = tuples.unpack(key)[-1]
            assert isinstance(occurrence_ns, int)
            self.txn.delete(key)
            schedule.row = replace(schedule.row, floor_ns=occurrence_ns)

    # -- tasks and flows -----------------------------------------------------------------------

    def is_last_open(self, row: ScheduleRow) -> bool:
        """Whether the task or flow of the last started occurrence has not ended."""
        if not row.last_seq:
            return False
        if row.last_is_flow:
            try:
                return self.flows.load(row.last_seq).head.state not in ENDED
            except NotFound:
                return False
        packed_seq = pack_int(row.last_seq)
        tasks = self.flows.tasks
        return tasks.body(packed_seq) is not None and tasks.status(packed_seq).state in _OPEN_TASK

    def _listen_to_last(self, schedule: OpenSchedule) -> None:
        """Register `end_callbacks.on_end` for the end of the last task. A flow calls its schedule without registration."""
        row = schedule.row
        if not row.last_is_flow and self.is_last_open(row):
            dependents.listen(self.flows.tasks, row.last_seq, OWNER, schedule.name.encode())

    def _start(
        self, schedule: OpenSchedule, occurrence_ns: int, occurrence: OccurrenceRow
    ) -> OccurrenceRow:
        definition = schedule.row.definition
        key = occurrence_key(schedule.name, occurrence_ns)
        if definition.flow is not None:
            seq, generation = self._start_flow(schedule, key)
        else:
            assert definition.task is not None
            seq, generation = self._submit_task(definition.task, definition.args, key)
        is_flow = definition.flow is not None
        schedule.row = replace(
            schedule.row,
            last_ns=occurrence_ns,
            last_seq=seq,
            last_generation=generation,
            last_is_flow=is_flow,
        )
        return replace(occurrence, seq=seq, generation=generation, is_flow=is_flow)

    def _start_flow(self, schedule: OpenSchedule, key: str) -> tuple[int, int]:
        definition, flows = schedule.row.definition, self.flows
        assert definition.flow is not None
        packed = self.txn.get(flows.keys.keys + tuples.pack((definition.flow.name, key)))
        if packed is not None:
            # A deleted schedule of this name has started this occurrence.
            existing = flows.load(unpack_seq(packed))
            return existing.seq, existing.body.generation
        new = NewFlow(definition.flow, definition.args, key, Parent(schedule=schedule.name))
        started = start_within(flows, new)
        return started.seq, started.generation

    def _submit_task(self, spec: TaskSpec, args: bytes, key: str) -> tuple[int, int]:
        tasks = self.flows.tasks
        packed = self.txn.get(tasks.keys.idempotency_keys + tuples.pack((spec.name, key)))
        if packed is not None:
            # A deleted schedule of this name has started this occurrence.
            return unpack_seq(packed), tasks.body_and_spec(packed)[0].generation
        [seq] = create_within(tasks, spec, [TaskToSubmit(args, key=key)])
        return seq, self.txn.generation

    # -- the end of the operation --------------------------------------------------------------

    def close(self) -> None:
        for schedule in self._schedules.values():
            self._save(schedule)
        if self._owns_flows:
            self.flows.close()

    def _save(self, schedule: OpenSchedule) -> None:
        stored, row = schedule.stored, schedule.row
        if stored == row:
            return
        name = schedule.name
        self.txn.put(self.keys.schedule(name), codec.pack(row))
        if stored is not None and stored.is_active:
            self.txn.delete(self.keys.due_row(stored.next_ns, name))
        if row.is_active:
            self.txn.put(self.keys.due_row(row.next_ns, name), b"")
            # The timer worker may sleep until a later time.
            if stored is None or not stored.is_active or row.next_ns < stored.next_ns:
                self.txn.notify(self.keys.due_topic)
        schedule.stored = row

    def forget(self, schedule: OpenSchedule) -> None:
        """Delete a schedule with its index rows. Its occurrences and changes remain."""
        row, name = schedule.row, schedule.name
        self.txn.delete(self.keys.schedule(name))
        self.txn.delete(self.keys.due_row(row.next_ns, name))
        if row.key:
            self.txn.delete(self.keys.keys + tuples.pack((row.key,)))
        del self._schedules[name]


def queue_full(name: str, queued: int, new: int = 1) -> Invalid:
    """Make the error of a backfill with more occurrences than may wait."""
    return Invalid(
        what="backfill",
        schedule=name,
        queued=queued,
        new=new,
        max=policies.QUEUED_MAX,
        why="too many occurrences wait; repeat the command later",
    )
