"""An application whose payloads have a secret in every place, and the paths that hide them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

import holdfast as hf

# In every secret. No name and no other text has it.
MARK = "swordfish"
NUMBER = 77_001_234_567


def secret(place: str) -> str:
    return f"{place}-{MARK}-{place} with spaces"


class CardShown(hf.Event):
    number: str = ""
    digits: int = 0
    shop: str = "books"


class CardRefused(hf.Event):
    number: str = ""


class PaymentWanted(hf.Event):
    number: str = ""


class Confirmation(hf.Event):
    password: str = ""


@hf.effect("bank.pay", attempts=1)
async def pay(call: hf.Call, number: str) -> float:
    raise ValueError(f"the bank refused {number}")


class Safe(hf.World):
    number: str = ""
    shop: str = ""
    digits: int = 0
    pins: list[dict[str, str]] = msgspec.field(default_factory=list)

    @hf.on(CardShown)
    def shown(self, event: CardShown, cx: hf.Context) -> None:
        self.number, self.shop, self.digits = event.number, event.shop, event.digits
        self.pins = [{"pin": event.number, "of": "card"}]
        cx.reply({"number": event.number, "shop": event.shop})

    @hf.on(CardRefused)
    def refused(self, event: CardRefused, cx: hf.Context) -> None:
        raise ValueError(f"refused {event.number} and {self.number}")

    @hf.on(PaymentWanted)
    def wanted(self, event: PaymentWanted, cx: hf.Context) -> None:
        cx.do(pay, event.number)
        cx.after(86_400.0, CardShown(event.number), key="later")


async def reserve(number: str) -> dict[str, str]:
    return {"number": number, "shop": "books"}


async def decline(number: str) -> None:
    raise RuntimeError(f"declined {number}")


@hf.flow(attempts=1)
async def order(item: str, card: str) -> Any:
    held = await hf.step(reserve, card)
    hf.publish("receipt", held)
    if item == "bad":
        await hf.step(decline, card)
    if item == "wait":
        await hf.receive(CardShown)
    return held


@hf.task(attempts=1, queue="charges")
def charge(item: str, card: str, note: Any = None) -> Any:
    if item == "bad":
        raise ValueError(f"no charge of {card} {note}")
    return {"token": card, "item": item}


@hf.flow(attempts=1)
async def purchase() -> None:
    hf.undo(charge, "good", secret("undo"))
    await hf.step(charge, "bad", secret("child"))


@hf.flow(attempts=1)
async def parcel() -> None:
    await hf.step(purchase)


@hf.task(attempts=1, queue="charges")
def gather(item: str, *cards: str, **notes: str) -> int:
    return len(cards) + len(notes)


@hf.task(attempts=1, queue="charges")
async def slow(item: str, card: str) -> None:
    hf.current_task().progress({"card": card})
    await asyncio.sleep(600.0)


REDACT = (
    "Safe.number", "Safe.digits", "Safe.pins.pin", "Safe.reply.number",
    "CardShown.number", "CardShown.digits", "CardRefused.number", "PaymentWanted.number",
    "bank.pay.args.number",
    "charge.args.card", "charge.args.note", "charge.result.token",
    "slow.card", "gather.args.cards", "gather.args.notes",
    "order.args.card", "order.number",
    "*.password",
)  # fmt: skip

_DECLARED: dict[str, Any] = {
    "worlds": [Safe], "effects": [pay], "tasks": [charge, gather, slow], "flows": [order, parcel, purchase], "events": [Confirmation],
}  # fmt: skip
app = hf.App("vault", redact=REDACT, **_DECLARED)
open_app = hf.App("vault", **_DECLARED)
