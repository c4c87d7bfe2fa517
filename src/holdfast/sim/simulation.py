"""One simulation run: actors on a faulting store under a scheduler, until no work is left.

Faults stop at 60 % of the steps. From then on producers stop too, handlers succeed, and dead
processes restart at once. All started work must then finish within a limit: the liveness check. The
safety checks examine the whole history afterwards.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast import logs
from holdfast.clock import MS, SimClock
from holdfast.sim.actor import (
    RESTART_DELAYS_NS,
    Actor,
    Incarnation,
    ProcessHalted,
    describe_error,
    is_alive,
)
from holdfast.sim.call_protection import CallProtection
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.fault_injector import FaultInjector
from holdfast.sim.faults import Fault, FaultPlan
from holdfast.sim.history import History
from holdfast.sim.row_decoder import decode_rows
from holdfast.sim.row_decoder_tasks import open_tasks
from holdfast.sim.scheduler import Scheduler, SimThread, SimThreadPool
from holdfast.sim.settings import (
    FAULTY_SHARE,
    LEASE_NS,
    REST_STEPS_MAX,
    SimulationSettings,
    Workload,
)
from holdfast.sim.sim_store import ClosableBackend, SimStore
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.urls import scheme_of

Plain = dict[str, Any]

# A universe without workers.
UNIVERSE_WITHOUT_WORKERS = "v"
# Checking for remaining work needs a full scan, so it runs once per this many steps.
CHECK_EVERY_STEPS = 40
# Timer queues by store time and by wall clock.
DELAY_TIMERS, CALENDAR_TIMERS = "/timers", "/timers/calendar"
# Limits by module: commits kept for validation, outcomes kept for resends.
SHORT_MEMORY_LIMITS = {
    "store.validation": {"RECENT_COMMITS_MAX": 6},
    "store.engine": {"OUTCOMES_KEPT": 12},
}
# A simulated step is as long as a rate token is valid, so tokens stay valid longer here. Timer
# commits also wait longer, and a failed one is retried within the run.
SIMULATED_TIME_LIMITS: dict[str, dict[str, float]] = {
    "effects.rate": {"LATENESS_NS": 500 * MS, "PREFETCH_NS": 1000 * MS},
    "workers.timers.worker": {"BEGIN_S": 0.8, "FUSION_OFF_S": 0.2, "FUSION_OFF_S_MAX": 1.6},
    "workers.world.fused_commit": {"CONFLICT_BACKOFF_S": 0.3},
}
SMALL_INBOX_LIMITS = {
    "world.ingress": {"INBOX_DEPTH_MAX": 4},
    "world.load_admission": {"INBOX_DEPTH_MAX": 4},
}
# History trimming and erasure process few rows per commit and check often whether work is due.
SHORT_HISTORY_LIMITS: dict[str, dict[str, float]] = {
    "workers.history_upkeep": {"ERASE_ROWS_PER_COMMIT": 3, "CHECK_EVERY_NS": 100 * MS},
    "world.purge": {"ERASE_ROWS_PER_COMMIT": 3},
}
# Checkpoints have few tasks per chunk, and their makers are presumed dead early.
SHORT_TASK_LIMITS = {"tasks.checkpoint": {"CHUNK_TASKS": 4, "STALLED_NS": 200 * MS}}
SHORT_LEDGER_LIMITS = {
    "ledger.run_state": {"REPLIES_KEPT": 2, "FINISHED_GRANTS_KEPT": 2, "RETRIES_DUE_MAX": 1},
    "ledger.assignment": {"GRANT_RANGES_MAX": 2},
}


class Simulation:
    def __init__(
        self,
        tape: ChoiceTape,
        settings: SimulationSettings,
        actors: list[Actor],
        threads: SimThreadPool,
        *,
        backend: str = "memory",
        faults_by_commit: Mapping[int, Fault] | None = None,
    ) -> None:
        self.tape = tape
        self.settings = settings
        self.actors = actors
        self.clock = SimClock()
        self.history = History()
        self.coverage: Counter[str] = Counter()
        self.errors: list[tuple[str, str]] = []
        self.scheduler = Scheduler(tape, self.clock, threads)
        self.call_protection = CallProtection(enabled=False)
        self.fault_plan = FaultPlan(tape, settings.rates, faults_by_commit)
        self._backends = _BackendFactory(backend)
        self.store = SimStore(
            self._backends.make,
            self.scheduler,
            self.clock,
            self.history,
            self.fault_plan,
            lease_ns=LEASE_NS,
            group=settings.group_commit,
        )
        self._threads_by_actor: dict[str, tuple[Actor, SimThread]] = {}
        self._last_check_step = 0
        self._last_audit_step = 0

    @property
    def faults_stopped(self) -> bool:
        return self.fault_plan.faults_stopped

    def run(self) -> None:
        with _patched_limits(self.settings), logs.silence():
            try:
                self._run()
            finally:
                self.scheduler.close()
                self.store.close()
                self._backends.close()

    def _run(self) -> None:
        settings, store, scheduler = self.settings, self.store, self.scheduler
        store.record("config", settings.config_arguments())
        scheduler.on_exit = self._on_thread_exit
        for actor in self.actors:
            self._start(actor, 0)
        until = int(settings.steps * FAULTY_SHARE)
        scheduler.run(lambda: bool(self.errors) or scheduler.steps >= until or self._audit_if_due())
        self.fault_plan.faults_stopped = True
        store.record("calm")
        scheduler.run(lambda: bool(self.errors) or self._is_quiescent(until + REST_STEPS_MAX))
        waiting = self._remaining_work()
        if not self.errors:
            store.record("quiet", {"waiting": waiting}, value=not waiting)
        store.record_audit()
        self.state_hash = store.state_hash()
        self.content_hash = store.content_hash()

    # -- processes -------------------------------------------------------------------------------

    def kill_random(self) -> None:
        mortal = [
            (actor, task)
            for actor, task in self._threads_by_actor.values()
            if not isinstance(actor, FaultInjector)
        ]
        actor, task = self.tape.pick(mortal)
        if is_alive(task):
            self.store.record("kill", {"name": actor.name})
            self.scheduler.kill(task)

    def kill_all(self) -> None:
        for actor, task in self._threads_by_actor.values():
            if not isinstance(actor, FaultInjector) and is_alive(task):
                self.scheduler.kill(task)

    def _start(self, actor: Actor, delay_ns: int) -> None:
        actor.incarnations += 1
        incarnation = str(actor.incarnations)
        task = self.scheduler.spawn(
            actor.name,
            lambda: actor.run_process(Incarnation(self, actor, incarnation)),
            delay_ns=delay_ns,
        )
        self._threads_by_actor[actor.name] = (actor, task)

    def _on_thread_exit(self, thread: SimThread) -> None:
        if thread.error is not None and not isinstance(thread.error, ProcessHalted):
            # An exception that no actor expects is a product bug.
            self.errors.append((thread.name, describe_error(thread.error)))
        if thread.name not in self._threads_by_actor:
            return  # another thread of a process, which ends with it
        actor, _ = self._threads_by_actor[thread.name]
        delay_ns = 20 * MS if self.faults_stopped else self.tape.pick(RESTART_DELAYS_NS)
        self._start(actor, delay_ns)

    # -- quiescence
    # ----------------------------------------------------------------------------------

    def _audit_if_due(self) -> bool:
        if self.scheduler.steps - self._last_audit_step >= self.settings.audit_every:
            self._last_audit_step = self.scheduler.steps
            self.store.record_audit()
        return False

    def _is_quiescent(self, steps_max: int) -> bool:
        if self.scheduler.steps >= steps_max:
            return True
        if self.scheduler.steps - self._last_check_step < CHECK_EVERY_STEPS:
            return False
        self._last_check_step = self.scheduler.steps
        return not self._remaining_work()

    def _is_due(self, name: str, row: Plain) -> bool:
        """Whether a queue item can run now: only timers have a due time, which may be far in the future."""
        if name.endswith(CALENDAR_TIMERS):
            return bool(row["not_before_ns"] <= self.clock.wall_ns())
        if name.endswith(DELAY_TIMERS):
            return bool(row["not_before_ns"] <= self.store.engine_now_ns())
        return True

    def _remaining_work(self) -> list[str]:
        """Remaining work: queue items, inbox rows, open tasks, clients with unknown outcomes."""
        rows = decode_rows(self.store.rows())
        deleted = {
            f"{universe}/{world_id}"
            for universe, found in rows["worlds"].items()
            for world_id, record in found["records"].items()
            if record["status"] == "deleted" or universe == UNIVERSE_WITHOUT_WORKERS
        }
        # Worlds with bounded histories.
        bounded = {
            f"{universe}/{world_id}"
            for universe, found in rows["worlds"].items()
            for world_id in found["records"]
            if self.settings.history_bound is not None
        } - deleted
        return [
            *(
                f"{name}/{seq}"
                for name, q in rows["queues"].items()
                for seq, row in q["items"].items()
                if self._is_due(name, row)
            ),
            *(
                f"{name}/{seq}"
                for name, box in rows["inboxes"].items()
                if name not in deleted
                for seq in box["rows"]
            ),
            *(
                f"{name} is cut and not swept"
                for name, journal in rows["journals"].items()
                if name in bounded
                and min(journal["entries"], default=1 << 62) < journal["head"]["floor"]
            ),
            *(
                f"{universe}/{world_id} is purged and not erased"
                for universe, found in rows["worlds"].items()
                for world_id, record in found["records"].items()
                if record.get("purged")
            ),
            *(
                f"{universe}/task {seq}"
                for universe, found in rows["tasks"].items()
                for seq in open_tasks(found)
            ),
            *(actor.name for actor in self.actors if not actor.is_idle()),
        ]


class _BackendFactory:
    """Creates an empty backend for the store, and one for each restored backup."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._made = 0
        # LMDB syncs each commit. That is free on an in-memory file system.
        memory = Path("/dev/shm")
        where = str(memory) if memory.is_dir() else None
        self._path = (
            Path(tempfile.mkdtemp(prefix="holdfast-sim-", dir=where)) if kind == "lmdb" else None
        )

    def make(self) -> ClosableBackend:
        self._made += 1
        if scheme_of(self._kind) == "postgresql":
            from holdfast.sim.postgres_backend import PgSimBackend

            return PgSimBackend(self._kind)
        if self._path is None:
            return MemoryBackend()
        path = self._path / str(self._made)
        path.mkdir()
        return LmdbBackend(path, readonly=False)

    def close(self) -> None:
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)


@contextmanager
def _patched_limits(settings: SimulationSettings) -> Iterator[None]:
    """Patch product limits, so that snapshots, outcomes and answers become too old within one
    run."""
    limits: dict[str, Mapping[str, float]] = {**SIMULATED_TIME_LIMITS}
    if settings.short_memory:
        limits |= SHORT_MEMORY_LIMITS
    if settings.short_memory and settings.workload == Workload.LEDGER:
        limits = {**limits, **SHORT_LEDGER_LIMITS}
    if settings.workload == Workload.TASKS:
        limits = {**limits, **SHORT_TASK_LIMITS}
    if settings.history_bound is not None:
        limits = {**limits, **SHORT_HISTORY_LIMITS}
    if settings.small_inboxes:
        limits = {**limits, **SMALL_INBOX_LIMITS}
    originals = []
    try:
        for name, changes in limits.items():
            module = import_module(f"holdfast.{name}")
            for constant, value in changes.items():
                originals.append((module, constant, getattr(module, constant)))
                setattr(module, constant, value)
        yield
    finally:
        for module, constant, value in originals:
            setattr(module, constant, value)
