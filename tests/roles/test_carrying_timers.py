"""A timer that is told to its world in the world's own commit, and everything that may come between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast.app.runtime import Runtime
from holdfast.clock import S
from holdfast.durable import due, inbox, journal, queue
from holdfast.durable.bounds import TIME_NS_MAX
from holdfast.errors import CommitUnknown
from holdfast.messages import Intent, TimerSet
from holdfast.ops import pending
from holdfast.roles.carrying import Ring, Round
from holdfast.roles.firing import fire_due
from holdfast.roles.timer_worker import ALONE_S, BATCH_MAX
from holdfast.sim.edits import Edit, Mutant
from holdfast.world import catalog, entry, timers
from holdfast.world.host import Budgets
from holdfast.world.timers import Alarm
from tests.roles.rig import Rig
from tests.roles.shop import (
    Buyer,
    Dropped,
    Juggled,
    Ordered,
    Planned,
    Repeated,
    Slept,
    Unset,
    Woken,
)
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
        """Whether they are due or not."""
        clocks = [(DELAYS, TIME_NS_MAX - 1), (timers.calendar(self.universe), TIME_NS_MAX - 1)]
        found = self.store.read(due.peek, clocks, 100)
        return [codec.unpack_as(Intent, payload) for _, _, payload in found]

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


def test_the_slot_is_free_once_its_timer_was_told(rig: Ringing) -> None:
    ada = rig.buyer("ada", Juggled(["set a", "set b"]))
    rig.ripen(11)
    rig.timer.tick()
    assert (rig.slots(ada), rig.timers()) == ([], queue.Counts(done=2))
    ada.send(Juggled(["set a", "unset b"]))
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


def cancel(rig: Ringing) -> None:
    [intent] = rig.pending()
    wish = replace(intent, params=codec.pack("k"))
    rig.store.transact(lambda txn: timers.cancel_timer(txn, wish))


def put_another(rig: Ringing) -> None:
    [intent] = rig.pending()
    timer = replace(codec.unpack_as(TimerSet, intent.params), delay_ns=5 * S)
    wish = replace(intent, intent_hash=b"another", params=codec.pack(timer))
    rig.store.transact(lambda txn: timers.set_timer(txn, wish))


def change(event: catalog.Event) -> Callable[[Ringing], None]:
    def act(rig: Ringing) -> None:
        [intent] = rig.pending()
        rig.store.transact(catalog.change, rig.universe, intent.world_id, event)

    return act


def evict(rig: Ringing) -> None:
    change(catalog.Event.PAUSE)(rig)
    change(catalog.Event.RESUME)(rig)


def release(rig: Ringing) -> None:
    """In good order, by the worker itself."""
    rig.host._release(rig.host.hosted)


MEANWHILE: dict[str, tuple[Callable[[Ringing], Any], list[str]]] = {
    "cancelled": (cancel, []),
    "replaced": (put_another, ["x"]),
    "fired by another": (Ringing.fire, ["x"]),
    "sent to": (lambda rig: rig.runtime.world(Buyer, "ada").send(Woken("sent")), ["sent", "x"]),
    "evicted": (evict, ["x"]),
    "its lease ran out": (lambda rig: rig.ripen(4000), ["x"]),
    "paused": (change(catalog.Event.PAUSE), []),
    "parked": (change(catalog.Event.PARK), []),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_one_that_is_not_as_it_was_is_not_told(rig: Ringing, what: str) -> None:
    act, _ = MEANWHILE[what]
    rig.buyer("ada", Slept(5, key="k", name="x"))
    rig.ripen()
    left: dict[bytes, bytes] = {}

    def meanwhile() -> None:
        act(rig)
        left.update(rig.rows())

    rig.meanwhile(meanwhile)
    rig.timer.tick()
    assert rig.rounds == 1
    assert rig.rows() == left


@pytest.mark.parametrize("what", MEANWHILE)
def test_one_that_is_not_as_it_was_fires_once_or_never(rig: Ringing, what: str) -> None:
    act, told = MEANWHILE[what]
    ada = rig.buyer("ada", Slept(5, key="k", name="x"))
    rig.ripen()
    rig.meanwhile(lambda: act(rig))
    rig.work(rig.timer, seconds=60)
    rig.work(rig.timer, seconds=60)
    assert ada.state().woken == told
    if what not in ("paused", "parked"):
        assert rig.sound(ada)


@pytest.mark.parametrize("event", [catalog.Event.PAUSE, catalog.Event.PARK])
def test_one_of_a_world_that_stands_still_is_told_when_it_goes_on(
    rig: Ringing, event: catalog.Event
) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.ripen()
    rig.meanwhile(lambda: change(event)(rig))
    rig.work(rig.timer, seconds=5)
    rig.store.transact(catalog.change, rig.universe, rig.id(ada), catalog.Event.RESUME)
    rig.work(rig.timer, seconds=5)
    assert ada.state().woken == ["x"]


def test_a_world_that_is_deleted_meanwhile_hears_nothing(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    subject = rig.subject(ada)
    rig.ripen()
    rig.meanwhile(lambda: change(catalog.Event.DELETE)(rig))
    height = rig.store.read(journal.head, subject).height
    rig.work(rig.timer, seconds=5)
    assert rig.store.read(journal.head, subject).height == height
    assert rig.timers() == queue.Counts(done=1)


def test_a_world_that_was_given_back_hears_it_by_its_inbox(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.ripen()
    rig.bell.meanwhile = lambda: release(rig)
    rig.timer.tick()
    assert (rig.rounds, rig.timers().done) == (1, 0)
    rig.work(rig.timer)
    assert ada.state().woken == ["x"]


def hand_over(rig: Ringing, intent: Intent, alarm: Alarm) -> Round:
    round = Round([Ring(intent, codec.unpack_as(TimerSet, intent.params), alarm)])
    rig.carriage.go_round(round)
    assert round.answered.is_set()
    return round


def test_one_that_is_not_due_by_the_time_of_the_store_is_refused(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(50, key="k", name="x"))
    [intent] = rig.pending()
    before = rig.rows()
    # The clock on the wall says nothing about it.
    round = hand_over(rig, intent, Alarm(DELAYS, 1, "k", 1 << 62))
    assert (round.mistaken, round.told, rig.rows()) == (True, 0, before)
    rig.work(rig.timer, seconds=100)
    assert ada.state().woken == ["x"]


def test_one_that_the_wall_clock_has_not_reached_is_refused(rig: Ringing) -> None:
    at_ns = rig.clock.wall_ns() + 50 * S
    ada = rig.buyer("ada", Planned(at_ns / S, key="k", name="x"))
    [intent] = rig.pending()
    before = rig.rows()
    rig.ripen(100)
    rig.clock.step_wall(-90 * S)
    alarm = Alarm(timers.calendar(rig.universe), 1, "k", rig.clock.wall_ns())
    round = hand_over(rig, intent, alarm)
    assert (round.mistaken, rig.rows()) == (True, before)
    rig.work(rig.timer, seconds=100)
    assert ada.state().woken == ["x"]


def test_one_whose_clock_was_set_back_is_not_looked_at(rig: Ringing) -> None:
    at_ns = rig.clock.wall_ns() + 5 * S
    rig.buyer("ada", Planned(at_ns / S))
    rig.ripen()
    rig.clock.step_wall(-3600 * S)
    assert not rig.timer.tick()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda bob, ada: (bob, Alarm(DELAYS, 1, "k", 0)),
        lambda bob, ada: (bob, Alarm(DELAYS, 2, "j", 0)),
        lambda bob, ada: (bob, Alarm(timers.calendar("shop"), 2, "k", 1 << 62)),
        lambda bob, ada: (replace(bob, intent_hash=ada.intent_hash), Alarm(DELAYS, 1, "k", 0)),
        lambda bob, ada: (replace(bob, intent_hash=b"none"), Alarm(DELAYS, 2, "k", 0)),
        lambda bob, ada: (bob, Alarm("shop/timers/none", 2, "k", 0)),
        lambda bob, ada: (bob, Alarm(DELAYS, 3, "k", 0)),
    ],
)
def test_an_alarm_that_names_another_timer_is_refused(rig: Ringing, wrong: Any) -> None:
    ada = rig.buyer("ada", Slept(5, key="k", name="a"))
    bob = rig.buyer("bob", Slept(5, key="k", name="b"))
    rig.ripen()
    mine, its = rig.pending()
    before = rig.rows()
    round = hand_over(rig, *wrong(its, mine))
    assert (round.mistaken, round.told, rig.rows()) == (True, 0, before)
    rig.work(rig.timer, seconds=5)
    assert (ada.state().woken, bob.state().woken) == (["a"], ["b"])


def test_one_that_is_refused_takes_no_other_world_along(rig: Ringing) -> None:
    ada, bob = rig.buyer("ada", Slept(5, name="a")), rig.buyer("bob", Slept(5, name="b"))
    rig.ripen()
    rig.meanwhile(lambda: ada.send(Woken("sent")))
    rig.timer.tick()
    assert (bob.state().woken, rig.timers()) == (["b"], queue.Counts(delayed=1, done=1))
    rig.work(rig.timer)
    assert ada.state().woken == ["sent", "a"]


def test_after_a_mistake_timers_fire_the_ordinary_way_for_a_while(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(5, name="a"), Slept(11, name="b"), Slept(40, name="c"))
    rig.ripen()
    rig.meanwhile(lambda: ada.send(Woken("sent")))
    rig.work(rig.timer)
    rig.ripen(ALONE_S / 2)
    rig.work(rig.timer)
    assert rig.rounds == 1
    rig.ripen(30)
    rig.work(rig.timer)
    assert rig.rounds == 2
    assert ada.state().woken == ["sent", "a", "b", "c"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_commit_that_goes_wrong_tells_it_once(rig: Ringing, fault: str) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"), Slept(30, name="y"))
    rig.ripen()
    rig.backend.arm({1: fault})
    try:
        rig.timer.tick()
    except Crash:
        rig.restart("2")
        rig.ripen(4000)
    for _ in range(3):
        rig.ripen(20)
        rig.work(rig.timer)
    assert ada.state().woken == ["x", "y"]
    assert rig.sound(ada)
    assert (rig.timers(), rig.slots(ada)) == (queue.Counts(done=2), [])


# -- what goes the ordinary way --------------------------------------------------------------------


def test_a_timer_of_a_world_that_is_hosted_elsewhere_goes_by_its_inbox(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(5, name="a"))
    other = rig.worker("B", idle_s=1e6)
    bob = rig.world(Buyer, "bob")
    rig.assign(bob, "B")
    bob.send(Slept(5, name="b"))
    rig.run(other)
    rig.ripen()
    rig.work(rig.timer)
    assert (rig.depth(bob), rig.timers()) == (1, queue.Counts(done=2))
    rig.run(other)
    assert (ada.state().woken, bob.state().woken) == (["a"], ["b"])


def test_a_repeating_timer_goes_by_the_inbox(rig: Ringing) -> None:
    ada = rig.buyer("ada", Repeated("* * * * *", missed="all"))
    rig.ripen(200)
    rig.work(rig.timer)
    assert rig.rounds == 0
    assert len(ada.state().woken) == 3


def test_the_timers_of_a_world_keep_their_order_when_some_repeat(rig: Ringing) -> None:
    start = rig.clock.wall_ns() // (60 * S) * 60 + 60
    ada = rig.buyer("ada", Repeated("* * * * *"))
    before, after = start - 1, start + 1
    for at_s, name in ((after, "after"), (before, "before")):
        ada.send(Planned(at_s, name=name))
    rig.think()
    rig.ripen(start + 10 - rig.clock.wall_ns() / S)
    rig.work(rig.timer)
    assert ada.state().woken == ["before", "* * * * *", "after"]
    assert rig.rounds == 1


def test_what_is_not_carried_waits_for_one_round_only(rig: Ringing) -> None:
    """However many of this process are always due: those of others are not left for ever."""
    bob = rig.world(Buyer, "bob")
    rig.assign(bob, "B")
    bob.send(Slept(5, name="b"))
    rig.run(rig.worker("B", idle_s=1e6))
    ada = rig.buyer("ada", *[Slept(1, name=str(n)) for n in range(3)])
    rig.ripen()
    for n in range(3):
        rig.timer.tick()
        ada.send(Slept(0, name=f"more {n}"))
        rig.host.tick()
    assert rig.depth(bob) == 1


def test_more_timers_of_one_world_than_it_takes_at_once_are_told(rig: Ringing) -> None:
    rig = Ringing(budgets=Budgets(max_inbox_batch=8))
    ada = rig.buyer("ada", *[Slept(5, name=str(n)) for n in range(30)])
    rig.ripen()
    rig.work(rig.timer)
    assert ada.state().woken == [str(n) for n in range(30)]


def test_a_world_that_is_not_in_memory_any_more_is_told(rig: Ringing) -> None:
    """After a commit of unknown outcome nothing else makes it read its journal again."""
    ada = rig.buyer("ada", Slept(5, name="x"), Slept(15, name="y"))
    rig.ripen()
    rig.backend.arm({1: UNKNOWN_AFTER})
    rig.timer.tick()
    rig.ripen()
    for _ in range(5):
        rig.timer.tick()
    assert rig.timers() == queue.Counts(done=2)
    rig.think()
    assert ada.state().woken == ["x", "y"]


def test_a_reducer_that_raises_spoils_no_timer_but_its_own(rig: Ringing) -> None:
    ada = rig.buyer("ada", Ordered(), Slept(5, name="x"))
    rig.ripen()
    ada.send(Dropped(99))
    rig.timer.tick()
    assert (ada.state().woken, len(rig.dead())) == (["x"], 1)
    assert rig.sound(ada)


def test_a_batch_is_all_that_a_round_takes(rig: Ringing) -> None:
    worlds = [rig.buyer(f"w{n}") for n in range(30)]
    rig.runtime.send_many(
        [(one, Slept(5, name=str(n))) for n in range(10) for one in worlds],
    )
    rig.think()
    rig.ripen()
    rig.timer.tick()
    assert rig.timers().done == BATCH_MAX
    rig.work(rig.timer)
    assert [one.state().woken for one in worlds] == [[str(n) for n in range(10)]] * 30


# -- stopping --------------------------------------------------------------------------------------


def test_a_round_that_comes_after_the_end_is_answered_at_once(rig: Ringing) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.ripen()
    rig.carriage.finish()
    assert rig.timer.tick()
    rig.think()
    assert ada.state().woken == ["x"]


def test_a_round_that_was_not_begun_is_answered_by_the_end(rig: Ringing) -> None:
    rig.buyer("ada", Slept(5, name="x"))
    rig.ripen()
    rig.carriage.open(Silent())
    round = Round([])
    rig.carriage.go_round(round)
    assert not round.answered.is_set()
    rig.carriage.finish()
    assert round.answered.is_set()


def test_a_round_that_was_called_off_is_not_begun(rig: Ringing) -> None:
    rig.buyer("ada", Slept(5, key="k", name="x"))
    rig.ripen()
    rig.carriage.open(Silent())
    [intent] = rig.pending()
    timer = codec.unpack_as(TimerSet, intent.params)
    round = Round([Ring(intent, timer, Alarm(DELAYS, 1, "k", 0))])
    rig.carriage.go_round(round)
    assert rig.carriage.call_off(round)
    rig.carriage.turn(rig.clock.mono_ns() + S)
    assert rig.timers() == queue.Counts(delayed=1)


class Silent:
    """Nobody comes."""

    def __init__(self) -> None:
        self.rung = threading.Event()

    def ring(self) -> None:
        return


# -- at random -------------------------------------------------------------------------------------


SEEDS = 25


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_comes_in_between_each_timer_is_told_once(seed: int) -> None:
    """Sends, cancels, replacements, others that fire, workers that die: against what must be."""
    Story(seed).tell()


_ADVANCE, _CHECK = "world.cycle:_advance", "world.cycle:_check"
_END, _END_DUE = "world.timers:end", "durable.due:end"
# What only one guard is for. That a timer rings is judged twice: by its slot, and by its place in line.
PLANTED = {
    "slot not freed": Edit(_END, "txn.delete(_key(universe, world_id, alarm.slot))", "pass"),
    "neither freed nor ended": Edit(
        _ADVANCE, "timers.end(txn, universe, world_id, one.alarm)", "pass"
    ),
    "no number of the inbox taken": Edit(
        _ADVANCE, "cycle.to_seq, len(cycle.carried)", "cycle.to_seq, 0"
    ),
    "others came first, and nobody looked": Edit(
        _CHECK, "if last != cycle.to_seq - len(cycle.carried):", "if False:"
    ),
    "the item stays in line": Edit(_END_DUE, "txn.delete(row)", "pass"),
    "done is not counted": Edit(_END_DUE, "tally.save(txn, keys)", "pass"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_noticed(name: str) -> None:
    with Mutant(name, (PLANTED[name],)).planted():
        for seed in range(SEEDS):
            try:
                Story(seed).tell()
            except Exception:
                return
    raise AssertionError("nobody noticed")


class Story:
    """What is done, and the timers that must then have been told."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rig = Ringing()
        self.worlds = [self.rig.buyer(f"w{n}") for n in range(3)]
        self.lives = 1
        self.names = 0
        # By world: what is in a slot; what must be told, and what may be, having lost its slot.
        self.slots: list[dict[str, str]] = [{} for _ in self.worlds]
        self.must: list[set[str]] = [set() for _ in self.worlds]
        self.may: list[set[str]] = [set() for _ in self.worlds]
        self.sent: list[set[str]] = [set() for _ in self.worlds]

    def tell(self) -> None:
        deeds = [self.sleep, self.sleep, self.unset, self.send, self.go_on, self.go_on, self.fire]
        for _ in range(60):
            self.random.choice(deeds)()
        for _ in range(4):
            self.rig.ripen(30)
            self.rig.work(self.rig.timer)
        self.judge()

    def go_on(self) -> None:
        rig, random = self.rig, self.random
        rig.ripen(random.choice([0.01, 1, 5]))
        if random.random() < 0.4:
            rig.meanwhile(random.choice([self.fire, self.send, self.lose]))
        elif random.random() < 0.5:
            rig.backend.arm({random.choice([1, 2]): random.choice(FAULTS)})
        try:
            rig.timer.tick()
            if random.random() < 0.5:
                rig.host.tick()
        except (Crash, CommitUnknown) as error:
            if isinstance(error, Crash):
                self.die()
        rig.backend.arm({})

    def sleep(self) -> None:
        n, name = self.one()
        key = self.random.choice(["k", "j", None])
        seconds = self.random.choice([0, 0.5, 3, 10])
        if key is not None:
            self.vacate(n, key)
            self.slots[n][key] = name
        self.must[n].add(name)
        if self.random.random() < 0.3:
            at_s = self.rig.clock.wall_ns() / S + seconds
            self.worlds[n].send(Planned(at_s, key=key, name=name))
        else:
            self.worlds[n].send(Slept(seconds, key=key, name=name))
        self.rig.think()

    def unset(self) -> None:
        n, _ = self.one()
        self.vacate(n, "k")
        self.worlds[n].send(Unset("k"))

    def vacate(self, n: int, key: str) -> None:
        was = self.slots[n].pop(key, None)
        if was is not None:
            self.must[n].discard(was)
            self.may[n].add(was)

    def send(self) -> None:
        n, name = self.one()
        self.sent[n].add(name)
        self.worlds[n].send(Woken(name))

    def one(self) -> tuple[int, str]:
        self.names += 1
        return self.random.randrange(len(self.worlds)), str(self.names)

    def fire(self) -> None:
        self.rig.fire()

    def lose(self) -> None:
        """The worker's leases, to nobody."""
        self.rig.ripen(4000)

    def die(self) -> None:
        self.lives += 1
        self.rig.restart(f"{self.lives}")
        self.rig.ripen(4000)

    def judge(self) -> None:
        rig = self.rig
        for n, world in enumerate(self.worlds):
            woken = world.state().woken
            assert len(woken) == len(set(woken)), "none twice"
            heard = set(woken) - self.sent[n]
            assert self.must[n] <= heard <= self.must[n] | self.may[n]
            assert self.sent[n] <= set(woken)
            assert rig.slots(world) == []
            assert rig.sound(world)
        # One that was taken back is done, too.
        ever = sum(map(len, self.must)) + sum(map(len, self.may))
        delays, calendar = rig.timers(), rig.calendar()
        assert delays.done + calendar.done == ever
        assert (delays.delayed, calendar.delayed, delays.dead) == (0, 0, 0)
        assert rig.pending() == []


# -- real threads ----------------------------------------------------------------------------------

LONG_S = 60.0
held = threading.Event()
inside = threading.Event()


class Set(hf.Event):
    n: int
    ms: int


class Rang(hf.Event):
    n: int


class Held(hf.Event):
    pass


class Clock(hf.World):
    rang: list[int] = msgspec.field(default_factory=list)

    @hf.on(Set)
    def set(self, event: Set, cx: hf.Context) -> None:
        cx.after(event.ms / 1000, Rang(event.n))

    @hf.on(Rang)
    def ring(self, event: Rang, cx: hf.Context) -> None:
        self.rang.append(event.n)

    @hf.on(Held)
    def hold(self, event: Held, cx: hf.Context) -> None:
        inside.set()
        held.wait(LONG_S)


clocks = hf.App("clocks", worlds=[Clock])


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_each_of_two_hundred_timers_is_told_once_by_two_processes_workers(tmp_path: Path) -> None:
    with (
        clocks.open(f"lmdb:{tmp_path}/store", worker="one") as first,
        clocks.open(f"lmdb:{tmp_path}/store", worker="two") as second,
    ):
        worlds = [first.world(Clock, f"c{n}") for n in range(20)]
        first.send_many([(one, Set(n, 20 * n)) for n in range(10) for one in worlds])
        until(lambda: all(len(one.state().rang) >= 10 for one in worlds), "all of them")
        assert [sorted(one.state().rang) for one in worlds] == [list(range(10))] * 20
        done = first.store.read(queue.counts, timers.delays("clocks"))
        assert done == queue.Counts(done=200)
        for runtime in (first, second):
            assert all(role.failure is None for role in runtime.roles)
        for one in worlds:
            subject = catalog.subject_of("clocks", one.create())
            first.store.read(journal.verify, subject)


def test_a_reducer_that_hangs_holds_up_no_timer_of_another_world(tmp_path: Path) -> None:
    """Those of its own process are in their inboxes, for whoever hosts them next."""
    held.clear()
    inside.clear()
    with clocks.open(f"lmdb:{tmp_path}/store") as runtime:
        try:
            other, hangs = runtime.world(Clock, "other"), runtime.world(Clock, "hangs")
            other.send(Set(0, 0))
            until(lambda: other.state().rang == [0], "the first")
            # Late enough for the other world to hang by then, on a busy machine too.
            other.send(Set(1, 1500))
            until(lambda: pending_of(runtime) == 1, "the second, set")
            hangs.send(Held())
            assert inside.wait(LONG_S)
            until(lambda: pending_of(runtime) == 0, "the second, fired")
        finally:
            held.set()
        until(lambda: other.state().rang == [0, 1], "the second")


def pending_of(runtime: Runtime) -> int:
    return len(runtime.store.read(pending.timers, "clocks", 100))


def until_some(world: hf.WorldHandle[Clock], count: int) -> None:
    until(lambda: len(world.state().rang) >= count, "some of them")


def test_to_stop_in_the_middle_of_rounds_loses_and_doubles_none(tmp_path: Path) -> None:
    random, lives, each = Random(3), 6, 15
    names: list[int] = []
    for life in range(lives):
        with clocks.open(f"lmdb:{tmp_path}/store") as runtime:
            worlds = [runtime.world(Clock, f"c{n}") for n in range(5)]
            fresh = [life * each + n for n in range(each)]
            names += fresh
            runtime.send_many([(w, Set(n, random.randrange(60))) for n in fresh for w in worlds])
            until_some(worlds[0], random.randrange(len(names)))
    with clocks.open(f"lmdb:{tmp_path}/store") as runtime:
        worlds = [runtime.world(Clock, f"c{n}") for n in range(5)]
        until(lambda: all(len(one.state().rang) >= len(names) for one in worlds), "all")
        assert [sorted(one.state().rang) for one in worlds] == [names] * 5
        until(lambda: pending_of(runtime) == 0, "none left")
