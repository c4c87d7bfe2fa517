"""A corpus of HTTP attacks against the whole API: nothing gets through, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.ops.http.limits import BODY_BYTES_MAX, HEAD_BYTES_MAX
from holdfast.ops.http.server import HttpServer
from tests.api_server.attack_server import BODIES_BYTES_MAX
from tests.api_server.served_rig import ServedRig, client, rig
from tests.ops.http_rig import JsonClient
from tests.processes import ROOT, Proc

__all__ = ["client", "rig"]

pytestmark = pytest.mark.timeout(120)

CREATE = b'{"type": "QuotedAccount", "name": "smuggled"}'
# What an attack tries to get executed. It is a complete request, so a server that reads it answers twice.
SMUGGLED = (
    b"POST /v1/worlds HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(CREATE), CREATE)
)


def post(
    *headers: str, body: bytes = b"", path: str = "/v1/worlds", host: str = "localhost"
) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1") + body


def get(*headers: str, path: str = "/v1/worlds", host: str = "localhost") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "\r\n"]).encode(
        "latin-1"
    )


LENGTH = f"Content-Length: {len(SMUGGLED)}"
AMBIGUOUS = {
    "length and chunks": post("Content-Length: 0", "Transfer-Encoding: chunked", body=SMUGGLED),
    "chunks and length": post("Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks": post("Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks, space before the colon": post("Transfer-Encoding : chunked", "Content-Length: 0", body=SMUGGLED),
    "chunks, tab before the value": post("Transfer-Encoding:\tchunked", "Content-Length: 0", body=SMUGGLED),
    "chunks, vertical tab": post("Transfer-Encoding: \x0bchunked", "Content-Length: 0", body=SMUGGLED),
    "unknown coding": post("Transfer-Encoding: xchunked", "Content-Length: 0", body=SMUGGLED),
    "two codings": post("Transfer-Encoding: identity", "Transfer-Encoding: chunked", body=SMUGGLED),
    "coding in quotes": post('Transfer-Encoding: "chunked"', "Content-Length: 0", body=SMUGGLED),
    "coding behind a line feed": post("X: y\nTransfer-Encoding: chunked", "Content-Length: 0", body=SMUGGLED),
    "two lengths": post("Content-Length: 0", LENGTH, body=SMUGGLED),
    "two equal lengths": post("Content-Length: 0", "Content-Length: 0", body=SMUGGLED),
    "list of lengths": post("Content-Length: 0, 0", body=SMUGGLED),
    "length with a sign": post("Content-Length: +0", body=SMUGGLED),
    "negative length": post("Content-Length: -1", body=SMUGGLED),
    "hexadecimal length": post("Content-Length: 0x0", body=SMUGGLED),
    "length with a space inside": post("Content-Length: 0 0", body=SMUGGLED),
    "length without a value": post("Content-Length:", body=SMUGGLED),
    "huge length": post("Content-Length: 99999999999999999999", body=SMUGGLED),
    "length behind a folded line": post("X: y", " Content-Length: 4", "Content-Length: 0", body=SMUGGLED),
    "length behind a carriage return": post("X: y\rContent-Length: 4", "Content-Length: 0", body=SMUGGLED),
    "length with an underscore": post("Content_Length: 0", body=SMUGGLED),
    "no length": post(body=SMUGGLED),
    "body of a GET": get(LENGTH) + SMUGGLED,
    "NUL in a header": get("X: a\x00b") + SMUGGLED,
    "header without a name": get(": x") + SMUGGLED,
    "header without a colon": get("nonsense") + SMUGGLED,
    "line feeds only": b"GET /v1/worlds HTTP/1.1\nHost: localhost\n\n" + SMUGGLED,
    "HTTP/0.9": b"GET /v1/worlds\r\n\r\n" + SMUGGLED,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "HTTP/3.0": b"GET /v1/worlds HTTP/3.0\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "two spaces": b"GET  /v1/worlds HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "tab in the request line": b"GET\t/v1/worlds HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "empty line first": b"\r\n" + get() + SMUGGLED,
    "absolute target": b"GET http://localhost/v1/worlds HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "unknown method": b"STEAL /v1/worlds HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "TLS hello": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n" + SMUGGLED,
}  # fmt: skip

REBINDING = {
    host: get(host=host)
    for host in (
        "evil.example", "evil.example:8787", "localhost.evil.example", "127.0.0.1.evil.example",
        "localhost@evil.example", "evil.example#localhost", "localhost,evil.example", "", "[::1", "0x7f.1",
        "localhost:80@evil.example", "127.0.0.1.nip.io",
    )
}  # fmt: skip

BODY = (f"Content-Length: {len(CREATE)}",)
CROSS_SITE = {
    "foreign origin": post("Origin: http://evil.example", *BODY, body=CREATE),
    "null origin": post("Origin: null", *BODY, body=CREATE),
    "origin with our name first": post("Origin: http://localhost.evil.example", *BODY, body=CREATE),
    "origin with another port": post("Origin: http://localhost:1", *BODY, body=CREATE),
    "two origins": post("Origin: http://localhost", "Origin: http://evil.example", *BODY, body=CREATE),
    "cross-site fetch": post("Sec-Fetch-Site: cross-site", *BODY, body=CREATE),
    "same-site fetch": post("Sec-Fetch-Site: same-site", *BODY, body=CREATE),
    "form": post(*BODY, body=CREATE).replace(b"application/json", b"application/x-www-form-urlencoded"),
    "plain text": post(*BODY, body=CREATE).replace(b"application/json", b"text/plain"),
    "multipart": post(*BODY, body=CREATE).replace(b"application/json", b"multipart/form-data; boundary=x"),
    "no content type": post(*BODY, body=CREATE).replace(b"Content-Type: application/json\r\n", b""),
    "two content types": post("Content-Type: text/plain", *BODY, body=CREATE),
    "read of another origin": get("Origin: http://evil.example"),
    "events of another origin": get("Origin: http://evil.example", path="/v1/events?subject=counts"),
}  # fmt: skip


def sized(body: bytes, path: str = "/v1/worlds") -> bytes:
    return post(f"Content-Length: {len(body)}", body=body, path=path)


OVERSIZED = {
    "65 headers": get(*(f"X-{number}: y" for number in range(65))),
    "long header": get("X: " + "y" * HEAD_BYTES_MAX),
    "long header without an end": b"GET / HTTP/1.1\r\nX: " + b"y" * HEAD_BYTES_MAX * 4,
    "long name": get("x" * HEAD_BYTES_MAX + ": y"),
    "long target": get(path="/" + "x" * 5_000),
    "100 query fields": get(path="/v1/worlds?" + "&".join(f"a{number}=1" for number in range(100))),
    "field given twice": get(path="/v1/worlds?limit=1&limit=2"),
    "length above the limit": post(f"Content-Length: {BODY_BYTES_MAX + 1}"),
    "deep lists": sized(b'{"type": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": sized(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "many lists": sized(b'{"type": [' + b"[]," * 300_000 + b"[]]}"),
    "many members": sized(b"{" + b",".join(b'"%d":1' % number for number in range(250_000)) + b"}"),
    "huge number": sized(b'{"type": ' + b"9" * 100_000 + b"}"),
    "huge exponent": sized(b'{"name": "add", "args": [1e999999]}', "/v1/tasks"),
    "long name of a world": sized(b'{"type": "QuotedAccount", "name": "%b"}' % (b"x" * 100_000)),
    "invalid UTF-8": sized(b'{"type": "QuotedAccount", "name": "\xff\xfe"}'),
    "surrogate": sized(b'{"type": "QuotedAccount", "name": "\\ud800"}'),
    "compressed": post("Content-Encoding: gzip", "Content-Length: 4", body=b"\x1f\x8b\x08\x00"),
    "path in the path": get(path="/v1/worlds/QuotedAccount/..%2f..%2f..%2fetc%2fpasswd"),
    "dots": get(path="/v1/../../etc/passwd"),
    "NUL in the path": get(path="/v1/worlds/QuotedAccount/%00"),
    "overlong UTF-8": get(path="/v1/worlds/QuotedAccount/%c0%af"),
}  # fmt: skip

CORPUS = {**AMBIGUOUS, **REBINDING, **CROSS_SITE, **OVERSIZED}


@pytest.fixture(scope="module")
def attacked() -> Iterator[tuple[ServedRig, HttpServer]]:
    with stores.open("memory:") as store:
        served = ServedRig(store)
        try:
            yield served, served.bank()
        finally:
            served.close()


def test_smuggled_request_alone_creates_a_world(rig: ServedRig) -> None:
    """Without this, the corpus would prove nothing."""
    server = rig.bank()
    raw = rig.raw(server)
    raw.send(SMUGGLED)
    assert raw.read_response()[0] == 201
    [world] = rig.client(server).get("/v1/worlds").document["items"]
    assert world["name"] == "smuggled"


@pytest.mark.parametrize("name", CORPUS)
def test_attack_gets_one_refusal_and_changes_nothing(
    attacked: tuple[ServedRig, HttpServer], name: str
) -> None:
    served, server = attacked
    raw = served.raw(server)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        raw.send(CORPUS[name])
        raw.socket.shutdown(socket.SHUT_WR)
    answer = raw.read_until_closed()
    statuses = re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)
    assert len(statuses) <= 1, statuses
    # A request that never ends gets no answer.
    assert all(400 <= int(status) < 500 for status in statuses), answer[:300]
    assert statuses or name == "line feeds only", "no answer"
    observer = served.client(server)
    assert observer.get("/v1/worlds").document["items"] == []
    assert observer.get("/v1/tasks").document["tasks"] == []


def test_request_behind_a_long_poll_is_answered_after_it_and_in_order(client: JsonClient) -> None:
    """A client that mixes requests cannot make two responses change places."""
    poll = json.dumps({"worker": "w", "queues": ["none"], "wait_s": 0.3}).encode()
    with socket.create_connection((client._connection.host, client._connection.port), 20) as raw:
        raw.sendall(
            post(f"Content-Length: {len(poll)}", body=poll, path="/v1/tasks/lease")
            + get(path="/healthz")
            + b"nonsense\r\n\r\n"
        )
        answer = b""
        while data := raw.recv(65536):
            answer += data
    parts = [answer.find(text) for text in (b'"suspects"', b'"ok"', b'"bad_request"')]
    assert -1 not in parts
    assert parts == sorted(parts)


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def attack_server() -> Iterator[Proc]:
    command = [sys.executable, "-m", "tests.api_server.attack_server"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Proc.spawn(command, cwd=ROOT, env={"PYTHONPATH": path}, fresh=True) as proc:
        yield proc


def peak_bytes(proc: Proc) -> int:
    status = Path(f"/proc/{proc.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_memory_is_bounded_under_attacks_of_many_connections(attack_server: Proc) -> None:
    port = int(attack_server.lines[0].split()[1])
    before = peak_bytes(attack_server)
    open_sockets: list[socket.socket] = []

    def connect() -> socket.socket:
        made = socket.create_connection(("127.0.0.1", port), 10)
        open_sockets.append(made)
        return made

    try:
        for _ in range(100):  # heads that never end
            with contextlib.suppress(OSError):
                connect().sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * (HEAD_BYTES_MAX - 100))
        for _ in range(12):  # 180 MB of bodies that never end
            with contextlib.suppress(OSError):
                head = post(f"Content-Length: {BODY_BYTES_MAX}", path="/v1/tasks")
                connect().sendall(head + b" " * (BODY_BYTES_MAX - 1_000_000))
        for _ in range(5):  # a client that sends requests and reads no answer
            raw = connect()
            raw.settimeout(1.0)
            with contextlib.suppress(OSError):
                raw.sendall(get(path="/v1/worlds") * 100_000)
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 5) as raw,
            ):
                raw.sendall(get(path="/healthz"))
                if b"200 OK" in raw.recv(1000):
                    break
        else:
            raise AssertionError("the server does not answer")
        grown = peak_bytes(attack_server) - before
    finally:
        for one in open_sockets:
            one.close()
    assert grown < 4 * BODIES_BYTES_MAX, f"{grown:,} bytes"
