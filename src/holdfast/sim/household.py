"""A process that hosts worlds, does their effects and fires their timers: what is done, or due, goes on in
the commit that settles it.

The roles are the product's, with a carriage between them (`roles.carrying`). The threads of the first two
are turns here: the worker ticks, the runners tick, the hands of a crew do what they were given, and a
transaction that was submitted is on its way for some turns before it is answered. The timer worker has a
thread of its own, which goes on at every store call of the others, and they at each of its. So a world is
hosted, paused, deleted or lost while its next step is under way, a timer is cancelled, replaced or fired by
another process while its round is, and the process dies in between.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from holdfast.app.app import App
from holdfast.clock import MS, S
from holdfast.durable.queue import topic
from holdfast.roles import carrying
from holdfast.roles.adapter import Adapter, AdapterPool
from holdfast.roles.carrying import Carriage, Round
from holdfast.roles.timer_worker import TimerWorker
from holdfast.roles.world_worker import WorldWorker
from holdfast.runner import Policy, Runner
from holdfast.runner.bell import Bell
from holdfast.runner.crew import Crew, Hand
from holdfast.sim.actor import Actor, Life
from holdfast.sim.processes import CERTAIN_MIN, STOPPED_MILLE, Hosting, booted, stop, survived
from holdfast.sim.scheduler import Scheduler, Task
from holdfast.store.api import Store
from holdfast.store.future import Submitted, complete

HANDS = 3
# Of a thousand turns, those after which the oldest transaction under way is answered.
ANSWERED_MILLE = 400
# How long nobody does anything while an answer is awaited.
AWAITED_NS = 3 * MS
IDLE_S_MAX = 0.5
# Of a thousand rounds of timers, those that are handed over some time after the look at what is due.
LATE_MILLE = 400
LATE_MS_MAX = 150


class Household(Actor):
    """A world worker, an adapter pool and a timer worker under one roof."""

    def __init__(
        self,
        hosting: Hosting,
        app: App,
        adapters: Callable[[Life], Mapping[str, Adapter]],
        changes: Mapping[str, Any],
    ) -> None:
        super().__init__(hosting.name)
        self.hosting = hosting
        self.app = app
        self.adapters = adapters
        self.changes = dict(changes)

    def live(self, life: Life) -> None:
        under_way = _UnderWay(life)
        worker = self.hosting.role(life)
        assert isinstance(worker, WorldWorker)
        # Only the carriage does not wait for its commits.
        worker.store = cast(Store, under_way)
        life.store.doubtful = (carrying.bring,)
        pool = self._pool(life)
        pool.ride(worker.carriage)
        bell = _Bell(life.scheduler)
        # What `run` does in its thread: cycles, too, are under way while others go on.
        worker._bell = cast(Bell, bell)
        worker.carriage.open(bell)
        timers = _Timers(life, self.app.universe, worker.carriage)
        life.beside("timers", timers.live)
        for runner in pool.runners:
            while not survived(life, booted, runner):
                pass
        topics = [*worker.topics, *(topic(runner._queue) for runner in pool.runners)]
        since = 0
        while True:
            since = survived(life, life.store.wait, topics, since, 0.0)
            turns = [worker.tick, *(runner.tick for runner in pool.runners)]
            ends = [survived(life, turn) for turn in turns]
            if under_way.waiting:
                life.seen("household: a step under way")
                under_way.pass_time()
                continue
            if not life.calm and life.tape.chance(STOPPED_MILLE):
                life.seen("household stopped in good order")
                stop(life, pool)
                survived(life, worker.finish)
                return
            moved = ends[0] or any(tick is not None and tick.moved for tick in ends[1:])
            if not moved and not any(runner.in_hand for runner in pool.runners):
                idle_ms = min(survived(life, one.idle_sleep_ms) or 0 for one in pool.runners)
                idle_s = min(idle_ms / 1000, survived(life, worker.next_s) or 0.0, IDLE_S_MAX)
                with bell.sleeping() as undisturbed:
                    if undisturbed:
                        since = survived(life, life.store.wait, topics, since, max(idle_s, 0.01))

    def _pool(self, life: Life) -> AdapterPool:
        pool = AdapterPool(
            life.store,
            universe=self.app.universe,
            adapters=self.adapters(life),
            worker=f"{self.name}.{life.incarnation}",
            inline=True,
            clock=life.clock,
        )
        for runner in pool.runners:
            if runner.policy.expiries_max < CERTAIN_MIN:
                runner.set_policy(dataclasses.replace(runner.policy, **self.changes))
                _give_hands(runner, life)
        return pool


class _Hands(Crew):
    """Hands that work when somebody looks at what they have finished: some of them, each time."""

    def __init__(self, runner: Runner, life: Life) -> None:
        super().__init__(
            HANDS, began=runner.hooks.began, done=lambda: None, clock=life.clock, ahead_max=0
        )
        self._run = runner._attempt
        self._life = life

    def collect(self) -> list[Any]:
        for _ in range(self._life.tape.draw(HANDS + 1)):
            hand = Hand()
            work = self._take(hand)
            if work is None:
                break
            self._ended(hand, work, self._run(work))
        return super().collect()

    def close(self) -> None:
        return

    def _call(self, more: int = 0) -> None:
        return


def _give_hands(runner: Runner, life: Life) -> None:
    def hire(policy: Policy) -> Crew:
        return _Hands(runner, life)

    runner._concurrency = HANDS
    runner._hire = hire  # type: ignore[method-assign]


class _Bell:
    """Ends the sleep of whoever has nothing to do, and no other sleep of his."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.rung = threading.Event()
        self._scheduler = scheduler
        self._sleeper: Task | None = None

    def ring(self) -> None:
        self.rung.set()
        if self._sleeper is not None:
            self._sleeper.wake_ns = 0

    @contextmanager
    def sleeping(self) -> Iterator[bool]:
        """Whether it did not ring since the last sleep: then one may."""
        undisturbed = not self.rung.is_set()
        self._sleeper = self._scheduler.current
        try:
            yield undisturbed
        finally:
            self._sleeper = None
            self.rung.clear()


class _Timers(TimerWorker):
    """The timer worker, in its thread."""

    def __init__(self, life: Life, universe: str, carriage: Carriage) -> None:
        super().__init__(cast(Store, life.store), universe=universe, clock=life.clock)
        self._life = life
        self.ride(carriage)

    def live(self) -> None:
        life, since = self._life, 0
        while True:
            since = survived(life, life.store.wait, self.topics, since, 0.0)
            if not survived(life, self.tick):
                idle_s = max(survived(life, self.next_s) or 0.0, 0.0)
                since = survived(life, life.store.wait, self.topics, since, idle_s)

    def _go_round(self, round: Round) -> None:
        if self._life.tape.chance(LATE_MILLE):
            self._life.sleep(self._life.tape.draw(LATE_MS_MAX) * MS)
        super()._go_round(round)

    def _await(self, round: Round, carriage: Carriage) -> None:
        if round.answered.is_set():
            return
        round.answered = answered = _Answered(self._life.scheduler)
        super()._await(round, carriage)
        if not answered.is_set():
            # It is waited for a second time only if it could not be taken back.
            end = "not answered in time" if answered.waits > 1 else "taken back"
            self._life.seen(f"household: a round of timers {end}")


class _Answered(threading.Event):
    """Whoever waits for it lets the others of the run go on."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._waiter: Task | None = None
        self.waits = 0

    def set(self) -> None:
        super().set()
        if self._waiter is not None:
            self._waiter.wake_ns = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits += 1
        if not self.is_set():
            self._waiter = self._scheduler.current
            self._scheduler.sleep(int(timeout * S))
            self._waiter = None
        return self.is_set()


class _UnderWay:
    """The store of a life, whose submitted transactions are applied and answered some time later."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._sent: deque[tuple[_Later, Callable[[], Any]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._life.store, name)

    @property
    def waiting(self) -> bool:
        return bool(self._sent)

    def submit(self, fn: Callable[..., Any], *args: Any) -> Submitted:
        future = _Later(self.answer)
        self._sent.append((future, lambda: self._life.store.transact(fn, *args)))
        return future

    def pass_time(self) -> None:
        self._life.sleep(AWAITED_NS)
        if self._life.tape.chance(ANSWERED_MILLE):
            self.answer()

    def answer(self) -> None:
        """Apply the oldest: they are sent over one connection."""
        if self._sent:
            future, run = self._sent.popleft()
            try:
                complete(future, run())
            except Exception as error:
                complete(future, error=error)


class _Later(Submitted):
    """Whoever waits for it lets time pass; whoever only wants to be told does not."""

    def __init__(self, answer: Callable[[], None]) -> None:
        super().__init__()
        self._answer = answer

    def result(self, timeout: float | None = None) -> Any:
        while not self._done:
            self._answer()
        return super().result(timeout)
