"""Backfills and deletions: several commits of bounded size, for Python and the command line.

A backfill uses the keys of the occurrences, so an occurrence that has run does not run again, and an interrupted
backfill is repeated safely. The first commit judges the load limits for the whole backfill.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from holdfast.errors import Invalid
from holdfast.schedules import operations, queries
from holdfast.schedules.model import (
    ScheduleDefinition,
    ScheduleRow,
    get_schedule,
    is_unused,
    time_text,
)
from holdfast.schedules.operations import UsedOccurrence
from holdfast.schedules.policies import occurrences_between
from holdfast.schedules.states import OccurrenceState
from holdfast.store.api import Store
from holdfast.world import cron

# Occurrences of one backfill, and of one of its commits.
BACKFILL_MAX = 10_000
COMMIT_MAX = 500
# Rows that one commit of a deletion removes.
DELETED_ROWS_MAX = 500


class Backfilled(NamedTuple):
    """An occurrence of a backfill. `state` is "started", "queued" or "exists"; in a dry run "new" or "exists"."""

    occurrence_ns: int
    state: str
    # The id of the task or flow, empty if there is none yet.
    target: str


def run(
    store: Store,
    universe: str,
    name: str,
    start: datetime,
    end: datetime,
    *,
    wall_ns: int,
    accepted: bool = False,
) -> list[Backfilled]:
    """Start or queue the occurrences from `start` on and before `end` that have not run. `accepted` continues a
    backfill whose first commit has succeeded."""
    occurrences = _select(store, universe, name, start, end, wall_ns)
    rows = store.read(queries.used_occurrences, universe, name, occurrences[COMMIT_MAX:])
    later = sum(map(is_unused, rows))
    made: list[Backfilled] = []
    for at in range(0, len(occurrences), COMMIT_MAX):
        part = occurrences[at : at + COMMIT_MAX]
        used: list[UsedOccurrence] = store.transact(
            operations.backfill, universe, name, part, wall_ns, later, accepted
        )
        accepted = True
        for one in used:
            state = OccurrenceState(one.row.state).name.lower() if one.is_new else "exists"
            made.append(Backfilled(one.occurrence_ns, state, one.row.target_id))
    return made


def dry_run(
    store: Store, universe: str, name: str, start: datetime, end: datetime, *, wall_ns: int
) -> list[Backfilled]:
    """Return what `run` would start, and change nothing."""
    occurrences = _select(store, universe, name, start, end, wall_ns)
    rows = store.read(queries.used_occurrences, universe, name, occurrences)
    return [
        Backfilled(occurrence_ns, "new", "")
        if row is None or is_unused(row)
        else Backfilled(occurrence_ns, "exists", row.target_id)
        for occurrence_ns, row in zip(occurrences, rows, strict=True)
    ]


def delete(store: Store, universe: str, name: str, *, accepted: bool = False) -> None:
    """Delete a schedule with its occurrences and changes. `accepted` continues a deletion whose first commit has
    succeeded. It does not delete a new schedule of this name."""
    deleted = DELETED_ROWS_MAX
    if not accepted:
        deleted = store.transact(operations.delete, universe, name, DELETED_ROWS_MAX)
    while deleted == DELETED_ROWS_MAX:
        deleted = store.transact(operations.delete_rows, universe, name, DELETED_ROWS_MAX)


def to_ns(moment: datetime, definition: ScheduleDefinition) -> int:
    """Return the instant of a time. A time without a zone is in the zone of the schedule."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=cron.zone_of(definition.zone))
    return int(moment.timestamp()) * 1_000_000_000


def _select(
    store: Store, universe: str, name: str, start: datetime, end: datetime, wall_ns: int
) -> list[int]:
    row: ScheduleRow = store.read(get_schedule, universe, name)
    definition = row.definition
    from_ns, until_ns = to_ns(start, definition), to_ns(end, definition)
    if from_ns >= until_ns:
        raise Invalid(what="backfill", why="it ends before it starts", end=time_text(until_ns))
    if until_ns > wall_ns:
        raise Invalid(what="backfill", why="its end is in the future", end=time_text(until_ns))
    found = occurrences_between(
        definition.every, definition.zone, from_ns, until_ns, BACKFILL_MAX + 1
    )
    if len(found) > BACKFILL_MAX:
        raise Invalid(
            what="backfill", why="too many occurrences; narrow the range", max=BACKFILL_MAX
        )
    return found
