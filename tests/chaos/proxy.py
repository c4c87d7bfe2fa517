"""A TCP proxy before a PostgreSQL server, that cuts connections where it hurts.

    idle        forwards
    cut         resets connections that are open, now
    after       resets a connection once so many bytes have passed in one direction
    answer      lets COMMIT through to the server, and resets instead of bringing its answer
    swallow     connections stay open and carry nothing any more, in one direction or both, until the next cut
    refuse      nobody is let in

A commit is known by what the client sends: a statement that writes the record of a commit, by its text or by
the name that it was prepared under. What the server sends next is its answer. What is done and how often is
counted in `done`.
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
ASK_S = 30.0
# Statements that make a commit.
COMMITS = (b"holdfast_apply", b"INTO holdfast_commit")
# Asks for encryption, which are answered with one byte, and followed by the beginning proper.
ENCRYPTION = (80877103, 80877104)
# Closing with this sends a reset: what is on its way is lost, as with a cable that is cut.
NO_LINGER = struct.pack("ii", 1, 0)


class Proxy:
    def __init__(self, target: tuple[str, int], *, host: str = "127.0.0.1", seed: int = 0) -> None:
        self.target = target
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._host = host
        self._links: set[_Link] = set()
        self._refusing = False
        self._answers_due = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._ask(self._serve())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._ask(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- deeds -------------------------------------------------------------------------------------

    @property
    def links(self) -> int:
        return len(self._links)

    def cut(self) -> int:
        """Reset all that is open; how many that were."""
        return self._ask(self._cut())

    def cut_after(self, bytes_max: int, *, upward: bool) -> None:
        """Reset each open connection once so many more bytes went to the server, or came from it."""
        self._ask(self._cut_after(bytes_max, upward))

    def cut_answer(self) -> None:
        """Reset the next connection whose commit is answered, without the answer."""
        self._answers_due += 1

    @property
    def answers_due(self) -> int:
        return self._answers_due

    def swallow(self, *, up: bool = True, down: bool = True) -> int:
        """What is open carries nothing any more; how many that are."""
        return self._ask(self._swallow(up, down))

    def refuse(self, refusing: bool = True) -> None:
        """Whether to let nobody in. Those inside stay."""
        self._refusing = refusing

    # -- inside: all of it in the thread of the loop -----------------------------------------------

    def _ask(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(ASK_S)

    async def _serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, self._host, 0, limit=READ_BYTES)

    async def _end(self) -> None:
        self._server.close()
        await self._cut()
        me = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not me]
        await asyncio.wait(left, timeout=ASK_S / 2) if left else None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            to_reader, to_writer = await asyncio.open_connection(*self.target, limit=READ_BYTES)
        except OSError:
            # Nobody listens there: it is told as the kernel would.
            _reset(writer)
            return
        link = _Link(self, writer, to_writer)
        self._links.add(link)
        await asyncio.gather(
            link.pump(reader, to_writer, upward=True), link.pump(to_reader, writer, upward=False)
        )
        self._links.discard(link)

    async def _cut(self) -> int:
        links = list(self._links)
        for link in links:
            link.reset()
        self.done["cut"] += len(links)
        return len(links)

    async def _cut_after(self, bytes_max: int, upward: bool) -> None:
        for link in self._links:
            link.left[upward] = self._random.randrange(bytes_max) + 1

    async def _swallow(self, up: bool, down: bool) -> int:
        for link in self._links:
            link.swallows[True] |= up
            link.swallows[False] |= down
        self.done["swallow"] += len(self._links)
        return len(self._links)

    def take_answer(self) -> bool:
        if not self._answers_due:
            return False
        self._answers_due -= 1
        self.done["answer"] += 1
        return True


class _Link:
    """One connection and its other half."""

    def __init__(
        self, proxy: Proxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._halves = (client, server)
        # By direction, True for what goes to the server.
        self.left: dict[bool, int | None] = {True: None, False: None}
        self.swallows = {True: False, False: False}
        self._commits = _Commits()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upward: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if self.swallows[upward]:
                    continue
                if upward:
                    self._commits.feed(data)
                elif self._commits.taken() and self._proxy.take_answer():
                    break
                left = self.left[upward]
                if left is not None:
                    if len(data) >= left:
                        self._proxy.done["after"] += 1
                        writer.write(data[:left])
                        await writer.drain()
                        break
                    self.left[upward] = left - len(data)
                writer.write(data)
                await writer.drain()
            else:
                # One that left in good order is heard of on the other side, unless that is cut off.
                if not self.swallows[upward] and not writer.is_closing():
                    writer.close()
                return
        self.reset()

    def reset(self) -> None:
        for half in self._halves:
            _reset(half)


class _Commits:
    """Reads what a client sends, message by message, for commits among it."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False
        self._names: set[bytes] = set()
        self._under_way = False

    def taken(self) -> bool:
        """Whether a commit was sent and nothing has come back since."""
        found, self._under_way = self._under_way, False
        return found

    def feed(self, data: bytes) -> None:
        self._rest += data
        while True:
            # The first message has no letter before its length.
            start = 1 if self._begun else 0
            if len(self._rest) < start + 4:
                return
            size = start + int.from_bytes(self._rest[start : start + 4], "big")
            if len(self._rest) < size:
                return
            message, self._rest = self._rest[:size], self._rest[size:]
            if self._begun:
                self._read(message[:1], message[5:])
            else:
                self._begun = int.from_bytes(message[4:8], "big") not in ENCRYPTION

    def _read(self, kind: bytes, body: bytes) -> None:
        if kind == b"P":
            name, _, text = body.partition(b"\x00")
            commits = any(one in text for one in COMMITS)
            if name:
                (self._names.add if commits else self._names.discard)(name)
            self._under_way |= commits
        elif kind == b"B":
            self._under_way |= body.split(b"\x00", 2)[1] in self._names
        elif kind == b"Q":
            self._under_way |= any(one in body for one in COMMITS)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        found = writer.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
