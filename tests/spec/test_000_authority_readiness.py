"""Document 000, its chapters on authority and readiness, rule by rule, in its order.

Where the design settles a rule differently, the test guards what we built and its rule says so.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.authority import authority, readiness
from holdfast.authority.lease import AuthorityLease, State
from holdfast.authority.readiness import Facts, Reason, Trouble, derive_readiness
from holdfast.clock import S, SimClock
from holdfast.durable.lease import Lease
from holdfast.errors import AlreadyHeldByOther, Fenced, NotHeld, OwnerMismatch
from holdfast.roles.readiness import look
from holdfast.store.api import Store
from tests.at_once import at_once
from tests.authority.rig import (
    TTL,
    U,
    acquire,
    current,
    force_release,
    lead,
    mark_stale,
    release,
    renew,
    require_log_and_state_agree,
    story,
)
from tests.durable.conftest import SIMULATED

MODULES = ("holdfast.authority.authority", "holdfast.authority.lease")

NOW = 1_000 * S
LIVE = AuthorityLease(State.HELD, "a", "1", "a/1/1.1", 1, 1, NOW + 1)
WELL = Facts(universe=U, generation=1, authority=LIVE, workers_live=1)


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture(params=list(SIMULATED))
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock) -> Iterator[Store]:
    yield from SIMULATED[request.param](tmp_path, clock)


# -- Authority -----------------------------------------------------------------------------------


@pytest.mark.spec("000", "Authority", "at no time do two lead")
def test_of_many_who_ask_one_leads(store: Store) -> None:
    # All of them in one batch, each without knowing of the others.
    answers = at_once(store, authority.acquire, [(U, one, "1", TTL) for one in "abcdef"])
    [first] = [answer for answer in answers if isinstance(answer, Lease)]
    refusals = [answer for answer in answers if answer is not first]
    assert [type(refusal) for refusal in refusals] == [AlreadyHeldByOther] * 5
    for other in "abcdef":
        if other != first.worker:
            with pytest.raises(AlreadyHeldByOther):
                acquire(store, other)
    lead(store, first)
    assert [kind for kind, *_ in story(store)] == ["acquired"]


@pytest.mark.spec("000", "Authority", "a lease names its owner, itself, and the time it ends")
def test_a_lease_tells_owner_id_and_end(store: Store) -> None:
    granted = acquire(store, "a")
    held = current(store)
    assert held is not None
    assert (held.owner, held.lease_id, held.leased_until_ns) == (
        "a",
        granted.lease_id,
        granted.expires_ns,
    )


@pytest.mark.spec(
    "000",
    "Authority",
    "a lease that ended is written down as stale before the next owner is granted its own; we do"
    " both in one transaction",
)
def test_the_stale_mark_precedes_the_next_grant(store: Store, clock: SimClock) -> None:
    acquire(store, "a")
    clock.advance(TTL)
    acquire(store, "b")
    assert story(store) == [("acquired", "a", 1), ("marked_stale", "a", 1), ("acquired", "b", 2)]


@pytest.mark.spec("000", "Authority", "the mark may be written by anyone, ahead of any grant")
def test_a_lease_that_ended_can_be_marked_on_its_own(store: Store, clock: SimClock) -> None:
    acquire(store, "a")
    clock.advance(TTL)
    assert mark_stale(store)
    held = current(store)
    assert held is not None
    assert held.stale
    assert acquire(store, "b").epoch == 2
    assert [kind for kind, *_ in story(store)].count("marked_stale") == 1


@pytest.mark.spec(
    "000",
    "Authority",
    "a leader that died blocks for its time to live at most (ours: issue 3, from the rule on expiry)",
)
def test_a_dead_leader_never_blocks_longer_than_its_time_to_live(
    store: Store, clock: SimClock
) -> None:
    held = acquire(store, "a")
    with pytest.raises(AlreadyHeldByOther) as error:
        acquire(store, "b")
    assert error.value.until_ns == held.expires_ns
    clock.advance(TTL)
    assert acquire(store, "b").epoch == 2


@pytest.mark.spec("000", "Authority", "acquiring succeeds where nobody holds the lease")
@pytest.mark.parametrize("ending", [release, lambda store, held: force_release(store)])
def test_a_free_authority_is_granted(store: Store, ending: object) -> None:
    held = acquire(store, "a")
    ending(store, held)  # type: ignore[operator]
    assert acquire(store, "b").worker == "b"


@pytest.mark.spec(
    "000",
    "Authority",
    "acquiring succeeds for who holds it already; ours gives the same lease, not a longer one",
)
def test_the_owner_acquires_what_it_has(store: Store, clock: SimClock) -> None:
    held = acquire(store, "a")
    clock.advance(TTL // 2)
    assert acquire(store, "a") == held


@pytest.mark.spec(
    "000",
    "Authority",
    "an owner is a process: started anew it is another, and its grant fences its former self (ours)",
)
def test_a_restarted_owner_waits_and_then_fences_itself(store: Store, clock: SimClock) -> None:
    former = acquire(store, "a", "1")
    with pytest.raises(AlreadyHeldByOther):
        acquire(store, "a", "2")
    clock.advance(TTL)
    lead(store, acquire(store, "a", "2"))
    with pytest.raises(Fenced):
        lead(store, former)


@pytest.mark.spec("000", "Authority", "acquiring what another holds is refused by a typed error")
def test_acquiring_over_another_is_refused(store: Store) -> None:
    acquire(store, "a")
    with pytest.raises(AlreadyHeldByOther) as error:
        acquire(store, "b")
    assert (error.value.code, error.value.owner) == ("already_held_by_other", "a")
    assert story(store) == [("acquired", "a", 1)]


@pytest.mark.spec("000", "Authority", "the holder renews, and so leads for longer")
def test_the_holder_renews(store: Store, clock: SimClock) -> None:
    held = acquire(store, "a")
    clock.advance(TTL - S)
    held = renew(store, held)
    clock.advance(TTL - S)
    lead(store, held)


@pytest.mark.spec("000", "Authority", "nobody renews a lease that is not held: typed error")
def test_a_lease_that_is_not_held_is_not_renewed(store: Store) -> None:
    held = acquire(store, "a")
    release(store, held)
    with pytest.raises(NotHeld):
        renew(store, held)


@pytest.mark.spec("000", "Authority", "a lease that ended counts as not held, marked or not (ours)")
@pytest.mark.parametrize("marked", [False, True])
def test_a_lease_that_ended_is_not_renewed(store: Store, clock: SimClock, marked: bool) -> None:
    held = acquire(store, "a")
    clock.advance(TTL)
    if marked:
        mark_stale(store)
    with pytest.raises(NotHeld):
        renew(store, held)


@pytest.mark.spec("000", "Authority", "nobody renews what another holds: typed error")
def test_another_does_not_renew(store: Store, clock: SimClock) -> None:
    former = acquire(store, "a")
    clock.advance(TTL)
    lead(store, acquire(store, "b"))
    with pytest.raises(OwnerMismatch):
        renew(store, former)


@pytest.mark.spec("000", "Authority", "a forced release leaves neither owner, time nor stale mark")
@pytest.mark.parametrize("state", ["free", "held", "overdue", "stale"])
def test_a_forced_release_clears_everything(store: Store, clock: SimClock, state: str) -> None:
    if state != "free":
        acquire(store, "a")
    if state in ("overdue", "stale"):
        clock.advance(TTL)
    if state == "stale":
        mark_stale(store)
    force_release(store)
    assert current(store) is None
    assert acquire(store, "b").worker == "b"


@pytest.mark.spec("000", "Authority", "a forced release never lowers the epoch (ours: design 3)")
def test_a_forced_release_keeps_the_epoch(store: Store) -> None:
    held = acquire(store, "a")
    assert force_release(store) == held.epoch
    assert acquire(store, "a").epoch == held.epoch + 1


@pytest.mark.spec(
    "000",
    "Authority",
    "every command is logged with its change, and the log alone rebuilds the state (ours: design 3)",
)
def test_the_log_rebuilds_the_state_after_every_command(store: Store, clock: SimClock) -> None:
    held = acquire(store, "a")
    require_log_and_state_agree(store)
    renew(store, held)
    require_log_and_state_agree(store)
    clock.advance(2 * TTL)
    mark_stale(store)
    require_log_and_state_agree(store)
    held = acquire(store, "b")
    require_log_and_state_agree(store)
    release(store, held)
    require_log_and_state_agree(store)
    force_release(store)
    require_log_and_state_agree(store)
    assert [kind for kind, *_ in story(store)] == [
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
    "readiness is computed by the runtime from what it knows, by a function that asks nothing else",
    module="holdfast.authority.readiness",
)
def test_readiness_is_a_pure_function() -> None:
    assert derive_readiness(WELL, NOW) == derive_readiness(WELL, NOW)
    tree = ast.parse(inspect.getsource(readiness))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name and ("store" in name or "clock" in name)]


@pytest.mark.spec(
    "000",
    "Readiness",
    "without a valid lease the runtime is not ready, whichever way the lease is invalid",
    module="holdfast.authority.readiness",
)
@pytest.mark.parametrize(
    ("authority", "reason"),
    [
        (None, Reason.AUTHORITY_MISSING),
        (msgspec.structs.replace(LIVE, state=State.STALE), Reason.AUTHORITY_STALE),
        (msgspec.structs.replace(LIVE, leased_until_ns=NOW), Reason.AUTHORITY_EXPIRED),
        (msgspec.structs.replace(LIVE, generation=0), Reason.AUTHORITY_RESTORED),
    ],
)
def test_without_a_valid_lease_nothing_is_ready(
    authority: AuthorityLease | None, reason: Reason
) -> None:
    found = derive_readiness(replace(WELL, authority=authority), NOW)
    assert not found.ready
    assert [blocker.reason for blocker in found.reasons] == [reason]


@pytest.mark.spec(
    "000",
    "Readiness",
    "an operator reads from the snapshot exactly what is in the way",
    module="holdfast.roles.readiness",
)
def test_the_snapshot_of_a_store_names_its_blockers(store: Store, clock: SimClock) -> None:
    held = acquire(store, "a")
    clock.advance(TTL)
    [blocker] = look(store, U).reasons
    assert (blocker.reason, blocker.since_ns) == (Reason.AUTHORITY_EXPIRED, held.expires_ns)
    assert held.lease_id in blocker.text


@pytest.mark.spec(
    "000",
    "Readiness",
    "ready means: the lease is held and not stale, and no event waits to be replayed",
    module="holdfast.authority.readiness",
)
def test_ready_needs_a_lease_and_an_empty_replay() -> None:
    assert derive_readiness(WELL, NOW).ready
    assert not derive_readiness(replace(WELL, replay_pending=1), NOW).ready


@pytest.mark.spec(
    "000",
    "Readiness",
    "a notification that was held back counts as pending, with its reason (ours: invariant R2)",
    module="holdfast.authority.readiness",
)
def test_a_deferred_notification_is_told_with_its_reason() -> None:
    facts = replace(WELL, deferred=Trouble("leader_missing", "no pane"))
    [blocker] = derive_readiness(facts, NOW).reasons
    assert (blocker.code, blocker.text) == ("leader_missing", "no pane")


@pytest.mark.spec(
    "000",
    "Readiness",
    "all reasons are collected, not the first one",
    module="holdfast.authority.readiness",
)
def test_every_reason_is_collected() -> None:
    facts = replace(
        WELL,
        authority=None,
        replay_pending=2,
        deferred=Trouble("leader_missing"),
        store=Trouble("store_full"),
        schema=Trouble("schema_mismatch"),
    )
    assert [blocker.reason for blocker in derive_readiness(facts, NOW).reasons] == [
        Reason.STORE_FAILED,
        Reason.SCHEMA_MISMATCH,
        Reason.AUTHORITY_MISSING,
        Reason.REPLAY_PENDING,
        Reason.NOTIFICATION_DEFERRED,
    ]
