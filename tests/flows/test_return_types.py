"""The type of a step's value: the same in the first run and in a replay, or an error before the step runs."""

from __future__ import annotations

import decimal
import functools
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import holdfast as hf
from holdfast.app.return_types import UnreadableAnnotation
from tests.flows.test_steps import app_of, failure

if TYPE_CHECKING:
    from tests.flows.rig import FlowRig as OnlyForCheckers


@dataclass
class Slip:
    cents: int


class SlipRecord(msgspec.Struct):
    cents: int


class SlipPrinter:
    """A callable object."""

    def __call__(self, cents: int) -> Slip:
        return Slip(cents)

    async def send(self, cents: int) -> Inner:
        return self.Inner(cents)

    def list(self, cents: int) -> list[Slip]:
        return [Slip(cents)]

    @dataclass
    class Inner:
        cents: int


class AsyncPrinter:
    async def __call__(self, cents: int) -> Slip:
        return Slip(cents)


def checked_only(cents: int, rig: OnlyForCheckers | None = None) -> Slip:
    """Its parameter has an annotation that does not exist at run time, its result has not."""
    return Slip(cents)


async def make_slip(cents: int) -> Slip:
    return Slip(cents)


def soon(cents: int) -> Coroutine[Any, Any, Slip]:
    return make_slip(cents)


def later(cents: int) -> Awaitable[Slip]:
    return make_slip(cents)


@functools.lru_cache
def cached(cents: int) -> Slip:
    return Slip(cents)


printer = SlipPrinter()
CASES: dict[str, tuple[Any, Any]] = {
    "callable object": (hf.options(printer, name="printer"), Slip(5)),
    "asynchronous callable object": (hf.options(AsyncPrinter(), name="printer"), Slip(5)),
    "method": (printer.send, SlipPrinter.Inner(5)),
    "method list": (printer.list, [Slip(5)]),
    "dataclass": (Slip, Slip(5)),
    "struct": (SlipRecord, SlipRecord(5)),
    "decimal": (decimal.Decimal, decimal.Decimal(5)),
    "partial": (functools.partial(checked_only, rig=None), Slip(5)),
    "parameter for checkers only": (checked_only, Slip(5)),
    "coroutine": (soon, Slip(5)),
    "awaitable": (later, Slip(5)),
    "cached": (cached, Slip(5)),
}


@pytest.mark.parametrize("case", CASES)
def test_step_value_has_its_type_in_each_run(make_rig: Any, case: str) -> None:
    fn, expected = CASES[case]
    seen: list[Any] = []

    @hf.flow
    async def order() -> int:
        value = await hf.step(fn, 5)
        seen.append(value)
        await hf.sleep(60)
        return 1

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 1
    assert seen == [expected, expected]
    assert [type(value) for value in seen] == [type(expected)] * 2


def test_closure_names_the_type_of_a_step(make_rig: Any) -> None:
    @dataclass
    class Local:
        cents: int

    def make(cents: int) -> Local:
        return Local(cents)

    @hf.flow
    async def order() -> int:
        made = await hf.step(make, 5)
        return made.cents

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 5


def test_unknown_return_annotation_is_refused_before_the_step_runs(make_rig: Any) -> None:
    called: list[int] = []

    def charge(cents: int) -> OnlyForCheckers:
        called.append(cents)
        raise AssertionError

    @hf.flow(attempts=1)
    async def order() -> None:
        await hf.step(charge, 5)

    rig = make_rig(app_of(order))
    ended = failure(rig, rig.start(order))
    assert (ended.code, ended.error_type) == ("raised", UnreadableAnnotation.__name__)
    assert "'OnlyForCheckers' is not defined" in ended.error
    assert "TYPE_CHECKING" in ended.error
    assert called == []


def test_step_without_an_annotation_returns_plain_data_in_each_run(make_rig: Any) -> None:
    seen: list[Any] = []

    def make(cents):  # type: ignore[no-untyped-def]
        return (Slip(cents), (1, 2))

    @hf.flow
    async def order() -> None:
        seen.append(await hf.step(make, 5))
        await hf.sleep(60)

    rig = make_rig(app_of(order))
    rig.result(rig.start(order))
    assert seen == [[{"cents": 5}, [1, 2]]] * 2
