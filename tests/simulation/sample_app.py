"""Sample application of the simulated worlds: accounts that use every feature of a reducer.

They count, transfer money, draw random numbers, read the time, start and cancel effects and timers,
handle receipts, raise, kill their process, and at times break the rules for reducers. `model_app`
reimplements these reducers over plain data. Every handler except one replies with a view of its
state, so that each journal entry reveals a wrong state.

The worker pools supply the effect functions (`external_service`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache

import msgspec

from holdfast.app.app import App
from holdfast.app.builtin_effects.fabric import FabricSendReceipt, sent
from holdfast.app.definitions import Call, Event, Receipt, World, effect, on
from holdfast.sim.settings import ATTEMPTS
from holdfast.world.context import Context
from holdfast.world.definition import WorldDefinition
from holdfast.world.history import HistoryBound

UNIVERSE = "u"
# Names of the two code versions, and the event types that the former one does not know. Events of
# op `code` record which worker runs which version.
LATEST, FORMER = "1", "0"
LATER_EVENTS = ("Renewed",)
# Another universe without workers: messages to it stay in its inboxes.
OTHER_UNIVERSE = "v"
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
    """Like Ordered, but the account handles the receipt."""

    id: str
    what: str
    key: str | None = None
    priority: int = 0


class Regretted(Event):
    """Cancels one of the latest purchases, if there is one."""

    id: str
    nth: int


class Slept(Event):
    id: str
    seconds: int
    key: str | None = None


class Dated(Event):
    """Sets a timer by the calendar, relative to the account's current time, possibly in the
    past."""

    id: str
    seconds: int
    key: str | None = None


class Ticked(Event):
    """Sets a recurring timer."""

    id: str
    rule: str
    missed: str
    key: str


class Woken(Event):
    id: str
    key: str


class Botched(Event):
    """Its handler changes everything, then raises."""

    id: str


class Deadly(Event):
    """Its handler kills the process, until faults have stopped."""

    id: str


class Fickle(Event):
    """Its handler reads unrecorded state, so a replay diverges."""

    id: str


class Moody(Event):
    """Like Fickle, but without a reply: only the state shows it."""

    id: str


class Renewed(Event):
    """Handled by the later code version, unknown to the earlier one."""

    id: str
    then: str = ""
    to: str = ""


class Unheard(Event):
    """Declared by the app, without a handler."""

    id: str


@effect("fx.quote", attempts=ATTEMPTS["fx.quote"], timeout_s=EFFECT_TIMEOUT_S, concurrency=1)
def quote(call: Call, what: str, order: str) -> float:
    raise AssertionError("the worker pool replaces this function")


@effect(
    "fx.pay",
    attempts=ATTEMPTS["fx.pay"],
    timeout_s=EFFECT_TIMEOUT_S,
    rate_per_s=PAY_RATE_PER_S,
    concurrency=1,
)
async def pay(call: Call, what: str, order: str) -> int:
    raise AssertionError("the worker pool replaces this function")


class FormerAccount(World):
    """The state of accounts in the earlier code version, and the handlers of both versions."""

    balance: int = 0
    seen: int = 0
    # Holds an int until it is stored and loaded. Detects replays that skip the round trip.
    rate: float = 0.0
    marks: list[str] = msgspec.field(default_factory=list)
    # The latest purchases, by intent hash.
    orders: list[str] = msgspec.field(default_factory=list)
    # The value that a Moody handler saw. No reply contains it.
    whim: int = 0

    @on(Paid)
    def paid(self, event: Paid, cx: Context) -> None:
        self.balance += event.amount
        self.rate = event.amount
        self._reply_with_state(cx)

    @on(Moved)
    def moved(self, event: Moved, cx: Context) -> None:
        self.balance -= event.amount
        cx.send(Account, event.to, Paid(f"{event.id}>", event.amount))
        self._reply_with_state(cx)

    @on(Wrote)
    def wrote(self, event: Wrote, cx: Context) -> None:
        cx.send(Account, event.to, Paid(f"{event.id}>", 1), universe=OTHER_UNIVERSE)
        self._reply_with_state(cx)

    @on(Rolled)
    def rolled(self, event: Rolled, cx: Context) -> None:
        mark = f"{cx.uuid()} {cx.uuid()} {cx.random.randrange(1_000_000)} {cx.now_ns}"
        self.marks = [*self.marks, mark][-MARKS_KEPT:]
        self._reply_with_state(cx)

    @on(Ordered)
    def ordered(self, event: Ordered, cx: Context) -> None:
        wanted = quote.options(key=event.key, timeout_s=EFFECT_TIMEOUT_S)
        cx.do(wanted, event.what, _order_name(event), tag=event.id)
        self._reply_with_state(cx)

    @on(Bought)
    def bought(self, event: Bought, cx: Context) -> None:
        options = {"key": event.key, "priority": event.priority, "tag": event.id}
        wanted = pay.options(timeout_s=EFFECT_TIMEOUT_S, **options)
        intent = cx.do(wanted, event.what, _order_name(event))
        self.orders = [*self.orders, intent.intent_hash.hex()][-ORDERS_KEPT:]
        self._reply_with_state(cx)

    @on(pay)
    def settled(self, receipt: Receipt[int], cx: Context) -> None:
        told = f"{receipt.tag} {receipt.status} {receipt.code} {receipt.value} {receipt.attempts}"
        self.marks = [*self.marks, told][-MARKS_KEPT:]
        self._reply_with_state(cx)

    @on(Regretted)
    def regretted(self, event: Regretted, cx: Context) -> None:
        if self.orders:
            cx.cancel(bytes.fromhex(self.orders[event.nth % len(self.orders)]))
        self._reply_with_state(cx)

    @on(sent)
    def mailed(self, receipt: Receipt[FabricSendReceipt], cx: Context) -> None:
        self.marks = [*self.marks, f"mail {receipt.status} {receipt.code}"][-MARKS_KEPT:]
        self._reply_with_state(cx)

    @on(Slept)
    def slept(self, event: Slept, cx: Context) -> None:
        cx.after(event.seconds, Paid(f"{event.id}~", 1), key=event.key)
        self._reply_with_state(cx)

    @on(Dated)
    def dated(self, event: Dated, cx: Context) -> None:
        when = cx.now + timedelta(seconds=event.seconds)
        cx.at(when, Paid(f"{event.id}~", 1), key=event.key)
        self._reply_with_state(cx)

    @on(Ticked)
    def ticked(self, event: Ticked, cx: Context) -> None:
        cx.every(event.rule, Paid(f"{event.id}~", 1), key=event.key, missed=event.missed)
        self._reply_with_state(cx)

    @on(Woken)
    def woken(self, event: Woken, cx: Context) -> None:
        cx.cancel_timer(event.key)
        self._reply_with_state(cx)

    @on(Botched)
    def botched(self, event: Botched, cx: Context) -> None:
        self.balance += 1_000_000
        self.marks.append("never")
        cx.do(quote, "never", "never")
        cx.send(Account, "nobody", Paid("never", 1))
        self._reply_with_state(cx)
        raise RuntimeError(f"botched {event.id}")

    @on(Deadly)
    def deadly(self, event: Deadly, cx: Context) -> None:
        self.balance += 1_000_000
        _hooks.kill_process()
        self.balance -= 999_999
        self._reply_with_state(cx)

    @on(Fickle)
    def fickle(self, event: Fickle, cx: Context) -> None:
        self.balance = _hooks.unrecorded_value()
        self._reply_with_state(cx)

    @on(Moody)
    def moody(self, event: Moody, cx: Context) -> None:
        self.whim = 1 + _hooks.unrecorded_value() % WHIMS

    def _reply_with_state(self, cx: Context) -> None:
        self.seen += 1
        cx.reply([self.seen, self.balance, str(self.rate), self.marks])


class Account(FormerAccount):
    # Number of events that the earlier version does not know. No reply contains it.
    news: int = 0

    @on(Renewed)
    def renewed(self, event: Renewed, cx: Context) -> None:
        self.balance += 1
        self.news += 1
        if event.then == "timer":
            cx.after(1, Renewed(f"{event.id}~"))
        elif event.then == "mail":
            cx.send(Account, event.to, Renewed(f"{event.id}>"))
        self._reply_with_state(cx)


def _order_name(event: Ordered | Bought) -> str:
    """Without a key every order is distinct, so that its calls can be distinguished."""
    return event.id if event.key is None else ""


def _build_app() -> App:
    return App(
        "sim",
        universe=UNIVERSE,
        worlds=[Account],
        effects=[quote, pay],
        events=[Unheard],
        version=LATEST,
    )


def _without_later_events(app: App) -> App:
    """Return the earlier code version: without some events and without their state field."""
    later = app.programs["Account"]
    dropped = {("event", event) for event in LATER_EVENTS}
    handlers = {cause: fn for cause, fn in later.handlers.items() if cause not in dropped}
    declared = later.declared_versions.keys() - handlers.keys() - dropped
    app.programs["Account"] = WorldDefinition(
        "Account", FORMER, FormerAccount, later.events, handlers, declared_causes=declared
    )
    return app


app = _build_app()


@lru_cache(maxsize=16)
def app_version(keep: tuple[int, int] | None, *, former: bool = False) -> App:
    """Return the app with a bound on the histories of its accounts (entries, ns), or without, or
    its earlier version."""
    built = _without_later_events(_build_app()) if former else _build_app()
    built.programs["Account"].history = None if keep is None else HistoryBound(*keep)
    return built


class ReducerHooks:
    """Hooks that break the rules for reducers. A run sets them before it starts."""

    def __init__(self) -> None:
        self.kill_process: Callable[[], None] = lambda: None
        self.unrecorded_value: Callable[[], int] = lambda: 0


_hooks = ReducerHooks()


def set_hooks(*, kill_process: Callable[[], None], unrecorded_value: Callable[[], int]) -> None:
    _hooks.kill_process, _hooks.unrecorded_value = kill_process, unrecorded_value
