"""JSON documents of schedules and their occurrences, shared by the HTTP API and the command line."""

from __future__ import annotations

from datetime import datetime

import msgspec

from holdfast.errors import Invalid
from holdfast.schedules.backfills import Backfilled
from holdfast.schedules.model import ChangeRow, OccurrenceRow
from holdfast.schedules.queries import ScheduleStatus
from holdfast.schedules.states import OccurrenceState


class OccurrenceDocument(msgspec.Struct, frozen=True):
    """One time of a schedule. `target` is the task or flow that it started."""

    occurrence_ns: int
    state: str
    cause: str
    reason: str | None
    target: str | None


class BackfilledDocument(msgspec.Struct, frozen=True):
    occurrence_ns: int
    state: str
    target: str | None


class ScheduleChangeDocument(msgspec.Struct, frozen=True):
    at_ns: int
    action: str
    detail: str


class ScheduleDocument(msgspec.Struct, frozen=True):
    """A schedule and where it stands. Times are wall clock times."""

    universe: str
    name: str
    every: str
    zone: str
    missed: str
    overlap: str
    kind: str
    target: str
    state: str
    source: str
    next_ns: int | None
    last_ns: int | None
    last: str | None
    queued: int
    error: str


def schedule_document(status: ScheduleStatus) -> ScheduleDocument:
    return ScheduleDocument(**status._asdict())


def occurrence_document(occurrence_ns: int, row: OccurrenceRow) -> OccurrenceDocument:
    return OccurrenceDocument(
        occurrence_ns,
        OccurrenceState(row.state).name.lower(),
        row.cause,
        row.reason or None,
        row.target_id or None,
    )


def change_document(row: ChangeRow) -> ScheduleChangeDocument:
    return ScheduleChangeDocument(row.at_ns, row.action, row.detail)


def backfilled_document(one: Backfilled) -> BackfilledDocument:
    return BackfilledDocument(one.occurrence_ns, one.state, one.target or None)


def parse_time(option: str, text: str) -> datetime:
    """Return a time, which is in the time zone of its schedule unless it has an offset."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(
            what=option, found=text[:64], expected="a time such as 2026-11-01T03:00"
        ) from None
