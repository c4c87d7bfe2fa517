"""Copy or move of a complete store: rows, counters, journals, leases, time, generation.

    start     refuses a target that holds a store; resumes an interrupted copy
    copy      writes the rows in key order, one page per commit
    verify    reads source and target again and compares the digests of each key space
    finish    writes the last commit number and its time to the target
    switch    marks the source as moved first, then makes the target openable

From the first row to the last step the target has a marker that no process opens. The copy does not
change the source until the target is verified. From then on at most one of the two stores can be opened,
whichever process dies. A crash between the two steps of the switch leaves neither openable; running the
copy again completes it.

A moved store keeps its generation, leases and keys, because its history continues. With `keep_source`
the source stays in use and the copy becomes a separate store with a new generation and a new identity,
like a restored backup.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from holdfast.clock import MS, SYSTEM
from holdfast.errors import CopyUnfinished, Invalid, NotFound, StoreCorrupt, StoreMoved
from holdfast.store import schema
from holdfast.store.admin import marker
from holdfast.store.admin.marker import CopyInProgress, CopySource, MovedTo
from holdfast.store.admin.raw_access import LastCommit, RawStore
from holdfast.store.api import Row
from holdfast.store.engine import check_schema


class TargetNotEmpty(Invalid):
    code = "target_taken"
    hint = "choose a target without a store; the copy overwrites nothing"


class SameStore(Invalid):
    code = "same_store"
    hint = "FROM and TO name the same store"


class CopyDiffers(StoreCorrupt):
    code = "copy_differs"
    hint = "the source is unchanged; remove the copy, check disk and memory, then copy again"


class CopyPhase(Enum):
    COPYING = "copying"
    CHECKING_SOURCE = "checking the source"
    CHECKING_COPY = "checking the copy"


# Called after each page with the phase, its completed rows and bytes, and the estimated total of rows.
CopyProgressCallback = Callable[[CopyPhase, int, int, int | None], None]


@dataclass(slots=True)
class SpaceDigest:
    """The digest of one key space: rows, bytes, and the hash of its keys and values in order."""

    rows: int = 0
    size: int = 0
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, key: bytes, value: bytes) -> None:
        self.rows += 1
        self.size += len(key) + len(value)
        self._hash.update(b"%d %d " % (len(key), len(value)))
        self._hash.update(key)
        self._hash.update(value)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The result of a copy."""

    spaces: dict[str, SpaceDigest]
    generation: int
    last_commit: LastCommit
    # Whether an earlier run had already copied rows.
    resumed: bool
    # Whether only the last step remained: an earlier run had copied and verified all rows.
    finished: bool = False

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.spaces.values())

    @property
    def size(self) -> int:
        return sum(one.size for one in self.spaces.values())


def copy_store(
    source: RawStore, target: RawStore, *, keep_source: bool, progress: CopyProgressCallback
) -> CopyResult:
    """Copy the source to the target and switch over. The caller holds the exclusive locks of both."""
    target_state = marker.decode_marker(target.marker())
    source_state = marker.decode_marker(source.marker())
    if isinstance(source_state, MovedTo):
        return _open_verified_copy(source, target, source_state, target_state)
    if isinstance(source_state, CopyInProgress):
        raise CopyUnfinished(url=source.url, source=source_state.source)
    origin = _read_source(source)
    copying, resumed = _start_or_resume(source, target, origin, target_state, keep_source)
    _copy_rows(source, target, progress)
    spaces = _verify(source, target, progress)
    meta = _target_meta(source, keep_source)
    copying = CopyInProgress(copying.copy_id, copying.source, origin, keep_source, verified=True)
    last = LastCommit(origin.commit_no, origin.at_ns)
    target.finish(marker.encode_marker(copying), meta, last)
    if not keep_source:
        source.mark_moved(marker.encode_marker(MovedTo(copying.copy_id, target.url)))
    target.write_marker(schema.encode_marker())
    return CopyResult(spaces, meta.generation, last, resumed)


# -- begin ---------------------------------------------------------------------------------------


def _read_source(source: RawStore) -> CopySource:
    # The copy of an older version gets the marker of this version: only this code has written it.
    check_schema(source.marker(), schema.SCHEMA_VERSION, bootstrap=False, allow_upgrade=True)
    meta = source.meta()
    if meta is None:
        raise NotFound(what="store", url=source.url)
    return CopySource(meta.store_id, meta.generation, *source.last_commit())


def _start_or_resume(
    source: RawStore,
    target: RawStore,
    origin: CopySource,
    target_state: marker.MarkerState | None,
    keep_source: bool,
) -> tuple[CopyInProgress, bool]:
    """Return the marker of the copy and whether it resumes after the rows of an earlier run."""
    if isinstance(target_state, MovedTo):
        raise TargetNotEmpty(
            url=target.url, why=f"the target holds a store that was moved to {target_state.url}"
        )
    if target_state is None:
        _require_no_store(target, origin)
    elif target_state.origin.store_id != origin.store_id:
        raise TargetNotEmpty(
            url=target.url, why=f"the target holds an unfinished copy of {target_state.source}"
        )
    elif (target_state.origin, target_state.keep_source) == (origin, keep_source):
        return target_state, bool(target.last_key())
    # The target is empty, or holds rows of a source that has committed since.
    copying = CopyInProgress(SYSTEM.entropy(16).hex(), source.url, origin, keep_source)
    target.clear(marker.encode_marker(copying))
    return copying, False


def _require_no_store(target: RawStore, origin: CopySource) -> None:
    meta = target.meta()
    if meta is not None and (meta.store_id, meta.generation) == (
        origin.store_id,
        origin.generation,
    ):
        raise SameStore(url=target.url)
    if target.marker() is not None or target.last_key():
        raise TargetNotEmpty(url=target.url, why="the target already holds a store")


def _open_verified_copy(
    source: RawStore, target: RawStore, moved: MovedTo, target_state: marker.MarkerState | None
) -> CopyResult:
    """Complete a run that died before its last step: the source is marked as moved, the target not yet openable."""
    is_own_copy = (
        isinstance(target_state, CopyInProgress)
        and target_state.copy_id == moved.copy_id
        and target_state.verified
    )
    if not is_own_copy:
        raise StoreMoved(url=source.url, to=moved.url)
    meta = target.meta()
    assert meta is not None
    target.write_marker(schema.encode_marker())
    return CopyResult({}, meta.generation, target.last_commit(), resumed=True, finished=True)


# -- fill and verify -----------------------------------------------------------------------------


def _copy_rows(source: RawStore, target: RawStore, progress: CopyProgressCallback) -> None:
    for page in _pages_with_progress(source, CopyPhase.COPYING, progress, after=target.last_key()):
        target.put(page)


def _verify(
    source: RawStore, target: RawStore, progress: CopyProgressCallback
) -> dict[str, SpaceDigest]:
    source_digests = digest_spaces(
        _pages_with_progress(source, CopyPhase.CHECKING_SOURCE, progress)
    )
    target_digests = digest_spaces(_pages_with_progress(target, CopyPhase.CHECKING_COPY, progress))
    for name in sorted(source_digests.keys() | target_digests.keys()):
        source_digest, target_digest = (
            source_digests.get(name, SpaceDigest()),
            target_digests.get(name, SpaceDigest()),
        )
        if source_digest.sha256 != target_digest.sha256:
            raise CopyDiffers(
                url=target.url,
                space=name,
                rows=[source_digest.rows, target_digest.rows],
                sha256=[source_digest.sha256[:16], target_digest.sha256[:16]],
            )
    return target_digests


def _pages_with_progress(
    place: RawStore, phase: CopyPhase, progress: CopyProgressCallback, after: bytes = b""
) -> Iterator[list[Row]]:
    rows = size = 0
    row_estimate = None if after else place.estimate_rows()
    for page in place.pages(after):
        yield page
        rows += len(page)
        size += sum(len(key) + len(value) for key, value in page)
        progress(phase, rows, size, row_estimate)


def digest_spaces(pages: Iterator[list[Row]]) -> dict[str, SpaceDigest]:
    """Compute the digest of each key space, by its name."""
    digests: dict[str, SpaceDigest] = {}
    for page in pages:
        for key, value in page:
            name = _SPACE_NAMES.get(key[:1] if key[:1] == b"\x14" else key[:2], "other")
            digests.setdefault(name, SpaceDigest()).add(key, value)
    return digests


# -- switch --------------------------------------------------------------------------------------


def _target_meta(source: RawStore, keep_source: bool) -> schema.StoreMeta:
    meta = source.meta()
    assert meta is not None
    # The clock anchor is valid only for the clock of the source.
    floor_ns = source.last_commit().at_ns
    if not keep_source:
        return schema.StoreMeta(meta.store_id, meta.generation, "", 0, floor_ns)
    generation = max(meta.generation + 1, SYSTEM.wall_ns() // MS)
    return schema.StoreMeta(SYSTEM.entropy(16).hex(), generation, "", 0, floor_ns)


_SPACE_NAMES = {schema.key_prefix(space): space.name.lower() for space in schema.Space}
