"""The application of the simulated worlds: accounts that do all that a reducer may do.

They count, move money to each other, roll dice, look at the time, want effects and timers and take
them back, hear how those ended, fail, kill their process, and at times do what a reducer must not.
`check_app` states the same reducers once more, over plain data. Every handler but one replies with what
it sees of its state, so that each journal entry tells whether the state was right.

What the effects do is not here: the pools bring it (`outside`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache

import msgspec

from holdfast.app.app import App
from holdfast.app.declare import Call, Event, Receipt, World, effect, on
from holdfast.app.shipped.fabric import FabricSendReceipt, sent
from holdfast.sim.settings import ATTEMPTS
from holdfast.world.context import Context
from holdfast.world.history import Bound
from holdfast.world.program import Program

UNIVERSE = "u"
# The names of the two versions, and what the one before does not know. `check_worlds` is told which
# worker runs which.
LATEST, FORMER = "1", "0"
LATER = ("Renewed",)
# Another universe, in which nobody works: what is sent there stays in its inboxes.
ABROAD = "v"
MARKS_KEPT = 3
ORDERS_KEPT = 3
WHIMS = 64
EFFECT_TIMEOUT_S = 2.0
PAY_RATE_PER_S = 5.0


class Paid(Event):
    id: str
    amount: int
    note: str = ""


class Moved(Event):
    id: str
    amount: int
    to: str


class Wrote(Event):
    """Sends to an account of another universe."""

    id: str
    to: str


class Rolled(Event):
    id: str


class Ordered(Event):
    id: str
    what: str
    key: str | None = None


class Bought(Event):
    """As ordered, but the account hears how it ended."""

    id: str
    what: str
    key: str | None = None
    priority: int = 0


class Regretted(Event):
    """Takes back one of the latest purchases, if there is any."""

    id: str
    nth: int


class Slept(Event):
    id: str
    seconds: int
    key: str | None = None


class Dated(Event):
    """A timer by the calendar, so far from the account's now: before it, too."""

    id: str
    seconds: int
    key: str | None = None


class Ticked(Event):
    """A timer that repeats."""

    id: str
    rule: str
    missed: str
    key: str


class Woken(Event):
    id: str
    key: str


class Botched(Event):
    """Its handler touches everything, then raises."""

    id: str


class Deadly(Event):
    """Its handler takes the process down, until somebody has fixed it."""

    id: str


class Fickle(Event):
    """Its handler looks at what no journal holds: repeated, it does something else."""

    id: str


class Moody(Event):
    """As fickle, and silent: nothing but the state tells of it."""

    id: str


class Renewed(Event):
    """The later version of the code handles it, the earlier one does not know it."""

    id: str
    then: str = ""
    to: str = ""


class Unheard(Event):
    """The app names it, and no handler takes it."""

    id: str


@effect("fx.quote", attempts=ATTEMPTS["fx.quote"], timeout_s=EFFECT_TIMEOUT_S, concurrency=1)
def quote(call: Call, what: str, order: str) -> float:
    raise AssertionError("a pool brings what it does")


@effect(
    "fx.pay",
    attempts=ATTEMPTS["fx.pay"],
    timeout_s=EFFECT_TIMEOUT_S,
    rate_per_s=PAY_RATE_PER_S,
    concurrency=1,
)
async def pay(call: Call, what: str, order: str) -> int:
    raise AssertionError("a pool brings what it does")


class Earlier(World):
    """The state of accounts in the version before, and what both versions do with it."""

    balance: int = 0
    seen: int = 0
    # Holds an int, too, until it was stored and read again: a trap for replays.
    rate: float = 0.0
    marks: list[str] = msgspec.field(default_factory=list)
    # The latest purchases, by the names of their intents.
    orders: list[str] = msgspec.field(default_factory=list)
    # What a moody handler saw. No reply tells of it.
    whim: int = 0

    @on(Paid)
    def paid(self, event: Paid, cx: Context) -> None:
        self.balance += event.amount
        self.rate = event.amount
        self._tell(cx)

    @on(Moved)
    def moved(self, event: Moved, cx: Context) -> None:
        self.balance -= event.amount
        cx.send(Account, event.to, Paid(f"{event.id}>", event.amount))
        self._tell(cx)

    @on(Wrote)
    def wrote(self, event: Wrote, cx: Context) -> None:
        cx.send(Account, event.to, Paid(f"{event.id}>", 1), universe=ABROAD)
        self._tell(cx)

    @on(Rolled)
    def rolled(self, event: Rolled, cx: Context) -> None:
        mark = f"{cx.uuid()} {cx.uuid()} {cx.random.randrange(1_000_000)} {cx.now_ns}"
        self.marks = [*self.marks, mark][-MARKS_KEPT:]
        self._tell(cx)

    @on(Ordered)
    def ordered(self, event: Ordered, cx: Context) -> None:
        wanted = quote.options(key=event.key, timeout_s=EFFECT_TIMEOUT_S)
        cx.do(wanted, event.what, _order(event), tag=event.id)
        self._tell(cx)

    @on(Bought)
    def bought(self, event: Bought, cx: Context) -> None:
        options = {"key": event.key, "priority": event.priority, "tag": event.id}
        wanted = pay.options(timeout_s=EFFECT_TIMEOUT_S, **options)
        intent = cx.do(wanted, event.what, _order(event))
        self.orders = [*self.orders, intent.intent_hash.hex()][-ORDERS_KEPT:]
        self._tell(cx)

    @on(pay)
    def settled(self, receipt: Receipt[int], cx: Context) -> None:
        told = f"{receipt.tag} {receipt.status} {receipt.code} {receipt.value} {receipt.attempts}"
        self.marks = [*self.marks, told][-MARKS_KEPT:]
        self._tell(cx)

    @on(Regretted)
    def regretted(self, event: Regretted, cx: Context) -> None:
        if self.orders:
            cx.cancel(bytes.fromhex(self.orders[event.nth % len(self.orders)]))
        self._tell(cx)

    @on(sent)
    def mailed(self, receipt: Receipt[FabricSendReceipt], cx: Context) -> None:
        self.marks = [*self.marks, f"mail {receipt.status} {receipt.code}"][-MARKS_KEPT:]
        self._tell(cx)

    @on(Slept)
    def slept(self, event: Slept, cx: Context) -> None:
        cx.after(event.seconds, Paid(f"{event.id}~", 1), key=event.key)
        self._tell(cx)

    @on(Dated)
    def dated(self, event: Dated, cx: Context) -> None:
        when = cx.now + timedelta(seconds=event.seconds)
        cx.at(when, Paid(f"{event.id}~", 1), key=event.key)
        self._tell(cx)

    @on(Ticked)
    def ticked(self, event: Ticked, cx: Context) -> None:
        cx.every(event.rule, Paid(f"{event.id}~", 1), key=event.key, missed=event.missed)
        self._tell(cx)

    @on(Woken)
    def woken(self, event: Woken, cx: Context) -> None:
        cx.cancel_timer(event.key)
        self._tell(cx)

    @on(Botched)
    def botched(self, event: Botched, cx: Context) -> None:
        self.balance += 1_000_000
        self.marks.append("never")
        cx.do(quote, "never", "never")
        cx.send(Account, "nobody", Paid("never", 1))
        self._tell(cx)
        raise RuntimeError(f"botched {event.id}")

    @on(Deadly)
    def deadly(self, event: Deadly, cx: Context) -> None:
        self.balance += 1_000_000
        _outside.strike()
        self.balance -= 999_999
        self._tell(cx)

    @on(Fickle)
    def fickle(self, event: Fickle, cx: Context) -> None:
        self.balance = _outside.mood()
        self._tell(cx)

    @on(Moody)
    def moody(self, event: Moody, cx: Context) -> None:
        self.whim = 1 + _outside.mood() % WHIMS

    def _tell(self, cx: Context) -> None:
        self.seen += 1
        cx.reply([self.seen, self.balance, str(self.rate), self.marks])


class Account(Earlier):
    # How many events it had that the version before does not know. No reply tells of it.
    news: int = 0

    @on(Renewed)
    def renewed(self, event: Renewed, cx: Context) -> None:
        self.balance += 1
        self.news += 1
        if event.then == "timer":
            cx.after(1, Renewed(f"{event.id}~"))
        elif event.then == "mail":
            cx.send(Account, event.to, Renewed(f"{event.id}>"))
        self._tell(cx)


def _order(event: Ordered | Bought) -> str:
    """Without a key every order is another one: its calls can be told apart."""
    return event.id if event.key is None else ""


def _made() -> App:
    return App(
        "sim",
        universe=UNIVERSE,
        worlds=[Account],
        effects=[quote, pay],
        events=[Unheard],
        version=LATEST,
    )


def _as_before(app: App) -> App:
    """The same code before it knew some events, and before its accounts had a field for them."""
    later = app.programs["Account"]
    dropped = {("event", event) for event in LATER}
    handlers = {cause: fn for cause, fn in later.handlers.items() if cause not in dropped}
    declared = later.known.keys() - handlers.keys() - dropped
    app.programs["Account"] = Program(
        "Account", FORMER, Earlier, later.events, handlers, declared=declared
    )
    return app


app = _made()


@lru_cache(maxsize=16)
def version(keep: tuple[int, int] | None, *, back: bool = False) -> App:
    """The app with a bound on the histories of its accounts (entries, ns), or without; or the version
    before."""
    made = _as_before(_made()) if back else _made()
    made.programs["Account"].history = None if keep is None else Bound(*keep)
    return made


class Outside:
    """What reducers must not touch, and these do. A run lays it down before anything starts."""

    def __init__(self) -> None:
        self.strike: Callable[[], None] = lambda: None
        self.mood: Callable[[], int] = lambda: 0


_outside = Outside()


def outside(*, strike: Callable[[], None], mood: Callable[[], int]) -> None:
    _outside.strike, _outside.mood = strike, mood
