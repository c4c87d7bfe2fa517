"""The leader lease as a value: every pair of its transition table, and its event fold."""

import pytest

from holdfast.errors import IllegalTransition
from holdfast.leadership.leader_lease_state import (
    LEADER_TRANSITIONS,
    LeaderEventKind,
    LeaderLease,
    LeaderLeaseEvent,
    LeaderState,
)

FREE = LeaderLease(generation=1, epoch=6)
HELD = LeaderLease(LeaderState.HELD, "a", "1", "a/1/1.7", 1, 7, 100)
STALE = LeaderLease(LeaderState.STALE, "a", "1", "a/1/1.7", 1, 7, 100)
LEASE_IN_STATE = {LeaderState.FREE: FREE, LeaderState.HELD: HELD, LeaderState.STALE: STALE}


def event(kind: LeaderEventKind) -> LeaderLeaseEvent:
    return LeaderLeaseEvent(
        kind=kind,
        owner="b",
        incarnation="2",
        lease_id="b/2/1.8",
        generation=1,
        epoch=8,
        decided_ns=50,
        leased_until_ns=200,
    )


@pytest.mark.parametrize(("state", "kind", "after"), list(LEADER_TRANSITIONS.pairs()))
def test_every_pair_is_a_transition_or_raises_illegal_transition(
    state: LeaderState, kind: LeaderEventKind, after: LeaderState | None
) -> None:
    if after is not None:
        assert LEASE_IN_STATE[state].apply(event(kind)).state is after
        return
    with pytest.raises(IllegalTransition) as error:
        LEASE_IN_STATE[state].apply(event(kind))
    assert error.value.fields == {
        "machine": "authority",
        "prior": state.name,
        "attempted": kind.name,
        "owner": "b",
        "epoch": 8,
        "at_ns": 50,
    }


def test_every_lease_state_is_reachable_and_none_is_terminal() -> None:
    assert not LEADER_TRANSITIONS.unreachable()
    assert not LEADER_TRANSITIONS.terminal


def test_acquired_event_sets_all_fields_of_the_lease() -> None:
    assert FREE.apply(event(LeaderEventKind.ACQUIRED)) == LeaderLease(
        LeaderState.HELD, "b", "2", "b/2/1.8", 1, 8, 200
    )


def test_stale_lease_keeps_its_owner() -> None:
    assert HELD.apply(event(LeaderEventKind.MARKED_STALE)) == STALE
    assert STALE.stale
    assert not HELD.stale


@pytest.mark.parametrize("kind", [LeaderEventKind.RELEASED, LeaderEventKind.FORCE_RELEASED])
@pytest.mark.parametrize("was", [HELD, STALE])
def test_free_lease_keeps_only_generation_and_epoch(
    was: LeaderLease, kind: LeaderEventKind
) -> None:
    assert was.apply(event(kind)) == LeaderLease(generation=1, epoch=7)


@pytest.mark.parametrize(
    ("lease", "now_ns", "generation", "live"),
    [
        (HELD, 99, 1, True),
        (HELD, 100, 1, False),
        (HELD, 99, 2, False),
        (STALE, 99, 1, False),
        (FREE, 0, 1, False),
    ],
)
def test_live_means_held_unexpired_and_of_this_generation(
    lease: LeaderLease, now_ns: int, generation: int, live: bool
) -> None:
    assert lease.live(now_ns, generation) is live
