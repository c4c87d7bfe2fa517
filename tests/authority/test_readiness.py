"""Readiness: every blocker, none twice, and each where it belongs."""

import itertools
import json
from dataclasses import fields, replace

import msgspec
import pytest

from holdfast.authority.dispatch import Backlog
from holdfast.authority.lease import AuthorityLease, State
from holdfast.authority.readiness import (
    Blocker,
    Facts,
    Mail,
    Reason,
    Subject,
    Trouble,
    derive_readiness,
    unread,
)
from holdfast.clock import S

MODULES = ("holdfast.authority.readiness",)

NOW = 1_000 * S
LIVE = AuthorityLease(State.HELD, "a", "1", "a/1/1.7", 1, 7, NOW + 1)
WELL = Facts(universe="bank", generation=1, authority=LIVE, workers_live=2)

# One way for each fact to be bad, and the one reason that follows from it.
AUTHORITY = {
    Reason.AUTHORITY_MISSING: None,
    Reason.AUTHORITY_STALE: msgspec.structs.replace(LIVE, state=State.STALE),
    Reason.AUTHORITY_EXPIRED: msgspec.structs.replace(LIVE, leased_until_ns=NOW),
    Reason.AUTHORITY_RESTORED: msgspec.structs.replace(LIVE, generation=0),
}
OTHERS: dict[Reason, dict[str, object]] = {
    Reason.STORE_FAILED: {"store": Trouble("store_full", "no space")},
    Reason.SCHEMA_MISMATCH: {"schema": Trouble("schema_mismatch", "0.2")},
    Reason.REPLAY_PENDING: {"replay_pending": 3},
    Reason.NOTIFICATION_DEFERRED: {"deferred": Trouble("leader_missing", "no pane")},
}
# The same reason for another fact: requests, not notices, wait for the leader's pane.
HELD_BACK = Backlog(pending=3, deferred=2)
PARKED = Blocker(Reason.WORLD_PARKED, "replay_diverged", "at 4", 4, NOW - 5)
HALTED = Blocker(Reason.RUN_HALTED, "illegal_transition", "seq 9")


def reasons(facts: Facts, now_ns: int = NOW) -> list[Reason]:
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
def test_every_combination_of_blockers_is_told_completely(
    authority: Reason | None, bad: tuple[Reason, ...]
) -> None:
    facts = WELL if authority is None else replace(WELL, authority=AUTHORITY[authority])
    for reason in bad:
        facts = replace(facts, **OTHERS[reason])  # type: ignore[arg-type]
    expected = {*bad} if authority is None else {*bad, authority}
    found = derive_readiness(facts, NOW)
    assert {blocker.reason for blocker in found.reasons} == expected
    assert len(found.reasons) == len(expected)
    assert found.ready is not bool(expected)


def test_a_lease_is_valid_up_to_its_last_instant_and_no_longer() -> None:
    assert reasons(WELL, NOW) == []
    assert reasons(WELL, NOW + 1) == [Reason.AUTHORITY_EXPIRED]


def test_a_released_lease_is_as_good_as_none() -> None:
    free = AuthorityLease(generation=1, epoch=7)
    assert reasons(replace(WELL, authority=free)) == [Reason.AUTHORITY_MISSING]


def test_a_blocker_keeps_the_code_and_words_of_whoever_found_it() -> None:
    [blocker] = derive_readiness(
        replace(WELL, store=Trouble("store_full", "no space")), NOW
    ).reasons
    assert blocker == Blocker(Reason.STORE_FAILED, "store_full", "no space")


def test_an_expired_lease_is_told_with_its_owner_and_its_age() -> None:
    [blocker] = derive_readiness(WELL, NOW + 2 * S).reasons
    assert blocker.text == "the lease of a/1/1.7 ran out 2.000 s ago; nobody has marked it yet"
    assert blocker.since_ns == LIVE.leased_until_ns


def test_of_a_store_that_was_not_read_nothing_else_is_claimed() -> None:
    found = derive_readiness(unread("bank", Trouble("store_corrupt")), NOW)
    assert [blocker.code for blocker in found.reasons] == ["store_corrupt"]
    assert found.warnings == []
    assert not found.ready


def test_facts_that_were_never_observed_are_not_ready() -> None:
    assert reasons(replace(WELL, observed=False)) == [Reason.STORE_FAILED]


def test_without_workers_there_is_a_warning_and_no_blocker() -> None:
    found = derive_readiness(replace(WELL, workers_live=0), NOW)
    assert found.ready
    assert [warning.reason for warning in found.warnings] == [Reason.NO_LIVE_WORKER]


# -- subjects ------------------------------------------------------------------------------------


def test_a_subject_that_is_not_ready_leaves_its_universe_ready() -> None:
    found = derive_readiness(
        replace(WELL, subjects=(Subject("w1", "Account/ada", (PARKED,)),)), NOW
    )
    assert found.ready
    assert [(s.subject, s.ready, s.reasons) for s in found.subjects] == [("w1", False, [PARKED])]


def test_an_unready_universe_leaves_a_subject_ready() -> None:
    facts = replace(WELL, authority=None, subjects=(Subject("w1", "Account/ada"),))
    found = derive_readiness(facts, NOW)
    assert not found.ready
    assert [subject.ready for subject in found.subjects] == [True]
    assert found.subjects_blocked == 0


def test_a_subject_is_listed_once_with_all_its_blockers() -> None:
    facts = replace(
        WELL,
        subjects=(
            Subject("w1", "Account/ada", (PARKED,)),
            Subject("r1", "labels", (HALTED,)),
            Subject("w1", "Account/ada", (HALTED, PARKED)),
        ),
    )
    found = derive_readiness(facts, NOW)
    assert [(s.subject, s.reasons) for s in found.subjects] == [
        ("w1", [PARKED, HALTED, PARKED]),
        ("r1", [HALTED]),
    ]


def test_what_the_list_has_no_room_for_is_counted() -> None:
    facts = replace(WELL, subjects=(Subject("w1", "x", (PARKED,)),), subjects_omitted=4)
    found = derive_readiness(facts, NOW)
    assert (found.subjects_blocked, found.subjects_omitted) == (5, 4)


def test_deriving_is_a_function_of_its_inputs_and_touches_none() -> None:
    facts = replace(WELL, authority=None, subjects=(Subject("w1", "x", (PARKED,)),))
    first = derive_readiness(facts, NOW)
    first.subjects[0].reasons.clear()
    assert derive_readiness(facts, NOW).subjects[0].reasons == [PARKED]


def test_the_snapshot_is_plain_json_by_name() -> None:
    told = json.loads(msgspec.json.encode(derive_readiness(replace(WELL, authority=None), NOW)))
    assert told["ready"] is False
    assert told["reasons"][0]["reason"] == "authority_missing"


def test_dispatches_that_wait_for_the_leader_make_the_universe_unready() -> None:
    [blocker] = derive_readiness(replace(WELL, backlog=HELD_BACK), NOW).reasons
    assert (blocker.reason, blocker.code) == (Reason.NOTIFICATION_DEFERRED, "leader_missing")
    assert "2 dispatches" in blocker.text


def test_notices_and_requests_that_are_held_back_are_told_each() -> None:
    facts = replace(WELL, backlog=HELD_BACK, deferred=Trouble("unconfirmed", "", 7))
    found = derive_readiness(facts, NOW).reasons
    assert [(one.code, one.since_ns) for one in found] == [
        ("unconfirmed", 7),
        ("leader_missing", 0),
    ]


def test_pending_and_failed_dispatches_alone_block_nobody() -> None:
    facts = replace(WELL, backlog=Backlog(pending=5, notified=4, delivered=3, failed=2))
    assert derive_readiness(facts, NOW).ready


def test_the_backlog_is_in_the_snapshot() -> None:
    found = derive_readiness(replace(WELL, backlog=Backlog(1, 2, 3, 4, 0)), NOW)
    assert found.backlog == {
        "pending": 1,
        "notified": 2,
        "delivered": 3,
        "failed": 4,
        "deferred": 0,
    }


def test_mail_that_waits_for_another_store_is_counted_and_warned_of_and_blocks_nobody() -> None:
    facts = replace(WELL, mail=(Mail("south", 3, held_up=True), Mail("west", 1, held_up=False)))
    found = derive_readiness(facts, NOW)
    assert found.ready
    assert found.mail == {"south": 3, "west": 1}
    [warning] = found.warnings
    assert warning.reason is Reason.MAIL_WAITING
    assert "3 messages wait for south" in warning.text


# Each fact, and another value for it. Whatever is known must be able to change what is told.
OTHER_FACTS: dict[str, object] = {
    "universe": "shop",
    "generation": 2,
    "authority": None,
    "replay_pending": 1,
    "deferred": Trouble("leader_missing"),
    "backlog": Backlog(failed=1),
    "store": Trouble("store_full"),
    "schema": Trouble("schema_mismatch"),
    "workers_live": 0,
    "worlds": {"active": 1},
    "mail": (Mail("south", 3, held_up=True),),
    "subjects": (Subject("id-ada", "Account/ada", (PARKED,)),),
    "subjects_omitted": 1,
    "observed": False,
}


def test_there_is_no_fact_without_a_test() -> None:
    assert set(OTHER_FACTS) == {field.name for field in fields(Facts)}


@pytest.mark.parametrize("fact", OTHER_FACTS)
def test_every_fact_is_looked_at(fact: str) -> None:
    changed = replace(WELL, **{fact: OTHER_FACTS[fact]})  # type: ignore[arg-type]
    assert derive_readiness(changed, NOW) != derive_readiness(WELL, NOW)


# Every reason that there is, and facts from which it follows, for the universe or for a subject.
CAUSES: dict[Reason, Facts] = {
    **{reason: replace(WELL, authority=held) for reason, held in AUTHORITY.items()},
    **{reason: replace(WELL, **bad) for reason, bad in OTHERS.items()},  # type: ignore[arg-type]
    **{
        reason: replace(WELL, subjects=(Subject("s", "s", (Blocker(reason, "code", ""),)),))
        for reason in (
            Reason.WORLD_PAUSED,
            Reason.WORLD_PARKED,
            Reason.UNKNOWN_EVENT,
            Reason.CODE_MISSING,
            Reason.RUN_HALTED,
        )
    },
    Reason.NO_LIVE_WORKER: replace(WELL, workers_live=0),
    Reason.MAIL_WAITING: replace(WELL, mail=(Mail("south", 3, held_up=True),)),
}


# `store_time` is a warning about the store, not about a universe: tests/store/test_calendar.py.
@pytest.mark.parametrize("reason", [one for one in Reason if one is not Reason.STORE_TIME])
def test_every_reason_is_told_where_it_belongs_and_nowhere_else(reason: Reason) -> None:
    found = derive_readiness(CAUSES[reason], NOW)
    told = {
        "universe": [one.reason for one in found.reasons],
        "subject": [one.reason for subject in found.subjects for one in subject.reasons],
        "warning": [one.reason for one in found.warnings],
    }
    where = next(place for place, reasons in told.items() if reasons)
    assert told == {"universe": [], "subject": [], "warning": [], where: [reason]}
    assert found.ready == (where != "universe")
