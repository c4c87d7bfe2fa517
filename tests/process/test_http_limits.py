"""Clients that exhaust the limits of a running `holdfast up --http`, over raw sockets.

The tests share one server, and each closes its connections. They import nothing from the server, so that they hold for
any server behind the same command.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.processes import Proc

pytestmark = pytest.mark.timeout(120)

APP = "import holdfast as hf\n\napp = hf.App('shop')\n"
BODY_BYTES_MAX = 16 * 1024 * 1024
# Shorter than one minute, the former time limit of a silent body.
CLIENT_TIMEOUT_S = 45.0
# More than the server accepts.
CONNECTIONS = 1_100
# Fewer than the kernel queues for the server.
ACCEPT_QUEUE = 50
# The sent part of a body that stalls.
STALLED_BODIES = {"nothing": b"", "some of it": b"{" + b" " * 10_000}
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class HttpAddress(NamedTuple):
    host: str
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=CLIENT_TIMEOUT_S)


@pytest.fixture(scope="module")
def files() -> Iterator[None]:
    """Raise the limit of open files for 1,000 connections, in this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, files: None) -> Iterator[HttpAddress]:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(APP, encoding="utf-8")
    argv = [sys.executable, "-m", "holdfast.cli", "up", "shop:app", "--store", "data"]
    with Proc.spawn([*argv, "--http", "127.0.0.1:0"], ready="ready", cwd=folder) as proc:
        host, _, port = proc.lines[0].rpartition("://")[2].rpartition(":")
        yield HttpAddress(host, int(port))


@pytest.fixture(scope="module", autouse=True)
def stalled(server: HttpAddress) -> Iterator[dict[str, socket.socket]]:
    """Connections whose bodies stall while the first tests run."""
    with contextlib.ExitStack() as closing:
        made = {name: closing.enter_context(server.connect()) for name in STALLED_BODIES}
        for name, sock in made.items():
            sock.sendall(head(BODY_BYTES_MAX) + STALLED_BODIES[name])
        yield made


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


def read_response(sock: socket.socket) -> tuple[int, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        data = sock.recv(65536)
        assert data, f"the server hung up after {received!r}"
        received += data
    start, _, body = received.partition(b"\r\n\r\n")
    length = int(start.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        data = sock.recv(65536)
        assert data, "the server hung up in a body"
        body += data
    return int(start.split(b" ")[1]), body


def status_of(server: HttpAddress, request: bytes) -> int:
    """The status of the response to a request on a new connection."""
    with server.connect() as sock:
        sock.sendall(request)
        return read_response(sock)[0]


def open_connections(server: HttpAddress, opened: list[socket.socket], said: bytes) -> None:
    """Open more connections than the server accepts, and send the same bytes on each."""
    for number in range(CONNECTIONS):
        opened.append(server.connect())
        with contextlib.suppress(OSError):  # the server may already have evicted it
            opened[-1].sendall(said)
        if number % ACCEPT_QUEUE == 0:
            # An answer shows that the server has accepted each connection so far. A full queue would delay the next by seconds.
            assert status_of(server, HEALTH) == 200


def test_announced_content_length_reserves_no_body_memory(
    server: HttpAddress, opened: list[socket.socket]
) -> None:
    """The 32 requests announce twice the memory limit of all bodies."""
    for _ in range(32):
        opened.append(server.connect())
        opened[-1].sendall(head(BODY_BYTES_MAX))
    # An answer to a later request shows that the server has read every head.
    for _ in range(20):
        assert status_of(server, HEALTH) == 200
        assert status_of(server, submission()) == 201


def test_get_request_with_a_body_is_a_bad_request(server: HttpAddress) -> None:
    """The requests without authentication are included."""
    for path in ("/healthz", "/readyz", "/v1/tasks"):
        request = head(BODY_BYTES_MAX).replace(b"POST /v1/tasks", f"GET {path}".encode())
        with server.connect() as sock:
            sock.sendall(request)
            status, body = read_response(sock)
            assert (status, json.loads(body)["code"]) == (400, "bad_request")


def test_body_sent_in_pieces_is_accepted(server: HttpAddress) -> None:
    request = submission("1, " * 20_000 + "1")
    with server.connect() as sock:
        for at in range(0, len(request), 8192):
            sock.sendall(request[at : at + 8192])
        assert read_response(sock)[0] == 201


@pytest.mark.parametrize(
    "member", ["1", "[]", '"a"', '{"k": 1}'], ids=["numbers", "lists", "texts", "maps"]
)
def test_body_with_too_many_json_parts_is_refused_before_parsing(
    server: HttpAddress, member: str
) -> None:
    """Parsing a part holds the GIL: too many parts would block all other requests."""
    with server.connect() as sock:
        sock.sendall(submission(",".join([member] * 250_000)))
        status, body = read_response(sock)
        assert (status, json.loads(body)["code"]) == (422, "too_many_parts")


def test_large_body_with_few_json_parts_is_accepted(server: HttpAddress) -> None:
    text = json.dumps('[{"a", \\}],' * 250_000)
    with server.connect() as sock:
        sock.sendall(submission(text))
        assert read_response(sock)[0] == 201


def test_other_requests_are_answered_during_large_bodies(server: HttpAddress) -> None:
    request = submission(",".join(["1"] * 150_000))
    with server.connect() as large, server.connect() as other:
        for _ in range(5):
            large.sendall(request)
            other.sendall(HEALTH)
            assert read_response(other)[0] == 200
            assert read_response(large)[0] == 201


@pytest.mark.parametrize("sent", STALLED_BODIES)
def test_stalled_body_gets_408_too_slow(stalled: dict[str, socket.socket], sent: str) -> None:
    status, body = read_response(stalled[sent])
    assert (status, json.loads(body)["code"]) == (408, "too_slow")


def test_slow_bodies_do_not_block_other_bodies(
    server: HttpAddress, opened: list[socket.socket]
) -> None:
    """The 17 incomplete bodies exceed the memory limit of all bodies."""
    body_start = b"a" * (BODY_BYTES_MAX - 1000)
    for _ in range(17):
        opened.append(server.connect())
        with contextlib.suppress(OSError):
            opened[-1].sendall(head(BODY_BYTES_MAX) + body_start)
    request = submission(json.dumps("a" * 500_000))
    for _ in range(15):
        time.sleep(0.2)
        for sock in opened:
            with contextlib.suppress(OSError):
                sock.send(b"a")
    for _ in range(5):
        assert status_of(server, request) == 201


@pytest.mark.parametrize(
    "said",
    [b"", b"POST /v1/tasks HTT", head(5), head(1000) + b"{"],
    ids=["nothing", "half a head", "a head", "a head and a byte"],
)
def test_thousand_idle_connections_do_not_block_requests(
    server: HttpAddress, opened: list[socket.socket], said: bytes
) -> None:
    open_connections(server, opened, said)
    for _ in range(20):
        assert status_of(server, HEALTH) == 200
        assert status_of(server, submission()) == 201


def test_answered_connection_is_not_evicted_by_idle_connections(
    server: HttpAddress, opened: list[socket.socket]
) -> None:
    with server.connect() as sock:
        sock.sendall(submission())
        assert read_response(sock)[0] == 201
        open_connections(server, opened, head(5))
        assert status_of(server, HEALTH) == 200
        sock.sendall(submission())
        assert read_response(sock)[0] == 201
