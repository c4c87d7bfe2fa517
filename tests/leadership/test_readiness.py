"""Readiness: every blocker is reported once, for the universe, a subject or as a warning."""

import itertools
import json
from dataclasses import fields, replace

import msgspec
import pytest

from holdfast.clock import S
from holdfast.dispatch.request import DispatchBacklog
from holdfast.leadership.leader_lease_state import LeaderLease, LeaderState
from holdfast.workers.readiness import (
    ObservedProblem,
    ReadinessBlocker,
    ReadinessFacts,
    ReadinessReason,
    ReadinessSubject,
    WaitingMail,
    derive_readiness,
    unreadable_facts,
)

MODULES = ("holdfast.workers.readiness",)

NOW = 1_000 * S
LIVE = LeaderLease(LeaderState.HELD, "a", "1", "a/1/1.7", 1, 7, NOW + 1)
WELL = ReadinessFacts(universe="bank", generation=1, authority=LIVE, workers_live=2)

# One bad value for each fact, by the one reason that it causes.
AUTHORITY = {
    ReadinessReason.AUTHORITY_MISSING: None,
    ReadinessReason.AUTHORITY_STALE: msgspec.structs.replace(LIVE, state=LeaderState.STALE),
    ReadinessReason.AUTHORITY_EXPIRED: msgspec.structs.replace(LIVE, leased_until_ns=NOW),
    ReadinessReason.AUTHORITY_RESTORED: msgspec.structs.replace(LIVE, generation=0),
}
OTHERS: dict[ReadinessReason, dict[str, object]] = {
    ReadinessReason.STORE_FAILED: {"store": ObservedProblem("store_full", "no space")},
    ReadinessReason.SCHEMA_MISMATCH: {"schema": ObservedProblem("schema_mismatch", "0.2")},
    ReadinessReason.REPLAY_PENDING: {"replay_pending": 3},
    ReadinessReason.NOTIFICATION_DEFERRED: {
        "deferred": ObservedProblem("leader_missing", "no pane")
    },
}
# Deferred requests have the same reason as deferred notices: the leader pane is missing.
DEFERRED_BACKLOG = DispatchBacklog(pending=3, deferred=2)
PARKED = ReadinessBlocker(ReadinessReason.WORLD_PARKED, "replay_diverged", "at 4", 4, NOW - 5)
HALTED = ReadinessBlocker(ReadinessReason.RUN_HALTED, "illegal_transition", "seq 9")


def reasons(facts: ReadinessFacts, now_ns: int = NOW) -> list[ReadinessReason]:
    return [blocker.reason for blocker in derive_readiness(facts, now_ns).reasons]


def test_a_universe_without_blockers_is_ready() -> None:
    found = derive_readiness(WELL, NOW)
    assert found.ready
    assert (found.reasons, found.subjects, found.warnings) == ([], [], [])
    assert (found.leader, found.epoch, found.leased_until_ns) == ("a", 7, NOW + 1)


@pytest.mark.parametrize("authority", [None, *AUTHORITY], ids=str)
@pytest.mark.parametrize(
    "bad", [c for n in range(5) for c in itertools.combinations(OTHERS, n)], ids=str
)
def test_every_combination_of_blockers_is_reported_completely(
    authority: ReadinessReason | None, bad: tuple[ReadinessReason, ...]
) -> None:
    facts = WELL if authority is None else replace(WELL, authority=AUTHORITY[authority])
    for reason in bad:
        facts = replace(facts, **OTHERS[reason])  # type: ignore[arg-type]
    expected = {*bad} if authority is None else {*bad, authority}
    found = derive_readiness(facts, NOW)
    assert {blocker.reason for blocker in found.reasons} == expected
    assert len(found.reasons) == len(expected)
    assert found.ready is not bool(expected)


def test_leader_lease_expires_exactly_at_its_expiry_time() -> None:
    assert reasons(WELL, NOW) == []
    assert reasons(WELL, NOW + 1) == [ReadinessReason.AUTHORITY_EXPIRED]


def test_released_lease_counts_as_missing_leader() -> None:
    free = LeaderLease(generation=1, epoch=7)
    assert reasons(replace(WELL, authority=free)) == [ReadinessReason.AUTHORITY_MISSING]


def test_blocker_keeps_the_code_and_text_of_the_observed_problem() -> None:
    [blocker] = derive_readiness(
        replace(WELL, store=ObservedProblem("store_full", "no space")), NOW
    ).reasons
    assert blocker == ReadinessBlocker(ReadinessReason.STORE_FAILED, "store_full", "no space")


def test_expired_lease_blocker_names_owner_and_age() -> None:
    [blocker] = derive_readiness(WELL, NOW + 2 * S).reasons
    assert blocker.text == "the lease of a/1/1.7 expired 2.000 s ago and is not yet marked stale"
    assert blocker.since_ns == LIVE.leased_until_ns


def test_unreadable_store_is_the_only_reported_blocker() -> None:
    found = derive_readiness(unreadable_facts("bank", ObservedProblem("store_corrupt")), NOW)
    assert [blocker.code for blocker in found.reasons] == ["store_corrupt"]
    assert found.warnings == []
    assert not found.ready


def test_unobserved_facts_are_not_ready() -> None:
    assert reasons(replace(WELL, observed=False)) == [ReadinessReason.STORE_FAILED]


def test_no_live_worker_is_a_warning_not_a_blocker() -> None:
    found = derive_readiness(replace(WELL, workers_live=0), NOW)
    assert found.ready
    assert [warning.reason for warning in found.warnings] == [ReadinessReason.NO_LIVE_WORKER]


# -- subjects ------------------------------------------------------------------------------------


def test_blocked_subject_leaves_its_universe_ready() -> None:
    found = derive_readiness(
        replace(WELL, subjects=(ReadinessSubject("w1", "Account/ada", (PARKED,)),)), NOW
    )
    assert found.ready
    assert [(s.subject, s.ready, s.reasons) for s in found.subjects] == [("w1", False, [PARKED])]


def test_unready_universe_leaves_its_subject_ready() -> None:
    facts = replace(WELL, authority=None, subjects=(ReadinessSubject("w1", "Account/ada"),))
    found = derive_readiness(facts, NOW)
    assert not found.ready
    assert [subject.ready for subject in found.subjects] == [True]
    assert found.subjects_blocked == 0


def test_a_subject_is_listed_once_with_all_its_blockers() -> None:
    facts = replace(
        WELL,
        subjects=(
            ReadinessSubject("w1", "Account/ada", (PARKED,)),
            ReadinessSubject("r1", "labels", (HALTED,)),
            ReadinessSubject("w1", "Account/ada", (HALTED, PARKED)),
        ),
    )
    found = derive_readiness(facts, NOW)
    assert [(s.subject, s.reasons) for s in found.subjects] == [
        ("w1", [PARKED, HALTED, PARKED]),
        ("r1", [HALTED]),
    ]


def test_omitted_subjects_are_counted_as_blocked() -> None:
    facts = replace(WELL, subjects=(ReadinessSubject("w1", "x", (PARKED,)),), subjects_omitted=4)
    found = derive_readiness(facts, NOW)
    assert (found.subjects_blocked, found.subjects_omitted) == (5, 4)


def test_derive_readiness_does_not_share_or_change_its_inputs() -> None:
    facts = replace(WELL, authority=None, subjects=(ReadinessSubject("w1", "x", (PARKED,)),))
    first = derive_readiness(facts, NOW)
    first.subjects[0].reasons.clear()
    assert derive_readiness(facts, NOW).subjects[0].reasons == [PARKED]


def test_readiness_snapshot_is_json_with_reason_names() -> None:
    decoded = json.loads(msgspec.json.encode(derive_readiness(replace(WELL, authority=None), NOW)))
    assert decoded["ready"] is False
    assert decoded["reasons"][0]["reason"] == "authority_missing"


def test_deferred_dispatches_make_the_universe_unready() -> None:
    [blocker] = derive_readiness(replace(WELL, backlog=DEFERRED_BACKLOG), NOW).reasons
    assert (blocker.reason, blocker.code) == (
        ReadinessReason.NOTIFICATION_DEFERRED,
        "leader_missing",
    )
    assert "2 dispatches" in blocker.text


def test_deferred_notices_and_deferred_requests_are_separate_blockers() -> None:
    facts = replace(WELL, backlog=DEFERRED_BACKLOG, deferred=ObservedProblem("unconfirmed", "", 7))
    found = derive_readiness(facts, NOW).reasons
    assert [(one.code, one.since_ns) for one in found] == [
        ("unconfirmed", 7),
        ("leader_missing", 0),
    ]


def test_pending_and_failed_dispatches_are_no_blocker() -> None:
    facts = replace(WELL, backlog=DispatchBacklog(pending=5, notified=4, delivered=3, failed=2))
    assert derive_readiness(facts, NOW).ready


def test_snapshot_contains_the_dispatch_backlog() -> None:
    found = derive_readiness(replace(WELL, backlog=DispatchBacklog(1, 2, 3, 4, 0)), NOW)
    assert found.backlog == {
        "pending": 1,
        "notified": 2,
        "delivered": 3,
        "failed": 4,
        "deferred": 0,
    }


def test_undelivered_mail_is_counted_and_only_a_warning() -> None:
    facts = replace(
        WELL,
        mail=(
            WaitingMail("south", 3, delivery_failed=True),
            WaitingMail("west", 1, delivery_failed=False),
        ),
    )
    found = derive_readiness(facts, NOW)
    assert found.ready
    assert found.mail == {"south": 3, "west": 1}
    [warning] = found.warnings
    assert warning.reason is ReadinessReason.MAIL_WAITING
    assert "3 messages wait for south" in warning.text


# Each fact with another value. Every fact must be able to change the snapshot.
OTHER_FACTS: dict[str, object] = {
    "universe": "shop",
    "generation": 2,
    "authority": None,
    "replay_pending": 1,
    "deferred": ObservedProblem("leader_missing"),
    "backlog": DispatchBacklog(failed=1),
    "store": ObservedProblem("store_full"),
    "schema": ObservedProblem("schema_mismatch"),
    "workers_live": 0,
    "worlds": {"active": 1},
    "mail": (WaitingMail("south", 3, delivery_failed=True),),
    "subjects": (ReadinessSubject("id-ada", "Account/ada", (PARKED,)),),
    "subjects_omitted": 1,
    "observed": False,
}


def test_every_readiness_fact_has_a_test_value() -> None:
    assert set(OTHER_FACTS) == {field.name for field in fields(ReadinessFacts)}


@pytest.mark.parametrize("fact", OTHER_FACTS)
def test_every_fact_changes_derived_readiness(fact: str) -> None:
    changed = replace(WELL, **{fact: OTHER_FACTS[fact]})  # type: ignore[arg-type]
    assert derive_readiness(changed, NOW) != derive_readiness(WELL, NOW)


# Every reason, by facts that cause it for the universe or for a subject.
CAUSES: dict[ReadinessReason, ReadinessFacts] = {
    **{reason: replace(WELL, authority=held) for reason, held in AUTHORITY.items()},
    **{reason: replace(WELL, **bad) for reason, bad in OTHERS.items()},  # type: ignore[arg-type]
    **{
        reason: replace(
            WELL, subjects=(ReadinessSubject("s", "s", (ReadinessBlocker(reason, "code", ""),)),)
        )
        for reason in (
            ReadinessReason.WORLD_PAUSED,
            ReadinessReason.WORLD_PARKED,
            ReadinessReason.UNKNOWN_EVENT,
            ReadinessReason.CODE_MISSING,
            ReadinessReason.RUN_HALTED,
        )
    },
    ReadinessReason.NO_LIVE_WORKER: replace(WELL, workers_live=0),
    ReadinessReason.MAIL_WAITING: replace(
        WELL, mail=(WaitingMail("south", 3, delivery_failed=True),)
    ),
}


# `store_time` is a warning about the store, not about a universe. tests/store/test_calendar.py tests it.
@pytest.mark.parametrize(
    "reason", [one for one in ReadinessReason if one is not ReadinessReason.STORE_TIME]
)
def test_every_reason_is_reported_in_exactly_one_place(reason: ReadinessReason) -> None:
    found = derive_readiness(CAUSES[reason], NOW)
    reported = {
        "universe": [one.reason for one in found.reasons],
        "subject": [one.reason for subject in found.subjects for one in subject.reasons],
        "warning": [one.reason for one in found.warnings],
    }
    where = next(place for place, reasons in reported.items() if reasons)
    assert reported == {"universe": [], "subject": [], "warning": [], where: [reason]}
    assert found.ready == (where != "universe")
