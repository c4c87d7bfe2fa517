"""A sample application that uses every operation of a reducer context."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

import holdfast as hf


class DepositMade(hf.Event):
    amount: int


class Failing(hf.Event):
    """Its handler changes the state, emits an effect and a reply, and then raises."""

    why: str = "as told"


class Seen(hf.Event):
    amount: int = 0


class UnhandledEvent(hf.Event):
    """Declared in `events=`. No world handles it."""


@dataclass
class Noted:
    text: str
    tags: list[str]


class Rolled(hf.Event):
    pass


class PaymentOrdered(hf.Event):
    currency: str
    key: str | None = None
    tag: str = ""
    times: int = 1


class Waited(hf.Event):
    seconds: float = 60.0
    key: str | None = None


class TransferOrdered(hf.Event):
    to: str
    amount: int = 1


class Rated(hf.Event):
    """Its handler stores an int in a float field."""

    rate: int


class Queried(hf.Event):
    pass


class Timed(hf.Event):
    """Its handler advances the test clock by `ms`."""

    ms: int


@hf.effect("fx.quote", timeout_s=10)
async def quote(call: hf.Call, currency: str) -> float:
    raise AssertionError("nothing is called here")


class Audit(hf.World):
    total: int = 0

    @hf.on(Seen)
    def seen(self, event: Seen, cx: hf.Context) -> None:
        self.total += event.amount


class BankAccount(hf.World):
    balance: int = 0
    rate: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)
    receipts: list[str] = msgspec.field(default_factory=list)

    @hf.on(DepositMade)
    def deposited(self, event: DepositMade, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.reply(self.balance)

    @hf.on(Failing)
    def failing(self, event: Failing, cx: hf.Context) -> None:
        self.balance = -1
        self.notes.append("never")
        cx.do(quote, "EUR")
        cx.reply("never")
        raise RuntimeError(event.why)

    @hf.on(Noted)
    def noted(self, event: Noted, cx: hf.Context) -> None:
        self.notes += [event.text, *event.tags]

    @hf.on(Rolled)
    def rolled(self, event: Rolled, cx: hf.Context) -> None:
        self.notes.append(f"{cx.uuid()} {cx.uuid()} {cx.random.random()} {cx.now.isoformat()}")

    @hf.on(PaymentOrdered)
    def paid(self, event: PaymentOrdered, cx: hf.Context) -> None:
        for _ in range(event.times):
            cx.do(quote.options(key=event.key), event.currency, tag=event.tag)

    @hf.on(quote)
    def quoted(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        self.receipts.append(f"{receipt.status} {receipt.code or receipt.value} {receipt.tag}")

    @hf.on(Waited)
    def waited(self, event: Waited, cx: hf.Context) -> None:
        cx.after(event.seconds, Seen(1), key=event.key)

    @hf.on(TransferOrdered)
    def told(self, event: TransferOrdered, cx: hf.Context) -> None:
        cx.send(Audit, event.to, Seen(event.amount))

    @hf.on(Rated)
    def rated(self, event: Rated, cx: hf.Context) -> None:
        self.rate = event.rate

    @hf.on(Queried)
    def queried(self, event: Queried, cx: hf.Context) -> None:
        cx.reply(self.rate)


app = hf.App("bank", worlds=[BankAccount, Audit], events=[UnhandledEvent, Seen, hf.inbox("orders")])
