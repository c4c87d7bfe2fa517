"""A process that hosts worlds and does their effects: what is done goes on in the commit that settles it.

Both roles are the product's, with a carriage between them (`roles.carrying`). Their threads are turns
here: the worker ticks, the runners tick, the hands of a crew do what they were given, and a transaction
that was submitted is on its way for some turns before it is answered. So a world is hosted, paused,
deleted or lost while its next step is under way, and a process dies in between.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from holdfast.app.app import App
from holdfast.clock import MS
from holdfast.durable.queue import topic
from holdfast.roles.adapter import Adapter, AdapterPool
from holdfast.roles.world_worker import WorldWorker
from holdfast.runner import Policy, Runner
from holdfast.runner.bell import Bell
from holdfast.runner.crew import Crew, Hand
from holdfast.sim.actor import Actor, Life
from holdfast.sim.processes import CERTAIN_MIN, STOPPED_MILLE, Hosting, booted, stop, survived
from holdfast.store.api import Store
from holdfast.store.future import Submitted, complete

HANDS = 3
# Of a thousand turns, those after which the oldest transaction under way is answered.
ANSWERED_MILLE = 400
# How long nobody does anything while an answer is awaited.
AWAITED_NS = 3 * MS
IDLE_S_MAX = 0.5


class Household(Actor):
    """A world worker and an adapter pool under one roof."""

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
        pool = self._pool(life)
        pool.ride(worker.carriage)
        worker.carriage.open(cast(Bell, _Bell()))
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
    """Nobody sleeps: it is looked at in every turn."""

    def __init__(self) -> None:
        self.rung = threading.Event()

    def ring(self) -> None: ...


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
