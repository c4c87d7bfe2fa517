"""A pinned connection: it connects only to an address that the guard has checked, and bounds the
body.

A name is resolved once, where the connection is made, and the connection uses the checked address.
So a DNS answer that changes between two lookups has no effect (DNS rebinding). Host header, TLS
server name and certificate check still use the name. Proxy settings of the environment are ignored.

This module imports the extra `httpx`. Import it inside a function.
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

from holdfast.adapters.address_guard import AddressGuard, parse_literal
from holdfast.adapters.errors import (
    BadResponse,
    Interrupted,
    ResponseTooLarge,
    TlsNotTrusted,
    Unavailable,
)
from holdfast.errors import HoldfastError, Invalid, Timeout

Resolve = Callable[[str, int], Awaitable[list[str]]]

# The number of addresses of one name that are tried.
ADDRESSES_MAX = 4
# The number of concurrent DNS lookups.
RESOLVER_THREADS_MAX = 64
# The maximum number of bytes by which a compressed body may exceed the body limit.
COMPRESSION_OVERHEAD_MAX = 64 * 1024


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """A network backend that resolves a name, checks the addresses, and connects to a checked
    one."""

    def __init__(
        self,
        guard: AddressGuard,
        resolve: Resolve | None = None,
        connector: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._guard = guard
        self._resolve = resolve or resolve_host
        self._connector = connector or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        literal = parse_literal(host)
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
    """The httpx transport on a pinned backend."""

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
        return httpx.Response(answer.status, headers=answer.headers, stream=_BodyStream(answer))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _BodyStream(httpx.AsyncByteStream):
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
    """Make a client for one call. It follows no redirect and uses no settings of the
    environment."""
    return httpx.AsyncClient(
        transport=PinnedTransport(ssl_context, backend),
        follow_redirects=False,
        trust_env=False,
        # The caller bounds the whole call, so single operations need no timeout.
        timeout=None,
    )


@lru_cache(maxsize=16)
def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return the TLS context. Cached, because loading all authorities takes as long as a call. A
    changed file needs a restart."""
    context = httpx.create_ssl_context(verify=True, trust_env=False)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


async def resolve_host(host: str, port: int) -> list[str]:
    """Resolve a host name to addresses."""
    loop = asyncio.get_running_loop()
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await loop.run_in_executor(_resolver_threads(), ask)
    except OSError as error:
        raise Unavailable(host=host, why=f"cannot be resolved: {error.strerror}") from None
    return [str(address[0]) for *_, address in found]


@lru_cache(maxsize=1)
def _resolver_threads() -> ThreadPoolExecutor:
    """Return the threads for DNS lookups. They are separate, because a name server that does not
    respond occupies a thread long after its call."""
    return ThreadPoolExecutor(RESOLVER_THREADS_MAX, thread_name_prefix="holdfast-dns")


async def read_body(response: httpx.Response, bytes_max: int) -> bytes:
    """Read and decode the body. Raise if it exceeds the limit, also after decompression."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "deflate"):
        raise BadResponse(
            why="the server used an encoding that was not requested", found=encoding[:40]
        )
    content_length = response.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > bytes_max:
        raise ResponseTooLarge(bytes=int(content_length), bytes_max=bytes_max)
    # 32 + 15: gzip or zlib, detected from the header.
    decompressor = zlib.decompressobj(47) if encoding in ("gzip", "deflate") else None
    body = bytearray()
    received = 0
    async for part in response.aiter_raw():
        received += len(part)
        try:
            body += (
                decompressor.decompress(part, bytes_max + 1 - len(body)) if decompressor else part
            )
        except zlib.error as error:
            raise BadResponse(why=str(error)) from None
        if len(body) > bytes_max or received > bytes_max + COMPRESSION_OVERHEAD_MAX:
            raise ResponseTooLarge(bytes_max=bytes_max)
        if decompressor is not None and decompressor.unused_data:
            # The decompressor would buffer these bytes without bound, and they are not part of the
            # body.
            raise BadResponse(why="bytes after the end of the compressed body")
    if decompressor is not None and not decompressor.eof:
        raise BadResponse(why="the body is truncated")
    return bytes(body)


def to_adapter_error(error: Exception, host: str, timeout_s: float) -> HoldfastError:
    """Map the exception of a failed exchange to an adapter error. HoldfastErrors are not passed
    here."""
    if isinstance(error, TimeoutError):
        return Timeout(what="answer", host=host, waited_s=timeout_s)
    refused = certificate_error(error)
    if refused is not None:
        return TlsNotTrusted(host=host, why=refused.verify_message)
    if isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
        return Unavailable(host=host, why=str(error)[:200] or "no connection")
    if isinstance(error, httpx.RemoteProtocolError | httpx.InvalidURL):
        # The connection raises httpcore errors. This one is from httpx, for an invalid Location
        # header.
        return BadResponse(host=host, why=str(error)[:200])
    if isinstance(error, httpcore.LocalProtocolError | httpx.LocalProtocolError):
        return Invalid(what="request", host=host, why=str(error)[:200])
    return Interrupted(host=host, why=f"{type(error).__name__}: {str(error)[:200]}")


def certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the certificate error in the cause chain of an exception, or None."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None
