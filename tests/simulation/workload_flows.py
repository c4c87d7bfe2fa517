"""Actors of flows and schedules: workers that run the product's activations, timers, effect pools, clients, operators.

A worker runs `run_activation` of the product on a simulated event loop. Its steps take simulated
time, at times more than the lease. `flow_app` has the application: the shapes of flows, in two
releases. A worker process runs one release and may start again with the other one.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.durable.queue import list_dead
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    Invalid,
    KeyConflict,
    NotFound,
    Overloaded,
    StoreFull,
    StoreReplaced,
)
from holdfast.flows import (
    compensation_dead_letters,
    due_times,
    fork,
    mailbox,
    parked_flows,
    redrive,
)
from holdfast.flows import operations as flows
from holdfast.flows.compensation_redrive import redrive_compensations
from holdfast.flows.model import MailRow, decode_head, get_body, keys_of, parse_flow_id
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.states import ENDED, FlowState
from holdfast.messages import event_ingress
from holdfast.schedules import operations as schedules
from holdfast.schedules.model import ScheduleDefinition
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.processes import EffectPoolProcess, OrchestratorProcess, WorldWorkerProcess
from holdfast.sim.row_decoder_flows import UNIVERSE
from holdfast.sim.settings import SimulationSettings, Workload, draw_settings
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks import operations as tasks
from holdfast.tasks.operations import GrantRequest, TaskGrant, TaskReport
from holdfast.workers.flows.activation import FlowEnvironment, run_activation
from holdfast.workers.flows.definition import RecordedValues
from holdfast.workers.tasks.attempt import TaskAttempt
from holdfast.world.ingress import WorldAddress, deliver
from tests.simulation.flow_app import (
    APPS,
    LEASE_NS,
    RELEASES,
    STARTS,
    STEP_CALL,
    UNDO_FAILS,
    Begun,
    Coupon,
    Note,
    Starter,
)
from tests.simulation.flow_loop import FlowStore, SimulatedEventLoop
from tests.simulation.flow_payments import PaymentService
from tests.simulation.workload_worlds import LEADER_TTL_S, POLICY

STORE_ERRORS = (CommitUnknown, StoreFull, Conflict)
QUEUE = "default"
# A second of store time is this much wall clock time of schedules, so that cron minutes pass.
WALL_FACTOR = 60
WALL_START_NS = 1_794_000_000 * S
SCHEDULES = ("bills", "sums", "reports")
GRANTS_MAX = 3
FLOWS_MAX = 10
FORKS_MAX = 3
UNDO_FAILS_MILLE = 500
UNDO_QUEUE = compensation_dead_letters.queue_of(UNIVERSE)
# In the seeds with this number of accounts, a world starts flows.
ACCOUNTS_WITH_WORLD = 1
BEGUN_MAX = 8
BEGUN_FLOWS = ("report", "limited", "")
FORK_PLACES = ("", "work", "work#2", "hf.receive", "label")
# Per mille of starts and sends that the client repeats although it has the answer.
REPEATED_MILLE = 250
# Per mille of rounds of a timer that fire schedules: occurrences wait for a while, so that backfills come first.
SCHEDULES_MILLE = 250
# At rest all workers run one release for this long, then the other one.
RELEASE_NS = S
# The claims of effects are short, and their pools idle for a short time.
POOL_POLICY = {"lease_ttl_ms": 2_600, "idle_sleep_max_ms": 500}
# No operator resumes the world: it is not parked for lost leases.
WORLD_POLICY = replace(POLICY, stuck_max=1_000)
KEYS = keys_of(UNIVERSE)
_CLIENT_APP = APPS[RELEASES[0]].app


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
    undo_faults = UndoFaults()
    return [
        *(FlowClient(f"starter{n}") for n in range(min(settings.senders, 2))),
        *(FlowWorkerProcess(f"flowworker{n}", undo_faults) for n in range(2 + settings.workers)),
        *(FlowTimer(f"flowtimer{n}") for n in range(settings.operators)),
        EffectPoolProcess("flowpool0", _CLIENT_APP, PaymentService().effects, POOL_POLICY),
        FlowOperator("flowoperator0", undo_faults),
        ScheduleOperator("scheduler0"),
        *(_world_actors() if settings.accounts == ACCOUNTS_WITH_WORLD else []),
    ]


def _world_actors() -> list[Actor]:
    """A world that starts flows, and its client."""
    return [
        WorldWorkerProcess("flowworld0", _CLIENT_APP, WORLD_POLICY),
        OrchestratorProcess("flowleader0", _CLIENT_APP, LEADER_TTL_S),
        WorldClient("worldclient0"),
    ]


def schedule_wall_ns(incarnation: Incarnation) -> int:
    """The wall clock time of schedules."""
    return WALL_START_NS + incarnation.store.now_ns() % (86_400 * S) * WALL_FACTOR


class UndoFaults:
    """The compensations of one run that fail, until an operator mends their cause."""

    def __init__(self) -> None:
        self._fails: dict[str, bool] = {}

    def fails(self, incarnation: Incarnation, key: str) -> bool:
        if incarnation.faults_stopped:
            return False
        if key not in self._fails:
            self._fails[key] = incarnation.tape.chance(UNDO_FAILS_MILLE)
        return self._fails[key]

    def mend(self) -> None:
        self._fails.clear()


class FlowWorkerProcess(Actor):
    """Leases activations and tasks, and runs them. It extends no lease: a long step loses it."""

    def __init__(self, name: str, undo_faults: UndoFaults) -> None:
        super().__init__(name)
        self.undo_faults = undo_faults

    def run_process(self, incarnation: Incarnation) -> None:
        me = f"{self.name}/{incarnation.incarnation_id}"
        threads = ThreadPoolExecutor(1)
        process = _WorkerRun(incarnation, self.undo_faults)
        store: Any = FlowStore(incarnation)
        clock: Any = incarnation.clock
        environment = FlowEnvironment(store, UNIVERSE, threads, RecordedValues(clock))
        while True:
            try:
                process.choose_release()
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

    def __init__(self, incarnation: Incarnation, undo_faults: UndoFaults) -> None:
        self.incarnation = incarnation
        self.undo_faults = undo_faults
        # The release that the process runs. It resumes the flows that the other release parked.
        self.release = 0
        # The grant of each flow that runs here.
        self.held: dict[int, TaskGrant] = {}

    def choose_release(self) -> None:
        """Choose a release at the start of the process. At rest all processes run the same one, in turn."""
        if self.incarnation.faults_stopped:
            chosen = RELEASES[self.incarnation.store.now_ns() // RELEASE_NS % len(RELEASES)]
        else:
            chosen = self.release or self.incarnation.tape.pick(RELEASES)
        if chosen != self.release:
            versions = APPS[chosen].versions
            self.incarnation.store.transact(parked_flows.resume_parked, UNIVERSE, versions)
            self.release = chosen

    def run(self, environment: FlowEnvironment, grants: list[TaskGrant]) -> list[TaskReport]:
        STEP_CALL.set(self._call)
        UNDO_FAILS.set(lambda key: self.undo_faults.fails(self.incarnation, key))
        loop = SimulatedEventLoop(self.incarnation)
        try:
            return list(loop.run(self._run_all(environment, grants)))
        finally:
            self.held.clear()
            loop.close()

    async def _run_all(
        self, environment: FlowEnvironment, grants: list[TaskGrant]
    ) -> list[TaskReport]:
        reports = await asyncio.gather(*(self._run_one(environment, grant) for grant in grants))
        return [report for report in reports if report is not None]

    async def _run_one(self, environment: FlowEnvironment, grant: TaskGrant) -> TaskReport | None:
        """Run a task. None if its own commit has completed it."""
        code = APPS[self.release].codes.get(grant.name)
        if code is None:
            await self._take_time()
            return TaskReport(grant.seq, grant.lease, result=codec.pack(1))
        flow, _ = codec.unpack(grant.args)
        self.held[flow] = grant
        attempt: Any = TaskAttempt(grant, code)  # type: ignore[arg-type]
        await run_activation(environment, code, attempt, grant.args)
        return None if attempt.reported else TaskReport(grant.seq, grant.lease)

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
        await self._take_time(long_mille=600 if step.name == "fragile" else 60)

    async def _take_time(self, long_mille: int = 60) -> None:
        tape = self.incarnation.tape
        if self.incarnation.faults_stopped:
            return
        if tape.chance(long_mille):
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
            incarnation.pause(ms=300 if incarnation.faults_stopped else 100)

    def _transact(self, incarnation: Incarnation, operation: Any, *args: Any) -> Any:
        self.repeated = (operation, *args)
        answer = incarnation.store.transact(operation, *args)
        # At times the client loses the answer and asks again.
        if incarnation.faults_stopped or not incarnation.tape.chance(REPEATED_MILLE):
            self.repeated = None
        return answer

    def _step(self, incarnation: Incarnation) -> None:
        tape = incarnation.tape
        stored: list[StoredFlow] = incarnation.store.read(stored_flows)
        if incarnation.faults_stopped:
            self.idle = all(one.state in ENDED for one in stored)
            for one in stored:
                if one.state == FlowState.WAITING and not one.is_child:
                    self._send(incarnation, one.seq, one.generation, "Note")
            return
        running = [(one.seq, one.generation) for one in stored if one.state not in ENDED]
        choice = tape.draw(10)
        if choice < 4 and self.started < FLOWS_MAX:
            self._start(incarnation)
        elif running and choice < 8:
            self._send(incarnation, *tape.pick(running), ("Note", "Coupon")[tape.draw(2)])
        elif running and choice == 9:
            seq, generation = tape.pick(running)
            if incarnation.store.transact(flows.cancel, UNIVERSE, seq, generation):
                incarnation.count_coverage("flow: cancelled")

    def _start(self, incarnation: Incarnation) -> None:
        self.started += 1
        name, args = incarnation.tape.pick(STARTS)
        flow = _CLIENT_APP.flows[name]
        key = f"{self.name}-{self.started}"
        new = NewFlow(flow.spec, flow.pack(args, {}), key)
        self._transact(incarnation, flows.start, UNIVERSE, [new])

    def _send(self, incarnation: Incarnation, seq: int, generation: int, type: str) -> None:
        self.sent += 1
        event = (Note if type == "Note" else Coupon)(f"{self.name} {self.sent}")
        name, value = _CLIENT_APP.encode_event(event)
        mail = MailRow(name, value, key=f"{self.name}-{self.sent}")
        self._transact(incarnation, mailbox.send, UNIVERSE, seq, generation, mail)


class StoredFlow(NamedTuple):
    seq: int
    generation: int
    state: int
    is_child: bool


def stored_flows(txn: Txn) -> list[StoredFlow]:
    found: list[StoredFlow] = []
    for key, row in txn.scan(KEYS.heads, tuples.prefix_end(KEYS.heads)):
        seq = tuples.unpack_last_int(key, len(KEYS.heads))
        body = get_body(txn, KEYS, seq)
        is_child = body.parent is not None and body.parent.flow > 0
        found.append(StoredFlow(seq, body.generation, decode_head(row).state, is_child))
    return found


class FlowOperator(Actor):
    """Redrives failed and dead flows and failed compensations, forks flows and resumes parked ones."""

    def __init__(self, name: str, undo_faults: UndoFaults) -> None:
        super().__init__(name)
        self.forks = 0
        self.undo_faults = undo_faults

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                if not incarnation.faults_stopped:
                    self._step(incarnation)
            except STORE_ERRORS:
                pass
            except (NotFound, Invalid, KeyConflict) as error:
                incarnation.count_coverage(f"flow: operator refused, {error.code}")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=300)

    def _step(self, incarnation: Incarnation) -> None:
        tape, store = incarnation.tape, incarnation.store
        stored: list[StoredFlow] = store.read(stored_flows)
        # A child belongs to its parent: the redrive of the parent redrives it.
        broken = [
            one
            for one in stored
            if one.state in (FlowState.FAILED, FlowState.DEAD) and not one.is_child
        ]
        parked = [one for one in stored if one.state == FlowState.PARKED]
        letters = store.read(list_dead, UNDO_QUEUE)
        possible = {
            "redrive": bool(broken),
            "resume": bool(parked),
            "compensation": bool(letters),
            "fork": bool(stored) and self.forks < FORKS_MAX,
        }
        chosen = [name for name, is_possible in possible.items() if is_possible]
        action = tape.pick(chosen) if chosen else ""
        if action == "redrive":
            store.transact(redrive.redrive, UNIVERSE, tape.pick(broken).seq)
        elif action == "resume":
            store.transact(flows.resume, UNIVERSE, tape.pick(parked).seq)
        elif action == "compensation":
            if tape.chance(500):
                self.undo_faults.mend()
            store.transact(redrive_compensations, UNIVERSE, [tape.pick(letters).seq])
        elif action == "fork":
            self.forks += 1
            flow = tape.pick(stored)
            key, place = f"{self.name}-{self.forks}", tape.pick(FORK_PLACES)
            store.transact(fork.fork, UNIVERSE, flow.seq, flow.generation, key, place)


class WorldClient(Actor):
    """Sends the events by which a world starts flows. An event has a key and is repeated."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0
        self.pending: tuple[str, str] | None = None

    def is_idle(self) -> bool:
        return self.pending is None

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            if self.pending is None and not incarnation.faults_stopped and self.sent < BEGUN_MAX:
                self.sent += 1
                self.pending = (f"{self.name}-{self.sent}", incarnation.tape.pick(BEGUN_FLOWS))
            if self.pending is not None:
                try:
                    self._send(incarnation, *self.pending)
                    self.pending = None
                except (*STORE_ERRORS, Overloaded):
                    pass
                except StoreReplaced:
                    incarnation.store.reopen()
                    self.pending = None
            incarnation.pause(ms=200)

    def _send(self, incarnation: Incarnation, id: str, flow: str) -> None:
        to = WorldAddress(UNIVERSE, Starter.__name__, "s0", incarnation.clock.entropy(16).hex())
        event = event_ingress(*_CLIENT_APP.encode_event(Begun(id, flow)))
        incarnation.store.transact(deliver, to, id, event)


class FlowTimer(Actor):
    """Fires due sleeps, timeouts and occurrences. Several timers compete."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                incarnation.store.transact(
                    due_times.fire_due, UNIVERSE, 1 + incarnation.tape.draw(4)
                )
                if not incarnation.faults_stopped and incarnation.tape.chance(SCHEDULES_MILLE):
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
            # The last one may be due and not yet fired.
            first_ns = (wall_ns // minute_ns - 1 - tape.draw(3)) * minute_ns
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
