"""Document 000, chapters on authority and readiness, rule by rule, in document order.

Where the design differs from the document, the test checks the design and its rule text names the difference.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.clock import S, SimClock
from holdfast.durable.lease import Lease
from holdfast.errors import AlreadyHeldByOther, Fenced, NotHeld, OwnerMismatch
from holdfast.leadership import leader_lease
from holdfast.leadership.leader_lease_state import LeaderLease, LeaderState
from holdfast.store.api import Store
from holdfast.workers import readiness
from holdfast.workers.readiness import (
    ObservedProblem,
    ReadinessFacts,
    ReadinessReason,
    derive_readiness,
)
from holdfast.workers.readiness_facts import read_readiness
from tests.batch_calls import call_in_one_batch
from tests.durable.conftest import SIMULATED
from tests.leadership.rig import (
    TTL,
    U,
    acquire,
    current,
    force_release,
    logged_events,
    mark_stale,
    release,
    renew,
    require_log_and_state_agree,
    write_with_lease,
)

MODULES = ("holdfast.leadership.leader_lease", "holdfast.leadership.leader_lease_state")

NOW = 1_000 * S
LIVE = LeaderLease(LeaderState.HELD, "a", "1", "a/1/1.1", 1, 1, NOW + 1)
READY_FACTS = ReadinessFacts(universe=U, generation=1, authority=LIVE, workers_live=1)


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture(params=list(SIMULATED))
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock) -> Iterator[Store]:
    yield from SIMULATED[request.param](tmp_path, clock)


# -- Authority -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "000",
    "Authority",
    "of several concurrent acquires one succeeds, so at most one leader lease is live",
)
def test_concurrent_acquires_grant_one_leader_lease(store: Store) -> None:
    # All requests are in one batch, so each is prepared before any commits.
    answers = call_in_one_batch(
        store, leader_lease.acquire, [(U, owner, "1", TTL) for owner in "abcdef"]
    )
    [first] = [answer for answer in answers if isinstance(answer, Lease)]
    refusals = [answer for answer in answers if answer is not first]
    assert [type(refusal) for refusal in refusals] == [AlreadyHeldByOther] * 5
    for other in "abcdef":
        if other != first.worker:
            with pytest.raises(AlreadyHeldByOther):
                acquire(store, other)
    write_with_lease(store, first)
    assert [kind for kind, *_ in logged_events(store)] == ["acquired"]


@pytest.mark.spec(
    "000", "Authority", "a leader lease records its owner, its lease id and its expiry"
)
def test_leader_lease_records_owner_lease_id_and_expiry(store: Store) -> None:
    granted = acquire(store, "a")
    lease = current(store)
    assert lease is not None
    assert (lease.owner, lease.lease_id, lease.leased_until_ns) == (
        "a",
        granted.lease_id,
        granted.expires_ns,
    )


@pytest.mark.spec(
    "000",
    "Authority",
    "the store logs the stale mark of an expired lease before the next grant, in one transaction",
)
def test_stale_mark_is_logged_before_the_next_acquire(store: Store, clock: SimClock) -> None:
    acquire(store, "a")
    clock.advance(TTL)
    acquire(store, "b")
    assert logged_events(store) == [
        ("acquired", "a", 1),
        ("marked_stale", "a", 1),
        ("acquired", "b", 2),
    ]


@pytest.mark.spec(
    "000", "Authority", "any process can mark an expired lease as stale before the next grant"
)
def test_mark_stale_marks_an_expired_lease_before_any_acquire(
    store: Store, clock: SimClock
) -> None:
    acquire(store, "a")
    clock.advance(TTL)
    assert mark_stale(store)
    lease = current(store)
    assert lease is not None
    assert lease.stale
    assert acquire(store, "b").epoch == 2
    assert [kind for kind, *_ in logged_events(store)].count("marked_stale") == 1


@pytest.mark.spec(
    "000",
    "Authority",
    "the lease of a dead leader blocks other owners for at most its time to live (our rule)",
)
def test_acquire_is_blocked_by_a_dead_leader_for_the_ttl_at_most(
    store: Store, clock: SimClock
) -> None:
    lease = acquire(store, "a")
    with pytest.raises(AlreadyHeldByOther) as error:
        acquire(store, "b")
    assert error.value.until_ns == lease.expires_ns
    clock.advance(TTL)
    assert acquire(store, "b").epoch == 2


@pytest.mark.spec("000", "Authority", "acquire succeeds on a free lease")
@pytest.mark.parametrize("ending", [release, lambda store, held: force_release(store)])
def test_acquire_of_a_free_lease_succeeds(store: Store, ending: object) -> None:
    lease = acquire(store, "a")
    ending(store, lease)  # type: ignore[operator]
    assert acquire(store, "b").worker == "b"


@pytest.mark.spec(
    "000",
    "Authority",
    "acquire by the current owner succeeds and returns the same lease without an extension",
)
def test_acquire_by_the_owner_returns_the_same_lease(store: Store, clock: SimClock) -> None:
    lease = acquire(store, "a")
    clock.advance(TTL // 2)
    assert acquire(store, "a") == lease


@pytest.mark.spec(
    "000",
    "Authority",
    "a restarted process is a new owner, and its grant fences the lease of the former process (our rule)",
)
def test_restarted_owner_waits_for_expiry_and_fences_its_former_lease(
    store: Store, clock: SimClock
) -> None:
    former = acquire(store, "a", "1")
    with pytest.raises(AlreadyHeldByOther):
        acquire(store, "a", "2")
    clock.advance(TTL)
    write_with_lease(store, acquire(store, "a", "2"))
    with pytest.raises(Fenced):
        write_with_lease(store, former)


@pytest.mark.spec(
    "000", "Authority", "acquire of a lease that another owner holds raises a typed error"
)
def test_acquire_held_by_another_raises_already_held_by_other(store: Store) -> None:
    acquire(store, "a")
    with pytest.raises(AlreadyHeldByOther) as error:
        acquire(store, "b")
    assert (error.value.code, error.value.owner) == ("already_held_by_other", "a")
    assert logged_events(store) == [("acquired", "a", 1)]


@pytest.mark.spec("000", "Authority", "renewal by the owner extends the lease")
def test_renew_by_the_holder_extends_the_lease(store: Store, clock: SimClock) -> None:
    lease = acquire(store, "a")
    clock.advance(TTL - S)
    lease = renew(store, lease)
    clock.advance(TTL - S)
    write_with_lease(store, lease)


@pytest.mark.spec("000", "Authority", "renewal of a lease that is not held raises a typed error")
def test_renew_of_a_released_lease_raises_not_held(store: Store) -> None:
    lease = acquire(store, "a")
    release(store, lease)
    with pytest.raises(NotHeld):
        renew(store, lease)


@pytest.mark.spec(
    "000",
    "Authority",
    "an expired lease counts as not held, with or without the stale mark (our rule)",
)
@pytest.mark.parametrize("marked", [False, True])
def test_renew_of_an_expired_lease_raises_not_held(
    store: Store, clock: SimClock, marked: bool
) -> None:
    lease = acquire(store, "a")
    clock.advance(TTL)
    if marked:
        mark_stale(store)
    with pytest.raises(NotHeld):
        renew(store, lease)


@pytest.mark.spec(
    "000", "Authority", "renewal of a lease that another owner holds raises a typed error"
)
def test_renew_after_takeover_raises_owner_mismatch(store: Store, clock: SimClock) -> None:
    former = acquire(store, "a")
    clock.advance(TTL)
    write_with_lease(store, acquire(store, "b"))
    with pytest.raises(OwnerMismatch):
        renew(store, former)


@pytest.mark.spec(
    "000", "Authority", "a forced release clears the owner, the expiry and the stale mark"
)
@pytest.mark.parametrize("state", ["free", "held", "overdue", "stale"])
def test_force_release_clears_owner_expiry_and_stale_mark(
    store: Store, clock: SimClock, state: str
) -> None:
    if state != "free":
        acquire(store, "a")
    if state in ("overdue", "stale"):
        clock.advance(TTL)
    if state == "stale":
        mark_stale(store)
    force_release(store)
    assert current(store) is None
    assert acquire(store, "b").worker == "b"


@pytest.mark.spec("000", "Authority", "a forced release never lowers the epoch (our rule)")
def test_force_release_never_lowers_the_epoch(store: Store) -> None:
    lease = acquire(store, "a")
    assert force_release(store) == lease.epoch
    assert acquire(store, "a").epoch == lease.epoch + 1


@pytest.mark.spec(
    "000",
    "Authority",
    "every command appends a log record with its change, and the log alone rebuilds the state (our rule)",
)
def test_leader_lease_log_rebuilds_the_state_after_every_command(
    store: Store, clock: SimClock
) -> None:
    lease = acquire(store, "a")
    require_log_and_state_agree(store)
    renew(store, lease)
    require_log_and_state_agree(store)
    clock.advance(2 * TTL)
    mark_stale(store)
    require_log_and_state_agree(store)
    lease = acquire(store, "b")
    require_log_and_state_agree(store)
    release(store, lease)
    require_log_and_state_agree(store)
    force_release(store)
    require_log_and_state_agree(store)
    assert [kind for kind, *_ in logged_events(store)] == [
        "acquired",
        "renewed",
        "marked_stale",
        "acquired",
        "released",
        "force_released",
    ]


# -- Readiness -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "000",
    "Readiness",
    "a pure function without I/O computes readiness from the facts of the runtime",
    module="holdfast.workers.readiness",
)
def test_derive_readiness_is_a_pure_function() -> None:
    assert derive_readiness(READY_FACTS, NOW) == derive_readiness(READY_FACTS, NOW)
    tree = ast.parse(inspect.getsource(readiness))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name and ("store" in name or "clock" in name)]


@pytest.mark.spec(
    "000",
    "Readiness",
    "the runtime is not ready if the lease is missing, stale, expired or from before a restore",
    module="holdfast.workers.readiness",
)
@pytest.mark.parametrize(
    ("authority", "reason"),
    [
        (None, ReadinessReason.AUTHORITY_MISSING),
        (msgspec.structs.replace(LIVE, state=LeaderState.STALE), ReadinessReason.AUTHORITY_STALE),
        (msgspec.structs.replace(LIVE, leased_until_ns=NOW), ReadinessReason.AUTHORITY_EXPIRED),
        (msgspec.structs.replace(LIVE, generation=0), ReadinessReason.AUTHORITY_RESTORED),
    ],
)
def test_derive_readiness_without_a_valid_lease_is_not_ready(
    authority: LeaderLease | None, reason: ReadinessReason
) -> None:
    snapshot = derive_readiness(replace(READY_FACTS, authority=authority), NOW)
    assert not snapshot.ready
    assert [blocker.reason for blocker in snapshot.reasons] == [reason]


@pytest.mark.spec(
    "000",
    "Readiness",
    "the readiness snapshot names every blocker with its start time",
    module="holdfast.workers.readiness_facts",
)
def test_readiness_snapshot_of_a_store_names_its_blockers(store: Store, clock: SimClock) -> None:
    lease = acquire(store, "a")
    clock.advance(TTL)
    [blocker] = read_readiness(store, U).reasons
    assert (blocker.reason, blocker.since_ns) == (
        ReadinessReason.AUTHORITY_EXPIRED,
        lease.expires_ns,
    )
    assert lease.lease_id in blocker.text


@pytest.mark.spec(
    "000",
    "Readiness",
    "readiness requires a held lease without a stale mark and no pending replay events",
    module="holdfast.workers.readiness",
)
def test_derive_readiness_requires_a_lease_and_no_pending_replay() -> None:
    assert derive_readiness(READY_FACTS, NOW).ready
    assert not derive_readiness(replace(READY_FACTS, replay_pending=1), NOW).ready


@pytest.mark.spec(
    "000",
    "Readiness",
    "readiness lists a deferred notification as a blocker with its reason (our rule)",
    module="holdfast.workers.readiness",
)
def test_derive_readiness_reports_a_deferred_notification_with_its_reason() -> None:
    facts = replace(READY_FACTS, deferred=ObservedProblem("leader_missing", "no pane"))
    [blocker] = derive_readiness(facts, NOW).reasons
    assert (blocker.code, blocker.text) == ("leader_missing", "no pane")


@pytest.mark.spec(
    "000",
    "Readiness",
    "readiness collects all blockers, not only the first one",
    module="holdfast.workers.readiness",
)
def test_derive_readiness_collects_every_reason() -> None:
    facts = replace(
        READY_FACTS,
        authority=None,
        replay_pending=2,
        deferred=ObservedProblem("leader_missing"),
        store=ObservedProblem("store_full"),
        schema=ObservedProblem("schema_mismatch"),
    )
    assert [blocker.reason for blocker in derive_readiness(facts, NOW).reasons] == [
        ReadinessReason.STORE_FAILED,
        ReadinessReason.SCHEMA_MISMATCH,
        ReadinessReason.AUTHORITY_MISSING,
        ReadinessReason.REPLAY_PENDING,
        ReadinessReason.NOTIFICATION_DEFERRED,
    ]
