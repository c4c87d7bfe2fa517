"""An event loop goes on while the server of its store stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

import holdfast as hf
from holdfast.errors import NotFound
from holdfast.tasks.ids import TaskId
from tests.postgres import fresh_url
from tests.tasks_api.conftest import Open

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

HOLD = "LOCK TABLE holdfast_row, holdfast_commit IN ACCESS EXCLUSIVE MODE"
# Turns of the loop before the server is let go on.
TURNS = 100


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


async def keyed(rt: hf.Runtime, done: hf.TaskHandle[int]) -> int:
    handle = await rt.submit_async(add.options(key="k"), 1)
    return await handle


async def dependent(rt: hf.Runtime, done: hf.TaskHandle[int]) -> int:
    handle = await rt.submit_async(add.options(after=[done]), 1)
    return await handle


async def awaited(rt: hf.Runtime, done: hf.TaskHandle[int]) -> int:
    return await done


async def submitted(rt: hf.Runtime, done: hf.TaskHandle[int]) -> int:
    return await (await rt.submit_async(add, 1))


@pytest.mark.parametrize("call", [awaited, submitted, keyed, dependent])
def test_a_loop_goes_on_while_the_server_stands_still(
    running: Open, call: Callable[[hf.Runtime, Any], Awaitable[int]]
) -> None:
    """The loop itself lets the server go on: it would never get to that if a read held it."""
    url = fresh_url()
    rt = running(add, url=url)
    done = rt.submit(add, 1)
    assert done.result(60) == 2

    async def while_it_stands_still() -> int:
        with psycopg.connect(url) as connection:
            connection.execute(HOLD)
            found = asyncio.ensure_future(call(rt, done))
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert not found.done()
            connection.rollback()
        return await found

    assert asyncio.run(while_it_stands_still()) == 2


def test_a_wait_that_is_refused_is_told_to_that_one_alone(running: Open) -> None:
    rt = running(add, url=fresh_url())
    done = rt.submit(add, 1)
    assert done.result(60) == 2
    missing = hf.TaskHandle(rt, TaskId(1, 1_000), add)

    async def both() -> list[Any]:
        calls = [done, missing, rt.submit_async(add.options(after=[missing]), 1), done]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(both())
    assert [type(one) for one in found] == [int, NotFound, NotFound, int]


def test_a_runtime_reads_again_for_a_loop_after_its_reader_has_ended(
    running: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.app.task_waiting.READER_IDLE_S", 0.001)
    rt = running(add, url=fresh_url())
    handles = [rt.submit(add, n) for n in range(50)]

    async def each() -> list[int]:
        return [await handle for handle in handles]

    assert asyncio.run(each()) == [n + 1 for n in range(50)]
