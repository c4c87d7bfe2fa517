"""Hostile HTTP servers: for every response, the request ends within its time and size limits with a
typed error.

The servers are loopback sockets that send exactly the bytes of a script.
"""

from __future__ import annotations

import gzip
import itertools
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.adapters.errors import BadResponse, Interrupted, ResponseTooLarge
from holdfast.adapters.http import HttpClient, Response
from holdfast.errors import HoldfastError, Timeout
from tests.adapters.rig import LOOPBACK, respond_with, run, run_http_server

MODULES = ("holdfast.adapters.http", "holdfast.adapters.pinned_connection")

ByteScript = Callable[[threading.Event], Iterable[bytes]]

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def run_raw_server(script: ByteScript) -> Iterator[str]:
    """Run a server that sends the script to each client and closes the connection. Yield its
    URL."""
    stopped = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while not stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(30)
                connection.recv(65536)
                for part in script(stopped):
                    connection.sendall(part)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        stopped.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)
        assert not thread.is_alive()


def get(script: ByteScript, **options: Any) -> Response:
    with run_raw_server(script) as url:
        return run(HttpClient(LOOPBACK).request("GET", url, options, key="k"))


def send_once(*parts: bytes) -> ByteScript:
    return lambda over: parts


def send_slowly(first: bytes, part: bytes) -> ByteScript:
    """Send one part after another until the client disconnects."""

    def script(over: threading.Event) -> Iterator[bytes]:
        yield first
        while not over.wait(0.02):
            yield part

    return script


def send_endlessly(first: bytes, part: bytes) -> ByteScript:
    return lambda over: itertools.chain(
        [first], itertools.takewhile(lambda _: not over.is_set(), itertools.repeat(part))
    )


# -- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (b"", b"H"),
        (HEAD, b"x-a: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"),
        (HEAD + b"content-length: 1000000\r\n\r\n", b"x"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"x"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-a: b\r\n"),
        (HEAD + b"\r\n", b"x"),
    ],
    ids=[
        "status line", "headers", "continue", "hints", "body", "chunks", "chunk head", "trailers",
        "until close",
    ],
)  # fmt: skip
def test_trickling_http_response_ends_in_a_timeout(first: bytes, part: bytes) -> None:
    with pytest.raises((Timeout, Interrupted)) as caught:
        get(send_slowly(first, part), timeout_s=0.4)
    assert caught.value.retryable


# -- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [HEAD, b"HTTP/1.1 100 Continue\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n"],
    ids=["headers", "continue", "trailers"],
)
def test_endless_http_headers_are_cut_off(first: bytes) -> None:
    with pytest.raises(HoldfastError):
        get(send_endlessly(first, b"x-a: " + b"b" * 8000 + b"\r\n"), timeout_s=20)


def test_endless_http_header_value_is_cut_off() -> None:
    with pytest.raises(Interrupted):
        get(send_endlessly(HEAD + b"x-a: ", b"b" * 65536), timeout_s=20)


def test_endless_http_chunks_are_cut_off_at_bytes_max() -> None:
    first = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    with pytest.raises(ResponseTooLarge):
        get(send_endlessly(first, b"10000\r\n" + b"x" * 65536 + b"\r\n"), timeout_s=20)


GZIP_HEAD = HEAD + b"content-encoding: gzip\r\n\r\n"


def test_data_after_a_compressed_body_is_a_bad_response() -> None:
    with pytest.raises(BadResponse):
        get(send_endlessly(GZIP_HEAD + gzip.compress(b"small"), b"x" * 65536), timeout_s=20)


def test_compressed_body_without_output_is_cut_off() -> None:
    # A gzip header with an endless file name.
    with pytest.raises(ResponseTooLarge):
        get(send_endlessly(GZIP_HEAD + b"\x1f\x8b\x08\x08" + bytes(6), b"x" * 65536), timeout_s=20)


def test_empty_compressed_blocks_are_cut_off() -> None:
    packer = zlib.compressobj()
    first = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    nothing = packer.flush(zlib.Z_FULL_FLUSH) or b"\x00\x00\x00\xff\xff"
    head = HEAD + b"content-encoding: deflate\r\n\r\n"
    with pytest.raises(ResponseTooLarge):
        get(send_endlessly(head + first, nothing * 5000), timeout_s=20)


@pytest.mark.parametrize("packed", [b"gzip, gzip", b"x-gzip", b"br", b"zstd", b"compress", b"\xff"])
def test_unrequested_content_encoding_is_a_bad_response(packed: bytes) -> None:
    bomb = gzip.compress(gzip.compress(bytes(10_000_000)))
    with pytest.raises(BadResponse):
        get(send_once(HEAD + b"content-encoding: " + packed + b"\r\n\r\n" + bomb))


def test_body_larger_when_compressed_still_fits_bytes_max() -> None:
    body = bytes(range(256)) * 40
    packed = zlib.compress(body, 0)
    assert len(packed) > len(body)
    head = HEAD + b"content-encoding: deflate\r\ncontent-length: %d\r\n\r\n" % len(packed)
    assert get(send_once(head + packed), bytes_max=len(packed)).body == body


# -- syntax --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00" * 100,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"220 mail.test ESMTP\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 1000 High\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: five\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        HEAD + b"transfer-encoding: sideways\r\n\r\nhello",
        HEAD + b"content-length: 100\r\n\r\nshort",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhel",
        HEAD + b"x-a: b\x00c\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nhello",
    ],
)
def test_malformed_http_response_raises_a_typed_error(said: bytes) -> None:
    with pytest.raises(HoldfastError) as caught:
        get(send_once(said), timeout_s=5)
    assert not isinstance(caught.value, Timeout)


def test_chunked_encoding_overrides_content_length() -> None:
    said = HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    assert get(send_once(said)).body == b"hello"


def test_http_response_headers_are_decoded_from_any_bytes() -> None:
    said = HEAD + b"x-a: caf\xe9\r\nx-a: two\r\nX-B: \xf0\x9f\x8c\x8d\r\ncontent-length: 0\r\n\r\n"
    headers = get(send_once(said)).headers
    assert headers["x-a"] == "café, two"
    headers["x-b"].encode()


# -- local configuration -------------------------------------------------------------------------


def test_netrc_login_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ada password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with run_http_server() as server:
        server.routes["/"] = respond_with()
        run(HttpClient(LOOPBACK).request("GET", server.url(), None, key="k"))
        assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy", "no_proxy"])
def test_environment_proxy_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_http_server() as server, run_http_server("127.0.0.2") as proxy:
        server.routes["/"] = respond_with(200, b"direct")
        for each in ("http_proxy", "HTTP_PROXY", name):
            monkeypatch.setenv(each, proxy.url())
        response = run(HttpClient(LOOPBACK).request("GET", server.url(), None, key="k"))
        assert (response.body, proxy.requests) == (b"direct", [])
