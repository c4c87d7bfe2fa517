"""A connection to an address that the guard has seen, and a body with a bound.

A name is resolved once, where the connection is made; what is connected to is the number that was
checked, so an answer that changes between two look-ups changes nothing. Host header, TLS name and
certificate check still go by the name. Nothing here reads proxies from the environment.

This module imports the extra `httpx`; import it inside a function.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import httpcore
import httpx

from holdfast.adapters.errors import AnswerTooLarge, BadAnswer, Interrupted, Unavailable, Untrusted
from holdfast.adapters.guard import Guard, literal_of
from holdfast.errors import HoldfastError, Invalid, Timeout

Resolve = Callable[[str, int], Awaitable[list[str]]]

# So many of a name's addresses are tried.
ADDRESSES_MAX = 4
# So many names are looked up at once.
LOOKUPS_MAX = 64
# A packed body may be longer than what it unpacks to, but not by more than this.
PACKING_BYTES_MAX = 64 * 1024


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Resolves, checks, and has the connector connect to what was checked."""

    def __init__(
        self,
        guard: Guard,
        resolve: Resolve | None = None,
        connector: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._guard = guard
        self._resolve = resolve or look_up
        self._connector = connector or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        literal = literal_of(host)
        resolved = [str(literal)] if literal is not None else []
        if literal is None:
            self._guard.admit_host(host, port)
            resolved = await self._resolve(host, port)
        addresses = self._guard.addresses(host, port, resolved)[:ADDRESSES_MAX]
        for at, address in enumerate(addresses, start=1):
            try:
                return await self._connector.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if at == len(addresses):
                    raise
        raise AssertionError("the guard answers with an address or raises")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("unix sockets are not reached from here")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PinnedTransport(httpx.AsyncBaseTransport):
    """What httpx sends through, on a backend of ours."""

    def __init__(
        self,
        ssl_context: ssl.SSLContext | None,
        backend: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context, network_backend=backend, http2=False, retries=0
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        answer = await self._pool.handle_async_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(
                    scheme=request.url.raw_scheme,
                    host=request.url.raw_host,
                    port=request.url.port,
                    target=request.url.raw_path,
                ),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        return httpx.Response(answer.status, headers=answer.headers, stream=_Stream(answer))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Stream(httpx.AsyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._answer.aiter_stream():
            yield part

    async def aclose(self) -> None:
        await self._answer.aclose()


def client(
    ssl_context: ssl.SSLContext | None, backend: httpcore.AsyncNetworkBackend | None = None
) -> httpx.AsyncClient:
    """A client for one call: it follows nothing, and trusts nothing in the environment."""
    return httpx.AsyncClient(
        transport=PinnedTransport(ssl_context, backend),
        follow_redirects=False,
        trust_env=False,
        # The caller bounds the whole; a part needs no bound of its own.
        timeout=None,
    )


@lru_cache(maxsize=16)
def trusting(ca_file: str | None) -> ssl.SSLContext:
    """Kept, for reading all authorities takes as long as a call. A changed file needs a restart."""
    context = httpx.create_ssl_context(verify=True, trust_env=False)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


async def look_up(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await loop.run_in_executor(_lookups(), ask)
    except OSError as error:
        raise Unavailable(host=host, why=f"cannot be resolved: {error.strerror}") from None
    return [str(address[0]) for *_, address in found]


@lru_cache(maxsize=1)
def _lookups() -> ThreadPoolExecutor:
    """Threads of their own: a name server that does not answer keeps a thread long after its call."""
    return ThreadPoolExecutor(LOOKUPS_MAX, thread_name_prefix="holdfast-names")


async def read_within(response: httpx.Response, bytes_max: int) -> bytes:
    """The body, decoded, if it fits. A small body that unpacks into a large one does not."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "deflate"):
        raise BadAnswer(why="an encoding that was not asked for", found=encoding[:40])
    told = response.headers.get("content-length", "")
    if told.isdecimal() and int(told) > bytes_max:
        raise AnswerTooLarge(bytes=int(told), bytes_max=bytes_max)
    # 32 + 15: gzip or zlib, whichever the header says.
    unpack = zlib.decompressobj(47) if encoding in ("gzip", "deflate") else None
    body = bytearray()
    received = 0
    async for part in response.aiter_raw():
        received += len(part)
        try:
            body += unpack.decompress(part, bytes_max + 1 - len(body)) if unpack else part
        except zlib.error as error:
            raise BadAnswer(why=str(error)) from None
        if len(body) > bytes_max or received > bytes_max + PACKING_BYTES_MAX:
            raise AnswerTooLarge(bytes_max=bytes_max)
        if unpack is not None and unpack.unused_data:
            # Kept by the unpacker, so it would grow; and whatever it is, it is not the body.
            raise BadAnswer(why="bytes after the end of the packed body")
    if unpack is not None and not unpack.eof:
        raise BadAnswer(why="the body is cut off")
    return bytes(body)


def failure_of(error: Exception, host: str, timeout_s: float) -> HoldfastError:
    """What a failed exchange means. Errors of ours are not for here."""
    if isinstance(error, TimeoutError):
        return Timeout(what="answer", host=host, waited_s=timeout_s)
    refused = certificate_error(error)
    if refused is not None:
        return Untrusted(host=host, why=refused.verify_message)
    if isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
        return Unavailable(host=host, why=str(error)[:200] or "no connection")
    if isinstance(error, httpx.RemoteProtocolError | httpx.InvalidURL):
        # What the connection raises is httpcore's; this is httpx, which cannot read a Location.
        return BadAnswer(host=host, why=str(error)[:200])
    if isinstance(error, httpcore.LocalProtocolError | httpx.LocalProtocolError):
        return Invalid(what="request", host=host, why=str(error)[:200])
    return Interrupted(host=host, why=f"{type(error).__name__}: {str(error)[:200]}")


def certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None
