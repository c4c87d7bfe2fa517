"""The application of `test_flows_killed`: each step calls the outside server, with its idempotency key.

A flow has two runs, joined by `hf.again`:

    run 1   quote, an event, again
    run 2   reserve (undo: release), a sleep, an event, pack and label at once (undo: unpack),
            notify and the child flow (its step is carry) as they complete, an event, bill

The answers of the server are the results of the steps, and the result of the flow is the list of them. `bill` fails in
a flow that is to fail. A flow that is to be cancelled waits for an event that never comes.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

import holdfast as hf
from tests.process.call_server import ask, ask_async

# Longer than the delay of a renewal on a busy machine: an expired lease without a fault repeats a step.
LEASE_S = 5.0
# Random kills must not use these up.
EXPIRIES_MAX = 1_000
SLEEP_S = 0.05

COMPLETE, FAIL, CANCEL = "complete", "fail", "cancel"
# The steps in the order of the program. Steps of one stage run at once.
STAGE_OF = {
    "quote": 0,
    "reserve": 1,
    "pack": 2,
    "label": 2,
    "notify": 3,
    "carry": 3,
    "bill": 4,
    "unpack": 5,
    "release": 6,
}
FORWARD_STEPS = ("quote", "reserve", "pack", "label", "notify", "carry", "bill")
# The compensations in the order in which they run.
COMPENSATIONS = ("unpack", "release")


class InstalmentPaid(hf.Event):
    number: int


class Approved(hf.Event):
    by: str


class FlowResult(msgspec.Struct, frozen=True):
    """The answers of the server by step, the numbers of the received events, and the order of the two branches."""

    tokens: dict[str, str]
    events: list[int]
    order: list[str]


def call_fields(flow: int, step: str, detail: Any) -> dict[str, Any]:
    key = hf.current_step().idempotency_key
    return {"key": key, "flow": flow, "step": step, "detail": detail, "pid": os.getpid()}


async def quote(flow: int) -> str:
    return str(await ask_async("call", **call_fields(flow, "quote", None)))


def reserve(flow: int, event: int) -> str:
    return str(ask("call", **call_fields(flow, "reserve", event)))


async def pack(flow: int, event: int) -> str:
    return str(await ask_async("call", **call_fields(flow, "pack", event)))


def label(flow: int, event: int) -> str:
    return str(ask("call", **call_fields(flow, "label", event)))


async def notify(flow: int) -> str:
    return str(await ask_async("call", **call_fields(flow, "notify", None)))


async def carry(flow: int) -> str:
    return str(await ask_async("call", **call_fields(flow, "carry", None)))


def bill(flow: int, event: int, order: list[str], fails: bool) -> str:
    token = str(ask("call", **call_fields(flow, "bill", [event, *order])))
    if fails:
        raise ValueError(token)
    return token


def release(flow: int, token: str) -> None:
    ask("call", **call_fields(flow, "release", token))


async def unpack(flow: int, tokens: list[str]) -> None:
    await ask_async("call", **call_fields(flow, "unpack", tokens))


@hf.flow(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX)
async def ship(flow: int) -> str:
    return await hf.step(carry, flow)


@hf.flow(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX)
async def order(flow: int, ending: str, former: FlowResult | None = None) -> FlowResult:
    if former is None:
        token = await hf.step(quote, flow)
        event = await hf.receive(InstalmentPaid)
        hf.again(flow, ending, FlowResult({"quote": token}, [event.number], []))
    assert former is not None
    tokens, events = dict(former.tokens), list(former.events)
    tokens["reserve"] = await hf.step(reserve, flow, events[-1])
    hf.undo(release, flow, tokens["reserve"])
    await hf.sleep(SLEEP_S)
    events.append((await hf.receive(InstalmentPaid)).number)
    tokens["pack"], tokens["label"] = await asyncio.gather(
        hf.step(pack, flow, events[-1]), hf.step(label, flow, events[-1])
    )
    hf.undo(unpack, flow, [tokens["pack"], tokens["label"]])
    branches = [_named("notify", hf.step(notify, flow)), _named("carry", hf.step(ship, flow))]
    finished: list[str] = []
    for branch in asyncio.as_completed(branches):
        name, token = await branch
        finished.append(name)
        tokens[name] = token
    events.append((await hf.receive(InstalmentPaid)).number)
    if ending == CANCEL:
        await hf.receive(Approved)
    tokens["bill"] = await hf.step(bill, flow, events[-1], finished, ending == FAIL)
    return FlowResult(tokens, events, finished)


async def _named(name: str, step: asyncio.Future[str]) -> tuple[str, str]:
    return name, await step


app = hf.App("billing", flows=[order, ship], events=[InstalmentPaid, Approved])
