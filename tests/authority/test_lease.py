"""The authority lease as a value: its table, walked, and its fold."""

import pytest

from holdfast.authority.lease import AUTHORITY, AuthorityEvent, AuthorityLease, Kind, State
from holdfast.errors import IllegalTransition

FREE = AuthorityLease(generation=1, epoch=6)
HELD = AuthorityLease(State.HELD, "a", "1", "a/1/1.7", 1, 7, 100)
STALE = AuthorityLease(State.STALE, "a", "1", "a/1/1.7", 1, 7, 100)
IN = {State.FREE: FREE, State.HELD: HELD, State.STALE: STALE}


def event(kind: Kind) -> AuthorityEvent:
    return AuthorityEvent(kind, "b", "2", "b/2/1.8", 1, 8, 50, 200)


@pytest.mark.parametrize(("state", "kind", "after"), list(AUTHORITY.pairs()))
def test_every_pair_is_a_move_of_the_table_or_changes_nothing(
    state: State, kind: Kind, after: State | None
) -> None:
    if after is not None:
        assert IN[state].after(event(kind)).state is after
        return
    with pytest.raises(IllegalTransition) as error:
        IN[state].after(event(kind))
    assert error.value.fields == {
        "machine": "authority",
        "prior": state.name,
        "attempted": kind.name,
        "owner": "b",
        "epoch": 8,
        "at_ns": 50,
    }


def test_every_state_is_reached_and_none_is_final() -> None:
    assert not AUTHORITY.unreachable()
    assert not AUTHORITY.terminal


def test_a_grant_is_what_its_event_says() -> None:
    assert FREE.after(event(Kind.ACQUIRED)) == AuthorityLease(
        State.HELD, "b", "2", "b/2/1.8", 1, 8, 200
    )


def test_a_stale_lease_still_tells_whose_it_was() -> None:
    assert HELD.after(event(Kind.MARKED_STALE)) == STALE
    assert STALE.stale
    assert not HELD.stale


@pytest.mark.parametrize("kind", [Kind.RELEASED, Kind.FORCE_RELEASED])
@pytest.mark.parametrize("was", [HELD, STALE])
def test_a_free_lease_keeps_nothing_but_generation_and_epoch(
    was: AuthorityLease, kind: Kind
) -> None:
    assert was.after(event(kind)) == AuthorityLease(generation=1, epoch=7)


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
    lease: AuthorityLease, now_ns: int, generation: int, live: bool
) -> None:
    assert lease.live(now_ns, generation) is live
