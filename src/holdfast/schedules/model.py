"""The data model of schedules: records, key spaces, and the keys of occurrences.

An occurrence is a wall clock time. Its row is the idempotency key (schedule, occurrence): the commit that writes it
also creates the task or flow. Rows of occurrences outlive the retention of their tasks (`OCCURRENCE_RETAIN_NS`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.durable.validation import check_name
from holdfast.errors import Invalid, NotFound, ValueTooLarge
from holdfast.flows.model import FlowId, FlowSpec
from holdfast.flows.new_flow import NewFlow, check_new
from holdfast.schedules.policies import check_rule
from holdfast.schedules.states import OccurrenceState
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks import submit
from holdfast.tasks.ids import TaskId
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.submit import TaskToSubmit

# Rows of occurrences are kept this long, and twice as long as the tasks of the schedule, whichever is longer.
OCCURRENCE_RETAIN_NS = 400 * 86_400 * S
# Changes of a schedule that are kept.
CHANGES_MAX = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ScheduleExists(Invalid):
    code = "schedule_exists"
    hint = "another schedule has this name; use another name, or `holdfast schedules delete` first"


class ScheduleDefinition(Record, frozen=True):
    """A schedule as declared: its rule, its policies, and the task or flow that it starts."""

    name: str
    every: str
    zone: str
    missed: str
    overlap: str
    args: bytes
    task: TaskSpec | None = None
    flow: FlowSpec | None = None

    @property
    def kind(self) -> str:
        return "task" if self.task is not None else "flow"

    @property
    def target(self) -> str:
        spec = self.task or self.flow
        assert spec is not None
        return spec.name

    @property
    def retain_ns(self) -> int:
        spec = self.task or self.flow
        assert spec is not None
        return spec.retain_ns


class ScheduleRow(Record, frozen=True):
    """A schedule. Times of occurrences are wall clock times."""

    definition: ScheduleDefinition
    created_ns: int
    next_ns: int
    # Whether code declared it, and whether the code of the last opened runtime still does.
    from_code: bool = False
    declared: bool = False
    paused: bool = False
    # Why `fire_due` stopped the schedule: its rule cannot be evaluated.
    error: str = ""
    # The last started occurrence, and its task or flow.
    last_ns: int = 0
    last_seq: int = 0
    last_generation: int = 0
    last_is_flow: bool = False
    # The number of queued occurrences.
    queued: int = 0
    # The number of changes ever recorded.
    changes: int = 0
    # Rows of occurrences up to this one were removed.
    floor_ns: int = 0
    key: str = ""

    @property
    def is_active(self) -> bool:
        return not (self.paused or self.error)


class OccurrenceRow(Record, frozen=True):
    """The stored decision on an occurrence: started, queued or skipped. `seq` is the task or flow that it started."""

    state: int
    cause: str
    decided_ns: int
    reason: str = ""
    seq: int = 0
    generation: int = 0
    is_flow: bool = False

    @property
    def target_id(self) -> str:
        if self.state != OccurrenceState.STARTED:
            return ""
        return str((FlowId if self.is_flow else TaskId)(self.generation, self.seq))


def is_unused(row: OccurrenceRow | None) -> bool:
    """Whether a backfill may start this occurrence."""
    return row is None or row.state == OccurrenceState.SKIPPED


class ChangeRow(Record, frozen=True):
    """A change of a schedule, for audits."""

    at_ns: int
    action: str
    detail: str = ""


class ScheduleKeys:
    """The key spaces of one universe's schedules."""

    def __init__(self, universe: str) -> None:
        def space(*path: tuples.Element) -> bytes:
            return schema.key_prefix(schema.Space.SCHEDULE, universe, *path)

        self.universe = universe
        self.schedules = space("s")
        self.due = space("d")
        self.occurrences = space("o")
        self.queue = space("q")
        self.changes = space("c")
        self.keys = space("k")
        self.due_topic = f"schedules/{universe}/due"

    def schedule(self, name: str) -> bytes:
        return self.schedules + tuples.pack((name,))

    def occurrence(self, name: str, occurrence_ns: int) -> bytes:
        return self.occurrences + tuples.pack((name, occurrence_ns))

    def queued(self, name: str, occurrence_ns: int) -> bytes:
        return self.queue + tuples.pack((name, occurrence_ns))

    def due_row(self, due_ns: int, name: str) -> bytes:
        return self.due + tuples.pack((due_ns, name))


@lru_cache(1024)
def keys_of(universe: str) -> ScheduleKeys:
    return ScheduleKeys(universe)


decode_schedule = codec.decoder(ScheduleRow).decode
decode_occurrence = codec.decoder(OccurrenceRow).decode
decode_change = codec.decoder(ChangeRow).decode


def get_schedule(txn: Txn, universe: str, name: str) -> ScheduleRow:
    row = txn.get(keys_of(universe).schedule(name))
    if row is None:
        raise NotFound(what="schedule", name=name[:64])
    return decode_schedule(row)


def occurrence_key(name: str, occurrence_ns: int) -> str:
    """The idempotency key of the task or flow of an occurrence."""
    return f"{name}@{time_text(occurrence_ns)}"


def time_text(time_ns: int) -> str:
    moment = _EPOCH + timedelta(microseconds=time_ns // 1_000)
    return moment.replace(tzinfo=None).isoformat() + "Z"


def check_definition(universe: str, definition: ScheduleDefinition) -> None:
    """Refuse a schedule whose occurrences could not be started. So a due occurrence never fails."""
    check_name("schedule", definition.name)
    check_rule(definition.every, definition.zone, definition.missed, definition.overlap)
    if len(definition.args) > BLOB_THRESHOLD_BYTES:
        raise ValueTooLarge(
            what="arguments of a schedule",
            bytes=len(definition.args),
            bytes_max=BLOB_THRESHOLD_BYTES,
        )
    # The longest key: a time with microseconds.
    key = occurrence_key(definition.name, 1_000)
    if definition.task is not None and definition.flow is None:
        submit.check_new(universe, definition.task, TaskToSubmit(definition.args, key=key))
    elif definition.flow is not None and definition.task is None:
        check_new(universe, NewFlow(definition.flow, definition.args, key))
    else:
        raise Invalid(
            what="schedule",
            name=definition.name,
            why="it names no task and no flow, or both; name one of them",
        )
