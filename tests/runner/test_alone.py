"""Suspects: what outlived two claims runs with nothing beside it, in any runner of the group."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.clock import MS
from holdfast.durable import queue
from holdfast.durable.queue import Budget
from holdfast.runner import Policy, Runner, Tick, Work
from holdfast.runner.alone import PATIENCE_NS, SUSPECT, Alone
from holdfast.runner.tending import SOLITUDE_NS
from holdfast.store.api import Store
from tests.runner.rig import Crash, Rig

MODULES = ("holdfast.runner.alone", "holdfast.runner.runner")

LONG_S = 30.0
TTL_MS = 2_000
LIMIT_NS = 3600 * 1_000 * MS
BUDGET = Budget(expiries_max=1_000)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


class Room:
    """Where handlers of all runners meet: who is inside, and whether a suspect ever had company."""

    def __init__(self) -> None:
        self.inside: list[bytes] = []
        self.done: list[bytes] = []
        self.company: list[list[bytes]] = []
        self.error: BaseException | None = None
        self._gates: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def gate(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(payload, threading.Event())

    def let_go(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.gate(payload).set()

    def __call__(self, work: Work) -> None:
        self._enter(work)
        if not work.payload.startswith(b"quick"):
            assert self.gate(work.payload).wait(LONG_S)
        self._leave(work)
        if self.error is not None:
            raise self.error

    async def run(self, work: Work) -> None:
        self._enter(work)
        while not (work.payload.startswith(b"quick") or self.gate(work.payload).is_set()):
            await asyncio.sleep(0.001)
        self._leave(work)

    def _enter(self, work: Work) -> None:
        work.limit_ns = LIMIT_NS
        with self._lock:
            self.inside.append(work.payload)
            if len(self.inside) > 1 and any(b"suspect" in one for one in self.inside):
                self.company.append(list(self.inside))

    def _leave(self, work: Work) -> None:
        with self._lock:
            self.inside.remove(work.payload)
            self.done.append(work.payload)


class Group:
    """Runners of one process, each with a queue of its own."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.alone = Alone()
        self.room = Room()

    def runner(
        self, name: str = "q", handler: Any = None, *, tend: bool = True, **options: Any
    ) -> Runner:
        policy = Policy(tend=tend, lease_ttl_ms=TTL_MS, expiries_max=BUDGET.expiries_max)
        made = Runner(
            self.rig.store,
            name,
            handler or self.room,
            worker=name,
            alone=self.alone,
            policy=policy,
            clock=self.rig.clock,
            **{"concurrency": 4, **options},
        )
        made.boot()
        return made

    def suspect(self, *payloads: bytes, to: str = "q", expiries: int = SUSPECT) -> list[int]:
        """Items that have outlived so many claims."""
        seqs = self.rig.put(*payloads, to=to)
        for _ in range(expiries):
            self.rig.store.transact(queue.claim, to, "dead", 100, MS, BUDGET)
            self.rig.clock.advance(10 * MS)
        self.rig.store.transact(queue.reap, to, 100, BUDGET)
        return seqs

    def put(self, *payloads: bytes, to: str = "q") -> None:
        self.rig.put(*payloads, to=to)

    def counts(self, name: str = "q") -> queue.Counts:
        return self.rig.counts(name)


@pytest.fixture
def group(rig: Rig) -> Iterator[Group]:
    made = Group(rig)
    yield made
    made.room.let_go(*made.room.inside)


def works(*runners: Runner) -> None:
    for runner in runners:
        runner.tick()


def until_done(group: Group, count: int, *runners: Runner) -> None:
    def done() -> bool:
        works(*runners)
        return len(group.room.done) >= count and not any(one.in_hand for one in runners)

    until(done)


# -- one runner ------------------------------------------------------------------------------------


def test_what_outlived_one_claim_only_is_no_suspect(group: Group) -> None:
    group.suspect(b"a", expiries=SUSPECT - 1)
    group.put(b"b")
    runner = group.runner()
    runner.tick()
    until(lambda: set(group.room.inside) == {b"a", b"b"})


def test_a_suspect_waits_for_those_it_was_claimed_with_and_then_runs_by_itself(
    group: Group,
) -> None:
    group.suspect(b"suspect")
    group.put(b"a", b"b")
    runner = group.runner()
    assert runner.tick().claimed == 3
    until(lambda: set(group.room.inside) == {b"a", b"b"})
    works(runner, runner)
    assert b"suspect" not in group.room.inside
    group.room.let_go(b"a", b"b")
    until(lambda: works(runner) or group.room.inside == [b"suspect"])
    assert group.room.company == []


def test_nothing_is_claimed_beside_a_suspect_and_the_rest_goes_on_after_it(group: Group) -> None:
    group.suspect(b"suspect")
    runner = group.runner()
    runner.tick()
    until(lambda: group.room.inside == [b"suspect"])
    group.put(b"a", b"b")
    for _ in range(5):
        group.rig.clock.advance(100 * MS)
        assert runner.tick() == Tick()
    assert (runner.room, group.counts().ready) == (0, 2)
    group.room.let_go(b"suspect", b"a", b"b")
    until_done(group, 3, runner)
    assert group.counts() == queue.Counts(done=3)
    assert group.room.company == []


def test_several_suspects_run_one_after_the_other(group: Group) -> None:
    group.suspect(b"quick suspect 1", b"quick suspect 2", b"quick suspect 3")
    runner = group.runner()
    until_done(group, 3, runner)
    assert group.room.company == []


def test_a_suspect_that_is_a_coroutine_is_alone_too(group: Group) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    group.suspect(b"quick suspect")
    group.put(b"a", b"b")
    runner = group.runner(handler=group.room.run, loop=lambda: loop)
    runner.tick()
    until(lambda: set(group.room.inside) == {b"a", b"b"})
    group.room.let_go(b"a", b"b")
    until_done(group, 3, runner)
    assert group.room.company == []
    loop.call_soon_threadsafe(loop.stop)


def test_a_suspect_that_fails_lets_the_others_in(group: Group) -> None:
    group.suspect(b"quick suspect")
    group.room.error = ValueError("no")
    runner = group.runner()
    until_done(group, 1, runner)
    group.room.error = None
    group.put(b"quick")
    until_done(group, 2, runner)


def test_a_suspect_whose_claim_is_withdrawn_while_it_waits_lets_the_others_in(
    group: Group,
) -> None:
    [seq] = group.suspect(b"suspect")
    group.put(b"a")
    runner = group.runner()
    runner.tick()
    until(lambda: group.room.inside == [b"a"])
    group.rig.store.transact(queue.withdraw, "q", seq, True)
    assert runner.tick().lost == 1
    group.room.let_go(b"a")
    group.put(b"quick")
    until_done(group, 2, runner)
    assert b"suspect" not in group.room.done


# -- who may, and who not --------------------------------------------------------------------------


class Idle:
    """A member with nothing under way."""

    under_way = 0

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def test_those_who_ask_have_their_turns_in_the_order_of_asking() -> None:
    alone = Alone()
    members = [Idle() for _ in range(3)]
    for member in members:
        alone.enter(member)
    first, second, third = members
    assert [alone.ask(one) for one in (first, second, third, first)] == [True, False, False, True]
    alone.leave(first)
    assert [alone.ask(one) for one in (first, third, second)] == [False, False, True]
    alone.leave(second)
    assert alone.ask(third)


def test_patience_is_for_each_suspect_anew() -> None:
    alone = Alone()
    member, busy = Idle(), Idle()
    alone.enter(busy)
    busy.under_way = 1
    assert not alone.ask(member, 1)
    assert not alone.ask(member, PATIENCE_NS)
    assert alone.ask(member, PATIENCE_NS + 1)
    assert not alone.ask(member, PATIENCE_NS + 2)
    assert alone.ask(member, 2 * PATIENCE_NS + 2)


def test_nothing_is_begun_from_the_asking_on_until_the_last_has_left() -> None:
    alone = Alone()
    first, second = Idle(), Idle()
    begun: list[int] = []
    assert alone.begin(lambda: begun.append(1))
    alone.ask(first)
    alone.ask(second)
    assert alone.wanted
    assert not alone.begin(lambda: begun.append(2))
    alone.leave(first)
    assert not alone.begin(lambda: begun.append(3))
    alone.leave(second)
    assert not alone.wanted
    assert alone.begin(lambda: begun.append(4))
    assert begun == [1, 4]


def test_the_others_are_woken_when_one_leaves_and_for_nothing_else() -> None:
    alone = Alone()
    first, second = Idle(), Idle()
    alone.enter(first)
    alone.enter(second)
    alone.leave(first)
    assert second.woken == 0
    alone.ask(first)
    alone.leave(first)
    assert second.woken == 1


# -- several runners -------------------------------------------------------------------------------


def test_no_other_runner_begins_anything_while_a_suspect_waits_or_runs(group: Group) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    until(lambda: group.room.inside == [b"long"])
    group.suspect(b"suspect")
    runner = group.runner()
    runner.tick()
    group.put(b"quick", to="other")
    assert other.tick() == Tick(), "somebody wants to be alone"
    group.room.let_go(b"long")
    until(lambda: works(other, runner) or group.room.inside == [b"suspect"])
    assert other.tick() == Tick()
    group.room.let_go(b"suspect")
    until_done(group, 3, runner, other)
    assert group.room.company == []


def test_what_was_claimed_when_another_asked_to_be_alone_is_handed_back(group: Group) -> None:
    """The other asks after this one has looked for room, and before it has what it claims."""
    group.suspect(b"suspect")
    asking = group.runner()

    def ask_meanwhile() -> None:
        asking.tick()

    other = group.runner("other", admission=lambda: ask_meanwhile())
    group.put(b"quick", to="other")
    tick = other.tick()
    assert (tick.claimed, tick.released) == (1, 1)
    until(lambda: group.room.inside == [b"suspect"])
    assert group.counts("other") == queue.Counts(ready=1)
    group.room.let_go(b"suspect")


def test_runners_that_have_suspects_at_once_take_turns_and_none_waits_for_ever(
    group: Group,
) -> None:
    names = ["one", "two", "three"]
    for name in names:
        group.suspect(*[b"quick suspect %s %d" % (name.encode(), n) for n in range(3)], to=name)
        group.put(*[b"quick %d" % n for n in range(5)], to=name)
    runners = [group.runner(name) for name in names]
    until_done(group, 24, *runners)
    assert group.room.company == []
    assert [group.counts(name) for name in names] == [queue.Counts(done=8)] * 3


def test_a_suspect_keeps_its_claim_for_as_long_as_it_waits(group: Group) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    until(lambda: group.room.inside == [b"long"])
    group.suspect(b"suspect")
    runner = group.runner()
    assert runner.tick().claimed == 1
    for _ in range(4 * (PATIENCE_NS // (TTL_MS * MS) - 1)):
        group.rig.clock.advance(TTL_MS * MS // 4)
        works(other, runner)
        [held] = group.rig.store.read(queue.claims_of, "q", runner.owner, 10)
        assert group.rig.store.read(queue.holds, held.token)
    assert group.room.inside == [b"long"]
    group.room.let_go(b"long", b"suspect")
    until_done(group, 2, runner, other)
    assert group.counts() == queue.Counts(done=1)
    assert group.room.done.count(b"suspect") == 1


def passes(group: Group, duration_ns: int, *runners: Runner) -> None:
    """Time, in steps that no claim runs out in."""
    for _ in range(duration_ns // (TTL_MS * MS // 4) + 1):
        group.rig.clock.advance(TTL_MS * MS // 4)
        works(*runners)


def test_a_suspect_waits_for_others_until_its_patience_is_at_an_end(group: Group) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    until(lambda: group.room.inside == [b"long"])
    group.suspect(b"suspect")
    runner = group.runner()
    runner.tick()
    passes(group, PATIENCE_NS, other, runner)
    until(lambda: works(runner) or group.room.inside == [b"long", b"suspect"])
    group.put(b"quick", to="other")
    assert other.tick() == Tick(), "nothing is begun beside it all the same"


def test_a_suspect_that_has_lived_for_long_lets_others_begin(group: Group) -> None:
    group.suspect(b"suspect")
    runner, other = group.runner(), group.runner("other")
    runner.tick()
    until(lambda: group.room.inside == [b"suspect"])
    group.put(b"a", to="other")
    passes(group, SOLITUDE_NS - TTL_MS * MS, runner, other)
    assert group.room.inside == [b"suspect"]
    passes(group, TTL_MS * MS, runner, other)
    until(lambda: works(runner, other) or b"a" in group.room.inside)
    group.room.let_go(b"suspect", b"a")
    until_done(group, 2, runner, other)
    assert group.counts() == group.counts("other") == queue.Counts(done=1)


@pytest.mark.parametrize("tend", [True, False])
def test_a_runner_that_stops_while_its_suspect_waits_hands_it_back_and_lets_the_others_in(
    group: Group, tend: bool
) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    until(lambda: group.room.inside == [b"long"])
    group.suspect(b"suspect")
    runner = group.runner(tend=tend)
    runner.tick()
    runner.request_stop()
    assert runner.tick().released == 1
    assert runner.shutdown()
    assert group.counts() == queue.Counts(ready=1)
    group.put(b"quick", to="other")
    group.room.let_go(b"long")
    until_done(group, 2, other)


def test_a_runner_that_crashes_with_a_suspect_lets_the_others_in(group: Group) -> None:
    group.suspect(b"quick suspect")
    group.room.error = Crash()
    runner = group.runner()
    with pytest.raises(Crash):
        until(lambda: runner.tick() and False)
    runner.halt()
    group.room.error = None
    group.put(b"quick", to="other")
    until_done(group, 2, group.runner("other"))


@pytest.mark.parametrize("url", ["memory:", "lmdb:"])
def test_whoever_races_a_suspect_never_has_company(
    url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine neither wait comes to its end here.
    monkeypatch.setattr("holdfast.runner.alone.PATIENCE_NS", 60_000 * MS)
    monkeypatch.setattr("holdfast.runner.tending.SOLITUDE_NS", 60_000 * MS)
    room, alone = Room(), Alone()
    chance = random.Random(7)
    names = ["one", "two", "three"]
    with stores.open(f"lmdb:{tmp_path}" if url == "lmdb:" else url) as store:
        total = 0
        for name in names:
            total += fill(store, name, chance)
        policy = Policy(tend=True, lease_ttl_ms=60_000, expiries_max=1_000)
        runners = [
            Runner(store, name, room, worker=name, alone=alone, policy=policy, concurrency=3)
            for name in names
        ]
        for runner in runners:
            runner.start()
        until(lambda: len(room.done) == total)
        for runner in runners:
            assert runner.shutdown(LONG_S)
        assert sum(store.read(queue.counts, name).done for name in names) == total
    assert room.company == []


def fill(store: Store, name: str, chance: random.Random) -> int:
    """Suspects among others, in any order; how many in all."""
    store.transact(queue.put_many, name, [b"quick suspect %d" % n for n in range(5)], priority=5)
    for _ in range(SUSPECT):
        claimed = store.transact(queue.claim, name, "dead", 5, 1, BUDGET)
        assert len(claimed) == 5
        expires_ns = claimed[-1].expires_ns
        until(lambda at=expires_ns: store.now_ns() > at)  # type: ignore[misc]
    store.transact(queue.reap, name, 100, BUDGET)
    for n in range(60):
        store.transact(queue.put, name, b"quick %d" % n, priority=chance.randrange(11))
    return 65
