"""Clients that keep others out, against a started `holdfast up --http`, by raw sockets alone.

Nothing of the server is imported, so that these tests hold for any server behind the same command.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import Proc

pytestmark = pytest.mark.timeout(120)

APP = "import holdfast as hf\n\napp = hf.App('shop')\n"
BODY_BYTES_MAX = 16 * 1024 * 1024
# Shorter than the minute that a silent body had once.
PATIENCE_S = 45.0
# More than the server takes.
CONNECTIONS = 1_100
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Server(NamedTuple):
    host: str
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE_S)


@pytest.fixture
def files() -> Iterator[None]:
    """As many open files as 1,000 connections take, here and in what is started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def server(tmp_path: Path, files: None) -> Iterator[Server]:
    (tmp_path / "shop.py").write_text(APP, encoding="utf-8")
    argv = [sys.executable, "-m", "holdfast.cli", "up", "shop:app", "--store", "data"]
    proc = Proc.spawn([*argv, "--http", "127.0.0.1:0"], ready="ready", cwd=tmp_path)
    try:
        host, _, port = proc.lines[0].rpartition("://")[2].rpartition(":")
        yield Server(host, int(port))
    finally:
        proc.close()


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for sock in made:
        sock.close()


def head(length: int, *headers: str) -> bytes:
    lines = [
        "POST /v1/tasks HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *headers,
        "\r\n",
    ]
    return "\r\n".join(lines).encode()


def submission(args: str = "1") -> bytes:
    body = f'{{"name": "add", "args": [{args}]}}'.encode()
    return head(len(body)) + body


def answer(sock: socket.socket) -> tuple[int, bytes]:
    found = b""
    while b"\r\n\r\n" not in found:
        data = sock.recv(65536)
        assert data, f"the server hung up after {found!r}"
        found += data
    start, _, body = found.partition(b"\r\n\r\n")
    length = int(start.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        data = sock.recv(65536)
        assert data, "the server hung up in a body"
        body += data
    return int(start.split(b" ")[1]), body


def asked(server: Server, request: bytes) -> int:
    """The status of the answer, on a connection of its own."""
    with server.connect() as sock:
        sock.sendall(request)
        return answer(sock)[0]


def test_an_announced_body_reserves_nothing(server: Server, opened: list[socket.socket]) -> None:
    """32 of them announce twice as many bytes as all bodies in memory may have."""
    for _ in range(32):
        opened.append(server.connect())
        opened[-1].sendall(head(BODY_BYTES_MAX))
    # The server has seen every head: it has answered a request that came after them.
    for _ in range(20):
        assert asked(server, HEALTH) == 200
        assert asked(server, submission()) == 201


def test_a_request_that_needs_no_body_has_none(server: Server) -> None:
    """Those that everybody may make are among them."""
    for path in ("/healthz", "/readyz", "/v1/tasks"):
        request = head(BODY_BYTES_MAX).replace(b"POST /v1/tasks", f"GET {path}".encode())
        with server.connect() as sock:
            sock.sendall(request)
            status, body = answer(sock)
            assert (status, json.loads(body)["code"]) == (400, "bad_request")


def test_bodies_whose_end_dribbles_keep_no_other_body_out(
    server: Server, opened: list[socket.socket]
) -> None:
    """17 of them, without their last bytes, are more than all bodies in memory may have."""
    most = b"a" * (BODY_BYTES_MAX - 1000)
    for _ in range(17):
        opened.append(server.connect())
        with contextlib.suppress(OSError):
            opened[-1].sendall(head(BODY_BYTES_MAX) + most)
    request = submission(json.dumps("a" * 500_000))
    for _ in range(15):
        time.sleep(0.2)
        for sock in opened:
            with contextlib.suppress(OSError):
                sock.send(b"a")
    for _ in range(5):
        assert asked(server, request) == 201


@pytest.mark.parametrize(
    "said",
    [b"", b"POST /v1/tasks HTT", head(5), head(1000) + b"{"],
    ids=["nothing", "half a head", "a head", "a head and a byte"],
)
def test_a_thousand_connections_that_say_little_keep_no_request_out(
    server: Server, opened: list[socket.socket], said: bytes
) -> None:
    for _ in range(CONNECTIONS):
        opened.append(server.connect())
        with contextlib.suppress(OSError):  # it may have had to give way already
            opened[-1].sendall(said)
    for _ in range(20):
        assert asked(server, HEALTH) == 200
        assert asked(server, submission()) == 201


def test_a_client_that_has_been_answered_is_not_put_out_by_silent_ones(
    server: Server, opened: list[socket.socket]
) -> None:
    with server.connect() as sock:
        sock.sendall(submission())
        assert answer(sock)[0] == 201
        for _ in range(CONNECTIONS):
            opened.append(server.connect())
            with contextlib.suppress(OSError):
                opened[-1].sendall(head(5))
        assert asked(server, HEALTH) == 200
        sock.sendall(submission())
        assert answer(sock)[0] == 201


@pytest.mark.parametrize("sent", [b"", b"{" + b" " * 10_000], ids=["nothing", "some of it"])
def test_a_body_that_does_not_go_on_is_too_slow(server: Server, sent: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(head(BODY_BYTES_MAX) + sent)
        status, body = answer(sock)
        assert (status, json.loads(body)["code"]) == (408, "too_slow")


def test_a_body_that_arrives_in_pieces_is_taken(server: Server) -> None:
    request = submission("1, " * 20_000 + "1")
    with server.connect() as sock:
        for at in range(0, len(request), 8192):
            sock.sendall(request[at : at + 8192])
        assert answer(sock)[0] == 201


@pytest.mark.parametrize(
    "member", ["1", "[]", '"a"', '{"k": 1}'], ids=["numbers", "lists", "texts", "maps"]
)
def test_a_body_of_too_many_parts_is_refused_unparsed(server: Server, member: str) -> None:
    """To make each of them takes the whole interpreter a moment: many would stop all other requests."""
    with server.connect() as sock:
        sock.sendall(submission(",".join([member] * 250_000)))
        status, body = answer(sock)
        assert (status, json.loads(body)["code"]) == (422, "too_many_parts")


def test_a_large_body_of_few_parts_is_taken(server: Server) -> None:
    text = json.dumps('[{"a", \\}],' * 250_000)
    with server.connect() as sock:
        sock.sendall(submission(text))
        assert answer(sock)[0] == 201


def test_others_are_answered_beside_large_bodies(server: Server) -> None:
    request = submission(",".join(["1"] * 150_000))
    with server.connect() as large, server.connect() as other:
        for _ in range(5):
            large.sendall(request)
            other.sendall(HEALTH)
            assert answer(other)[0] == 200
            assert answer(large)[0] == 201
