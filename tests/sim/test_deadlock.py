"""`hf.simulate`: a bound of the faults of one call, and the error of a call whose flow or task cannot end."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import holdfast as hf
from holdfast.sim.call_protection import LOST_CALLS_MAX
from holdfast.sim.deadlock import Deadlock

STEP_S = 30.0
calls: Counter[str] = Counter()


class OrderApproved(hf.Event):
    pass


@hf.effect("deadlock.call")
async def slow_effect(call: hf.Call) -> int:
    calls[call.idempotency_key] += 1
    await asyncio.sleep(STEP_S)
    return 1


@hf.task
async def slow_task() -> int:
    calls[hf.current_task().idempotency_key] += 1
    await asyncio.sleep(STEP_S)
    return 1


async def slow_step() -> int:
    calls[hf.current_step().idempotency_key] += 1
    await asyncio.sleep(STEP_S)
    return 1


@hf.flow(attempts=1)
async def slow(kind: str) -> int:
    fn = {"step": slow_step, "task": slow_task, "effect": slow_effect}[kind]
    return await hf.step(fn)


@hf.flow
async def approval() -> None:
    await hf.receive(OrderApproved)


@hf.flow
async def order() -> None:
    await hf.step(approval)


@hf.task
def after_approval() -> None: ...


@hf.flow
async def patient() -> bool:
    await hf.receive(OrderApproved, timeout_s=20)
    return True


app = hf.App(
    "deadlocks",
    flows=[slow, approval, order, patient],
    tasks=[slow_task, after_approval],
    effects=[slow_effect],
    events=[OrderApproved],
)


@hf.task(every="* * * * *")
def tick() -> None:
    ticks.append(1)


@hf.flow(every="0 * * * *")
async def nap() -> str:
    await hf.sleep(30)
    return "slept"


ticks: list[int] = []
scheduled = hf.App(
    "deadlocks", flows=[approval, patient, nap], tasks=[tick], events=[OrderApproved]
)


@pytest.mark.parametrize("kind", ["step", "task", "effect"])
@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.deep)])
def test_call_that_faults_hit_each_time_ends(kind: str, seed: int) -> None:
    calls.clear()
    with hf.simulate(app, seed=seed) as s:
        assert s.start(slow, kind).result(timeout=3600) == 1
    [number] = calls.values()
    # Commits after the call may lose its outcome, too.
    assert number <= 2 * LOST_CALLS_MAX


def test_long_call_is_lost_at_first() -> None:
    """Proves that faults hit the calls of the test before."""
    numbers = []
    for seed in range(4):
        calls.clear()
        with hf.simulate(app, seed=seed) as s:
            s.start(slow, "step").result(timeout=3600)
        numbers += calls.values()
    assert max(numbers) > LOST_CALLS_MAX


def test_result_of_a_flow_that_cannot_end_is_a_deadlock() -> None:
    with hf.simulate(app, seed=1) as s:
        flow = s.start(order.options(key="o-1"))
        with pytest.raises(Deadlock) as caught:
            flow.result()
        assert any(
            line.startswith("flow approval/") and "f1-2: waits for an event: OrderApproved" in line
            for line in caught.value.waits
        )
        assert f"flow order/o-1 {flow.id}: waits for the flow of step approval#1" in (
            caught.value.waits
        )
        assert isinstance(caught.value, hf.Timeout)
        s.flow("f1-2").send(OrderApproved())
        assert flow.result() is None


def test_result_with_a_timeout_does_not_wait_for_a_deadlock() -> None:
    with hf.simulate(app, seed=1) as s:
        flow = s.start(approval)
        before_s = s.now_s
        with pytest.raises(Deadlock):
            flow.result(timeout=86_400)
        assert s.now_s - before_s < 3600


def test_flow_with_a_due_time_is_no_deadlock() -> None:
    with hf.simulate(app, seed=1) as s:
        flow = s.start(patient)
        with pytest.raises(hf.FlowFailed):
            flow.result()
        assert flow.status().code == "timeout"


@pytest.mark.parametrize("seed", range(3))
def test_next_occurrence_of_a_schedule_is_no_progress_of_a_waiting_flow(seed: int) -> None:
    ticks.clear()
    with hf.simulate(scheduled, seed=seed) as s:
        flow, before_s = s.start(approval), s.now_s
        with pytest.raises(Deadlock, match="waits for an event: OrderApproved"):
            flow.result()
        assert s.now_s - before_s < 3600
        flow.send(OrderApproved())
        assert flow.result() is None
        s.advance(600)
        assert len(ticks) >= 9


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2))
def test_due_times_of_a_simulation_with_schedules_are_waited_for(seed: int) -> None:
    with hf.simulate(scheduled, seed=seed) as s:
        with pytest.raises(hf.FlowFailed, match="timeout"):
            s.start(patient).result()
        s.advance(3600)
        # The flow that the schedule started.
        assert s.flow("f1-2").result() == "slept"


def test_result_after_a_crash_without_a_restart_is_a_deadlock() -> None:
    with hf.simulate(app, seed=1) as s:
        task = s.submit(after_approval)
        s.crash()
        if not task.done():
            with pytest.raises(Deadlock, match="every process is down"):
                task.result()
        s.restart()
        assert task.result() is None


def test_deadlock_names_waiting_tasks() -> None:
    with hf.simulate(app, seed=1) as s:
        s.crash()
        first = s.submit(after_approval)
        second = s.submit(after_approval.options(after=[first]))
        with pytest.raises(Deadlock) as caught:
            second.result()
        assert any(f"task after_approval {second.id}: " in line for line in caught.value.waits)
