"""Flows in flight when their code changes: inserted, removed and renamed steps, changed arguments, and resuming."""

from typing import Any

import pytest

import holdfast as hf
from tests.flows.test_steps import app_of, double, labels


def is_parked(handle: Any) -> bool:
    return bool(handle.status().state == "PARKED")


def old_flow() -> Any:
    @hf.flow
    async def order(n: int) -> list[int]:
        first = await hf.step(double, n)
        await hf.sleep(60)
        return [first, await hf.step(double, 10)]

    return order


def start_old(make_rig: Any) -> Any:
    """A flow of the old code that sleeps after its first step."""
    order = old_flow()
    rig = make_rig(app_of(order))
    handle = rig.start(order, 1)
    rig.run_one()
    assert handle.status().state == "WAITING"
    return handle


def changed_arguments() -> Any:
    @hf.flow
    async def order(n: int) -> list[int]:
        first = await hf.step(double, n + 1)
        await hf.sleep(60)
        return [first]

    return order


def test_step_inserted_by_a_deploy_runs(make_rig: Any) -> None:
    handle = start_old(make_rig)

    @hf.flow
    async def order(n: int) -> list[int]:
        new = await hf.step(hf.options(double, name="new"), 7)
        first = await hf.step(double, n)
        await hf.sleep(60)
        return [new, first]

    assert make_rig(app_of(order)).result(handle) == [14, 2]


def test_step_removed_by_a_deploy_does_not_run(make_rig: Any) -> None:
    handle = start_old(make_rig)

    @hf.flow
    async def order(n: int) -> list[int]:
        await hf.sleep(60)
        return []

    assert make_rig(app_of(order)).result(handle) == []
    assert labels(handle) == ["double#1", "hf.sleep#1"]


def test_step_renamed_by_a_deploy_runs_under_its_new_name(make_rig: Any) -> None:
    handle = start_old(make_rig)

    @hf.flow
    async def order(n: int) -> list[int]:
        first = await hf.step(hf.options(double, name="twice"), n)
        await hf.sleep(60)
        return [first]

    assert make_rig(app_of(order)).result(handle) == [2]
    assert "twice#1" in labels(handle)


def test_step_with_changed_arguments_parks_the_flow(make_rig: Any) -> None:
    handle = start_old(make_rig)
    rig = make_rig(app_of(changed_arguments()))
    rig.run(lambda: is_parked(handle))
    assert handle.status().step == "double#1"
    [blocker] = handle.why()
    assert blocker["code"] == "replay_diverged"
    assert "double#1" in blocker["text"]
    assert "resume" in blocker["action"]


def test_flow_arguments_that_no_longer_fit_park_the_flow(make_rig: Any) -> None:
    handle = start_old(make_rig)

    @hf.flow
    async def order(n: int, more: str) -> list[int]:
        return []

    rig = make_rig(app_of(order))
    rig.run(lambda: is_parked(handle))
    assert "arguments do not fit" in handle.status().error


def test_resume_runs_a_parked_flow_again(make_rig: Any) -> None:
    handle = start_old(make_rig)
    rig = make_rig(app_of(changed_arguments()))
    rig.run(lambda: is_parked(handle))
    assert handle.resume() is True
    assert handle.resume() is False
    assert make_rig(app_of(old_flow())).result(handle) == [2, 20]


def test_resume_parked_by_other_code_happens_once(make_rig: Any) -> None:
    handle = start_old(make_rig)
    rig = make_rig(app_of(changed_arguments()))
    rig.run(lambda: is_parked(handle))
    code = rig.codes["flow:order"].code_version
    rig.resume_parked({"order": code})
    assert is_parked(handle)
    rig.resume_parked({"another": "other"})
    assert is_parked(handle)
    rig.resume_parked({"order": "other"})
    assert handle.status().state == "RUNNING"


def test_cancel_ends_a_parked_flow(make_rig: Any) -> None:
    handle = start_old(make_rig)
    rig = make_rig(app_of(changed_arguments()))
    rig.run(lambda: is_parked(handle))
    assert handle.cancel() is True
    assert handle.cancel() is False
    assert handle.status().state == "CANCELLED"


def test_cancel_ends_a_flow_that_parked_after_its_cancellation(make_rig: Any) -> None:
    handle = start_old(make_rig)
    assert handle.cancel() is True
    rig = make_rig(app_of(changed_arguments()))
    rig.run(lambda: is_parked(handle))
    assert handle.cancel() is True
    with pytest.raises(hf.FlowFailed):
        handle.result(timeout=0)
