"""Orders over HTTP: FastAPI in front, a flow and a world behind it.

    uvicorn examples.fastapi_orders.app:api         # kill it at any time, and start it again

`POST /orders` starts a flow and returns at once. The flow reserves, charges and books the order, each step once. A repeated
request with the same id gets the same flow. The routes never block the event loop.
"""

from __future__ import annotations

import os

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

import holdfast as hf
from holdfast.errors import KeyConflict, NotFound


class OrderForm(BaseModel):
    id: str
    item: str
    cents: int = Field(gt=0)


class Booked(hf.Event):
    order: OrderForm


class Sales(BaseModel):
    count: int = 0
    cents: int = 0


class SalesAsked(hf.Event[Sales]):
    pass


class Book(hf.World):
    """The book of one item."""

    count: int = 0
    cents: int = 0

    @hf.on(Booked)
    def booked(self, event: Booked, cx: hf.Context) -> None:
        self.count += 1
        self.cents += event.order.cents
        cx.reply(self.count)

    @hf.on(SalesAsked)
    def asked(self, event: SalesAsked, cx: hf.Context) -> None:
        cx.reply(Sales(count=self.count, cents=self.cents))


@hf.task
def charge(order: OrderForm) -> str:
    return f"charged {order.cents} for {order.id}"


@hf.flow
async def place(order: OrderForm) -> str:
    receipt = await hf.step(charge, order)
    hf.publish("status", "charged")
    return receipt


app = hf.App("orders", worlds=[Book], tasks=[charge], flows=[place])
api = FastAPI(lifespan=hf.asgi.lifespan(app, os.environ.get("ORDERS_STORE", "./data")))


@api.post("/orders", status_code=202)
async def post_order(order: OrderForm, request: Request) -> dict[str, str]:
    rt = hf.asgi.runtime(request)
    try:
        run = await rt.aio.start(place.options(key=order.id), order)
    except KeyConflict:
        raise HTTPException(409, "another order has this id") from None
    # With its key the event is delivered once, also if the request is repeated.
    await rt.aio.send(rt.world(Book, order.item), Booked(order), key=order.id)
    return {"flow": run.id}


@api.get("/orders/{id}")
async def get_order(id: str, request: Request, wait_s: float = 0) -> dict[str, str]:
    rt = hf.asgi.runtime(request)
    try:
        receipt = await rt.aio.result(await rt.aio.flow(place, key=id), timeout=wait_s)
    except NotFound:
        raise HTTPException(404, "no such order") from None
    except hf.Timeout:
        return {"status": "running"}
    return {"status": "done", "receipt": receipt}


@api.get("/sales/{item}")
async def get_sales(item: str, request: Request) -> Sales:
    rt = hf.asgi.runtime(request)
    return await rt.aio.ask(rt.world(Book, item), SalesAsked())
