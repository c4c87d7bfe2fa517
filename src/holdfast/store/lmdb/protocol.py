"""The protocol between clients and the writer: frames on a Unix socket.

A frame is a length (u32, big-endian) and that many bytes of msgpack.

    client → writer    ClientHello once, then ClientMessage: [[request, ...], [topic, ...], [topic, ...]]
    writer → client    WriterWelcome once, then WriterMessage: [[answer, ...], {topic: commit_no}]

Requests and answers are plain data. Received data is never executed or unpickled, and a request names
an operation instead of sending code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast import __version__, codec
from holdfast.config import FRAME_BYTES_MAX
from holdfast.errors import Invalid, SchemaMismatch, from_wire
from holdfast.store import schema
from holdfast.store.api import Operation, unwrap
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.store.txn import ClientTxn
from holdfast.wire_frames import FrameDecoder, FrameFormat

# Since 2 a request names its operations by stable names (`operation_names`).
PROTOCOL = 2


class ClientHello(msgspec.Struct, array_like=True):
    protocol: int
    pid: int
    version: str
    # The schema version of the client's code. Builds before schema 0.6 do not send it.
    schema: tuple[int, int] | None = None


class WriterWelcome(msgspec.Struct, array_like=True):
    store_id: str
    generation: int
    commit_no: int
    offset_ns: int
    boot_id: str
    pid: int
    inode: int
    error: list[Any] | None = None
    # The schema version of the writer's code. Builds before schema 0.6 do not send it.
    schema: tuple[int, int] | None = None


class ClientMessage(msgspec.Struct, array_like=True, gc=False):
    requests: list[CommitRequest] = []
    watch: list[str] = []
    unwatch: list[str] = []


class WriterMessage(msgspec.Struct, array_like=True, gc=False):
    answers: list[CommitAnswer] = []
    topics: dict[str, int] = {}


def client_hello() -> ClientHello:
    return ClientHello(PROTOCOL, os.getpid(), __version__, schema.SCHEMA_VERSION)


def schema_mismatch(
    writer: tuple[int, int] | None, client: tuple[int, int] | None
) -> SchemaMismatch:
    """The error of a client whose code has another schema version than the code of the writer. Operations run in the
    writer, so a client of another version would get decisions that its code does not know. None: before 0.6."""
    return SchemaMismatch(
        what="writer",
        found=list(writer or ()) or "before 0.6",
        expected=list(client or ()) or "before 0.6",
        why="processes of two versions use the store: stop those of the older one",
    )


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_client_message = msgspec.msgpack.Decoder(ClientMessage).decode
decode_writer_message = msgspec.msgpack.Decoder(WriterMessage).decode
decode_hello = msgspec.msgpack.Decoder(ClientHello).decode
decode_welcome = msgspec.msgpack.Decoder(WriterWelcome).decode


FRAME_FORMAT = FrameFormat(">I", FRAME_BYTES_MAX, limit_field="bytes_max")


def encode_frame(body: bytes) -> bytes:
    return FRAME_FORMAT.header(len(body)) + body


def new_frame_decoder() -> FrameDecoder:
    return FrameDecoder(FRAME_FORMAT)


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
