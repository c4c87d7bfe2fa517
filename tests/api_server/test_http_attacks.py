"""A corpus of HTTP attacks against the whole API: nothing gets through, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from holdfast import store as stores
from holdfast.ops.http.limits import BODY_BYTES_MAX, HEAD_BYTES_MAX, OPEN_BODY_BYTES_MAX
from holdfast.ops.http.server import HttpServer
from tests.api_server.attack_server import BODIES_BYTES_MAX
from tests.api_server.served_rig import ONE_SCOPE_EACH, ServedRig, client, rig, token_of
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
    "length, space before the colon": post("Content-Length : 0", body=SMUGGLED),
    "length, tab before the colon": post("Content-Length: 0", f"Content-Length\t: {len(SMUGGLED)}", body=SMUGGLED),
    "length with a vertical tab": post("Content-Length: \x0b0", body=SMUGGLED),
    "length with NUL": post("Content-Length: 0\x00", body=SMUGGLED),
    "length with an exponent": post("Content-Length: 0e0", body=SMUGGLED),
    "length in full-width digits": post().replace(b"\r\n\r\n", b"\r\nContent-Length: \xef\xbc\x90\r\n\r\n") + SMUGGLED,
    "list of differing lengths": post(f"Content-Length: 0, {len(SMUGGLED)}", body=SMUGGLED),
    "chunks in HTTP/1.0": post("Transfer-Encoding: chunked", "Content-Length: 0", body=SMUGGLED).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "chunks with an extension": post("Transfer-Encoding: chunked", body=b"0;a=b\r\n\r\n" + SMUGGLED),
    "chunks and identity": post("Transfer-Encoding: chunked, identity", "Content-Length: 0", body=SMUGGLED),
    "coding in a folded line": post("Transfer-Encoding:", " chunked", "Content-Length: 0", body=SMUGGLED),
    "coding without a value": post("Transfer-Encoding:", "Content-Length: 0", body=SMUGGLED),
    "coding with a NUL in its name": post("Transfer\x00-Encoding: chunked", "Content-Length: 0", body=SMUGGLED),
    "coding with a letter above ASCII": post("Transfer-Encod\xedng: chunked", "Content-Length: 0", body=SMUGGLED),
    "space in the name of a header": get("X Y: z") + SMUGGLED,
    "two hosts": get("Host: localhost") + SMUGGLED,
    "two keys": post("Content-Length: 2", "Idempotency-Key: a", "Idempotency-Key: b", body=b"{}") + SMUGGLED,
    "carriage returns only": b"GET /v1/worlds HTTP/1.1\rHost: localhost\r\r" + SMUGGLED,
    "absolute target of another host": b"GET http://evil.example/v1/worlds HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "authority as the target": b"GET localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "fragment": get(path="/v1/worlds#/healthz") + SMUGGLED,
    "target above ASCII": get(path="/v1/worlds/\xe4/\xf6") + SMUGGLED,
    "line feed in the target": b"GET /v1/worlds\nX: y HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "space in the target": get(path="/v1/wor lds") + SMUGGLED,
    "lower-case method": b"get /v1/worlds HTTP/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "lower-case version": b"GET /v1/worlds http/1.1\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "HTTP/1.10": b"GET /v1/worlds HTTP/1.10\r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "space after the version": b"GET /v1/worlds HTTP/1.1 \r\nHost: localhost\r\n\r\n" + SMUGGLED,
    "NUL first": b"\x00" + get() + SMUGGLED,
    "PROXY protocol": b"PROXY TCP4 127.0.0.1 127.0.0.1 1 1\r\n" + get() + SMUGGLED,
    "TLS hello": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n" + SMUGGLED,
}  # fmt: skip

REBINDING = {
    host: get(host=host)
    for host in (
        "evil.example", "evil.example:8787", "localhost.evil.example", "127.0.0.1.evil.example",
        "localhost@evil.example", "evil.example#localhost", "localhost,evil.example", "", "[::1", "0x7f.1",
        "localhost:80@evil.example", "127.0.0.1.nip.io", "localhost.", "localhost:80:80", "localhost:x",
        "[::1%evil.example]", "[::1%25evil.example]", "[::1]evil.example", "::1", "2130706433", "localhost/evil.example",
        "localhost\\evil.example", "127.0.0.1 evil.example", "http://localhost",
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
    "origin without a scheme": post("Origin: localhost", *BODY, body=CREATE),
    "origin with a path": post("Origin: http://localhost/", *BODY, body=CREATE),
    "origin with a user": post("Origin: http://localhost@evil.example", *BODY, body=CREATE),
    "origin of a file": post("Origin: file://", *BODY, body=CREATE),
    "empty origin": post("Origin:", *BODY, body=CREATE),
    "origins in a list": post("Origin: http://localhost http://evil.example", *BODY, body=CREATE),
    "JSON as a parameter": post(*BODY, body=CREATE).replace(b"application/json", b"text/plain; a=application/json"),
    "content types in a list": post(*BODY, body=CREATE).replace(b"application/json", b"application/json, text/plain"),
    "longer content type": post(*BODY, body=CREATE).replace(b"application/json", b"application/jsonp"),
    "navigation to a list": get("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"),
    "two fetch sites": get("Sec-Fetch-Site: none", "Sec-Fetch-Site: cross-site"),
    "sign-in of another site": post("Origin: http://evil.example", "Content-Length: 2", body=b"{}", path="/v1/session"),
    "sign-out of another site": post("Sec-Fetch-Site: cross-site", "Content-Length: 2", body=b"{}", path="/v1/session/end"),
    "sign-in by a form": post("Content-Length: 2", body=b"{}", path="/v1/session").replace(b"application/json", b"text/plain"),
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
    "encoded surrogate": get(path="/v1/worlds/QuotedAccount/%ed%a0%80"),
    "truncated percent sign": get(path="/v1/worlds/QuotedAccount/%"),
    "encoded twice": get(path="/v1/worlds/QuotedAccount/%252e%252e%252f"),
    "encoded slash for a route": get(path="/v1%2fworlds"),
    "dot for an id": get(path="/v1/worlds/~/."),
    "id with a slash": get(path="/v1/worlds/~/..%2f..%2f0"),
    "backslash": get(path="/v1\\worlds"),
    "parameters of a path": get(path="/v1/worlds;a=b"),
    "query of question marks": get(path="/v1/worlds?" + "?" * 4_000),
    "query of percent signs": get(path="/v1/worlds?limit=" + "%" * 4_000),
    "query with a long number": get(path="/v1/worlds?limit=" + "9" * 4_000),
    "query of invalid UTF-8": get(path="/v1/worlds?cursor=%ff%fe"),
    "query with NUL": get(path="/v1/worlds?type=%00&name=%00"),
    "long cursor": get(path="/v1/worlds?cursor=" + "A" * 4_000),
    "long key": post("Idempotency-Key: " + "k" * 256, *BODY, body=CREATE),
    "key above ASCII": post("Idempotency-Key: \xe4", *BODY, body=CREATE),
    "key with a control character": post("Idempotency-Key: a\x01b", *BODY, body=CREATE),
    "key with a tab": post("Idempotency-Key: a\tb", *BODY, body=CREATE),
    "byte order mark": sized(b"\xef\xbb\xbf" + CREATE),
    "UTF-16": sized(CREATE.decode().encode("utf-16")),
    "two documents": sized(CREATE + CREATE),
    "comment": sized(b"/**/" + CREATE),
    "not a number": sized(b'{"name": "add", "args": [NaN]}', "/v1/tasks"),
    "infinity": sized(b'{"name": "add", "args": [-Infinity]}', "/v1/tasks"),
    "leading zero": sized(b'{"name": "add", "args": [01]}', "/v1/tasks"),
    "single quotes": sized(CREATE.replace(b'"', b"'")),
    "control character in a text": sized(CREATE.replace(b"smuggled", b"a\x01b")),
    "NUL in a name": sized(CREATE.replace(b"smuggled", b"a\\u0000b")),
    "surrogate in a key": sized(b'{"\\udc00": 1}'),
    "list in place of an object": sized(b"[" + CREATE + b"]"),
    "empty body": sized(b""),
    "deep text": sized(b'"' + b"[" * 100_000 + b'"'),
    "long escapes": sized(b'{"type": "QuotedAccount", "name": "%b"}' % (b"\\u0041" * 100_000)),
    "deep arguments": sized(b'{"name": "add", "args": ' + b"[" * 2_000 + b"]" * 2_000 + b"}", "/v1/tasks"),
    "many tasks": sized(b'{"tasks": [' + b",".join([b'{"name": "add"}'] * 60_000) + b"]}", "/v1/tasks"),
    "large sign-in": post(f"Content-Length: {OPEN_BODY_BYTES_MAX + 1}", path="/v1/session"),
    "subject of an unknown kind": get(path="/v1/events?subject=../world/x"),
    "many subjects": get(path="/v1/events?subject=counts&also=" + ",".join(["counts"] * 300)),
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


# Headers that other servers obey, and that are no part of a request here.
HARMLESS = {
    "method override": ("X-HTTP-Method-Override: DELETE", "X-HTTP-Method: POST", "X-Method-Override: PUT"),
    "other address": ("X-Original-URL: /v1/limits", "X-Rewrite-URL: /v1/limits", "X-Accel-Redirect: /etc/passwd"),
    "other host": ("X-Forwarded-Host: evil.example", "Forwarded: host=evil.example", "X-Host: evil.example"),
    "other client": ("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "X-Remote-User: operate"),
    "HTTP/2 upgrade": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
    "WebSocket upgrade": ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: AAAA", "Sec-WebSocket-Version: 13"),
    "range": ("Range: bytes=0-99999999,0-99999999,0-99999999",),
    "hop by hop": ("Connection: keep-alive, Host, Origin, Authorization", "TE: trailers", "Trailer: Content-Length"),
    "many cookies": ("Cookie: " + "; ".join(f"holdfast_session_{n}={n}" for n in range(500)),),
    "long cookie": ("Cookie: a=" + "x" * 15_000,),
    "cookie of a session that does not exist": ("Cookie: __Host-holdfast_session_1=x; holdfast_session_1=x",),
    "many entity tags": ("If-None-Match: " + ", ".join(f'"{n}"' for n in range(1_000)),),
    "broken trace": ("traceparent: 00-" + "0" * 400, "tracestate: " + "a=b," * 2_000),
    "many encodings": ("Accept-Encoding: " + ",".join(["gzip;q=0.1"] * 500), "Accept: " + "*/*," * 500),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_header_without_a_meaning_changes_no_answer(
    attacked: tuple[ServedRig, HttpServer], name: str
) -> None:
    served, server = attacked
    raw = served.raw(server)
    raw.send(get(*HARMLESS[name]))
    raw.socket.shutdown(socket.SHUT_WR)
    answer = raw.read_until_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer[:300]
    assert json.loads(body) == {"items": [], "next": None}
    assert b"evil" not in answer
    assert b"set-cookie" not in head.lower()


UNICODE_NAMES = (
    "\u202eadmin",
    "a\u200db",
    "e\u0301",
    "\u00e9",
    "ada\r\nSet-Cookie: a=b",
    "..",
    "~",
    "%2e",
    "\U0001f4a5",
    "\ufeff",
)


@pytest.mark.parametrize("name", UNICODE_NAMES, ids=ascii)
def test_unusual_name_is_one_world_and_reaches_no_header(rig: ServedRig, name: str) -> None:
    """Names are compared by their bytes: no name is another one in disguise."""
    server = rig.bank()
    client = rig.client(server)
    made = client.post("/v1/worlds", {"type": "QuotedAccount", "name": name})
    assert made.status == 201
    path = f"/v1/worlds/QuotedAccount/{quote(name, safe='')}"
    shown = client.get(path)
    assert shown.document["name"] == name
    assert "set-cookie" not in {*made.headers, *shown.headers}
    other = unicodedata.normalize("NFC" if len(name) > 1 else "NFD", name)
    if other != name:
        assert client.get(f"/v1/worlds/QuotedAccount/{quote(other, safe='')}").status == 404
    assert [one["name"] for one in client.get("/v1/worlds").document["items"]] == [name]


def test_key_of_a_request_gives_no_answer_to_a_token_without_the_scope(rig: ServedRig) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    headers = {"Idempotency-Key": "shared"}
    body = {"type": "QuotedAccount", "name": "ada"}
    made = rig.client(server, token_of("submit")).post("/v1/worlds", body, headers=headers)
    assert made.status == 201
    for scope in ("read", "work"):
        refused = rig.client(server, token_of(scope)).post("/v1/worlds", body, headers=headers)
        assert (refused.status, refused.document["code"]) == (403, "scope")
    assert rig.client(server).post("/v1/worlds", body, headers=headers).status == 401


def test_key_is_never_the_key_of_another_route_or_body(rig: ServedRig) -> None:
    client = rig.client(rig.bank())
    headers = {"Idempotency-Key": "k"}
    for number, path in enumerate(("/v1/worlds", "/v1/tasks", "/v1/worlds")):
        body = (
            {"name": "add"}
            if path == "/v1/tasks"
            else {"type": "QuotedAccount", "name": f"n{number}"}
        )
        answer = client.post(path, body, headers=headers)
        if number:
            assert (answer.status, answer.document["code"]) == (409, "key_conflict"), (
                answer.document
            )
    assert [one["name"] for one in client.get("/v1/worlds").document["items"]] == ["n0"]
    assert client.get("/v1/tasks").document["tasks"] == []


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


def test_memory_is_bounded_under_streams_and_sign_ins_of_many_connections(
    attack_server: Proc,
) -> None:
    port = int(attack_server.lines[0].split()[1])
    before = peak_bytes(attack_server)
    last_id = "Last-Event-ID: " + "x." + "y" * 15_000
    large = post("Content-Length: 16000000", path="/v1/session") + b" " * 1_000_000
    with contextlib.ExitStack() as opened:
        for number in range(400):
            raw = opened.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            raw.settimeout(1.0)
            with contextlib.suppress(OSError):
                if number % 4:  # streams whose events the client never reads
                    raw.sendall(get(last_id, path="/v1/events?subject=counts&also=readiness"))
                else:
                    raw.sendall(large)
        assert attack_server.running
        grown = peak_bytes(attack_server) - before
    assert grown < 2 * BODIES_BYTES_MAX, f"{grown:,} bytes"
