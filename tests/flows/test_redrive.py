"""Redrive of flows with children, branches and former runs, and forks of redriven flows."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.flows.compensation_redrive import redrive_compensations
from holdfast.ops.verify import find_differences
from holdfast.tasks import admin as task_admin
from holdfast.tasks import task_list
from tests.flows.test_steps import app_of, failure

MODULES = ("holdfast.flows.redrive", "holdfast.flows.children")


class Bank:
    def __init__(self) -> None:
        self.down = True
        self.calls: list[str] = []

    async def charge(self, n: int) -> int:
        self.calls.append(f"charge {n}")
        if self.down:
            raise ConnectionError("the bank is down")
        return n

    async def refund(self) -> None:
        self.calls.append("refund")

    async def look_up(self) -> int:
        self.calls.append("look up")
        return 1


@pytest.mark.parametrize("compensates", [False, True])
def test_redrive_of_a_parent_redrives_its_failed_child(make_rig: Any, compensates: bool) -> None:
    bank = Bank()

    @hf.flow
    async def payment() -> int:
        first = await hf.step(bank.look_up)
        if compensates:
            hf.undo(bank.refund)
        return first + await hf.step(bank.charge, 1)

    @hf.flow
    async def order() -> int:
        return 10 + await hf.step(payment)

    rig = make_rig(app_of(order, payment))
    handle = rig.start(order)
    assert failure(rig, handle).step == "payment"
    bank.down = False
    bank.calls.clear()
    assert rig.result(handle.redrive()) == 12
    assert bank.calls == (["look up"] if compensates else []) + ["charge 1"]
    assert rig.store.read(find_differences) == []


def redrive_task(rig: Any, seq: int) -> int:
    [new] = rig.store.transact(task_admin.redrive, rig.universe, [seq])
    return int(new)


def order_with_task(bank: Bank) -> tuple[Any, Any]:
    """A flow whose step is a task, and the task."""

    @hf.task(attempts=1)
    def bill(n: int) -> int:
        bank.calls.append(f"bill {n}")
        if bank.down:
            raise ConnectionError("the bank is down")
        return n

    @hf.flow
    async def order() -> int:
        return 10 + await hf.step(bill, 1)

    return order, bill


@pytest.mark.spec("DESIGN", "12", "a redrive runs the failed step again, once")
@pytest.mark.parametrize("first", ["task ended", "task waits", "task failed again", "flow"])
def test_redrive_of_a_flow_and_of_its_failed_task_run_the_step_once(
    make_rig: Any, first: str
) -> None:
    bank = Bank()
    order, bill = order_with_task(bank)
    rig = make_rig(app_of(order, tasks=[bill]))
    handle = rig.start(order)
    assert failure(rig, handle).step == "bill"
    [child] = rig.store.read(task_list.list_tasks, rig.universe, "failed", owned=False).rows
    bank.down = first == "task failed again"
    bank.calls.clear()
    if first != "flow":
        redriven = redrive_task(rig, child.id.seq)
        while first != "task waits" and rig.run_one():
            pass
    handle.redrive()
    if first == "flow":
        rig.run_one()
        assert redrive_task(rig, child.id.seq) == redrive_task(rig, child.id.seq)
    bank.down = False
    assert rig.result(handle) == 11
    again = first == "task failed again"
    assert bank.calls == ["bill 1"] * (2 if again else 1)
    if first != "flow":
        assert (redrive_task(rig, child.id.seq) == redriven) or again
    rig.run(rig.is_idle)
    assert len(bank.calls) == (2 if again else 1)
    assert rig.store.read(find_differences) == []


@pytest.mark.spec("DESIGN", "12", "a redrive runs a failed compensation again, once")
def test_redrive_of_a_compensation_and_of_its_failed_task_run_it_once(make_rig: Any) -> None:
    bank = Bank()
    order, bill = order_with_task(bank)

    @hf.flow(attempts=1)
    async def returned() -> None:
        hf.undo(bill, 1)
        hf.undo(bill, 2)
        raise ValueError("sent back")

    rig = make_rig(app_of(order, returned, tasks=[bill]))
    handle = rig.start(returned)
    failure(rig, handle)
    rows = rig.store.read(task_list.list_tasks, rig.universe, "failed", owned=False).rows
    bank.down = False
    bank.calls.clear()
    for row in rows:
        redrive_task(rig, row.id.seq)
    while rig.run_one():
        pass
    assert sorted(bank.calls) == ["bill 1", "bill 2"]
    rig.store.transact(redrive_compensations, rig.universe, [1, 2])
    failure(rig, handle)
    assert len(bank.calls) == 2
    states = [step.state for step in handle.steps() if step.name.startswith("undo:")]
    assert states.count("completed") == 2
    assert rig.store.read(find_differences) == []


def test_redrive_of_a_fork_starts_another_task(make_rig: Any) -> None:
    bank = Bank()
    order, bill = order_with_task(bank)
    rig = make_rig(app_of(order, tasks=[bill]))
    handle = rig.start(order)
    failure(rig, handle)
    fork = handle.fork("copy")
    failure(rig, fork)
    bank.down = False
    bank.calls.clear()
    assert rig.result(handle.redrive()) == rig.result(fork.redrive()) == 11
    assert bank.calls == ["bill 1", "bill 1"]
    assert rig.store.read(find_differences) == []


@pytest.mark.parametrize("same", [True, False])
def test_redrive_finds_the_child_whose_call_is_written_in_another_way(
    make_rig: Any, same: bool
) -> None:
    bank = Bank()

    @hf.flow
    async def payment(cents: int, currency: str = "EUR") -> int:
        return await hf.step(bank.look_up) + await hf.step(bank.charge, cents)

    @hf.flow
    async def order() -> int:
        if bank.down:
            return await hf.step(payment, 1)
        return await hf.step(payment, currency="EUR", cents=1 if same else 2)

    rig = make_rig(app_of(order, payment))
    handle = rig.start(order)
    assert failure(rig, handle).step == "payment"
    bank.down = False
    bank.calls.clear()
    assert rig.result(handle.redrive()) == (2 if same else 3)
    assert bank.calls == (["charge 1"] if same else ["look up", "charge 2"])
    assert len(rig.flow_ids("payment")) == (1 if same else 2)


def test_redrive_of_a_dead_parent_replaces_its_cancelled_child(make_rig: Any) -> None:
    bank = Bank()
    bank.down = False

    @hf.flow
    async def payment() -> int:
        await hf.sleep(10)
        return await hf.step(bank.charge, 1)

    @hf.flow(expiries_max=1)
    async def order() -> int:
        child = hf.step(payment)
        await hf.step(bank.look_up)
        return 10 + await child

    rig = make_rig(app_of(order, payment))
    handle = rig.start(order)
    rig.plan["flows.commit", 2] = "before"
    assert failure(rig, handle).state == "DEAD"
    assert rig.result(handle.redrive()) == 11
    assert bank.calls.count("charge 1") == 1


def test_redrive_repeats_all_branches_that_failed(make_rig: Any) -> None:
    bank = Bank()

    @hf.flow
    async def order() -> list[int]:
        first = await hf.step(bank.look_up)
        return [first, *await asyncio.gather(hf.step(bank.charge, 1), hf.step(bank.charge, 2))]

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    failure(rig, handle)
    bank.down = False
    assert rig.result(handle.redrive()) == [1, 1, 2]
    assert bank.calls.count("look up") == 1


def test_step_failures_of_a_task_group_end_the_flow_and_are_redriven(make_rig: Any) -> None:
    bank = Bank()

    async def charge(n: int) -> int:
        return await hf.step(bank.charge, n)

    @hf.flow
    async def order() -> int:
        async with asyncio.TaskGroup() as group:
            branches = [group.create_task(charge(n)) for n in (1, 2)]
        return sum(branch.result() for branch in branches)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    error = failure(rig, handle)
    assert (error.code, error.step, handle.status().failures) == ("step_failed", "Bank.charge", 0)
    bank.down = False
    assert rig.result(handle.redrive()) == 3


def test_redrive_keeps_a_failure_that_the_code_caught(make_rig: Any) -> None:
    bank = Bank()

    @hf.flow
    async def order() -> int:
        try:
            return await hf.step(bank.charge, 1)
        except hf.StepFailed:
            return await hf.step(bank.charge, 2)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    failure(rig, handle)
    bank.down = False
    assert rig.result(handle.redrive()) == 2


def test_redrive_after_compensations_does_not_repeat_former_runs(make_rig: Any) -> None:
    bank = Bank()

    @hf.flow
    async def order(run: int = 1) -> int:
        bank.calls.append(f"run {run}")
        if run < 3:
            hf.again(run + 1)
        hf.undo(bank.refund)
        return await hf.step(bank.charge, run)

    rig = make_rig(app_of(order))
    handle = rig.start(order.options(key="o-1"))
    failure(rig, handle)
    bank.down = False
    bank.calls.clear()
    again = handle.redrive()
    assert rig.result(again) == 3
    assert set(bank.calls) == {"run 3", "charge 3"}
    assert rig.start(order.options(key="o-1")).id == again.id


def test_fork_of_a_redriven_flow_takes_the_repeated_outcome(make_rig: Any) -> None:
    bank = Bank()

    @hf.flow
    async def order() -> int:
        return await hf.step(bank.charge, 1)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    failure(rig, handle)
    bank.down = False
    handle.redrive()
    assert rig.result(handle) == 1
    assert rig.result(handle.fork("copy")) == 1
    assert len(bank.calls) == 2
