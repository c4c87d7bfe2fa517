"""Application of part 2 of the demo: accounts that pay each other, and a bank effect."""

from __future__ import annotations

import holdfast as hf


class Deposited(hf.Event):
    amount: int


class PayOrdered(hf.Event):
    to: str
    amount: int


class Received(hf.Event):
    amount: int


class Nudge(hf.Event):
    """Sent by an account to itself, one second after a deposit."""


@hf.effect("bank.notify", attempts=5, timeout_s=2)
def notify(call: hf.Call, account: str, amount: int) -> str:
    """Notify the outside. All calls for one payment carry one key."""
    return f"{account} paid {amount}, key {call.idempotency_key[:12]}"


class DemoAccount(hf.World):
    balance: int = 0
    notified: int = 0
    nudged: int = 0

    @hf.on(Deposited)
    def deposited(self, event: Deposited, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.after(1.0, Nudge(), key="nudge")

    @hf.on(PayOrdered)
    def pay_ordered(self, event: PayOrdered, cx: hf.Context) -> None:
        self.balance -= event.amount
        cx.send(DemoAccount, event.to, Received(event.amount))
        cx.do(notify, cx.name, event.amount)

    @hf.on(Received)
    def received(self, event: Received, cx: hf.Context) -> None:
        self.balance += event.amount

    @hf.on(notify)
    def on_notified(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.notified += receipt.ok

    @hf.on(Nudge)
    def nudge(self, event: Nudge, cx: hf.Context) -> None:
        self.nudged += 1


app = hf.App("demo-bank", worlds=[DemoAccount], effects=[notify])
