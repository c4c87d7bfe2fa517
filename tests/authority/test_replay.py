"""Replay: a cursor that stays, events that are told once, and reasons for waiting."""

from __future__ import annotations

import pytest

from holdfast.authority import dispatch_log, panes, replay
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.replay import Deferral, ReplayState
from holdfast.clock import S, SimClock
from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Store

MODULES = ("holdfast.authority.replay", "holdfast.authority.panes")

U = "bank"


def made(store: Store, *names: str) -> None:
    for name in names:
        DispatchLog(store, U).request(name, "work")


def ahead(store: Store) -> list[tuple[int, str, bool]]:
    found = store.read(replay.ahead, U, 100)
    return [(one.height, one.event.event_id, one.seen) for one in found]


def advance(store: Store, cursor: int, *ids: str) -> ReplayState:
    was = store.read(replay.read, U)
    at = 0 if was is None else was.cursor
    state: ReplayState = store.transact(replay.advance, U, at, cursor, list(ids))
    return state


# -- the cursor ------------------------------------------------------------------------------------


def test_where_nobody_follows_nothing_is_pending(sim_store: Store) -> None:
    made(sim_store, "a")
    assert sim_store.read(replay.read, U) is None
    assert sim_store.read(replay.pending, U) == 0
    assert ahead(sim_store) == []


def test_what_happened_before_is_not_told(sim_store: Store) -> None:
    made(sim_store, "a")
    assert sim_store.transact(replay.follow, U) == ReplayState(1, 1)
    made(sim_store, "b")
    assert ahead(sim_store) == [(2, "b/0", False)]
    assert sim_store.read(replay.pending, U) == 1


def test_following_again_moves_nothing(sim_store: Store) -> None:
    first = sim_store.transact(replay.follow, U)
    made(sim_store, "a")
    assert sim_store.transact(replay.follow, U) == first


def test_the_cursor_moves_up_with_what_was_handled(sim_store: Store) -> None:
    sim_store.transact(replay.follow, U)
    made(sim_store, "a", "b", "c")
    assert advance(sim_store, 2, "a/0", "b/0").cursor == 2
    assert ahead(sim_store) == [(3, "c/0", False)]
    assert sim_store.read(replay.pending, U) == 1


def test_a_cursor_that_was_rewound_meanwhile_stays_and_what_was_told_is_remembered(
    sim_store: Store,
) -> None:
    sim_store.transact(replay.follow, U)
    made(sim_store, "a", "b", "c")
    advance(sim_store, 2)
    sim_store.transact(replay.rewind, U, 0)
    state = sim_store.transact(replay.advance, U, 2, 3, ["c/0"])
    assert state.cursor == 0
    assert ahead(sim_store) == [(1, "a/0", False), (2, "b/0", False), (3, "c/0", True)]


@pytest.mark.parametrize("cursor", [1, 4])
def test_the_cursor_moves_neither_back_nor_above_the_log(sim_store: Store, cursor: int) -> None:
    sim_store.transact(replay.follow, U)
    made(sim_store, "a", "b", "c")
    state = advance(sim_store, 2)
    with pytest.raises(Invalid):
        advance(sim_store, cursor, "a/0")
    assert sim_store.read(replay.read, U) == state
    assert not sim_store.read(replay.remembers, U, "a/0")


def test_a_universe_that_is_not_followed_has_no_cursor_to_move(sim_store: Store) -> None:
    for command in (
        lambda: advance(sim_store, 0),
        lambda: sim_store.transact(replay.rewind, U, 0),
        lambda: sim_store.transact(replay.defer_leader_notification, U, "x", ""),
        lambda: sim_store.transact(replay.clear_deferred, U),
    ):
        with pytest.raises(NotFound):
            command()


# -- once ------------------------------------------------------------------------------------------


def test_an_event_that_was_handled_is_known_when_it_is_replayed(sim_store: Store) -> None:
    sim_store.transact(replay.follow, U)
    made(sim_store, "a", "b", "c")
    advance(sim_store, 2, "a/0", "b/0")
    assert sim_store.transact(replay.rewind, U, 0).cursor == 0
    assert ahead(sim_store) == [(1, "a/0", True), (2, "b/0", True), (3, "c/0", False)]


def test_remembering_twice_is_remembering_once(sim_store: Store) -> None:
    sim_store.transact(replay.follow, U)
    made(sim_store, "a")
    assert advance(sim_store, 1, "a/0", "a/0").remembered == 1
    sim_store.transact(replay.rewind, U, 0)
    assert advance(sim_store, 1, "a/0").remembered == 1


def test_the_oldest_ids_are_forgotten_beyond_the_bound(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "DEDUPE_KEPT", 3)
    sim_store.transact(replay.follow, U)
    made(sim_store, *"abcde")
    advance(sim_store, 5, *(f"{name}/0" for name in "abcde"))
    known = [sim_store.read(replay.remembers, U, f"{name}/0") for name in "abcde"]
    assert known == [False, False, True, True, True]


def test_a_rewind_goes_no_further_than_events_are_remembered(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "DEDUPE_KEPT", 3)
    sim_store.transact(replay.follow, U)
    made(sim_store, *"abcde")
    advance(sim_store, 5, *(f"{name}/0" for name in "abcde"))
    with pytest.raises(Invalid) as error:
        sim_store.transact(replay.rewind, U, 1)
    assert error.value.min == 2
    sim_store.transact(replay.rewind, U, 2)
    assert [seen for *_, seen in ahead(sim_store)] == [True, True, True]
    with pytest.raises(Invalid):
        sim_store.transact(replay.rewind, U, 4)


def test_a_rewind_goes_no_further_than_the_log_is_kept(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_log, "LOG_KEPT", 5)
    monkeypatch.setattr(dispatch_log, "LOG_CUT_EVERY", 10)
    sim_store.transact(replay.follow, U)
    made(sim_store, *(f"r{n}" for n in range(15)))
    advance(sim_store, 15)
    made(sim_store, *(f"s{n}" for n in range(15)))
    with pytest.raises(Invalid):
        sim_store.transact(replay.rewind, U, 0)


# -- waiting ---------------------------------------------------------------------------------------


def test_a_deferral_has_its_reason_and_moves_no_cursor(sim_store: Store, clock: SimClock) -> None:
    sim_store.transact(replay.follow, U)
    made(sim_store, "a")
    state = sim_store.transact(replay.defer_leader_notification, U, "leader_missing", "no pane")
    assert state.deferred == Deferral("leader_missing", "no pane", state.deferred.since_ns)
    assert (state.cursor, sim_store.read(replay.pending, U)) == (0, 1)


def test_the_same_reason_keeps_its_time_and_another_has_its_own(
    sim_store: Store, clock: SimClock
) -> None:
    sim_store.transact(replay.follow, U)
    first = sim_store.transact(replay.defer_leader_notification, U, "leader_missing", "no pane")
    clock.advance(S)
    again = sim_store.transact(replay.defer_leader_notification, U, "leader_missing", "no pane")
    assert again == first
    other = sim_store.transact(replay.defer_leader_notification, U, "unconfirmed", "")
    assert other.deferred.since_ns > first.deferred.since_ns


def test_a_deferral_stays_until_it_is_cleared(sim_store: Store) -> None:
    sim_store.transact(replay.follow, U)
    made(sim_store, "a")
    sim_store.transact(replay.defer_leader_notification, U, "leader_missing", "")
    assert advance(sim_store, 1, "a/0").deferred is not None
    assert sim_store.transact(replay.clear_deferred, U).deferred is None


def test_a_deferral_without_a_reason_is_invalid() -> None:
    with pytest.raises(Invalid):
        ReplayState().defer_leader_notification("", "", 0)


# -- the leader's pane -----------------------------------------------------------------------------


def test_naming_a_pane_makes_somebody_follow(sim_store: Store) -> None:
    made(sim_store, "a")
    pane = sim_store.transact(panes.set_leader, U, "lead:0.1", "claude", "")
    assert sim_store.read(panes.leader, U) == pane
    assert sim_store.read(replay.read, U) == ReplayState(1, 1)


def test_naming_another_pane_keeps_the_cursor(sim_store: Store) -> None:
    sim_store.transact(panes.set_leader, U, "%1", "claude", "")
    made(sim_store, "a")
    sim_store.transact(panes.set_leader, U, "%2", "codex", "sock")
    assert sim_store.read(replay.pending, U) == 1
    assert sim_store.read(panes.leader, U).target == "%2"


def test_taking_the_name_back_forgets_what_was_not_told(sim_store: Store) -> None:
    sim_store.transact(panes.set_leader, U, "%1", "claude", "")
    made(sim_store, "a")
    advance(sim_store, 1, "a/0")
    assert sim_store.transact(panes.clear_leader, U)
    assert not sim_store.transact(panes.clear_leader, U)
    assert sim_store.read(replay.read, U) is None
    assert not sim_store.read(replay.remembers, U, "a/0")


@pytest.mark.parametrize(
    ("target", "cli", "socket"), [("", "claude", ""), ("%1", "", ""), ("%1", "claude", "x" * 300)]
)
def test_a_bad_pane_is_invalid_and_nobody_follows(
    sim_store: Store, target: str, cli: str, socket: str
) -> None:
    with pytest.raises(Invalid):
        sim_store.transact(panes.set_leader, U, target, cli, socket)
    assert sim_store.read(replay.read, U) is None
