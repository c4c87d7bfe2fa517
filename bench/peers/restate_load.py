"""Run by the peers' interpreter: the client of Restate, over HTTP/1.1 with persistent connections.

    python restate_load.py INGRESS_PORT

The requests are written by hand: a general client would be the slowest part of the loop, and the benchmark
measures Restate.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from answers import serve

POLL_S = 0.005


class Connection:
    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def post(self, path: str, body: bytes = b"") -> Any:
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\n{kind}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        at = answer.index(b"content-length:") + len(b"content-length:")
        text = await self._reader.readexactly(int(answer[at : answer.index(b"\r\n", at)]))
        if answer[9:10] != b"2":
            raise RuntimeError(f"{path}: {text.decode(errors='replace')}")
        return json.loads(text)

    def close(self) -> None:
        self._writer.close()


async def all_of(connections: list[Connection], requests: Iterable[tuple[str, bytes]]) -> list[Any]:
    """Each connection takes the next request when it has its answer."""
    left, answers = iter(requests), []

    async def work(connection: Connection) -> None:
        for path, body in left:
            answers.append(await connection.post(path, body))

    await asyncio.gather(*(work(connection) for connection in connections))
    return answers


async def batch(connections: list[Connection], keys: list[str], per_key: int, size: int) -> float:
    """One durable invocation forwards a batch. No event reports its completion, so it is polled."""
    sends = [key for _ in range(per_key) for key in keys]
    began = time.perf_counter()
    parts = [sends[at : at + size] for at in range(0, len(sends), size)]
    await all_of(connections, [("/Fan/out", json.dumps(part).encode()) for part in parts])
    left = list(keys)
    while left:
        if await connections[0].post(f"/Counter/{left[-1]}/peek") >= per_key:
            left.pop()
        else:
            await asyncio.sleep(POLL_S)
    return len(sends) / (time.perf_counter() - began)


async def senders(connections: list[Connection], keys: list[str], per_key: int) -> float:
    """One-way sends, each answered when it is durable. A `get` after them confirms their completion."""
    began = time.perf_counter()
    sends = [(f"/Counter/{key}/add/send", b"1") for _ in range(per_key) for key in keys]
    await all_of(connections, sends)
    totals = await all_of(connections, [(f"/Counter/{key}/get", b"") for key in keys])
    took = time.perf_counter() - began
    assert totals == [per_key] * len(keys), totals
    # The gets pass through the same queue, so they count.
    return (len(sends) + len(keys)) / took


async def latency(connections: list[Connection], keys: list[str], count: int, per_s: float) -> Any:
    """A call, answered when the handler has run and its outcome is durable."""
    took, due = [], time.perf_counter()
    for at in range(count):
        due += 1 / per_s
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        began = time.perf_counter()
        await connections[0].post(f"/Counter/{keys[at % len(keys)]}/add", b"1")
        took.append(1000 * (time.perf_counter() - began))
    return took


def main() -> None:
    port = int(sys.argv[1])

    def run(part: Any, connections: int, keys: list[str], **parameters: Any) -> dict[str, Any]:
        async def body() -> Any:
            pool = [await Connection(port).open() for _ in range(connections)]
            try:
                return await part(pool, keys, **parameters)
            finally:
                for connection in pool:
                    connection.close()

        return {"answer": asyncio.run(body())}

    serve(
        {
            part.__name__: lambda part=part, **parameters: run(part, **parameters)
            for part in (batch, senders, latency)
        }
    )


if __name__ == "__main__":
    main()
