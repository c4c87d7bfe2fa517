"""A simulation that a user drives: `hf.simulate(app, seed=…)`.

World workers, orchestrators, effect worker pools, task workers and a timer worker run the user's
app under the seeded scheduler. They crash at commits that the seed picks, and around effect calls
(`effect_stubs`). The user's calls are threads of the same scheduler: during a call all other
threads run, in virtual time. Between calls the clock does not advance.

Clients do not fail: a sent message is durable when the call returns. The workers that process it
may fail at any commit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast.app.app import App
from holdfast.app.definitions import World
from holdfast.app.flow_handle import FlowHandle
from holdfast.app.runtime import Runtime
from holdfast.app.task_handle import TaskHandle
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.messages import FABRIC_SEND
from holdfast.sim import flow_parity, parity, task_work
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.call_protection import CallProtection
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.deadlock import Deadlock, describe_waits, waits_for_subject
from holdfast.sim.effect_stubs import EffectFunction, EffectStubs
from holdfast.sim.faulting_client import FaultingClient
from holdfast.sim.faults import Fault
from holdfast.sim.history import History
from holdfast.sim.processes import (
    EffectPoolProcess,
    OrchestratorProcess,
    TimerWorkerProcess,
    WorldWorkerProcess,
)
from holdfast.sim.row_decoder import decode_rows
from holdfast.sim.scheduler import SimThread, SimThreadPool
from holdfast.sim.settings import LEASE_NS, SimulationSettings
from holdfast.sim.simulated_specs import apply_specs, restore_specs
from holdfast.sim.simulation import Simulation
from holdfast.sim.task_process import TaskWorkerProcess
from holdfast.sim.task_work import DueWork
from holdfast.store.subscription import Subscription
from holdfast.workers.mail.router import NoMailRoute
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.world import intents
from holdfast.world.host import SnapshotPolicy

W = TypeVar("W", bound=World)

# Rates per mille of commits.
CRASH_RATES = {
    Fault.CRASH_BEFORE: 40,
    Fault.CRASH_AFTER: 40,
    Fault.UNKNOWN_BEFORE: 30,
    Fault.UNKNOWN_AFTER: 30,
    Fault.LOST_AFTER: 10,
    Fault.STALL: 10,
}
POLICY = WorldWorkerPolicy(
    lease_ttl_s=LEASE_NS / S,
    idle_s=1.0,
    heartbeat_s=0.5,
    # Crashes lose leases all the time here, so a lost lease proves no poison event.
    stuck_max=1_000_000_000,
    snapshots=SnapshotPolicy(entries=8),
)
LEADER_TTL_S = 1.5
# Crashes kill workers all the time here, so an expired claim proves no poison effect.
NEVER_DEAD_POLICY = {"expiries_max": 1_000_000_000, "idle_sleep_max_ms": 5_000}
# Lease time of an effect claim beyond the call.
CLAIM_S = 2.0
# Step limit of one call or one `run_until_quiet`. Its second half runs without faults.
STEPS_MAX = 100_000
CHECK_EVERY_STEPS = 40
# Between two jumps of the clock, actors run for this long.
AWAKE_BETWEEN_JUMPS_NS = 20 * S
FOREVER_NS = 1 << 62


class NotQuiet(AssertionError):
    """Runnable work did not finish within the step limit."""


class ProcessDied(AssertionError):
    """A process died without an injected fault."""


class SimulationSession:
    def __init__(
        self,
        app: App,
        *,
        seed: int,
        crashes: bool,
        workers: int,
        effects: Mapping[str, EffectFunction] | None = None,
        effect_faults: bool = True,
        allowed_faults: Container[int] | None = None,
        with_tasks: bool = True,
    ) -> None:
        """`allowed_faults` are the positions of the choice tape at which faults may occur, None for all.
        `with_tasks=False` runs no task, no flow and no schedule."""
        self.app = app
        self.seed = seed
        self.tape = ChoiceTape(seed)
        self.tape.allowed_faults = allowed_faults
        stand_ins = EffectStubs(app, effects or {}, faults=crashes and effect_faults)
        self._threads = SimThreadPool()
        apply_specs(app)
        actors: list[Actor] = [
            *(WorldWorkerProcess(f"worker{n}", app, POLICY) for n in range(workers)),
            *(OrchestratorProcess(f"leader{n}", app, LEADER_TTL_S) for n in range(2)),
            *(
                EffectPoolProcess(
                    f"pool{n}", app, stand_ins.effects_of, NEVER_DEAD_POLICY, claim_s=CLAIM_S
                )
                for n in range(2)
            ),
            TimerWorkerProcess("timers", app, with_schedules=with_tasks),
        ]
        if with_tasks and (app.tasks or app.flows):
            actors += [
                TaskWorkerProcess(f"tasks{n}", app, call_faults=crashes and effect_faults)
                for n in range(workers)
            ]
        settings = SimulationSettings(rates=CRASH_RATES if crashes else {})
        self._simulation = _DrivenSimulation(self.tape, settings, actors, self._threads)
        self._simulation.served_queues = frozenset(
            intents.effect_queue(app.universe, kind) for kind in (*app.effects, FABRIC_SEND)
        )
        client = Incarnation(self._simulation, Actor("client"), "1")
        self._store = client.store
        self._simulation.due_work = self._due_work
        self._store.faults_enabled = False
        self._runtime = Runtime(
            app,
            _SessionStore(self._store, self._simulation, app.universe),
            roles=(),
            clock=client.clock,
        )
        if with_tasks and app.schedules:
            # Before the first `advance`, which jumps to the first due time.
            self._runtime.declare_schedules()
        self.restart()

    # -- worlds --------------------------------------------------------------------------------

    def world(self, kind: type[W], name: str) -> WorldHandle[W]:
        return self._runtime.world(kind, name)

    def send_many(self, items: Iterable[tuple[WorldHandle[Any], Any]]) -> list[int]:
        return self._runtime.send_many(items)

    # -- tasks and flows ------------------------------------------------------------------------

    def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> TaskHandle[Any]:
        return self._runtime.submit(task, *args, **kwargs)

    def task(self, id: str) -> TaskHandle[Any]:
        return self._runtime.task(id)

    def start(self, flow: Any, /, *args: Any, **kwargs: Any) -> FlowHandle[Any]:
        return self._runtime.start(flow, *args, **kwargs)

    def flow(self, id: Any, *, key: str | None = None) -> FlowHandle[Any]:
        return self._runtime.flow(id) if key is None else self._runtime.flow(id, key=key)

    # -- time and crashes
    # ----------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Store time, in seconds."""
        return self._simulation.store.engine_now_ns() / S

    def advance(self, seconds: float) -> None:
        self._simulation.advance(int(seconds * S))

    def run_until_quiet(self) -> None:
        self._simulation.run_until_quiet()

    def crash(self) -> None:
        self._simulation.is_down = True
        self._simulation.kill_all()
        self._simulation.call(self._simulation.scheduler.yield_)

    def restart(self) -> None:
        self._simulation.start_all()

    def _due_work(self) -> list[DueWork]:
        """The timed work of flows and schedules, with its due times."""
        ahead_ns = self._simulation.clock.wall_ns() - self._simulation.store.engine_now_ns()
        return [
            *self._store.peek(task_work.flow_work, self.app.universe),
            *self._store.peek(task_work.schedule_work, self.app.universe, ahead_ns),
        ]

    # -- checks
    # --------------------------------------------------------------------------------------

    @property
    def crashes(self) -> int:
        """Number of injected faults and crashes so far."""
        return sum(event.op in ("fault", "crash") for event in self._simulation.history)

    @property
    def history(self) -> History:
        return self._simulation.history

    @property
    def history_hash(self) -> str:
        return self._simulation.history.hash()

    def assert_parity(self) -> None:
        self._simulation.run_until_quiet()
        parity.check_parity(self._store.peek, self.app)
        flow_parity.check_flows(self._store.peek, self.app)

    def close(self) -> None:
        restore_specs(self.app)
        self._simulation.close()
        self._threads.close()

    def __enter__(self) -> SimulationSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _DrivenSimulation(Simulation):
    """A simulation that advances only during calls from outside."""

    def __init__(
        self,
        tape: ChoiceTape,
        settings: SimulationSettings,
        actors: list[Actor],
        threads: SimThreadPool,
    ) -> None:
        super().__init__(tape, settings, actors, threads)
        self.call_protection = CallProtection(enabled=True)
        self.is_down = True
        # Effect queues that a worker pool serves.
        self.served_queues: frozenset[str] = frozenset()
        # Returns the work of flows and schedules.
        self.due_work: Callable[[], list[DueWork]] = list
        self.scheduler.on_exit = self._on_thread_exit
        self.store.record("config", settings.config_arguments())

    def start_all(self) -> None:
        if self.is_down:
            self.is_down = False
            for actor in self.actors:
                self._start(actor, 0)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function as a scheduled thread, together with all actors. Return or raise its
        result."""
        answer: list[Any] = []
        thread = self.scheduler.spawn("client", lambda: answer.append(fn(*args, **kwargs)))
        self._run_steps(lambda: thread.has_ended)
        if thread.error is not None:
            raise thread.error
        return answer[0]

    def advance(self, ns: int) -> None:
        """Advance the clock. While nothing is due for long, it jumps, as on a suspended machine."""
        until_ns = self.clock.boot_ns() + ns
        while (left_ns := until_ns - self.clock.boot_ns()) > 0:
            idle_ns = min(left_ns, self._idle_time_ns()) - AWAKE_BETWEEN_JUMPS_NS
            if idle_ns > 0:
                self.store.record("leap", {"ns": idle_ns})
                self.clock.advance(idle_ns)
                left_ns -= idle_ns
            self.call(self.scheduler.sleep, min(left_ns, AWAKE_BETWEEN_JUMPS_NS))

    def run_until_quiet(self) -> None:
        """Run until no runnable work is left. After the step limit, continue without faults."""
        if self.is_down or not self._remaining_work():
            return
        self._run_steps(self._check_quiet, raises=False)
        if self._remaining_work():
            self.fault_plan.faults_stopped = True
            self._run_steps(self._check_quiet)
            self.fault_plan.faults_stopped = False

    def close(self) -> None:
        self.scheduler.close()
        self.store.close()
        self._backends.close()

    def _run_steps(self, done: Callable[[], bool], *, raises: bool = True) -> None:
        last = self.scheduler.steps + STEPS_MAX
        self.scheduler.run(lambda: bool(self.errors) or done() or self.scheduler.steps >= last)
        if self.errors:
            raise ProcessDied("; ".join(f"{name}: {error}" for name, error in self.errors))
        if raises and self.scheduler.steps >= last:
            raise NotQuiet(
                f"seed {self.tape.seed}: after {STEPS_MAX} steps {self._remaining_work()}"
            )

    def is_stuck(self) -> bool:
        """Whether nothing that was started can go on: no work is left and no time is due, or no process runs. The next
        occurrence of a schedule starts something new, so it does not count."""
        return self.is_down or self._idle_time_ns(with_occurrences=False) == FOREVER_NS

    def _check_quiet(self) -> bool:
        if self.scheduler.steps - self._last_check_step < CHECK_EVERY_STEPS:
            return False
        self._last_check_step = self.scheduler.steps
        return not self._remaining_work()

    def _on_thread_exit(self, thread: SimThread) -> None:
        if thread.name not in self._threads_by_actor:
            return  # a call of the user, which receives the error
        if self.is_down and thread.killed:
            return
        super()._on_thread_exit(thread)

    def _remaining_work(self) -> list[str]:
        """Undelivered messages of active worlds, due timers and unfinished effects."""
        rows = decode_rows(self.store.rows())
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
            *(name for name, due_ns in self._timer_due_times(rows) if due_ns <= now_ns),
            *(
                f"{name}/{seq}"
                for name, queue in rows["queues"].items()
                if name in self.served_queues
                for seq, item in queue["items"].items()
                # Mail to a universe that is not in this store waits until it is.
                if item["code"] != NoMailRoute.code
            ),
            *(
                work.name
                for work in self._all_due_work(rows)
                if work.is_retry or work.due_ns <= now_ns
            ),
        ]

    def _idle_time_ns(self, *, with_occurrences: bool = True) -> int:
        """Time until the next timer is due, if no other work is pending. 0 if other work is
        pending."""
        if self._remaining_work():
            return 0
        now_ns = self.store.engine_now_ns()
        rows = decode_rows(self.store.rows())
        due = [due_ns for _, due_ns in self._timer_due_times(rows)]
        due += [
            work.due_ns
            for work in self._all_due_work(rows)
            if with_occurrences or not work.is_occurrence
        ]
        return min((due_ns - now_ns for due_ns in due), default=FOREVER_NS)

    def _all_due_work(self, rows: dict[str, Any]) -> Iterator[DueWork]:
        for tasks in rows["tasks"].values():
            yield from task_work.task_work(tasks)
        yield from self.due_work()

    def _timer_due_times(self, rows: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """Each timer with its due time in store time."""
        ahead_ns = self.clock.wall_ns() - self.store.engine_now_ns()
        for name, queue in rows["queues"].items():
            if name.endswith(("/timers", "/timers/calendar")):
                clock_ns = ahead_ns if name.endswith("/calendar") else 0
                for seq, item in queue["items"].items():
                    yield f"{name}/{seq}", item["not_before_ns"] - clock_ns


class _SessionStore:
    """The user's store: each call is a thread of the scheduler."""

    def __init__(self, inner: FaultingClient, simulation: _DrivenSimulation, universe: str) -> None:
        self.url = inner.url
        self._universe = universe
        # Waits for a flow or a task in a row in which nothing happened to it.
        self._vain_waits = 0
        self._inner = inner
        self._simulation = simulation

    @property
    def generation(self) -> int:
        return self._inner.generation

    def now_ns(self) -> int:
        return self._inner.now_ns()

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._simulation.call(self._inner.transact, fn, *args, **kwargs)

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._inner.peek(fn, *args, **kwargs)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._simulation.call(self._inner.submit, fn, *args, **kwargs)

    def submit_when(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> None:
        """Do nothing: requests are not parked in the simulator, callers poll."""
        return

    def batched(self) -> AbstractContextManager[None]:
        return self._inner.batched()

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        commit_no: int = self._simulation.call(self._inner.wait, topic, since, timeout)
        if timeout > 0 and waits_for_subject(topic, self._universe):
            self._vain_waits = 0 if commit_no > since else self._vain_waits + 1
            # The check reads the whole store, so it runs after 1, 2, 4, … waits without a change.
            if self._vain_waits.bit_count() == 1 and self._simulation.is_stuck():
                lines = self._inner.peek(describe_waits, self._universe)
                if self._simulation.is_down:
                    lines.insert(0, "every process is down")
                raise Deadlock(waits=lines)
        return commit_no

    def subscribe(self, topics: str | Sequence[str], since: int = 0) -> Subscription:
        raise Invalid(what="subscribe", why="simulated processes have no threads: use wait")

    def backup(self, path: str) -> None:
        self._inner.backup(path)

    def close(self) -> None: ...

    def __enter__(self) -> _SessionStore:
        return self

    def __exit__(self, *exc: object) -> None: ...
