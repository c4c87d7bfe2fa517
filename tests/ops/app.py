"""The sample application of these tests: accounts that request an exchange rate, in several versions.

`app` is the version that wrote the journals. `app_richer` computes other states. `app_silent` emits
nothing and has other replies. `app_deadly` ends its process. `app_killed_once`
ends it at the first deposit. `app_other` declares none of the world types.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

import holdfast as hf


class QuotedDeposit(hf.Event):
    amount: int


class QuoteRequested(hf.Event):
    currency: str = "EUR"


class Refused(hf.Event):
    pass


@hf.effect("fx.quote")
def quote(call: hf.Call, currency: str) -> float:
    raise AssertionError("no adapter runs in these tests")


@hf.effect("fx.other")
def other(call: hf.Call) -> None: ...


class QuotedAccount(hf.World):
    balance: int = 0
    rate: float = 0.0
    quotes: int = 0

    bonus = 0
    asks = True
    deadly = False
    killed_once = False

    @hf.on(QuotedDeposit)
    def deposited(self, event: QuotedDeposit, cx: hf.Context) -> None:
        if self.deadly and cx.name == "ada":
            os._exit(9)
        if self.killed_once and cx.name == "ada":
            marker = Path(os.environ["HOLDFAST_TEST_KILLED_ONCE"])
            if not marker.exists():
                marker.touch()
                os._exit(9)
        self.balance += event.amount + self.bonus
        cx.reply(event.amount if self.asks else None)

    @hf.on(QuoteRequested)
    def asked(self, event: QuoteRequested, cx: hf.Context) -> None:
        if self.asks:
            cx.do(quote, event.currency)

    @hf.on(Refused)
    def refused(self, event: Refused, cx: hf.Context) -> None:
        raise ValueError("this account refuses")

    @hf.on(quote)
    def quoted(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        self.quotes += 1
        if receipt.ok:
            self.rate = receipt.value


class Other(hf.World):
    seen: int = 0


class Booked(hf.Event):
    amount: int


class Sorted(hf.Event):
    words: list[str]


class Grouped(hf.Event):
    words: list[str]


class Ledger(hf.World):
    """A world without replies and emissions. One reducer depends on the order of a set."""

    balance: int = 0
    words: list[str] = msgspec.field(default_factory=list)
    groups: Any = None

    bonus = 0

    @hf.on(Booked)
    def booked(self, event: Booked, cx: hf.Context) -> None:
        self.balance += event.amount + self.bonus

    @hf.on(Sorted)
    def sorted(self, event: Sorted, cx: hf.Context) -> None:
        self.words = list(set(event.words))

    @hf.on(Grouped)
    def grouped(self, event: Grouped, cx: hf.Context) -> None:
        """Store a set of sets, which is equal in any iteration order."""
        pairs = zip(event.words, event.words[1:], strict=False)
        self.groups = {frozenset(pair) for pair in pairs}
        cx.reply({"groups": self.groups})
        cx.post("Ledger", "other", "notes", [self.groups], universe="elsewhere")


class RicherLedger(Ledger):
    bonus = 1


def _version(**attributes: object) -> type[QuotedAccount]:
    return type("QuotedAccount", (QuotedAccount,), {"__module__": __name__, **attributes})


def _app(account: type[hf.World], ledger: type[hf.World] = Ledger) -> hf.App:
    return hf.App("bank", worlds=[account, Other, ledger], effects=[other])


app = _app(QuotedAccount)
app_richer = _app(_version(bonus=1), type("Ledger", (RicherLedger,), {"__module__": __name__}))
app_silent = _app(_version(asks=False))
app_deadly = _app(_version(deadly=True))
app_killed_once = _app(_version(killed_once=True))
app_other = hf.App("bank", worlds=[Other])
not_an_app = 7
