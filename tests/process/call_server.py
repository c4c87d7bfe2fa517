"""The outside server of `test_flows_killed`: it keeps a book of every call that a step function makes.

    python -m tests.process.call_server        prints `ready PORT`

One request and one answer per connection, each a line of JSON. A call is written into the book when it arrives and
again when its answer is sent. The server holds the answer back for a moment, and for as long as the test holds the
calling process. It knows nothing of Holdfast, and it refuses no call.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import Counter
from typing import Any

import msgspec

PORT = "HOLDFAST_TEST_CALL_SERVER"
HOLD_S = 0.02
TIMEOUT_S = 60.0
LINE_BYTES_MAX = 1 << 26


class BookedCall(msgspec.Struct):
    """One call that the server saw. `number` counts the calls of one key, from 1."""

    key: str
    number: int
    # The test's number of the flow, and the name of the step in the test's program.
    flow: int
    step: str
    # The arguments of the step.
    detail: Any
    pid: int
    began_ns: int
    # When the answer was sent, 0 if the caller was gone.
    ended_ns: int = 0

    @property
    def token(self) -> str:
        """The answer to the call, unique among all calls."""
        return f"{self.key}/{self.number}"


class CallServer:
    def __init__(self) -> None:
        self.book: list[BookedCall] = []
        self._numbers: Counter[str] = Counter()
        self._in_flight: Counter[int] = Counter()
        self._held: dict[int, asyncio.Event] = {}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            answer = await getattr(self, f"on_{request.pop('ask')}")(reader, **request)
            if answer is not None:
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass  # the caller is gone
        finally:
            writer.close()

    async def on_call(
        self, reader: asyncio.StreamReader, key: str, flow: int, step: str, detail: Any, pid: int
    ) -> str | None:
        self._numbers[key] += 1
        call = BookedCall(
            key, self._numbers[key], flow, step, detail, pid, began_ns=time.monotonic_ns()
        )
        self.book.append(call)
        self._in_flight[pid] += 1
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({gone}, timeout=HOLD_S)
            if pid in self._held:
                released = asyncio.ensure_future(self._held[pid].wait())
                await asyncio.wait({gone, released}, return_when=asyncio.FIRST_COMPLETED)
                released.cancel()
            if gone.done():
                return None
        finally:
            gone.cancel()
            self._in_flight[pid] -= 1
        call.ended_ns = time.monotonic_ns()
        return call.token

    async def on_hold(self, reader: asyncio.StreamReader, pid: int) -> int:
        """Hold the answers to this process back from now on."""
        self._held.setdefault(pid, asyncio.Event())
        return self._in_flight[pid]

    async def on_in_flight(self, reader: asyncio.StreamReader, pid: int) -> int:
        return self._in_flight[pid]

    async def on_release(self, reader: asyncio.StreamReader, pid: int) -> bool:
        if (event := self._held.pop(pid, None)) is not None:
            event.set()
        return True

    async def on_count(self, reader: asyncio.StreamReader) -> int:
        return len(self.book)

    async def on_book(self, reader: asyncio.StreamReader, start: int = 0) -> list[Any]:
        return [msgspec.to_builtins(call) for call in self.book[start:]]


def ask(what: str, **fields: Any) -> Any:
    """Send one request from a thread and return the answer."""
    with socket.create_connection(("127.0.0.1", _port()), TIMEOUT_S) as connection:
        connection.sendall(_line(what, fields))
        with connection.makefile("rb") as file:
            return json.loads(file.readline(LINE_BYTES_MAX))


async def ask_async(what: str, **fields: Any) -> Any:
    """Send one request from a coroutine and return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", _port(), limit=LINE_BYTES_MAX)
    try:
        writer.write(_line(what, fields))
        return json.loads(await reader.readline())
    finally:
        writer.close()


def read_book(start: int = 0) -> list[BookedCall]:
    return msgspec.convert(ask("book", start=start), list[BookedCall])


def _port() -> int:
    return int(os.environ[PORT])


def _line(what: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"ask": what, **fields}).encode() + b"\n"


async def serve() -> None:
    server = await asyncio.start_server(
        CallServer().handle, "127.0.0.1", 0, backlog=1024, limit=LINE_BYTES_MAX
    )
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
