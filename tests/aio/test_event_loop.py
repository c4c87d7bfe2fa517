"""Coroutines of one event loop: many calls at once, cancellation, and a server that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from tests.aio.faces import LONG_S
from tests.aio.shop import Balance, MoneyAdded, Wallet, add, app, patient, twice, unserved
from tests.pgcluster import USER, PostgresCluster

MODULES = ("holdfast.app.aio", "holdfast.app.result_waiter", "holdfast.app.store_calls")

# Iterations of the event loop while the server stands still.
LOOP_ITERATIONS = 1_000


def test_handles_of_tasks_and_flows_are_awaitable(rt: hf.Runtime) -> None:
    async def go() -> list[int]:
        handles = await asyncio.gather(rt.aio.submit(add, 1), rt.aio.start(twice, 4))
        return await asyncio.wait_for(asyncio.gather(*handles), LONG_S)

    assert asyncio.run(go()) == [2, 8]


def test_many_coroutines_ask_worlds_at_once(rt: hf.Runtime) -> None:
    async def ask(name: str) -> int:
        account = rt.world(Wallet, name)
        await rt.aio.send(account, MoneyAdded(2))
        balance, _ = await rt.aio.ask(account, Balance(), timeout=LONG_S)
        return balance

    async def go() -> list[int]:
        return await asyncio.gather(*(ask(f"account-{n}") for n in range(100)))

    assert asyncio.run(go()) == [2] * 100


def test_cancelled_call_leaves_no_sleeper(rt: hf.Runtime) -> None:
    async def go() -> None:
        account = rt.world(Wallet, "ada")
        await rt.aio.send(account, MoneyAdded(1))
        calls = [
            asyncio.ensure_future(rt.aio.wait_for(account, lambda state: False)),
            asyncio.ensure_future(rt.aio.result(await rt.aio.submit(unserved))),
            asyncio.ensure_future(rt.aio.result(await rt.aio.start(patient))),
        ]
        await asyncio.wait(calls, timeout=0.05)
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [asyncio.CancelledError] * 3

    asyncio.run(go())
    for waiter in (rt.waiting, rt.flow_waiting):
        assert not waiter._waits


def test_timeout_of_a_task_that_the_caller_sets_is_not_replaced(rt: hf.Runtime) -> None:
    async def go() -> None:
        handle = await rt.aio.submit(unserved)
        async with asyncio.timeout(0.01):
            await rt.aio.result(handle, timeout=LONG_S)

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(go())
    assert type(caught.value) is TimeoutError


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster(standby=False) as made:
        yield made


@pytest.mark.postgresql
@pytest.mark.timeout(180)
def test_event_loop_runs_while_the_server_stands_still(cluster: PostgresCluster) -> None:
    """The loop itself lets the server continue. A call that blocked the loop would never return."""
    with cluster.primary.admin() as connection:
        connection.execute("CREATE DATABASE faces")
    server = cluster.primary
    url = f"postgresql://{USER}@{server.host}:{server.port}/faces"

    async def go(rt: hf.Runtime) -> list[Any]:
        ada = rt.world(Wallet, "ada")
        aio = rt.aio
        assert await aio.ask(ada, MoneyAdded(5), timeout=LONG_S) == 5
        done = await aio.submit(add, 1)
        assert await done == 2
        run = await aio.start(twice, 1)
        assert await run == 2
        waiting = await aio.start(patient)
        frozen = cluster.primary.freeze()
        calls = [
            aio.submit(add, 1),
            aio.submit(add.options(key="k"), 1),
            aio.submit(add.options(after=[done]), 1),
            aio.submit_many(add, [(1,), (2,)]),
            aio.start(twice, 1),
            aio.result(done),
            aio.result(run),
            aio.send(ada, MoneyAdded(1)),
            aio.ask(ada, Balance(), timeout=LONG_S),
            aio.state(ada),
            aio.wait_for(ada, lambda state: state.balance == 6, timeout=LONG_S),
            aio.status(done),
            aio.cancel(done),
            aio.status(run),
            aio.done(run),
            aio.cancel(run),
            aio.steps(run, limit=1),
            aio.events(run),
            aio.published(run),
            aio.fork(run, "fork"),
            aio.resume(run),
            aio.send(waiting, MoneyAdded(7), key="k"),
        ]
        pending = [asyncio.ensure_future(call) for call in calls]
        try:
            for _ in range(LOOP_ITERATIONS):
                await asyncio.sleep(0)
            assert not any(one.done() for one in pending)
        finally:
            for process in frozen:
                process.cont()
        return await asyncio.gather(*pending)

    with app.open(url, queues=["default"]) as rt:
        answers = asyncio.run(go(rt))
        rt.check()
    assert answers[5:7] == [2, 2]
    assert answers[8] == (6, "EUR")
    assert answers[10].balance == 6
    assert answers[-1] == 1
