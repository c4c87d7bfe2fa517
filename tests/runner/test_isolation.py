"""Isolation: a suspect (an item with two expired claims) runs alone among all runners of a process."""

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
from holdfast.durable.queue import RetryBudget
from holdfast.runner import Runner, RunnerPolicy, TickStats, WorkItem
from holdfast.runner.claim_supervisor import ISOLATION_MAX_NS
from holdfast.runner.isolation import ISOLATION_WAIT_NS, SUSPECT_EXPIRIES, IsolationLock
from holdfast.store.api import Store
from tests.runner.rig import RunnerRig, SimulatedCrash

MODULES = ("holdfast.runner.isolation", "holdfast.runner.runner")

LONG_S = 30.0
TTL_MS = 2_000
LIMIT_NS = 3600 * 1_000 * MS
BUDGET = RetryBudget(expiries_max=1_000)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


class HandlerMonitor:
    """Handler shared by all runners. Records the running payloads and every overlap with a suspect."""

    def __init__(self) -> None:
        self.running: list[bytes] = []
        self.finished: list[bytes] = []
        self.overlaps: list[list[bytes]] = []
        self.error: BaseException | None = None
        self._release_events: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def release_event(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._release_events.setdefault(payload, threading.Event())

    def release(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.release_event(payload).set()

    def __call__(self, work: WorkItem) -> None:
        self._enter(work)
        if not work.payload.startswith(b"quick"):
            assert self.release_event(work.payload).wait(LONG_S)
        self._leave(work)
        if self.error is not None:
            raise self.error

    async def run(self, work: WorkItem) -> None:
        self._enter(work)
        while not (work.payload.startswith(b"quick") or self.release_event(work.payload).is_set()):
            await asyncio.sleep(0.001)
        self._leave(work)

    def _enter(self, work: WorkItem) -> None:
        work.limit_ns = LIMIT_NS
        with self._lock:
            self.running.append(work.payload)
            if len(self.running) > 1 and any(b"suspect" in payload for payload in self.running):
                self.overlaps.append(list(self.running))

    def _leave(self, work: WorkItem) -> None:
        with self._lock:
            self.running.remove(work.payload)
            self.finished.append(work.payload)


class RunnerGroup:
    """Runners of one process with one queue each and a shared isolation lock."""

    def __init__(self, rig: RunnerRig) -> None:
        self.rig = rig
        self.isolation = IsolationLock()
        self.monitor = HandlerMonitor()

    def runner(
        self, name: str = "q", handler: Any = None, *, extend_claims: bool = True, **options: Any
    ) -> Runner:
        policy = RunnerPolicy(
            extend_claims=extend_claims, lease_ttl_ms=TTL_MS, expiries_max=BUDGET.expiries_max
        )
        runner = Runner(
            self.rig.store,
            name,
            handler or self.monitor,
            worker=name,
            isolation=self.isolation,
            policy=policy,
            clock=self.rig.clock,
            **{"concurrency": 4, **options},
        )
        runner.boot()
        return runner

    def put_suspects(
        self, *payloads: bytes, to: str = "q", expiries: int = SUSPECT_EXPIRIES
    ) -> list[int]:
        """Put items whose claims have expired `expiries` times."""
        seqs = self.rig.put(*payloads, to=to)
        for _ in range(expiries):
            self.rig.store.transact(queue.claim, to, "dead", 100, MS, BUDGET)
            self.rig.clock.advance(10 * MS)
        self.rig.store.transact(queue.expire_overdue, to, 100, BUDGET)
        return seqs

    def put(self, *payloads: bytes, to: str = "q") -> None:
        self.rig.put(*payloads, to=to)

    def counts(self, name: str = "q") -> queue.QueueCounts:
        return self.rig.counts(name)


@pytest.fixture
def group(rig: RunnerRig) -> Iterator[RunnerGroup]:
    made = RunnerGroup(rig)
    yield made
    made.monitor.release(*made.monitor.running)


def tick_all(*runners: Runner) -> None:
    for runner in runners:
        runner.tick()


def tick_until_finished(group: RunnerGroup, count: int, *runners: Runner) -> None:
    def done() -> bool:
        tick_all(*runners)
        return len(group.monitor.finished) >= count and not any(
            runner.has_unsettled for runner in runners
        )

    wait_until(done)


# -- one runner ------------------------------------------------------------------------------------


def test_item_with_one_expired_claim_is_not_isolated(group: RunnerGroup) -> None:
    group.put_suspects(b"a", expiries=SUSPECT_EXPIRIES - 1)
    group.put(b"b")
    runner = group.runner()
    runner.tick()
    wait_until(lambda: set(group.monitor.running) == {b"a", b"b"})


def test_suspect_waits_for_its_batch_and_then_runs_isolated(
    group: RunnerGroup,
) -> None:
    group.put_suspects(b"suspect")
    group.put(b"a", b"b")
    runner = group.runner()
    assert runner.tick().claimed == 3
    wait_until(lambda: set(group.monitor.running) == {b"a", b"b"})
    tick_all(runner, runner)
    assert b"suspect" not in group.monitor.running
    group.monitor.release(b"a", b"b")
    wait_until(lambda: tick_all(runner) or group.monitor.running == [b"suspect"])
    assert group.monitor.overlaps == []


def test_nothing_is_claimed_while_a_suspect_runs(group: RunnerGroup) -> None:
    group.put_suspects(b"suspect")
    runner = group.runner()
    runner.tick()
    wait_until(lambda: group.monitor.running == [b"suspect"])
    group.put(b"a", b"b")
    for _ in range(5):
        group.rig.clock.advance(100 * MS)
        assert runner.tick() == TickStats()
    assert (runner.capacity, group.counts().ready) == (0, 2)
    group.monitor.release(b"suspect", b"a", b"b")
    tick_until_finished(group, 3, runner)
    assert group.counts() == queue.QueueCounts(done=3)
    assert group.monitor.overlaps == []


def test_suspects_run_one_at_a_time(group: RunnerGroup) -> None:
    group.put_suspects(b"quick suspect 1", b"quick suspect 2", b"quick suspect 3")
    runner = group.runner()
    tick_until_finished(group, 3, runner)
    assert group.monitor.overlaps == []


def test_coroutine_suspect_runs_isolated(group: RunnerGroup) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    group.put_suspects(b"quick suspect")
    group.put(b"a", b"b")
    runner = group.runner(handler=group.monitor.run, loop=lambda: loop)
    runner.tick()
    wait_until(lambda: set(group.monitor.running) == {b"a", b"b"})
    group.monitor.release(b"a", b"b")
    tick_until_finished(group, 3, runner)
    assert group.monitor.overlaps == []
    loop.call_soon_threadsafe(loop.stop)


def test_isolation_ends_when_a_suspect_fails(group: RunnerGroup) -> None:
    group.put_suspects(b"quick suspect")
    group.monitor.error = ValueError("no")
    runner = group.runner()
    tick_until_finished(group, 1, runner)
    group.monitor.error = None
    group.put(b"quick")
    tick_until_finished(group, 2, runner)


def test_isolation_request_ends_when_its_suspect_is_cancelled(
    group: RunnerGroup,
) -> None:
    [seq] = group.put_suspects(b"suspect")
    group.put(b"a")
    runner = group.runner()
    runner.tick()
    wait_until(lambda: group.monitor.running == [b"a"])
    group.rig.store.transact(queue.cancel, "q", seq, True)
    assert runner.tick().lost == 1
    group.monitor.release(b"a")
    group.put(b"quick")
    tick_until_finished(group, 2, runner)
    assert b"suspect" not in group.monitor.finished


# -- the isolation lock ----------------------------------------------------------------------------


class IdleMember:
    """A lock member without running handlers."""

    under_way = 0

    def __init__(self) -> None:
        self.wake_count = 0

    def wake(self) -> None:
        self.wake_count += 1


def test_isolation_lock_is_granted_in_request_order() -> None:
    isolation = IsolationLock()
    members = [IdleMember() for _ in range(3)]
    for member in members:
        isolation.register(member)
    first, second, third = members
    assert [
        isolation.try_isolate(asking_member) for asking_member in (first, second, third, first)
    ] == [
        True,
        False,
        False,
        True,
    ]
    isolation.release(first)
    assert [isolation.try_isolate(asking_member) for asking_member in (first, third, second)] == [
        False,
        False,
        True,
    ]
    isolation.release(second)
    assert isolation.try_isolate(third)


def test_isolation_wait_restarts_for_each_suspect() -> None:
    isolation = IsolationLock()
    member, busy = IdleMember(), IdleMember()
    isolation.register(busy)
    busy.under_way = 1
    assert not isolation.try_isolate(member, 1)
    assert not isolation.try_isolate(member, ISOLATION_WAIT_NS)
    assert isolation.try_isolate(member, ISOLATION_WAIT_NS + 1)
    assert not isolation.try_isolate(member, ISOLATION_WAIT_NS + 2)
    assert isolation.try_isolate(member, 2 * ISOLATION_WAIT_NS + 2)


def test_start_is_refused_while_isolation_is_requested() -> None:
    isolation = IsolationLock()
    first, second = IdleMember(), IdleMember()
    started: list[int] = []
    assert isolation.start_unless_requested(lambda: started.append(1))
    isolation.try_isolate(first)
    isolation.try_isolate(second)
    assert isolation.is_requested
    assert not isolation.start_unless_requested(lambda: started.append(2))
    isolation.release(first)
    assert not isolation.start_unless_requested(lambda: started.append(3))
    isolation.release(second)
    assert not isolation.is_requested
    assert isolation.start_unless_requested(lambda: started.append(4))
    assert started == [1, 4]


def test_isolation_release_wakes_the_other_members() -> None:
    isolation = IsolationLock()
    first, second = IdleMember(), IdleMember()
    isolation.register(first)
    isolation.register(second)
    isolation.release(first)
    assert second.wake_count == 0
    isolation.try_isolate(first)
    isolation.release(first)
    assert second.wake_count == 1


# -- several runners -------------------------------------------------------------------------------


def test_other_runners_start_nothing_while_isolation_is_requested_or_held(
    group: RunnerGroup,
) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    wait_until(lambda: group.monitor.running == [b"long"])
    group.put_suspects(b"suspect")
    runner = group.runner()
    runner.tick()
    group.put(b"quick", to="other")
    assert other.tick() == TickStats(), "somebody wants to be alone"
    group.monitor.release(b"long")
    wait_until(lambda: tick_all(other, runner) or group.monitor.running == [b"suspect"])
    assert other.tick() == TickStats()
    group.monitor.release(b"suspect")
    tick_until_finished(group, 3, runner, other)
    assert group.monitor.overlaps == []


def test_items_claimed_during_an_isolation_request_are_released(group: RunnerGroup) -> None:
    """The isolation request arrives between the capacity check and the claim of the other runner."""
    group.put_suspects(b"suspect")
    requester = group.runner()

    def request_isolation() -> None:
        requester.tick()

    other = group.runner("other", admission=lambda: request_isolation())
    group.put(b"quick", to="other")
    tick = other.tick()
    assert (tick.claimed, tick.released) == (1, 1)
    wait_until(lambda: group.monitor.running == [b"suspect"])
    assert group.counts("other") == queue.QueueCounts(ready=1)
    group.monitor.release(b"suspect")


def test_concurrent_isolation_requests_of_runners_all_finish(
    group: RunnerGroup,
) -> None:
    names = ["one", "two", "three"]
    for name in names:
        group.put_suspects(
            *[b"quick suspect %s %d" % (name.encode(), n) for n in range(3)], to=name
        )
        group.put(*[b"quick %d" % n for n in range(5)], to=name)
    runners = [group.runner(name) for name in names]
    tick_until_finished(group, 24, *runners)
    assert group.monitor.overlaps == []
    assert [group.counts(name) for name in names] == [queue.QueueCounts(done=8)] * 3


def test_claim_of_a_suspect_is_extended_while_it_waits_for_isolation(group: RunnerGroup) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    wait_until(lambda: group.monitor.running == [b"long"])
    group.put_suspects(b"suspect")
    runner = group.runner()
    assert runner.tick().claimed == 1
    for _ in range(4 * (ISOLATION_WAIT_NS // (TTL_MS * MS) - 1)):
        group.rig.clock.advance(TTL_MS * MS // 4)
        tick_all(other, runner)
        [claim] = group.rig.store.read(queue.claims_of, "q", runner.owner, 10)
        assert group.rig.store.read(queue.is_held, claim.token)
    assert group.monitor.running == [b"long"]
    group.monitor.release(b"long", b"suspect")
    tick_until_finished(group, 2, runner, other)
    assert group.counts() == queue.QueueCounts(done=1)
    assert group.monitor.finished.count(b"suspect") == 1


def advance_time(group: RunnerGroup, duration_ns: int, *runners: Runner) -> None:
    """Advance the clock in steps shorter than a claim, with a tick of every runner."""
    for _ in range(duration_ns // (TTL_MS * MS // 4) + 1):
        group.rig.clock.advance(TTL_MS * MS // 4)
        tick_all(*runners)


def test_suspect_starts_beside_others_after_the_isolation_wait(group: RunnerGroup) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    wait_until(lambda: group.monitor.running == [b"long"])
    group.put_suspects(b"suspect")
    runner = group.runner()
    runner.tick()
    advance_time(group, ISOLATION_WAIT_NS, other, runner)
    wait_until(lambda: tick_all(runner) or group.monitor.running == [b"long", b"suspect"])
    group.put(b"quick", to="other")
    assert other.tick() == TickStats(), "nothing is begun beside it all the same"


def test_isolation_ends_after_isolation_max(group: RunnerGroup) -> None:
    group.put_suspects(b"suspect")
    runner, other = group.runner(), group.runner("other")
    runner.tick()
    wait_until(lambda: group.monitor.running == [b"suspect"])
    group.put(b"a", to="other")
    advance_time(group, ISOLATION_MAX_NS - TTL_MS * MS, runner, other)
    assert group.monitor.running == [b"suspect"]
    advance_time(group, TTL_MS * MS, runner, other)
    wait_until(lambda: tick_all(runner, other) or b"a" in group.monitor.running)
    group.monitor.release(b"suspect", b"a")
    tick_until_finished(group, 2, runner, other)
    assert group.counts() == group.counts("other") == queue.QueueCounts(done=1)


@pytest.mark.parametrize("tend", [True, False])
def test_stop_releases_a_waiting_suspect_and_its_isolation_request(
    group: RunnerGroup, tend: bool
) -> None:
    group.put(b"long", to="other")
    other = group.runner("other")
    other.tick()
    wait_until(lambda: group.monitor.running == [b"long"])
    group.put_suspects(b"suspect")
    runner = group.runner(extend_claims=tend)
    runner.tick()
    runner.request_stop()
    assert runner.tick().released == 1
    assert runner.shutdown()
    assert group.counts() == queue.QueueCounts(ready=1)
    group.put(b"quick", to="other")
    group.monitor.release(b"long")
    tick_until_finished(group, 2, other)


def test_isolation_ends_when_the_runner_crashes(group: RunnerGroup) -> None:
    group.put_suspects(b"quick suspect")
    group.monitor.error = SimulatedCrash()
    runner = group.runner()
    with pytest.raises(SimulatedCrash):
        wait_until(lambda: runner.tick() and False)
    runner.halt()
    group.monitor.error = None
    group.put(b"quick", to="other")
    tick_until_finished(group, 2, group.runner("other"))


@pytest.mark.parametrize("url", ["memory:", "lmdb:"])
def test_suspects_never_overlap_other_handlers_in_racing_runners(
    url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither limit expires during the test, even on a slow machine.
    monkeypatch.setattr("holdfast.runner.isolation.ISOLATION_WAIT_NS", 60_000 * MS)
    monkeypatch.setattr("holdfast.runner.claim_supervisor.ISOLATION_MAX_NS", 60_000 * MS)
    monitor, isolation = HandlerMonitor(), IsolationLock()
    rng = random.Random(7)
    names = ["one", "two", "three"]
    with stores.open(f"lmdb:{tmp_path}" if url == "lmdb:" else url) as store:
        total = 0
        for name in names:
            total += fill(store, name, rng)
        policy = RunnerPolicy(extend_claims=True, lease_ttl_ms=60_000, expiries_max=1_000)
        runners = [
            Runner(
                store, name, monitor, worker=name, isolation=isolation, policy=policy, concurrency=3
            )
            for name in names
        ]
        for runner in runners:
            runner.start()
        wait_until(lambda: len(monitor.finished) == total)
        for runner in runners:
            assert runner.shutdown(LONG_S)
        assert sum(store.read(queue.counts, name).done for name in names) == total
    assert monitor.overlaps == []


def fill(store: Store, name: str, rng: random.Random) -> int:
    """Put suspects and unsuspected items with random priorities. Return their number."""
    store.transact(queue.put_many, name, [b"quick suspect %d" % n for n in range(5)], priority=5)
    for _ in range(SUSPECT_EXPIRIES):
        claimed = store.transact(queue.claim, name, "dead", 5, 1, BUDGET)
        assert len(claimed) == 5
        expires_ns = claimed[-1].expires_ns
        wait_until(lambda at=expires_ns: store.now_ns() > at)  # type: ignore[misc]
    store.transact(queue.expire_overdue, name, 100, BUDGET)
    for n in range(60):
        store.transact(queue.put, name, b"quick %d" % n, priority=rng.randrange(11))
    return 65
