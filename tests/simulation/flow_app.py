"""The application of the simulated flows: every shape of a flow, in two releases.

    order      branches, a sleep, an event with a timeout, children, compensations, a failure
    rounds     two runs, with events, a receive and a child that the first run does not await
    priced     another argument in the other release: the flow is parked
    fragile    long steps and few expiries: the flow is dead
    paid       effects, at once and with a failure
    family     children that end with their parent, and children that do not
    stubborn   continues after its cancellation
    limited    a timeout of the flow, and a compensation that may fail
    race       a receive that the code cancels
    report     the flow of a schedule

The world `Starter` starts flows and counts their ends.

The code of some flows takes time between its last step and its end, so that other commits come in between. A step function first awaits the function in `STEP_CALL`, which each worker process sets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import holdfast as hf
from holdfast.clock import MS, S
from holdfast.flows.model import TASK_PREFIX
from holdfast.sim.row_decoder_flows import UNIVERSE

LEASE_NS = 1500 * MS
# Random faults must not use these up.
EXPIRIES_MAX = 50
FRAGILE_EXPIRIES_MAX = 2
LIMIT_S = 0.8
RELEASES = (1, 2)
# What runs at the start of each step function of this process.
STEP_CALL: ContextVar[Callable[[], Awaitable[None]]] = ContextVar("step_call")
# Whether a compensation fails at present, by its idempotency key.
UNDO_FAILS: ContextVar[Callable[[str], bool]] = ContextVar("undo_fails")


# Less than the time after which an activation listens for the commits of others.
THINKING_S = 0.04


class Note(hf.Event):
    text: str


class Coupon(hf.Event):
    text: str


class Begun(hf.Event):
    """Starts a flow, or cancels the last one."""

    id: str
    flow: str


@hf.effect("pay", attempts=2, timeout_s=2.0)
def pay(call: hf.Call, n: int) -> int:
    raise NotImplementedError("the pool of the simulator has its own function")


async def work(n: int) -> int:
    await STEP_CALL.get()()
    return n + 1


async def undo_work(n: int) -> None:
    await STEP_CALL.get()()


async def try_undo(n: int) -> None:
    """A compensation that fails in all of its attempts, or in none."""
    step = hf.current_step()
    if step.attempt == 1:
        await STEP_CALL.get()()
    if UNDO_FAILS.get()(step.idempotency_key):
        raise OSError("the bank is down")


async def refuse() -> None:
    await STEP_CALL.get()()
    raise ValueError("refused")


async def think() -> None:
    await asyncio.sleep(THINKING_S)


def _flow(**options: Any) -> Any:
    return hf.flow(**{"lease_s": LEASE_NS / S, "expiries_max": EXPIRIES_MAX, **options})


@hf.task(lease_s=LEASE_NS / S, expiries_max=EXPIRIES_MAX)
def bill(n: int) -> int:
    return n


@_flow()
async def label(n: int) -> int:
    first = await hf.step(hf.options(work, name="label"), n)
    hf.undo(undo_work, first)
    await hf.sleep(0.2)
    return await hf.step(hf.options(work, name="label"), first)


async def branch(name: str) -> int:
    first = await hf.step(hf.options(work, name=name), 1)
    hf.undo(hf.options(undo_work, name=f"undo_{name}"), first)
    return await hf.step(hf.options(work, name=name), first)


@_flow()
async def order(fails: bool) -> list[Any]:
    first = await hf.step(work, 0)
    hf.undo(undo_work, first)
    sums = await asyncio.gather(branch("left"), branch("right"))
    await hf.sleep(0.3)
    try:
        note = (await hf.receive(Note, timeout_s=1.0)).text
    except hf.Timeout:
        note = ""
    child = await hf.step(label, sums[0])
    hf.undo(undo_work, child)
    if fails:
        await hf.step(refuse)
    return [note, child, await hf.step(bill, sums[1])]


@_flow()
async def rounds(n: int) -> int:
    await hf.step(work, n)
    child = hf.step(label.options(parent_close="abandon"), 10 * n)
    await asyncio.gather(hf.receive(Note), hf.receive(Note, Coupon))
    hf.receive(Note, Coupon)
    await hf.step(work, n)
    await think()
    if n:
        hf.again(n - 1)
    return await child


@_flow(name="priced")
async def priced_1(n: int) -> list[int]:
    first = await hf.step(work, 100)
    hf.undo(undo_work, first)
    await hf.sleep(0.3)
    return [101, first, await hf.step(work, 100)]


@_flow(name="priced")
async def priced_2(n: int) -> list[int]:
    first = await hf.step(work, 200)
    hf.undo(undo_work, first)
    await hf.sleep(0.3)
    return [201, first, await hf.step(work, 200)]


@_flow(expiries_max=FRAGILE_EXPIRIES_MAX)
async def fragile(n: int) -> int:
    first = await hf.step(work, n)
    return await hf.step(hf.options(work, name="fragile"), first)


@_flow()
async def paid(n: int) -> list[int]:
    hf.undo(undo_work, n)
    payments = await asyncio.gather(hf.step(pay, n), hf.step(pay, n + 1))
    await hf.step(work, n)
    await think()
    return list(payments)


@_flow()
async def family(waits: bool) -> list[int]:
    left = hf.step(label.options(parent_close="abandon"), 1)
    child = hf.step(label, 2)
    await hf.step(work, 0)
    await think()
    return [await child, await left] if waits else []


@_flow()
async def stubborn(n: int) -> int:
    with contextlib.suppress(asyncio.CancelledError):
        await hf.sleep(0.5)
    try:
        last = await hf.step(work, n)
        await think()
        return last
    except asyncio.CancelledError:
        return 0


@_flow(timeout_s=LIMIT_S)
async def limited(n: int) -> int:
    first = await hf.step(work, n)
    hf.undo(undo_work, first)
    hf.undo(hf.options(try_undo, name="undo_later", backoff_s=0.001), first)
    await hf.receive(Coupon)
    return await hf.step(work, n)


@_flow()
async def race(n: int) -> list[str]:
    """Return the texts of all events that the code got."""
    first, nap = hf.receive(Note), hf.sleep(0.2)
    await asyncio.wait({first, nap}, return_when=asyncio.FIRST_COMPLETED)
    got = [first.result().text] if first.done() else []
    first.cancel()
    await hf.step(work, n)
    got.append((await hf.receive(Note)).text)
    await hf.step(work, n)
    return got


@_flow()
async def report() -> int:
    await hf.sleep(0.4)
    return await hf.step(work, 0)


class Starter(hf.World):
    last: bytes = b""
    ends: int = 0

    @hf.on(Begun)
    def begun(self, event: Begun, cx: hf.Context) -> None:
        if event.flow == report.name:
            self.last = cx.start(report).intent_hash
        elif event.flow == limited.name:
            self.last = cx.start(limited, 1).intent_hash
        elif self.last:
            cx.cancel(self.last)

    @hf.on(report)
    def reported(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.ends += 1

    @hf.on(limited)
    def ended(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.ends += 1


class FlowApp:
    """A release of the application, with the code of its flows by the names of their activation tasks."""

    def __init__(self, release: int) -> None:
        priced = priced_1 if release == RELEASES[0] else priced_2
        self.app = hf.App(
            UNIVERSE,
            worlds=[Starter],
            flows=[
                order, label, rounds, priced, fragile, paid, family, stubborn, limited, race,
                report,
            ],
            tasks=[bill],
            effects=[pay],
            events=[Note, Coupon],
        )  # fmt: skip
        self.codes = {
            TASK_PREFIX + name: flow.within(UNIVERSE, self.app)
            for name, flow in self.app.flows.items()
        }
        self.versions = {code.name: code.code_version for code in self.codes.values()}


APPS = {release: FlowApp(release) for release in RELEASES}
# What clients start: (flow, arguments).
STARTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("order", (False,)),
    ("order", (True,)),
    ("rounds", (1,)),
    ("rounds", (1,)),
    ("priced", (1,)),
    ("fragile", (1,)),
    ("paid", (1,)),
    ("family", (False,)),
    ("family", (True,)),
    ("stubborn", (1,)),
    ("limited", (1,)),
    ("race", (1,)),
    ("race", (1,)),
)
