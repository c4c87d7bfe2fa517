"""Declaring tasks: what is one, what its options may be, and that it is still a function."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.errors import Invalid
from tests.naming import named

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


def test_a_task_can_still_be_called_as_the_function_it_is() -> None:
    assert (add(1), add(1, b=2), add.__name__, add.__doc__) == (2, 3, "add", "Add two numbers.")


def test_a_coroutine_function_is_still_one() -> None:
    import asyncio

    assert asyncio.run(hf.task(double)(4)) == 8  # type: ignore[arg-type]


def test_a_task_has_the_name_of_its_function_unless_it_is_given_one() -> None:
    assert add.name == "add"
    assert hf.task(name="sum")(add.fn).name == "sum"


def test_seconds_are_kept_in_nanoseconds() -> None:
    made = hf.task(lease_s=0.5, execution_window_s=2, retain_s=3600, backoff_s=0.25)(double).spec
    assert (made.lease_ns, made.window_ns) == (S // 2, 2 * S)
    assert (made.retain_ns, made.backoff_ns) == (3600 * S, S // 4)


def yields() -> Iterator[int]:
    yield 1


async def yields_too() -> AsyncIterator[int]:
    yield 1


class Callable_:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "fn",
    [yields, yields_too, "add", None, 5, of_unknown_type, Callable_(), functools.partial(double, 1), dict],
    ids=lambda fn: str(getattr(fn, "__name__", type(fn).__name__)),
)  # fmt: skip
def test_what_cannot_be_run_as_a_task_is_refused(fn: Any) -> None:
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
def test_an_option_that_cannot_be_is_refused_where_it_is_said(option: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        hf.task(**option)(double)


def test_only_what_a_module_has_a_name_for_can_be_isolated() -> None:
    def local() -> None: ...

    for fn in (local, lambda: None):
        with pytest.raises(Invalid) as caught:
            hf.task(isolation="process", name="work")(fn)
        assert caught.value.what == "isolation"


def test_an_app_has_one_task_of_each_name() -> None:
    with pytest.raises(Invalid) as caught:
        hf.App("jobs", tasks=[add, hf.task(name="add")(double)])
    assert caught.value.name == "add"
    assert hf.App("jobs", tasks=[add, add]).tasks == {"add": add}


@pytest.mark.parametrize("wrong", [print, "add", None, add.options(key="k")], ids=named)
def test_an_app_takes_tasks_for_tasks_only(wrong: Any) -> None:
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
    ids=named,
)
def test_queues_that_cannot_be_are_refused_by_the_app(queues: Any) -> None:
    with pytest.raises(Invalid):
        hf.App("jobs", queues=queues)


@pytest.mark.parametrize("made", [lambda: hf.App("jobs", tasks=[add]), lambda: hf.App("jobs")])
def test_an_app_has_the_role_of_tasks_if_it_has_tasks(made: Callable[[], hf.App]) -> None:
    app = made()
    with app.open("memory:") as rt:
        assert ("task" in [role.name for role in rt.roles]) == bool(app.tasks)


def test_who_runs_no_task_has_no_current_one() -> None:
    with pytest.raises(Invalid) as caught:
        hf.current_task()
    assert caught.value.what == "current_task"
