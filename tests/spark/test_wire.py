"""Frames between tasks and the ledger service: whole and understood, or refused with a typed error."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Fenced, HoldfastError, IllegalTransition, Invalid
from holdfast.ledger.records import Done
from holdfast.spark import wire

pytestmark = pytest.mark.timeout(30)

STEP = wire.Step(
    [
        wire.Move(
            3,
            1,
            b"digest",
            [Done(5, 7, 3)],
            [(7, 9)],
            b"",
            5,
            [wire.Other(8, 5, 4, "ValueError: no", 0)],
            4,
        )
    ],
    wire.Claim(100, 10, 0, -1),
    500,
    2,
    0.25,
    [1, 2],
)
REQUESTS: list[wire.Message] = [
    wire.Hello("token", "child/host/1/ab"),
    STEP,
    wire.Beat([1, 2]),
    wire.Tokens(5),
    wire.PutBlock(),
    wire.Outcomes(0, 10, True),
    wire.Seal([(0, 5)], True, [(0, 5, 100, b"bounds")], b"schema", "5:ab", "plan"),
    wire.Status(),
    wire.Cancel(),
    wire.Leave(),
]


class Line:
    """Two ends of one connection."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def write(self, data: bytes) -> None:
        """Little enough for the kernel to keep."""
        self.ours.sendall(data)
        self.ours.shutdown(socket.SHUT_WR)

    def read_all(self) -> None:
        while True:
            wire.receive_request(self.theirs, 1 << 20)


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.ours.close()
    made.theirs.close()


def frame(head: bytes, attached: bytes = b"") -> bytes:
    return struct.pack("<II", len(head), len(attached)) + head + attached


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_arrives_as_it_was_sent(line: Line, message: wire.Message) -> None:
    wire.send(line.ours, message, b"ab", memoryview(b"c"), b"", bytearray(b"d"))
    found, attached = wire.receive_request(line.theirs)
    assert found == message
    assert attached == b"abcd"


def test_frames_follow_each_other_without_a_gap(line: Line) -> None:
    for n in range(5):
        wire.send(line.ours, wire.Tokens(n), b"x" * n)
    for n in range(5):
        assert wire.receive_request(line.theirs) == (wire.Tokens(n), b"x" * n)


def test_a_frame_may_come_byte_by_byte(line: Line) -> None:
    def drip() -> None:
        for byte in frame(msgspec.msgpack.encode(wire.Tokens(7)), b"abc"):
            line.ours.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    assert wire.receive_request(line.theirs) == (wire.Tokens(7), b"abc")
    thread.join()


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 15])
def test_a_truncated_frame_is_a_closed_connection(line: Line, cut: int) -> None:
    line.write(frame(msgspec.msgpack.encode(wire.Tokens(7)), b"abcd")[:cut])
    with pytest.raises(wire.Closed):
        wire.receive_request(line.theirs)


@pytest.mark.parametrize(
    ("head", "attached"), [(1 << 31, 0), (0, (1 << 30) + 1), (2**32 - 1, 2**32 - 1)]
)
def test_an_oversized_frame_is_refused_before_it_is_read(
    line: Line, head: int, attached: int
) -> None:
    line.write(struct.pack("<II", head, attached))
    with pytest.raises(Invalid) as refused:
        wire.receive_request(line.theirs)
    assert refused.value.fields["max"] == wire.FRAME_BYTES_MAX


def test_the_first_frame_may_be_held_to_less(line: Line) -> None:
    line.write(frame(b"x" * 5000))
    with pytest.raises(Invalid) as refused:
        wire.receive_request(line.theirs, 4096)
    assert refused.value.fields["bytes"] == 5000


JUNK = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n",
    "a number": msgspec.msgpack.encode(5),
    "an unknown request": msgspec.msgpack.encode(["Explode", 1]),
    "an answer": msgspec.msgpack.encode(wire.Ok()),
    "a field too few": msgspec.msgpack.encode(["Tokens"]),
    "a field of another type": msgspec.msgpack.encode(["Tokens", "many"]),
    "a map": msgspec.msgpack.encode({"type": "Tokens", "count": 1}),
    "two messages": msgspec.msgpack.encode(wire.Tokens(1)) * 2,
    "half a message": msgspec.msgpack.encode(wire.Tokens(1))[:-1],
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_a_header_that_is_none_is_refused(line: Line, junk: bytes) -> None:
    line.write(frame(junk))
    with pytest.raises(Invalid) as refused:
        wire.receive_request(line.theirs)
    assert refused.value.fields["what"] == "frame"


@given(st.binary(max_size=200))
def test_whatever_bytes_come_they_are_a_message_or_a_typed_error(data: bytes) -> None:
    line = Line()
    try:
        line.write(data)
        with pytest.raises((Invalid, wire.Closed)):
            line.read_all()
    finally:
        line.ours.close()
        line.theirs.close()


def test_what_is_too_large_to_be_sent_is_refused_before_a_byte_of_it_is(line: Line) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return wire.FRAME_BYTES_MAX + 1

    with pytest.raises(Invalid) as refused:
        wire.send(line.ours, wire.PutBlock(), Huge(b"x"))
    assert refused.value.fields["what"] == "frame"
    line.ours.shutdown(socket.SHUT_WR)
    assert line.theirs.recv(1) == b""


@pytest.mark.parametrize(
    "error",
    [
        Invalid(what="token", why="not of this run"),
        Fenced(resource="grant", held=3, current=5),
        IllegalTransition(
            machine="ledger", seq=7, prior="COMMITTED", attempted="IN_FLIGHT", owner="w", wall_ns=1
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_was_refused_is_raised_where_it_was_asked(line: Line, error: HoldfastError) -> None:
    wire.send(line.ours, wire.refused(error))
    with pytest.raises(type(error)) as raised:
        wire.receive_answer(line.theirs)
    assert raised.value.fields == error.fields


def test_fields_of_an_error_that_are_no_plain_values_travel_as_text(line: Line) -> None:
    error = Invalid(what="thing", found=(1, {2: object}), path=OSError("broken"))
    wire.send(line.ours, wire.refused(error))
    with pytest.raises(Invalid) as raised:
        wire.receive_answer(line.theirs)
    assert raised.value.fields == {
        "what": "thing",
        "found": [1, {"2": "<class 'object'>"}],
        "path": "broken",
    }


@given(
    sizes=st.lists(st.sampled_from([0, 1, 300, wire.READ_BYTES, 3 * wire.READ_BYTES]), max_size=5),
    cut=st.integers(1, 1 << 17),
)
def test_requests_are_read_whole_however_the_bytes_arrive(sizes: list[int], cut: int) -> None:
    sent = [(wire.Tokens(n), bytes([n]) * size) for n, size in enumerate(sizes)]
    stream = b"".join(wire.frame(message, len(data)) + data for message, data in sent)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def write() -> None:
            for at in range(0, len(stream), cut):
                ours.sendall(stream[at : at + cut])
            ours.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        requests = wire.Requests(theirs)
        found = []
        for _ in sent:
            message, data = requests.next()
            found.append((message, bytes(data)))
        assert found == sent
        with pytest.raises(wire.Closed):
            requests.next()
        thread.join()
