"""The application of the runbook tests. A file in the current directory breaks a part of it: the test writes the file to
cause a fault, and the page removes the cause.

    carrier-is-down     the effect fails
    carrier-is-slow     the effect does not return
    former-class        a class of recorded values is that of a former version
    no-upcast           the code does not declare how to read a value of the former class
    other-code          the code of the world and of the flow differs
    scale-is-broken     the task and the step that read the scale fail
    scale-is-slow       they do not return
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast as hf

CARRIER_DOWN = Path("carrier-is-down")
CARRIER_SLOW = Path("carrier-is-slow")
FORMER_CLASS = Path("former-class")
NO_UPCAST = Path("no-upcast")
OTHER_CODE = Path("other-code")
SCALE_BROKEN = Path("scale-is-broken")
SCALE_SLOW = Path("scale-is-slow")


class Stocked(hf.Event):
    count: int


class DeliveryAsked(hf.Event):
    pass


class CopySent(hf.Event):
    """Its reducer sends mail to another universe."""


class Counted(hf.Event):
    """Answers how many of them the shelf has handled."""


class CheckPlanned(hf.Event):
    seconds: float


class ChecksPlanned(hf.Event):
    """Asks for a check in each minute of a time zone."""

    zone: str


class ShelfChecked(hf.Event):
    pass


class Relabelled(hf.Event):
    """An event of the newer version alone."""


@hf.effect("carrier.send", attempts=1)
def send_parcels(call: hf.Call) -> str:
    if CARRIER_DOWN.exists():
        raise ConnectionError("the carrier does not answer")
    while CARRIER_SLOW.exists():
        time.sleep(0.01)
    return "sent"


@hf.task(attempts=1)
def count_stock(shelf: str) -> str:
    return f"{shelf} is counted"


@hf.task(attempts=1)
def count_slowly(shelf: str) -> str:
    time.sleep(2)
    return "counted"


def read_scale(shelf: str) -> int:
    if SCALE_BROKEN.exists():
        raise OSError("the scale does not answer")
    while SCALE_SLOW.exists():
        time.sleep(0.01)
    return 7


@hf.task(attempts=1, lease_s=1, expiries_max=2)
def weigh(shelf: str) -> int:
    return read_scale(shelf)


@hf.flow(attempts=1)
async def weigh_shelf(shelf: str) -> int:
    return await hf.step(read_scale, shelf)


@hf.flow
async def weigh_quickly(shelf: str) -> str:
    with contextlib.suppress(hf.StepFailed):
        await hf.step(hf.options(read_scale, attempts=1, timeout_s=0.1), shelf)
    await hf.receive(Stocked)
    return "weighed"


@hf.flow
async def move_shelf(shelf: str) -> None:
    hf.undo(read_scale, shelf)
    await hf.receive(Stocked)


@hf.flow
async def count_later(shelf: str) -> str:
    return await hf.step(count_stock.options(queue="later"), shelf)


def read_level(shelf: str) -> int:
    return 1


@hf.flow
async def refill(shelf: str) -> str:
    await hf.step(read_level, shelf + " upside down" if OTHER_CODE.exists() else shelf)
    await hf.sleep(1)
    await hf.step(read_level, shelf)
    return "filled"


if FORMER_CLASS.exists():

    @dataclass
    class ShelfLevel:
        percent: int
else:

    @dataclass
    class ShelfLevel:  # type: ignore[no-redef]
        parts: float


@hf.upcast(ShelfLevel, 1)
def percent_to_parts(fields: dict[str, Any]) -> dict[str, Any]:
    return {"parts": fields["percent"] / 100}


def measure_level(shelf: str) -> ShelfLevel:
    return ShelfLevel(50)


@hf.flow
async def watch_level(shelf: str) -> str:
    await hf.step(measure_level, shelf)
    await hf.sleep(1)
    return "watched"


class Shelf(hf.World):
    count: int = 0
    delivered: int = 0
    planned: int = 0
    counted: int = 0
    checks: int = 0

    @hf.on(Stocked)
    def stocked(self, event: Stocked, cx: hf.Context) -> None:
        self.count += event.count * (2 if OTHER_CODE.exists() else 1)

    @hf.on(Counted)
    def on_counted(self, event: Counted, cx: hf.Context) -> None:
        self.counted += 1
        cx.reply(self.counted)

    @hf.on(DeliveryAsked)
    def delivery_asked(self, event: DeliveryAsked, cx: hf.Context) -> None:
        cx.do(send_parcels)

    @hf.on(send_parcels)
    def parcels_sent(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.delivered += receipt.ok

    @hf.on(CopySent)
    def copy_sent(self, event: CopySent, cx: hf.Context) -> None:
        cx.send("Shelf", "copy", Stocked(1), universe="depot")

    @hf.on(CheckPlanned)
    def check_planned(self, event: CheckPlanned, cx: hf.Context) -> None:
        cx.after(event.seconds, ShelfChecked(), key="check")
        self.planned += 1

    @hf.on(ChecksPlanned)
    def checks_planned(self, event: ChecksPlanned, cx: hf.Context) -> None:
        cx.every("* * * * *", ShelfChecked(), key="check", zone=event.zone)
        self.planned += 1

    @hf.on(ShelfChecked)
    def checked(self, event: ShelfChecked, cx: hf.Context) -> None:
        self.checks += 1


class LabelledShelf(Shelf):
    """The world type `Shelf` of the newer version. Its state has a further field."""

    labels: int = 0


LabelledShelf.__name__ = "Shelf"


class PromptAsked(hf.Event):
    socket: str


class NightShift(hf.World):
    @hf.on(PromptAsked)
    def prompt_asked(self, event: PromptAsked, cx: hf.Context) -> None:
        cx.do(hf.agent.dispatch, "leader", "Count the shelves.", "codex", {"socket": event.socket})

    @hf.on(hf.agent.dispatch)
    def prompted(self, receipt: hf.Receipt[hf.agent.Dispatched], cx: hf.Context) -> None:
        pass


PARTS: dict[str, Any] = {
    "worlds": [Shelf],
    "tasks": [count_stock, count_slowly, weigh],
    "flows": [refill, weigh_shelf, weigh_quickly, move_shelf, count_later, watch_level],
    "upcasts": [] if FORMER_CLASS.exists() or NO_UPCAST.exists() else [percent_to_parts],
    "version": "1",
}
app = hf.App("shop", **PARTS)
# The newer version.
next_app = hf.App("shop", events=[Relabelled], **{**PARTS, "worlds": [LabelledShelf]})
# A version without a task.
former_app = hf.App("shop", **{**PARTS, "tasks": [count_stock]})
# The same code in another universe.
depot = hf.App("depot", **PARTS)
# Prompts to the pane of the leader.
panes = hf.App("shop", worlds=[NightShift], version="1")
