"""Run by the peers' interpreter: the producer of `restate_tasks`, with the connections of `restate_load`.

python restate_task_load.py INGRESS_PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import uvloop
from answers import serve
from producers import by_tasks, in_batches, on_loop, paced
from restate_load import Connection
from tally import NOTE

CONNECTIONS = 64


def main(port: int) -> None:
    loop = uvloop.new_event_loop()
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()

    async def open_all() -> None:
        for _ in range(CONNECTIONS):
            free.put_nowait(await Connection(port).open())

    async def post(path: str, body: Any) -> None:
        connection = await free.get()
        await connection.post(path, json.dumps(body).encode())
        free.put_nowait(connection)

    def one(sent_ns: int) -> Awaitable[None]:
        return post("/Task/run/send", (sent_ns, NOTE))

    def batch(sent: list[int]) -> Awaitable[None]:
        return post("/Fan/out", [(sent_ns, NOTE) for sent_ns in sent])

    loop.run_until_complete(open_all())
    bodies = {
        "single": lambda **asked: by_tasks(one, **asked),
        "batched": lambda **asked: in_batches(batch, **asked),
        "paced": lambda **asked: paced(one, **asked),
    }
    serve(on_loop(loop, bodies))


if __name__ == "__main__":
    main(int(sys.argv[1]))
