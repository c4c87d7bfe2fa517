"""Steps whose function is a coroutine function: its first attempt is one asyncio task.

The other way, for every other callable, is the reference: both have the same outcomes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from tests.flows.test_steps import app_of

MODULES = ("holdfast.workers.flows.step_runs", "holdfast.workers.flows.activation")

calls: list[int] = []


async def value() -> int:
    return 7


async def awaitable() -> Any:
    return value()


async def fails() -> int:
    raise ValueError("broken")


async def cancels_itself() -> int:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return 1


async def raises_cancelled() -> int:
    raise asyncio.CancelledError


async def exits() -> int:
    raise SystemExit(3)


async def unstorable() -> Any:
    return object()


async def wrong_type() -> int:
    return "text"  # type: ignore[return-value]


async def third_attempt() -> int:
    calls.append(hf.current_step().attempt)
    if len(calls) < 3:
        raise ValueError("not yet")
    return calls[-1]


async def calls_flow() -> None:
    hf.now()


STEPS = [
    value,
    awaitable,
    fails,
    cancels_itself,
    raises_cancelled,
    exits,
    unstorable,
    wrong_type,
    third_attempt,
    calls_flow,
]


def outcome_of(make_rig: Any, fn: Callable[..., Any]) -> Any:
    """The recorded outcome of a step with three attempts."""

    @hf.flow
    async def order() -> Any:
        step = hf.options(fn, name="step", attempts=3, backoff_s=0.001)
        try:
            return await hf.step(step)
        except hf.StepFailed as error:
            return {name: error.fields[name] for name in ("code", "error_type", "attempts")}

    calls.clear()
    rig = make_rig(app_of(order))
    return rig.result(rig.start(order)), list(calls)


@pytest.mark.parametrize("fn", STEPS, ids=lambda fn: fn.__name__)
def test_coroutine_function_has_the_outcome_of_another_callable(make_rig: Any, fn: Any) -> None:
    assert outcome_of(make_rig, fn) == outcome_of(make_rig, functools.partial(fn))


@pytest.mark.parametrize("wrap", [lambda fn: fn, functools.partial], ids=["function", "partial"])
@pytest.mark.parametrize("ends", ["raises", "returns"])
def test_step_that_is_cancelled_ends_its_clean_up(make_rig: Any, wrap: Any, ends: str) -> None:
    seen: list[str] = []

    async def slow() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)
            seen.append("clean")
            if ends == "raises":
                raise
        return 1

    @hf.flow
    async def order() -> str:
        step = hf.step(hf.options(wrap(slow), name="slow"))
        await hf.step(hf.options(value, name="value"))
        step.cancel()
        return "done"

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == "done"
    assert seen == ["clean"]
