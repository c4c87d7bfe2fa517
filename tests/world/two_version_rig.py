"""The rig of rolling deploys: a leader and workers of two app versions on a simulated clock."""

from __future__ import annotations

from typing import Any

from holdfast.app.app import App
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.workers.orchestrator import Orchestrator
from holdfast.workers.world.worker import WorldWorker
from tests.world.rig import WorldRig
from tests.world.versions import new, old


class TwoVersionRig(WorldRig):
    """A leader and workers of either version. Tests start, stop and kill the workers."""

    def __init__(self, backend: Any = None, first: App = old.app, second: App = new.app) -> None:
        super().__init__(first, backend)
        self.leader = self.make_leader("O")
        self.new_runtime = Runtime(second, self.store, roles=(), clock=self.clock)
        self.workers: dict[str, WorldWorker] = {}

    def make_leader(self, name: str) -> Orchestrator:
        return Orchestrator(
            self.store, universe=self.universe, worker=name, incarnation="1", clock=self.clock
        )

    def start_worker(self, name: str, app: App) -> WorldWorker:
        worker = self.worker(name, self.clock.entropy(4).hex(), app=app)
        self.workers[name] = worker
        self.tick_until_idle()
        return worker

    def stop_worker(self, name: str) -> None:
        self.workers.pop(name).shut_down()
        self.tick_until_idle()

    def kill_worker(self, name: str) -> None:
        """Drop the worker without a release and advance the clock until its leases expire."""
        del self.workers[name]
        self.advance_clock(31)
        self.tick_until_idle()

    def tick_until_idle(self, rounds: int = 200) -> None:
        """Tick the leader and all workers until they are idle. Four idle rounds are required,
        because the leader's tick does not report placements."""
        idle_rounds = 0
        for _ in range(rounds):
            busy = self.leader.tick()
            for worker in list(self.workers.values()):
                busy = worker.tick() or busy
            idle_rounds = 0 if busy else idle_rounds + 1
            if idle_rounds == 4:
                return
        raise AssertionError(f"still working after {rounds} rounds")

    def advance_with_heartbeats(self, seconds: float) -> None:
        """Advance the clock in steps of at most 600 s, so that workers send heartbeats."""
        left = (int(seconds // 600) + 1) * min(seconds, 600.0) - 6
        while left > 0:
            self.clock.advance(int(min(left, 600.0) * S))
            self.tick_until_idle()
            left -= 600
        self.wait_for_heartbeats()

    def wait_for_heartbeats(self) -> None:
        """Tick for the period in which a new leader waits for heartbeats."""
        for _ in range(3):
            self.clock.advance(2 * S)
            self.tick_until_idle()

    def desk(self, name: str = "d", runtime: Runtime | None = None) -> WorldHandle[Any]:
        """Return a handle of a VersionedDesk world through a runtime of one version, by default the
        first."""
        runtime = runtime or self.runtime
        return runtime.world((old if runtime is self.runtime else new).VersionedDesk, name)

    def new_desk(self, name: str = "d") -> WorldHandle[Any]:
        return self.desk(name, self.new_runtime)
