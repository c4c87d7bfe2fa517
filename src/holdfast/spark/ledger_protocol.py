"""The ledger protocol: messages between tasks and the ledger service, as frames over TCP.

A frame is two little-endian u32 (the lengths of header and attachment), a msgpack header and raw bytes.
Headers are typed structs, so a malformed message raises `Invalid`. Nothing is unpickled. Each connection has
one request under way, with one reply. That is the back-pressure: a client reads its reply before it sends
the next request.

The first frame of a connection is a `Hello` with the token of the run. The token reaches the tasks inside
the pickled function that Spark ships, not through Spark's configuration, which its web page displays.
"""

from __future__ import annotations

import socket
from typing import Any, Final

import msgspec

from holdfast.errors import HoldfastError, Invalid, from_wire, to_wire
from holdfast.ledger.events import RowRange
from holdfast.ledger.runs import SpoolBlock
from holdfast.ledger.service.messages import ClaimRows as ClaimRows
from holdfast.ledger.service.messages import Exchange as Exchange
from holdfast.ledger.service.messages import GrantReport as GrantReport
from holdfast.ledger.service.messages import GrantReportReply as GrantReportReply
from holdfast.ledger.service.messages import ResultlessRowReport as ResultlessRowReport
from holdfast.ledger.service.messages import WireMessage as WireMessage
from holdfast.wire_frames import (
    RECV_BYTES,
    FrameFormat,
    FrameReader,
    receive_frame,
)
from holdfast.wire_frames import BytesLike as BytesLike
from holdfast.wire_frames import ConnectionEnded as ConnectionEnded

FRAME_BYTES_MAX: Final = 1 << 30
RECEIVE_BYTES: Final = RECV_BYTES
FRAME_FORMAT: Final = FrameFormat("<II", FRAME_BYTES_MAX)


# --- requests -----------------------------------------------------------------------------------


class Hello(WireMessage, frozen=True, tag="Hello"):
    token: str
    owner: str


class ServiceHeartbeat(WireMessage, frozen=True, tag="Beat"):
    """Renew the leases of these grants."""

    epochs: list[int]


class RenewChild(WireMessage, frozen=True, tag="ChildAlive"):
    """Sent by the process that started a child: the child is alive but cannot send heartbeats at
    the moment.
    """

    owner: str


class AnnounceHandover(WireMessage, frozen=True, tag="HandOver"):
    """The process of this child exits. Its successor, with the same name, inherits its grants."""

    owner: str


class InheritGrant(WireMessage, frozen=True, tag="Inherit"):
    """Sent by a successor: request the predecessor's next grant that is not in `known_epochs`."""

    known_epochs: list[int]


class AcquireTokens(WireMessage, frozen=True, tag="Tokens"):
    """Request admission for `count` calls, under the stage's rate and token limits.
    `token_estimates` are those of the calls, in order.
    """

    count: int
    token_estimates: list[int] = msgspec.field(default_factory=list)


class PutBlock(WireMessage, frozen=True, tag="PutBlock"):
    """Store an input block from the attachment. `in_order`: its rows are in key order. With a spool
    there is no attachment: the block is durable at `spool_block`. `sorted`: the block belongs to
    the pass that Spark sorted, after `DropInput`.
    """

    in_order: bool = True
    spool_block: SpoolBlock | None = None
    sorted: bool = False


class DropInput(WireMessage, frozen=True, tag="DropInput"):
    """Remove all input blocks: the input is read again, sorted."""


class FetchOutcomes(WireMessage, frozen=True, tag="Outcomes"):
    """Request the results of [lo, hi), which must be final."""

    lo: int
    hi: int
    meta: bool


class SealInput(WireMessage, frozen=True, tag="Seal"):
    """Complete the input with these blocks in this order. `merge`: merge overlapping blocks first."""

    blocks: list[tuple[int, int]]
    merge: bool
    staged: list[tuple[int, int, int, bytes]]
    schema: bytes
    input_hash: str
    plan: str
    # Columns that identify equal rows, and the digest of their names and types.
    match: list[str] = msgspec.field(default_factory=list)
    match_digest: str = ""


class GetRunStatus(WireMessage, frozen=True, tag="Status"):
    pass


class CancelRun(WireMessage, frozen=True, tag="Cancel"):
    pass


class ResumeRun(WireMessage, frozen=True, tag="Resume"):
    """Resume granting after a stop rule was reached: its counters restart."""


class ReportBroken(WireMessage, frozen=True, tag="Broken"):
    """Report from a child that the run's data is unreadable, so the run cannot continue. An error
    in wire form.
    """

    error: list[Any]


class RequestPart(WireMessage, frozen=True, tag="TakePart"):
    """Request from an executor: assign rows for writing part files."""


class PartWritten(WireMessage, frozen=True, tag="PartWritten"):
    """The files of the rows from `lo` on are written and durable: packed `sinks.WrittenPart`s."""

    lo: int
    parts: bytes


class PartFailed(WireMessage, frozen=True, tag="PartFailed"):
    """The files of the rows from `lo` on could not be written: an error in wire form."""

    lo: int
    error: list[Any]


class ShutdownService(WireMessage, frozen=True, tag="Leave"):
    """Shut down gracefully: commit pending entries, release the lease."""


LedgerRequest = (
    Hello
    | Exchange
    | ServiceHeartbeat
    | RenewChild
    | AnnounceHandover
    | InheritGrant
    | AcquireTokens
    | PutBlock
    | DropInput
    | FetchOutcomes
    | SealInput
    | GetRunStatus
    | CancelRun
    | ResumeRun
    | ReportBroken
    | RequestPart
    | PartWritten
    | PartFailed
    | ShutdownService
)

# --- replies ------------------------------------------------------------------------------------


class HelloReply(WireMessage, frozen=True, tag="Welcome"):
    run_id: str
    size: int
    lease_ns: int


class BlockRef(WireMessage, frozen=True, tag="BlockRef"):
    """A spool block and the seq of its first row."""

    first_seq: int
    spool_block: SpoolBlock


class GrantedRowsMessage(WireMessage, frozen=True, tag="Granted"):
    """A grant. `last_report_no` is the number of the last accepted report. It is above 0 only for
    inherited grants.
    """

    epoch: int
    ranges: list[RowRange]
    begun: int
    isolated: bool
    # (lo, hi, run, from_lo): rows that first occurred in an earlier run. Their idempotency keys use
    # that position.
    origins: list[tuple[int, int, str, int]] = msgspec.field(default_factory=list)
    last_report_no: int = 0
    # With a spool: the blocks that hold the rows, in order, the run that owns them, and the
    # columns.
    blocks: list[BlockRef] = msgspec.field(default_factory=list)
    blocks_run: str = ""
    columns: list[str] = msgspec.field(default_factory=list)


class ExchangeReply(WireMessage, frozen=True, tag="Stepped"):
    """The reply to an `Exchange`. `state` is the result of the claim: granted, wait, over, stop. Input
    is in the attachment.
    """

    report_replies: list[GrantReportReply]
    state: str
    grant: GrantedRowsMessage | None
    wait_ms: int
    why: str
    # With state wait: unfinished rows, and children that hold some of them.
    open_rows: int = 0
    holders: int = 0


class HeartbeatReply(WireMessage, frozen=True, tag="Beaten"):
    lost: list[int]


class TokensGranted(WireMessage, frozen=True, tag="Allowed"):
    """`count` calls may start in `wait_ms`. 0: repeat the request then."""

    count: int
    wait_ms: int


# In place of a block number: stop the pass, Spark will sort the input.
STOP_INGEST = -1


class BlockStored(WireMessage, frozen=True, tag="Block"):
    """The number of the stored block, or `STOP_INGEST`."""

    number: int


class OutcomesReply(WireMessage, frozen=True, tag="Table"):
    """An Arrow stream in the attachment. `ready` is false while rows of the interval are
    unfinished.
    """

    ready: bool
    cancelled: bool = False
    failed: int = 0
    example: str = ""
    # Too large for a frame: request fewer rows.
    large: bool = False
    # The stop rule that was reached, as text.
    stopped: str = ""
    # With a spool the attachment is an outcome bundle instead: names of objects (`outcome_bundles`).
    bundled: bool = False


class PartAssignment(WireMessage, frozen=True, tag="PartWork"):
    """`state`: write the parts of [lo, hi); wait; or over, no row is left to write. The attachment
    is an outcome bundle (`outcome_bundles`). `sink` is a sink spec as JSON, `writer` holds the
    sink's settings for its writers.
    """

    state: str
    lo: int = 0
    hi: int = 0
    wait_ms: int = 0
    sink: bytes = b""
    writer: bytes = b""
    file_rows: int = 0
    file_bytes: int = 0

    def __repr__(self) -> str:
        """Omits `writer`: it may hold temporary credentials of a catalog."""
        return f"PartWork({self.state!r}, {self.lo}, {self.hi})"


class InputSealed(WireMessage, frozen=True, tag="Sealed"):
    size: int


class RunStatusReply(WireMessage, frozen=True, tag="Stand"):
    """Status of the run. `progress` is a packed `RunProgress`. `position` changes exactly when the
    ledger or the output progresses.
    """

    status: str
    halted: str
    over: bool
    error: list[Any] | None
    progress: bytes
    position: bytes
    # Input bytes so far.
    input_bytes: int = 0
    # The stop rule that was reached, as text.
    stopped: str = ""
    # A task would get an answer without waiting.
    claim_ready: bool = True
    # Executors write the output, and unwritten rows are left.
    writing: bool = False
    # The current pass over the input is void: Spark must sort it.
    needs_sort: bool = False


class Ok(WireMessage, frozen=True, tag="Ok"):
    pass


class ErrorReply(WireMessage, frozen=True, tag="Refused"):
    error: list[Any]


LedgerReply = (
    HelloReply
    | ExchangeReply
    | HeartbeatReply
    | TokensGranted
    | BlockStored
    | OutcomesReply
    | PartAssignment
    | InputSealed
    | RunStatusReply
    | Ok
    | ErrorReply
)

_encode = msgspec.msgpack.Encoder().encode
_decode_request: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(LedgerRequest)
_decode_reply: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(LedgerReply)


def encode_frame(message: WireMessage, size: int = 0) -> bytes:
    """Encode a message without its attachment of `size` bytes."""
    head = _encode(message)
    if size > FRAME_BYTES_MAX:
        raise FRAME_FORMAT.too_large(size)
    return FRAME_FORMAT.header(len(head), size) + head


def send(sock: socket.socket, message: WireMessage, *attachments: BytesLike) -> None:
    sock.sendall(encode_frame(message, sum(len(part) for part in attachments)))
    for part in attachments:
        if len(part):
            sock.sendall(part)


def receive_request(
    sock: socket.socket, bytes_max: int = FRAME_BYTES_MAX
) -> tuple[Any, memoryview]:
    return _receive_frame(sock, _decode_request, bytes_max)


def receive_reply(sock: socket.socket) -> tuple[Any, memoryview]:
    """Receive a reply. Raise the error of a refusal."""
    reply, attached = _receive_frame(sock, _decode_reply, FRAME_BYTES_MAX)
    if isinstance(reply, ErrorReply):
        raise from_wire(reply.error)
    return reply, attached


def error_reply(error: HoldfastError) -> ErrorReply:
    return ErrorReply(_to_msgpack(to_wire(error)))


def set_socket_options(sock: socket.socket) -> None:
    """Set socket options: no delay for small replies, and keepalive to detect a vanished machine
    within seconds.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


class RequestReader:
    """Reads the requests of one connection. A short request, the usual case, takes one system call."""

    def __init__(self, sock: socket.socket) -> None:
        self._frames = FrameReader(sock, FRAME_FORMAT)
        self.read_available = self._frames.read_available

    @property
    def has_bytes(self) -> bool:
        """Whether bytes of an undelivered request are buffered."""
        return self._frames.has_bytes

    @property
    def is_long(self) -> bool:
        """Whether a request has begun that is too long for the reader thread."""
        return self._frames.frame_bytes > RECEIVE_BYTES

    def take_ready(self) -> tuple[Any, memoryview] | None:
        """Return the next request, if it is complete."""
        parts = self._frames.take_ready()
        return None if parts is None else (_decode(_decode_request, parts[0]), parts[1])

    def wait_next(self) -> tuple[Any, memoryview]:
        """Return the next request. Blocks."""
        head, attached = self._frames.wait_next()
        return _decode(_decode_request, head), attached


def _receive_frame(
    sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], bytes_max: int
) -> tuple[Any, memoryview]:
    head, attached = receive_frame(sock, FRAME_FORMAT, bytes_max)
    return _decode(decoder, head), attached


def _decode(decoder: msgspec.msgpack.Decoder[Any], head: memoryview) -> Any:
    try:
        return decoder.decode(head)
    except msgspec.MsgspecError as error:
        raise Invalid(what="frame", why=str(error)) from None


def _to_msgpack(value: Any) -> Any:
    """Convert the fields of an error to msgpack types."""
    if isinstance(value, dict):
        return {str(key): _to_msgpack(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_msgpack(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return str(value)
