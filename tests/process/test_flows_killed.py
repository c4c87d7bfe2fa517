"""Flows in real processes: workers are killed, and stopped for longer than their leases, and the store goes down.

Every step calls an outside server. Its book decides: `call_book` has the rules.
HOLDFAST_TEST_FLOWS sets the number of flows of the deep tests, with a tenth of the faults: 1,000 flows have 100 kills,
20 stops and 20 outages.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.app.flow_handle import FlowHandle
from holdfast.app.runtime import Runtime
from holdfast.errors import HoldfastError
from holdfast.flows import consistency as flow_consistency
from holdfast.flows.model import FlowEndedError, keys_of
from holdfast.flows.records import FlowEnded, decode_record
from holdfast.flows.unit_of_work import get_counts
from holdfast.store import tuples
from holdfast.store.api import Store, Txn
from holdfast.tasks import consistency as task_consistency
from tests.process import call_server
from tests.process.call_book import (
    KILL,
    OUTAGE,
    STOP,
    CallJudge,
    FlowFault,
    check_compensations,
)
from tests.process.call_server import BookedCall, ask, read_book
from tests.process.conftest import LIMITS
from tests.process.flow_calls_app import (
    CANCEL,
    COMPENSATIONS,
    COMPLETE,
    FAIL,
    FORWARD_STEPS,
    LEASE_S,
    STAGE_OF,
    FlowResult,
    InstalmentPaid,
    app,
    order,
    ship,
)
from tests.process.watch import until, writer_of
from tests.processes import Proc, python_proc

T = TypeVar("T")

MODULES = (
    "holdfast.workers.flows.activation",
    "holdfast.flows.operations",
    "holdfast.flows.execution",
)

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.flow_calls_app:app"]
DEEP_FLOWS = int(os.environ.get("HOLDFAST_TEST_FLOWS") or 1_000)
EVENTS = 3
POLL_S = 0.03
LONG_S = 120.0
# A stopped process is continued this long after its lease.
BEYOND_LEASE_S = 1.0
# The flows that are held back for each stop that has not come yet.
FLOWS_PER_STOP = 2
# How long a fault waits for a call of its victim.
VICTIM_S = 1.0


class FaultPlan(NamedTuple):
    flows: int
    kills: int
    stops: int
    outages: int
    workers: int = 3
    # The flows that run at once.
    window: int = 60

    @classmethod
    def of(cls, flows: int) -> FaultPlan:
        return cls(flows, flows // 10, -(-flows // 50), -(-flows // 50), workers=4, window=120)

    @property
    def faults(self) -> list[str]:
        return [KILL] * self.kills + [STOP] * self.stops + [OUTAGE] * self.outages


@pytest.fixture
def port() -> Iterator[int]:
    """The port of the outside server, which runs in its own process."""
    with python_proc("tests.process.call_server", ready=None) as server:
        yield int(server.expect("ready ").split()[1])


class FlowRun:
    """One flow of the test: its ending, its handle, the events to send, and the stage at which it is cancelled."""

    def __init__(self, number: int, handle: FlowHandle[FlowResult], random: random.Random) -> None:
        self.number = number
        self.ending = ending_of(number)
        self.handle = handle
        self.sent = 0
        self.cancel_at = random.choice([0, 1, 2, 3, 4]) if self.ending == CANCEL else None
        self.stage = -1

    def is_cancel_due(self) -> bool:
        if self.cancel_at is None:
            return False
        if self.cancel_at < STAGE_OF["bill"]:
            return self.stage >= self.cancel_at
        return any("Approved" in blocker["text"] for blocker in self.handle.why())


def ending_of(number: int) -> str:
    return {3: FAIL, 4: CANCEL}.get(number % 5, COMPLETE)


class FlowWorkers:
    """Worker processes, and the faults that hit them."""

    def __init__(self, up: Callable[[], Proc], size: int, random: random.Random) -> None:
        self._up = up
        self._random = random
        self._procs = [up() for _ in range(size)]
        self._stopped: list[tuple[Proc, int, int]] = []
        self.faults: list[FlowFault] = []

    def kill(self) -> None:
        victim, _ = self._choose_victim()
        began_ns = time.monotonic_ns()
        victim.kill()
        ask("release", pid=victim.pid)
        self.faults.append(FlowFault(KILL, victim.pid, began_ns, 0, time.monotonic_ns()))
        # The dead process is closed with the test. Its descendants, possibly the writer, live on, and its pid is not
        # used again.
        self._procs.remove(victim)
        self._procs.append(self._up())

    def stop(self) -> bool:
        """Stop a worker with a call in flight. Returns False if there is none at present."""
        if not self.can_stop:
            return False
        victim, in_flight = self._choose_victim()
        if not in_flight:
            ask("release", pid=victim.pid)
            return False
        began_ns = time.monotonic_ns()
        victim.stop()
        self._stopped.append((victim, began_ns, time.monotonic_ns()))
        ask("release", pid=victim.pid)
        return True

    def continue_due(self) -> None:
        for entry in list(self._stopped):
            victim, began_ns, stopped_ns = entry
            passed_s = (time.monotonic_ns() - stopped_ns) / 1e9
            if passed_s > LEASE_S + BEYOND_LEASE_S:
                self._stopped.remove(entry)
                self.faults.append(
                    FlowFault(STOP, victim.pid, began_ns, stopped_ns, time.monotonic_ns())
                )
                victim.cont()

    @property
    def can_stop(self) -> bool:
        """Whether at least half of the workers would still run."""
        return len(self._stopped) * 2 < len(self._procs)

    def check(self) -> None:
        for proc in self._procs:
            assert proc.running, f"a worker ended by itself: {proc.errors[-20:]}"

    def end(self) -> None:
        """Continue and terminate all workers. A stale worker has then tried to record its outcomes."""
        until(lambda: self.continue_due() or not self._stopped, "the last stop", LONG_S)
        for proc in self._procs:
            proc.terminate()
        for proc in self._procs:
            assert proc.wait(LONG_S) == 0, proc.errors[-20:]

    def _choose_victim(self) -> tuple[Proc, int]:
        """Choose a running worker, preferably with a call in flight. The server holds its answers back."""
        stopped = [entry[0] for entry in self._stopped]
        running = [proc for proc in self._procs if proc not in stopped]
        self._random.shuffle(running)
        deadline = time.monotonic() + VICTIM_S
        while True:
            for victim in running:
                if in_flight := ask("hold", pid=victim.pid):
                    for other in running:
                        if other is not victim:
                            ask("release", pid=other.pid)
                    return victim, in_flight
            if time.monotonic() > deadline:
                for other in running[1:]:
                    ask("release", pid=other.pid)
                return running[0], 0
            time.sleep(POLL_S)


class FlowDriver:
    """Starts the flows, sends their events, cancels some of them and injects the faults of a plan."""

    def __init__(
        self, plan: FaultPlan, rt: Runtime, workers: FlowWorkers, outage: Callable[[], None]
    ) -> None:
        self.plan = plan
        self.runs: dict[int, FlowRun] = {}
        self._rt = rt
        self._workers = workers
        self._outage = outage
        self._random = workers._random
        self._pending = plan.faults
        self._random.shuffle(self._pending)
        self._calls = 0
        self._is_starved = False
        # A complete flow has one call per step, a cancelled one fewer.
        self._calls_total = plan.flows * (len(FORWARD_STEPS) - 1)

    def run(self) -> None:
        until(self._turn, "the end of all flows", LONG_S + self.plan.flows, poll_s=POLL_S)
        assert not self._pending, f"faults left: {self._pending}"

    def _turn(self) -> bool:
        self._workers.check()
        self._workers.continue_due()
        for call in read_book(self._calls):
            self._calls += 1
            if call.flow in self.runs:
                self.runs[call.flow].stage = max(self.runs[call.flow].stage, STAGE_OF[call.step])
        self._inject_due_fault()
        ended = repeat(lambda: self._rt.store.read(ended_count))
        while len(self.runs) < min(self.plan.flows, self._allowed(ended)):
            self._start(len(self.runs))
        for run in self.runs.values():
            self._send_events(run)
            if repeat(run.is_cancel_due):
                run.cancel_at = None
                repeat(run.handle.cancel)
        return ended == self.plan.flows

    def _allowed(self, ended: int) -> int:
        """The number of flows that may have started by now. It grows with the faults, so that faults hit all flows."""
        if not self._pending:
            return self.plan.flows
        share = 1 - len(self._pending) / len(self.plan.faults)
        allowed = min(ended, int(share * self.plan.flows)) + self.plan.window
        # A stop needs a call in flight: flows are left for the last stops.
        allowed = min(allowed, self.plan.flows - FLOWS_PER_STOP * self._pending.count(STOP))
        # A fault waits for a call, or its time has not come.
        is_waiting = self._is_starved or not self._is_fault_due
        return max(allowed, ended + 1) if is_waiting else allowed

    def _start(self, number: int) -> None:
        call = order.options(key=f"o-{number}")
        handle = repeat(lambda: self._rt.start(call, number, ending_of(number)))
        self.runs[number] = FlowRun(number, handle, self._random)

    def _send_events(self, run: FlowRun) -> None:
        if run.sent == EVENTS or self._random.random() < 0.5:
            return
        number = run.sent + 1
        # Some events are sent twice. Their key makes them one event.
        for _ in range(self._random.choice([1, 1, 2])):
            with contextlib.suppress(FlowEndedError):
                repeat(lambda: run.handle.send(InstalmentPaid(number), key=f"paid-{number}"))
        run.sent = number

    @property
    def _is_fault_due(self) -> bool:
        done = len(self.plan.faults) - len(self._pending)
        due = self._calls_total * 0.9 * done / len(self.plan.faults)
        return bool(self._pending) and self._calls >= due

    def _inject_due_fault(self) -> None:
        if not self._is_fault_due:
            return
        kind = self._pending[-1]
        if kind == KILL:
            self._workers.kill()
        elif kind == OUTAGE:
            began_ns = time.monotonic_ns()
            self._outage()
            self._workers.faults.append(
                FlowFault(OUTAGE, 0, began_ns, began_ns, time.monotonic_ns())
            )
        elif not self._workers.stop():
            self._is_starved = self._workers.can_stop
            # No worker can be stopped at present: another fault comes first.
            self._random.shuffle(self._pending)
            return
        self._is_starved = False
        self._pending.pop()


def repeat(call: Callable[[], T]) -> T:
    """Call until the store answers."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return call()
        except HoldfastError as error:
            if not error.retryable and error.code != "commit_unknown":
                raise
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def ended_count(txn: Txn) -> int:
    counts = get_counts(txn, keys_of("billing"), "order")
    return counts.completed + counts.failed + counts.cancelled + counts.dead


# -- the judgement ---------------------------------------------------------------------------------


def recorded_answers(run: FlowRun) -> dict[str, str]:
    """The answers of the server that the flow recorded, by step: from its result, or from its list of steps."""
    state = run.handle.status().state
    if run.ending == COMPLETE:
        assert state == "COMPLETED", run.handle.status()
        result = run.handle.result(0)
        assert sorted(result.tokens) == sorted(FORWARD_STEPS)
        assert result.events == [1, 2, 3], "each event once and in order"
        assert sorted(result.order) == ["carry", "notify"]
        return result.tokens
    with pytest.raises(hf.FlowFailed) as failed:
        run.handle.result(0)
    answers: dict[str, str] = {}
    for number in range(1, run.handle.status().run + 1):
        for step in run.handle.steps(number):
            name = "carry" if step.name == "ship" else step.name
            if name in FORWARD_STEPS and step.state == "completed":
                answers[name] = str(step.value)
    if run.ending == FAIL:
        assert (failed.value.state, failed.value.step) == ("FAILED", "bill")
        answers["bill"] = failed.value.error
    else:
        assert failed.value.state == "CANCELLED"
    return answers


def check_events(steps: dict[str, BookedCall]) -> None:
    """The server saw the events once and in order, in the arguments of the steps after them."""
    expected = {"reserve": 1, "pack": 2, "label": 2}
    for name, number in expected.items():
        if name in steps:
            assert steps[name].detail == number
    if "bill" in steps:
        assert steps["bill"].detail[0] == EVENTS


def ends_by_flow(txn: Txn) -> Counter[int]:
    """The number of recorded ends of each flow."""
    keys = keys_of("billing")
    found: Counter[int] = Counter()
    for key, row in txn.scan(keys.records, tuples.prefix_end(keys.records)):
        if isinstance(decode_record(row).record, FlowEnded):
            *_, seq, _, _ = tuples.unpack(key)
            assert isinstance(seq, int)
            found[seq] += 1
    return found


def judge(driver: FlowDriver, faults: list[FlowFault], store: Store) -> CallJudge:
    """Compare the results and records of all flows with the calls that the outside server saw."""
    answers = {run.number: recorded_answers(run) for run in driver.runs.values()}
    recorded = {token for by_step in answers.values() for token in by_step.values()}
    judged = CallJudge(read_book(), faults, recorded)
    assert not judged.problems, "\n".join(judged.problems)
    for run in driver.runs.values():
        steps = {call.step: call for call in judged.first_calls(run.number)}
        check_events(steps)
        assert answers[run.number].keys() <= steps.keys()
        if run.ending == COMPLETE:
            assert list(steps) == sorted(steps, key=STAGE_OF.__getitem__)
            assert not steps.keys() & set(COMPENSATIONS)
            assert sorted(steps) == sorted(FORWARD_STEPS)
        else:
            problems = check_compensations(steps, answers[run.number], is_failed=run.ending == FAIL)
            assert not problems, (run.number, problems)
    ends = store.read(ends_by_flow)
    assert set(ends.values()) == {1}, "each flow ends once"
    assert len(ends) >= driver.plan.flows
    assert not store.read(lambda txn: list(flow_consistency.find_differences(txn, "billing")))
    assert not store.read(lambda txn: list(task_consistency.find_differences(txn, "billing")))
    return judged


def run_plan(plan: FaultPlan, home: Any, port: int, outage: Callable[[], None]) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    began_s = time.monotonic()
    argv = [*UP, "--store", str(home), "--role", "task", "--role", "timer"]
    env = {call_server.PORT: str(port)}
    with contextlib.ExitStack() as running:
        store = running.enter_context(stores.open(home, limits=LIMITS))
        rt = running.enter_context(app.open(store, roles=()))

        def up() -> Proc:
            return running.enter_context(Proc.spawn(argv, ready=None, env=env))

        workers = FlowWorkers(up, plan.workers, random.Random(seed))
        driver = FlowDriver(plan, rt, workers, outage)
        driver.run()
        workers.end()
        judged = judge(driver, workers.faults, store)
    done = Counter(fault.kind for fault in workers.faults)
    assert done == Counter(plan.faults)
    assert not plan.stops or judged.in_flight_at_stops
    stale = sum(repeated.stale is not None for repeated in judged.repetitions)
    by_kind = Counter(repeated.fault.kind for repeated in judged.repetitions)
    print(
        f"{plan.flows} flows in {time.monotonic() - began_s:.0f} s, {len(read_book())} calls; "
        f"faults: {dict(done)}; repeated calls: {dict(by_kind)}, {stale} of them stale; "
        f"{judged.in_flight_at_stops} calls in flight at a stop, none recorded"
    )


@pytest.fixture(autouse=True)
def call_port(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(call_server.PORT, str(port))


PLANS = [
    pytest.param(FaultPlan(30, kills=5, stops=1, outages=2), id="short", marks=pytest.mark.slow),
    pytest.param(FaultPlan.of(DEEP_FLOWS), id="whole", marks=pytest.mark.deep),
]


@pytest.mark.timeout(300 + 2 * DEEP_FLOWS)
@pytest.mark.parametrize("plan", PLANS)
def test_flows_end_once_when_workers_and_writers_are_killed(
    home: Path, port: int, plan: FaultPlan
) -> None:
    """X1, X2: no step is repeated without a fault, no stale worker records anything, every flow ends once."""
    run_plan(plan, home, port, lambda: replace_writer(home))


def replace_writer(home: Path) -> None:
    """Kill the writer and wait for the next one."""
    killed = writer_of(home)
    killed.kill()
    writer_of(home, other_than=killed)


def test_worker_continued_after_its_lease_records_nothing(home: Path, port: int) -> None:
    """X1: there is no other worker that could have taken the flow, and the lease still decides."""
    flows = 8
    with contextlib.ExitStack() as running:
        store = running.enter_context(stores.open(home, limits=LIMITS))
        rt = running.enter_context(app.open(store, roles=()))
        argv = [*UP, "--store", str(home), "--role", "task", "--role", "timer"]
        env = {call_server.PORT: str(port)}
        worker = running.enter_context(Proc.spawn(argv, env=env))
        ask("hold", pid=worker.pid)
        handles = [rt.start(ship, number) for number in range(flows)]
        until(lambda: ask("in_flight", pid=worker.pid) == flows, "all calls")
        worker.stop()
        stopped = time.monotonic()
        ask("release", pid=worker.pid)
        until(lambda: time.monotonic() - stopped > LEASE_S + BEYOND_LEASE_S, "the lease", LONG_S)
        worker.cont()
        answers = [handle.result(LONG_S) for handle in handles]
        assert [answer.rpartition("/")[2] for answer in answers] == ["2"] * flows
        assert len(read_book()) == 2 * flows
