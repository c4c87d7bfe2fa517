"""A TCP proxy for a PostgreSQL server, which injects connection faults.

    idle        forward
    cut         reset all open connections
    after       reset a connection after a number of bytes in one direction
    answer      forward a commit to the server, and reset the connection instead of forwarding its answer
    swallow     keep connections open and drop all data, in one direction or both, until the next cut
    refuse      refuse new connections

The proxy detects a commit in the client's messages: a statement that writes the commit record, by its text or by
the name of its prepared statement. The next data from the server is the answer. `done` counts the faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Self

READ_BYTES = 65536
LOOP_CALL_S = 30.0
# Text in statements that write a commit record.
COMMITS = (b"holdfast_apply", b"INTO holdfast_commit")
# Codes of encryption requests. The server answers with one byte, and the startup message follows.
ENCRYPTION = (80877103, 80877104)
# Closing with this SO_LINGER value sends a reset and drops the data in flight.
NO_LINGER = struct.pack("ii", 1, 0)


class Proxy:
    def __init__(self, target: tuple[str, int], *, host: str = "127.0.0.1", seed: int = 0) -> None:
        self.target = target
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._host = host
        self._connections: set[_ProxiedConnection] = set()
        self._refusing = False
        self._answers_due = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._run_in_loop(self._serve())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._run_in_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- faults ------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        return len(self._connections)

    def cut(self) -> int:
        """Reset all open connections. Returns their number."""
        return self._run_in_loop(self._cut())

    def cut_after(self, bytes_max: int, *, upward: bool) -> None:
        """Reset each open connection after at most `bytes_max` more bytes in one direction."""
        self._run_in_loop(self._cut_after(bytes_max, upward))

    def cut_answer(self) -> None:
        """Reset the next connection whose commit is answered, and drop the answer."""
        self._answers_due += 1

    @property
    def answers_due(self) -> int:
        return self._answers_due

    def swallow(self, *, up: bool = True, down: bool = True) -> int:
        """Drop all data of the open connections. Returns their number."""
        return self._run_in_loop(self._swallow(up, down))

    def refuse(self, refusing: bool = True) -> None:
        """Refuse new connections, or accept them again. Open connections stay."""
        self._refusing = refusing

    # -- internals: run in the thread of the event loop --------------------------------------------

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LOOP_CALL_S)

    async def _serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, self._host, 0, limit=READ_BYTES)

    async def _end(self) -> None:
        self._server.close()
        await self._cut()
        me = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not me]
        await asyncio.wait(left, timeout=LOOP_CALL_S / 2) if left else None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            to_reader, to_writer = await asyncio.open_connection(*self.target, limit=READ_BYTES)
        except OSError:
            # The target does not listen: reset, as the kernel would.
            _reset(writer)
            return
        connection = _ProxiedConnection(self, writer, to_writer)
        self._connections.add(connection)
        await asyncio.gather(
            connection.pump(reader, to_writer, upward=True),
            connection.pump(to_reader, writer, upward=False),
        )
        self._connections.discard(connection)

    async def _cut(self) -> int:
        connections = list(self._connections)
        for connection in connections:
            connection.reset()
        self.done["cut"] += len(connections)
        return len(connections)

    async def _cut_after(self, bytes_max: int, upward: bool) -> None:
        for connection in self._connections:
            connection.bytes_left[upward] = self._random.randrange(bytes_max) + 1

    async def _swallow(self, up: bool, down: bool) -> int:
        for connection in self._connections:
            connection.is_swallowing[True] |= up
            connection.is_swallowing[False] |= down
        self.done["swallow"] += len(self._connections)
        return len(self._connections)

    def consume_answer_cut(self) -> bool:
        if not self._answers_due:
            return False
        self._answers_due -= 1
        self.done["answer"] += 1
        return True


class _ProxiedConnection:
    """A client connection and its connection to the server."""

    def __init__(
        self, proxy: Proxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._halves = (client, server)
        # By direction: True is from the client to the server.
        self.bytes_left: dict[bool, int | None] = {True: None, False: None}
        self.is_swallowing = {True: False, False: False}
        self._commits = _CommitDetector()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upward: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if self.is_swallowing[upward]:
                    continue
                if upward:
                    self._commits.feed(data)
                elif self._commits.take_commit_sent() and self._proxy.consume_answer_cut():
                    break
                left = self.bytes_left[upward]
                if left is not None:
                    if len(data) >= left:
                        self._proxy.done["after"] += 1
                        writer.write(data[:left])
                        await writer.drain()
                        break
                    self.bytes_left[upward] = left - len(data)
                writer.write(data)
                await writer.drain()
            else:
                # Forward an orderly close to the other side, unless its data is dropped.
                if not self.is_swallowing[upward] and not writer.is_closing():
                    writer.close()
                return
        self.reset()

    def reset(self) -> None:
        for half in self._halves:
            _reset(half)


class _CommitDetector:
    """Parses the messages of a client and detects commits."""

    def __init__(self) -> None:
        self._buffer = b""
        self._is_started = False
        self._names: set[bytes] = set()
        self._commit_sent = False

    def take_commit_sent(self) -> bool:
        """Whether a commit was sent since the last call."""
        commit_sent, self._commit_sent = self._commit_sent, False
        return commit_sent

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while True:
            # The startup message has no type byte before its length.
            start = 1 if self._is_started else 0
            if len(self._buffer) < start + 4:
                return
            size = start + int.from_bytes(self._buffer[start : start + 4], "big")
            if len(self._buffer) < size:
                return
            message, self._buffer = self._buffer[:size], self._buffer[size:]
            if self._is_started:
                self._read(message[:1], message[5:])
            else:
                self._is_started = int.from_bytes(message[4:8], "big") not in ENCRYPTION

    def _read(self, kind: bytes, body: bytes) -> None:
        if kind == b"P":
            name, _, text = body.partition(b"\x00")
            commits = any(one in text for one in COMMITS)
            if name:
                (self._names.add if commits else self._names.discard)(name)
            self._commit_sent |= commits
        elif kind == b"B":
            self._commit_sent |= body.split(b"\x00", 2)[1] in self._names
        elif kind == b"Q":
            self._commit_sent |= any(one in body for one in COMMITS)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        found = writer.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
