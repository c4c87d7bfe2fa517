"""The schema marker with its copy and move states.

    RSV0 …    an openable store (document 001, `schema.encode_marker`)
    HFC0 …    an unfinished copy: `CopyInProgress`
    HFM0 …    a store that was moved: `MovedTo`

Every open reads the marker first. A release without copy support sees a foreign schema and refuses the
store as well. An incomplete copy or a moved store is therefore never opened by mistake.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import CopyUnfinished, StoreMoved

_COPYING = b"HFC0"
_MOVED = b"HFM0"


class CopySource(Record, frozen=True):
    """The source of a copy: a store at one commit. After further commits it is a different source."""

    store_id: str
    generation: int
    commit_no: int
    at_ns: int


class CopyInProgress(Record, frozen=True):
    """The marker of a copy until it is complete and verified."""

    copy_id: str
    source: str
    origin: CopySource
    # Whether the source stays in use. The copy then becomes a separate store.
    keep_source: bool
    verified: bool = False


class MovedTo(Record, frozen=True):
    """The marker of a store that was moved to another URL."""

    copy_id: str
    url: str


MarkerState = CopyInProgress | MovedTo


def encode_marker(state: MarkerState) -> bytes:
    return (_MOVED if isinstance(state, MovedTo) else _COPYING) + codec.pack(state)


def decode_marker(marker: bytes | None) -> MarkerState | None:
    """Decode the copy or move state of a marker; None for a plain version marker."""
    if marker is None:
        return None
    magic, rest = marker[:4], marker[4:]
    if magic == _COPYING:
        return codec.unpack_as(CopyInProgress, rest)
    return codec.unpack_as(MovedTo, rest) if magic == _MOVED else None


def refuse_unopenable(marker: bytes) -> None:
    """Raise StoreMoved or CopyUnfinished if the marker has a move or copy state."""
    state = decode_marker(marker)
    if isinstance(state, MovedTo):
        raise StoreMoved(to=state.url)
    if isinstance(state, CopyInProgress):
        raise CopyUnfinished(source=state.source)
