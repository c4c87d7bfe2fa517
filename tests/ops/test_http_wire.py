"""The head of a request, and values in JSON: whatever comes, it is understood or refused."""

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
from holdfast.ops.http.bodies import Completion, Submission
from holdfast.ops.http.problem import _STATUS, Response, phrase_of, problem
from holdfast.ops.http.values import arguments, decode, packed, plain
from holdfast.ops.http.wire import bytes_of, parse

PIECES = st.sampled_from(
    [
        b"GET", b"POST", b" ", b"/", b"/v1/tasks", b"?a=1", b"%41", b"%", b"HTTP/1.1", b"HTTP/1.0",
        b"\r\n", b"\n", b"Host: localhost", b"Content-Length: ", b"5", b"-1", b":", b"\x00", b"\xff",
        b"Transfer-Encoding: chunked", b"Connection: close", b"\t",
    ]
)  # fmt: skip


def status_of(fn: Callable[..., Any], *args: Any) -> int:
    """200, or what whoever sent it is told."""
    try:
        fn(*args)
    except HoldfastError as error:
        return problem(error).status
    return 200


@given(st.lists(PIECES | st.binary(max_size=6), max_size=40))
def test_any_head_is_understood_or_refused(pieces: list[bytes]) -> None:
    status = status_of(parse, b"".join(pieces) + b"\r\n\r\n")
    assert status in (200, 400, 411, 413, 431)


def test_a_head_is_taken_apart() -> None:
    found = parse(
        b"POST /v1/tasks/1-2%2F/cancel?a=b%20c&d= HTTP/1.1\r\nHost: here:1\r\n"
        b"X-Some:  thing \r\nx-some: more\r\nContent-Length: 12\r\n\r\n"
    )
    assert (found.method, found.path) == ("POST", ("v1", "tasks", "1-2/", "cancel"))
    assert found.query == {"a": "b c", "d": ""}
    assert found.headers["x-some"] == "thing, more"
    assert (found.length, found.keep_alive) == (12, True)


def test_every_status_of_an_error_is_told_with_its_code() -> None:
    for kind, status in _STATUS:
        answer = problem(kind(what="x"))
        document = msgspec.json.decode(answer.body)
        assert (answer.status, document["status"], document["code"]) == (status, status, kind.code)
        assert document["retryable"] is kind.retryable


def test_an_error_without_a_status_of_its_own_is_ours() -> None:
    assert problem(HoldfastError()).status == 500


def test_an_answer_is_framed() -> None:
    answer = bytes_of(Response(200, b"{}", (("A", "b"),)), keep_alive=False)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"{}"
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert {b"Content-Length: 2", b"A: b", b"Connection: close"} <= set(lines)


def test_an_answer_says_that_the_connection_stays() -> None:
    head, _, _ = bytes_of(Response(200, b""), keep_alive=True).partition(b"\r\n\r\n")
    assert b"Connection: keep-alive" in head.split(b"\r\n")


# -- values ----------------------------------------------------------------------------------------


@given(st.binary(max_size=60))
def test_any_body_is_understood_or_refused(body: bytes) -> None:
    for kind in (Submission, Completion):
        assert status_of(decode, kind, body) in (200, 400, 422)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_what_json_says_comes_back_as_it_was(value: Any) -> None:
    sent = msgspec.json.encode({"worker": "w", "lease": "1-1-1", "result": value})
    found = decode(Completion, sent)
    assert msgspec.json.decode(msgspec.json.encode(plain(packed("result", found.result)))) == value


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
def test_what_json_cannot_say_is_told_otherwise(stored: bytes, told: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(plain(stored))) == told


def test_arguments_of_another_shape_are_told_as_they_are() -> None:
    assert arguments(codec.pack([[1], {"a": 2}])) == ([1], {"a": 2})
    assert arguments(codec.pack([1, 2])) == ([[1, 2]], {})
    assert arguments(codec.pack("x")) == (["x"], {})


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [2**70]])
def test_an_integer_that_does_not_fit_is_refused(value: Any) -> None:
    with pytest.raises(Invalid):
        packed("result", value)


@pytest.mark.parametrize(
    ("status", "phrase"),
    [(413, "Content Too Large"), (422, "Unprocessable Content"), (404, "Not Found")],
)
def test_a_status_has_the_same_name_with_every_python(status: int, phrase: str) -> None:
    assert phrase_of(HTTPStatus(status)) == phrase
    told = bytes_of(Response(status, b""), keep_alive=False)
    assert told.startswith(f"HTTP/1.1 {status} {phrase}\r\n".encode())
