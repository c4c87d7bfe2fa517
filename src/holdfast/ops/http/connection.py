"""A connection of the HTTP server, and the way of a request through it.

    head → parse → who asks (`guard`) → route → body → handler → answer → the next request

Everything has a limit: how long a head, a body, an answer may take, how long a connection may idle, how
many there are, how many bytes of bodies are in memory. A request is judged by its head: the body of one
that is refused is not kept. A connection counts until its socket is closed, and whoever does not take the
rest of an answer is hung up on: else those would be as many as they please.

The bytes of a body count when they have arrived: an announced length reserves nothing. A body must arrive at a
minimum rate. A connection is *proven* once a trusted request of it has arrived; until then it has little time,
and is the first to give way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.ops.http.problem import (
    BadRequest,
    HeadTooLarge,
    Response,
    Stopping,
    TooMany,
    TooSlow,
    internal,
    problem,
)
from holdfast.ops.http.route import Api, Call, Gone, Route, find
from holdfast.ops.http.wire import HEAD_BYTES_MAX, Request, bytes_of, parse

if TYPE_CHECKING:
    from holdfast.ops.http.server import HttpServer


READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    # No more than half of the files that the process may open, either: the store needs some.
    connections_max: int = 1_000
    bodies_bytes_max: int = 256 * 1024 * 1024
    # How long a connection may idle, and how long each part of a request may take to arrive, or of an
    # answer to be taken.
    idle_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 60.0
    answer_s: float = 60.0
    # A body may pause for so long in all, beyond the time that its bytes take at the lowest rate.
    body_pause_s: float = 5.0
    body_bytes_per_s_min: int = 16 * 1024
    # Connections that have not made a trusted request yet: in all, as a share of all connections, and from
    # one address. Above it, those that have waited for longer than the grace give way.
    unproven_share: float = 0.5
    unproven_per_peer_share: float = 0.25
    unproven_grace_s: float = 1.0
    # What is read and thrown away of a body that was refused, so that its sender reads why; and by how
    # many at a time.
    linger_s: float = 2.0
    linger_bytes_max: int = 64 * 1024 * 1024
    refused_max: int = 32
    # How long the head of a request may take on a connection that is one too many.
    refused_head_s: float = 1.0


class Reader(asyncio.StreamReader):
    """A reader that tells at once when the other side hangs up, also while nobody reads."""

    def __init__(self) -> None:
        super().__init__(HEAD_BYTES_MAX)
        self.gone = Gone()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.happen()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)  # type: ignore[arg-type]
        self.gone.happen()


class _Admitted(NamedTuple):
    request: Request
    route: Route
    names: tuple[str, ...]
    trusted: bool


class Connection:
    def __init__(
        self,
        server: HttpServer,
        api: Api,
        reader: Reader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._server = server
        self._limits = server.limits
        self._api = api
        self._reader = reader
        self._writer = writer
        # Whether a request is under way; and since when it is theirs to go on: to ask, or to take an answer.
        self.busy = False
        self.waits_since_s: float | None = server.loop.time()
        self.proven = False
        # Bytes of a body that is not whole yet; those that had arrived at the start of a span of time, and
        # how many a second came in the span before it.
        self.body_bytes = 0
        self._span_s, self._span_bytes = 0.0, 0
        self._rate: float | None = None
        name = writer.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""

    async def serve(self) -> None:
        """One request after the other, until either side has enough."""
        whole = False
        try:
            while await self._next():
                pass
            whole = True
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            whole = True  # the server ends, and this with it
        except Exception as error:
            _complain(error)
        finally:
            await self._hang_up(self._limits.answer_s if whole else 0)

    @property
    def unread(self) -> bool:
        """Whether something of an answer has not left yet."""
        return self._writer.transport.get_write_buffer_size() > 0

    async def turn_away(self) -> None:
        """There are too many: nothing is answered but what always is."""
        try:
            await self._turn_away()
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            await self._hang_up(0)

    def drop(self) -> None:
        """Hang up, whatever is under way."""
        self._writer.transport.abort()

    async def _hang_up(self, within_s: float) -> None:
        """Close when what was written has been taken, and then at the latest."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        self.drop()

    async def _turn_away(self) -> None:
        too_many = TooMany(connections_max=self._server.connections_max)
        head: list[Request] = []
        try:
            arrived = await self._head(b"", self._limits.refused_head_s)
            admitted = self._admit(arrived, head)
        except HoldfastError:
            await self._refuse(too_many, head[0] if head else None)
            return
        if not admitted.route.always:
            await self._refuse(too_many, admitted.request)
            return
        response = await self._handle(admitted, b"")
        await self._answer(response, admitted.request, keep_alive=False)

    async def _next(self) -> bool:
        """One request and its answer; whether there may be another."""
        self.waits_since_s = self._server.loop.time()
        idle_s = self._limits.idle_s if self.proven else self._limits.head_s
        async with asyncio.timeout(idle_s):
            first = await self._reader.read(1)
        if not first:
            return False
        self.busy = True
        head: list[Request] = []
        try:
            arrived = await self._head(first, self._limits.head_s)
            admitted = self._admit(arrived, head)
        except HoldfastError as error:
            await self._refuse(error, head[0] if head else None)
            return False
        request = admitted.request
        try:
            body = await self._body(request)
            self.waits_since_s = None
            self.proven = self.proven or admitted.trusted
            response = await self._handle(admitted, body)
        except (TooMany, TooSlow) as error:
            self.release()
            await self._refuse(error, request)
            return False
        finally:
            self.release()
        keep_alive = request.keep_alive and not self._server.stopping
        try:
            # One that has closed its side may still read: only what it must not miss is kept from it.
            if response.undo is not None and self._reader.gone.now:
                raise ConnectionResetError
            await self._answer(response, request, keep_alive=keep_alive)
        except (ConnectionError, TimeoutError):
            if response.undo is not None:
                await response.undo()
            return False
        self.busy = not keep_alive
        return keep_alive

    def _admit(self, head: bytes, parsed: list[Request]) -> _Admitted:
        """By its head alone. What was understood of it is in `parsed`, admitted or not."""
        guard = self._server.guard
        request = parse(head)
        parsed.append(request)
        guard.check(request)
        route, names = find(self._api.routes, request)
        if not route.open:
            guard.require_trust(request)
        if request.length and route.method == "GET":
            # Strangers reach some of these: none of their bytes are kept.
            raise BadRequest(what="body", why="this route takes none", bytes=request.length)
        if self._server.stopping:
            raise Stopping()
        return _Admitted(request, route, names, guard.trusts(request))

    async def _handle(self, admitted: _Admitted, body: bytes) -> Response:
        request, route, names, trusted = admitted
        try:
            return await route.handler(Call(request, names, body, trusted, self._reader.gone))
        except HoldfastError as error:
            return problem(error)
        except Exception as error:
            _complain(error)
            return internal()

    # -- bytes -------------------------------------------------------------------------------------

    async def _head(self, first: bytes, within_s: float) -> bytes:
        try:
            async with asyncio.timeout(within_s):
                return first + await self._reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise TooSlow(what="head", after_s=within_s) from None
        except asyncio.LimitOverrunError:
            raise HeadTooLarge(what="head", bytes_max=HEAD_BYTES_MAX) from None

    async def _body(self, request: Request) -> bytes:
        if not request.length:
            return b""
        if request.headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        began_s = self._span_s = self._server.loop.time()
        self._span_bytes, self._rate = 0, None
        parts: list[bytes] = []
        while self.body_bytes < request.length:
            data = await self._part(began_s, request.length - self.body_bytes)
            parts.append(data)
            self._measure(self._server.loop.time())
            self.body_bytes += len(data)
            self._server.bodies_bytes += len(data)
            if not self._server.make_room_for_bodies(self):
                raise TooMany(what="bytes in flight", max=self._limits.bodies_bytes_max)
        return b"".join(parts)

    async def _part(self, began_s: float, left: int) -> bytes:
        """The next bytes of a body that began to arrive then."""
        limits, loop = self._limits, self._server.loop
        self.waits_since_s = loop.time()
        at_the_lowest_rate_s = self.body_bytes / limits.body_bytes_per_s_min
        within_s = min(limits.body_s, limits.body_pause_s + at_the_lowest_rate_s)
        try:
            async with asyncio.timeout_at(began_s + within_s):
                data = await self._reader.read(min(left, READ_BYTES))
        except TimeoutError:
            raise TooSlow(what="body", after_s=round(within_s, 1)) from None
        if not data:
            raise asyncio.IncompleteReadError(b"", left)
        return data

    def body_rate(self, now_s: float) -> float | None:
        """How many bytes a second of its body arrive; None if there is none, or it has just begun."""
        if not self.body_bytes or self.waits_since_s is None:
            return None
        self._measure(now_s)
        return self._rate

    def _measure(self, now_s: float) -> None:
        span_s = now_s - self._span_s
        if span_s >= self._limits.unproven_grace_s:
            self._rate = (self.body_bytes - self._span_bytes) / span_s
            self._span_s, self._span_bytes = now_s, self.body_bytes

    def release(self) -> None:
        """The bytes of its body are in memory no longer."""
        self._server.bodies_bytes -= self.body_bytes
        self.body_bytes = 0

    async def _answer(
        self, response: Response, request: Request | None, *, keep_alive: bool
    ) -> None:
        self.waits_since_s = self._server.loop.time()
        head_only = request is not None and request.method == "HEAD"
        self._writer.write(bytes_of(response, keep_alive=keep_alive, head_only=head_only))
        async with asyncio.timeout(self._limits.answer_s):
            await self._writer.drain()
        # One that was dropped meanwhile has an end without an error.
        if self._writer.transport.is_closing():
            raise ConnectionResetError

    async def _refuse(self, error: HoldfastError, request: Request | None = None) -> None:
        """Say why, and hang up: closing with bytes unread would take the answer away from whoever is
        still sending, so some of them are read and thrown away."""
        await self._answer(problem(error), request, keep_alive=False)
        with contextlib.suppress(OSError, TimeoutError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(self._limits.linger_s):
                left = self._limits.linger_bytes_max
                while left > 0 and (data := await self._reader.read(65536)):
                    left -= len(data)


def _complain(error: BaseException) -> None:
    print(f"holdfast: http: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if os.environ.get("HOLDFAST_DEBUG"):
        traceback.print_exception(error)
