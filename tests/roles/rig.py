"""The rig of worlds with an adapter pool and a timer worker beside it, all driven tick by tick."""

from __future__ import annotations

from typing import Any, TypeVar

from holdfast import codec
from holdfast.app.handle import WorldHandle
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.errors import CommitUnknown
from holdfast.messages import Intent
from holdfast.roles.adapter import AdapterPool
from holdfast.roles.crew import RunnerRole
from holdfast.roles.role import Role
from holdfast.roles.timer_worker import TimerWorker
from holdfast.world import publish, timers
from tests.roles import shop
from tests.world import rig as worlds
from tests.world.rig import Crash

R = TypeVar("R", bound=RunnerRole)

ROUNDS_MAX = 1000


class Rig(worlds.Rig):
    def __init__(self, app: Any = shop.app, backend: Any = None) -> None:
        super().__init__(app, backend)
        shop.outside.reset()
        self.outside = shop.outside
        self.host = self.worker(idle_s=1e6)

    def buyer(self, name: str = "ada", *events: Any) -> WorldHandle[shop.Buyer]:
        """A buyer to whom this was sent, and who has handled it."""
        handle = self.world(shop.Buyer, name)
        for event in events:
            handle.send(event)
        self.think()
        return handle

    def think(self) -> None:
        """Worlds handle what is in their inboxes."""
        while True:
            try:
                self.run(self.host)
                return
            except Crash:
                self.host = self.worker(incarnation=self.clock.entropy(4).hex(), idle_s=1e6)

    def pool(self, name: str = "pool", **options: Any) -> AdapterPool:
        made = AdapterPool(
            self.store,
            universe=self.universe,
            adapters=self.app.effects,
            worker=name,
            clock=self.clock,
            **{"inline": True, **options},
        )
        return self.booted(made)

    def timer_worker(self) -> TimerWorker:
        return TimerWorker(self.store, universe=self.universe, clock=self.clock)

    def booted(self, role: R) -> R:
        for runner in role.runners:
            runner.boot()
        return role

    def work(self, role: RunnerRole | Role, seconds: float = 0) -> None:
        """Let a role do what there is to do within so many seconds, and worlds with it."""
        until_ns = self.clock.boot_ns() + int(seconds * S)
        for _ in range(ROUNDS_MAX):
            self.think()
            if _moved(role):
                continue
            if self.clock.boot_ns() >= until_ns:
                self.think()
                return
            self.clock.advance(min(S // 4, until_ns - self.clock.boot_ns()))
        raise AssertionError(f"still working after {ROUNDS_MAX} rounds")

    # -- looking -------------------------------------------------------------------------------

    def counts(self, kind: str = "pay") -> queue.Counts:
        return self.store.read(queue.counts, publish.effects(self.universe, kind))

    def timers(self) -> queue.Counts:
        return self.store.read(queue.counts, timers.delays(self.universe))

    def calendar(self) -> queue.Counts:
        return self.store.read(queue.counts, timers.calendar(self.universe))

    def intent(self, kind: str = "pay") -> Intent:
        """The effect that would be done next."""
        [payload, *_] = self.queued(publish.effects(self.universe, kind))
        return codec.unpack_as(Intent, payload)

    def letters(self, kind: str = "pay") -> list[queue.Dead]:
        return self.store.read(queue.dead, publish.effects(self.universe, kind))


def _moved(role: RunnerRole | Role) -> bool:
    if isinstance(role, Role):
        try:
            return role.tick()
        except CommitUnknown:
            return True
    ticks = [runner.tick() for runner in role.runners]
    return any(tick.claimed or tick.busy or tick.done for tick in ticks)
