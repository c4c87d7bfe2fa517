"""Asynchronous generators in the code of a flow: their `finally` blocks are code of the flow."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest

import holdfast as hf
from tests.flows.test_steps import app_of, double, failure, labels


class Nudged(hf.Event):
    n: int


async def release(n: int) -> int:
    return n


async def refuse(n: int) -> None:
    raise ValueError("refused")


async def numbers(n: int) -> AsyncIterator[int]:
    try:
        for k in range(1, 4):
            yield await hf.step(double, k)
    finally:
        await hf.step(release, n)


def releases(handle: Any) -> list[Any]:
    """The values of the steps `release`, in the order of their calls."""
    steps = [step for step in handle.steps() if step.name == "release"]
    return [step.value for step in sorted(steps, key=lambda step: step.position)]


def test_aclosing_runs_the_steps_of_a_generator_that_is_left_early(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        async with contextlib.aclosing(numbers(1)) as found:
            async for value in found:
                return value
        return 0

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 2
    assert releases(handle) == [1]


@pytest.mark.parametrize("waits", [False, True])
def test_finally_of_a_generator_that_is_left_by_break_runs_its_step(
    make_rig: Any, waits: bool
) -> None:
    @hf.flow
    async def order() -> str:
        async for _ in numbers(3):
            if waits:
                await hf.sleep(1)
            break
        await hf.sleep(1)
        return "done"

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == "done"
    first = ["double#1", "hf.sleep#1"] if waits else ["double#1"]
    # The task that runs the clean-up begins when the code waits.
    assert labels(handle) == [*first, f"hf.sleep#{1 + waits}", "release#1"]


@pytest.mark.parametrize("fails", [False, True])
def test_flow_ends_after_the_clean_up_of_its_generators(make_rig: Any, fails: bool) -> None:
    kept: list[Any] = []

    @hf.flow(attempts=1)
    async def order() -> int:
        made = [numbers(n) for n in range(1, 4)]
        kept.extend(made)
        found = [await anext(one) for one in reversed(made)]
        if fails:
            await hf.step(refuse, 1)
        return sum(found)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    if fails:
        assert failure(rig, handle).code == "step_failed"
    else:
        assert rig.result(handle) == 6
    # In the order of their first iteration.
    assert releases(handle) == [3, 2, 1]


def test_run_ends_with_again_after_the_clean_up_of_its_generators(make_rig: Any) -> None:
    @hf.flow
    async def order(n: int = 1) -> int:
        async for value in numbers(n):
            if n == 1:
                hf.again(2)
            return value
        return 0

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 2
    assert [step.name for step in handle.steps(run=1)] == ["double", "release"]


def test_generators_of_branches_run_their_steps(make_rig: Any) -> None:
    async def branch(n: int) -> None:
        async for _ in numbers(n):
            await hf.sleep(n)
            return

    @hf.flow
    async def order() -> None:
        await asyncio.gather(branch(2), branch(1))
        await hf.sleep(1)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.result(handle)
    assert releases(handle) == [1, 2]


def test_generator_in_a_cycle_is_closed_at_the_end_in_each_replay(make_rig: Any) -> None:
    collects = iter([True, False, True, False])

    @hf.flow
    async def order() -> int:
        cycle: list[Any] = [numbers(1)]
        cycle.append(cycle)
        await anext(cycle[0])
        del cycle
        if next(collects):
            gc.collect()
        alive = numbers(2)
        await anext(alive)
        for _ in range(3):
            await hf.sleep(1)
        return await hf.step(double, 5)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 10
    assert releases(handle) == [2, 1] or releases(handle) == [1, 2]
    ordered = sorted(handle.steps(), key=lambda step: step.position)
    assert [step.name for step in ordered][-2:] == ["release", "release"]


def test_clean_up_of_a_generator_has_the_context_of_its_iteration(make_rig: Any) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    seen: list[str] = []

    async def as_tenant() -> AsyncIterator[int]:
        token = tenant.set("ada")
        try:
            yield 1
        finally:
            seen.append(tenant.get())
            tenant.reset(token)
            await hf.step(release, 1)

    @hf.flow
    async def order() -> str:
        async for _ in as_tenant():
            break
        await hf.step(double, 1)
        return tenant.get()

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == "none"
    assert set(seen) == {"ada"}
    assert releases(handle) == [1]


def test_error_in_the_clean_up_of_a_generator_is_logged(make_rig: Any, caplog: Any) -> None:
    async def broken() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await hf.step(refuse, 1)

    @hf.flow
    async def order() -> int:
        async for _ in broken():
            break
        return 1

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 1
    assert [(step.name, step.state) for step in handle.steps()] == [("refuse", "failed")]
    assert "error of flow code ignored: flow=" in caplog.text
    assert "refused" in caplog.text


@pytest.mark.parametrize("inside", [False, True])
def test_suspension_runs_the_finally_of_a_generator_without_steps(
    make_rig: Any, inside: bool
) -> None:
    seen: list[str] = []

    async def pause() -> None:
        try:
            await hf.receive(Nudged)
        finally:
            seen.append("pause")

    async def waiting() -> AsyncIterator[int]:
        try:
            if inside:
                await pause()
            yield 1
        finally:
            seen.append("closed")
            await hf.step(release, 1)
            seen.append("released")

    @hf.flow
    async def order() -> int:
        async for _ in waiting():
            if not inside:
                await pause()
            seen.append("body")
        return 1

    rig = make_rig(app_of(order, events=[Nudged]))
    handle = rig.start(order)
    rig.run_one()
    assert seen == ["pause", "closed"]
    assert labels(handle) == ["hf.receive#1"]
    handle.send(Nudged(1))
    assert rig.result(handle) == 1
    assert seen == ["pause", "closed", "pause", "body", "closed", "released"]
    assert releases(handle) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("at", ["step", "clean-up", "yield"])
def test_generator_with_a_bare_except_blocks_no_suspension(make_rig: Any, at: str) -> None:
    async def stay() -> None:
        while True:
            try:
                await hf.receive(Nudged)
                return
            except:  # noqa: E722
                continue

    async def stubborn() -> AsyncIterator[int]:
        if at == "step":
            await stay()
        while True:
            try:
                yield 1
                return
            except:  # noqa: E722
                if at == "clean-up":
                    await stay()

    @hf.flow
    async def order() -> int:
        async for _ in stubborn():
            await hf.sleep(1)
        return 5

    rig = make_rig(app_of(order, events=[Nudged]))
    handle = rig.start(order)
    rig.run_one()
    assert handle.status().state == "WAITING"
    handle.send(Nudged(1))
    assert rig.result(handle) == 5
