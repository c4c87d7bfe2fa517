"""Sample applications of the tests of `holdfast sim --app`: one that holds, and ones that do not."""

import itertools
from datetime import timedelta
from typing import Annotated

import msgspec

import holdfast as hf

COUNTER = itertools.count()


class SimulatedDeposit(hf.Event):
    amount: int


class TransferSent(hf.Event):
    to: str
    amount: Annotated[int, msgspec.Meta(ge=1, le=9)]


class ReminderDue(hf.Event):
    after: timedelta | None = None


class Coded(hf.Event):
    code: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]


@hf.effect("bank.rate", attempts=2, timeout_s=5)
def rate(call: hf.Call, currency: str) -> float:
    raise AssertionError("the simulation replaces this effect")


class SimulatedAccount(hf.World):
    balance: int = 0
    rates: list[float] = msgspec.field(default_factory=list)
    failures: int = 0

    @hf.on(SimulatedDeposit)
    def deposited(self, event: SimulatedDeposit, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.do(rate, "EUR")

    @hf.on(TransferSent)
    def sent(self, event: TransferSent, cx: hf.Context) -> None:
        self.balance -= event.amount
        cx.send(SimulatedAccount, event.to, SimulatedDeposit(event.amount))

    @hf.on(ReminderDue)
    def reminded(self, event: ReminderDue, cx: hf.Context) -> None:
        cx.after(30, SimulatedDeposit(1), key="reminder")

    @hf.on(rate)
    def rated(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        if receipt.ok:
            self.rates = [*self.rates, receipt.value][-3:]
        else:
            self.failures += 1


class Unsteady(hf.World):
    """Its reducer depends on a global, which no journal holds."""

    number: int = 0

    @hf.on(SimulatedDeposit)
    def deposited(self, event: SimulatedDeposit, cx: hf.Context) -> None:
        self.number = next(COUNTER)


class Catalog(hf.World):
    codes: int = 0

    @hf.on(Coded)
    def coded(self, event: Coded, cx: hf.Context) -> None:
        self.codes += 1


class Idle(hf.World):
    """No event reaches it."""


steady = hf.App("steady", worlds=[SimulatedAccount])
unsteady = hf.App("unsteady", worlds=[Unsteady])
ungenerable = hf.App("ungenerable", worlds=[Catalog])
idle = hf.App("idle", worlds=[Idle])
