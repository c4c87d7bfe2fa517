"""Release 2 of the app of `test_flow_deploys`. The other release has the same flows with other steps."""

from __future__ import annotations

import holdfast as hf


class Departure(hf.Event):
    pass


async def reserve(id: str) -> str:
    return f"shelf of {id}"


async def notify(id: str) -> None:
    return None


async def charge(id: str, cents: int) -> int:
    return cents


@hf.flow
async def same(id: str) -> str:
    shelf = await hf.step(reserve, id)
    await hf.sleep(0.01)
    await hf.receive(Departure)
    await hf.step(notify, shelf)
    return shelf


@hf.flow
async def inserted(id: str) -> str:
    await hf.step(hf.options(notify, name="greet"), id)
    shelf = await hf.step(reserve, id)
    await hf.receive(Departure)
    await hf.step(notify, shelf)
    return shelf


@hf.flow
async def removed(id: str) -> str:
    shelf = await hf.step(reserve, id)
    await hf.receive(Departure)
    return shelf


@hf.flow
async def renamed(id: str) -> str:
    shelf = await hf.step(reserve, id)
    await hf.step(hf.options(notify, name="inform"), shelf)
    await hf.receive(Departure)
    return shelf


@hf.flow
async def changed(id: str) -> str:
    await hf.step(charge, id, 130)
    await hf.receive(Departure)
    return await hf.step(reserve, id)


app = hf.App("deploys", flows=[same, inserted, removed, renamed, changed], events=[Departure])
