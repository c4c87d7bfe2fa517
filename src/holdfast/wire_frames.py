"""Length-prefixed frames: a header of unsigned lengths, then the parts of these lengths.

A `FrameFormat` is the layout of the header and the limit of a part. Every protocol between processes uses one:
the store's writer, the ledger service, task processes and the children of a Spark task.

    FrameDecoder    push: bytes of any chunking in, complete frames out (the store's writer and its clients)
    FrameReader     pull from a socket with a buffer: a short frame takes one system call
    FrameSocket     pull from a socket without a buffer: one frame at a time, both directions
    read_frame      pull from a pipe

A length above the limit raises `Invalid` before any byte of the part is read. The stream is then unusable. A
truncated frame raises `ConnectionEnded`.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from typing import IO, Any

from holdfast.errors import Invalid

BytesLike = bytes | bytearray | memoryview

# Receive sizes: small by default, which is cheap to allocate, and large under load.
RECV_BYTES = 1 << 16
RECV_BYTES_MAX = 1 << 20


class ConnectionEnded(ConnectionError):
    """The peer closed the connection."""


class FrameFormat:
    """The header of a frame. `layout` is a `struct` format with one length for each part.

    `limit_field` is the name of the limit in the error.
    """

    __slots__ = ("_limit_field", "bytes_max", "header", "header_bytes", "unpack_from")

    def __init__(self, layout: str, bytes_max: int, limit_field: str = "max") -> None:
        lengths = struct.Struct(layout)
        # Bound methods of the struct: they run for every frame.
        self.header = lengths.pack
        self.unpack_from = lengths.unpack_from
        self.header_bytes = lengths.size
        self.bytes_max = bytes_max
        self._limit_field = limit_field

    def encode(self, *parts: bytes) -> bytes:
        return b"".join((self.header(*map(len, parts)), *parts))

    def lengths(
        self, data: BytesLike, offset: int = 0, bytes_max: int | None = None
    ) -> tuple[int, ...]:
        """Decode the header at `offset`. A length above the limit raises `Invalid`."""
        lengths = self.unpack_from(data, offset)
        if max(lengths) > (self.bytes_max if bytes_max is None else bytes_max):
            raise self.too_large(max(lengths), bytes_max)
        return lengths

    def too_large(self, size: int, bytes_max: int | None = None) -> Invalid:
        limit = self.bytes_max if bytes_max is None else bytes_max
        fields: dict[str, Any] = {"what": "frame", "bytes": size, self._limit_field: limit}
        return Invalid(**fields)


class FrameDecoder:
    """A decoder of a byte stream into the bodies of its frames. A frame has one part."""

    __slots__ = ("_buffer", "_format", "_unpack_from", "recv_bytes")

    def __init__(self, format: FrameFormat) -> None:
        self._format = format
        self._unpack_from = format.unpack_from
        self._buffer = bytearray()
        # The size of the next receive.
        self.recv_bytes = RECV_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        self.recv_bytes = RECV_BYTES_MAX if len(data) >= RECV_BYTES else RECV_BYTES
        buffer, head = self._buffer, self._format.header_bytes
        # The usual case: one whole frame.
        if not buffer and len(data) >= head and self._unpack_from(data)[0] == len(data) - head:
            return [data[head:]]
        buffer += data
        bodies = []
        offset = 0
        while len(buffer) - offset >= head:
            [size] = self._format.lengths(buffer, offset)
            end = offset + head + size
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[offset + head : end]))
            offset = end
        if offset:
            del buffer[:offset]
        return bodies


class FrameReader:
    """Reads the frames of one socket. The parts of a frame are views of one buffer."""

    __slots__ = ("_buffer", "_format", "_sock")

    def __init__(self, sock: socket.socket, format: FrameFormat) -> None:
        self._sock = sock
        self._format = format
        self._buffer = b""

    @property
    def has_bytes(self) -> bool:
        """Whether bytes of an undelivered frame are buffered."""
        return bool(self._buffer)

    @property
    def frame_bytes(self) -> int:
        """The size of the next frame; 0 if it is not known yet."""
        lengths = self._next_lengths()
        return self._format.header_bytes + sum(lengths) if lengths else 0

    def read_available(self) -> bool:
        """Read available bytes without blocking. Return False if the connection is closed."""
        try:
            got = self._sock.recv(RECV_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        self._buffer += got
        return bool(got)

    def take_ready(self) -> list[memoryview] | None:
        """Return the parts of the next frame, if it is complete."""
        lengths = self._next_lengths()
        total = self._format.header_bytes + sum(lengths) if lengths else 0
        if not total or len(self._buffer) < total:
            return None
        view, self._buffer = memoryview(self._buffer), self._buffer[total:]
        return self._split(view, lengths)

    def wait_next(self) -> list[memoryview]:
        """Return the parts of the next frame. Blocks."""
        while not (lengths := self._next_lengths()):
            got = self._sock.recv(RECV_BYTES)
            if not got:
                raise ConnectionEnded("the connection was closed")
            self._buffer += got
        if (ready := self.take_ready()) is not None:
            return ready
        read, self._buffer = self._buffer, b""
        view = memoryview(bytearray(self._format.header_bytes + sum(lengths)))
        view[: len(read)] = read
        receive_into(self._sock, view[len(read) :])
        return self._split(view, lengths)

    def _next_lengths(self) -> tuple[int, ...]:
        """Return the lengths of the next frame; empty if its header is incomplete."""
        if len(self._buffer) < self._format.header_bytes:
            return ()
        return self._format.lengths(self._buffer)

    def _split(self, view: memoryview, lengths: tuple[int, ...]) -> list[memoryview]:
        parts, at = [], self._format.header_bytes
        for size in lengths:
            parts.append(view[at : at + size])
            at += size
        return parts


class FrameSocket:
    """A socket that carries frames of one part in both directions. It has one reader at a time."""

    __slots__ = ("_format", "_poll", "_sock")

    def __init__(self, sock: socket.socket, format: FrameFormat) -> None:
        self._sock = sock
        self._format = format
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, body: bytes) -> None:
        self._sock.sendall(self._format.encode(body))

    def poll(self, timeout_s: float) -> bool:
        """Whether a frame, or the end of the connection, arrives within this time."""
        if self._sock.fileno() < 0:
            # Another file may have the number of the closed descriptor.
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return bool(self._poll.poll(timeout_s * 1000))

    def receive(self) -> bytes:
        [body] = receive_frame(self._sock, self._format)
        return bytes(body)

    def close(self) -> None:
        self._sock.close()


def receive_frame(
    sock: socket.socket, format: FrameFormat, bytes_max: int | None = None
) -> list[memoryview]:
    """Receive one frame. Return its parts."""
    head = receive_exactly(sock, format.header_bytes)
    return [receive_exactly(sock, size) for size in format.lengths(head, 0, bytes_max)]


def receive_exactly(sock: socket.socket, size: int) -> memoryview:
    view = memoryview(bytearray(size))
    receive_into(sock, view)
    return view


def receive_into(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionEnded("the connection was closed")
        at += got


def read_frame(source: IO[bytes], format: FrameFormat) -> list[bytes] | None:
    """Read one frame from a pipe. Return its parts; None at the end of the pipe."""
    head = source.read(format.header_bytes)
    if not head:
        return None
    if len(head) < format.header_bytes:
        raise ConnectionEnded("the pipe ends within a frame")
    parts = []
    for size in format.lengths(head):
        parts.append(source.read(size))
        if len(parts[-1]) < size:
            raise ConnectionEnded("the pipe ends within a frame")
    return parts
