"""The policies of a schedule, as tables: missed and overlapping occurrences."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product

import pytest

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.schedules import policies
from holdfast.schedules.policies import (
    BACKFILL,
    DUE,
    QUEUED_MAX,
    RUN_NOW,
    judge_due,
    judge_overlap,
    occurrences_between,
)
from holdfast.schedules.states import (
    OCCURRENCE_TRANSITIONS,
    OccurrenceEvent,
    OccurrenceState,
)

MODULES = ("holdfast.schedules.policies", "holdfast.schedules.states")

START, QUEUE, SKIP = OccurrenceEvent
MINUTE = 60 * S


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * S


NINE = at("2026-11-13T09:00")


@pytest.mark.parametrize(
    ("missed", "late_ns", "delivered", "next_at"),
    [
        # In time, and up to a minute late: the occurrence is not missed.
        ("one", 0, True, "09:10"),
        ("skip", 0, True, "09:10"),
        ("all", 0, True, "09:10"),
        ("one", MINUTE, True, "09:10"),
        ("skip", MINUTE, True, "09:10"),
        ("all", MINUTE, True, "09:10"),
        # More than a minute late.
        ("one", MINUTE + 1, True, "09:10"),
        ("skip", MINUTE + 1, False, "09:10"),
        ("all", MINUTE + 1, True, "09:10"),
        # Four more occurrences have passed. The last one, at 09:40, is late by 30 s.
        ("one", 40 * MINUTE + 30 * S, True, "09:50"),
        ("skip", 40 * MINUTE + 30 * S, False, "09:50"),
        ("all", 40 * MINUTE + 30 * S, True, "09:10"),
    ],
)
def test_missed_policy_decides_delivery_and_next_occurrence(
    missed: str, late_ns: int, delivered: bool, next_at: str
) -> None:
    due = judge_due("*/10 * * * *", "UTC", missed, due_ns=NINE, wall_ns=NINE + late_ns)
    assert due == (delivered, at(f"2026-11-13T{next_at}"))


@pytest.mark.parametrize(
    ("overlap", "cause", "last_is_open", "queued", "event", "reason"),
    [
        ("skip", DUE, False, 0, START, ""),
        ("skip", DUE, True, 0, SKIP, "overlap"),
        ("skip", RUN_NOW, True, 0, SKIP, "overlap"),
        ("skip", BACKFILL, False, 0, START, ""),
        ("skip", BACKFILL, True, 0, QUEUE, ""),
        # A backfill waits: a due occurrence does not overtake it.
        ("skip", DUE, False, 1, SKIP, "overlap"),
        ("queue", DUE, False, 0, START, ""),
        ("queue", DUE, True, 0, QUEUE, ""),
        ("queue", DUE, False, 1, QUEUE, ""),
        ("queue", RUN_NOW, True, 1, QUEUE, ""),
        ("queue", DUE, True, QUEUED_MAX, SKIP, "queue_full"),
        ("allow", DUE, True, 0, START, ""),
        ("allow", BACKFILL, True, 3, START, ""),
    ],
)
def test_overlap_policy_is_judged_by_the_last_occurrence(
    overlap: str, cause: str, last_is_open: bool, queued: int, event: OccurrenceEvent, reason: str
) -> None:
    found = judge_overlap(overlap, cause, last_is_open=last_is_open, queued=queued)
    assert found == (event, reason)


def test_overlap_decision_is_legal_in_every_case() -> None:
    for overlap, cause, is_open, queued in product(
        policies.OVERLAP_POLICIES, policies.CAUSES, (False, True), (0, 1, QUEUED_MAX)
    ):
        decision = judge_overlap(overlap, cause, last_is_open=is_open, queued=queued)
        assert OCCURRENCE_TRANSITIONS.allows(OccurrenceState.DUE, decision.event)
        assert bool(decision.reason) == (decision.event is SKIP)


def test_every_occurrence_state_is_reachable_and_started_is_the_end() -> None:
    assert OCCURRENCE_TRANSITIONS.unreachable() == frozenset()
    assert OCCURRENCE_TRANSITIONS.terminal == {OccurrenceState.STARTED}


def test_range_of_occurrences_includes_its_start_and_excludes_its_end() -> None:
    found = occurrences_between("0 9 * * *", "UTC", NINE, NINE + 2 * 86_400 * S, 10)
    assert found == [NINE, NINE + 86_400 * S]
    assert occurrences_between("0 9 * * *", "UTC", NINE, NINE + 2 * 86_400 * S, 1) == [NINE]


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": "61 * * * *"},
        {"every": None},
        {"zone": "Mars/Olympus"},
        {"missed": "two"},
        {"overlap": "replace"},
        {"overlap": None},
    ],
)
def test_invalid_rule_or_policy_is_refused(wrong: dict[str, str]) -> None:
    options = {"every": "* * * * *", "zone": "UTC", "missed": "one", "overlap": "skip"} | wrong
    with pytest.raises(Invalid):
        policies.check_rule(**options)
