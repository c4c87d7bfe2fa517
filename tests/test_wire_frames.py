"""Frames are whole for any chunking of the stream. Oversize and truncated frames are refused."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Invalid
from holdfast.wire_frames import (
    RECV_BYTES,
    RECV_BYTES_MAX,
    ConnectionEnded,
    FrameDecoder,
    FrameFormat,
    FrameReader,
    FrameSocket,
    read_frame,
    receive_frame,
)

ONE_PART = FrameFormat(">I", 1 << 20, limit_field="bytes_max")
TWO_PARTS = FrameFormat("<II", 1 << 20)

bodies = st.lists(st.integers(0, 300).map(lambda size: bytes([size % 251]) * size), max_size=8)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        yield ours, theirs


def chunks_of(stream: bytes, cut: int) -> list[bytes]:
    return [stream[at : at + cut] for at in range(0, len(stream), cut)]


def test_frame_layouts_are_the_bytes_on_the_wire() -> None:
    assert ONE_PART.encode(b"abc") == b"\0\0\0\3abc"
    assert TWO_PARTS.encode(b"abc", b"de") == b"\3\0\0\0\2\0\0\0abcde"
    assert TWO_PARTS.header(3, 2) == b"\3\0\0\0\2\0\0\0"


@given(bodies=bodies, cut=st.integers(1, 700))
def test_frame_decoder_returns_whole_frames_for_any_chunking(bodies: list[bytes], cut: int) -> None:
    decoder = FrameDecoder(ONE_PART)
    stream = b"".join(map(ONE_PART.encode, bodies))
    found = [body for chunk in chunks_of(stream, cut) for body in decoder.feed(chunk)]
    assert found == bodies


@given(bodies=bodies, cut=st.integers(1, 700))
def test_frame_reader_returns_whole_frames_for_any_chunking(bodies: list[bytes], cut: int) -> None:
    stream = b"".join(TWO_PARTS.encode(body, body[::-1] + b"!") for body in bodies)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(theirs, TWO_PARTS)
        found = []
        for chunk in chunks_of(stream, cut):
            ours.sendall(chunk)
            assert reader.read_available()
            while (parts := reader.take_ready()) is not None:
                found.append((bytes(parts[0]), bytes(parts[1])))
        assert found == [(body, body[::-1] + b"!") for body in bodies]
        assert not reader.has_bytes
        assert reader.read_available()
        ours.close()
        assert not reader.read_available()


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 1 << 16])
def test_frame_reader_waits_for_a_frame_in_pieces(
    pair: tuple[socket.socket, socket.socket], cut: int
) -> None:
    ours, theirs = pair
    size = 100 if cut < 100 else 5 * RECV_BYTES
    stream = TWO_PARTS.encode(b"head", b"x" * size) + TWO_PARTS.encode(b"next", b"")

    def write() -> None:
        for chunk in chunks_of(stream, cut):
            ours.sendall(chunk)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    reader = FrameReader(theirs, TWO_PARTS)
    assert [bytes(part) for part in reader.wait_next()] == [b"head", b"x" * size]
    assert [bytes(part) for part in reader.wait_next()] == [b"next", b""]
    thread.join()


def test_frame_reader_shows_the_size_of_a_frame_that_is_incomplete(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    reader = FrameReader(theirs, TWO_PARTS)
    ours.sendall(TWO_PARTS.header(4, 1000)[:5])
    assert reader.read_available()
    assert (reader.frame_bytes, reader.take_ready()) == (0, None)
    ours.sendall(TWO_PARTS.header(4, 1000)[5:])
    assert reader.read_available()
    assert (reader.frame_bytes, reader.take_ready()) == (8 + 1004, None)


def test_frame_decoder_receives_more_at_once_under_load() -> None:
    decoder = FrameDecoder(ONE_PART)
    assert decoder.recv_bytes == RECV_BYTES
    decoder.feed(ONE_PART.encode(bytes(RECV_BYTES)))
    assert decoder.recv_bytes == RECV_BYTES_MAX
    decoder.feed(ONE_PART.encode(b""))
    assert decoder.recv_bytes == RECV_BYTES


def test_length_above_the_limit_is_refused_before_the_part_is_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    size = ONE_PART.bytes_max + 1
    with pytest.raises(Invalid) as refused:
        FrameDecoder(ONE_PART).feed(ONE_PART.header(size))
    assert refused.value.fields == {"what": "frame", "bytes": size, "bytes_max": size - 1}
    with pytest.raises(Invalid):
        read_frame(io.BytesIO(ONE_PART.header(size)), ONE_PART)
    ours.sendall(TWO_PARTS.header(1, size) * 3)
    with pytest.raises(Invalid) as refused:
        receive_frame(theirs, TWO_PARTS)
    assert refused.value.fields == {"what": "frame", "bytes": size, "max": size - 1}
    reader = FrameReader(theirs, TWO_PARTS)
    with pytest.raises(Invalid):
        reader.wait_next()
    with pytest.raises(Invalid):
        reader.take_ready()


def test_receive_frame_takes_a_smaller_limit(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(TWO_PARTS.encode(b"x" * 11, b""))
    with pytest.raises(Invalid) as refused:
        receive_frame(theirs, TWO_PARTS, 10)
    assert refused.value.fields["max"] == 10
    assert [bytes(part) for part in (receive_ok(ours, theirs))] == [b"x" * 10, b""]


def receive_ok(ours: socket.socket, theirs: socket.socket) -> list[memoryview]:
    theirs.recv(11)
    ours.sendall(TWO_PARTS.encode(b"x" * 10, b""))
    return receive_frame(theirs, TWO_PARTS, 10)


@pytest.mark.parametrize("kept", [1, 3, 4, 6])
def test_truncated_frame_is_refused(kept: int) -> None:
    truncated = ONE_PART.encode(b"abc")[:kept]
    with pytest.raises(ConnectionEnded):
        read_frame(io.BytesIO(truncated), ONE_PART)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(truncated)
        ours.close()
        with pytest.raises(ConnectionEnded):
            receive_frame(theirs, ONE_PART)


def test_read_frame_returns_none_at_the_end_of_the_pipe() -> None:
    pipe = io.BytesIO(TWO_PARTS.encode(b"a", b"bc") + TWO_PARTS.encode(b"", b""))
    assert read_frame(pipe, TWO_PARTS) == [b"a", b"bc"]
    assert read_frame(pipe, TWO_PARTS) == [b"", b""]
    assert read_frame(pipe, TWO_PARTS) is None


def test_frame_socket_polls_and_carries_frames_in_both_directions(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = FrameSocket(pair[0], ONE_PART), FrameSocket(pair[1], ONE_PART)
    assert not far.poll(0)
    near.send(b"there")
    assert far.poll(10)
    assert far.receive() == b"there"
    assert not far.poll(0)
    far.send(b"")
    assert near.receive() == b""
    near.close()
    assert far.poll(10)
    with pytest.raises(ConnectionEnded):
        far.receive()
    for use in (lambda: near.poll(0), near.receive, lambda: near.send(b"")):
        with pytest.raises(OSError, match="Bad file descriptor"):
            use()
