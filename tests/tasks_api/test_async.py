"""Tasks for coroutines: submitted and awaited in an event loop, any number at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid, KeyConflict, NotFound, TaskForgotten
from holdfast.tasks import coordinator
from tests.tasks_api.conftest import Open

MODULES = ("holdfast.app.task_waiting", "holdfast.app.submitting", "holdfast.app.task_handle")

LONG_S = 30.0


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.task(attempts=1)
def fail(text: str) -> None:
    raise ValueError(text)


async def ends(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, LONG_S)


def waits(rt: hf.Runtime) -> int:
    """How many wait."""
    return sum(len(held) for held in rt.waiting._waits.values())


async def come(rt: hf.Runtime, count: int) -> None:
    deadline = time.monotonic() + LONG_S
    while waits(rt) < count:
        assert time.monotonic() < deadline, f"{waits(rt)} of {count} wait"
        await asyncio.sleep(0)


def test_a_task_is_submitted_and_awaited(running: Open) -> None:
    rt = running(add)

    async def go() -> list[int]:
        handle = await rt.submit_async(add, 1, b=2)
        return [await ends(handle), await ends(handle.result_async()), handle.result(0)]

    assert asyncio.run(go()) == [3, 3, 3]


def test_an_error_is_raised_where_the_result_is_awaited(running: Open) -> None:
    rt = running(fail)

    async def go() -> None:
        await ends(await rt.submit_async(fail, "no ink"))

    with pytest.raises(hf.TaskFailedError) as caught:
        asyncio.run(go())
    assert caught.value.error == "ValueError: no ink"


def test_options_and_refusals_are_the_same_as_for_threads(resting: Open) -> None:
    rt = resting(add)

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


def test_more_coroutines_wait_than_there_could_be_threads(running: Open) -> None:
    rt = running(add)

    async def one(n: int) -> int:
        found: int = await (await rt.submit_async(add, n))
        return found

    async def go() -> list[int]:
        return await ends(asyncio.gather(*(one(n) for n in range(500))))

    assert asyncio.run(go()) == [n + 1 for n in range(500)]


def test_coroutine_tasks_may_wait_for_each_other_many_levels_deep(running: Open) -> None:
    @hf.task
    async def tree(depth: int) -> int:
        if not depth:
            return 1
        below = [await rt.submit_async(tree, depth - 1) for _ in range(3)]
        return sum([await one for one in below])

    rt = running(tree)
    assert rt.submit(tree, 4).result(LONG_S) == 3**4


def test_who_stops_waiting_leaves_nothing_behind(resting: Open) -> None:
    rt = resting(add)

    async def go() -> None:
        handle = await rt.submit_async(add, 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.result_async(), 0.05)

    # It returns: no thread is joined that waits for the task.
    asyncio.run(go())
    assert waits(rt) == 0


def test_a_task_that_is_forgotten_meanwhile_is_an_error_for_those_who_wait_for_it_alone(
    resting: Open,
) -> None:
    brief = hf.task(retain_s=0.001)(add.fn)
    rt = resting(brief)

    async def go() -> tuple[Any, Any]:
        gone, stays = [await rt.submit_async(brief, n) for n in (1, 2)]
        waits = [asyncio.ensure_future(one.result_async()) for one in (gone, stays)]
        await come(rt, 2)
        # Ended and forgotten in one go: whoever listens finds nothing there.
        await asyncio.to_thread(end_and_forget, rt, gone)
        error = (await ends(asyncio.wait(waits[:1])))[0].pop().exception()
        assert not waits[1].done()
        stays.cancel()
        with pytest.raises(hf.TaskFailedError):
            await ends(waits[1])
        return type(error), waits[1].done()

    assert asyncio.run(go()) == (TaskForgotten, True)


def test_a_caller_that_waits_while_its_task_ends_and_is_forgotten_is_told_so(
    resting: Open,
) -> None:
    brief = hf.task(retain_s=0.001)(add.fn)
    rt = resting(brief)
    handle = rt.submit(brief, 1)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            handle.result(30)
        except BaseException as error:
            found.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    end_and_forget(rt, handle)
    waiter.join(30)
    assert [type(error) for error in found] == [TaskForgotten]


def end_and_forget(rt: hf.Runtime, handle: hf.TaskHandle[Any]) -> None:
    def both(txn: Any) -> None:
        coordinator.cancel.fn(txn, "jobs", [1])

    with rt.store._lock:  # type: ignore[attr-defined]
        rt.store.transact(both)
        while True:
            rt.store.transact(coordinator.maintain, "jobs", 100)
            try:
                handle.status()
            except NotFound:
                return


def test_two_event_loops_wait_at_the_same_time(running: Open) -> None:
    rt = running(add)
    found: list[int] = []

    async def go(n: int) -> None:
        found.append(await ends(await rt.submit_async(add, n)))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(go(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(found) == list(range(1, 9))


def test_a_loop_that_is_gone_harms_no_other(running: Open) -> None:
    @hf.task
    def slow() -> str:
        assert let_go.wait(LONG_S)
        return "done"

    let_go = threading.Event()
    rt = running(slow)
    handle = rt.submit(slow)
    abandoned = asyncio.new_event_loop()
    wait = handle.result_async()

    async def begin() -> None:
        task = asyncio.ensure_future(wait)
        await come(rt, 1)
        kept.append(task)

    kept: list[Any] = []
    abandoned.run_until_complete(begin())
    abandoned.close()

    async def go() -> str:
        task = asyncio.ensure_future(handle.result_async())
        await come(rt, 2)
        let_go.set()
        found: str = await ends(task)
        return found

    assert asyncio.run(go()) == "done"


def test_who_waits_in_a_loop_hears_of_a_worker_that_has_failed() -> None:
    rt = hf.App("jobs", tasks=[add]).open("memory:", roles=("task",))
    rt.roles[0].request_stop()
    rt.roles[0].join(LONG_S)
    rt.roles[0].failure = MemoryError("gone")  # type: ignore[misc]

    async def go() -> None:
        await ends(await rt.submit_async(add, 1))

    with pytest.raises(MemoryError):
        asyncio.run(go())
    rt.close()
