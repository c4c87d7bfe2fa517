"""The step list: pages in the order of positions, each with a bounded number of steps in memory."""

import asyncio
import tracemalloc
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid
from holdfast.flows import compensation_redrive
from holdfast.store.postgres.store import PostgresStore
from tests.flows.test_failures import dead_undos, failing_undo
from tests.flows.test_steps import app_of, failure

STEPS = 60_000
VALUE_BYTES = 1_000
# All steps have 60 MB.
PAGE_BYTES_MAX = 4 * 1024 * 1024


def pages_of(handle: Any, limit: int) -> list[list[Any]]:
    """All pages, by `after`, until one is empty."""
    pages: list[list[Any]] = []
    after = 0
    while page := handle.steps(after=after, limit=limit):
        pages.append(page)
        after = page[-1].position
    return pages


async def slow_down(n: int) -> int:
    """The first calls end last, so that the records are not in the order of positions."""
    for _ in range(12 - n):
        await asyncio.sleep(0)
    return n


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 100])
def test_pages_have_every_step_once_in_the_order_of_positions(make_rig: Any, limit: int) -> None:
    @hf.flow
    async def order() -> None:
        await asyncio.gather(*[hf.step(slow_down, n) for n in range(12)])
        await asyncio.gather(hf.sleep(3600), hf.sleep(7200))

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run(rig.is_idle)
    steps = handle.steps()
    assert [step.position for step in steps] == sorted(step.position for step in steps)
    assert [step.state for step in steps] == ["completed"] * 12 + ["open"] * 2
    pages = pages_of(handle, limit)
    assert [step for page in pages for step in page] == steps
    assert all(len(page) <= limit for page in pages)


def test_steps_of_one_position_are_on_one_page(make_rig: Any) -> None:
    """A compensation that failed, and was redriven, has several outcomes at one position."""
    order = failing_undo([], [True])
    rig = make_rig(app_of(order))
    handle = rig.start(order)
    failure(rig, handle)
    for _ in range(2):
        [letter] = dead_undos(rig)
        rig.store.transact(compensation_redrive.redrive_compensations, rig.universe, [letter.seq])
        failure(rig, handle)
    pages = pages_of(handle, 1)
    assert [step for page in pages for step in page] == handle.steps()
    assert max(len(page) for page in pages) == 3


def test_page_bounds_are_checked(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        return

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    for limit in (0, -1, 10_001):
        with pytest.raises(Invalid):
            handle.steps(limit=limit)
    with pytest.raises(Invalid):
        handle.steps(after=-1)


@pytest.mark.deep
def test_page_of_sixty_thousand_steps_needs_the_memory_of_the_page(make_rig: Any) -> None:
    async def large(n: int) -> bytes:
        return n.to_bytes(4, "big") * (VALUE_BYTES // 4)

    @hf.flow(lease_s=3600)
    async def order() -> int:
        for page in range(0, STEPS, 1_000):
            await asyncio.gather(*[hf.step(large, page + n) for n in range(1_000)])
        return STEPS

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == STEPS
    found = 0
    for after in (0, 20_000, STEPS - 500):
        tracemalloc.start()
        try:
            page = handle.steps(after=after, limit=500)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert [step.position for step in page] == list(range(after + 1, after + 501))
        # A store on PostgreSQL also fills its row cache, which has its own bound.
        assert peak < PAGE_BYTES_MAX or isinstance(rig.store, PostgresStore)
        found += len(page)
    assert found == 1_500
    assert sum(len(page) for page in pages_of(handle, 10_000)) == STEPS
