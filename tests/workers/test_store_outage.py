"""Services during a store outage: they continue after it, and they stop on request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from holdfast import failpoints
from holdfast import store as stores
from holdfast.clock import SYSTEM
from holdfast.errors import Busy, Conflict, Invalid
from holdfast.store.api import Store
from holdfast.store.lmdb.store import LmdbStore
from holdfast.workers.service import TickService
from tests.process.watch import until

MODULES = ("holdfast.workers.service",)

pytestmark = pytest.mark.timeout(30)


class ScriptedService(TickService):
    """A service with scripted ticks, sleeps and shutdown."""

    name = "patient"
    idle_s = 0.01

    def __init__(self, store: Store) -> None:
        super().__init__(store, SYSTEM)
        self.ticks = 0
        self.shut_downs = 0
        self.in_tick: Callable[[], None] = lambda: None
        self.in_sleep: Callable[[], None] = lambda: None
        self.in_shut_down: Callable[[], None] = lambda: None

    @property
    def topics(self) -> Sequence[str]:
        return ("patient",)

    def tick(self) -> bool:
        self.ticks += 1
        self.in_tick()
        return False

    def sleep_s(self) -> float:
        self.in_sleep()
        return self.idle_s

    def shut_down(self) -> None:
        self.shut_downs += 1
        self.in_shut_down()


def raise_busy() -> None:
    raise Busy(why="the server does not answer")


@pytest.fixture
def role() -> Iterator[ScriptedService]:
    with stores.open("memory:") as store:
        made = ScriptedService(store)
        yield made
        made.request_stop()
        made.join(10)
        assert not made.running


def test_service_retries_its_tick_after_a_store_outage(role: ScriptedService) -> None:
    role.in_tick = raise_busy
    role.start()
    until(lambda: role.ticks > 3, "ticks")
    role.in_tick = lambda: None
    goal = role.ticks + 3
    until(lambda: role.ticks > goal, "more of them")
    assert role.failure is None


def test_store_outage_between_ticks_does_not_stop_the_service(role: ScriptedService) -> None:
    role.in_sleep = raise_busy
    role.start()
    until(lambda: role.ticks > 3, "ticks")
    assert role.failure is None
    assert role.running


def test_permanent_error_stops_the_service(role: ScriptedService) -> None:
    def broken() -> None:
        raise Invalid(what="rest")

    role.in_sleep = broken
    role.start()
    until(lambda: not role.running, "its end")
    assert isinstance(role.failure, Invalid)


def test_stop_during_a_store_outage_skips_the_shutdown_step(role: ScriptedService) -> None:
    role.in_tick = raise_busy
    role.start()
    until(lambda: role.ticks, "a tick")
    role.request_stop()
    until(lambda: not role.running, "its end")
    assert (role.shut_downs, role.failure) == (0, None)


def test_stop_after_a_conflict_runs_the_shutdown_step(role: ScriptedService) -> None:
    def lost() -> None:
        raise Conflict(why="others were first")

    role.in_tick = lost
    role.start()
    until(lambda: role.ticks, "a tick")
    role.request_stop()
    until(lambda: not role.running, "its end")
    assert (role.shut_downs, role.failure) == (1, None)


def test_store_outage_in_the_shutdown_step_is_no_failure(role: ScriptedService) -> None:
    role.in_shut_down = raise_busy
    role.start()
    until(lambda: role.ticks, "a tick")
    role.request_stop()
    until(lambda: not role.running, "its end")
    assert (role.shut_downs, role.failure) == (1, None)


def test_stop_ends_the_sleep_of_an_idle_service_without_a_commit(role: ScriptedService) -> None:
    role.idle_s = 600.0
    role.start()
    until(lambda: role.rounds == 1, "its first tick")
    before = role.store.wait("patient", 0, 0.0)
    role.request_stop()
    role.join(20)
    assert not role.running
    assert role.store.wait("patient", 0, 0.0) == before


def test_stop_ends_the_sleep_of_an_idle_service_while_the_store_reconnects(
    tmp_path: Path,
) -> None:
    connecting, may_connect = threading.Event(), threading.Event()

    def connect_late(connection: object) -> None:
        connecting.set()
        may_connect.wait(60)

    with stores.open(tmp_path / "data") as store:
        assert isinstance(store, LmdbStore)
        with failpoints.on("lmdb.connect", calls=connect_late):
            service = ScriptedService(store)
            service.idle_s = 600.0
            service.start()
            until(lambda: store._client._reading_subscription is not None, "it sleeps")
            os.kill(store._client.welcome.pid, signal.SIGKILL)
            assert connecting.wait(10)
            service.request_stop()
            service.join(10)
            stopped = not service.running
            may_connect.set()
        assert stopped
        assert service.failure is None
