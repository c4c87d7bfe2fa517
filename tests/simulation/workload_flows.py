"""Actors of flows and schedules: workers that run the product's activations, timers and clients.

A worker runs `run_activation` of the product on a simulated event loop. Its steps take simulated
time, at times more than the lease. The application has the shapes of flows: branches, sleeps,
events, children, compensations, the next run, and a schedule of tasks and one of flows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import holdfast as hf
from holdfast import codec
from holdfast.clock import MS, S
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    Invalid,
    KeyConflict,
    NotFound,
    StoreFull,
    StoreReplaced,
)
from holdfast.flows import operations as flows
from holdfast.flows.model import TASK_PREFIX, MailRow, decode_head, get_body, keys_of, parse_flow_id
from holdfast.flows.operations import NewFlow
from holdfast.flows.states import ENDED
from holdfast.schedules import operations as schedules
from holdfast.schedules.model import ScheduleDefinition
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.row_decoder_flows import UNIVERSE
from holdfast.sim.settings import SimulationSettings, Workload, draw_settings
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks import operations as tasks
from holdfast.tasks.operations import GrantRequest, TaskGrant, TaskReport
from holdfast.workers.flows.activation import FlowEnvironment, run_activation
from holdfast.workers.flows.definition import RecordedValues
from holdfast.workers.tasks.attempt import TaskAttempt
from tests.simulation.flow_loop import FlowStore, SimulatedEventLoop

STORE_ERRORS = (CommitUnknown, StoreFull, Conflict)
QUEUE = "default"
LEASE_NS = 1500 * MS
# A second of store time is this much wall clock time of schedules, so that cron minutes pass.
WALL_FACTOR = 60
WALL_START_NS = 1_794_000_000 * S
SCHEDULES = ("bills", "sums", "reports")
GRANTS_MAX = 3
FLOWS_MAX = 8
KEYS = keys_of(UNIVERSE)


class Note(hf.Event):
    text: str


class Coupon(hf.Event):
    text: str


class FlowApp:
    """The application of the simulated flows. `call` runs at the start of each step function."""

    def __init__(self, call: Callable[[], Any]) -> None:
        async def work(n: int) -> int:
            await call()
            return n + 1

        async def undo_work(n: int) -> None:
            await call()

        async def refuse() -> None:
            await call()
            raise ValueError("refused")

        @hf.task(lease_s=LEASE_NS / S, expiries_max=50)
        def bill(n: int) -> int:
            return n

        @hf.flow(lease_s=LEASE_NS / S, expiries_max=50)
        async def label(n: int) -> int:
            first = await hf.step(hf.options(work, name="label"), n)
            hf.undo(undo_work, first)
            await hf.sleep(0.2)
            return await hf.step(hf.options(work, name="label"), first)

        async def branch(name: str) -> int:
            first = await hf.step(hf.options(work, name=name), 1)
            hf.undo(hf.options(undo_work, name=f"undo_{name}"), first)
            return await hf.step(hf.options(work, name=name), first)

        @hf.flow(lease_s=LEASE_NS / S, expiries_max=50)
        async def order(fails: bool) -> list[Any]:
            first = await hf.step(work, 0)
            hf.undo(undo_work, first)
            sums = await asyncio.gather(branch("left"), branch("right"))
            await hf.sleep(0.3)
            try:
                note = (await hf.receive(Note, timeout_s=1.0)).text
            except hf.Timeout:
                note = ""
            child = await hf.step(label, sums[0])
            hf.undo(undo_work, child)
            if fails:
                await hf.step(refuse)
            return [note, child, await hf.step(bill, sums[1])]

        @hf.flow(lease_s=LEASE_NS / S, expiries_max=50)
        async def rounds(n: int) -> int:
            await hf.step(work, n)
            await asyncio.gather(hf.receive(Note), hf.receive(Note, Coupon))
            if n:
                hf.again(n - 1)
            return await hf.step(work, n)

        @hf.flow(lease_s=LEASE_NS / S, expiries_max=50)
        async def report() -> int:
            await hf.sleep(0.4)
            return await hf.step(work, 0)

        self.app = hf.App(
            UNIVERSE,
            flows=[order, label, rounds, report],
            tasks=[bill],
            events=[Note, Coupon],
        )
        self.codes = {
            TASK_PREFIX + name: flow.within(UNIVERSE, self.app)
            for name, flow in self.app.flows.items()
        }


async def _no_call() -> None:
    """The client runs no steps."""


_CLIENT_APP = FlowApp(_no_call).app


def has_flows(settings: SimulationSettings) -> bool:
    """Whether the run of a seed without a planted bug is one of flows. Two draws that these workloads do not use
    decide it. This keeps the runs of the stored seeds with planted bugs unchanged."""
    chosen = settings.workload in (Workload.SPINE, Workload.TASKS)
    return chosen and settings.world_workers == 3


def draw_flow_settings(tape: ChoiceTape) -> SimulationSettings:
    """Draw the settings of a seed whose run is one of flows."""
    return as_flow_settings(draw_settings(tape))


def as_flow_settings(settings: SimulationSettings) -> SimulationSettings:
    settings.workload = Workload.FLOWS
    settings.audit_every = 60
    return settings


def flow_actors(settings: SimulationSettings) -> list[Actor]:
    return [
        *(FlowClient(f"starter{n}") for n in range(min(settings.senders, 2))),
        *(FlowWorkerProcess(f"flowworker{n}") for n in range(1 + settings.workers)),
        *(FlowTimer(f"flowtimer{n}") for n in range(settings.operators)),
        ScheduleOperator("scheduler0"),
    ]


def schedule_wall_ns(incarnation: Incarnation) -> int:
    """The wall clock time of schedules."""
    return WALL_START_NS + incarnation.store.now_ns() % (86_400 * S) * WALL_FACTOR


class FlowWorkerProcess(Actor):
    """Leases activations and tasks, and runs them. It extends no lease: a long step loses it."""

    def run_process(self, incarnation: Incarnation) -> None:
        me = f"{self.name}/{incarnation.incarnation_id}"
        threads = ThreadPoolExecutor(1)
        process = _WorkerRun(incarnation)
        store: Any = FlowStore(incarnation)
        clock: Any = incarnation.clock
        environment = FlowEnvironment(store, UNIVERSE, threads, RecordedValues(clock))
        while True:
            try:
                leased = incarnation.store.transact(
                    tasks.lease, UNIVERSE, GrantRequest(me, [QUEUE], GRANTS_MAX, True)
                )
                generation = incarnation.store.generation
                reports = process.run(environment, leased.grants)
                if reports:
                    incarnation.store.transact(
                        tasks.apply_reports, UNIVERSE, me, generation, reports
                    )
            except CommitUnknown:
                incarnation.count_coverage("flow: worker with an unknown outcome")
            except (StoreFull, Conflict):
                pass
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=60)


class _WorkerRun:
    """The runs of one worker process."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.app = FlowApp(self._call)
        # The grant of each flow that runs here.
        self.held: dict[int, TaskGrant] = {}

    def run(self, environment: FlowEnvironment, grants: list[TaskGrant]) -> list[TaskReport]:
        loop = SimulatedEventLoop(self.incarnation)
        try:
            return list(loop.run(self._run_all(environment, grants)))
        finally:
            self.held.clear()
            loop.close()

    async def _run_all(
        self, environment: FlowEnvironment, grants: list[TaskGrant]
    ) -> list[TaskReport]:
        return await asyncio.gather(*(self._run_one(environment, grant) for grant in grants))

    async def _run_one(self, environment: FlowEnvironment, grant: TaskGrant) -> TaskReport:
        code = self.app.codes.get(grant.name)
        if code is None:
            await self._take_time()
            return TaskReport(grant.seq, grant.lease, result=codec.pack(1))
        flow, _ = codec.unpack(grant.args)
        self.held[flow] = grant
        attempt: Any = TaskAttempt(grant, code)  # type: ignore[arg-type]
        await run_activation(environment, code, attempt, grant.args)
        return TaskReport(grant.seq, grant.lease)

    async def _call(self) -> None:
        step = hf.current_step()
        flow = parse_flow_id(step.flow_id).seq
        grant = self.held[flow]
        self.incarnation.record(
            "flow.call",
            flow=flow,
            run=codec.unpack(grant.args)[1],
            name=step.name,
            occurrence=step.occurrence,
            key=step.idempotency_key,
            task=grant.seq,
            lease=grant.lease,
        )
        await self._take_time()

    async def _take_time(self) -> None:
        tape = self.incarnation.tape
        if self.incarnation.faults_stopped:
            return
        if tape.chance(60):
            self.incarnation.count_coverage("flow: step longer than its lease")
            await asyncio.sleep(LEASE_NS * 1.5 / S)
        elif tape.chance(400):
            await asyncio.sleep((1 + tape.draw(200)) / 1000)


class FlowClient(Actor):
    """Starts flows, sends events to them and cancels some. Starts and sends have keys and are repeated."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.started = 0
        self.sent = 0
        self.repeated: tuple[Any, ...] | None = None
        self.idle = False

    def is_idle(self) -> bool:
        return self.idle

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                if self.repeated is not None:
                    self._transact(incarnation, *self.repeated)
                    incarnation.count_coverage("flow: request repeated")
                else:
                    self._step(incarnation)
            except (StoreFull, Conflict, CommitUnknown):
                incarnation.pause(ms=50)
            except (NotFound, KeyConflict, Invalid) as error:
                incarnation.count_coverage(f"flow: {error.code}")
                self.repeated = None
            except StoreReplaced:
                incarnation.store.reopen()
                self.repeated = None
            incarnation.pause(ms=100)

    def _transact(self, incarnation: Incarnation, operation: Any, *args: Any) -> Any:
        self.repeated = (operation, *args)
        answer = incarnation.store.transact(operation, *args)
        self.repeated = None
        return answer

    def _step(self, incarnation: Incarnation) -> None:
        tape = incarnation.tape
        running: list[tuple[int, int]] = incarnation.store.read(open_flows)
        if incarnation.faults_stopped:
            self.idle = not running
            for seq, generation in running:
                self._send(incarnation, seq, generation, "Note")
                self.idle = False
            return
        choice = tape.draw(10)
        if choice < 4 and self.started < FLOWS_MAX:
            self._start(incarnation)
        elif running and choice < 8:
            self._send(incarnation, *tape.pick(running), ("Note", "Coupon")[tape.draw(2)])
        elif running and choice == 9 and tape.chance(400):
            seq, generation = tape.pick(running)
            if incarnation.store.transact(flows.cancel, UNIVERSE, seq, generation):
                incarnation.count_coverage("flow: cancelled")

    def _start(self, incarnation: Incarnation) -> None:
        self.started += 1
        name, args = (("order", (False,)), ("order", (True,)), ("rounds", (1,)))[
            incarnation.tape.draw(3)
        ]
        flow = _CLIENT_APP.flows[name]
        key = f"{self.name}-{self.started}"
        new = NewFlow(flow.spec, flow.pack(args, {}), key)
        self._transact(incarnation, flows.start, UNIVERSE, [new])

    def _send(self, incarnation: Incarnation, seq: int, generation: int, type: str) -> None:
        self.sent += 1
        event = (Note if type == "Note" else Coupon)(f"{self.name} {self.sent}")
        name, value = _CLIENT_APP.encode_event(event)
        mail = MailRow(name, value, key=f"{self.name}-{self.sent}")
        self._transact(incarnation, flows.send, UNIVERSE, seq, generation, mail)


def open_flows(txn: Txn) -> list[tuple[int, int]]:
    """The flows that have not ended: (seq, generation)."""
    rows = txn.scan(KEYS.heads, tuples.prefix_end(KEYS.heads))
    seqs = [
        tuples.unpack_last_int(key, len(KEYS.heads))
        for key, row in rows
        if decode_head(row).state not in ENDED
    ]
    return [(seq, get_body(txn, KEYS, seq).generation) for seq in seqs]


class FlowTimer(Actor):
    """Fires due sleeps, timeouts and occurrences. Several timers compete."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                incarnation.store.transact(flows.fire_due, UNIVERSE, 1 + incarnation.tape.draw(4))
                if not incarnation.faults_stopped:
                    incarnation.store.transact(
                        schedules.fire_due, UNIVERSE, schedule_wall_ns(incarnation), 5
                    )
            except STORE_ERRORS:
                pass
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=100)


class ScheduleOperator(Actor):
    """Creates the schedules, pauses and resumes them, runs them now and backfills."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                if not incarnation.faults_stopped:
                    self._step(incarnation)
            except STORE_ERRORS:
                pass
            except (NotFound, Invalid) as error:
                incarnation.count_coverage(f"schedule: {error.code}")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=400)

    def _step(self, incarnation: Incarnation) -> None:
        tape, store = incarnation.tape, incarnation.store
        wall_ns = schedule_wall_ns(incarnation)
        name = tape.pick(SCHEDULES)
        choice = tape.draw(8)
        if choice < 3:
            store.transact(schedules.create, UNIVERSE, _definition(name), "", wall_ns)
        elif choice == 3:
            store.transact(schedules.set_paused, UNIVERSE, name, True, wall_ns)
        elif choice < 6:
            store.transact(schedules.set_paused, UNIVERSE, name, False, wall_ns)
        elif choice == 6:
            store.transact(schedules.run_now, UNIVERSE, name, wall_ns)
        else:
            minute_ns = 60 * S
            first_ns = (wall_ns // minute_ns - 1 - tape.draw(5)) * minute_ns
            occurrences = [first_ns, first_ns + minute_ns]
            store.transact(schedules.backfill, UNIVERSE, name, occurrences, wall_ns)


def _definition(name: str) -> ScheduleDefinition:
    overlap = {"bills": "skip", "sums": "queue", "reports": "skip"}[name]
    missed = {"bills": "one", "sums": "all", "reports": "skip"}[name]
    if name == "reports":
        flow = _CLIENT_APP.flows["report"]
        return ScheduleDefinition(
            name, "* * * * *", "UTC", missed, overlap, flow.pack((), {}), flow=flow.spec
        )
    task = _CLIENT_APP.tasks["bill"]
    args = codec.pack([[1], {}])
    return ScheduleDefinition(name, "*/2 * * * *", "UTC", missed, overlap, args, task=task.spec)
