"""Cancellation and timeouts of flows."""

import asyncio
import contextlib
import time
from typing import Any

import pytest

import holdfast as hf
from holdfast import failpoints
from holdfast.errors import CommitUnknown
from holdfast.flows.operations import FlowCommit
from holdfast.flows.records import CompensationStarted
from holdfast.ops.verify import find_differences
from tests.flows.test_steps import app_of, double, failure


class Approval(hf.Event):
    by: str


def test_cancel_is_true_once_and_seen_as_cancelled_error(make_rig: Any) -> None:
    seen: list[bool] = []

    @hf.flow
    async def order() -> None:
        try:
            await hf.sleep(3600)
        except asyncio.CancelledError:
            seen.append(hf.cancelled())
            raise

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    assert [handle.cancel(), handle.cancel()] == [True, False]
    error = failure(rig, handle)
    assert (error.state, error.code) == ("CANCELLED", "cancelled")
    assert seen == [True]
    assert handle.cancel() is False


def test_unknown_outcome_of_the_first_commit_of_compensations_is_not_repeated(
    make_rig: Any,
) -> None:
    """A new activation reads whether the commit was applied."""
    undone: list[int] = []
    starts: list[FlowCommit] = []

    def undo_reserve() -> None:
        undone.append(1)

    @hf.flow
    async def order() -> None:
        hf.undo(undo_reserve)
        with contextlib.suppress(asyncio.CancelledError):
            await hf.sleep(3600)

    def lose_the_answer(work: FlowCommit) -> None:
        if any(isinstance(record, CompensationStarted) for record in work.records):
            starts.append(work)
            raise CommitUnknown(why="the answer was lost")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    handle.cancel()
    with failpoints.on("flows.committed", calls=lose_the_answer):
        error = failure(rig, handle)
    assert (error.state, error.code) == ("CANCELLED", "cancelled")
    assert len(starts) == 1
    assert undone == [1]


def test_cancelled_flow_that_asks_for_steps_in_a_loop_ends(make_rig: Any) -> None:
    rounds: list[int] = []

    @hf.flow
    async def order() -> None:
        while True:
            rounds.append(1)
            assert len(rounds) < 10_000, "the loop was not stopped"
            with contextlib.suppress(asyncio.CancelledError):
                await hf.sleep(3600)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    handle.cancel()
    error = failure(rig, handle)
    assert (error.state, error.code) == ("CANCELLED", "cancelled")
    assert len(rounds) < 10_000
    assert "redrive" not in str(error)


def test_cancelled_flow_that_continues_gets_no_further_step(make_rig: Any) -> None:
    calls: list[int] = []

    def counted() -> None:
        calls.append(1)

    @hf.flow
    async def order() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await hf.sleep(3600)
        try:
            await hf.step(counted)
        except asyncio.CancelledError:
            return "stopped"
        return "went on"

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    handle.cancel()
    assert failure(rig, handle).state == "CANCELLED"
    assert calls == []


def test_cancel_runs_compensations(make_rig: Any) -> None:
    undone: list[str] = []

    def take_back(name: str) -> None:
        undone.append(name)

    @hf.flow
    async def order() -> None:
        hf.undo(take_back, "a")
        hf.undo(take_back, "b")
        await hf.sleep(3600)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    handle.cancel()
    assert failure(rig, handle).state == "CANCELLED"
    assert undone == ["b", "a"]


def test_cancel_reaches_a_running_step(make_rig: Any) -> None:
    seen: list[bool] = []

    async def long() -> None:
        handle.cancel()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(hf.current_step().cancelled)

    @hf.flow
    async def order() -> None:
        await hf.step(long)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).state == "CANCELLED"
    assert seen == [True]


def test_cancel_before_the_last_commit_wins_over_completion(make_rig: Any) -> None:
    """The cancellation is recorded before the end, so the flow did not complete."""
    undone: list[int] = []

    def take_back() -> None:
        undone.append(1)

    @hf.flow
    async def order() -> str:
        hf.undo(take_back)
        await hf.step(double, 1)
        caused.append(handle.cancel())
        return "completed"

    caused: list[bool] = []
    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).state == "CANCELLED"
    assert caused[0] is True
    assert undone == [1]
    assert rig.store.read(find_differences) == []


def test_cancel_before_a_failure_is_recorded_wins_over_it(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        hf.undo(double, 1)
        await hf.step(double, 1)
        handle.cancel()
        raise KeyError("own")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).state == "CANCELLED"
    assert rig.store.read(find_differences) == []


def test_cancel_during_backoff_ends_the_flow(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        raise KeyError("own")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    assert handle.status().state == "WAITING"
    assert handle.cancel() is True
    assert failure(rig, handle).state == "CANCELLED"
    assert rig.store.read(find_differences) == []


def test_cancel_of_a_flow_that_no_worker_has_begun(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        await hf.step(double, 1)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert handle.cancel() is True
    assert failure(rig, handle).state == "CANCELLED"
    assert [step.name for step in handle.steps()] == []


def test_timeout_counts_from_start_with_sleeps(make_rig: Any) -> None:
    undone: list[int] = []

    def take_back() -> None:
        undone.append(1)

    @hf.flow(timeout_s=100)
    async def order() -> None:
        hf.undo(take_back)
        await hf.sleep(60)
        await hf.sleep(60)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    error = failure(rig, handle)
    assert (error.state, error.code) == ("FAILED", "timeout")
    assert undone == [1]
    assert [step.name for step in handle.steps() if step.state == "completed"] == [
        "hf.sleep",
        "undo:test_timeout_counts_from_start_with_sleeps.take_back",
    ]


def test_timeout_does_not_reach_a_flow_that_ended(make_rig: Any) -> None:
    @hf.flow(timeout_s=100)
    async def order() -> int:
        await hf.sleep(60)
        return 1

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 1
    rig.pass_time()
    rig.pass_time()
    assert handle.status().state == "COMPLETED"
    assert rig.store.read(find_differences) == []


def test_result_raises_timeout_when_its_own_time_is_over(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        await hf.sleep(3600)

    rig = make_rig(app_of(order))
    with pytest.raises(hf.Timeout):
        rig.start(order).result(timeout=0)


@pytest.mark.parametrize(("close", "state"), [("cancel", "CANCELLED"), ("abandon", "WAITING")])
def test_parent_close_decides_about_a_child_flow(make_rig: Any, close: str, state: str) -> None:
    @hf.flow
    async def child() -> None:
        await hf.sleep(10 * 86_400)

    @hf.flow
    async def order() -> None:
        await hf.step(child.options(parent_close=close))

    rig = make_rig(app_of(order, child))
    handle = rig.start(order)
    rig.run(lambda: rig.is_idle())
    handle.cancel()
    assert failure(rig, handle).state == "CANCELLED"
    [child_id] = rig.flow_ids("child")
    child_handle = rig.handle(child_id)
    rig.run(lambda: rig.is_idle())
    assert child_handle.status().state == state


def test_child_flow_failure_is_a_step_failure(make_rig: Any) -> None:
    def refuse() -> None:
        raise ValueError("full")

    @hf.flow
    async def child() -> None:
        await hf.step(refuse)

    @hf.flow
    async def order() -> list[str]:
        try:
            await hf.step(child)
        except hf.StepFailed as error:
            return [error.step, error.error_type, error.error]
        return []

    rig = make_rig(app_of(order, child))
    assert rig.result(rig.start(order)) == ["child#1", "ValueError", "full"]


def test_child_task_failure_is_a_step_failure(make_rig: Any) -> None:
    @hf.task(attempts=1)
    def invoice(cents: int) -> str:
        raise ValueError("no printer")

    @hf.flow
    async def order() -> list[str]:
        try:
            await hf.step(invoice, 5)
        except hf.StepFailed as error:
            return [error.step, error.error_type]
        return []

    rig = make_rig(app_of(order, tasks=[invoice]))
    assert rig.result(rig.start(order)) == ["invoice#1", "ValueError"]


@pytest.mark.parametrize("cancels", [True, False])
def test_other_tasks_of_the_flow_get_no_step_while_it_compensates(
    make_rig: Any, cancels: bool
) -> None:
    log: list[str] = []

    async def refund() -> None:
        log.append("refund begins")
        await asyncio.sleep(0.3)
        log.append("refund ends")

    def note(text: str) -> None:
        log.append(text)

    @hf.flow
    async def order() -> None:
        hf.undo(refund)

        async def charge_later() -> None:
            try:
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.05)
                        await hf.step(note, "charge")
            finally:
                await hf.step(note, "clean up")

        async def charge_at_event() -> None:
            await asyncio.to_thread(time.sleep, 0.1)
            await hf.step(note, "charge after a thread")

        others = [asyncio.create_task(charge_later()), asyncio.create_task(charge_at_event())]
        await asyncio.sleep(0)
        if cancels:
            await hf.sleep(3600)
        raise hf.StepFailed(
            step="x", code="failed", error_type="E", error="e", attempts=len(others)
        )

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    if cancels:
        handle.cancel()
    error = failure(rig, handle)
    assert error.state == ("CANCELLED" if cancels else "FAILED")
    assert log[-2:] == ["refund begins", "refund ends"]
    assert "clean up" not in log


@pytest.mark.parametrize("ends", ["cancelled", "timeout"])
def test_flow_that_waits_for_no_step_after_its_cancellation_ends_as_cancelled(
    make_rig: Any, ends: str
) -> None:
    @hf.flow(timeout_s=10)
    async def order() -> None:
        hf.undo(double, 1)
        try:
            await hf.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.get_running_loop().create_future()

    rig = make_rig(app_of(order))
    rig.environment.foreign_wait_s = 0.01
    handle = rig.start(order)
    rig.run_one()
    if ends == "cancelled":
        handle.cancel()
    error = failure(rig, handle)
    assert (error.state, error.code) == (
        ("CANCELLED", "cancelled") if ends == "cancelled" else ("FAILED", "timeout")
    )
    assert [step.name for step in handle.steps()] == ["undo:double"]


def test_flow_that_waits_for_no_step_fails_with_the_remedy(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        await asyncio.get_running_loop().create_future()

    rig = make_rig(app_of(order))
    rig.environment.foreign_wait_s = 0.01
    error = failure(rig, rig.start(order))
    assert (error.code, error.error_type) == ("raised", "Invalid")
    assert "use hf.step, hf.sleep or hf.receive" in error.error


@pytest.mark.parametrize("ends", ["cancelled", "timeout"])
def test_step_failure_of_a_child_without_an_error_states_its_end(make_rig: Any, ends: str) -> None:
    @hf.flow(timeout_s=10)
    async def child() -> None:
        await hf.sleep(3600)

    @hf.flow
    async def order() -> list[str]:
        try:
            await hf.step(child)
        except hf.StepFailed as error:
            return [error.error_type, error.error]
        return []

    rig = make_rig(app_of(order, child))
    handle = rig.start(order)
    rig.run_one()
    [child_id] = rig.flow_ids("child")
    if ends == "cancelled":
        rig.handle(child_id).cancel()
    state = "CANCELLED" if ends == "cancelled" else "FAILED"
    assert rig.result(handle) == ["FlowFailed", f"{child_id} is {state}: {ends}"]


@pytest.mark.parametrize("kind", ["step", "sleep", "child"])
def test_cancelled_flow_that_awaits_another_task_ends(make_rig: Any, kind: str) -> None:
    """The step that the other task awaits gets no outcome, so its await ends by the cancellation."""
    seen: list[str] = []

    async def hang() -> None:
        await asyncio.sleep(3600)

    @hf.flow
    async def child() -> None:
        await hf.sleep(3600)

    async def other() -> None:
        try:
            await {"step": lambda: hf.step(hang), "sleep": lambda: hf.sleep(3600)}.get(
                kind, lambda: hf.step(child)
            )()
        except asyncio.CancelledError:
            seen.append("other")
            raise

    @hf.flow
    async def order() -> None:
        hf.undo(double, 1)
        task = asyncio.create_task(other())
        try:
            await hf.receive(Approval)
        except asyncio.CancelledError:
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise

    rig = make_rig(app_of(order, child, events=[Approval]))
    handle = rig.start(order)
    handle.cancel()
    assert failure(rig, handle).state == "CANCELLED"
    assert seen
    assert [step.name for step in handle.steps()] == ["undo:double"]
