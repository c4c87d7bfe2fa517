"""What one step of a world leaves in its journal: enough to repeat it exactly.

The ingress, the wall time and entropy that the reducer saw, the code that ran, how it ended, and
what it emitted, as hashes over content. The last entry of a cycle has the digest of the state after
it. A replay computes the same and compares.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import StoreCorrupt
from holdfast.messages import Ingress
from holdfast.world.shape import BYTES as SHAPE_BYTES


class Outcome(Enum):
    OK = "ok"
    # The reducer raised: the state is as before, the event sits in the dead letters.
    FAILED = "failed"
    # The code knows this event and has no handler for it: it is journaled all the same.
    IGNORED = "ignored"
    # No code knew it in time: it sits in the dead letters as `unknown_event`.
    UNKNOWN = "unknown"


class Step(Record, frozen=True):
    """The body of a journal entry."""

    seq: int
    ingress: Ingress
    wall_ns: int
    entropy: bytes
    # Which code ran, and under which store generation: both are part of what is repeated.
    code: str
    generation: int
    outcome: Outcome
    emitted: list[bytes]
    error: str = ""
    reply: bytes | None = None
    # The snapshot that the state in memory was last read from; 0 for the initial state.
    base: int = 0
    # The digest of the state, in the last entry of a cycle; empty in the entries before it. None in
    # entries that were written before there were digests. With `shape` it is the end: see `with_state`.
    state: bytes | None = None
    # The shape of the state (see `shape`); None in entries that were written before there was one.
    shape: bytes | None = None


pack = codec.pack
_NO_STATE = codec.pack(b"")
_SHAPE_BYTES = len(codec.pack(bytes(SHAPE_BYTES)))


def with_state(body: bytes, digest: bytes) -> bytes:
    """The body of a step that has no digest yet, with one. Nothing else differs."""
    end = len(body) - _SHAPE_BYTES
    assert body[:end].endswith(_NO_STATE)
    return body[: end - len(_NO_STATE)] + codec.pack(digest) + body[end:]


def decode(body: bytes) -> Step:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreCorrupt(what="journal entry", why=str(error)) from None


_decode = codec.decoder(Step).decode
