"""Deliberate mistakes for the type checkers. Both report each line that ends in `# mistake`, and no other line.

This file is never imported. `assert_type` fails where a checker knows another type.
"""

# ruff: noqa: F841

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import holdfast as hf


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.task(attempts=3)
async def greet(name: str) -> str:
    return f"hello {name}"


@hf.effect("quote")
def quote(call: hf.Call, currency: str) -> float:
    return 1.0


@hf.effect("price", attempts=2)
async def price(call: hf.Call, item: str, count: int = 1) -> hf.Costed[int]:
    return hf.Costed(3, cost=0.1)


class BalanceAsked(hf.Event[int]):
    pass


class CoinAdded(hf.Event):
    amount: int


class Purse(hf.World):
    balance: int = 0

    @hf.on(CoinAdded)
    def coin_added(self, event: CoinAdded, cx: hf.Context) -> None:
        cx.do(quote, "EUR")
        cx.do(quote.options(tag="t"), "EUR")
        cx.do(price, "book")
        cx.do(price, "book", count=2)
        cx.do(quote, 5)  # mistake
        cx.do(quote)  # mistake
        cx.do(quote, "EUR", 2)  # mistake
        cx.do(quote.options(tag="t"), 5)  # mistake
        cx.do(price, "book", number=2)  # mistake
        cx.do(hf.http.request, "GET", "https://example.org", tag="look")
        cx.do(hf.http.request, "GET")  # mistake
        cx.do(add, 1)  # mistake
        cx.start(order, "o-17", 1200)
        cx.start(order.options(key="o-17"), "o-17", cents=1200)
        cx.start(order, "o-17")  # mistake
        cx.start(order, "o-17", "free")  # mistake
        cx.start(order.options(key="o-17"), 17, 1200)  # mistake
        cx.start(add, 1)  # mistake


def reserve(id: str) -> int:
    return len(id)


async def charge(id: str, cents: int) -> bool:
    return cents > 0


@hf.flow
async def child(n: int) -> bytes:
    return b""


@hf.flow(attempts=2)
async def order(id: str, cents: int) -> str:
    assert_type(await hf.step(reserve, id), int)
    assert_type(await hf.step(charge, id, cents), bool)
    assert_type(await hf.step(hf.options(charge, attempts=3), id, cents), bool)
    assert_type(await hf.step(add, 1), int)
    assert_type(await hf.step(greet, id), str)
    assert_type(await hf.step(greet.options(queue="fast"), id), str)
    assert_type(await hf.step(quote, "EUR"), float)
    assert_type(await hf.step(quote.options(timeout_s=1), "EUR"), float)
    assert_type(await hf.step(price, "book"), int)
    assert_type(await hf.step(child, 1), bytes)
    assert_type(await hf.receive(CoinAdded), CoinAdded)
    assert_type(await hf.receive(CoinAdded, BalanceAsked), CoinAdded | BalanceAsked)
    assert_type(await hf.step(hf.world(Purse, id).ask, BalanceAsked()), int)
    assert_type(await hf.step(hf.world(Purse, id).ask, BalanceAsked(), timeout=5), int)
    assert_type(await hf.step(hf.world(Purse, id).ask, CoinAdded(1)), Any)
    assert_type((await hf.step(hf.world(Purse, id).send, CoinAdded(1), key="k")).status, str)
    assert_type(await hf.step(hf.world(Purse, id).state), Purse)
    assert_type(hf.world(Purse, id).ask(BalanceAsked()), int)
    hf.world(reserve, id)  # mistake
    hf.world(Purse, 5)  # mistake
    await hf.step(hf.world(Purse, id).ask)  # mistake
    await hf.step(hf.world(Purse, id).ask, BalanceAsked(), timeout="long")  # mistake
    (await hf.step(hf.world(Purse, id).ask, BalanceAsked())).upper()  # mistake
    hf.undo(reserve, id)
    await hf.step(reserve, 5)  # mistake
    await hf.step(charge, id)  # mistake
    await hf.step(hf.options(charge), id, "free")  # mistake
    await hf.step(add, "one")  # mistake
    await hf.step(greet, 5)  # mistake
    await hf.step(quote, 5)  # mistake
    await hf.step(child, "one")  # mistake
    hf.undo(reserve, 5)  # mistake
    text: str = await hf.step(reserve, id)  # mistake
    return id


def calls(rt: hf.Runtime, ada: hf.WorldHandle[Purse]) -> None:
    assert_type(rt.submit(add, 1), hf.TaskHandle[int])
    assert_type(rt.submit(add, 1, b=2).result(), int)
    assert_type(rt.submit(greet, "ada").result(), str)
    assert_type(rt.submit(add.options(key="k"), 1), hf.TaskHandle[int])
    assert_type(rt.submit(greet, "ada", key="k"), hf.TaskHandle[str])
    rt.submit(add, "one")  # mistake
    rt.submit(add)  # mistake
    rt.submit(add, 1, c=2)  # mistake
    rt.submit(greet, 5)  # mistake
    rt.submit(add.options(key="k"), "one")  # mistake
    rt.submit(reserve, "one")  # mistake
    text: str = rt.submit(add, 1).result()  # mistake

    assert_type(rt.submit_many(add, [(1, 2), (3, 4)]), list[hf.TaskHandle[int]])
    assert_type(rt.submit_many(greet, [("ada",)]), list[hf.TaskHandle[str]])
    rt.submit_many(add, [("one", 2)])  # mistake
    rt.submit_many(add, [1, 2])  # mistake
    assert_type(rt.map(add, [1, 2]), Iterator[int])
    assert_type(rt.map(greet, ["ada"]), Iterator[str])
    rt.map(add, ["one"])  # mistake

    assert_type(rt.start(order, "o-17", 1200), hf.FlowHandle[str])
    assert_type(rt.start(order.options(key="o-17"), "o-17", 1200).result(), str)
    assert_type(rt.flow(order, key="o-17"), hf.FlowHandle[str])
    rt.start(order, "o-17")  # mistake
    rt.start(order, "o-17", "free")  # mistake
    rt.start(order.options(key="o-17"), 17, 1200)  # mistake
    rt.start(add, 1)  # mistake
    number: int = rt.start(order, "o-17", 1200).result()  # mistake

    nightly = rt.schedule("nightly", order, every="0 3 * * *", args=("o-17", 1200))
    rt.schedule("sum", add.options(queue="slow"), every="@hourly", zone="Europe/Berlin", args=(1,))
    assert_type(nightly.pause(), bool)
    rt.schedule("nightly", reserve, every="0 3 * * *")  # mistake
    rt.schedule("nightly", quote, every="0 3 * * *")  # mistake
    rt.schedule("nightly", order, every=3)  # mistake
    rt.schedule("nightly", order, every="0 3 * * *", args=1)  # mistake

    assert_type(ada.ask(BalanceAsked()), int)
    assert_type(ada.ask(CoinAdded(1)), Any)
    assert_type(ada.state(), Purse)
    ada.ask(CoinAdded("one"))  # mistake
    ada.ask(BalanceAsked(), timeout="long")  # mistake
    reply: str = ada.ask(BalanceAsked())  # mistake


async def async_calls(rt: hf.Runtime, ada: hf.WorldHandle[Purse]) -> None:
    assert_type(await rt.aio.submit(add, 1), hf.TaskHandle[int])
    assert_type(await (await rt.aio.submit(greet, "ada")), str)
    assert_type(await rt.aio.submit(add, 1, key="k"), hf.TaskHandle[int])
    assert_type(await rt.aio.submit_many(add, [(1, 2)]), list[hf.TaskHandle[int]])
    assert_type(await rt.aio.start(order, "o-17", 1200), hf.FlowHandle[str])
    assert_type(await rt.aio.result(rt.submit(add, 1), timeout=3), int)
    assert_type(await rt.aio.result(rt.start(child, 1)), bytes)
    run = await rt.aio.start(order, "o-17", 1200)
    assert_type(await rt.aio.send(run, CoinAdded(1), key="k"), int)
    assert_type(await rt.aio.send(ada, CoinAdded(1)), hf.Delivery)
    assert_type(await rt.aio.cancel(run), bool)
    assert_type((await rt.aio.status(run)).run, int)
    assert_type((await rt.aio.status(rt.submit(add, 1))).attempt, int)
    assert_type(await rt.aio.fork(run, "o-18", at="charge"), hf.FlowHandle[str])
    assert_type(await rt.aio.ask(ada, BalanceAsked()), int)
    assert_type(await rt.aio.state(ada), Purse)
    assert_type(await rt.aio.wait_for(ada, lambda state: state.balance > 1), Purse)
    assert_type(rt.aio.map(greet, ["ada"]), AsyncIterator[str])
    assert_type(await asyncio.gather(rt.submit(add, 1), rt.start(child, 1)), tuple[int, bytes])
    await rt.aio.submit(add, "one")  # mistake
    await rt.aio.submit_many(add, [("one", 2)])  # mistake
    await rt.aio.start(order, "o-17")  # mistake
    await rt.aio.ask(ada, CoinAdded("one"))  # mistake
    await rt.aio.steps(rt.submit(add, 1))  # mistake
    await rt.aio.fork(run, 18)  # mistake
    await rt.aio.wait_for(ada, lambda state: state.missing)  # mistake
    rt.aio.map(add, ["one"])  # mistake
    text: str = await rt.submit(add, 1)  # mistake
