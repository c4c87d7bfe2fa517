"""Tasks in coroutines: submit_async and awaited results, with many concurrent waiters."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid, KeyConflict, NotFound, StoreClosed, TaskForgotten
from holdfast.store.lmdb.store import LmdbStore
from holdfast.tasks import operations
from tests.process.watch import until
from tests.tasks_api.conftest import OpenApp

MODULES = ("holdfast.app.result_waiter", "holdfast.app.submission", "holdfast.app.task_handle")

LONG_S = 30.0


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.task(attempts=1)
def fail(text: str) -> None:
    raise ValueError(text)


async def with_timeout(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, LONG_S)


def count_waiters(rt: hf.Runtime) -> int:
    """Number of registered waiters."""
    return sum(len(waiters) for waiters in rt.waiting._waits.values())


async def wait_for_waiters(rt: hf.Runtime, count: int) -> None:
    deadline = time.monotonic() + LONG_S
    while count_waiters(rt) < count:
        assert time.monotonic() < deadline, f"{count_waiters(rt)} of {count} wait"
        await asyncio.sleep(0)


def test_submit_async_and_await_the_result(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)

    async def go() -> list[int]:
        handle = await rt.submit_async(add, 1, b=2)
        return [
            await with_timeout(handle),
            await with_timeout(handle.result_async()),
            handle.result(0),
        ]

    assert asyncio.run(go()) == [3, 3, 3]


def test_await_raises_task_failed_error(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(fail)

    async def go() -> None:
        await with_timeout(await rt.submit_async(fail, "no ink"))

    with pytest.raises(hf.TaskFailedError) as caught:
        asyncio.run(go())
    assert caught.value.error == "ValueError: no ink"


def test_submit_async_has_the_same_options_and_errors_as_submit(
    open_without_worker: OpenApp,
) -> None:
    rt = open_without_worker(add)

    async def go() -> None:
        first = await rt.submit_async(add, 1, key="k")
        assert (await rt.submit_async(add.options(key="k"), 1)).id == first.id
        with pytest.raises(KeyConflict):
            await rt.submit_async(add, 2, key="k")
        with pytest.raises(Invalid):
            await rt.submit_async(add, "one")
        after = await rt.submit_async(add.options(after=[first]), 1)
        assert after.status().where == "blocked"

    asyncio.run(go())


def test_500_coroutines_await_results_concurrently(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)

    async def submit_and_await(n: int) -> int:
        result: int = await (await rt.submit_async(add, n))
        return result

    async def go() -> list[int]:
        return await with_timeout(asyncio.gather(*(submit_and_await(n) for n in range(500))))

    assert asyncio.run(go()) == [n + 1 for n in range(500)]


def test_coroutine_tasks_may_await_nested_tasks(open_with_worker: OpenApp) -> None:
    @hf.task
    async def tree(depth: int) -> int:
        if not depth:
            return 1
        children = [await rt.submit_async(tree, depth - 1) for _ in range(3)]
        return sum([await handle for handle in children])

    rt = open_with_worker(tree)
    assert rt.submit(tree, 4).result(LONG_S) == 3**4


def test_cancelled_await_leaves_no_waiter(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)

    async def go() -> None:
        handle = await rt.submit_async(add, 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.result_async(), 0.05)

    # asyncio.run returns: no thread is left that waits for the task.
    asyncio.run(go())
    assert count_waiters(rt) == 0


def test_await_of_a_removed_task_raises_task_forgotten(
    open_without_worker: OpenApp,
) -> None:
    brief = hf.task(retain_s=0.001)(add.fn)
    rt = open_without_worker(brief)

    async def go() -> tuple[Any, Any]:
        removed, stays = [await rt.submit_async(brief, n) for n in (1, 2)]
        waits = [asyncio.ensure_future(handle.result_async()) for handle in (removed, stays)]
        await wait_for_waiters(rt, 2)
        # The task ends and is removed before the listener reads it.
        await asyncio.to_thread(cancel_and_remove, rt, removed)
        error = (await with_timeout(asyncio.wait(waits[:1])))[0].pop().exception()
        assert not waits[1].done()
        stays.cancel()
        with pytest.raises(hf.TaskFailedError):
            await with_timeout(waits[1])
        return type(error), waits[1].done()

    assert asyncio.run(go()) == (TaskForgotten, True)


def test_result_of_a_task_removed_meanwhile_raises_task_forgotten(
    open_without_worker: OpenApp,
) -> None:
    brief = hf.task(retain_s=0.001)(add.fn)
    rt = open_without_worker(brief)
    handle = rt.submit(brief, 1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            handle.result(30)
        except BaseException as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    cancel_and_remove(rt, handle)
    waiter.join(30)
    assert [type(error) for error in errors] == [TaskForgotten]


def cancel_and_remove(rt: hf.Runtime, handle: hf.TaskHandle[Any]) -> None:
    def cancel_task(txn: Any) -> None:
        operations.cancel.fn(txn, "jobs", [1])

    with rt.store._lock:  # type: ignore[attr-defined]
        rt.store.transact(cancel_task)
        while True:
            rt.store.transact(operations.maintain, "jobs", 100)
            try:
                handle.status()
            except NotFound:
                return


def test_several_event_loops_await_results_concurrently(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    results: list[int] = []

    async def go(n: int) -> None:
        results.append(await with_timeout(await rt.submit_async(add, n)))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(go(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(results) == list(range(1, 9))


def test_closed_event_loop_does_not_affect_other_awaits(open_with_worker: OpenApp) -> None:
    @hf.task
    def slow() -> str:
        assert let_go.wait(LONG_S)
        return "done"

    let_go = threading.Event()
    rt = open_with_worker(slow)
    handle = rt.submit(slow)
    abandoned = asyncio.new_event_loop()
    wait = handle.result_async()

    async def begin() -> None:
        task = asyncio.ensure_future(wait)
        await wait_for_waiters(rt, 1)
        pending_tasks.append(task)

    pending_tasks: list[Any] = []
    abandoned.run_until_complete(begin())
    abandoned.close()

    async def go() -> str:
        task = asyncio.ensure_future(handle.result_async())
        await wait_for_waiters(rt, 2)
        let_go.set()
        result: str = await with_timeout(task)
        return result

    assert asyncio.run(go()) == "done"


def test_await_raises_the_failure_of_the_task_worker() -> None:
    rt = hf.App("jobs", tasks=[add]).open("memory:", roles=("task",))
    rt.roles[0].request_stop()
    rt.roles[0].join(LONG_S)
    rt.roles[0].failure = MemoryError("gone")  # type: ignore[misc]

    async def go() -> None:
        await with_timeout(await rt.submit_async(add, 1))

    with pytest.raises(MemoryError):
        asyncio.run(go())
    rt.close()


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_close_of_the_store_ends_an_await(
    open_without_worker: OpenApp,
    is_in_memory: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.app.result_waiter.LISTEN_S", 3600.0)
    rt = open_without_worker(add, url="memory:" if is_in_memory else str(tmp_path / "store"))

    async def go() -> None:
        pending = asyncio.ensure_future(rt.submit(add, 1).result_async())
        await wait_for_waiters(rt, 1)
        rt.store.close()
        with pytest.raises(StoreClosed):
            await with_timeout(pending)

    asyncio.run(go())
    assert count_waiters(rt) == 0


def test_listener_without_waits_ends_and_leaves_no_subscription(
    open_with_worker: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.app.result_waiter.LISTEN_S", 0.01)
    monkeypatch.setattr("holdfast.app.result_waiter.IDLE_ROUNDS_MAX", 1)
    rt = open_with_worker(add, url=str(tmp_path / "store"))
    store = rt.store
    assert isinstance(store, LmdbStore)

    async def go() -> int:
        return await with_timeout(await rt.submit_async(add, 1))

    def awaited_topics() -> set[str]:
        return {topic for topic in store._client.topics.waiting if "/task/" in topic}

    for _ in range(2):
        assert asyncio.run(go()) == 2
        until(lambda: not awaited_topics(), "the listener ends", LONG_S)
