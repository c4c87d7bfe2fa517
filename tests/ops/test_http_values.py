"""Heads of requests and responses, and JSON values: every input is parsed or refused."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import codec
from holdfast.errors import HoldfastError, Invalid
from holdfast.ops.http.json_values import arguments_to_json, decode, pack_json, to_json
from holdfast.ops.http.problem import _STATUS, problem_response, reason_phrase
from holdfast.ops.http.protocol import head_bytes
from holdfast.ops.http.request_head import check_head
from holdfast.ops.http.request_schemas import CompletionBody, SubmissionBody
from holdfast.ops.http.server import HttpServer
from tests.ops.http_rig import HttpRig, RawHttpConnection, post_request, rig, server

__all__ = ["rig", "server"]

HEAD_PIECES = st.sampled_from(
    [
        b"GET", b"POST", b" ", b"/", b"/v1/tasks", b"?a=1", b"%41", b"%", b"HTTP/1.1", b"HTTP/1.0",
        b"\r\n", b"\n", b"Host: localhost", b"Content-Length: ", b"5", b"-1", b":", b"\x00", b"\xff",
        b"Transfer-Encoding: chunked", b"Connection: close", b"\t",
    ]
)  # fmt: skip


def response_status(fn: Callable[..., Any], *args: Any) -> int:
    """200, or the status of the error response."""
    try:
        fn(*args)
    except HoldfastError as error:
        return problem_response(error).status
    return 200


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(HEAD_PIECES | st.binary(max_size=6), max_size=40))
def test_server_accepts_or_refuses_any_request_head(
    server: HttpServer, pieces: list[bytes]
) -> None:
    with RawHttpConnection(server) as raw:
        raw.send(b"".join(pieces) + b"\r\n\r\n")
        status, _ = raw.read_response()
    assert status in (400, 403, 404, 405, 411, 413, 415, 431)


def test_check_head_splits_method_path_query_and_headers() -> None:
    head = check_head(
        method="POST",
        target=b"/v1/tasks/1-2%2F/cancel?a=b%20c&d=",
        version="1.1",
        headers=[
            (b"host", b"here:1"),
            (b"x-some", b"thing "),
            (b"x-some", b"more"),
            (b"content-length", b"12"),
        ],
        keep_alive=True,
    )
    assert (head.method, head.path) == ("POST", ("v1", "tasks", "1-2/", "cancel"))
    assert head.query == {"a": "b c", "d": ""}
    assert head.headers["x-some"] == "thing, more"
    assert (head.length, head.keep_alive) == (12, True)


def test_problem_response_has_status_and_code_of_every_error() -> None:
    for kind, status in _STATUS:
        response = problem_response(kind(what="x"))
        document = msgspec.json.decode(response.body)
        assert (response.status, document["status"], document["code"]) == (
            status,
            status,
            kind.code,
        )
        assert document["retryable"] is kind.retryable


def test_problem_response_of_an_unlisted_error_is_500() -> None:
    assert problem_response(HoldfastError()).status == 500


def test_response_has_canonical_status_line_and_headers(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    raw.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    expected = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n"
        b"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        b'Connection: keep-alive\r\n\r\n{"ok":true}'
    )
    assert raw.socket.recv(len(expected) + 1) == expected


def test_upgrade_header_is_ignored(rig: HttpRig, server: HttpServer) -> None:
    raw = rig.raw(server)
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    for _ in range(2):
        raw.send(post_request("/v1/tasks", {"name": "add"}, *upgrade))
        assert raw.read_response()[0] == 201


def test_http_1_0_client_keeps_its_connection_only_if_it_asks(
    rig: HttpRig, server: HttpServer
) -> None:
    raw = rig.raw(server)
    raw.send(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
    assert raw.read_response()[0] == 200
    raw.send(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert b"Connection: close\r\n" in raw.read_until_closed()


# -- values ----------------------------------------------------------------------------------------


@given(st.binary(max_size=60))
def test_decode_accepts_or_refuses_any_body(body: bytes) -> None:
    for kind in (SubmissionBody, CompletionBody):
        assert response_status(decode, kind, body) in (200, 400, 422)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_json_values_round_trip(value: Any) -> None:
    body = msgspec.json.encode({"worker": "w", "lease": "1-1-1", "result": value})
    decoded = decode(CompletionBody, body)
    assert (
        msgspec.json.decode(msgspec.json.encode(to_json(pack_json("result", decoded.result))))
        == value
    )


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (codec.pack(b"\x00\xff"), "AP8="),
        (msgspec.msgpack.encode({1: "a", b"k": "b"}), {"1": "a", "aw==": "b"}),
        (codec.pack(float("nan")), None),
        (codec.pack(msgspec.msgpack.Ext(5, b"ab")), {"kind": "ext 5", "base64": "YWI="}),
        (b"\xc1", {"kind": "unreadable", "base64": "wQ=="}),
        (b"", {"kind": "unreadable", "base64": ""}),
    ],
)
def test_stored_values_without_a_json_form_are_converted(stored: bytes, told: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(to_json(stored))) == told


def test_arguments_of_unexpected_shape_are_returned_as_positional() -> None:
    assert arguments_to_json(codec.pack([[1], {"a": 2}])) == ([1], {"a": 2})
    assert arguments_to_json(codec.pack([1, 2])) == ([[1, 2]], {})
    assert arguments_to_json(codec.pack("x")) == (["x"], {})


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [2**70]])
def test_integer_beyond_64_bits_is_refused(value: Any) -> None:
    with pytest.raises(Invalid):
        pack_json("result", value)


@pytest.mark.parametrize(
    ("status", "phrase"),
    [(413, "Content Too Large"), (422, "Unprocessable Content"), (404, "Not Found")],
)
def test_reason_phrase_is_independent_of_the_python_version(status: int, phrase: str) -> None:
    assert reason_phrase(HTTPStatus(status)) == phrase
    assert head_bytes(status, []).startswith(f"HTTP/1.1 {status} {phrase}\r\n".encode())
