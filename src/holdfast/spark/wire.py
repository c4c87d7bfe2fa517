"""What tasks and the ledger service say to each other: frames over TCP.

A frame is two little-endian u32 (the length of the header, of the attachment), a msgpack header
and raw bytes. Headers are typed structs, so a message that does not fit is `Invalid`, never half
understood; nothing is ever unpickled. One request has one answer, in order, per connection, and
that is the back-pressure: who has not read its answer sends nothing more.

The first frame of a connection is a `Hello` with the token of the run. The token reaches the tasks
inside the pickled function that Spark ships, not through Spark's configuration, which its web page
shows to everybody.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

import msgspec

from holdfast.errors import HoldfastError, Invalid, from_wire, to_wire
from holdfast.ledger.records import Part
from holdfast.ledger.runs import StoredBlock
from holdfast.ledger.service.messages import (
    Claim as Claim,
)
from holdfast.ledger.service.messages import (
    Message as Message,
)
from holdfast.ledger.service.messages import (
    Move as Move,
)
from holdfast.ledger.service.messages import (
    Moved as Moved,
)
from holdfast.ledger.service.messages import (
    Other as Other,
)
from holdfast.ledger.service.messages import (
    Step as Step,
)

FRAME_BYTES_MAX: Final = 1 << 30
READ_BYTES: Final = 1 << 16
_LENGTHS: Final = struct.Struct("<II")


# --- what is asked ------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    token: str
    owner: str


class Beat(Message, frozen=True):
    epochs: list[int]


class ChildAlive(Message, frozen=True):
    """From the process that started a child: the child lives, and cannot say so itself just now."""

    owner: str


class HandOver(Message, frozen=True):
    """The process of this child ends now; its successor, of the same name, takes what it holds."""

    owner: str


class Inherit(Message, frozen=True):
    """From a successor: the next grant of its predecessor, besides those that it has."""

    held: list[int]


class Tokens(Message, frozen=True):
    """Leave to start so many calls, under the stage's rate and its tokens a minute; `prices` are the
    estimates of these calls, in their order."""

    count: int
    prices: list[int] = msgspec.field(default_factory=list)


class PutBlock(Message, frozen=True):
    """The attachment is a block of the input. `in_order`: its rows came in the order of the key. With a
    spool there is no attachment: the block is durable, and `at` says where. `sorted`: of the pass over the
    input that Spark sorts, after `DropInput`."""

    in_order: bool = True
    at: StoredBlock | None = None
    sorted: bool = False


class DropInput(Message, frozen=True):
    """Remove all blocks that were put: the input is read again, sorted."""


class Outcomes(Message, frozen=True):
    """The results of [lo, hi), which is final."""

    lo: int
    hi: int
    meta: bool


class Seal(Message, frozen=True):
    """The input is whole: these blocks, in this order; merge them first when they overlap."""

    blocks: list[tuple[int, int]]
    merge: bool
    staged: list[tuple[int, int, int, bytes]]
    schema: bytes
    input_hash: str
    plan: str
    # The columns that make a row the same, and the digest of their names and types.
    match: list[str] = msgspec.field(default_factory=list)
    match_digest: str = ""


class Status(Message, frozen=True):
    pass


class Cancel(Message, frozen=True):
    pass


class Resume(Message, frozen=True):
    """Hand out again, if a stop rule was reached: its counts begin anew."""


class Broken(Message, frozen=True):
    """What a child found wrong with the run's data: the run cannot go on. An error as it travels."""

    error: list[Any]


class TakePart(Message, frozen=True):
    """From an executor: give it rows whose part files it is to write."""


class PartWritten(Message, frozen=True):
    """The files of the rows from `lo` on are written and durable: packed `sinks.WrittenPart`s."""

    lo: int
    parts: bytes


class PartFailed(Message, frozen=True):
    """They could not be written: an error as it travels."""

    lo: int
    error: list[Any]


class Leave(Message, frozen=True):
    """Stop serving, in good order: what is pending is committed, the lease is given back."""


Request = (
    Hello
    | Step
    | Beat
    | ChildAlive
    | HandOver
    | Inherit
    | Tokens
    | PutBlock
    | DropInput
    | Outcomes
    | Seal
    | Status
    | Cancel
    | Resume
    | Broken
    | TakePart
    | PartWritten
    | PartFailed
    | Leave
)

# --- what is answered ---------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    run_id: str
    size: int
    lease_ns: int


class BlockRef(Message, frozen=True):
    """A block of the spool, and the seq of its first row."""

    first: int
    at: StoredBlock


class Granted(Message, frozen=True):
    """`n` is the number of the last report that was taken: above 0 of inherited grants alone."""

    epoch: int
    parts: list[Part]
    begun: int
    alone: bool
    # (lo, hi, run, from_lo): rows that an earlier run had first, which their keys are made of.
    origins: list[tuple[int, int, str, int]] = msgspec.field(default_factory=list)
    n: int = 0
    # With a spool: the blocks that hold the rows, in order, the run that they are of, and the columns.
    blocks: list[BlockRef] = msgspec.field(default_factory=list)
    blocks_run: str = ""
    columns: list[str] = msgspec.field(default_factory=list)


class Stepped(Message, frozen=True):
    """`state` says what became of the claim: granted, wait, over, stop. Input in the attachment."""

    moved: list[Moved]
    state: str
    grant: Granted | None
    wait_ms: int
    why: str
    # Of a wait: rows that have not ended, and children that hold some of them.
    open_rows: int = 0
    holders: int = 0


class Beaten(Message, frozen=True):
    lost: list[int]


class Allowed(Message, frozen=True):
    """`count` calls may start in `wait_ms`. None: ask again then."""

    count: int
    wait_ms: int


# The number of no block: the input is going to be sorted, stop.
STOP = -1


class Block(Message, frozen=True):
    """The number of the block that was put, or `STOP`."""

    n: int


class Table(Message, frozen=True):
    """An Arrow stream in the attachment, or `ready` is false: rows of it are still at work."""

    ready: bool
    cancelled: bool = False
    failed: int = 0
    example: str = ""
    # Too much for a frame: ask for fewer rows.
    large: bool = False
    # The stop rule that was reached, in words.
    stopped: str = ""
    # With a spool the attachment is a bundle instead: names of the objects to read (`outcome_rows`).
    bundled: bool = False


class PartWork(Message, frozen=True):
    """`state`: write the parts of [lo, hi); wait; or over, nothing is left to write. The attachment is a bundle
    (`outcome_rows`). `sink` is a spec as JSON, `writer` what the sink tells its writers."""

    state: str
    lo: int = 0
    hi: int = 0
    wait_ms: int = 0
    sink: bytes = b""
    writer: bytes = b""
    file_rows: int = 0
    file_bytes: int = 0

    def __repr__(self) -> str:
        """Without `writer`: it may hold credentials that a catalog lends."""
        return f"PartWork({self.state!r}, {self.lo}, {self.hi})"


class Sealed(Message, frozen=True):
    size: int


class Stand(Message, frozen=True):
    """How the run stands. `progress` is a packed ledger.runs.Progress; `position` changes as the
    ledger moves, and with nothing else."""

    status: str
    halted: str
    over: bool
    error: list[Any] | None
    progress: bytes
    position: bytes
    # Of the input, so far.
    taken_bytes: int = 0
    # The stop rule that was reached, in words.
    stopped: str = ""
    # A task that asked now would not have to wait.
    ready: bool = True
    # Executors write the output, and rows are left that they have not written.
    writing: bool = False
    # The pass over the input that is under way comes to nothing: Spark is to sort it.
    needs_sort: bool = False


class Ok(Message, frozen=True):
    pass


class Refused(Message, frozen=True):
    error: list[Any]


Answer = (
    Welcome | Stepped | Beaten | Allowed | Block | Table | PartWork | Sealed | Stand | Ok | Refused
)

_encode = msgspec.msgpack.Encoder().encode
_decode_request: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_decode_answer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)

Bytes = bytes | bytearray | memoryview


def frame(message: Message, size: int = 0) -> bytes:
    """A message as it is sent, but for the attachment of so many bytes."""
    head = _encode(message)
    if size > FRAME_BYTES_MAX:
        raise Invalid(what="frame", bytes=size, max=FRAME_BYTES_MAX)
    return _LENGTHS.pack(len(head), size) + head


def send(line: socket.socket, message: Message, *attached: Bytes) -> None:
    line.sendall(frame(message, sum(len(part) for part in attached)))
    for part in attached:
        if len(part):
            line.sendall(part)


def receive_request(
    line: socket.socket, bytes_max: int = FRAME_BYTES_MAX
) -> tuple[Any, memoryview]:
    return _receive(line, _decode_request, bytes_max)


def receive_answer(line: socket.socket) -> tuple[Any, memoryview]:
    """The answer; what was refused is raised here."""
    answer, attached = _receive(line, _decode_answer, FRAME_BYTES_MAX)
    if isinstance(answer, Refused):
        raise from_wire(answer.error)
    return answer, attached


def refused(error: HoldfastError) -> Refused:
    return Refused(_plain(to_wire(error)))


def tune(line: socket.socket) -> None:
    """Answers are small and wanted at once; a peer whose machine is gone is found out in seconds."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


class Requests:
    """Reads the requests of one connection. A short one, which is most of them, takes one call of the system."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._read = b""

    @property
    def begun(self) -> bool:
        """Whether there are bytes of a request that was not taken."""
        return bool(self._read)

    @property
    def long(self) -> bool:
        """Whether a request has begun that is too long to wait for it here."""
        return self._sizes()[1] > READ_BYTES

    def read(self) -> bool:
        """Take in what has come, without waiting. False: the connection is closed."""
        try:
            got = self._line.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        self._read += got
        return bool(got)

    def ready(self) -> tuple[Any, memoryview] | None:
        """The next request, if all of it has come."""
        head_end, total = self._sizes()
        if not total or len(self._read) < total:
            return None
        view, self._read = memoryview(self._read), self._read[total:]
        return _decoded(_decode_request, view[_LENGTHS.size : head_end]), view[head_end:total]

    def next(self) -> tuple[Any, memoryview]:
        """The next request; waits for it."""
        while len(self._read) < _LENGTHS.size:
            got = self._line.recv(READ_BYTES)
            if not got:
                raise Closed("the connection was closed")
            self._read += got
        head_end, total = self._sizes()
        if len(self._read) >= total:
            found = self.ready()
            assert found is not None
            return found
        read, self._read = self._read, b""
        view = memoryview(bytearray(total))
        view[: len(read)] = read
        _fill(self._line, view[len(read) :])
        return _decoded(_decode_request, view[_LENGTHS.size : head_end]), view[head_end:]

    def _sizes(self) -> tuple[int, int]:
        """Where the head of the next request ends, and the request. Zeros: not known yet."""
        if len(self._read) < _LENGTHS.size:
            return 0, 0
        head_size, size = _LENGTHS.unpack_from(self._read)
        if head_size > FRAME_BYTES_MAX or size > FRAME_BYTES_MAX:
            raise Invalid(what="frame", bytes=max(head_size, size), max=FRAME_BYTES_MAX)
        return _LENGTHS.size + head_size, _LENGTHS.size + head_size + size


class Closed(ConnectionError):
    """The other side hung up between frames."""


def _receive(
    line: socket.socket, decoder: msgspec.msgpack.Decoder[Any], bytes_max: int
) -> tuple[Any, memoryview]:
    head_size, size = _LENGTHS.unpack(_exactly(line, _LENGTHS.size))
    if head_size > bytes_max or size > bytes_max:
        raise Invalid(what="frame", bytes=max(head_size, size), max=bytes_max)
    return _decoded(decoder, _exactly(line, head_size)), _exactly(line, size)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], head: memoryview) -> Any:
    try:
        return decoder.decode(head)
    except msgspec.MsgspecError as error:
        raise Invalid(what="frame", why=str(error)) from None


def _exactly(line: socket.socket, size: int) -> memoryview:
    buffer = bytearray(size)
    view = memoryview(buffer)
    _fill(line, view)
    return view


def _fill(line: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = line.recv_into(view[at:])
        if not got:
            raise Closed("the connection was closed")
        at += got


def _plain(value: Any) -> Any:
    """Fields of an error as msgpack can carry them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return str(value)
