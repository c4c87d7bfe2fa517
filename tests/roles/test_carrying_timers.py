"""A timer that is told to its world in the world's own commit, and everything that may come between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import MS, S
from holdfast.durable import inbox, journal, queue
from holdfast.messages import Intent, Kind
from holdfast.ops import pending
from holdfast.roles.firing import fire_due
from holdfast.roles.timer_worker import ALONE_S, BATCH_MAX, TimerWorker
from holdfast.world import catalog, entry, timers
from holdfast.world.host import Budgets
from tests.roles.rig import Rig
from tests.roles.shop import Juggled, Ordered, Planned, Repeated, Slept, Unset, Woken
from tests.world.rig import FAULTS, UNKNOWN_AFTER, Crash

MODULES = ("holdfast.roles.carrying", "holdfast.roles.timer_worker", "holdfast.durable.due")

DELAYS = timers.delays("shop")


class Bell:
    """Whoever rings is served at once; `meanwhile` happens before, and after the rounds were made."""

    def __init__(self, rig: Ringing) -> None:
        self.rung = threading.Event()
        self.meanwhile: Callable[[], Any] | None = None
        self._rig = rig

    def ring(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self._rig.rounds += 1
        self._rig.carriage.turn(self._rig.clock.mono_ns() + S)


class Ringing(Rig):
    """A world worker, and a timer worker that rides with it."""

    def __init__(self, **policy: Any) -> None:
        super().__init__()
        self.rounds = 0
        self.policy = {"idle_s": 1e6, "lease_ttl_s": 3600.0, **policy}
        self.restart("1")

    def restart(self, incarnation: str) -> None:
        self.host = self.worker(incarnation=incarnation, **self.policy)
        self.carriage = self.host.carriage
        self.bell = Bell(self)
        self.carriage.open(self.bell)
        self.timer = self.timer_worker()
        self.timer.ride(self.carriage)

    def meanwhile(self, act: Callable[[], Any]) -> None:
        """Between the look at what is due and its commit: after the inboxes were looked at, too."""
        drained = self.host.drain_all

        def then(world_ids: Any) -> Any:
            found = drained(world_ids)
            self.host.drain_all = drained  # type: ignore[method-assign]
            act()
            return found

        self.host.drain_all = then  # type: ignore[method-assign]

    def ripen(self, seconds: float = 10.0) -> None:
        self.clock.advance(int(seconds * S))

    def pending(self) -> list[Intent]:
        return [codec.unpack_as(Intent, payload) for payload in self.queued(DELAYS)]

    def slots(self, handle: hf.WorldHandle[Any]) -> list[str]:
        found = self.store.read(timers.slots_of, self.universe, self.id(handle), 100)
        return [key for key, _ in found]

    def fire(self) -> int:
        """As another timer worker does."""
        fired: int = self.store.transact(fire_due, self.universe, self.clock.wall_ns(), 100)
        return fired

    def sound(self, handle: hf.WorldHandle[Any]) -> bool:
        self.store.read(journal.verify, self.subject(handle))
        return self.store.read(inbox.last_seq, self.subject(handle)) == self.cursor(handle)

    def seen(self, handle: hf.WorldHandle[Any]) -> dict[str, Any]:
        """All that can be seen of a world and of its timers, but for when the reducers ran."""
        entries = [entry.decode(body) for body in self.bodies(handle)]
        return {
            "journal": [codec.pack(one.ingress) for one in entries],
            "seqs": [one.seq for one in entries],
            "state": codec.pack(handle.state().woken),
            "inbox": (self.store.read(inbox.last_seq, self.subject(handle)), self.cursor(handle)),
            "queues": (self.timers(), self.calendar()),
            "slots": self.slots(handle),
            "listed": len(self.store.read(pending.timers, self.universe, 100)),
            "hints": self.hints(),
        }


@pytest.fixture
def rig() -> Ringing:
    return Ringing()


# -- one commit ------------------------------------------------------------------------------------


def test_a_timer_is_told_and_handled_in_one_commit(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.ripen()
    before = rig.backend.last_id()
    assert rig.timer.tick()
    assert (rig.rounds, rig.backend.last_id()) == (1, before + 1)
    assert ada.state().woken == ["x"]


def test_timers_of_several_worlds_are_told_in_one_commit(rig: Ringing) -> None:
    worlds = [rig.buyer(f"w{n}", Slept(5, name="x"), Slept(4, name="y")) for n in range(5)]
    rig.ripen()
    before = rig.backend.last_id()
    rig.timer.tick()
    assert rig.backend.last_id() == before + 1
    assert [one.state().woken for one in worlds] == [["y", "x"]] * 5


def test_what_the_world_wants_then_goes_out_in_the_same_commit(rig: Ringing) -> None:
    """A timer of a timer, and in the slot in which that one was."""
    ada = rig.buyer("ada", Juggled(["set a", "set b"]))
    rig.ripen()
    rig.timer.tick()
    ada.send(Juggled(["set a"]))
    rig.think()
    assert (rig.slots(ada), rig.timers()) == (["a"], queue.Counts(delayed=1, done=2))


@pytest.mark.parametrize(
    "events",
    [
        [Slept(5, name="x")],
        [Slept(5, name="x"), Slept(3, name="y"), Slept(50, name="z")],
        [Slept(5, key="k", name="x"), Slept(4, key="k", name="y")],
        [Slept(5, key="k"), Unset("k"), Slept(5, key="l")],
        [Planned(1_700_000_001.0, name="c"), Slept(4, name="d")],
        [Repeated("* * * * *"), Slept(2, name="x"), Slept(3, name="y")],
    ],
)
def test_all_that_can_be_seen_is_as_by_the_ordinary_way(events: list[Any]) -> None:
    found = []
    for rides in (True, False):
        rig = Ringing()
        ada = rig.buyer("ada", *events)
        timer = rig.timer if rides else rig.timer_worker()
        for _ in range(3):
            rig.ripen(30)
            while timer.tick():
                rig.think()
            rig.think()
        assert rig.sound(ada)
        assert bool(rig.rounds) == rides
        found.append(rig.seen(ada))
    assert found[0] == found[1]


def test_what_waits_in_the_inbox_is_handled_before_it(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(5, name="timer"))
    rig.ripen()
    ada.send(Woken("sent"))
    rig.timer.tick()
    assert (ada.state().woken, rig.depth(ada)) == (["sent", "timer"], 0)
    assert rig.sound(ada)


def test_a_journal_with_carried_timers_is_replayed_alike(rig: Ringing) -> None:
    ada = rig.buyer("ada", *[Slept(5, name=str(n)) for n in range(5)])
    rig.ripen()
    rig.timer.tick()
    before = ada.state().woken
    rig.restart("2")
    rig.ripen(4000)
    rig.buyer("ada", Woken("last"))
    assert ada.state().woken == [*before, "last"] == [*map(str, range(5)), "last"]


# -- what comes between ----------------------------------------------------------------------------


def cancelled(rig: Ringing, ada: hf.WorldHandle[Any]) -> None:
    [intent] = rig.pending()
    wish = hf.messages.Intent if False else intent
    rig.store.transact(
        lambda txn: timers.cancel_timer(
            txn, codec.replace(wish, params=codec.pack("k")) if False else _cancel(wish)
        )
    )


def _cancel(intent: Intent) -> Intent:
    import msgspec

    return msgspec.structs.replace(intent, params=codec.pack("k"))
