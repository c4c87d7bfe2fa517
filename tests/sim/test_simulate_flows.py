"""`hf.simulate` with tasks and flows: crashes at commits and around calls, schedules, parity of flows."""

import asyncio
import random
import time
from collections import Counter

import pytest

import holdfast as hf
from holdfast.sim.flow_parity import FlowDisparity

SEEDS = range(6)
# Calls of steps and tasks by idempotency key, with the number of calls.
calls: Counter[tuple[str, str]] = Counter()
undone: list[str] = []
ticks: list[str] = []


class PaidOff(hf.Event):
    cents: int


def count(name: str) -> None:
    calls[name, hf.current_step().idempotency_key] += 1


async def reserve(id: str) -> str:
    count("reserve")
    await asyncio.sleep(0.5)
    return f"shelf of {id}"


def charge(id: str, cents: int) -> int:
    count("charge")
    return cents


async def release(shelf: str) -> None:
    undone.append(shelf)


async def draw(value: float) -> float:
    return value


@hf.task(attempts=3)
def invoice(cents: int) -> str:
    calls["invoice", hf.current_task().idempotency_key] += 1
    return f"{cents} cents"


@hf.task
async def wait_a_second() -> str:
    await asyncio.sleep(1)
    return "done"


@hf.task(attempts=3)
def refuse() -> None:
    raise ValueError("never")


@hf.task(every="*/5 * * * *")
def tick() -> None:
    ticks.append(hf.current_task().idempotency_key)


@hf.flow
async def child(id: str) -> str:
    return await hf.step(reserve, id)


@hf.flow
async def order(id: str) -> str:
    shelf, cents = await asyncio.gather(hf.step(child, id), hf.step(charge, id, 5))
    hf.publish("status", "reserved")
    await hf.sleep(600)
    paid = await hf.receive(PaidOff)
    bill = await hf.step(invoice, cents + paid.cents)
    return f"{shelf}: {bill}"


@hf.flow
async def doomed(id: str) -> None:
    for n in range(3):
        hf.undo(release, await hf.step(reserve, f"{id}-{n}"))
    await hf.step(charge, id, "much")  # type: ignore[arg-type]
    raise ValueError


@hf.flow
async def random_argument() -> float:
    await hf.step(draw, 1.0)
    return await hf.step(draw, random.random())


@hf.flow
async def clock_argument() -> float:
    return await hf.step(draw, time.time())


@hf.flow
async def random_branch() -> float:
    side = "left" if random.random() < 0.5 else "right"
    return await hf.step(hf.options(draw, name=side), 1.0)


@hf.flow
async def random_result() -> float:
    await hf.step(draw, 1.0)
    return random.random()


app = hf.App(
    "shop",
    flows=[order, child, doomed, random_argument, clock_argument, random_branch, random_result],
    tasks=[invoice, wait_a_second, refuse],
    events=[PaidOff],
)
scheduled = hf.App("clocks", tasks=[tick])


@pytest.fixture(autouse=True)
def _clear() -> None:
    calls.clear()
    undone.clear()
    ticks.clear()


def run_order(seed: int, *, crashes: bool = True) -> tuple[str, str, int]:
    with hf.simulate(app, seed=seed, crashes=crashes) as s:
        flow = s.start(order.options(key="o-1"), "o-1")
        s.run_until_quiet()
        assert not flow.done()
        assert flow.published("status") == "reserved"
        s.crash()
        flow.send(PaidOff(cents=2), key="p-1")
        s.restart()
        s.run_until_quiet()
        s.advance(700)
        result = flow.result(timeout=60)
        assert s.flow(flow.id).result() == s.flow(order, key="o-1").result() == result
        s.assert_parity()
        return result, s.history_hash, s.crashes


@pytest.mark.parametrize("seed", SEEDS)
def test_flow_under_crashes_has_the_result_of_a_run_without_faults(seed: int) -> None:
    """Every flow ends once, each call of a step has the key of its step."""
    result, _, crashes = run_order(seed)
    assert result == "shelf of o-1: 7 cents"
    assert crashes > 0
    assert Counter(name for name, _ in calls) == {"reserve": 1, "charge": 1, "invoice": 1}


def test_crashes_make_a_step_run_again_with_the_same_key() -> None:
    """The faults around calls reach steps and tasks: a step that is not idempotent by key is found."""
    repeated = set()
    for seed in range(20):
        calls.clear()
        run_order(seed)
        repeated |= {name for (name, _), count in calls.items() if count > 1}
    assert repeated == {"reserve", "charge", "invoice"}


def test_same_seed_gives_the_same_history_of_flows() -> None:
    first, second = run_order(3), run_order(3)
    assert first == second


@pytest.mark.parametrize("seed", SEEDS)
def test_compensations_run_in_reverse_order_under_crashes(seed: int) -> None:
    with hf.simulate(app, seed=seed) as s:
        flow = s.start(doomed, "x")
        s.run_until_quiet()
        assert flow.status().state == "FAILED"
        s.assert_parity()
    # A crash repeats a compensation before its record, so neighbours may be equal.
    order = [shelf for n, shelf in enumerate(undone) if n == 0 or undone[n - 1] != shelf]
    assert order == ["shelf of x-2", "shelf of x-1", "shelf of x-0"]


@pytest.mark.parametrize("seed", SEEDS)
def test_submitted_tasks_end_within_their_attempts(seed: int) -> None:
    with hf.simulate(app, seed=seed) as s:
        done, failed, slow = s.submit(invoice, 3), s.submit(refuse), s.submit(wait_a_second)
        later = s.submit(invoice.options(delay_s=86_400), 4)
        s.run_until_quiet()
        assert done.result() == s.task(done.id).result() == "3 cents"
        assert failed.status().state == "FAILED"
        assert failed.status().failures == 3
        assert slow.result() == "done"
        assert not later.done()
        s.advance(90_000)
        assert later.result() == "4 cents"


def test_lost_workers_do_not_count_and_specs_are_restored() -> None:
    specs = [order.spec, invoice.spec, invoice.plain.spec]
    with hf.simulate(app, seed=0):
        assert order.spec.expiries_max > 1_000
        with hf.simulate(app, seed=1):
            pass
        assert invoice.plain.spec.expiries_max > 1_000
    assert [order.spec, invoice.spec, invoice.plain.spec] == specs


@pytest.mark.parametrize("seed", SEEDS)
def test_declared_schedule_fires_once_for_each_occurrence(seed: int) -> None:
    with hf.simulate(scheduled, seed=seed) as s:
        s.run_until_quiet()
        s.advance(1800)
        s.run_until_quiet()
    assert len(set(ticks)) == 6


def test_cancelled_and_forked_flows_work_in_the_simulator() -> None:
    with hf.simulate(app, seed=1) as s:
        flow = s.start(order, "a")
        s.run_until_quiet()
        assert [blocker["code"] for blocker in flow.why()] == ["sleeping"]
        fork = flow.fork("again")
        flow.cancel()
        s.run_until_quiet()
        assert flow.status().state == "CANCELLED"
        fork.send(PaidOff(cents=1))
        s.advance(700)
        assert fork.result() == "shelf of a: 6 cents"
        assert "charge" in [step.name for step in fork.steps()]
        s.assert_parity()


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize(
    ("flow", "step"),
    [
        (random_argument, "draw#2"),
        (clock_argument, "draw#1"),
        (random_result, "(end)"),
    ],
    ids=["random argument", "clock argument", "random result"],
)
def test_parity_names_the_step_of_a_flow_that_reads_outside_the_record(
    flow: hf.Flow[[], float], step: str, crashes: bool
) -> None:
    with hf.simulate(app, seed=2, crashes=crashes) as s:
        s.start(flow)
        with pytest.raises(FlowDisparity) as found:
            s.assert_parity()
    assert found.value.step == step
    assert str(found.value).startswith(
        f"flow {flow.name}/f1-1 at step {step}: run again from the top"
    )


def test_parity_finds_a_branch_that_a_random_number_decides() -> None:
    """A step that only one of two runs asks for is named, with the step that the other run asks for."""
    messages = set()
    for seed in range(12):
        with hf.simulate(app, seed=seed, crashes=False) as s:
            s.start(random_branch)
            try:
                s.assert_parity()
            except FlowDisparity as error:
                messages.add(error.what)
    assert messages <= {
        "the code does not ask for this step; it asks for left#1 instead",
        "the code does not ask for this step; it asks for right#1 instead",
    }
    assert messages
