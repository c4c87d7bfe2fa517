"""Processes that run the product's roles: tick, sleep until there is work, tick again.

What `Role.run` does in a thread, these do under the scheduler: a tick that finds the store busy, or
does not know how its commit ended, is followed by another; anything else ends the process. Who kills,
stops and restarts it is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.app.app import App
from holdfast.clock import MS
from holdfast.durable.lease import Lease
from holdfast.errors import CommitUnknown, HoldfastError, StoreReplaced
from holdfast.roles.orchestrator import Orchestrator
from holdfast.roles.role import Role
from holdfast.roles.timer_worker import TimerWorker
from holdfast.roles.world_worker import WorkerPolicy, WorldWorker
from holdfast.runner import Runner
from holdfast.sim.actor import Actor, Halted, Life
from holdfast.store.api import Operation
from holdfast.world.host import Host

BUSY_NS = 50 * MS
IDLE_MS_MIN = 20
# A process is stopped in good order after about this many ticks of a thousand.
STOPPED_MILLE = 20


class RoleProcess(Actor):
    """A process with one role in it, for an app."""

    def __init__(self, name: str, app: App) -> None:
        super().__init__(name)
        self.app = app

    def role(self, life: Life) -> Role:
        raise NotImplementedError

    def live(self, life: Life) -> None:
        role = self.role(life)
        since = 0
        while True:
            since = _survived(life, life.store.wait, role.topics, since, 0.0)
            more = _survived(life, role.tick)
            if not life.calm and life.tape.chance(STOPPED_MILLE):
                life.seen(f"{role.name} stopped in good order")
                _survived(life, role.finish)
                return
            if not more:
                idle_s = max(role.next_s(), 0.0)
                since = _survived(life, life.store.wait, role.topics, since, idle_s)


def _survived(life: Life, act: Callable[..., Any], *args: Any) -> Any:
    """What a role in production gets over, it gets over here; None if there was something."""
    try:
        return act(*args)
    except StoreReplaced:
        raise Halted from None
    except HoldfastError as error:
        if not error.retryable and not isinstance(error, CommitUnknown):
            raise
        life.sleep(BUSY_NS)
        return None


class Hosting(RoleProcess):
    """A world worker."""

    def __init__(self, name: str, app: App, policy: WorkerPolicy) -> None:
        super().__init__(name, app)
        self.policy = policy

    def role(self, life: Life) -> Role:
        life.store.acting = _lease_of_host
        return WorldWorker(
            life.store,
            universe=self.app.universe,
            programs=self.app.programs,
            vocabulary=self.app,
            worker=self.name,
            incarnation=life.incarnation,
            policy=self.policy,
            clock=life.clock,
        )


class Leading(RoleProcess):
    """An orchestrator, or one that stands by."""

    def __init__(self, name: str, app: App, ttl_s: float) -> None:
        super().__init__(name, app)
        self.ttl_s = ttl_s

    def role(self, life: Life) -> Role:
        role = Orchestrator(
            life.store,
            universe=self.app.universe,
            worker=self.name,
            incarnation=life.incarnation,
            lease_ttl_s=self.ttl_s,
            worker_ttl_s=self.ttl_s,
            clock=life.clock,
        )
        life.store.acting = lambda fn: _lease_of_leader(role, fn)
        return role


class Firing(Actor):
    """A timer worker: its runners, ticked by hand."""

    def __init__(self, name: str, app: App) -> None:
        super().__init__(name)
        self.app = app

    def live(self, life: Life) -> None:
        role = TimerWorker(
            life.store,
            universe=self.app.universe,
            worker=f"{self.name}.{life.incarnation}",
            clock=life.clock,
        )
        for runner in role.runners:
            while not _survived(life, _booted, runner):
                pass
        while True:
            for runner in role.runners:
                tick = _survived(life, runner.tick)
                if tick is None or not tick.moved:
                    life.sleep(max(runner.idle_sleep_ms(), IDLE_MS_MIN) * MS)


def _booted(runner: Runner) -> bool:
    runner.boot()
    return True


def _lease_of_host(fn: Any) -> Lease | None:
    host = getattr(fn, "__self__", None)
    return host.lease if isinstance(host, Host) else None


def _lease_of_leader(role: Orchestrator, fn: Any) -> Lease | None:
    """What a leader commits it commits as a leader. Calling workers decides nothing."""
    calling = isinstance(fn, Operation) or fn == role._call_workers
    return None if calling else role._lease
