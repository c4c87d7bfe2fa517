"""Exits of the process and errors of the interpreter in flows and steps: they end the flow, not its worker."""

import asyncio
import sys
from typing import Any

import pytest

import holdfast as hf
from tests.flows.test_generators import Nudged, release
from tests.flows.test_steps import app_of, double, failure

EXITS = [SystemExit, KeyboardInterrupt]


@pytest.mark.parametrize("error", EXITS)
def test_exit_in_a_suspended_flow_closes_the_other_tasks_and_is_logged(
    make_rig: Any, caplog: Any, error: type[BaseException]
) -> None:
    closed: list[str] = []

    async def quits() -> None:
        try:
            await hf.receive(Nudged)
        finally:
            if not closed:
                raise error

    async def waits() -> None:
        try:
            await hf.receive(Nudged)
        finally:
            closed.append("waits")

    @hf.flow
    async def order() -> str:
        await asyncio.gather(quits(), waits())
        return "done"

    rig = make_rig(app_of(order, events=[Nudged]))
    handle = rig.start(order)
    assert rig.run_one()
    assert handle.status().state == "WAITING"
    assert closed == ["waits"]
    assert f"exited: raised='{error.__name__}'" in caplog.text
    handle.send(Nudged(1))
    handle.send(Nudged(2))
    assert rig.result(handle) == "done"


@pytest.mark.parametrize("error", EXITS)
def test_exit_in_a_task_that_is_left_open_does_not_stop_the_compensations(
    make_rig: Any, error: type[BaseException]
) -> None:
    async def quits() -> None:
        try:
            await hf.receive(Nudged)
        finally:
            raise error

    @hf.flow
    async def order() -> None:
        hf.undo(release, 7)
        kept = asyncio.create_task(quits())
        await hf.sleep(1)
        raise ValueError(kept)

    rig = make_rig(app_of(order, events=[Nudged]))
    handle = rig.start(order)
    assert failure(rig, handle).error_type == "ValueError"
    assert [(step.name, step.value) for step in handle.steps()][-1] == ("undo:release", 7)


def test_exit_of_one_suspended_flow_leaves_the_flows_of_its_worker(make_rig: Any) -> None:
    @hf.flow
    async def quits() -> int:
        try:
            return (await hf.receive(Nudged)).n
        finally:
            if not started:
                sys.exit(3)

    @hf.flow
    async def other() -> int:
        await hf.sleep(1)
        return await hf.step(double, 4)

    rig = make_rig(app_of(quits, other, events=[Nudged]))
    started: list[Any] = []
    handles = [rig.start(quits), rig.start(other)]
    rig.run(lambda: all(one.status().state == "WAITING" for one in handles))
    started.extend(handles)
    handles[0].send(Nudged(9))
    assert [rig.result(one) for one in handles] == [9, 8]


def exhaust() -> int:
    return next(iter([]))


async def leave() -> int:
    raise GeneratorExit


@pytest.mark.parametrize(
    ("fn", "error_type"), [(exhaust, "RuntimeError"), (leave, "GeneratorExit")]
)
def test_step_that_raises_an_error_of_the_interpreter_fails(
    make_rig: Any, fn: Any, error_type: str
) -> None:
    @hf.flow
    async def order() -> None:
        await hf.step(fn)

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert (error.code, error.step, error.error_type) == ("step_failed", fn.__name__, error_type)


def test_thread_of_the_code_that_raises_stop_iteration_ends(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        await asyncio.to_thread(exhaust)

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert (error.code, error.error_type) == ("raised", "RuntimeError")
    assert "StopIteration" in error.error


def test_flow_that_raises_generator_exit_fails_with_its_compensations(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        hf.undo(release, 7)
        await hf.step(double, 1)
        raise GeneratorExit

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    error = failure(rig, handle)
    assert (error.code, error.error_type) == ("raised", "FlowExited")
    assert [step.name for step in handle.steps()] == ["double", "undo:release"]
