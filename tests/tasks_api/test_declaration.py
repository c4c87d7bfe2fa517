"""Task declaration: valid functions and options. A task stays callable like its function."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.errors import Invalid
from tests.case_ids import stable_repr

if TYPE_CHECKING:
    from decimal import Decimal

MODULES = ("holdfast.app.tasks",)


@hf.task
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def double(n: int) -> int:
    return 2 * n


def of_unknown_type(n: Decimal) -> None: ...


def test_task_is_callable_like_its_function() -> None:
    assert (add(1), add(1, b=2), add.__name__, add.__doc__) == (2, 3, "add", "Add two numbers.")


def test_task_of_a_coroutine_function_is_awaitable() -> None:
    import asyncio

    assert asyncio.run(hf.task(double)(4)) == 8  # type: ignore[arg-type]


def test_task_name_defaults_to_the_function_name() -> None:
    assert add.name == "add"
    assert hf.task(name="sum")(add.fn).name == "sum"


def test_task_options_in_seconds_are_stored_in_nanoseconds() -> None:
    spec = hf.task(lease_s=0.5, execution_window_s=2, retain_s=3600, backoff_s=0.25)(double).spec
    assert (spec.lease_ns, spec.window_ns) == (S // 2, 2 * S)
    assert (spec.retain_ns, spec.backoff_ns) == (3600 * S, S // 4)


def yields() -> Iterator[int]:
    yield 1


async def yields_too() -> AsyncIterator[int]:
    yield 1


class CallableInstance:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "fn",
    [yields, yields_too, "add", None, 5, of_unknown_type, CallableInstance(), functools.partial(double, 1), dict],
    ids=lambda fn: str(getattr(fn, "__name__", type(fn).__name__)),
)  # fmt: skip
def test_task_rejects_objects_that_are_not_plain_functions(fn: Any) -> None:
    with pytest.raises(Invalid) as caught:
        hf.task(name="work")(fn)
    assert caught.value.what == "task"


@pytest.mark.parametrize(
    "option",
    [
        {"lease_s": 0},
        {"lease_s": -1},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"lease_s": "60"},
        {"lease_s": 1e12},
        {"execution_window_s": 0},
        {"retain_s": -1},
        {"backoff_s": None},
        {"attempts": 0},
        {"attempts": 1.5},
        {"attempts": "3"},
        {"attempts": True},
        {"expiries_max": 0},
        {"priority": 1 << 40},
        {"priority": "high"},
        {"queue": ""},
        {"queue": 5},
        {"queue": "q" * 201},
        {"queue": "half \ud800"},
        {"queue": "nul \x00"},
        {"name": ""},
        {"name": 5},
        {"name": "half \ud800"},
        {"isolation": "fibre"},
        {"isolation": "process"},  # of a coroutine
    ],
    ids=str,
)
def test_task_rejects_an_invalid_option(option: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        hf.task(**option)(double)


def test_isolation_process_requires_a_module_level_function() -> None:
    def local() -> None: ...

    for fn in (local, lambda: None):
        with pytest.raises(Invalid) as caught:
            hf.task(isolation="process", name="work")(fn)
        assert caught.value.what == "isolation"


def test_app_rejects_two_tasks_of_one_name() -> None:
    with pytest.raises(Invalid) as caught:
        hf.App("jobs", tasks=[add, hf.task(name="add")(double)])
    assert caught.value.name == "add"
    assert hf.App("jobs", tasks=[add, add]).tasks == {"add": add}


@pytest.mark.parametrize("wrong", [print, "add", None, add.options(key="k")], ids=stable_repr)
def test_app_rejects_tasks_of_another_type(wrong: Any) -> None:
    with pytest.raises(Invalid):
        hf.App("jobs", tasks=[wrong])


@pytest.mark.parametrize(
    "queues",
    [
        ["mail"],
        [hf.Queue("")],
        [hf.Queue("mail", concurrency=-1)],
        [hf.Queue("mail", per_key="1")],  # type: ignore[arg-type]
        [hf.Queue("mail", concurrency=True)],
        [hf.Queue("mail"), hf.Queue("mail", concurrency=2)],
    ],
    ids=stable_repr,
)
def test_app_rejects_invalid_queues(queues: Any) -> None:
    with pytest.raises(Invalid):
        hf.App("jobs", queues=queues)


@pytest.mark.parametrize("made", [lambda: hf.App("jobs", tasks=[add]), lambda: hf.App("jobs")])
def test_app_with_tasks_has_the_task_role(made: Callable[[], hf.App]) -> None:
    app = made()
    with app.open("memory:") as rt:
        assert ("task" in [role.name for role in rt.roles]) == bool(app.tasks)


def test_current_task_outside_a_task_is_invalid() -> None:
    with pytest.raises(Invalid) as caught:
        hf.current_task()
    assert caught.value.what == "current_task"
