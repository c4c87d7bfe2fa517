"""Processes that run the product's roles: tick, sleep until there is work, tick again.

What `Role.run` does in a thread, these do under the scheduler: a tick that finds the store busy, or
does not know how its commit ended, is followed by another; anything else ends the process. Who kills,
stops and restarts it is somebody else's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from holdfast.app.app import App
from holdfast.clock import MS, S
from holdfast.config import DELETED_KEPT_NS, UNKNOWN_EVENT_S
from holdfast.durable.lease import Lease
from holdfast.durable.queue import topic
from holdfast.errors import CommitUnknown, HoldfastError, StoreReplaced
from holdfast.roles.adapter import CLAIM_S, Adapter, AdapterPool
from holdfast.roles.crew import RunnerRole
from holdfast.roles.orchestrator import Orchestrator
from holdfast.roles.role import Role
from holdfast.roles.timer_worker import TimerWorker
from holdfast.roles.world_worker import WorkerPolicy, WorldWorker
from holdfast.runner import Runner
from holdfast.sim.actor import Actor, Halted, Life
from holdfast.store.api import Operation, Store
from holdfast.world.host import Host

BUSY_NS = 50 * MS
# A process is stopped in good order after about this many ticks of a thousand.
STOPPED_MILLE = 20
STOP_TICKS_MAX = 5
IDLE_MS_MIN = 20
# Of the answers of a store far away, so many are lost.
LOST_MILLE = 150
# A policy with so many expiries gives nothing up, and is left as it is.
CERTAIN_MIN = 1_000


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
            since = survived(life, life.store.wait, role.topics, since, 0.0)
            more = survived(life, role.tick)
            if not life.calm and life.tape.chance(STOPPED_MILLE):
                life.seen(f"{role.name} stopped in good order")
                survived(life, role.finish)
                return
            if not more:
                idle_s = max(survived(life, role.next_s) or 0.0, 0.0)
                since = survived(life, life.store.wait, role.topics, since, idle_s)


def survived(life: Life, act: Callable[..., Any], *args: Any) -> Any:
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

    def __init__(
        self,
        name: str,
        app: App,
        ttl_s: float,
        unknown_event_s: float = UNKNOWN_EVENT_S,
        deleted_kept_s: float = DELETED_KEPT_NS / S,
    ) -> None:
        super().__init__(name, app)
        self.ttl_s = ttl_s
        self.unknown_event_s = unknown_event_s
        self.deleted_kept_s = deleted_kept_s

    def role(self, life: Life) -> Role:
        role = Orchestrator(
            life.store,
            universe=self.app.universe,
            worker=self.name,
            incarnation=life.incarnation,
            lease_ttl_s=self.ttl_s,
            worker_ttl_s=self.ttl_s,
            histories=self.app.histories,
            deleted_kept_s=self.deleted_kept_s,
            unknown_event_s=self.unknown_event_s,
            clock=life.clock,
        )
        life.store.acting = lambda fn: _lease_of_leader(role, fn)
        return role


class Firing(RoleProcess):
    """A timer worker."""

    def role(self, life: Life) -> Role:
        return TimerWorker(life.store, universe=self.app.universe, clock=life.clock)


class Performing(Actor):
    """An adapter pool, with what its effects do outside: its runners are ticked in turn, as their
    threads would be."""

    def __init__(
        self,
        name: str,
        app: App,
        adapters: Callable[[Life], Mapping[str, Adapter]],
        changes: Mapping[str, Any] | None = None,
        *,
        claim_s: float = CLAIM_S,
        abroad: Sequence[str] = (),
    ) -> None:
        super().__init__(name)
        # Universes that it takes for those of another store, though they are in this one.
        self.abroad = abroad
        self.app = app
        self.adapters = adapters
        self.claim_s = claim_s
        # What the runners' policies are to have instead of what the pool gives them.
        self.changes = dict(changes or {})

    def live(self, life: Life) -> None:
        pool = AdapterPool(
            life.store,
            universe=self.app.universe,
            adapters=self.adapters(life),
            worker=f"{self.name}.{life.incarnation}",
            stores={universe: cast(Store, _Distant(life)) for universe in self.abroad},
            claim_s=self.claim_s,
            inline=True,
            clock=life.clock,
        )
        for runner in pool.runners:
            if runner.policy.expiries_max < CERTAIN_MIN:
                runner.set_policy(dataclasses.replace(runner.policy, **self.changes))
            while not survived(life, booted, runner):
                pass
        topics = [topic(runner._queue) for runner in pool.runners]
        since = 0
        while True:
            since = survived(life, life.store.wait, topics, since, 0.0)
            ticks = [survived(life, runner.tick) for runner in pool.runners]
            if not life.calm and life.tape.chance(STOPPED_MILLE):
                life.seen(f"{pool.name} stopped in good order")
                stop(life, pool)
                return
            if not any(tick is not None and tick.moved for tick in ticks):
                idle_ms = min(survived(life, one.idle_sleep_ms) or 0 for one in pool.runners)
                idle_s = max(idle_ms, IDLE_MS_MIN) / 1000
                since = survived(life, life.store.wait, topics, since, idle_s)


class _Distant:
    """This store, as if it were another one, far away: answers are lost on their way at times."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = self._life.store.transact(fn, *args, **kwargs)
        if not self._life.calm and self._life.tape.chance(LOST_MILLE):
            raise CommitUnknown(why="the answer was lost")
        return answer


def stop(life: Life, role: RunnerRole) -> None:
    """What is in hand is settled, within a bound; what is not runs out."""
    role.request_stop()
    for runner in role.runners:
        for _ in range(STOP_TICKS_MAX):
            if not runner.in_hand:
                break
            survived(life, runner.tick)


def booted(runner: Runner) -> bool:
    runner.boot()
    return True


def _lease_of_host(fn: Any) -> Lease | None:
    host = getattr(fn, "__self__", None)
    return host.lease if isinstance(host, Host) else None


def _lease_of_leader(role: Orchestrator, fn: Any) -> Lease | None:
    """What a leader commits it commits as a leader. Calling workers decides nothing."""
    calling = isinstance(fn, Operation) or fn == role._call_workers
    return None if calling else role._lease
