"""HTTP/1 request heads and JSON values: every input is parsed or refused."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec
from holdfast.errors import HoldfastError, Invalid
from holdfast.ops.http.http1 import parse_head, response_bytes
from holdfast.ops.http.json_values import arguments_to_json, decode, pack_json, to_json
from holdfast.ops.http.problem import _STATUS, HttpResponse, problem_response, reason_phrase
from holdfast.ops.http.request_schemas import CompletionBody, SubmissionBody

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


@given(st.lists(HEAD_PIECES | st.binary(max_size=6), max_size=40))
def test_parse_accepts_or_refuses_any_request_head(pieces: list[bytes]) -> None:
    status = response_status(parse_head, b"".join(pieces) + b"\r\n\r\n")
    assert status in (200, 400, 411, 413, 431)


def test_parse_splits_method_path_query_and_headers() -> None:
    head = parse_head(
        b"POST /v1/tasks/1-2%2F/cancel?a=b%20c&d= HTTP/1.1\r\nHost: here:1\r\n"
        b"X-Some:  thing \r\nx-some: more\r\nContent-Length: 12\r\n\r\n"
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


def test_response_bytes_have_status_line_headers_and_body() -> None:
    response = response_bytes(HttpResponse(200, b"{}", (("A", "b"),)), keep_alive=False)
    head, _, body = response.partition(b"\r\n\r\n")
    assert body == b"{}"
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert {b"Content-Length: 2", b"A: b", b"Connection: close"} <= set(lines)


def test_response_bytes_have_keep_alive_header() -> None:
    head, _, _ = response_bytes(HttpResponse(200, b""), keep_alive=True).partition(b"\r\n\r\n")
    assert b"Connection: keep-alive" in head.split(b"\r\n")


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
    response = response_bytes(HttpResponse(status, b""), keep_alive=False)
    assert response.startswith(f"HTTP/1.1 {status} {phrase}\r\n".encode())
