"""A TCP proxy before a PostgreSQL server, that cuts connections where it hurts.

    idle        forwards
    cut         resets connections that are open, now
    after       resets a connection once so many bytes have passed in one direction
    answer      lets COMMIT through to the server, and resets instead of bringing its answer
    swallow     connections stay open and carry nothing any more, in one direction or both, until the next cut
    refuse      nobody is let in

An answer is known by what the server says of a commit that wrote: the tag of an INSERT, and then that of
COMMIT. What is done and how often is counted in `done`.
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
WROTE = b"INSERT 0 "
COMMITTED = b"COMMIT\x00"
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
        await asyncio.sleep(0)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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
        self._wrote = False

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upward: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if self.swallows[upward]:
                    continue
                if not upward and self._cuts_answer(data):
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

    def _cuts_answer(self, data: bytes) -> bool:
        self._wrote |= WROTE in data
        return self._wrote and COMMITTED in data and self._proxy.take_answer()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        found = writer.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
