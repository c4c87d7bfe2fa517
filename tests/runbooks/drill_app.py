"""The application of the newcomer's drill. A file in the current directory breaks a part of it.

door-is-jammed      the reducer of `DoorOpened` does not return
tax-changed         the reducer of `Sold` yields another result
printer-is-off      the task `print_label` and the flow `print_all` fail
price-list-is-lost  the reducer of `Priced` raises
"""

from __future__ import annotations

import time
from pathlib import Path

import holdfast as hf

DOOR_JAMMED, TAX_CHANGED, PRINTER_OFF = Path("door-is-jammed"), Path("tax-changed"), Path("printer-is-off")  # fmt: skip
PRICES_LOST = Path("price-list-is-lost")


class Sold(hf.Event):
    cents: int


class Priced(hf.Event):
    cents: int


class DoorOpened(hf.Event):
    pass


class HelpAsked(hf.Event):
    pass


class Cashier(hf.World):
    cents: int = 0
    opened: int = 0

    @hf.on(Sold)
    def sold(self, event: Sold, cx: hf.Context) -> None:
        self.cents += event.cents + (1 if TAX_CHANGED.exists() else 0)

    @hf.on(Priced)
    def priced(self, event: Priced, cx: hf.Context) -> None:
        if PRICES_LOST.exists():
            raise LookupError("no price")
        self.cents += event.cents

    @hf.on(DoorOpened)
    def door_opened(self, event: DoorOpened, cx: hf.Context) -> None:
        while DOOR_JAMMED.exists():
            time.sleep(0.05)
        self.opened += 1


class Clerk(hf.World):
    answers: int = 0
    refused: int = 0

    @hf.on(HelpAsked)
    def help_asked(self, event: HelpAsked, cx: hf.Context) -> None:
        cx.do(hf.llm.chat, [{"role": "user", "content": "Help."}], "small", {"max_tokens": 10})

    @hf.on(hf.llm.chat)
    def answered(self, receipt: hf.Receipt[hf.llm.Reply], cx: hf.Context) -> None:
        self.answers += receipt.ok
        self.refused += not receipt.ok


@hf.task(attempts=1)
def print_label(n: int) -> int:
    if PRINTER_OFF.exists():
        raise OSError("the printer is off")
    return n


@hf.flow(attempts=1)
async def print_all(count: int) -> int:
    for n in range(count):
        await hf.step(print_label, n)
    return count


app = hf.App("market", worlds=[Cashier, Clerk], tasks=[print_label], flows=[print_all], version="1")
# The team of the tills deploys alone.
tills_only = hf.App("market", worlds=[Cashier], tasks=[print_label], version="1")
