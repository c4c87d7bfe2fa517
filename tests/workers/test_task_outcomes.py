"""Outcomes of an attempt for any behaviour of the task code. Other tasks are not affected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import MS
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX, MESSAGE_BYTES_MAX
from tests.workers.task_rig import TaskRig, open_task_rig

MODULES = ("holdfast.workers.tasks.attempt", "holdfast.workers.tasks.worker")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Wordless(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Odd(hf.Refused):
    code = "odd"


class Beyond(BaseException):
    pass


def plain(error: BaseException, **options: Any) -> hf.Task[[], None]:
    @hf.task(**{"attempts": 1, **options})
    def raising() -> None:
        raise error

    return raising


def coroutine(error: BaseException, **options: Any) -> hf.Task[[], Any]:
    @hf.task(**{"attempts": 1, **options})
    async def raising() -> None:
        await asyncio.sleep(0)
        raise error

    return raising


def returning_function(value: Any, hint: Any = Any) -> hf.Task[[], Any]:
    def fn() -> Any:
        return value

    fn.__annotations__["return"] = hint
    return hf.task(fn)


@hf.task
def well() -> str:
    return "well"


@hf.task
async def also_well() -> str:
    return "well"


def run_to_end(rig: TaskRig, task: hf.Task[[], Any]) -> Any:
    """Run the task and then two other tasks with the same worker. Return the status of the first."""
    handle = rig.rt.submit(task)
    worker = rig.worker(concurrency=1)
    rig.step_until(handle.done, "its end", worker, tick_ns=10 * MS)
    after = [rig.rt.submit(well), rig.rt.submit(also_well)]
    rig.step_until(lambda: all(one.done() for one in after), "the next", worker)
    assert [one.result(0) for one in after] == ["well", "well"]
    assert worker.failure is None
    return handle.status()


@pytest.mark.parametrize("kind", [plain, coroutine])
@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (ValueError("no luck"), "handler_error", "ValueError: no luck"),
        (ValueError(), "handler_error", "ValueError: "),
        (ValueError("half \ud800 a pair"), "handler_error", "ValueError: half ? a pair"),
        (ValueError("nul \x00"), "handler_error", "ValueError: nul \x00"),
        (Speechless(), "handler_error", "Speechless: (its text could not be had)"),
        (Wordless(), "handler_error", "Wordless: (its text could not be had)"),
        (Odd(page=3), "odd", "odd: page=3"),
        (KeyboardInterrupt(), "exited", "KeyboardInterrupt"),
        (SystemExit(3), "exited", "SystemExit"),
        (SystemExit("words"), "exited", "SystemExit"),
        (GeneratorExit(), "exited", "GeneratorExit"),
        (asyncio.CancelledError(), "exited", "CancelledError"),
        (Beyond(), "exited", "Beyond"),
        (RecursionError("deep"), "handler_error", "RecursionError: deep"),
        (MemoryError("much"), "handler_error", "MemoryError: much"),
    ],
)
def test_any_raised_error_fails_the_task_and_is_reported(
    kind: Callable[..., hf.Task[[], Any]], error: BaseException, reason: str, text: str
) -> None:
    task = kind(error)
    with open_task_rig(task, well, also_well) as rig:
        status = run_to_end(rig, task)
        assert (status.state, status.reason, status.failures) == ("FAILED", reason, 1)
        assert text in status.error


def test_task_error_text_is_truncated() -> None:
    task = plain(ValueError("x" * 100_000))
    with open_task_rig(task, well, also_well) as rig:
        assert len(run_to_end(rig, task).error) == ERROR_TEXT_CHARS_MAX


def test_task_error_code_is_truncated() -> None:
    long = type("Long", (hf.Refused,), {"code": "c" * 1_000})
    task = plain(long())
    with open_task_rig(task, well, also_well) as rig:
        assert run_to_end(rig, task).reason == "c" * ERROR_CODE_CHARS_MAX


def test_failed_task_is_retried_until_its_attempts_are_exhausted() -> None:
    task = plain(ValueError("again"), attempts=4, backoff_s=0.001)
    with open_task_rig(task, well, also_well) as rig:
        status = run_to_end(rig, task)
        assert (status.state, status.failures, status.attempt) == ("FAILED", 4, 4)


def test_refused_task_is_not_retried() -> None:
    task = plain(hf.Refused(page=0), attempts=4)
    with open_task_rig(task, well, also_well) as rig:
        status = run_to_end(rig, task)
        assert (status.state, status.failures, status.attempt) == ("FAILED", 1, 1)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (object(), Any),
        ("\ud800", Any),
        (1 << 70, Any),
        (b"x" * MESSAGE_BYTES_MAX, Any),
        ("text", int),
        (None, int),
        ({"a": "b"}, dict[str, int]),
        (1.5, int),
        (lambda: 1, Any),
        ({(1, 2): 3}, dict[str, int]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_unstorable_or_mistyped_result_fails_without_retry(value: Any, hint: Any) -> None:
    task = returning_function(value, hint)
    with open_task_rig(task, well, also_well) as rig:
        status = run_to_end(rig, task)
        assert (status.state, status.reason, status.attempt) == ("FAILED", "bad_result", 1)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (None, Any, None),
        (None, None, None),
        ((1, 2), tuple[int, int], (1, 2)),
        ((1, 2), Any, [1, 2]),
        ({3, 4}, set[int], {3, 4}),
        (b"x" * 100_000, bytes, b"x" * 100_000),
        ("ä" * 1_000, str, "ä" * 1_000),
        (1, float, 1.0),
        (float("inf"), float, float("inf")),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_result_is_returned_in_its_declared_type(value: Any, hint: Any, expected: Any) -> None:
    task = returning_function(value, hint)
    with open_task_rig(task) as rig:
        handle = rig.rt.submit(task)
        rig.step_until(handle.done, "its end", rig.worker())
        found = handle.result(0)
        assert (found, type(found)) == (expected, type(expected))


def test_blocking_coroutine_is_abandoned_after_its_execution_window() -> None:
    """It blocks the event loop and its coroutines. Plain functions continue to run."""
    import threading

    let_go = threading.Event()
    inside = threading.Event()

    @hf.task(lease_s=1, execution_window_s=2, expiries_max=1)
    async def blocking() -> None:
        inside.set()
        let_go.wait(30)

    with open_task_rig(blocking, well) as rig:
        handle = rig.rt.submit(blocking)
        worker = rig.worker()
        rig.step_until(inside.is_set, "its beginning", worker)
        beside = rig.rt.submit(well)
        rig.step_until(beside.done, "the one beside it", worker, tick_ns=10 * MS)
        rig.step_until(lambda: handle.status().state == "DEAD", "its end", worker, tick_ns=50 * MS)
        let_go.set()
