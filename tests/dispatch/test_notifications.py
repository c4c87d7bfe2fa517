"""Leader notifications: a durable cursor, each event delivered once, and reasons of deferral."""

from __future__ import annotations

import pytest

from holdfast.clock import S, SimClock
from holdfast.dispatch import leader_pane, log, notifications
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.notifications import NotificationDeferral, ReplayState
from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Store

MODULES = ("holdfast.dispatch.notifications", "holdfast.dispatch.leader_pane")

U = "bank"


def make_requests(store: Store, *names: str) -> None:
    for name in names:
        DispatchLog(store, U).request(name, "work")


def next_events(store: Store) -> list[tuple[int, str, bool]]:
    events = store.read(notifications.next_events, U, 100)
    return [(one.height, one.event.event_id, one.handled) for one in events]


def advance(store: Store, cursor: int, *ids: str) -> ReplayState:
    state_before = store.read(notifications.read, U)
    at = 0 if state_before is None else state_before.cursor
    state: ReplayState = store.transact(notifications.advance, U, at, cursor, list(ids))
    return state


# -- the cursor ------------------------------------------------------------------------------------


def test_nothing_is_pending_without_a_subscription(sim_store: Store) -> None:
    make_requests(sim_store, "a")
    assert sim_store.read(notifications.read, U) is None
    assert sim_store.read(notifications.count_pending, U) == 0
    assert next_events(sim_store) == []


def test_subscribe_starts_after_earlier_events(sim_store: Store) -> None:
    make_requests(sim_store, "a")
    assert sim_store.transact(notifications.subscribe, U) == ReplayState(1, 1)
    make_requests(sim_store, "b")
    assert next_events(sim_store) == [(2, "b/0", False)]
    assert sim_store.read(notifications.count_pending, U) == 1


def test_repeated_subscribe_keeps_the_cursor(sim_store: Store) -> None:
    first = sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a")
    assert sim_store.transact(notifications.subscribe, U) == first


def test_advance_moves_the_cursor_past_handled_events(sim_store: Store) -> None:
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a", "b", "c")
    assert advance(sim_store, 2, "a/0", "b/0").cursor == 2
    assert next_events(sim_store) == [(3, "c/0", False)]
    assert sim_store.read(notifications.count_pending, U) == 1


def test_advance_after_a_concurrent_rewind_keeps_cursor_and_records_handled_events(
    sim_store: Store,
) -> None:
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a", "b", "c")
    advance(sim_store, 2)
    sim_store.transact(notifications.rewind, U, 0)
    state = sim_store.transact(notifications.advance, U, 2, 3, ["c/0"])
    assert state.cursor == 0
    assert next_events(sim_store) == [(1, "a/0", False), (2, "b/0", False), (3, "c/0", True)]


@pytest.mark.parametrize("cursor", [1, 4])
def test_advance_backwards_or_above_the_log_is_invalid(sim_store: Store, cursor: int) -> None:
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a", "b", "c")
    state = advance(sim_store, 2)
    with pytest.raises(Invalid):
        advance(sim_store, cursor, "a/0")
    assert sim_store.read(notifications.read, U) == state
    assert not sim_store.read(notifications.was_handled, U, "a/0")


def test_cursor_commands_without_a_subscription_are_not_found(sim_store: Store) -> None:
    for command in (
        lambda: advance(sim_store, 0),
        lambda: sim_store.transact(notifications.rewind, U, 0),
        lambda: sim_store.transact(notifications.defer_leader_notification, U, "x", ""),
        lambda: sim_store.transact(notifications.clear_deferred, U),
    ):
        with pytest.raises(NotFound):
            command()


# -- deduplication ---------------------------------------------------------------------------------


def test_rewind_marks_replayed_events_as_handled(sim_store: Store) -> None:
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a", "b", "c")
    advance(sim_store, 2, "a/0", "b/0")
    assert sim_store.transact(notifications.rewind, U, 0).cursor == 0
    assert next_events(sim_store) == [(1, "a/0", True), (2, "b/0", True), (3, "c/0", False)]


def test_advance_records_a_handled_event_once(sim_store: Store) -> None:
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a")
    assert advance(sim_store, 1, "a/0", "a/0").remembered == 1
    sim_store.transact(notifications.rewind, U, 0)
    assert advance(sim_store, 1, "a/0").remembered == 1


def test_oldest_handled_ids_are_dropped_beyond_the_limit(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "HANDLED_KEPT", 3)
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, *"abcde")
    advance(sim_store, 5, *(f"{name}/0" for name in "abcde"))
    known = [sim_store.read(notifications.was_handled, U, f"{name}/0") for name in "abcde"]
    assert known == [False, False, True, True, True]


def test_rewind_before_the_recorded_handled_events_is_invalid(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "HANDLED_KEPT", 3)
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, *"abcde")
    advance(sim_store, 5, *(f"{name}/0" for name in "abcde"))
    with pytest.raises(Invalid) as error:
        sim_store.transact(notifications.rewind, U, 1)
    assert error.value.min == 2
    sim_store.transact(notifications.rewind, U, 2)
    assert [seen for *_, seen in next_events(sim_store)] == [True, True, True]
    with pytest.raises(Invalid):
        sim_store.transact(notifications.rewind, U, 4)


def test_rewind_below_the_log_floor_is_invalid(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "LOG_KEPT", 5)
    monkeypatch.setattr(log, "LOG_CUT_EVERY", 10)
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, *(f"r{n}" for n in range(15)))
    advance(sim_store, 15)
    make_requests(sim_store, *(f"s{n}" for n in range(15)))
    with pytest.raises(Invalid):
        sim_store.transact(notifications.rewind, U, 0)


# -- deferral --------------------------------------------------------------------------------------


def test_deferral_records_its_reason_and_keeps_the_cursor(
    sim_store: Store, clock: SimClock
) -> None:
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a")
    state = sim_store.transact(
        notifications.defer_leader_notification, U, "leader_missing", "no pane"
    )
    assert state.deferred == NotificationDeferral(
        "leader_missing", "no pane", state.deferred.since_ns
    )
    assert (state.cursor, sim_store.read(notifications.count_pending, U)) == (0, 1)


def test_deferral_time_changes_only_with_its_reason(sim_store: Store, clock: SimClock) -> None:
    sim_store.transact(notifications.subscribe, U)
    first = sim_store.transact(
        notifications.defer_leader_notification, U, "leader_missing", "no pane"
    )
    clock.advance(S)
    again = sim_store.transact(
        notifications.defer_leader_notification, U, "leader_missing", "no pane"
    )
    assert again == first
    other = sim_store.transact(notifications.defer_leader_notification, U, "unconfirmed", "")
    assert other.deferred.since_ns > first.deferred.since_ns


def test_deferral_remains_until_clear_deferred(sim_store: Store) -> None:
    sim_store.transact(notifications.subscribe, U)
    make_requests(sim_store, "a")
    sim_store.transact(notifications.defer_leader_notification, U, "leader_missing", "")
    assert advance(sim_store, 1, "a/0").deferred is not None
    assert sim_store.transact(notifications.clear_deferred, U).deferred is None


def test_deferral_without_a_reason_is_invalid() -> None:
    with pytest.raises(Invalid):
        ReplayState().defer_leader_notification("", "", 0)


# -- the leader's pane -----------------------------------------------------------------------------


def test_set_leader_subscribes_the_universe(sim_store: Store) -> None:
    make_requests(sim_store, "a")
    pane = sim_store.transact(leader_pane.set_leader, U, "lead:0.1", "claude", "")
    assert sim_store.read(leader_pane.find_leader, U) == pane
    assert sim_store.read(notifications.read, U) == ReplayState(1, 1)


def test_set_leader_to_another_pane_keeps_the_cursor(sim_store: Store) -> None:
    sim_store.transact(leader_pane.set_leader, U, "%1", "claude", "")
    make_requests(sim_store, "a")
    sim_store.transact(leader_pane.set_leader, U, "%2", "codex", "sock")
    assert sim_store.read(notifications.count_pending, U) == 1
    assert sim_store.read(leader_pane.find_leader, U).target == "%2"


def test_clear_leader_deletes_cursor_and_handled_events(sim_store: Store) -> None:
    sim_store.transact(leader_pane.set_leader, U, "%1", "claude", "")
    make_requests(sim_store, "a")
    advance(sim_store, 1, "a/0")
    assert sim_store.transact(leader_pane.clear_leader, U)
    assert not sim_store.transact(leader_pane.clear_leader, U)
    assert sim_store.read(notifications.read, U) is None
    assert not sim_store.read(notifications.was_handled, U, "a/0")


@pytest.mark.parametrize(
    ("target", "cli", "socket"), [("", "claude", ""), ("%1", "", ""), ("%1", "claude", "x" * 300)]
)
def test_set_leader_with_a_bad_pane_is_invalid_and_subscribes_nothing(
    sim_store: Store, target: str, cli: str, socket: str
) -> None:
    with pytest.raises(Invalid):
        sim_store.transact(leader_pane.set_leader, U, target, cli, socket)
    assert sim_store.read(notifications.read, U) is None
