"""A simulation that a user drives: `hf.simulate(app, seed=…)`.

Workers, orchestrators, adapter pools and a timer worker run the user's app under the seeded scheduler,
and crash at commits that the seed picks, and around the calls of effects (`stand_ins`). The user's calls
are tasks of that scheduler, too: while one is under way everybody else goes on, in virtual time. Between
calls nothing moves.

Clients do not fail: what a user sends is durable when the call returns. What may fail, at any commit,
is whoever works it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast.app.app import App
from holdfast.app.declare import World
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.clock import S
from holdfast.messages import FABRIC_SEND
from holdfast.roles.world_worker import WorkerPolicy
from holdfast.sim import parity
from holdfast.sim.actor import Actor, Life
from holdfast.sim.audit import audit
from holdfast.sim.faults import Fault
from holdfast.sim.processes import Firing, Hosting, Leading, Performing
from holdfast.sim.scheduler import Task, Threads
from holdfast.sim.settings import LEASE_NS, Settings
from holdfast.sim.simulation import Simulation
from holdfast.sim.stand_ins import Stand, StandIns
from holdfast.sim.store import FaultingStore
from holdfast.sim.tape import Tape
from holdfast.world import publish
from holdfast.world.host import SnapshotPolicy

W = TypeVar("W", bound=World)

# Per mille of the commits, each.
CRASHES = {
    Fault.CRASH_BEFORE: 40,
    Fault.CRASH_AFTER: 40,
    Fault.UNKNOWN_BEFORE: 30,
    Fault.UNKNOWN_AFTER: 30,
    Fault.LOST_AFTER: 10,
    Fault.STALL: 10,
}
POLICY = WorkerPolicy(
    lease_ttl_s=LEASE_NS / S,
    idle_s=1.0,
    heartbeat_s=0.5,
    # Here leases are lost all the time, and nobody is to blame.
    stuck_max=1_000_000_000,
    snapshots=SnapshotPolicy(entries=8),
)
LEADER_TTL_S = 1.5
# Here pools die all the time, and no effect is to blame.
PATIENT = {"expiries_max": 1_000_000_000, "idle_sleep_max_ms": 5_000}
# A claim outlives a call by this.
CLAIM_S = 2.0
# One call, or the way to rest, ends within so many steps; the second half of it without faults.
STEPS_MAX = 100_000
LOOK_EVERY = 40
# Between two leaps of time everybody is awake for so long.
AWAKE_NS = 20 * S
FOREVER_NS = 1 << 62


class NotQuiet(AssertionError):
    """Something that could go on did not come to its end within the bound."""


class ProcessDied(AssertionError):
    """A process died of something that no fault was the cause of."""


class Session:
    def __init__(
        self,
        app: App,
        *,
        seed: int,
        crashes: bool,
        workers: int,
        effects: Mapping[str, Stand] | None = None,
        effect_faults: bool = True,
    ) -> None:
        self.app = app
        self.seed = seed
        stand_ins = StandIns(app, effects or {}, faults=crashes and effect_faults)
        self._threads = Threads()
        actors: list[Actor] = [
            *(Hosting(f"worker{n}", app, POLICY) for n in range(workers)),
            *(Leading(f"leader{n}", app, LEADER_TTL_S) for n in range(2)),
            *(
                Performing(f"pool{n}", app, stand_ins.adapters, PATIENT, claim_s=CLAIM_S)
                for n in range(2)
            ),
            Firing("timers", app),
        ]
        settings = Settings(rates=CRASHES if crashes else {})
        self._run = _Driven(Tape(seed), settings, actors, self._threads)
        self._run.served = frozenset(
            publish.effects(app.universe, kind) for kind in (*app.effects, FABRIC_SEND)
        )
        client = Life(self._run, Actor("client"), "1")
        self._store = client.store
        self._store.mortal = False
        self._runtime = Runtime(
            app, _ClientStore(self._store, self._run), roles=(), clock=client.clock
        )
        self.restart()

    # -- worlds --------------------------------------------------------------------------------

    def world(self, kind: type[W], name: str) -> WorldHandle[W]:
        return self._runtime.world(kind, name)

    def send_many(self, items: Iterable[tuple[WorldHandle[Any], Any]]) -> list[int]:
        return self._runtime.send_many(items)

    # -- time and fate -------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Store time, in seconds."""
        return self._run.store.engine_now_ns() / S

    def advance(self, seconds: float) -> None:
        self._run.pass_time(int(seconds * S))

    def run_until_quiet(self) -> None:
        self._run.rest()

    def crash(self) -> None:
        self._run.down = True
        self._run.kill_all()
        self._run.call(self._run.scheduler.yield_)

    def restart(self) -> None:
        self._run.up()

    # -- the verdict ---------------------------------------------------------------------------

    @property
    def crashes(self) -> int:
        """How often a process died or lost its memory so far."""
        return sum(event.op in ("fault", "crash") for event in self._run.history)

    @property
    def history_hash(self) -> str:
        return self._run.history.hash()

    def assert_parity(self) -> None:
        self._run.rest()
        parity.check(self._store.peek, self.app)

    def close(self) -> None:
        self._run.end()
        self._threads.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Driven(Simulation):
    """The actors, moved along by calls from outside."""

    def __init__(
        self, tape: Tape, settings: Settings, actors: list[Actor], threads: Threads
    ) -> None:
        super().__init__(tape, settings, actors, threads)
        self.down = True
        # Queues of effects that somebody does.
        self.served: frozenset[str] = frozenset()
        self.scheduler.on_exit = self._ended
        self.store.note("config", settings.promises())

    def up(self) -> None:
        if self.down:
            self.down = False
            for actor in self.actors:
                self._start(actor, 0)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function as a task, and everybody else meanwhile; what it returns or raises."""
        answer: list[Any] = []
        task = self.scheduler.spawn("client", lambda: answer.append(fn(*args, **kwargs)))
        self._steps(lambda: task.dead)
        if task.error is not None:
            raise task.error
        return answer[0]

    def pass_time(self, ns: int) -> None:
        """Let time pass. Where nothing is to happen for long it leaps, as for a machine that sleeps."""
        until_ns = self.clock.boot_ns() + ns
        while (left_ns := until_ns - self.clock.boot_ns()) > 0:
            idle_ns = min(left_ns, self._idle_ns()) - AWAKE_NS
            if idle_ns > 0:
                self.store.note("leap", {"ns": idle_ns})
                self.clock.advance(idle_ns)
                left_ns -= idle_ns
            self.call(self.scheduler.sleep, min(left_ns, AWAKE_NS))

    def rest(self) -> None:
        """Until nothing waits that could go on; if it takes long, without further faults."""
        if self.down or not self._waiting():
            return
        self._steps(self._quiet, raises=False)
        if self._waiting():
            self.plan.calm = True
            self._steps(self._quiet)
            self.plan.calm = False

    def end(self) -> None:
        self.scheduler.close()
        self.store.close()
        self._backends.close()

    def _steps(self, done: Callable[[], bool], *, raises: bool = True) -> None:
        last = self.scheduler.steps + STEPS_MAX
        self.scheduler.run(lambda: bool(self.errors) or done() or self.scheduler.steps >= last)
        if self.errors:
            raise ProcessDied("; ".join(f"{name}: {error}" for name, error in self.errors))
        if raises and self.scheduler.steps >= last:
            raise NotQuiet(f"seed {self.tape.seed}: after {STEPS_MAX} steps {self._waiting()}")

    def _quiet(self) -> bool:
        if self.scheduler.steps - self._looked < LOOK_EVERY:
            return False
        self._looked = self.scheduler.steps
        return not self._waiting()

    def _ended(self, task: Task) -> None:
        if task.name not in self._tasks:
            return  # a call of the user's, who gets its error
        if self.down and task.killed:
            return
        super()._ended(task)

    def _waiting(self) -> list[str]:
        """Messages of worlds that may go on, timers that are due, effects that are to be done."""
        rows = audit(self.store.rows())
        now_ns = self.store.engine_now_ns()
        running = {
            f"{universe}/{world_id}"
            for universe, found in rows["worlds"].items()
            for world_id, record in found["records"].items()
            if record["status"] == "active"
        }
        return [
            *(
                f"{name}/{seq}"
                for name, box in rows["inboxes"].items()
                if name in running
                for seq in box["rows"]
            ),
            *(name for name, due_ns in self._timers(rows) if due_ns <= now_ns),
            *(
                f"{name}/{seq}"
                for name, queue in rows["queues"].items()
                if name in self.served
                for seq in queue["items"]
            ),
        ]

    def _idle_ns(self) -> int:
        """For how long there is nothing to do: until a timer is due, if nothing else waits."""
        if self._waiting():
            return 0
        now_ns = self.store.engine_now_ns()
        due = [due_ns - now_ns for _, due_ns in self._timers(audit(self.store.rows()))]
        return min(due, default=FOREVER_NS)

    def _timers(self, rows: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """What waits for a time, and for which by store time."""
        ahead_ns = self.clock.wall_ns() - self.store.engine_now_ns()
        for name, queue in rows["queues"].items():
            if name.endswith(("/timers", "/timers/calendar")):
                clock_ns = ahead_ns if name.endswith("/calendar") else 0
                for seq, item in queue["items"].items():
                    yield f"{name}/{seq}", item["not_before_ns"] - clock_ns


class _ClientStore:
    """The user's store: each call is a task of the scheduler."""

    def __init__(self, inner: FaultingStore, run: _Driven) -> None:
        self.url = inner.url
        self._inner = inner
        self._run = run

    @property
    def generation(self) -> int:
        return self._inner.generation

    def now_ns(self) -> int:
        return self._inner.now_ns()

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self._inner.transact, fn, *args, **kwargs)

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._inner.peek(fn, *args, **kwargs)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self._inner.submit, fn, *args, **kwargs)

    def stand(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> None:
        """Whoever waits here asks for himself."""
        return

    def together(self) -> AbstractContextManager[None]:
        return self._inner.together()

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        found: int = self._run.call(self._inner.wait, topic, since, timeout)
        return found

    def backup(self, path: str) -> None:
        self._inner.backup(path)

    def close(self) -> None: ...

    def __enter__(self) -> _ClientStore:
        return self

    def __exit__(self, *exc: object) -> None: ...
