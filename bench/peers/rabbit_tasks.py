"""Run by the peers' interpreter: RabbitMQ's producer or its worker, with pika on asyncio.

    python rabbit_tasks.py producer|worker AMQP_PORT TALLY

The queue is durable and the messages are persistent. A producer waits for the confirmation of each
message, or of its batch. A worker acknowledges a task after it has run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pika
import uvloop
from answers import serve, serve_beside
from pika.adapters.asyncio_connection import AsyncioConnection
from producers import by_tasks, in_batches, on_loop, paced
from tally import NOTE, Tally

QUEUE = "tasks"
PERSISTENT = pika.BasicProperties(delivery_mode=2)
# Limit of unacknowledged messages of a worker. One acknowledgement covers many messages.
PREFETCH = 1000


class Batch:
    """One or more messages whose confirmations are awaited together."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Link:
    """One connection with one channel. Converts the callbacks of `pika` into futures."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._confirms: dict[int, Batch] = {}
        self._lowest = 1
        self._next = 1

    async def open(self, *, confirms: bool) -> Link:
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[Any] = self._loop.create_future()
        AsyncioConnection(
            pika.ConnectionParameters("127.0.0.1", self._port, heartbeat=0),
            on_open_callback=opened.set_result,
            on_open_error_callback=lambda _, error: opened.set_exception(error),
        )
        connection = await opened
        ready: asyncio.Future[Any] = self._loop.create_future()
        connection.channel(on_open_callback=ready.set_result)
        self.channel = await ready
        await self.asked(self.channel.queue_declare, QUEUE, durable=True)
        await self.asked(self.channel.basic_qos, prefetch_count=PREFETCH)
        if confirms:
            selected: asyncio.Future[Any] = self._loop.create_future()
            self.channel.confirm_delivery(self._confirmed, callback=selected.set_result)
            await selected
        return self

    async def asked(self, call: Any, *arguments: Any, **named: Any) -> Any:
        answer: asyncio.Future[Any] = self._loop.create_future()
        call(*arguments, **named, callback=answer.set_result)
        return await answer

    def publish(self, *sent: int) -> asyncio.Future[None]:
        batch = Batch(len(sent))
        for sent_ns in sent:
            self._confirms[self._next] = batch
            self._next += 1
            self.channel.basic_publish("", QUEUE, json.dumps((sent_ns, NOTE)).encode(), PERSISTENT)
        return batch.confirmed

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        tags = range(self._lowest, method.delivery_tag + 1) if method.multiple else ()
        for tag in tags or (method.delivery_tag,):
            batch = self._confirms.pop(tag, None)
            if batch is None:
                continue
            batch.left -= 1
            if not isinstance(method, pika.spec.Basic.Ack):
                batch.confirmed.set_exception(RuntimeError("RabbitMQ refused a message"))
            elif not batch.left:
                batch.confirmed.set_result(None)
        if method.multiple:
            self._lowest = method.delivery_tag + 1


def producer(port: int, _tally: str) -> None:
    loop = uvloop.new_event_loop()
    link = loop.run_until_complete(Link(port).open(confirms=True))

    def batch(sent: list[int]) -> asyncio.Future[None]:
        return link.publish(*sent)

    async def left() -> dict[str, Any]:
        answer = await link.asked(link.channel.queue_declare, QUEUE, passive=True)
        return {"left": answer.method.message_count}

    bodies = {
        "single": lambda **asked: by_tasks(link.publish, **asked),
        "batched": lambda **asked: in_batches(batch, **asked),
        "paced": lambda **asked: paced(link.publish, **asked),
        "left": left,
    }
    serve(on_loop(loop, bodies))


def worker(port: int, path: str) -> None:
    tally = Tally(path)

    def run(sent_ns: int, note: str) -> None:
        tally.mark(sent_ns)

    async def body() -> None:
        link = await Link(port).open(confirms=False)
        loop = asyncio.get_running_loop()
        done = 0

        def settle() -> None:
            nonlocal done
            link.channel.basic_ack(done, multiple=True)
            done = 0

        def deliver(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            nonlocal done
            run(*json.loads(body))
            # One frame acknowledges all messages of one socket read.
            if not done:
                loop.call_soon(settle)
            done = method.delivery_tag

        await link.asked(link.channel.basic_consume, QUEUE, deliver)
        serve_beside()
        await asyncio.Event().wait()

    uvloop.run(body())


if __name__ == "__main__":
    {"producer": producer, "worker": worker}[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
