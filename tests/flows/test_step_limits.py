"""`timeout_s` of steps: it limits every kind of coroutine, and the clean-up ends first."""

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from tests.flows.test_steps import app_of, failure


def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args)

    return call


@pytest.mark.parametrize("wrap", [wrapped, lambda fn: fn], ids=["wrapped", "async def"])
def test_timeout_limits_a_coroutine_behind_a_plain_wrapper(make_rig: Any, wrap: Any) -> None:
    ended: list[str] = []

    async def slow() -> str:
        try:
            await asyncio.sleep(20)
        finally:
            ended.append("cleaned up")
        return "late"

    @hf.flow
    async def order() -> str:
        return await hf.step(hf.options(wrap(slow), timeout_s=0.1, name="slow"))

    rig = make_rig(app_of(order))
    began = time.monotonic()
    error = failure(rig, rig.start(order))
    assert time.monotonic() - began < 10
    assert (error.code, error.error_type) == ("step_failed", "StepTimeout")
    assert ended == ["cleaned up"]


def test_timeout_counts_the_call_of_the_wrapper(make_rig: Any) -> None:
    async def quick() -> str:
        await asyncio.sleep(0.4)
        return "late"

    def slow_wrapper() -> Any:
        time.sleep(0.4)
        return quick()

    @hf.flow
    async def order() -> str:
        return await hf.step(hf.options(slow_wrapper, timeout_s=0.6, name="slow"))

    rig = make_rig(app_of(order))
    assert failure(rig, rig.start(order)).error_type == "StepTimeout"


def test_wrapped_coroutine_within_its_limit_returns_its_value(make_rig: Any) -> None:
    async def quick(n: int) -> int:
        await asyncio.sleep(0.01)
        return n

    @hf.flow
    async def order() -> int:
        return await hf.step(hf.options(wrapped(quick), timeout_s=20, name="quick"), 5)

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 5


@pytest.mark.parametrize("wrap", [wrapped, lambda fn: fn], ids=["wrapped", "async def"])
def test_clean_up_of_a_timed_out_attempt_ends_before_the_next_one(make_rig: Any, wrap: Any) -> None:
    seen: list[str] = []

    async def slow() -> str:
        attempt = hf.current_step().attempt
        seen.append(f"begin {attempt}")
        try:
            await asyncio.sleep(20)
        finally:
            await asyncio.sleep(0.1)
            seen.append(f"end {attempt}")
        return "late"

    @hf.flow
    async def order() -> str:
        options = hf.options(wrap(slow), attempts=2, timeout_s=0.1, backoff_s=0.001, name="slow")
        try:
            return await hf.step(options)
        except hf.StepFailed:
            seen.append("flow")
            return "failed"

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == "failed"
    assert [one for one in seen if one != "flow"] == ["begin 1", "end 1", "begin 2", "end 2"]
    assert seen[-1] == "flow"


def test_cancel_interrupts_the_clean_up_of_no_timed_out_attempt(make_rig: Any) -> None:
    seen: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            handle.cancel()
            await asyncio.sleep(0.3)
            seen.append("cleaned up")

    @hf.flow
    async def order() -> None:
        await hf.step(hf.options(slow, attempts=3, timeout_s=0.05, name="slow"))

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert failure(rig, handle).state == "CANCELLED"
    assert seen == ["cleaned up"]
