"""One run: actors on a faulting store under a scheduler, until all is at rest, then the verdict.

Faults stop at 60 % of the steps. From there producers stop too, handlers succeed, dead processes
come back at once, and everything that was begun must come to its end within a bound: that is the
liveness half. The safety half is checked on the whole history afterwards.
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

from holdfast.clock import MS, SimClock
from holdfast.sim.actor import RESTARTS_NS, Actor, Halted, Life, alive, describe
from holdfast.sim.audit import audit
from holdfast.sim.audit_tasks import open_tasks
from holdfast.sim.faults import Fault, Plan
from holdfast.sim.history import History
from holdfast.sim.machine import ClosableBackend, SimStore
from holdfast.sim.nemesis import Fate
from holdfast.sim.scheduler import Scheduler, Task, Threads
from holdfast.sim.settings import FAULTS_UNTIL, LEASE_NS, REST_STEPS_MAX, Settings, Workload
from holdfast.sim.tape import Tape
from holdfast.store.memory import MemoryBackend
from holdfast.store.rows import LmdbBackend
from holdfast.store.urls import scheme_of

Plain = dict[str, Any]

# A universe in which nobody works.
UNATTENDED = "v"
# Looking whether all is at rest costs a scan: it is done once in so many steps.
LOOK_EVERY = 40
# Timers that wait for store time, and for a time on the wall.
DELAYS, CALENDAR = "/timers", "/timers/calendar"
# Commits that the engine remembers, to validate by and to answer from; answers that a board keeps for
# repeats, and what it does at once. By module.
SHORT_MEMORY = {
    "store.applying": {"RING_COMMITS_MAX": 6},
    "store.engine": {"OUTCOMES_KEPT": 12},
}
# A step of simulated time is as long as a token of a rate is good for: here it is good for longer. A round of
# timers is waited for longer, too; after one that did not do, the next is tried within the run.
COARSE: dict[str, dict[str, float]] = {
    "effects.rate": {"LATE_NS": 500 * MS, "AHEAD_NS": 1000 * MS},
    "roles.timer_worker": {"BEGIN_S": 0.8, "ALONE_S": 0.2, "ALONE_S_MAX": 1.6},
    "roles.carrying": {"MISTAKEN_S": 0.3},
}
CROWDED = {"world.ingress": {"INBOX_DEPTH_MAX": 4}, "world.fabric": {"INBOX_DEPTH_MAX": 4}}
# Histories are cut, and worlds erased, a few rows in a commit, and it is looked often whether one is due.
SHORT_HISTORY: dict[str, dict[str, float]] = {
    "roles.upkeep": {"ERASED_PER_COMMIT": 3, "LOOK_NS": 100 * MS},
    "world.purge": {"ERASED_PER_COMMIT": 3},
}
# Checkpoints of a few tasks a chunk, by makers that are soon taken for dead.
SHORT_TASKS = {"tasks.checkpoint": {"CHUNK_TASKS": 4, "STALLED_NS": 200 * MS}}
SHORT_LEDGER = {
    "ledger.position": {"REPLIES_KEPT": 2, "OVER_KEPT": 2, "RIPEN_MAX": 1},
    "ledger.choose": {"PARTS_MAX": 2},
}


class Simulation:
    def __init__(
        self,
        tape: Tape,
        settings: Settings,
        actors: list[Actor],
        threads: Threads,
        *,
        backend: str = "memory",
        forced: Mapping[int, Fault] | None = None,
    ) -> None:
        self.tape = tape
        self.settings = settings
        self.actors = actors
        self.clock = SimClock()
        self.history = History()
        self.seen: Counter[str] = Counter()
        self.errors: list[tuple[str, str]] = []
        self.scheduler = Scheduler(tape, self.clock, threads)
        self.plan = Plan(tape, settings.rates, forced)
        self._backends = _Backends(backend)
        self.store = SimStore(
            self._backends.make,
            self.scheduler,
            self.clock,
            self.history,
            self.plan,
            lease_ns=LEASE_NS,
            group=settings.group,
        )
        self._tasks: dict[str, tuple[Actor, Task]] = {}
        self._looked = 0
        self._audited = 0

    @property
    def calm(self) -> bool:
        return self.plan.calm

    def run(self) -> None:
        with _short_memory(self.settings):
            try:
                self._run()
            finally:
                self.scheduler.close()
                self.store.close()
                self._backends.close()

    def _run(self) -> None:
        settings, store, scheduler = self.settings, self.store, self.scheduler
        store.note("config", settings.promises())
        scheduler.on_exit = self._ended
        for actor in self.actors:
            self._start(actor, 0)
        until = int(settings.steps * FAULTS_UNTIL)
        scheduler.run(lambda: bool(self.errors) or scheduler.steps >= until or self._look())
        self.plan.calm = True
        store.note("calm")
        scheduler.run(lambda: bool(self.errors) or self._at_rest(until + REST_STEPS_MAX))
        waiting = self._waiting()
        if not self.errors:
            store.note("quiet", {"waiting": waiting}, value=not waiting)
        store.audit()
        self.state_hash = store.state_hash()
        self.content_hash = store.content_hash()

    # -- processes -------------------------------------------------------------------------------

    def kill_one(self) -> None:
        mortal = [
            (actor, task) for actor, task in self._tasks.values() if not isinstance(actor, Fate)
        ]
        actor, task = self.tape.pick(mortal)
        if alive(task):
            self.store.note("kill", {"name": actor.name})
            self.scheduler.kill(task)

    def kill_all(self) -> None:
        for actor, task in self._tasks.values():
            if not isinstance(actor, Fate) and alive(task):
                self.scheduler.kill(task)

    def _start(self, actor: Actor, delay_ns: int) -> None:
        actor.incarnations += 1
        incarnation = str(actor.incarnations)
        task = self.scheduler.spawn(
            actor.name, lambda: actor.live(Life(self, actor, incarnation)), delay_ns=delay_ns
        )
        self._tasks[actor.name] = (actor, task)

    def _ended(self, task: Task) -> None:
        if task.error is not None and not isinstance(task.error, Halted):
            # What no actor expects, the product must not do.
            self.errors.append((task.name, describe(task.error)))
        if task.name not in self._tasks:
            return  # a thread of some process, which ends with it
        actor, _ = self._tasks[task.name]
        delay_ns = 20 * MS if self.calm else self.tape.pick(RESTARTS_NS)
        self._start(actor, delay_ns)

    # -- rest ------------------------------------------------------------------------------------

    def _look(self) -> bool:
        if self.scheduler.steps - self._audited >= self.settings.audit_every:
            self._audited = self.scheduler.steps
            self.store.audit()
        return False

    def _at_rest(self, steps_max: int) -> bool:
        if self.scheduler.steps >= steps_max:
            return True
        if self.scheduler.steps - self._looked < LOOK_EVERY:
            return False
        self._looked = self.scheduler.steps
        return not self._waiting()

    def _due(self, name: str, row: Plain) -> bool:
        """Whether an item is to be done by now. A timer's time may be far away."""
        if name.endswith(CALENDAR):
            return bool(row["not_before_ns"] <= self.clock.wall_ns())
        if name.endswith(DELAYS):
            return bool(row["not_before_ns"] <= self.store.engine_now_ns())
        return True

    def _waiting(self) -> list[str]:
        """What still has to happen: items, ingress, producers that do not know yet."""
        rows = audit(self.store.rows())
        deleted = {
            f"{universe}/{world_id}"
            for universe, found in rows["worlds"].items()
            for world_id, record in found["records"].items()
            if record["status"] == "deleted" or universe == UNATTENDED
        }
        # Worlds whose histories have a bound.
        kept = {
            f"{universe}/{world_id}"
            for universe, found in rows["worlds"].items()
            for world_id in found["records"]
            if self.settings.keep is not None
        } - deleted
        return [
            *(
                f"{name}/{seq}"
                for name, q in rows["queues"].items()
                for seq, row in q["items"].items()
                if self._due(name, row)
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
                if name in kept
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
            *(actor.name for actor in self.actors if not actor.idle()),
        ]


class _Backends:
    """Fresh rows for a store, and for each store restored from a backup."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._made = 0
        # LMDB syncs each commit; on a file system in memory that costs nothing.
        memory = Path("/dev/shm")
        where = str(memory) if memory.is_dir() else None
        self._path = (
            Path(tempfile.mkdtemp(prefix="holdfast-sim-", dir=where)) if kind == "lmdb" else None
        )

    def make(self) -> ClosableBackend:
        self._made += 1
        if scheme_of(self._kind) == "postgresql":
            from holdfast.sim.postgres import PgRows

            return PgRows(self._kind)
        if self._path is None:
            return MemoryBackend()
        path = self._path / str(self._made)
        path.mkdir()
        return LmdbBackend(path, readonly=False)

    def close(self) -> None:
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)


@contextmanager
def _short_memory(settings: Settings) -> Iterator[None]:
    """With a short memory, snapshots, outcomes and answers grow too old within one run."""
    wanted: dict[str, Mapping[str, float]] = {**COARSE}
    if settings.short_memory:
        wanted |= SHORT_MEMORY
    if settings.short_memory and settings.workload == Workload.LEDGER:
        wanted = {**wanted, **SHORT_LEDGER}
    if settings.workload == Workload.TASKS:
        wanted = {**wanted, **SHORT_TASKS}
    if settings.keep is not None:
        wanted = {**wanted, **SHORT_HISTORY}
    if settings.crowded:
        wanted = {**wanted, **CROWDED}
    genuine = []
    try:
        for name, changes in wanted.items():
            module = import_module(f"holdfast.{name}")
            for constant, value in changes.items():
                genuine.append((module, constant, getattr(module, constant)))
                setattr(module, constant, value)
        yield
    finally:
        for module, constant, value in genuine:
            setattr(module, constant, value)
