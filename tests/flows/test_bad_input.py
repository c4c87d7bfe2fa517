"""Bad input to flows: an error of one line with the remedy, and nothing is lost."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.config import MESSAGE_BYTES_MAX
from holdfast.errors import Invalid
from tests.flows.test_steps import app_of, double, failure


@pytest.mark.parametrize(
    "call",
    [
        lambda: hf.step(double, 1),
        lambda: hf.sleep(1),
        lambda: hf.undo(double, 1),
        hf.now,
        lambda: hf.publish("a", 1),
    ],
)
def test_step_outside_a_flow_is_refused(call: Any) -> None:
    with pytest.raises(Invalid, match=r"outside a flow; start the flow with rt\.start"):
        call()


def test_step_inside_a_step_is_refused(make_rig: Any) -> None:
    def outer() -> None:
        hf.step(double, 1)

    @hf.flow
    async def order() -> None:
        await hf.step(outer)

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert error.error_type == "Invalid"
    assert "inside a step; call it in the code of the flow" in error.error


def test_step_result_that_cannot_be_stored_is_refused(make_rig: Any) -> None:
    def unstorable() -> Any:
        return object()

    @hf.flow
    async def order() -> None:
        await hf.step(hf.options(unstorable, attempts=3))

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert error.error_type == "BadStepResult"
    assert "cannot be stored" in error.error


def test_step_result_over_the_value_bound_is_refused(make_rig: Any) -> None:
    def huge() -> bytes:
        return bytes(MESSAGE_BYTES_MAX + 1)

    @hf.flow
    async def order() -> None:
        await hf.step(huge)

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert "too large" in error.error
    assert str(MESSAGE_BYTES_MAX) in error.error


def test_flow_result_that_cannot_be_stored_fails_the_flow(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> Any:
        return object()

    rig = make_rig(app_of(order))
    assert failure(rig, rig.start(order)).code == "raised"


def test_start_of_an_undeclared_flow_is_refused(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        return None

    @hf.flow
    async def other() -> None:
        return None

    rig = make_rig(app_of(order))
    with pytest.raises(Invalid, match="name it in App"):
        rig.start(other)


def test_start_with_wrong_arguments_is_refused(make_rig: Any) -> None:
    @hf.flow
    async def order(n: int) -> None:
        return None

    rig = make_rig(app_of(order))
    for args in ((), ("text",), (1, 2), (object(),)):
        with pytest.raises(Invalid, match="flow arguments"):
            rig.start(order, *args)


def test_flow_after_a_deploy_without_it_waits(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        return await hf.step(double, 1)

    @hf.flow
    async def other() -> None:
        return None

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert handle.status().state == "RUNNING"
    assert [blocker["code"] for blocker in handle.why()] == ["waits_for_worker"]
    assert rig.result(handle) == 2


def test_two_flows_with_one_name_are_refused() -> None:
    @hf.flow(name="order")
    async def first() -> None:
        return None

    @hf.flow(name="order")
    async def second() -> None:
        return None

    with pytest.raises(Invalid, match="two flows have this name"):
        app_of(first, second)


def test_future_of_another_loop_is_refused(make_rig: Any) -> None:
    loop = asyncio.new_event_loop()
    foreign: asyncio.Future[int] = loop.create_future()
    loop.close()

    @hf.flow(attempts=1)
    async def order() -> None:
        await asyncio.gather(hf.step(double, 1), wait_foreign())

    async def wait_foreign() -> None:
        await foreign

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    error = failure(rig, handle)
    assert "call the function with hf.step" in error.error


def test_wait_for_a_future_of_no_step_does_not_suspend_the_flow(make_rig: Any) -> None:
    import threading

    @hf.flow
    async def order() -> int:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        timer = threading.Timer(0.01, loop.call_soon_threadsafe, (future.set_result, 5))
        timer.start()
        return await future + await hf.step(double, 1)

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 7


def test_input_output_in_the_code_of_a_flow_is_refused(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    rig = make_rig(app_of(order))
    assert "call the function with hf.step" in failure(rig, rig.start(order)).error


def test_options_refuse_reserved_names_and_bad_numbers() -> None:
    with pytest.raises(Invalid, match="reserved"):
        hf.options(double, name="hf.step")
    with pytest.raises(Invalid, match="attempts"):
        hf.options(double, attempts=0)
    with pytest.raises(Invalid, match="retry_on"):
        hf.options(double, retry_on=5)  # type: ignore[call-overload]


def test_flow_that_is_no_coroutine_function_is_refused() -> None:
    with pytest.raises(Invalid, match="async def"):
        hf.flow(double)  # type: ignore[call-overload]


@hf.task
def undeclared_task() -> int:
    return 1


@hf.flow
async def undeclared_flow() -> int:
    return 1


@hf.effect("undeclared")
async def undeclared_effect() -> int:
    return 1


@pytest.mark.parametrize("child", [undeclared_task, undeclared_flow, undeclared_effect])
def test_step_with_an_undeclared_child_is_refused(make_rig: Any, child: Any) -> None:
    """No worker of the app would run it."""

    @hf.flow(attempts=1)
    async def order() -> int:
        return await hf.step(child)

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order)).error
    assert f"unknown to the app; name it in App({child.__class__.__name__.lower()}s=" in error
