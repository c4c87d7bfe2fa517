"""The application of the console's tests: worlds, effects, tasks, flows and a schedule, with work that ends badly."""

from __future__ import annotations

import asyncio

import msgspec

import holdfast as hf


class TopUp(hf.Event):
    cents: int = 1


class Refuse(hf.Event):
    reason: str = "no"


class RateWanted(hf.Event):
    currency: str = "EUR"


class RemindMe(hf.Event):
    after_s: float = 86_400.0


class Rating(hf.Event):
    stars: int


class CardDeclined(Exception):
    pass


@hf.effect("shop.quote", attempts=1)
async def quote(call: hf.Call, currency: str) -> float:
    if currency == "XXX":
        raise ValueError("no rate for XXX")
    return 1.1


class Customer(hf.World):
    cents: int = 0
    rate: float = 0.0
    history: list[int] = msgspec.field(default_factory=list)

    @hf.on(TopUp)
    def deposited(self, event: TopUp, cx: hf.Context) -> None:
        self.cents += event.cents
        self.history = [*self.history[-9:], event.cents]
        cx.reply(self.cents)

    @hf.on(Refuse)
    def refused(self, event: Refuse, cx: hf.Context) -> None:
        raise ValueError(event.reason)

    @hf.on(RateWanted)
    def quote_wanted(self, event: RateWanted, cx: hf.Context) -> None:
        cx.do(quote, event.currency, tag=event.currency)

    @hf.on(quote)
    def quoted(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        self.rate = receipt.value if receipt.ok else -1.0

    @hf.on(RemindMe)
    def reminded(self, event: RemindMe, cx: hf.Context) -> None:
        cx.after(event.after_s, TopUp(1), key="reminder")


async def reserve(item: str) -> str:
    return f"held-{item}"


async def release(held: str) -> None:
    await asyncio.sleep(0)


async def charge(item: str, cents: int) -> int:
    if cents < 0:
        raise CardDeclined(f"card of {item} was declined")
    return cents


@hf.flow(attempts=1)
async def order(item: str, cents: int) -> str:
    held = await hf.step(reserve, item)
    hf.undo(release, held)
    await hf.step(charge, item, cents)
    hf.publish("status", "paid")
    review = await hf.receive(Rating)
    return f"{item}: {review.stars}"


@hf.flow
async def trip(item: str) -> None:
    """Waits for a timer, an event with a timeout, and a child of each kind."""
    await hf.step(reserve, item)
    await asyncio.gather(
        hf.sleep(7_200),
        hf.receive(Rating, timeout_s=3_600),
        hf.step(slow, 600.0),
        hf.step(order, item, 5),
        hf.step(quote, "XXX"),
        return_exceptions=True,
    )


# The argument of the step of `fickle`. A replay with another one parks the flow, as changed code does.
first_way, second_way = "first", "second"
ways = [first_way]


@hf.flow
async def fickle() -> int:
    await hf.step(reserve, ways[0])
    return (await hf.receive(Rating)).stars


async def pack(seconds: float) -> None:
    await asyncio.sleep(seconds)


@hf.flow
async def delivery(seconds: float) -> None:
    """Runs a step under the lease of its activation."""
    await hf.step(pack, seconds)


@hf.task(attempts=1, queue="print")
def print_page(page: int) -> int:
    if page < 0:
        raise ValueError(f"no page {page}")
    return page


@hf.task(queue="slow")
async def slow(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@hf.task(every="0 3 * * *", zone="Europe/Berlin")
def nightly() -> None:
    pass


app = hf.App(
    "shop",
    worlds=[Customer],
    effects=[quote],
    tasks=[print_page, slow, nightly],
    flows=[order, trip, delivery, fickle],
    events=[Rating],
)
