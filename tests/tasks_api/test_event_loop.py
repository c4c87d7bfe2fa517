"""Event loop and PostgreSQL: the loop keeps running while the server is blocked."""

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
from tests.tasks_api.conftest import OpenApp

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

BLOCK_SERVER = "LOCK TABLE holdfast_row, holdfast_commit IN ACCESS EXCLUSIVE MODE"
# Loop iterations before the server is unblocked.
LOOP_ITERATIONS = 100


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
def test_event_loop_keeps_running_while_the_server_is_blocked(
    open_with_worker: OpenApp, call: Callable[[hf.Runtime, Any], Awaitable[int]]
) -> None:
    """The loop itself unblocks the server. A read that blocked the loop would deadlock this test."""
    url = fresh_url()
    rt = open_with_worker(add, url=url)
    done = rt.submit(add, 1)
    assert done.result(60) == 2

    async def call_while_blocked() -> int:
        with psycopg.connect(url) as connection:
            connection.execute(BLOCK_SERVER)
            pending = asyncio.ensure_future(call(rt, done))
            for _ in range(LOOP_ITERATIONS):
                await asyncio.sleep(0)
            assert not pending.done()
            connection.rollback()
        return await pending

    assert asyncio.run(call_while_blocked()) == 2


def test_error_of_one_await_does_not_affect_other_awaits(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add, url=fresh_url())
    done = rt.submit(add, 1)
    assert done.result(60) == 2
    missing = hf.TaskHandle(rt, TaskId(1, 1_000), add)

    async def both() -> list[Any]:
        calls = [done, missing, rt.submit_async(add.options(after=[missing]), 1), done]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(both())
    assert [type(outcome) for outcome in outcomes] == [int, NotFound, NotFound, int]


def test_await_works_after_the_idle_reader_thread_ended(
    open_with_worker: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.app.result_waiter.READER_IDLE_S", 0.001)
    rt = open_with_worker(add, url=fresh_url())
    handles = [rt.submit(add, n) for n in range(50)]

    async def each() -> list[int]:
        return [await handle for handle in handles]

    assert asyncio.run(each()) == [n + 1 for n in range(50)]
