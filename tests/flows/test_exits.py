"""Flow code that exits its process while the worker closes it: the worker and the other flows go on."""

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
