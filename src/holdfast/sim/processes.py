"""Processes that run the product's services: tick, sleep until there is work, tick again.

They do under the scheduler what `Role.run` does in a thread. After a tick that finds the store
busy, or whose commit outcome is unknown, another tick follows. Any other error ends the process.
The simulation kills and restarts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from holdfast.app.app import App
from holdfast.app.runtime import Runtime
from holdfast.clock import MS, S
from holdfast.config import DELETED_RETENTION_NS, UNKNOWN_EVENT_TIMEOUT_S
from holdfast.durable.lease import Lease
from holdfast.durable.queue import topic
from holdfast.errors import CommitUnknown, HoldfastError, StoreReplaced
from holdfast.runner import Runner
from holdfast.sim.actor import Actor, Incarnation, ProcessHalted
from holdfast.store.api import Operation, Store
from holdfast.workers.effects.pool import CLAIM_S, EffectAdapter, EffectWorkerPool
from holdfast.workers.orchestrator import Orchestrator
from holdfast.workers.runner_service import RunnerService
from holdfast.workers.service import TickService
from holdfast.workers.timers.worker import TimerWorker
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.worker import WorldWorker
from holdfast.world.host import WorldHost

BUSY_RETRY_NS = 50 * MS
# Per mille of ticks after which a process shuts down gracefully.
SHUTDOWN_MILLE = 20
STOP_TICKS_MAX = 5
IDLE_MS_MIN = 20
# Per mille of lost answers of a remote store.
LOST_ANSWER_MILLE = 150
# A policy with at least this many expiries never dead-letters and is not changed.
NEVER_DEAD_EXPIRIES_MIN = 1_000


class RoleProcess(Actor):
    """A process with one role of an app."""

    def __init__(self, name: str, app: App) -> None:
        super().__init__(name)
        self.app = app

    def build_role(self, incarnation: Incarnation) -> TickService:
        raise NotImplementedError

    def run_process(self, incarnation: Incarnation) -> None:
        role = self.build_role(incarnation)
        since = 0
        while True:
            since = call_tolerating_errors(
                incarnation, incarnation.store.wait, role.topics, since, 0.0
            )
            more = call_tolerating_errors(incarnation, role.tick)
            if not incarnation.faults_stopped and incarnation.tape.chance(SHUTDOWN_MILLE):
                incarnation.count_coverage(f"{role.name} stopped in good order")
                call_tolerating_errors(incarnation, role.shut_down)
                return
            if not more:
                idle_s = max(call_tolerating_errors(incarnation, role.sleep_s) or 0.0, 0.0)
                since = call_tolerating_errors(
                    incarnation, incarnation.store.wait, role.topics, since, idle_s
                )


def call_tolerating_errors(incarnation: Incarnation, act: Callable[..., Any], *args: Any) -> Any:
    """Call `act` and tolerate the errors that a role tolerates in production. Return None after
    such an error."""
    try:
        return act(*args)
    except StoreReplaced:
        raise ProcessHalted from None
    except HoldfastError as error:
        if not error.retryable and not isinstance(error, CommitUnknown):
            raise
        incarnation.sleep(BUSY_RETRY_NS)
        return None


class WorldWorkerProcess(RoleProcess):
    """Process of a world worker."""

    def __init__(self, name: str, app: App, policy: WorldWorkerPolicy) -> None:
        super().__init__(name, app)
        self.policy = policy

    def build_role(self, incarnation: Incarnation) -> TickService:
        incarnation.store.acting_lease = _lease_of_host
        return WorldWorker(
            incarnation.store,
            universe=self.app.universe,
            programs=self.app.programs,
            vocabulary=self.app,
            worker=self.name,
            incarnation=incarnation.incarnation_id,
            policy=self.policy,
            clock=incarnation.clock,
        )


class OrchestratorProcess(RoleProcess):
    """Process of an orchestrator, leader or standby."""

    def __init__(
        self,
        name: str,
        app: App,
        ttl_s: float,
        unknown_event_s: float = UNKNOWN_EVENT_TIMEOUT_S,
        deleted_kept_s: float = DELETED_RETENTION_NS / S,
    ) -> None:
        super().__init__(name, app)
        self.ttl_s = ttl_s
        self.unknown_event_s = unknown_event_s
        self.deleted_kept_s = deleted_kept_s

    def build_role(self, incarnation: Incarnation) -> TickService:
        role = Orchestrator(
            incarnation.store,
            universe=self.app.universe,
            worker=self.name,
            incarnation=incarnation.incarnation_id,
            lease_ttl_s=self.ttl_s,
            worker_ttl_s=self.ttl_s,
            histories=self.app.histories,
            deleted_kept_s=self.deleted_kept_s,
            unknown_event_s=self.unknown_event_s,
            inline=True,
            clock=incarnation.clock,
        )
        incarnation.store.acting_lease = lambda fn: _lease_of_leader(role, fn)
        return role


class TimerWorkerProcess(RoleProcess):
    """Process of a timer worker."""

    def __init__(self, name: str, app: App, *, with_schedules: bool = True) -> None:
        """`with_schedules=False` does not declare the schedules of the app."""
        super().__init__(name, app)
        self.with_schedules = with_schedules

    def build_role(self, incarnation: Incarnation) -> TickService:
        if self.with_schedules and self.app.schedules:
            runtime = Runtime(self.app, incarnation.store, roles=(), clock=incarnation.clock)
            while not call_tolerating_errors(incarnation, _declare_schedules, runtime):
                pass
        return TimerWorker(incarnation.store, universe=self.app.universe, clock=incarnation.clock)


class EffectPoolProcess(Actor):
    """Process of an effect worker pool. Its runners are ticked in turn, in place of their
    threads."""

    def __init__(
        self,
        name: str,
        app: App,
        effects_of: Callable[[Incarnation], Mapping[str, EffectAdapter]],
        policy_overrides: Mapping[str, Any] | None = None,
        *,
        claim_s: float = CLAIM_S,
        remote_universes: Sequence[str] = (),
    ) -> None:
        super().__init__(name)
        # Universes that it treats as living in another store, although they are in this one.
        self.remote_universes = remote_universes
        self.app = app
        self.effects_of = effects_of
        self.claim_s = claim_s
        # Overrides of the runners' policies.
        self.policy_overrides = dict(policy_overrides or {})

    def run_process(self, incarnation: Incarnation) -> None:
        pool = EffectWorkerPool(
            incarnation.store,
            universe=self.app.universe,
            adapters=self.effects_of(incarnation),
            worker=f"{self.name}.{incarnation.incarnation_id}",
            stores={
                universe: cast(Store, _RemoteStore(incarnation))
                for universe in self.remote_universes
            },
            claim_s=self.claim_s,
            inline=True,
            clock=incarnation.clock,
        )
        for runner in pool.runners:
            if runner.policy.expiries_max < NEVER_DEAD_EXPIRIES_MIN:
                runner.set_policy(dataclasses.replace(runner.policy, **self.policy_overrides))
            while not call_tolerating_errors(incarnation, boot_runner, runner):
                pass
        topics = [topic(runner._queue) for runner in pool.runners]
        since = 0
        while True:
            since = call_tolerating_errors(incarnation, incarnation.store.wait, topics, since, 0.0)
            ticks = [call_tolerating_errors(incarnation, runner.tick) for runner in pool.runners]
            if not incarnation.faults_stopped and incarnation.tape.chance(SHUTDOWN_MILLE):
                incarnation.count_coverage(f"{pool.name} stopped in good order")
                stop_runners(incarnation, pool)
                return
            if not any(tick is not None and tick.made_progress for tick in ticks):
                idle_ms = min(
                    call_tolerating_errors(incarnation, one.idle_sleep_ms) or 0
                    for one in pool.runners
                )
                idle_s = max(idle_ms, IDLE_MS_MIN) / 1000
                since = call_tolerating_errors(
                    incarnation, incarnation.store.wait, topics, since, idle_s
                )


class _RemoteStore:
    """This store, presented as a remote store that loses answers at times."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = self._incarnation.store.transact(fn, *args, **kwargs)
        if not self._incarnation.faults_stopped and self._incarnation.tape.chance(
            LOST_ANSWER_MILLE
        ):
            raise CommitUnknown(why="the answer was lost")
        return answer


def stop_runners(incarnation: Incarnation, role: RunnerService) -> None:
    """Shut down: settle claimed work within a limit. Remaining claims expire."""
    role.request_stop()
    for runner in role.runners:
        for _ in range(STOP_TICKS_MAX):
            if not runner.has_unsettled:
                break
            call_tolerating_errors(incarnation, runner.tick)


def _declare_schedules(runtime: Runtime) -> bool:
    runtime.declare_schedules()
    return True


def boot_runner(runner: Runner) -> bool:
    runner.boot()
    return True


def _lease_of_host(fn: Any) -> Lease | None:
    host = getattr(fn, "__self__", None)
    return host.lease if isinstance(host, WorldHost) else None


def _lease_of_leader(role: Orchestrator, fn: Any) -> Lease | None:
    """The lease under which an orchestrator commits. Notifying workers needs none."""
    calling = isinstance(fn, Operation) or fn == role._request_heartbeats
    return None if calling else role._lease
