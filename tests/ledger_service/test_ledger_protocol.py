"""The frames between Spark tasks and the ledger service: decoded, or refused with a typed error."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Fenced, HoldfastError, IllegalTransition, Invalid
from holdfast.ledger.events import FinishedRange
from holdfast.spark import ledger_protocol

pytestmark = pytest.mark.timeout(30)

# Within this distance of a frame's start, a stream is cut into chunks of any size.
NEAR_BYTES = 64
# Elsewhere a chunk has at least this size: a million smaller ones would take a second.
CHUNK_BYTES_MIN = 500

EXCHANGE = ledger_protocol.Exchange(
    [
        ledger_protocol.GrantReport(
            epoch=3,
            report_no=1,
            digest=b"digest",
            done=[FinishedRange(5, 7, 3)],
            begin=[(7, 9)],
            seqs=b"",
            lo=5,
            resultless=[ledger_protocol.ResultlessRowReport(8, 5, 4, "ValueError: no", 0)],
            size=4,
        )
    ],
    ledger_protocol.ClaimRows(100, 10, 0, -1),
    500,
    2,
    0.25,
    [1, 2],
)
REQUESTS: list[ledger_protocol.WireMessage] = [
    ledger_protocol.Hello("token", "child/host/1/ab"),
    EXCHANGE,
    ledger_protocol.ServiceHeartbeat([1, 2]),
    ledger_protocol.AcquireTokens(5),
    ledger_protocol.PutBlock(),
    ledger_protocol.FetchOutcomes(0, 10, True),
    ledger_protocol.SealInput([(0, 5)], True, [(0, 5, 100, b"bounds")], b"schema", "5:ab", "plan"),
    ledger_protocol.GetRunStatus(),
    ledger_protocol.CancelRun(),
    ledger_protocol.ShutdownService(),
]


class SocketPair:
    """The two ends of a connection."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def write(self, data: bytes) -> None:
        """Send data that fits into the kernel buffer, then close the write side."""
        self.ours.sendall(data)
        self.ours.shutdown(socket.SHUT_WR)

    def read_all(self) -> None:
        while True:
            ledger_protocol.receive_request(self.theirs, 1 << 20)


@pytest.fixture
def socket_pair() -> Iterator[SocketPair]:
    made = SocketPair()
    yield made
    made.ours.close()
    made.theirs.close()


def raw_frame(head: bytes, attached: bytes = b"") -> bytes:
    return struct.pack("<II", len(head), len(attached)) + head + attached


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_request_round_trips_through_the_protocol(
    socket_pair: SocketPair, message: ledger_protocol.WireMessage
) -> None:
    ledger_protocol.send(socket_pair.ours, message, b"ab", memoryview(b"c"), b"", bytearray(b"d"))
    found, attached = ledger_protocol.receive_request(socket_pair.theirs)
    assert found == message
    assert attached == b"abcd"


def test_consecutive_frames_are_received_in_order(socket_pair: SocketPair) -> None:
    for n in range(5):
        ledger_protocol.send(socket_pair.ours, ledger_protocol.AcquireTokens(n), b"x" * n)
    for n in range(5):
        assert ledger_protocol.receive_request(socket_pair.theirs) == (
            ledger_protocol.AcquireTokens(n),
            b"x" * n,
        )


def test_frame_is_received_byte_by_byte(socket_pair: SocketPair) -> None:
    def drip() -> None:
        for byte in raw_frame(msgspec.msgpack.encode(ledger_protocol.AcquireTokens(7)), b"abc"):
            socket_pair.ours.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    assert ledger_protocol.receive_request(socket_pair.theirs) == (
        ledger_protocol.AcquireTokens(7),
        b"abc",
    )
    thread.join()


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 15])
def test_truncated_frame_raises_connection_ended(socket_pair: SocketPair, cut: int) -> None:
    socket_pair.write(
        raw_frame(msgspec.msgpack.encode(ledger_protocol.AcquireTokens(7)), b"abcd")[:cut]
    )
    with pytest.raises(ledger_protocol.ConnectionEnded):
        ledger_protocol.receive_request(socket_pair.theirs)


@pytest.mark.parametrize(
    ("head", "attached"), [(1 << 31, 0), (0, (1 << 30) + 1), (2**32 - 1, 2**32 - 1)]
)
def test_oversized_frame_is_refused_before_it_is_read(
    socket_pair: SocketPair, head: int, attached: int
) -> None:
    socket_pair.write(struct.pack("<II", head, attached))
    with pytest.raises(Invalid) as refused:
        ledger_protocol.receive_request(socket_pair.theirs)
    assert refused.value.fields["max"] == ledger_protocol.FRAME_BYTES_MAX


def test_receive_request_enforces_a_smaller_frame_limit(socket_pair: SocketPair) -> None:
    socket_pair.write(raw_frame(b"x" * 5000))
    with pytest.raises(Invalid) as refused:
        ledger_protocol.receive_request(socket_pair.theirs, 4096)
    assert refused.value.fields["bytes"] == 5000


JUNK = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n",
    "a number": msgspec.msgpack.encode(5),
    "an unknown request": msgspec.msgpack.encode(["Explode", 1]),
    "an answer": msgspec.msgpack.encode(ledger_protocol.Ok()),
    "a field too few": msgspec.msgpack.encode(["Tokens"]),
    "a field of another type": msgspec.msgpack.encode(["Tokens", "many"]),
    "a map": msgspec.msgpack.encode({"type": "Tokens", "count": 1}),
    "two messages": msgspec.msgpack.encode(ledger_protocol.AcquireTokens(1)) * 2,
    "half a message": msgspec.msgpack.encode(ledger_protocol.AcquireTokens(1))[:-1],
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_invalid_frame_header_is_refused(socket_pair: SocketPair, junk: bytes) -> None:
    socket_pair.write(raw_frame(junk))
    with pytest.raises(Invalid) as refused:
        ledger_protocol.receive_request(socket_pair.theirs)
    assert refused.value.fields["what"] == "frame"


@given(st.binary(max_size=200))
def test_random_bytes_raise_a_typed_error(data: bytes) -> None:
    socket_pair = SocketPair()
    try:
        socket_pair.write(data)
        with pytest.raises((Invalid, ledger_protocol.ConnectionEnded)):
            socket_pair.read_all()
    finally:
        socket_pair.ours.close()
        socket_pair.theirs.close()


def test_send_refuses_an_oversized_frame_before_the_first_byte(socket_pair: SocketPair) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return ledger_protocol.FRAME_BYTES_MAX + 1

    with pytest.raises(Invalid) as refused:
        ledger_protocol.send(socket_pair.ours, ledger_protocol.PutBlock(), Huge(b"x"))
    assert refused.value.fields["what"] == "frame"
    socket_pair.ours.shutdown(socket.SHUT_WR)
    assert socket_pair.theirs.recv(1) == b""


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
def test_error_reply_is_raised_by_the_receiver(
    socket_pair: SocketPair, error: HoldfastError
) -> None:
    ledger_protocol.send(socket_pair.ours, ledger_protocol.error_reply(error))
    with pytest.raises(type(error)) as raised:
        ledger_protocol.receive_reply(socket_pair.theirs)
    assert raised.value.fields == error.fields


def test_error_fields_without_plain_values_are_sent_as_text(socket_pair: SocketPair) -> None:
    error = Invalid(what="thing", found=(1, {2: object}), path=OSError("broken"))
    ledger_protocol.send(socket_pair.ours, ledger_protocol.error_reply(error))
    with pytest.raises(Invalid) as raised:
        ledger_protocol.receive_reply(socket_pair.theirs)
    assert raised.value.fields == {
        "what": "thing",
        "found": [1, {"2": "<class 'object'>"}],
        "path": "broken",
    }


def chunks_of(frames: list[bytes], cut: int) -> Iterator[bytes]:
    """The frames as one stream, in chunks of `cut` bytes. Far from the start of a frame no chunk is tiny."""
    stream = b"".join(frames)
    starts = list(accumulate((len(frame) for frame in frames), initial=0))
    at = 0
    while at < len(stream):
        step = cut
        if cut < CHUNK_BYTES_MIN and not any(abs(at - start) <= NEAR_BYTES for start in starts):
            to_next_start = (start - NEAR_BYTES - at for start in starts if start > at)
            step = min([CHUNK_BYTES_MIN, *to_next_start])
        yield stream[at : at + step]
        at += step


@given(
    sizes=st.lists(
        st.sampled_from(
            [0, 1, 300, ledger_protocol.RECEIVE_BYTES, 3 * ledger_protocol.RECEIVE_BYTES]
        ),
        max_size=5,
    ),
    cut=st.integers(1, 1 << 17),
)
def test_request_reader_returns_whole_requests_for_any_chunking(sizes: list[int], cut: int) -> None:
    sent = [(ledger_protocol.AcquireTokens(n), bytes([n]) * size) for n, size in enumerate(sizes)]
    frames = [ledger_protocol.encode_frame(message, len(data)) + data for message, data in sent]
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def write() -> None:
            for chunk in chunks_of(frames, cut):
                ours.sendall(chunk)
            ours.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        requests = ledger_protocol.RequestReader(theirs)
        found = []
        for _ in sent:
            message, data = requests.wait_next()
            found.append((message, bytes(data)))
        assert found == sent
        with pytest.raises(ledger_protocol.ConnectionEnded):
            requests.wait_next()
        thread.join()
