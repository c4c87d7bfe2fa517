"""Bad input to flows: an error of one line with the remedy, and nothing is lost."""

import asyncio
import functools
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.config import MESSAGE_BYTES_MAX
from holdfast.errors import Invalid
from tests.flows.test_steps import app_of, double, failure
from tests.process.watch import until


class Receipted(hf.Event):
    cents: int


class Undeclared(hf.Event):
    cents: int


CLOSED_LOOP = asyncio.new_event_loop()
CLOSED_LOOP.close()


def unstorable() -> Any:
    return object()


def too_large() -> bytes:
    return bytes(MESSAGE_BYTES_MAX + 1)


def says_int() -> int:
    return "text"  # type: ignore[return-value]


def step_in_a_thread() -> None:
    hf.step(double, 1)


async def step_in_a_coroutine() -> None:
    await hf.step(double, 1)


async def cannot_undo() -> None:
    raise ConnectionError("the bank is down")


async def unnamed_lambdas() -> None:
    await hf.step(lambda: 1)
    await hf.step(lambda: 2)


async def two_lambdas_with_one_name() -> None:
    await hf.step(hf.options(lambda: 1, name="one"))
    await hf.step(hf.options(lambda: 2, name="one"))


async def unstorable_step_result() -> None:
    await hf.step(hf.options(unstorable, attempts=3))


async def unstorable_flow_result() -> Any:
    return object()


async def unstorable_published_value() -> None:
    hf.publish("status", object())


async def step_result_over_the_bound() -> None:
    await hf.step(too_large)


async def flow_result_over_the_bound() -> bytes:
    return too_large()


async def step_result_of_another_type() -> None:
    await hf.step(hf.options(says_int, attempts=3))


async def step_inside_a_step() -> None:
    await hf.step(step_in_a_thread)


async def step_inside_an_async_step() -> None:
    await hf.step(step_in_a_coroutine)


async def receive_of_an_undeclared_type() -> None:
    await hf.receive(Undeclared)


async def foreign_future_in_a_branch() -> None:
    async def wait() -> int:
        foreign: asyncio.Future[int] = CLOSED_LOOP.create_future()
        return await foreign

    await asyncio.gather(hf.step(double, 2), wait())


async def socket_in_the_flow() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def subprocess_in_the_flow() -> None:
    await asyncio.create_subprocess_exec("true")


async def step_in_another_thread() -> None:
    await asyncio.to_thread(hf.step, double, 1)


def exit_process() -> None:
    sys.exit(3)


async def exit_process_async() -> None:
    raise KeyboardInterrupt


async def exit_in_a_step() -> None:
    await hf.step(exit_process)


async def exit_in_an_async_step() -> None:
    await hf.step(exit_process_async)


async def exit_in_the_flow() -> None:
    sys.exit(3)


async def exit_in_a_branch() -> None:
    await asyncio.gather(hf.step(double, 2), exit_in_the_flow())


NAME_IT = "name it with hf.options(fn, name=…)"
PLAIN_DATA = "use plain data, dataclasses, msgspec structs or pydantic models"
OUTSIDE = "keep large data outside and store a reference to it"
CALL_IN_FLOW = "call it in the code of the flow"
CALL_WITH_STEP = "call the function with hf.step"

# The code of a flow, the type of its error, the remedy in the text.
IN_A_FLOW: list[tuple[Callable[[], Awaitable[Any]], str, str]] = [
    (unnamed_lambdas, "Invalid", NAME_IT),
    (two_lambdas_with_one_name, "Invalid", "name one with hf.options(fn, name=…)"),
    (unstorable_step_result, "BadStepResult", PLAIN_DATA),
    (unstorable_flow_result, "BadStepResult", PLAIN_DATA),
    (unstorable_published_value, "BadStepResult", PLAIN_DATA),
    (step_result_of_another_type, "BadStepResult", "as the annotation declares"),
    (step_result_over_the_bound, "StepResultTooLarge", OUTSIDE),
    (flow_result_over_the_bound, "StepResultTooLarge", OUTSIDE),
    (step_inside_a_step, "Invalid", CALL_IN_FLOW),
    (step_inside_an_async_step, "Invalid", CALL_IN_FLOW),
    (step_in_another_thread, "Invalid", CALL_IN_FLOW),
    (receive_of_an_undeclared_type, "Invalid", "name it in App(events=…)"),
    (foreign_future_in_a_branch, "RuntimeError", CALL_WITH_STEP),
    (socket_in_the_flow, "Invalid", CALL_WITH_STEP),
    (subprocess_in_the_flow, "Invalid", CALL_WITH_STEP),
    (exit_in_a_step, "HandlerExited", "tried to exit its process"),
    (exit_in_an_async_step, "HandlerExited", "tried to exit its process"),
    (exit_in_the_flow, "FlowExited", "return from the function instead"),
    (exit_in_a_branch, "FlowExited", "return from the function instead"),
]


@pytest.mark.parametrize(
    ("code", "error_type", "remedy"), IN_A_FLOW, ids=[row[0].__name__ for row in IN_A_FLOW]
)
def test_error_in_a_flow_is_one_line_with_the_remedy(
    make_rig: Any, code: Any, error_type: str, remedy: str
) -> None:
    @hf.flow(attempts=1)
    async def order() -> Any:
        await hf.step(double, 1)
        return await code()

    rig = make_rig(app_of(order, events=[Receipted]))
    handle = rig.start(order)
    error = failure(rig, handle)
    assert (error.state, error.error_type) == ("FAILED", error_type)
    assert remedy in error.error
    assert "\n" not in str(error)
    first, *others = handle.steps()
    assert (first.name, first.value) == ("double", 2)
    # A result that cannot be stored is not repeated.
    assert all(step.attempts == 1 for step in others)


def test_result_that_was_not_awaited_is_named_in_the_error(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> int:
        return hf.step(double, 1)  # type: ignore[return-value]

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert (error.code, error.error_type) == ("raised", "BadStepResult")
    assert "it was not awaited; write await before it" in error.error


OUTSIDE_A_FLOW: list[Callable[[], Any]] = [
    lambda: hf.step(double, 1),
    lambda: hf.sleep(1),
    lambda: hf.receive(Receipted),
    lambda: hf.undo(double, 1),
    lambda: hf.publish("a", 1),
    lambda: hf.again(1),
    hf.now,
    hf.cancelled,
]


@pytest.mark.parametrize("call", OUTSIDE_A_FLOW)
def test_step_outside_a_flow_is_refused(call: Any) -> None:
    with pytest.raises(Invalid, match=r"outside a flow; start the flow with rt\.start"):
        call()


def named(name: str) -> hf.Flow[[], None]:
    @hf.flow(name=name, every="0 3 * * *")
    async def order() -> None:
        return None

    return order


def plain(name: str) -> hf.Flow[[], None]:
    @hf.flow(name=name)
    async def order() -> None:
        return None

    return order


def task_named(name: str) -> hf.Task[[], None]:
    @hf.task(name=name, every="0 4 * * *")
    def invoice() -> None:
        return None

    return invoice


APPS: list[tuple[Callable[[], hf.App], str]] = [
    (
        lambda: hf.App("shop", flows=[named("a")], tasks=[task_named("a")]),
        "two schedules have this name; give one function another name=",
    ),
    (
        lambda: hf.App("shop", flows=[plain("a"), plain("a")]),
        "two flows have this name; give one another name=",
    ),
]


@pytest.mark.parametrize(("build", "remedy"), APPS)
def test_app_with_one_name_twice_is_refused(build: Any, remedy: str) -> None:
    with pytest.raises(Invalid) as caught:
        build()
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call_double",
    [lambda n: hf.step(double, n), lambda n: hf.step(functools.partial(double, n))],
    ids=["function", "partial"],
)
def test_changed_arguments_park_the_flow_with_the_remedy(make_rig: Any, call_double: Any) -> None:
    argument = [1]

    @hf.flow
    async def order() -> int:
        first: int = await call_double(argument[0])
        await hf.sleep(1)
        return first

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run(lambda: handle.status().state == "WAITING")
    argument[0] = 2
    rig.run(lambda: handle.status().state == "PARKED")
    [blocker] = handle.why()
    assert blocker["code"] == "replay_diverged"
    assert "double#1" in blocker["text"]
    assert "asks for the recorded steps of a flow" in blocker["action"]
    argument[0] = 1
    assert handle.resume()
    assert rig.result(handle) == 2


def test_send_to_an_ended_flow_names_the_remedy_and_keeps_its_inbox(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        return await hf.step(double, 1)

    rig = make_rig(app_of(order, events=[Receipted]))
    handle = rig.start(order)
    handle.send(Receipted(1), key="early")
    rig.result(handle)
    with pytest.raises(Invalid, match="the flow has ended; start a new one, or redrive it"):
        handle.send(Receipted(2))
    assert handle.send(Receipted(1), key="early") == 1
    assert handle.events() == [("Receipted", {"cents": 1})]
    with pytest.raises(Invalid, match="name it in events="):
        handle.send(Undeclared(1))


def test_undo_that_fails_is_recorded_and_the_flow_ends(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        hf.undo(hf.options(cannot_undo, backoff_s=0.001))
        raise ValueError("no stock")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).error == "ValueError: no stock"
    [undo] = handle.steps()
    assert (undo.name, undo.code, undo.attempts) == ("undo:cannot_undo", "undo_failed", 5)
    assert undo.error == "the bank is down"


def test_start_of_an_undeclared_flow_is_refused(make_rig: Any) -> None:
    rig = make_rig(app_of(plain("order")))
    with pytest.raises(Invalid, match="name it in App"):
        rig.start(plain("other"))


def test_start_with_wrong_arguments_is_refused(make_rig: Any) -> None:
    @hf.flow
    async def order(n: int) -> None:
        return None

    rig = make_rig(app_of(order))
    for args in ((), ("text",), (1, 2), (object(),)):
        with pytest.raises(Invalid, match="flow arguments"):
            rig.start(order, *args)


def test_flow_that_no_worker_declares_waits(tmp_path: Path) -> None:
    @hf.flow
    async def order() -> int:
        await hf.sleep(0.01)
        return await hf.step(double, 1)

    with app_of(order).open(str(tmp_path), roles=()) as rt:
        run = rt.start(order)
    with app_of(plain("other")).open(str(tmp_path)) as rt:
        other = rt.flow(run.id)
        until(lambda: other.why()[0]["code"] == "no_worker_for_flow", "the flow has no worker")
        assert other.why()[0]["action"] == "start a worker whose app declares it"
    with app_of(order).open(str(tmp_path)) as rt:
        assert rt.flow(run.id).result(timeout=60) == 2


@hf.task(queue="slow")
def slow_task() -> None: ...


@hf.flow(queue="slow")
async def slow_flow() -> None: ...


@pytest.mark.parametrize("kind", ["task", "flow"])
def test_child_that_no_worker_declares_is_named_by_why(kind: str, tmp_path: Path) -> None:
    child: Any = slow_task if kind == "task" else slow_flow

    @hf.flow
    async def order() -> None:
        await hf.step(child)

    flows = [order] if kind == "task" else [order, slow_flow]
    starter = hf.App("flows", flows=flows, tasks=[slow_task])
    with starter.open(str(tmp_path), queues=["default"]) as rt:
        run = rt.start(order)
        until(lambda: run.status().state == "WAITING", "the flow waits")
    with app_of(order).open(str(tmp_path), queues=["slow"]) as rt:
        other = rt.flow(run.id)
        code = f"no_worker_for_{kind}"
        until(lambda: [one["code"] for one in other.why()] == [code], "the child has no worker")
        assert other.why()[0]["text"].endswith(f"declares the {kind} of step {child.name}#1")


def test_wait_for_a_future_of_no_step_does_not_suspend_the_flow(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        timer = threading.Timer(0.01, loop.call_soon_threadsafe, (future.set_result, 5))
        timer.start()
        return await future + await hf.step(double, 1)

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 7


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
