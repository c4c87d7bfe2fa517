"""The protocol between clients and the writer: frames on a Unix socket.

A frame is a length (u32, big-endian) and that many bytes of msgpack.

    client → writer    ClientHello once, then ClientMessage: [[request, ...], [topic, ...], [topic, ...]]
    writer → client    WriterWelcome once, then WriterMessage: [[answer, ...], {topic: commit_no}]

Requests and answers are plain data. Received data is never executed or unpickled, and a request names
an operation instead of sending code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast import codec
from holdfast.config import FRAME_BYTES_MAX
from holdfast.errors import Invalid, from_wire
from holdfast.store.api import Operation, unwrap
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.store.txn import ClientTxn

# Since 2 a request names its operations by stable names (`operation_names`).
PROTOCOL = 2


class ClientHello(msgspec.Struct, array_like=True):
    protocol: int
    pid: int
    version: str


class WriterWelcome(msgspec.Struct, array_like=True):
    store_id: str
    generation: int
    commit_no: int
    offset_ns: int
    boot_id: str
    pid: int
    inode: int
    error: list[Any] | None = None


class ClientMessage(msgspec.Struct, array_like=True, gc=False):
    requests: list[CommitRequest] = []
    watch: list[str] = []
    unwatch: list[str] = []


class WriterMessage(msgspec.Struct, array_like=True, gc=False):
    answers: list[CommitAnswer] = []
    topics: dict[str, int] = {}


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_client_message = msgspec.msgpack.Decoder(ClientMessage).decode
decode_writer_message = msgspec.msgpack.Decoder(WriterMessage).decode
decode_hello = msgspec.msgpack.Decoder(ClientHello).decode
decode_welcome = msgspec.msgpack.Decoder(WriterWelcome).decode


def encode_frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


# Receive sizes: small by default, which is cheap to allocate, and large under load.
_RECV_BYTES = 1 << 16
_RECV_BYTES_MAX = 1 << 20


class FrameDecoder:
    """A decoder of the byte stream into complete frames."""

    __slots__ = ("_buffer", "recv_bytes")

    def __init__(self) -> None:
        self._buffer = bytearray()
        # The size of the next receive.
        self.recv_bytes = _RECV_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        self.recv_bytes = _RECV_BYTES_MAX if len(data) >= _RECV_BYTES else _RECV_BYTES
        buffer = self._buffer
        if not buffer and len(data) >= 4 and int.from_bytes(data[:4], "big") == len(data) - 4:
            return [data[4:]]
        buffer += data
        bodies = []
        offset = 0
        while len(buffer) - offset >= 4:
            size = int.from_bytes(buffer[offset : offset + 4], "big")
            if size > FRAME_BYTES_MAX:
                raise Invalid(what="frame", bytes=size, bytes_max=FRAME_BYTES_MAX)
            if len(buffer) - offset - 4 < size:
                break
            bodies.append(bytes(buffer[offset + 4 : offset + 4 + size]))
            offset += 4 + size
        if offset:
            del buffer[:offset]
        return bodies


def build_request(txn: ClientTxn, no: int, client: bytes) -> CommitRequest:
    puts: dict[bytes, bytes] = txn.writes  # type: ignore[assignment]
    deletes: list[bytes] = []
    if None in puts.values():
        deletes = [key for key, value in puts.items() if value is None]
        puts = {key: value for key, value in puts.items() if value is not None}
    return CommitRequest(
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
        [(operation.name, _pack_args(operation, args)) for operation, args in txn.calls],
        list(txn.topics),
    )


def as_parked(request: CommitRequest, topics: Sequence[str]) -> CommitRequest:
    if request.reads or request.ranges or request.puts or request.deletes or not request.calls:
        raise Invalid(what="transaction", why="a parked request may only call operations")
    request.park_topics = list(topics)
    return request


class TransactionCall:
    """A function that ran on a snapshot: its commit request and its result."""

    __slots__ = ("_result", "_txn")

    def __init__(self, txn: ClientTxn, result: Any) -> None:
        self._txn = txn
        self._result = result

    @property
    def needs_commit(self) -> bool:
        return self._txn.needs_commit

    def build_request(self, no: int, client: bytes) -> CommitRequest:
        return build_request(self._txn, no, client)

    def result_of(self, answer: CommitAnswer | None) -> Any:
        if answer is not None:
            resolve_deferred(self._txn, answer)
        return unwrap(self._result)


class OperationCall:
    """A single operation: it reads nothing at the client, so it cannot conflict."""

    __slots__ = ("_args", "_operation", "_snapshot")
    needs_commit = True

    def __init__(
        self, operation: Operation[Any, Any], args: tuple[Any, ...], snapshot: int
    ) -> None:
        self._operation = operation
        self._args = args
        self._snapshot = snapshot

    def build_request(self, no: int, client: bytes) -> CommitRequest:
        call = (self._operation.name, _pack_args(self._operation, self._args))
        return CommitRequest(no, client, self._snapshot, calls=[call])

    def result_of(self, answer: CommitAnswer | None) -> Any:
        assert answer is not None
        if answer.error is not None:
            raise from_wire(answer.error)
        return self._operation.decode_result(bytes(answer.results[0]))


def _pack_args(operation: Operation[Any, Any], args: tuple[Any, ...]) -> msgspec.Raw:
    try:
        return msgspec.Raw(codec.pack(args))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(what="argument", operation=operation.name, why=str(error)) from None


def resolve_deferred(txn: ClientTxn, answer: CommitAnswer) -> None:
    """Resolve the deferred values of a transaction from its answer, or raise the answer's error."""
    if answer.error is not None:
        raise from_wire(answer.error)
    for deferred, seq in zip(txn.append_results, answer.seqs, strict=True):
        deferred.resolve(seq)
    for result, (operation, _), raw in zip(
        txn.call_results, txn.calls, answer.results, strict=True
    ):
        result.resolve(operation.decode_result(bytes(raw)))
