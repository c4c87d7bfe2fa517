"""Spool maintenance: compares spool objects with the ledger, and deletes garbage.

    check_objects(store, record)  every referenced object exists, or SpoolLost with its rows
    sweep_run(store, record)      deletes objects that the ledger does not reference
    SpoolDeletion                 deletes the objects of a deleted run, for `run_deletion`

A check lists the run's prefix and compares names, sizes and tags. It reads and hashes an object that is not
listed or has another tag: a directory on a network disk may list late, and a copy has new tags.

An unreferenced object may be about to be reported. It is therefore deleted only after a grace period, or at
once if the run has finished. A late writer may put an object after its run was deleted: the store remembers
the prefix as a leftover, and a later sweep empties it.

Memory: 8 bytes per object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from holdfast.clock import SYSTEM
from holdfast.config import SCAN_PAGE
from holdfast.errors import HoldfastError
from holdfast.ledger import runs
from holdfast.ledger.ranges import Range
from holdfast.ledger.run_deletion import SpoolKept
from holdfast.ledger.runs import RunRecord, SpoolObject
from holdfast.spark import spool as spools
from holdfast.spark.spool import Spool
from holdfast.store.api import Store

# Longer than any delay between the put of an object and its report.
SWEEP_GRACE_NS = 3600 * 1_000_000_000
# Maximum number of lost objects in an error.
LOST_OBJECTS_MAX = 10_000

MarkArray = NDArray[np.uint64]


def iter_referenced(store: Store, record: RunRecord) -> Iterator[tuple[str, Range, SpoolObject]]:
    """Yield (kind, rows, object) of every reference of the ledger to the run's own spool."""
    firsts: dict[int, int] = {}
    seq = 0
    for n, rows in record.blocks if not record.input_run else ():
        firsts[n] = seq
        seq += rows
    after = -1
    while page := store.read(runs.list_spool_blocks, record.run_id, after):
        for n, block in page:
            # Other blocks belong to an ingest that is under way.
            first = firsts.get(n, 0)
            yield "input", (first, first + block.rows if n in firsts else 0), block.at
        after = page[-1][0]
    for number in range(-(-record.size // record.policy.page_rows)):
        height = -1
        while chunks := store.read(runs.list_chunks, record.run_id, number, height, SCAN_PAGE):
            for _, chunk in chunks:
                if chunk.at is not None:
                    yield "outcomes", spools.chunk_range(chunk), chunk.at
            height = chunks[-1][0]


def check_objects(store: Store, record: RunRecord) -> None:
    """Refuse a run with missing or changed objects, before any call."""
    for one in _with_pinned_runs(store, record):
        spool = spools.open_spool(one)
        if spool is None:
            continue
        listed_marks = _sort_marks(
            [
                _object_mark(two.name, two.size, two.tag)
                for two in spool.storage.list_objects(one.run_id)
            ]
        )
        lost_objects: list[tuple[str, Range, str, str]] = []
        for what, rows, at in iter_referenced(store, one):
            if not _contains(listed_marks, _object_mark(spool.path(at.name), at.size, at.tag)):
                try:
                    spool.get(at)
                except spools.ObjectLost as why:
                    lost_objects.append((what, rows, at.name, str(why)))
            if len(lost_objects) >= LOST_OBJECTS_MAX:
                break
        if lost_objects:
            raise spools.lost_objects_error(spool, lost_objects)


def check_reuse_sources(store: Store, record: RunRecord) -> None:
    """Refuse kept runs with missing or changed objects, from which a new run would adopt rows."""
    for one in store.read(runs.list_runs_of, record.name):
        if one.run_id != record.run_id and not one.deleting and one.spool:
            check_objects(store, one)


def _with_pinned_runs(store: Store, record: RunRecord) -> list[RunRecord]:
    records = [record]
    for run_id in {
        *store.read(runs.list_pinned_runs, record.run_id, SCAN_PAGE),
        record.input_run,
    } - {""}:
        older = store.read(runs.get_record, run_id)
        if older is not None:
            records.append(older)
    return records


def sweep_run(store: Store, record: RunRecord, *, grace_ns: int = SWEEP_GRACE_NS) -> int:
    """Delete unreferenced objects of a run that are older than the grace period. Return their
    number.
    """
    spool = spools.open_spool(record)
    if spool is None:
        return 0
    # List before reading the references: an object referenced later was not listed or is among
    # them.
    old_ns = SYSTEM.wall_ns() - max(grace_ns, 2 * record.policy.lease_ns if grace_ns else 0)
    listed = [
        one.name
        for one in spool.storage.list_objects(record.run_id)
        if not grace_ns or one.modified_ns < old_ns
    ]
    if not listed:
        return 0
    kept = _sort_marks(
        _object_mark(spool.path(at.name)) for _, _, at in iter_referenced(store, record)
    )
    return spool.storage.delete(name for name in listed if not _contains(kept, _object_mark(name)))


def sweep_leftovers(store: Store, *, grace_ns: int = SWEEP_GRACE_NS) -> None:
    """Empty the prefixes of runs that were deleted longer ago than the grace period. Unreachable
    spools are skipped until the next sweep.
    """
    after = ""
    while page := store.read(runs.list_deleted_spools, after):
        for one in page:
            if store.now_ns() - one.deleted_ns >= grace_ns:
                try:
                    delete_run_objects(one.spool, one.run_id)
                except HoldfastError:
                    continue
                store.transact(runs.remove_deleted_spool, one.run_id)
        after = page[-1].run_id


def delete_run_objects(url: str, run_id: str) -> int:
    place = Spool.open(url, run_id).storage
    count = place.delete(one.name for one in place.list_objects(run_id))
    place.remove_empty_prefix(run_id)
    return count


def list_block_objects(store: Store, record: RunRecord, numbers: list[int]) -> list[str]:
    """Return the object names of these blocks."""
    if not record.spool:
        return []
    blocks = [store.read(runs.get_spool_block, record.run_id, n) for n in numbers]
    return [one.at.name for one in blocks if one is not None]


def delete_objects(record: RunRecord, names: list[str]) -> None:
    spool = spools.open_spool(record)
    if spool is not None and names:
        spool.storage.delete(spool.path(name) for name in names)


class SpoolDeletion:
    """The hook of `run_deletion` that deletes the objects of a run before its rows."""

    def reach(self, record: RunRecord) -> None:
        with _as_spool_kept(record):
            place = Spool.open(record.spool, record.run_id).storage
            next(place.list_objects(record.run_id), None)

    def delete(self, record: RunRecord) -> None:
        with _as_spool_kept(record):
            delete_run_objects(record.spool, record.run_id)

    def delete_input(self, record: RunRecord) -> None:
        with _as_spool_kept(record):
            place = Spool.open(record.spool, record.run_id).storage
            place.delete(one.name for one in place.list_objects(f"{record.run_id}/i"))

    def sweep(self, store: Store, records: Sequence[RunRecord]) -> None:
        """Sweep these runs and all leftovers. Unreachable spools are skipped until the next sweep."""
        for record in records:
            with contextlib.suppress(HoldfastError):
                sweep_run(store, record)
        sweep_leftovers(store)


@contextlib.contextmanager
def _as_spool_kept(record: RunRecord) -> Iterator[None]:
    try:
        yield
    except HoldfastError as error:
        why = error.fields.get("why") or error.fields.get("missing", "")
        raise SpoolKept(run=record.run_id, spool=record.spool, why=why) from None


def _object_mark(name: str, size: int = 0, tag: bytes = b"") -> int:
    data = f"{name}\0{size}\0".encode() + tag
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _sort_marks(marks: Iterable[int]) -> MarkArray:
    return np.sort(np.fromiter(marks, dtype=np.uint64))


def _contains(marks: MarkArray, mark: int) -> bool:
    at = int(np.searchsorted(marks, np.uint64(mark)))
    return at < len(marks) and int(marks[at]) == mark
