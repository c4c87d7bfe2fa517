"""Positions of steps in branches: a replay gives the same results in the same order."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from tests.flows.test_steps import app_of, double, failure, labels

# Objects of other sizes between the flow's own ones give these other addresses in each replay.
SCATTERED: list[Any] = []


def scatter() -> None:
    SCATTERED.append([bytearray(len(SCATTERED) % 7 * 64 + 200) for _ in range(50)])
    del SCATTERED[::3]


async def branch(n: int) -> int:
    """A branch whose step has no arguments: a swap is not seen by the digest."""
    found: int = await hf.step(hf.options(next_number, name="next_number"))
    await hf.sleep(1 + n % 2)
    return 100 * n + found


NUMBERS: list[int] = []


def next_number() -> int:
    NUMBERS.append(len(NUMBERS))
    return NUMBERS[-1]


async def slow(n: int) -> int:
    await asyncio.sleep(0.02 * n)
    return n


def test_gather_numbers_steps_when_they_are_called(make_rig: Any) -> None:
    @hf.flow
    async def order() -> list[int]:
        return list(await asyncio.gather(hf.step(slow, 2), hf.step(slow, 1), hf.step(slow, 0)))

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == [2, 1, 0]
    assert [(s.name, s.occurrence, s.value) for s in handle.steps()] == [
        ("slow", 1, 2),
        ("slow", 2, 1),
        ("slow", 3, 0),
    ]


def test_step_has_its_position_before_it_is_awaited(make_rig: Any) -> None:
    @hf.flow
    async def order() -> list[int]:
        first, second = hf.step(slow, 1), hf.step(slow, 0)
        return [await second, await first]

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == [0, 1]
    assert labels(handle) == ["slow#1", "slow#2"]


def test_as_completed_comes_out_alike_in_a_replay(make_rig: Any) -> None:
    seen: list[list[int]] = []

    @hf.flow
    async def order() -> list[int]:
        steps = [hf.step(slow, n) for n in (3, 1, 2)]
        found = [await done for done in asyncio.as_completed(steps)]
        seen.append(found)
        await hf.sleep(60)
        return found

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == [1, 2, 3]
    assert seen == [[1, 2, 3], [1, 2, 3]]


def test_wait_first_completed_comes_out_alike_in_a_replay(make_rig: Any) -> None:
    seen: list[list[int]] = []

    @hf.flow
    async def order() -> list[int]:
        steps = {hf.step(slow, 3), hf.step(slow, 0)}
        done, left = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        seen.append([step.result() for step in done])
        await hf.sleep(60)
        return [await step for step in left]

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == [3]
    assert set(map(tuple, seen)) == {(0,)}


def test_steps_that_end_together_are_delivered_one_by_one(make_rig: Any) -> None:
    seen: list[int] = []

    async def fast(n: int) -> int:
        return n

    @hf.flow
    async def order() -> int:
        steps = [hf.step(fast, n) for n in range(3)]
        done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        seen.append(len(done))
        await hf.sleep(60)
        return len(done)

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 1
    assert seen == [1, 1]


def test_branches_interleave_alike_in_a_replay(make_rig: Any) -> None:
    seen: list[list[str]] = []

    @hf.flow
    async def order() -> None:
        log: list[str] = []

        async def branch(name: str, delay: int) -> None:
            for n in range(3):
                await hf.step(hf.options(slow, name=name), delay)
                log.append(f"{name}{n}")

        await asyncio.gather(branch("a", 2), branch("b", 1))
        seen.append(log)
        await hf.sleep(60)

    rig = make_rig(app_of(order))
    rig.result(rig.start(order))
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_asyncio_sleep_of_the_code_does_not_keep_the_worker(make_rig: Any) -> None:
    @hf.flow
    async def order() -> str:
        await asyncio.sleep(0.001)
        await hf.sleep(3600)
        return "awake"

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.run_one()
    assert handle.status().state == "WAITING"
    assert rig.result(handle) == "awake"


def test_step_that_the_code_cancelled_is_not_run_again_in_a_replay(make_rig: Any) -> None:
    calls: list[int] = []

    async def counted(n: int) -> int:
        calls.append(n)
        await asyncio.sleep(30 * n)
        return n

    @hf.flow
    async def order() -> int:
        steps = [hf.step(counted, 1), hf.step(counted, 0)]
        done, left = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        for step in left:
            step.cancel()
        await hf.sleep(60)
        return done.pop().result()

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 0
    assert sorted(calls) == [0, 1]


def test_sleep_that_the_code_cancelled_is_no_open_step(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        pause = hf.sleep(3600)
        await hf.step(slow, 0)
        pause.cancel()
        await hf.sleep(60)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    assert [(s.name, s.occurrence) for s in handle.steps() if s.state == "open"] == [
        ("hf.sleep", 2)
    ]
    rig.result(handle)


def outcomes_in_replays(make_rig: Any, body: Callable[[], Any]) -> list[Any]:
    """Run a flow that is replayed three times after its body, and return what each replay of the body found."""
    seen: list[Any] = []

    @hf.flow
    async def order() -> None:
        scatter()
        seen.append(await body())
        for _ in range(3):
            await hf.sleep(60)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.result(handle)
    return seen


@pytest.mark.parametrize("ordered", [list, tuple, lambda made: dict.fromkeys(made).keys()])
def test_coroutines_of_as_completed_start_in_the_order_of_the_call(
    make_rig: Any, ordered: Any
) -> None:
    async def body() -> list[int]:
        NUMBERS.clear()
        return [await done for done in asyncio.as_completed(ordered([branch(n) for n in range(8)]))]

    seen = outcomes_in_replays(make_rig, body)
    assert len(seen) == 4
    assert sorted(seen[0]) == [101 * n for n in range(8)]
    assert seen[1:] == seen[:1] * 3


@pytest.mark.parametrize("make", [iter, set])
def test_coroutines_without_an_order_are_refused_by_as_completed(make_rig: Any, make: Any) -> None:
    @hf.flow
    async def order() -> None:
        coroutines = [branch(n) for n in range(2)]
        try:
            for done in asyncio.as_completed(make(coroutines)):
                await done
        finally:
            for coroutine in coroutines:
                coroutine.close()

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert (error.code, error.error_type) == ("raised", "Invalid")
    assert "give as_completed a list" in str(error.error)


def test_set_of_tasks_has_the_same_order_in_each_replay(make_rig: Any) -> None:
    async def body() -> list[int]:
        made = []
        for n in range(12):
            scatter()
            made.append(asyncio.create_task(branch(n)))
        done, _ = await asyncio.wait(made)
        return [await hf.step(double, task.result() // 100) for task in done]

    seen = outcomes_in_replays(make_rig, body)
    assert sorted(seen[0]) == [2 * n for n in range(12)]
    assert seen[1:] == seen[:1] * 3


def test_set_of_steps_has_the_same_order_in_each_replay(make_rig: Any) -> None:
    async def body() -> list[int]:
        made = []
        for n in range(12):
            scatter()
            made.append(hf.step(double, n))
        done, _ = await asyncio.wait(made)
        return [await hf.step(double, step.result()) for step in done]

    seen = outcomes_in_replays(make_rig, body)
    assert sorted(seen[0]) == [4 * n for n in range(12)]
    assert seen[1:] == seen[:1] * 3


def test_inserted_step_leaves_the_order_of_a_set_of_steps(make_rig: Any) -> None:
    inserted: list[bool] = []

    async def body() -> list[int]:
        if inserted:
            await hf.step(hf.options(double, name="inserted"), 1)
        inserted.append(True)
        done, _ = await asyncio.wait([hf.step(double, n) for n in range(7)])
        return [await hf.step(hf.options(double, name="again"), step.result()) for step in done]

    seen = outcomes_in_replays(make_rig, body)
    assert seen[1:] == seen[:1] * 3


def test_task_group_cancels_its_tasks_in_the_same_order_in_each_replay(make_rig: Any) -> None:
    released: list[int] = []

    async def body() -> list[int]:
        released.clear()

        async def hold(n: int) -> None:
            try:
                await hf.sleep(3600)
            finally:
                released.append(await hf.step(double, n))

        async def fail() -> None:
            await hf.sleep(1)
            raise ValueError

        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for n in range(12):
                    scatter()
                    group.create_task(hold(n))
                group.create_task(fail())
        return list(released)

    seen = outcomes_in_replays(make_rig, body)
    assert sorted(seen[0]) == [2 * n for n in range(12)]
    assert seen[1:] == seen[:1] * 3


def test_name_of_a_task_is_the_same_in_each_replay(make_rig: Any) -> None:
    async def body() -> list[str]:
        made = [asyncio.create_task(branch(n)) for n in range(2)]
        await asyncio.wait(made)
        return [task.get_name() for task in made]

    seen = outcomes_in_replays(make_rig, body)
    assert seen[1:] == seen[:1] * 3
