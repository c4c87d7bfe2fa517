"""Starts by coroutines share commits, and a refused start affects no other one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.app.start_batches import STARTS_MAX, StartBatches
from holdfast.errors import CommitUnknown, HoldfastError, Invalid
from holdfast.flows.model import FlowSpec, get_body, keys_of, parse_flow_id
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.unit_of_work import get_counts


@hf.flow
async def double(n: int) -> int:
    return 2 * n


app = hf.App("starts", flows=[double])


class CountingStore:
    """Counts the operations, and loses the answers of the chosen ones."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.sizes: list[int] = []
        self.loses_answers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def submit(self, fn: Any, universe: str, new: list[NewFlow]) -> Any:
        self.sizes.append(len(new))
        submitted = self._store.submit(fn, universe, new)
        return self._lose(submitted) if self.loses_answers else submitted

    async def _lose(self, submitted: Any) -> Any:
        await submitted
        raise CommitUnknown(why="the answer was lost")


@pytest.fixture
def rt() -> Iterator[hf.Runtime]:
    with app.open("memory:", roles=()) as runtime:
        yield runtime


def start_at_once(rt: hf.Runtime, news: list[NewFlow], **options: Any) -> tuple[list[Any], Any]:
    """The answers or errors of starts in one turn of a loop, and the store."""
    store = CountingStore(rt.store)
    store.__dict__.update(options)
    batches = StartBatches(store, rt.universe)  # type: ignore[arg-type]

    async def start_all() -> list[Any]:
        return await asyncio.gather(*map(batches.start, news), return_exceptions=True)

    return asyncio.run(start_all()), store


def new(n: int, spec: FlowSpec = double.spec) -> NewFlow:
    return NewFlow(spec, double.pack((n,), {}))


def started_count(rt: hf.Runtime) -> int:
    count: int = rt.store.read(get_counts, keys_of(rt.universe), double.name).running
    return count


def test_starts_of_one_turn_are_one_operation(rt: hf.Runtime) -> None:
    started, store = start_at_once(rt, [new(n) for n in range(5)])
    assert store.sizes == [5]
    assert [one.seq for one in started] == [1, 2, 3, 4, 5]


def test_operation_has_at_most_starts_max_starts(rt: hf.Runtime) -> None:
    started, store = start_at_once(rt, [new(n) for n in range(STARTS_MAX + 3)])
    assert store.sizes == [STARTS_MAX, 3]
    assert sorted(one.seq for one in started) == list(range(1, STARTS_MAX + 4))


def test_each_start_has_its_own_flow(rt: hf.Runtime) -> None:
    async def start_all() -> list[Any]:
        return await asyncio.gather(*(rt.aio.start(double, n) for n in range(20)))

    handles = asyncio.run(start_all())
    keys = keys_of(rt.universe)
    bodies = [rt.store.read(get_body, keys, parse_flow_id(handle.id).seq) for handle in handles]
    assert [body.args for body in bodies] == [double.pack((n,), {}) for n in range(20)]


def test_refused_start_affects_no_other_start(rt: hf.Runtime) -> None:
    bad = FlowSpec("double", attempts=0)
    first, refused, last = start_at_once(rt, [new(1), new(2, bad), new(3)])[0]
    assert isinstance(refused, Invalid)
    assert (first.seq, last.seq) == (1, 2)
    assert started_count(rt) == 2


def test_unknown_outcome_is_an_error_of_each_start_and_is_not_repeated(rt: hf.Runtime) -> None:
    errors, store = start_at_once(rt, [new(1), new(2)], loses_answers=True)
    assert [type(error) for error in errors] == [CommitUnknown] * 2
    assert errors[0] is not errors[1]
    assert store.sizes == [2]
    assert started_count(rt) == 2


def test_cancelled_start_is_not_sent(rt: hf.Runtime) -> None:
    store: Any = CountingStore(rt.store)
    batches = StartBatches(store, rt.universe)

    async def cancel_first() -> list[Any]:
        tasks = [asyncio.create_task(batches.start(new(n))) for n in range(3)]
        asyncio.get_running_loop().call_soon(tasks[0].cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, *others = asyncio.run(cancel_first())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert not any(isinstance(one, HoldfastError) for one in others)
    assert store.sizes == [2]
    assert started_count(rt) == 2
