"""A bank: accounts that pay each other, with a daily limit, and an audit that sees every payment.

    holdfast up app:app                    # a worker; start several of them, kill any of them

Each account is a world. Its handlers run one event at a time and see only the account, the event and
`cx`. Their state changes and their messages become durable together, or not at all. So money that
leaves one account arrives in the other exactly once, even if a process dies in between.
"""

from __future__ import annotations

import holdfast as hf

DAY_S = 24 * 3600
DAILY_LIMIT = 1_000


class Deposited(hf.Event):
    amount: int


class PaymentOrdered(hf.Event):
    to: str
    amount: int


class PaymentReceived(hf.Event):
    sender: str
    amount: int


class DayEnded(hf.Event):
    """Sent by an account to itself, a day after its first payment."""


class BalanceAsked(hf.Event):
    """Changes nothing. The answer comes after all events that were sent before."""


class Paid(hf.Event):
    """A message to the audit."""

    sender: str
    to: str
    amount: int


class Account(hf.World):
    balance: int = 0
    paid_today: int = 0
    refused: int = 0

    @hf.on(Deposited)
    def deposited(self, event: Deposited, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.reply(self.balance)

    @hf.on(PaymentOrdered)
    def payment_ordered(self, event: PaymentOrdered, cx: hf.Context) -> None:
        within_limit = self.paid_today + event.amount <= DAILY_LIMIT
        if event.amount <= 0 or event.amount > self.balance or not within_limit:
            self.refused += 1
            cx.reply("refused")
            return
        if not self.paid_today:
            # A durable timer. Its key is a slot with one timer, so the day ends once.
            cx.after(DAY_S, DayEnded(), key="day")
        self.balance -= event.amount
        self.paid_today += event.amount
        cx.send(Account, event.to, PaymentReceived(cx.name, event.amount))
        cx.send(Audit, "main", Paid(cx.name, event.to, event.amount))
        cx.reply("paid")

    @hf.on(PaymentReceived)
    def payment_received(self, event: PaymentReceived, cx: hf.Context) -> None:
        self.balance += event.amount

    @hf.on(DayEnded)
    def day_ended(self, event: DayEnded, cx: hf.Context) -> None:
        self.paid_today = 0

    @hf.on(BalanceAsked)
    def balance_asked(self, event: BalanceAsked, cx: hf.Context) -> None:
        cx.reply(self.balance)


class Audit(hf.World):
    payments: int = 0
    volume: int = 0
    largest: int = 0

    @hf.on(Paid)
    def paid(self, event: Paid, cx: hf.Context) -> None:
        self.payments += 1
        self.volume += event.amount
        self.largest = max(self.largest, event.amount)


app = hf.App("bank", worlds=[Account, Audit])
