"""An app with tasks, flows and a world, for the tests of both faces."""

from __future__ import annotations

import holdfast as hf


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.task
async def greet(name: str) -> str:
    return f"hello {name}"


@hf.task(attempts=1)
def fail(text: str) -> None:
    raise ValueError(text)


@hf.task(queue="nobody")
def unserved() -> None:
    pass


@hf.flow
async def twice(n: int) -> int:
    return await hf.step(add, n, n)


class GiftBox(hf.Event):
    grams: float = 5


@hf.task(queue="nobody")
def pack(
    item: str, grams: float = 5, *notes: int, gift: GiftBox | None = None, **tags: int
) -> None:
    pass


@hf.flow(queue="nobody")
async def ship(
    item: str, grams: float = 5, *notes: int, gift: GiftBox | None = None, **tags: int
) -> None:
    pass


@hf.flow(attempts=1)
async def broken() -> None:
    raise ValueError("no ink")


@hf.flow
async def patient() -> int:
    return (await hf.receive(MoneyAdded)).amount


@hf.flow
async def collecting() -> None:
    total = 0
    while True:
        total += (await hf.receive(MoneyAdded)).amount
        hf.publish("total", total)


@hf.effect("convert")
def convert(call: hf.Call, amount: int, rate: int = 2, offset: int = 0) -> int:
    return amount * rate + offset


class MoneyAdded(hf.Event):
    amount: int


class Balance(hf.Event[tuple[int, str]]):
    """Its reply is converted to a tuple."""


class Converted(hf.Event):
    amount: int


class Ignored(hf.Event):
    pass


class Unknown(hf.Event):
    pass


class Wallet(hf.World):
    balance: int = 0

    @hf.on(MoneyAdded)
    def money_added(self, event: MoneyAdded, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.reply(self.balance)

    @hf.on(Balance)
    def balance_asked(self, event: Balance, cx: hf.Context) -> None:
        cx.reply((self.balance, "EUR"))

    @hf.on(Converted)
    def converted(self, event: Converted, cx: hf.Context) -> None:
        cx.do(convert, event.amount, offset=1)

    @hf.on(convert)
    def answered(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.balance += receipt.value

    @hf.on(Ignored)
    def ignored(self, event: Ignored, cx: hf.Context) -> None:
        pass


app = hf.App(
    "shop",
    worlds=[Wallet],
    effects=[convert],
    events=[MoneyAdded, Converted],
    tasks=[add, greet, fail, unserved, pack],
    flows=[twice, broken, patient, collecting, ship],
)
