"""A sample application with effects and timers, and a fake service with scripted answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

import holdfast as hf


class FakeServiceCall(NamedTuple):
    key: str
    attempt: int
    args: tuple[Any, ...]


class FakeService:
    """Records calls. Each scripted answer is a value, an error to raise, or a function to call."""

    def __init__(self) -> None:
        self.calls: list[FakeServiceCall] = []
        self.answers: deque[Any] = deque()
        # A call with the argument "poison" raises this error.
        self.fatal_error: BaseException | None = None

    def reset(self) -> None:
        self.calls.clear()
        self.answers.clear()
        self.fatal_error = None

    def handle_call(self, call: hf.Call, *args: Any) -> Any:
        self.calls.append(FakeServiceCall(call.idempotency_key, call.attempt, args))
        if self.fatal_error is not None and args == ("poison",):
            raise self.fatal_error
        answer = self.answers.popleft() if self.answers else "done"
        if isinstance(answer, BaseException):
            raise answer
        return answer() if isinstance(answer, Callable) else answer  # type: ignore[arg-type]

    @property
    def keys(self) -> set[str]:
        return {call.key for call in self.calls}


fake_service = FakeService()


class Parcel(msgspec.Struct, frozen=True):
    weight: float


# Concurrency 1 runs each call in the ticking thread, so that tests control the order.
@hf.effect("pay", attempts=3, timeout_s=10, concurrency=1)
def pay(call: hf.Call, what: str) -> str:
    paid: str = fake_service.handle_call(call, what)
    return paid


@hf.effect("ship", attempts=2, timeout_s=0.05, concurrency=1)
async def ship(call: hf.Call, parcel: Parcel) -> hf.Costed[float]:
    answer = fake_service.handle_call(call, parcel)
    if hasattr(answer, "__await__"):
        await answer
    return hf.Costed(parcel.weight, cost=0.5)


class GoodsOrdered(hf.Event):
    what: str = "tea"
    times: int = 1
    key: str | None = None
    tag: str = ""
    priority: int = 0
    timeout_s: float = 10.0


class Shipped(hf.Event):
    weight: float


class Dropped(hf.Event):
    """Cancel the nth ordered effect."""

    n: int = 0


class Woken(hf.Event):
    name: str = ""


class Slept(hf.Event):
    seconds: float = 60.0
    key: str | None = None
    name: str = ""


class Planned(hf.Event):
    at_s: float
    key: str | None = None
    name: str = ""


class Meant(hf.Event):
    """A calendar time in ISO format with its zone."""

    when: str
    key: str | None = None


class Juggled(hf.Event):
    """Timer keys to set and cancel, in this order."""

    what: list[str]


class Repeated(hf.Event):
    cron: str
    missed: str = "one"
    zone: str = "UTC"
    key: str = "job"


class Unset(hf.Event):
    key: str


class Wrote(hf.Event):
    to: str
    name: str = ""


class Buyer(hf.World):
    intents: list[bytes] = msgspec.field(default_factory=list)
    told: list[str] = msgspec.field(default_factory=list)
    woken: list[str] = msgspec.field(default_factory=list)
    cost: float = 0.0

    @hf.on(GoodsOrdered)
    def ordered(self, event: GoodsOrdered, cx: hf.Context) -> None:
        options = pay.options(key=event.key, priority=event.priority, timeout_s=event.timeout_s)
        for _ in range(event.times):
            self.intents.append(cx.do(options, event.what, tag=event.tag).intent_hash)

    @hf.on(Shipped)
    def shipped(self, event: Shipped, cx: hf.Context) -> None:
        self.intents.append(cx.do(ship, Parcel(event.weight)).intent_hash)

    @hf.on(Dropped)
    def dropped(self, event: Dropped, cx: hf.Context) -> None:
        cx.cancel(self.intents[event.n])

    @hf.on(pay)
    def paid(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        again = " again" if receipt.redrive_of in self.intents else ""
        what = receipt.value if receipt.ok else receipt.code
        self.told.append(
            f"{receipt.status} {what} {receipt.attempts} {receipt.tag}".strip() + again
        )

    @hf.on(ship)
    def arrived(self, receipt: hf.Receipt[float], cx: hf.Context) -> None:
        self.told.append(f"{receipt.status} {receipt.value if receipt.ok else receipt.code}")
        self.cost += receipt.cost

    @hf.on(Slept)
    def slept(self, event: Slept, cx: hf.Context) -> None:
        cx.after(event.seconds, Woken(event.name), key=event.key)

    @hf.on(Planned)
    def planned(self, event: Planned, cx: hf.Context) -> None:
        cx.at(datetime.fromtimestamp(event.at_s, UTC), Woken(event.name), key=event.key)

    @hf.on(Meant)
    def meant(self, event: Meant, cx: hf.Context) -> None:
        cx.at(datetime.fromisoformat(event.when), Woken(event.when), key=event.key)

    @hf.on(Juggled)
    def juggled(self, event: Juggled, cx: hf.Context) -> None:
        for what in event.what:
            verb, key = what.split()
            if verb == "set":
                cx.after(10, Woken(key), key=key)
            else:
                cx.cancel_timer(key)

    @hf.on(Repeated)
    def repeated(self, event: Repeated, cx: hf.Context) -> None:
        rule = {"missed": event.missed, "zone": event.zone, "key": event.key}
        cx.every(event.cron, Woken(event.cron), **rule)

    @hf.on(Unset)
    def unset(self, event: Unset, cx: hf.Context) -> None:
        cx.cancel_timer(event.key)

    @hf.on(Woken)
    def woke(self, event: Woken, cx: hf.Context) -> None:
        self.woken.append(event.name)

    @hf.on(Wrote)
    def wrote(self, event: Wrote, cx: hf.Context) -> None:
        cx.send(Buyer, event.to, Woken(event.name), lang="en")


class Careful(hf.World):
    """A world that handles the receipts of its mail."""

    sent: list[str] = msgspec.field(default_factory=list)
    seqs: list[int] = msgspec.field(default_factory=list)

    @hf.on(Wrote)
    def wrote(self, event: Wrote, cx: hf.Context) -> None:
        cx.send(Buyer, event.to, Woken(event.name))

    @hf.on(hf.sent)
    def told(self, receipt: hf.Receipt[Any], cx: hf.Context) -> None:
        self.sent.append(receipt.value.status if receipt.ok else receipt.code)
        self.seqs.append(receipt.value.seq if receipt.ok else 0)


app = hf.App("shop", worlds=[Buyer, Careful])
