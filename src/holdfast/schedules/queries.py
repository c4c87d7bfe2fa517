"""Schedule queries: schedules, their occurrences and changes."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from holdfast.durable.validation import check_limit
from holdfast.flows.model import FlowId
from holdfast.schedules.model import (
    ChangeRow,
    OccurrenceRow,
    ScheduleDefinition,
    ScheduleRow,
    decode_change,
    decode_occurrence,
    decode_schedule,
    get_schedule,
    keys_of,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names, iter_rows
from holdfast.tasks.ids import TaskId

CODE, UNDECLARED, RUNTIME = SOURCES = ("code", "undeclared", "runtime")


class ScheduleStatus(NamedTuple):
    """A schedule with its state, its last and its next occurrence. Times are wall clock times in nanoseconds, None for none."""

    universe: str
    name: str
    every: str
    zone: str
    missed: str
    overlap: str
    kind: str
    target: str
    # "active", "paused" or "stopped"; a stopped one has an error.
    state: str
    # "code", "undeclared" or "runtime".
    source: str
    next_ns: int | None
    last_ns: int | None
    # The id of the last started task or flow.
    last: str | None
    queued: int
    error: str = ""


class Occurrence(NamedTuple):
    occurrence_ns: int
    row: OccurrenceRow


def universes(txn: Txn) -> list[str]:
    """Return the universes that have schedules."""
    names = iter_names(txn, (int(schema.Space.SCHEDULE),))
    return [name for name in names if list_schedules(txn, name)]


def list_schedules(txn: Txn, universe: str, limit: int | None = None) -> list[ScheduleStatus]:
    rows = islice(iter_rows(txn, keys_of(universe).schedules), limit)
    return [_status(universe, decode_schedule(row)) for _, row in rows]


def list_after(txn: Txn, universe: str, name: str, limit: int) -> list[ScheduleStatus]:
    """Return schedules by name, after a name."""
    check_limit(limit)
    prefix = keys_of(universe).schedules
    lo = prefix + tuples.pack((name,)) + b"\x00" if name else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [_status(universe, decode_schedule(row)) for _, row in rows]


def get_status(txn: Txn, universe: str, name: str) -> ScheduleStatus:
    return _status(universe, get_schedule(txn, universe, name))


def last_occurrences(txn: Txn, universe: str, name: str, limit: int) -> list[Occurrence]:
    """Return the latest occurrences, newest first."""
    prefix = keys_of(universe).occurrences + tuples.pack((name,))
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit, True)
    return [Occurrence(_last_int(key), decode_occurrence(row)) for key, row in rows]


def used_occurrences(
    txn: Txn, universe: str, name: str, at: list[int]
) -> list[OccurrenceRow | None]:
    """Return the stored row of each occurrence: the task or flow that it started, or why it started none. None: not used."""
    keys = keys_of(universe)
    found = (txn.get(keys.occurrence(name, occurrence_ns)) for occurrence_ns in at)
    return [None if row is None else decode_occurrence(row) for row in found]


def list_changes(txn: Txn, universe: str, name: str) -> list[ChangeRow]:
    """Return the recorded changes, oldest first."""
    prefix = keys_of(universe).changes + tuples.pack((name,))
    return [decode_change(row) for _, row in txn.scan(prefix, tuples.prefix_end(prefix))]


def is_declared(txn: Txn, universe: str, definitions: list[ScheduleDefinition]) -> bool:
    """Whether exactly these schedules are stored as declared."""
    rows = iter_rows(txn, keys_of(universe).schedules)
    declared = [row.definition for _, packed in rows if (row := decode_schedule(packed)).declared]
    return sorted(declared, key=_name) == sorted(definitions, key=_name)


def _name(definition: ScheduleDefinition) -> str:
    return definition.name


def _status(universe: str, row: ScheduleRow) -> ScheduleStatus:
    definition = row.definition
    source = RUNTIME if not row.from_code else CODE if row.declared else UNDECLARED
    last_id = (FlowId if row.last_is_flow else TaskId)(row.last_generation, row.last_seq)
    return ScheduleStatus(
        universe=universe,
        name=definition.name,
        every=definition.every,
        zone=definition.zone,
        missed=definition.missed,
        overlap=definition.overlap,
        kind=definition.kind,
        target=definition.target,
        state="stopped" if row.error else "paused" if row.paused else "active",
        source=source,
        next_ns=row.next_ns if row.is_active else None,
        last_ns=row.last_ns or None,
        last=str(last_id) if row.last_seq else None,
        queued=row.queued,
        error=row.error,
    )


def _last_int(key: bytes) -> int:
    return int(tuples.unpack(key)[-1])
