"""The application of these tests: accounts with an effect and a timer, a task, and a flow that waits for an event."""

import asyncio

import holdfast as hf


class Deposit(hf.Event):
    amount: int = 1


class QuoteWanted(hf.Event):
    pass


class Nudge(hf.Event):
    after_s: float = 3600.0


class DepositRefused(hf.Event):
    pass


class Review(hf.Event):
    stars: int


@hf.effect("fx.quote")
def quote(call: hf.Call, currency: str) -> float:
    raise AssertionError("no adapter runs in these tests")


class ShopAccount(hf.World):
    balance: int = 0
    rate: float = 0.0

    @hf.on(Deposit)
    def deposited(self, event: Deposit, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.reply(self.balance)

    @hf.on(QuoteWanted)
    def quote_wanted(self, event: QuoteWanted, cx: hf.Context) -> None:
        cx.do(quote, "EUR", tag="wanted")

    @hf.on(quote)
    def quoted(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        self.rate = receipt.value if receipt.ok else -1.0

    @hf.on(Nudge)
    def nudged(self, event: Nudge, cx: hf.Context) -> None:
        cx.after(event.after_s, Deposit(1), key="nudge")

    @hf.on(DepositRefused)
    def refused(self, event: DepositRefused, cx: hf.Context) -> None:
        raise ValueError("this account refuses")


class ShopAudit(hf.World):
    seen: int = 0


# Steps that fail, by name.
failing: set[str] = set()


async def charge(cents: int) -> int:
    if "charge" in failing:
        raise ValueError("card 7 was declined")
    return cents


@hf.flow
async def order(item: str, cents: int) -> str:
    await hf.step(charge, cents)
    review = await hf.receive(Review)
    return f"{item}: {review.stars}"


@hf.task(queue="paused")
def slow_page(page: int) -> int:
    return page


@hf.flow
async def dinner(seconds: float) -> None:
    """Waits for a timer and for a child of each kind."""
    await asyncio.gather(
        hf.sleep(seconds),
        hf.step(slow_page, 1),
        hf.step(quote, "EUR"),
        hf.step(order, "tea", 5),
    )


@hf.task(attempts=1)
def print_page(page: int) -> int:
    if page < 0:
        raise ValueError("no such page")
    return page


@hf.flow
async def restock() -> None:
    await hf.sleep(3600)


app = hf.App(
    "shop",
    worlds=[ShopAccount, ShopAudit],
    effects=[quote],
    tasks=[print_page, slow_page],
    flows=[order, dinner, restock],
    events=[Review],
)
