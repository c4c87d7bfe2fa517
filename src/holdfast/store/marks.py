"""What a store's marker says besides its version: that it is being filled, or that it has moved away.

    RSV0 …    a store that may be opened (document 001, `schema.marker`)
    HFC0 …    a copy that is not finished: `Copying`
    HFM0 …    a store that was moved to another place: `Moved`

The marker is what everybody looks at before anything else, also a version that knows nothing of copies:
to that one it is a foreign schema, and it keeps away as well. So neither half of a store nor one that
lives elsewhere by now is opened by mistake.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import CopyUnfinished, StoreMoved

_COPYING = b"HFC0"
_MOVED = b"HFM0"


class Origin(Record, frozen=True):
    """What was copied: this store, as it was after this commit. Once it has gone on, it is another."""

    store_id: str
    generation: int
    commit_no: int
    at_ns: int


class Copying(Record, frozen=True):
    """The marker of a copy until all of it is there and proved to be equal."""

    copy_id: str
    source: str
    origin: Origin
    # Whether the source stays in use: then this becomes a store of its own.
    keep: bool
    verified: bool = False


class Moved(Record, frozen=True):
    """The marker of a store whose rows are elsewhere now."""

    copy_id: str
    to: str


Standing = Copying | Moved


def write(standing: Standing) -> bytes:
    return (_MOVED if isinstance(standing, Moved) else _COPYING) + codec.pack(standing)


def read(marker: bytes | None) -> Standing | None:
    """What a marker says besides a version; None if it says nothing else."""
    if marker is None:
        return None
    magic, rest = marker[:4], marker[4:]
    if magic == _COPYING:
        return codec.unpack_as(Copying, rest)
    return codec.unpack_as(Moved, rest) if magic == _MOVED else None


def refuse(marker: bytes) -> None:
    """Raise what keeps a store with this marker from being opened, if that is no matter of versions."""
    found = read(marker)
    if isinstance(found, Moved):
        raise StoreMoved(to=found.to)
    if isinstance(found, Copying):
        raise CopyUnfinished(source=found.source)
