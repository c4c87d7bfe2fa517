"""Servers that keep to no rule: whatever they send, the call ends in time, within bounds, typed.

They are sockets on loopback that say exactly the bytes of a script.
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

from holdfast.adapters.errors import AnswerTooLarge, BadAnswer, Interrupted
from holdfast.adapters.http import Http, Response
from holdfast.errors import HoldfastError, Timeout
from tests.adapters.rig import LOOPBACK, answer, run, serving

MODULES = ("holdfast.adapters.http", "holdfast.adapters.connection")

Script = Callable[[threading.Event], Iterable[bytes]]

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def saying(script: Script) -> Iterator[str]:
    """The URL of a server that says this to whoever connects, and then hangs up."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(30)
                connection.recv(65536)
                for part in script(over):
                    connection.sendall(part)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        over.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)
        assert not thread.is_alive()


def get(script: Script, **options: Any) -> Response:
    with saying(script) as url:
        return run(Http(LOOPBACK).request("GET", url, options, key="k"))


def once(*parts: bytes) -> Script:
    return lambda over: parts


def slowly(first: bytes, part: bytes) -> Script:
    """One part after another, for as long as anybody listens."""

    def script(over: threading.Event) -> Iterator[bytes]:
        yield first
        while not over.wait(0.02):
            yield part

    return script


def endless(first: bytes, part: bytes) -> Script:
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
def test_whatever_trickles_ends_in_a_timeout_of_the_whole(first: bytes, part: bytes) -> None:
    with pytest.raises((Timeout, Interrupted)) as caught:
        get(slowly(first, part), timeout_s=0.4)
    assert caught.value.retryable


# -- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [HEAD, b"HTTP/1.1 100 Continue\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n"],
    ids=["headers", "continue", "trailers"],
)
def test_headers_without_end_are_cut_off(first: bytes) -> None:
    with pytest.raises(HoldfastError):
        get(endless(first, b"x-a: " + b"b" * 8000 + b"\r\n"), timeout_s=20)


def test_a_header_without_end_is_cut_off() -> None:
    with pytest.raises(Interrupted):
        get(endless(HEAD + b"x-a: ", b"b" * 65536), timeout_s=20)


def test_chunks_without_end_are_cut_off_at_the_bound() -> None:
    first = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    with pytest.raises(AnswerTooLarge):
        get(endless(first, b"10000\r\n" + b"x" * 65536 + b"\r\n"), timeout_s=20)


PACKED = HEAD + b"content-encoding: gzip\r\n\r\n"


def test_junk_behind_a_packed_body_is_not_gathered() -> None:
    with pytest.raises(BadAnswer):
        get(endless(PACKED + gzip.compress(b"small"), b"x" * 65536), timeout_s=20)


def test_a_packed_body_that_never_unpacks_to_anything_is_cut_off() -> None:
    # A gzip header with a file name that does not end.
    with pytest.raises(AnswerTooLarge):
        get(endless(PACKED + b"\x1f\x8b\x08\x08" + bytes(6), b"x" * 65536), timeout_s=20)


def test_packed_blocks_of_nothing_are_cut_off() -> None:
    packer = zlib.compressobj()
    first = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    nothing = packer.flush(zlib.Z_FULL_FLUSH) or b"\x00\x00\x00\xff\xff"
    head = HEAD + b"content-encoding: deflate\r\n\r\n"
    with pytest.raises(AnswerTooLarge):
        get(endless(head + first, nothing * 5000), timeout_s=20)


@pytest.mark.parametrize("packed", [b"gzip, gzip", b"x-gzip", b"br", b"zstd", b"compress", b"\xff"])
def test_a_packing_that_was_not_asked_for_is_a_bad_answer(packed: bytes) -> None:
    bomb = gzip.compress(gzip.compress(bytes(10_000_000)))
    with pytest.raises(BadAnswer):
        get(once(HEAD + b"content-encoding: " + packed + b"\r\n\r\n" + bomb))


def test_a_body_that_packs_badly_still_fits() -> None:
    body = bytes(range(256)) * 40
    packed = zlib.compress(body, 0)
    assert len(packed) > len(body)
    head = HEAD + b"content-encoding: deflate\r\ncontent-length: %d\r\n\r\n" % len(packed)
    assert get(once(head + packed), bytes_max=len(packed)).body == body


# -- sense ---------------------------------------------------------------------------------------


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
def test_an_answer_that_is_no_http_ends_in_an_error_of_ours(said: bytes) -> None:
    with pytest.raises(HoldfastError) as caught:
        get(once(said), timeout_s=5)
    assert not isinstance(caught.value, Timeout)


def test_of_two_lengths_the_chunked_one_counts() -> None:
    said = HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    assert get(once(said)).body == b"hello"


def test_headers_come_back_as_text_whatever_their_bytes() -> None:
    said = HEAD + b"x-a: caf\xe9\r\nx-a: two\r\nX-B: \xf0\x9f\x8c\x8d\r\ncontent-length: 0\r\n\r\n"
    headers = get(once(said)).headers
    assert headers["x-a"] == "café, two"
    headers["x-b"].encode()


# -- what is ours stays ours ---------------------------------------------------------------------


def test_no_log_in_of_the_machine_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ada password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with serving() as server:
        server.routes["/"] = answer()
        run(Http(LOOPBACK).request("GET", server.url(), None, key="k"))
        assert "authorization" not in server.seen[0].headers


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy", "no_proxy"])
def test_a_proxy_of_the_environment_is_not_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server, serving("127.0.0.2") as proxy:
        server.routes["/"] = answer(200, b"direct")
        for each in ("http_proxy", "HTTP_PROXY", name):
            monkeypatch.setenv(each, proxy.url())
        response = run(Http(LOOPBACK).request("GET", server.url(), None, key="k"))
        assert (response.body, proxy.seen) == (b"direct", [])
