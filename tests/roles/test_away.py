"""Roles while their store is away: they go on when it is back, and leave when they are told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from holdfast import store as stores
from holdfast.clock import SYSTEM
from holdfast.errors import Busy, Conflict, Invalid
from holdfast.roles.role import Role
from holdfast.store.api import Store
from tests.process.watch import until

MODULES = ("holdfast.roles.role",)

pytestmark = pytest.mark.timeout(30)


class Patient(Role):
    """A role whose ticks, rests and last deed do what a test says."""

    name = "patient"
    idle_s = 0.01

    def __init__(self, store: Store) -> None:
        super().__init__(store, SYSTEM)
        self.ticks = 0
        self.finished = 0
        self.in_tick: Callable[[], None] = lambda: None
        self.in_rest: Callable[[], None] = lambda: None

    @property
    def topics(self) -> Sequence[str]:
        return ("patient",)

    def tick(self) -> bool:
        self.ticks += 1
        self.in_tick()
        return False

    def next_s(self) -> float:
        self.in_rest()
        return self.idle_s

    def finish(self) -> None:
        self.finished += 1


def away() -> None:
    raise Busy(why="the server does not answer")


@pytest.fixture
def role() -> Iterator[Patient]:
    with stores.open("memory:") as store:
        made = Patient(store)
        yield made
        made.request_stop()
        made.join(10)
        assert not made.running


def test_a_store_that_is_away_in_a_tick_is_looked_for_again(role: Patient) -> None:
    role.in_tick = away
    role.start()
    until(lambda: role.ticks > 3, "ticks")
    role.in_tick = lambda: None
    goal = role.ticks + 3
    until(lambda: role.ticks > goal, "more of them")
    assert role.failure is None


def test_a_store_that_is_away_between_ticks_ends_no_role(role: Patient) -> None:
    role.in_rest = away
    role.start()
    until(lambda: role.ticks > 3, "ticks")
    assert role.failure is None
    assert role.running


def test_an_error_that_does_not_pass_ends_the_role(role: Patient) -> None:
    def broken() -> None:
        raise Invalid(what="rest")

    role.in_rest = broken
    role.start()
    until(lambda: not role.running, "its end")
    assert isinstance(role.failure, Invalid)


def test_who_is_told_to_stop_while_the_store_is_away_waits_for_it_no_more(role: Patient) -> None:
    role.in_tick = away
    role.start()
    until(lambda: role.ticks, "a tick")
    role.request_stop()
    until(lambda: not role.running, "its end")
    assert (role.finished, role.failure) == (0, None)


def test_who_only_lost_a_race_leaves_in_good_order(role: Patient) -> None:
    def lost() -> None:
        raise Conflict(why="others were first")

    role.in_tick = lost
    role.start()
    until(lambda: role.ticks, "a tick")
    role.request_stop()
    until(lambda: not role.running, "its end")
    assert (role.finished, role.failure) == (1, None)


def test_a_store_that_goes_away_at_the_last_moment_is_no_failure(role: Patient) -> None:
    left = threading.Event()

    def finish() -> None:
        left.set()
        away()

    role.finish = finish  # type: ignore[method-assign]
    role.start()
    until(lambda: role.ticks, "a tick")
    role.request_stop()
    until(lambda: not role.running, "its end")
    assert left.is_set()
    assert role.failure is None
