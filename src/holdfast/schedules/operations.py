"""Schedule operations: the only code that writes schedules.

    declare    the schedules that the code of an opened runtime declares
    create     a schedule at run time
    fire_due   start the due occurrences: each one and its task or flow are one commit
    run_now, backfill, set_paused, delete

Each operation runs where commits are applied, so two timer workers never start one occurrence twice, and no leader is
needed. Times of occurrences are wall clock times of the caller (`wall_ns`), as those of recurring timers.
"""

from __future__ import annotations

from msgspec.structs import asdict, replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, KeyConflict, KeyExpired, NotFound
from holdfast.schedules import policies
from holdfast.schedules.model import (
    OccurrenceRow,
    ScheduleDefinition,
    ScheduleExists,
    ScheduleRow,
    check_definition,
    is_unused,
    keys_of,
    time_text,
)
from holdfast.schedules.states import OccurrenceEvent
from holdfast.schedules.unit_of_work import OpenSchedule, ScheduleUnit, queue_full
from holdfast.store import tuples
from holdfast.store.api import Txn, operation

# Missed occurrences of one schedule that one commit starts.
CATCH_UP_MAX = 100
ERROR_CHARS_MAX = 200


class UsedOccurrence(Record, frozen=True):
    """An occurrence and the decision on it. `is_new` is false if it had been started or queued before."""

    occurrence_ns: int
    row: OccurrenceRow
    is_new: bool


# -- definitions -----------------------------------------------------------------------------------


@operation("schedules.declare")
def declare(
    txn: Txn, universe: str, definitions: list[ScheduleDefinition], wall_ns: int
) -> list[str]:
    """Store the schedules that code declares. Other schedules from code become undeclared and continue. Returns the
    names of changed schedules."""
    check_limit(len(definitions), "schedules")
    for definition in definitions:
        check_definition(universe, definition)
    unit = ScheduleUnit(txn, universe)
    changed = [
        definition.name for definition in definitions if _declare_one(unit, definition, wall_ns)
    ]
    names = {definition.name for definition in definitions}
    for schedule in unit.load_all():
        if schedule.row.declared and schedule.name not in names:
            schedule.row = replace(schedule.row, declared=False)
            unit.record_change(schedule, "undeclared")
            changed.append(schedule.name)
    unit.close()
    return changed


def _declare_one(unit: ScheduleUnit, definition: ScheduleDefinition, wall_ns: int) -> bool:
    schedule = unit.find(definition.name)
    if schedule is None:
        schedule = _create(unit, definition, wall_ns)
        schedule.row = replace(schedule.row, from_code=True, declared=True)
        unit.record_change(schedule, "declared")
        return True
    row = schedule.row
    if row.definition == definition and row.declared:
        return False
    differing = _differing_fields(row.definition, definition)
    schedule.row = replace(row, definition=definition, from_code=True, declared=True)
    if {"every", "zone"} & set(differing):
        # The old rule ends here. Its missed occurrences are dropped.
        next_ns = policies.next_occurrence_ns(definition.every, definition.zone, wall_ns)
        schedule.row = replace(schedule.row, next_ns=next_ns, error="")
    unit.record_change(schedule, "replaced" if differing else "declared", ", ".join(differing))
    return True


def _differing_fields(before: ScheduleDefinition, after: ScheduleDefinition) -> list[str]:
    new = asdict(after)
    return [field for field, value in asdict(before).items() if new[field] != value]


@operation("schedules.create")
def create(txn: Txn, universe: str, definition: ScheduleDefinition, key: str, wall_ns: int) -> bool:
    """Create a schedule. Returns False if the same one exists. A used key with another definition is a conflict."""
    check_definition(universe, definition)
    unit = ScheduleUnit(txn, universe)
    digest = codec.digest_of(definition)
    key_row = b""
    if key:
        check_name("key", key)
        key_row = unit.keys.keys + tuples.pack((key,))
        stored = txn.get(key_row)
        if stored is not None:
            name, used_digest = codec.unpack(stored)
            if used_digest != digest:
                raise KeyConflict(what="schedule", name=name, key=key)
            return False
    existing = unit.find(definition.name)
    if existing is not None:
        if existing.row.definition != definition:
            raise ScheduleExists(what="schedule", name=definition.name)
        return False
    schedule = _create(unit, definition, wall_ns)
    schedule.row = replace(schedule.row, key=key)
    if key_row:
        txn.put(key_row, codec.pack([definition.name, digest]))
    unit.record_change(schedule, "created")
    unit.close()
    return True


def _create(unit: ScheduleUnit, definition: ScheduleDefinition, wall_ns: int) -> OpenSchedule:
    next_ns = policies.next_occurrence_ns(definition.every, definition.zone, wall_ns)
    return unit.create(ScheduleRow(definition, unit.now_ns, next_ns))


# -- due occurrences -------------------------------------------------------------------------------


@operation("schedules.fire_due")
def fire_due(txn: Txn, universe: str, wall_ns: int, limit: int) -> int:
    """Start the occurrences that are due, the most overdue schedule first. Returns the number of occurrences that were
    started, queued or skipped."""
    check_limit(limit)
    unit = ScheduleUnit(txn, universe)
    fired = 0
    for key, _ in txn.scan(unit.keys.due, unit.keys.due + tuples.pack((wall_ns + 1,)), limit):
        if fired >= limit:
            break
        name = tuples.unpack(key)[-1]
        assert isinstance(name, str)
        fired += _fire(unit, unit.load(name), wall_ns, min(limit - fired, CATCH_UP_MAX))
    unit.close()
    return fired


def _fire(unit: ScheduleUnit, schedule: OpenSchedule, wall_ns: int, limit: int) -> int:
    fired = 0
    while fired < limit and schedule.row.next_ns <= wall_ns:
        definition, due_ns = schedule.row.definition, schedule.row.next_ns
        try:
            due = policies.judge_due(
                definition.every,
                definition.zone,
                definition.missed,
                due_ns=due_ns,
                wall_ns=wall_ns,
            )
        except Invalid as error:
            # The time zone is missing here. This schedule stops. Other schedules continue.
            schedule.row = replace(schedule.row, error=str(error)[:ERROR_CHARS_MAX])
            unit.record_change(schedule, "stopped", schedule.row.error)
            return fired + 1
        if unit.occurrence(schedule.name, due_ns) is None:
            if due.deliver:
                unit.use(schedule, due_ns, policies.DUE)
            else:
                unit.apply(schedule, due_ns, policies.DUE, OccurrenceEvent.SKIP, policies.MISSED)
        # Otherwise a backfill has used the occurrence.
        schedule.row = replace(schedule.row, next_ns=due.next_ns)
        fired += 1
    unit.remove_old_occurrences(schedule)
    return fired


def next_due_ns(txn: Txn, universe: str) -> int | None:
    """Return the wall clock time of the next occurrence of any schedule, or None."""
    prefix = keys_of(universe).due
    for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 1):
        due_ns = tuples.unpack(key)[-2]
        assert isinstance(due_ns, int)
        return due_ns
    return None


# -- operators -------------------------------------------------------------------------------------


@operation("schedules.run_now")
def run_now(txn: Txn, universe: str, name: str, wall_ns: int) -> UsedOccurrence:
    """Start an extra occurrence at this time, also of a paused schedule. The overlap policy may queue or skip it."""
    unit = ScheduleUnit(txn, universe)
    schedule = unit.load(name)
    occurrence_ns = wall_ns // 1_000 * 1_000
    used = unit.occurrence(name, occurrence_ns)
    if used is not None:
        return UsedOccurrence(occurrence_ns, used, False)
    used = unit.use(schedule, occurrence_ns, policies.RUN_NOW)
    unit.record_change(schedule, "run_now", time_text(occurrence_ns))
    unit.close()
    return UsedOccurrence(occurrence_ns, used, True)


@operation("schedules.backfill")
def backfill(
    txn: Txn,
    universe: str,
    name: str,
    occurrences: list[int],
    wall_ns: int,
    later: int = 0,
    accepted: bool = False,
) -> list[UsedOccurrence]:
    """Start or queue past occurrences that have not run, in the given order. A started or queued one is not repeated.

    A backfill of several commits is judged in its first one, with the number of new occurrences that follow in `later`
    commits. They are accepted work then: no limit refuses them."""
    check_limit(len(occurrences), "occurrences")
    unit = ScheduleUnit(txn, universe)
    schedule = unit.load(name)
    row = schedule.row
    for occurrence_ns in occurrences:
        if occurrence_ns > wall_ns:
            raise Invalid(
                what="backfill", why="an occurrence is in the future", at=time_text(occurrence_ns)
            )
        if occurrence_ns <= row.floor_ns:
            raise KeyExpired(
                what="occurrence", schedule=name, removed_until=time_text(row.floor_ns)
            )
    if not accepted:
        found = [unit.occurrence(name, occurrence_ns) for occurrence_ns in set(occurrences)]
        unit.judge_backfill(schedule, sum(map(is_unused, found)) + later)
    answers: list[UsedOccurrence] = []
    for occurrence_ns in occurrences:
        used = unit.occurrence(name, occurrence_ns)
        is_new = is_unused(used)
        if used is None or is_new:
            if schedule.row.queued >= policies.QUEUED_MAX:
                raise queue_full(name, schedule.row.queued)
            used = unit.use(schedule, occurrence_ns, policies.BACKFILL, accepted=accepted)
        answers.append(UsedOccurrence(occurrence_ns, used, is_new))
    if any(answer.is_new for answer in answers):
        started = sum(answer.is_new for answer in answers)
        detail = f"{started} from {time_text(occurrences[0])} to {time_text(occurrences[-1])}"
        unit.record_change(schedule, "backfill", detail)
    unit.close()
    return answers


@operation("schedules.set_paused")
def set_paused(txn: Txn, universe: str, name: str, paused: bool, wall_ns: int) -> bool:
    """Pause or resume a schedule. Occurrences during the pause do not run. Returns whether it changed."""
    unit = ScheduleUnit(txn, universe)
    schedule = unit.load(name)
    row = schedule.row
    if paused == row.paused and not (row.error and not paused):
        return False
    schedule.row = replace(row, paused=paused)
    if not paused:
        definition = row.definition
        next_ns = policies.next_occurrence_ns(definition.every, definition.zone, wall_ns)
        schedule.row = replace(schedule.row, error="", next_ns=next_ns)
    unit.record_change(schedule, "paused" if paused else "resumed")
    unit.close()
    return True


@operation("schedules.delete")
def delete(txn: Txn, universe: str, name: str, limit: int) -> int:
    """Delete a schedule, and up to `limit` rows of its occurrences and changes (`delete_rows`). Its tasks and flows
    continue."""
    unit = ScheduleUnit(txn, universe)
    schedule = unit.find(name)
    if schedule is not None:
        unit.forget(schedule)
    deleted = _delete_rows(txn, universe, name, limit)
    if schedule is None and not deleted:
        raise NotFound(what="schedule", name=name[:64])
    unit.close()
    return deleted


@operation("schedules.delete_rows")
def delete_rows(txn: Txn, universe: str, name: str, limit: int) -> int:
    """Delete remaining rows of a deleted schedule. Returns their number: fewer than `limit` means that none is left."""
    if txn.get(keys_of(universe).schedule(name)) is not None:
        return 0  # a new schedule has the name
    return _delete_rows(txn, universe, name, limit)


def _delete_rows(txn: Txn, universe: str, name: str, limit: int) -> int:
    check_limit(limit)
    keys, deleted = keys_of(universe), 0
    for space in (keys.queue, keys.occurrences, keys.changes):
        if deleted < limit:
            prefix = space + tuples.pack((name,))
            for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), limit - deleted):
                txn.delete(key)
                deleted += 1
    return deleted
