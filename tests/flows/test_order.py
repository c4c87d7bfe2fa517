"""Positions of steps in branches: a replay gives the same results in the same order."""

import asyncio
from typing import Any

import holdfast as hf
from tests.flows.test_steps import app_of, labels


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
