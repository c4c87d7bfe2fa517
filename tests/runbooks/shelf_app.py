"""The application of the runbook tests. A file in the current directory breaks a part of it: the test writes the file to
cause a fault, and the page removes the cause.

    carrier-is-down     the effect fails
    carrier-is-slow     the effect does not return
    other-code          the code of the world and of the flow differs
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import holdfast as hf

CARRIER_DOWN = Path("carrier-is-down")
CARRIER_SLOW = Path("carrier-is-slow")
OTHER_CODE = Path("other-code")


class Stocked(hf.Event):
    count: int


class DeliveryAsked(hf.Event):
    pass


class CopySent(hf.Event):
    """Its reducer sends mail to another universe."""


class CheckPlanned(hf.Event):
    seconds: float


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


def read_level(shelf: str) -> int:
    return 1


@hf.flow
async def refill(shelf: str) -> str:
    await hf.step(read_level, shelf + " upside down" if OTHER_CODE.exists() else shelf)
    await hf.sleep(1)
    await hf.step(read_level, shelf)
    return "filled"


class Shelf(hf.World):
    count: int = 0
    delivered: int = 0
    checks: int = 0

    @hf.on(Stocked)
    def stocked(self, event: Stocked, cx: hf.Context) -> None:
        self.count += event.count * (2 if OTHER_CODE.exists() else 1)

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

    @hf.on(ShelfChecked)
    def checked(self, event: ShelfChecked, cx: hf.Context) -> None:
        self.checks += 1


PARTS: dict[str, Any] = {
    "worlds": [Shelf],
    "tasks": [count_stock],
    "flows": [refill],
    "version": "1",
}
app = hf.App("shop", **PARTS)
# The newer version.
next_app = hf.App("shop", events=[Relabelled], **PARTS)
# The same code in another universe.
depot = hf.App("depot", **PARTS)
