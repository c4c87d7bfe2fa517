"""The body of a world's journal entry: everything that an exact replay needs.

It holds the ingress, the wall time and entropy that the reducer saw, the version of the code, the
outcome, and content hashes of the emitted intents. The last entry of a cycle also holds the digest
of the state after it. A replay computes the same values and compares them.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import StoreCorrupt
from holdfast.messages import Ingress
from holdfast.world.state_shape import DIGEST_BYTES as SHAPE_BYTES


class StepOutcome(Enum):
    OK = "ok"
    # The reducer raised. The state is unchanged and the event is a dead letter.
    FAILED = "failed"
    # The code declares this event without a handler. The event is journaled nevertheless.
    IGNORED = "ignored"
    # No worker declared this type in time. The event is a dead letter with code `unknown_event`.
    UNKNOWN = "unknown"


class JournalStep(Record, frozen=True):
    """The body of a journal entry."""

    seq: int
    ingress: Ingress
    wall_ns: int
    entropy: bytes
    # The version of the code that ran and the store generation. A replay uses both.
    code: str
    generation: int
    outcome: StepOutcome
    emitted: list[bytes]
    error: str = ""
    reply: bytes | None = None
    # The height of the snapshot that the state in memory was last loaded from; 0 for the initial
    # state.
    base: int = 0
    # The digest of the state: set in the last entry of a cycle, empty in its other entries, None in
    # entries of releases without digests. This field and `shape` must stay last: see
    # `with_state_digest`.
    state: bytes | None = None
    # The digest of the state's shape (see `state_shape`); None in entries of releases without it.
    shape: bytes | None = None


pack = codec.pack
_NO_STATE = codec.pack(b"")
_SHAPE_BYTES = len(codec.pack(bytes(SHAPE_BYTES)))


def with_state_digest(body: bytes, digest: bytes) -> bytes:
    """Return the body of a step with its empty state digest replaced by `digest`."""
    end = len(body) - _SHAPE_BYTES
    assert body[:end].endswith(_NO_STATE)
    return body[: end - len(_NO_STATE)] + codec.pack(digest) + body[end:]


def decode(body: bytes) -> JournalStep:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreCorrupt(what="journal entry", why=str(error)) from None


_decode = codec.decoder(JournalStep).decode
