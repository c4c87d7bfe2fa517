"""Moving a store from one place to another, whole: rows, counters, journals, leases, time, generation.

    begin     nothing is overwritten; a copy that was cut short goes on where it ended
    fill      rows in key order, a page at a time
    verify    both places are read again; what they hold hashes alike, space by space
    settle    the copy knows its last commit, and what time it was
    hand over the source is closed down first, then the copy is opened

From the first row to the last step the copy bears a marker that nobody opens. The source is not touched
until the copy is proved; from then on at most one of the two can be opened, whatever dies: between
closing the one and opening the other it is neither, and running the copy again ends that.

A moved store goes on as it was: same generation, same leases, same keys, for its history is one. With
`keep` the source stays in use, and the copy is another history from now on: it gets a generation and an
identity of its own, as a restored backup does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from holdfast.clock import MS, SYSTEM
from holdfast.errors import CopyUnfinished, Invalid, NotFound, StoreCorrupt, StoreMoved
from holdfast.store import marks, schema
from holdfast.store.api import Row
from holdfast.store.engine import guard_schema
from holdfast.store.marks import Copying, Moved, Origin
from holdfast.store.places import Last, Place


class TargetTaken(Invalid):
    code = "target_taken"
    hint = "copy into a place without a store: nothing there is overwritten"


class SameStore(Invalid):
    code = "same_store"
    hint = "FROM and TO name one and the same store"


class CopyDiffers(StoreCorrupt):
    code = "copy_differs"
    hint = "the source is as it was; remove the copy, look after disk and memory, then copy again"


class Phase(Enum):
    COPYING = "copying"
    CHECKING_SOURCE = "checking the source"
    CHECKING_COPY = "checking the copy"


# Told after each page: the rows and bytes of a phase that are done, and about how many rows there are.
Progress = Callable[[Phase, int, int, int | None], None]


@dataclass(slots=True)
class Sum:
    """What one key space holds: how much, and the hash of its keys and values in order."""

    rows: int = 0
    size: int = 0
    state: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, key: bytes, value: bytes) -> None:
        self.rows += 1
        self.size += len(key) + len(value)
        self.state.update(b"%d %d " % (len(key), len(value)))
        self.state.update(key)
        self.state.update(value)

    @property
    def sha256(self) -> str:
        return self.state.hexdigest()


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of it."""

    spaces: dict[str, Sum]
    generation: int
    last: Last
    # Rows that an earlier run had copied already.
    resumed: bool
    # Only the last step was left to do: all had been copied and proved before.
    finished: bool = False

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.spaces.values())

    @property
    def size(self) -> int:
        return sum(one.size for one in self.spaces.values())


def copy(source: Place, target: Place, *, keep: bool, progress: Progress) -> Copied:
    """Copy the rows of one place to the other, and hand over. Both are held by the caller alone."""
    known = marks.read(target.marker())
    gone = marks.read(source.marker())
    if isinstance(gone, Moved):
        return _open_copy(source, target, gone, known)
    if isinstance(gone, Copying):
        raise CopyUnfinished(url=source.url, source=gone.source)
    origin = _origin(source)
    copying, resumed = _begin(source, target, origin, known, keep)
    _fill(source, target, progress)
    spaces = _verified(source, target, progress)
    meta = _settled_meta(source, keep)
    copying = Copying(copying.copy_id, copying.source, origin, keep, verified=True)
    last = Last(origin.commit_no, origin.at_ns)
    target.settle(marks.write(copying), meta, last)
    if not keep:
        source.close_down(marks.write(Moved(copying.copy_id, target.url)))
    target.mark(schema.marker())
    return Copied(spaces, meta.generation, last, resumed)


# -- begin ---------------------------------------------------------------------------------------


def _origin(source: Place) -> Origin:
    expected = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)
    guard_schema(source.marker(), expected, bootstrap=False)
    meta = source.meta()
    if meta is None:
        raise NotFound(what="store", url=source.url)
    return Origin(meta.store_id, meta.generation, *source.last())


def _begin(
    source: Place, target: Place, origin: Origin, known: marks.Standing | None, keep: bool
) -> tuple[Copying, bool]:
    """The marker of the copy, and whether there are rows of an earlier run to go on from."""
    if isinstance(known, Moved):
        raise TargetTaken(url=target.url, why=f"a store that was moved to {known.to}")
    if known is None:
        _refuse_store(target, origin)
    elif known.origin.store_id != origin.store_id:
        raise TargetTaken(url=target.url, why=f"an unfinished copy of {known.source}")
    elif (known.origin, known.keep) == (origin, keep):
        return known, bool(target.last_key())
    # Nothing is there, or rows of a source that has gone on since.
    copying = Copying(SYSTEM.entropy(16).hex(), source.url, origin, keep)
    target.empty(marks.write(copying))
    return copying, False


def _refuse_store(target: Place, origin: Origin) -> None:
    meta = target.meta()
    if meta is not None and (meta.store_id, meta.generation) == (
        origin.store_id,
        origin.generation,
    ):
        raise SameStore(url=target.url)
    if target.marker() is not None or target.last_key():
        raise TargetTaken(url=target.url, why="there is a store already")


def _open_copy(source: Place, target: Place, gone: Moved, known: marks.Standing | None) -> Copied:
    """The last step of a run that died before it: the source is closed down, its copy not opened."""
    mine = isinstance(known, Copying) and known.copy_id == gone.copy_id and known.verified
    if not mine:
        raise StoreMoved(url=source.url, to=gone.to)
    meta = target.meta()
    assert meta is not None
    target.mark(schema.marker())
    return Copied({}, meta.generation, target.last(), resumed=True, finished=True)


# -- fill and verify -----------------------------------------------------------------------------


def _fill(source: Place, target: Place, progress: Progress) -> None:
    for page in _watched(source, Phase.COPYING, progress, after=target.last_key()):
        target.put(page)


def _verified(source: Place, target: Place, progress: Progress) -> dict[str, Sum]:
    wanted = sums(_watched(source, Phase.CHECKING_SOURCE, progress))
    found = sums(_watched(target, Phase.CHECKING_COPY, progress))
    for name in sorted(wanted.keys() | found.keys()):
        here, there = wanted.get(name, Sum()), found.get(name, Sum())
        if here.sha256 != there.sha256:
            raise CopyDiffers(
                url=target.url,
                space=name,
                rows=[here.rows, there.rows],
                sha256=[here.sha256[:16], there.sha256[:16]],
            )
    return found


def _watched(
    place: Place, phase: Phase, progress: Progress, after: bytes = b""
) -> Iterator[list[Row]]:
    rows = size = 0
    about = None if after else place.about()
    for page in place.pages(after):
        yield page
        rows += len(page)
        size += sum(len(key) + len(value) for key, value in page)
        progress(phase, rows, size, about)


def sums(pages: Iterator[list[Row]]) -> dict[str, Sum]:
    """What each key space holds, by its name."""
    found: dict[str, Sum] = {}
    for page in pages:
        for key, value in page:
            name = _SPACES.get(key[:1] if key[:1] == b"\x14" else key[:2], "other")
            found.setdefault(name, Sum()).add(key, value)
    return found


# -- hand over -----------------------------------------------------------------------------------


def _settled_meta(source: Place, keep: bool) -> schema.Meta:
    meta = source.meta()
    assert meta is not None
    # The anchor belongs to the clock of the place that is left.
    floor_ns = source.last().at_ns
    if not keep:
        return schema.Meta(meta.store_id, meta.generation, "", 0, floor_ns)
    generation = max(meta.generation + 1, SYSTEM.wall_ns() // MS)
    return schema.Meta(SYSTEM.entropy(16).hex(), generation, "", 0, floor_ns)


_SPACES = {schema.prefix(space): space.name.lower() for space in schema.Space}
