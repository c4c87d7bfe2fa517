"""The app of the flow command tests: an order that reserves, charges, waits for an approval, and ends."""

from datetime import UTC, datetime

import holdfast as hf


class OrderApproved(hf.Event):
    by: str


class Note(hf.Event):
    text: str = ""


# Step functions that fail, by name.
failing: set[str] = set()


async def reserve(item: str) -> str:
    return f"{item} reserved"


async def release(item: str) -> None:
    if "release" in failing:
        raise ValueError("the shelf is locked")


async def charge(cents: int) -> int:
    if "charge" in failing:
        raise ValueError("card 7 was declined")
    return cents


@hf.flow
async def order(item: str, cents: int, undoes: bool = False) -> str:
    held = await hf.step(reserve, item)
    if undoes:
        hf.undo(release, item)
    await hf.step(charge, cents)
    hf.publish("state", "paid")
    event = await hf.receive(OrderApproved)
    return f"{held}, approved by {event.by}"


async def measure() -> dict[str, object]:
    return {"body": b"\x00\x01", "at": datetime(2026, 3, 1, tzinfo=UTC)}


@hf.flow
async def measured() -> int:
    await hf.step(measure)
    return 1


@hf.flow
async def count(n: int) -> int:
    await hf.step(reserve, str(n))
    if n < 3:
        hf.again(n + 1)
    return n


app = hf.App("flows", flows=[order, count, measured], events=[OrderApproved, Note])
