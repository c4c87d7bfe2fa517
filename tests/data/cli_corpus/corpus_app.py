"""The application of the command corpus. It uses public names only, so that the recorded code and this code run it."""

from __future__ import annotations

import holdfast as hf

YEAR_S = 366 * 24 * 3600.0


class ReadingTaken(hf.Event):
    value: int


class ReadingRefused(hf.Event):
    """Its handler raises."""

    value: int


class InvoiceWanted(hf.Event):
    cents: int


class NoticeDue(hf.Event):
    text: str


@hf.effect("card.charge", attempts=1)
def charge(call: hf.Call, cents: int) -> str:
    if cents < 0:
        raise hf.Refused(cents=cents)
    return f"charged {cents}"


@hf.effect("letter.print", attempts=2)
def print_letter(call: hf.Call, text: str) -> str:
    """No process of the corpus performs it."""
    return text


class Meter(hf.World):
    total: int = 0
    invoices: int = 0
    notice: str = ""

    @hf.on(ReadingTaken)
    def reading_taken(self, event: ReadingTaken, cx: hf.Context) -> None:
        self.total += event.value

    @hf.on(ReadingRefused)
    def reading_refused(self, event: ReadingRefused, cx: hf.Context) -> None:
        raise ValueError(f"no reading of {event.value}")

    @hf.on(InvoiceWanted)
    def invoice_wanted(self, event: InvoiceWanted, cx: hf.Context) -> None:
        cx.do(charge, event.cents, tag="invoice")
        cx.do(print_letter, f"{event.cents} cents")
        cx.after(YEAR_S, NoticeDue("pay"), key="notice")
        cx.every(cron="0 9 * * mon-fri", event=NoticeDue("daily"), key="daily")

    @hf.on(charge)
    def charged(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.invoices += 1

    @hf.on(print_letter)
    def printed(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.notice = "printed"

    @hf.on(NoticeDue)
    def notice_due(self, event: NoticeDue, cx: hf.Context) -> None:
        self.notice = event.text


@hf.task(retain_s=YEAR_S)
def add(left: int, right: int = 1) -> int:
    return left + right


@hf.task(attempts=1, retain_s=YEAR_S)
def divide(left: int, right: int) -> float:
    return left / right


@hf.task(queue="reports", retain_s=YEAR_S)
def report(name: str) -> str:
    """No process of the corpus serves its queue."""
    return name


app = hf.App("grid", worlds=[Meter], effects=[charge, print_letter], tasks=[add, divide, report])


def accept(work: object) -> None:
    """The handler of the recorded attempts."""


def refuse(work: object) -> None:
    raise hf.Refused(why="not today")
