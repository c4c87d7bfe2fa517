"""The world rig plus an effect worker pool and a timer worker, all driven tick by tick."""

from __future__ import annotations

from typing import Any, TypeVar

from holdfast import codec
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.errors import CommitUnknown
from holdfast.messages import Intent
from holdfast.workers.effects.pool import EffectWorkerPool
from holdfast.workers.runner_service import RunnerService
from holdfast.workers.service import TickService
from holdfast.workers.timers.worker import TimerWorker
from holdfast.world import intents, timers
from tests.workers import shop
from tests.world import rig as worlds
from tests.world.rig import Crash

R = TypeVar("R", bound=RunnerService)

ROUNDS_MAX = 1000


class WorkerRig(worlds.WorldRig):
    def __init__(self, app: Any = shop.app, backend: Any = None) -> None:
        super().__init__(app, backend)
        shop.fake_service.reset()
        self.fake_service = shop.fake_service
        self.world_worker = self.worker(idle_s=1e6)

    def buyer(self, name: str = "ada", *events: Any) -> WorldHandle[shop.Buyer]:
        """Return a buyer that has handled these events."""
        handle = self.world(shop.Buyer, name)
        for event in events:
            handle.send(event)
        self.run_worlds()
        return handle

    def run_worlds(self) -> None:
        """Run the world worker until the inboxes are empty. Restart it after a crash."""
        while True:
            try:
                self.run(self.world_worker)
                return
            except Crash:
                self.world_worker = self.worker(incarnation=self.clock.entropy(4).hex(), idle_s=1e6)

    def pool(self, name: str = "pool", **options: Any) -> EffectWorkerPool:
        made = EffectWorkerPool(
            self.store,
            universe=self.universe,
            adapters=self.app.effects,
            worker=name,
            clock=self.clock,
            **{"inline": True, **options},
        )
        return self.boot(made)

    def timer_worker(self) -> TimerWorker:
        return TimerWorker(self.store, universe=self.universe, clock=self.clock)

    def boot(self, service: R) -> R:
        for runner in service.runners:
            runner.boot()
        return service

    def run_until_idle(self, service: RunnerService | TickService, seconds: float = 0) -> None:
        """Tick a service and the worlds for this simulated time and until both are idle."""
        until_ns = self.clock.boot_ns() + int(seconds * S)
        for _ in range(ROUNDS_MAX):
            self.run_worlds()
            if _tick_once(service):
                continue
            if self.clock.boot_ns() >= until_ns:
                self.run_worlds()
                return
            self.clock.advance(min(S // 4, until_ns - self.clock.boot_ns()))
        raise AssertionError(f"still working after {ROUNDS_MAX} rounds")

    # -- queries -------------------------------------------------------------------------------

    def effect_counts(self, kind: str = "pay") -> queue.QueueCounts:
        return self.store.read(queue.counts, intents.effect_queue(self.universe, kind))

    def timer_counts(self) -> queue.QueueCounts:
        return self.store.read(queue.counts, timers.delay_queue(self.universe))

    def calendar_counts(self) -> queue.QueueCounts:
        return self.store.read(queue.counts, timers.calendar_queue(self.universe))

    def next_intent(self, kind: str = "pay") -> Intent:
        """The intent of the next effect in the queue."""
        [payload, *_] = self.queued(intents.effect_queue(self.universe, kind))
        return codec.unpack_as(Intent, payload)

    def dead_letters(self, kind: str = "pay") -> list[queue.DeadLetter]:
        return self.store.read(queue.list_dead, intents.effect_queue(self.universe, kind))


def _tick_once(service: RunnerService | TickService) -> bool:
    if isinstance(service, TickService):
        try:
            return service.tick()
        except CommitUnknown:
            return True
    ticks = [runner.tick() for runner in service.runners]
    return any(tick.claimed or tick.busy or tick.done for tick in ticks)
