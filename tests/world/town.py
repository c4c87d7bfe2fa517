"""A leader, and workers of two versions of an app that come and go, by a clock that tests move."""

from __future__ import annotations

from typing import Any

from holdfast.app.app import App
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.clock import S
from holdfast.roles.orchestrator import Orchestrator
from holdfast.roles.world_worker import WorldWorker
from tests.world.rig import Rig
from tests.world.versions import new, old


class Town(Rig):
    """A leader, and workers of either version that come and go."""

    def __init__(self, backend: Any = None, first: App = old.app, second: App = new.app) -> None:
        super().__init__(first, backend)
        self.leader = self.lead("O")
        self.newer = Runtime(second, self.store, roles=(), clock=self.clock)
        self.crew: dict[str, WorldWorker] = {}

    def lead(self, name: str) -> Orchestrator:
        return Orchestrator(
            self.store, universe=self.universe, worker=name, incarnation="1", clock=self.clock
        )

    def start(self, name: str, app: App) -> WorldWorker:
        made = self.worker(name, self.clock.entropy(4).hex(), app=app)
        self.crew[name] = made
        self.go_on()
        return made

    def stop(self, name: str) -> None:
        self.crew.pop(name).finish()
        self.go_on()

    def kill(self, name: str) -> None:
        """Without a word: its leases run out."""
        del self.crew[name]
        self.expire(31)
        self.go_on()

    def go_on(self, rounds: int = 200) -> None:
        """Tick everybody until nothing is left to do: a leader does not say that it has placed some."""
        quiet = 0
        for _ in range(rounds):
            more = self.leader.tick()
            for worker in list(self.crew.values()):
                more = worker.tick() or more
            quiet = 0 if more else quiet + 1
            if quiet == 4:
                return
        raise AssertionError(f"still working after {rounds} rounds")

    def wait(self, seconds: float) -> None:
        """Let time pass; workers beat meanwhile."""
        left = (int(seconds // 600) + 1) * min(seconds, 600.0) - 6
        while left > 0:
            self.clock.advance(int(min(left, 600.0) * S))
            self.go_on()
            left -= 600
        self.hear()

    def hear(self) -> None:
        """Let the leader lead for as long as it waits for workers to speak."""
        for _ in range(3):
            self.clock.advance(2 * S)
            self.go_on()

    def desk(self, name: str = "d", runtime: Runtime | None = None) -> WorldHandle[Any]:
        """A world as one of the versions sees it; by default as the first does."""
        runtime = runtime or self.runtime
        return runtime.world((old if runtime is self.runtime else new).Desk, name)

    def later(self, name: str = "d") -> WorldHandle[Any]:
        return self.desk(name, self.newer)
