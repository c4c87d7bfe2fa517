"""How a client and the writer talk: frames on a Unix socket.

A frame is a length (u32, big-endian) and that many bytes of msgpack.

    client → writer    Hello once, then ToWriter: [[request, ...], [topic, ...]]
    writer → client    Welcome once, then ToClient: [[answer, ...], {topic: commit_no}]

Requests and answers are plain data; nothing received is ever executed or unpickled, and an
operation is named, not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast import codec
from holdfast.config import FRAME_BYTES_MAX
from holdfast.errors import Invalid, from_wire
from holdfast.store.api import Operation, settled
from holdfast.store.engine import Answer, Request
from holdfast.store.txn import ClientTxn

PROTOCOL = 1


class Hello(msgspec.Struct, array_like=True):
    protocol: int
    pid: int
    version: str


class Welcome(msgspec.Struct, array_like=True):
    store_id: str
    generation: int
    commit_no: int
    offset_ns: int
    boot_id: str
    pid: int
    inode: int
    error: list[Any] | None = None


class ToWriter(msgspec.Struct, array_like=True, gc=False):
    requests: list[Request] = []
    watch: list[str] = []
    unwatch: list[str] = []


class ToClient(msgspec.Struct, array_like=True, gc=False):
    answers: list[Answer] = []
    topics: dict[str, int] = {}


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_writer = msgspec.msgpack.Decoder(ToWriter).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


# How much is read at once: a little, which costs the allocator nothing, or as much as there is.
_LITTLE_BYTES = 1 << 16
_MUCH_BYTES = 1 << 20


class Frames:
    """Bytes in, whole frames out."""

    __slots__ = ("_buffer", "size")

    def __init__(self) -> None:
        self._buffer = bytearray()
        # How much to ask for next.
        self.size = _LITTLE_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        self.size = _MUCH_BYTES if len(data) >= _LITTLE_BYTES else _LITTLE_BYTES
        buffer = self._buffer
        if not buffer and len(data) >= 4 and int.from_bytes(data[:4], "big") == len(data) - 4:
            return [data[4:]]
        buffer += data
        found = []
        at = 0
        while len(buffer) - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "big")
            if size > FRAME_BYTES_MAX:
                raise Invalid(what="frame", bytes=size, bytes_max=FRAME_BYTES_MAX)
            if len(buffer) - at - 4 < size:
                break
            found.append(bytes(buffer[at + 4 : at + 4 + size]))
            at += 4 + size
        if at:
            del buffer[:at]
        return found


def request_of(txn: ClientTxn, no: int, client: bytes) -> Request:
    puts: dict[bytes, bytes] = txn.writes  # type: ignore[assignment]
    deletes: list[bytes] = []
    if None in puts.values():
        deletes = [key for key, value in puts.items() if value is None]
        puts = {key: value for key, value in puts.items() if value is not None}
    return Request(
        no,
        client,
        txn.snapshot,
        False,
        list(txn.reads),
        txn.ranges,
        txn.guards,
        puts,
        deletes,
        txn.appends,
        txn.adds,
        [(operation.name, _packed_args(operation, args)) for operation, args in txn.calls],
        list(txn.topics),
    )


def standing(request: Request, topics: Sequence[str]) -> Request:
    if request.reads or request.ranges or request.puts or request.deletes or not request.calls:
        raise Invalid(what="transaction", why="one that stands calls operations, and nothing else")
    request.when = list(topics)
    return request


class Ran:
    """A function that ran on a snapshot: what it wants done, and what its caller gets."""

    __slots__ = ("_result", "_txn")

    def __init__(self, txn: ClientTxn, result: Any) -> None:
        self._txn = txn
        self._result = result

    @property
    def writing(self) -> bool:
        return self._txn.writing

    def request(self, no: int, client: bytes) -> Request:
        return request_of(self._txn, no, client)

    def answered(self, answer: Answer | None) -> Any:
        if answer is not None:
            fill(self._txn, answer)
        return settled(self._result)


class Called:
    """An operation by itself: nothing is read for it here, so nothing can conflict."""

    __slots__ = ("_args", "_operation", "_snapshot")
    writing = True

    def __init__(
        self, operation: Operation[Any, Any], args: tuple[Any, ...], snapshot: int
    ) -> None:
        self._operation = operation
        self._args = args
        self._snapshot = snapshot

    def request(self, no: int, client: bytes) -> Request:
        called = (self._operation.name, _packed_args(self._operation, self._args))
        return Request(no, client, self._snapshot, calls=[called])

    def answered(self, answer: Answer | None) -> Any:
        assert answer is not None
        if answer.error is not None:
            raise from_wire(answer.error)
        return self._operation.decode_result(bytes(answer.results[0]))


def _packed_args(operation: Operation[Any, Any], args: tuple[Any, ...]) -> msgspec.Raw:
    try:
        return msgspec.Raw(codec.pack(args))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(what="argument", operation=operation.name, why=str(error)) from None


def fill(txn: ClientTxn, answer: Answer) -> None:
    """Give the transaction's pending values their answers, or raise what it ended with."""
    if answer.error is not None:
        raise from_wire(answer.error)
    for slot, seq in zip(txn.slots, answer.seqs, strict=True):
        slot.fill(seq)
    for result, (operation, _), raw in zip(txn.results, txn.calls, answer.results, strict=True):
        result.fill(operation.decode_result(bytes(raw)))
