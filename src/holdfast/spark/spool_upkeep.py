"""Objects of a spool against what the ledger names: checked before a run goes on, swept, deleted.

    check(store, record)      every object that the run rests on is there, or SpoolLost with its rows
    sweep(store, record)      deletes objects that the ledger does not name
    Deletion                  deletes the objects of a run that goes, for `prune.delete`

A check lists the run's prefix and compares names, sizes and tags. An object that is not in the list, or has another
tag, is read and hashed: a directory on a network disk may list late, and a copy has new tags.

An object that is not named may be on its way into a report. So it is swept when it is older than the grace; of a run
that is over, at once. A late writer may put an object after its run is deleted: the store remembers the prefix as a
leftover, and a later sweep empties it.

Memory: 8 bytes for each object.
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
from holdfast.ledger.prune import SpoolKept
from holdfast.ledger.ranges import Range
from holdfast.ledger.runs import RunRecord, Stored
from holdfast.spark import spool as spools
from holdfast.spark.spool import Spool
from holdfast.store.api import Store

# Longer than anything takes between the put of an object and its report.
GRACE_NS = 3600 * 1_000_000_000
# Errors name so many objects at most.
LOST_MAX = 10_000

Marks = NDArray[np.uint64]


def named(store: Store, record: RunRecord) -> Iterator[tuple[str, Range, Stored]]:
    """(what it holds, its rows, the object) of everything that the ledger names of a run's own spool."""
    firsts: dict[int, int] = {}
    seq = 0
    for n, rows in record.blocks if not record.input_run else ():
        firsts[n] = seq
        seq += rows
    after = -1
    while page := store.read(runs.stored_blocks, record.run_id, after):
        for n, block in page:
            # Blocks that are not of the input belong to an ingest that is under way.
            first = firsts.get(n, 0)
            yield "input", (first, first + block.rows if n in firsts else 0), block.at
        after = page[-1][0]
    for number in range(-(-record.size // record.policy.page_rows)):
        height = -1
        while chunks := store.read(runs.chunks, record.run_id, number, height, SCAN_PAGE):
            for _, chunk in chunks:
                if chunk.at is not None:
                    yield "outcomes", spools.extent(chunk), chunk.at
            height = chunks[-1][0]


def check(store: Store, record: RunRecord) -> None:
    """Refuse to go on with a run whose objects are not all there and the same. Nothing is called before."""
    for one in _rested_on(store, record):
        spool = spools.spool_of(one)
        if spool is None:
            continue
        there = _sorted(
            [_mark(two.name, two.size, two.tag) for two in spool.place.listing(one.run_id)]
        )
        found: list[tuple[str, Range, str, str]] = []
        for what, rows, at in named(store, one):
            if not _in(there, _mark(spool.path(at.name), at.size, at.tag)):
                try:
                    spool.get(at)
                except spools.ObjectLost as why:
                    found.append((what, rows, at.name, str(why)))
            if len(found) >= LOST_MAX:
                break
        if found:
            raise spools.all_lost(spool, found)


def check_donors(store: Store, record: RunRecord) -> None:
    """The same for the kept runs that a new one takes rows from."""
    for one in store.read(runs.of_name, record.name):
        if one.run_id != record.run_id and not one.deleting and one.spool:
            check(store, one)


def _rested_on(store: Store, record: RunRecord) -> list[RunRecord]:
    found = [record]
    for run_id in {*store.read(runs.rests_on, record.run_id, SCAN_PAGE), record.input_run} - {""}:
        older = store.read(runs.get, run_id)
        if older is not None:
            found.append(older)
    return found


def sweep(store: Store, record: RunRecord, *, grace_ns: int = GRACE_NS) -> int:
    """Delete objects of a run that the ledger does not name and that are older than the grace; how many."""
    spool = spools.spool_of(record)
    if spool is None:
        return 0
    # Listed first: what is named after that was not there yet, or is in the second look.
    old_ns = SYSTEM.wall_ns() - max(grace_ns, 2 * record.policy.lease_ns if grace_ns else 0)
    seen = [
        one.name
        for one in spool.place.listing(record.run_id)
        if not grace_ns or one.modified_ns < old_ns
    ]
    if not seen:
        return 0
    kept = _sorted(_mark(spool.path(at.name)) for _, _, at in named(store, record))
    return spool.place.delete(name for name in seen if not _in(kept, _mark(name)))


def sweep_leftovers(store: Store, *, grace_ns: int = GRACE_NS) -> None:
    """Empty the prefixes of runs that were deleted longer ago than the grace. Spools that cannot be reached are
    left for another time."""
    after = ""
    while page := store.read(runs.leftovers, after):
        for one in page:
            if store.now_ns() - one.deleted_ns >= grace_ns:
                try:
                    delete_all(one.spool, one.run_id)
                except HoldfastError:
                    continue
                store.transact(runs.drop_leftover, one.run_id)
        after = page[-1].run_id


def delete_all(url: str, run_id: str) -> int:
    place = Spool.at(url, run_id).place
    count = place.delete(one.name for one in place.listing(run_id))
    place.drop(run_id)
    return count


def block_objects(store: Store, record: RunRecord, numbers: list[int]) -> list[str]:
    """The objects of these blocks."""
    if not record.spool:
        return []
    found = [store.read(runs.stored_block, record.run_id, n) for n in numbers]
    return [one.at.name for one in found if one is not None]


def delete_objects(record: RunRecord, names: list[str]) -> None:
    spool = spools.spool_of(record)
    if spool is not None and names:
        spool.place.delete(spool.path(name) for name in names)


class Deletion:
    """For `prune.delete`: the objects of a run go before its rows do."""

    def reach(self, record: RunRecord) -> None:
        with _kept(record):
            place = Spool.at(record.spool, record.run_id).place
            next(place.listing(record.run_id), None)

    def delete(self, record: RunRecord) -> None:
        with _kept(record):
            delete_all(record.spool, record.run_id)

    def delete_input(self, record: RunRecord) -> None:
        with _kept(record):
            place = Spool.at(record.spool, record.run_id).place
            place.delete(one.name for one in place.listing(f"{record.run_id}/i"))

    def sweep(self, store: Store, records: Sequence[RunRecord]) -> None:
        """Spools that cannot be reached are left for another time."""
        for record in records:
            with contextlib.suppress(HoldfastError):
                sweep(store, record)
        sweep_leftovers(store)


@contextlib.contextmanager
def _kept(record: RunRecord) -> Iterator[None]:
    try:
        yield
    except HoldfastError as error:
        why = error.fields.get("why") or error.fields.get("missing", "")
        raise SpoolKept(run=record.run_id, spool=record.spool, why=why) from None


def _mark(name: str, size: int = 0, tag: bytes = b"") -> int:
    data = f"{name}\0{size}\0".encode() + tag
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _sorted(marks: Iterable[int]) -> Marks:
    return np.sort(np.fromiter(marks, dtype=np.uint64))


def _in(marks: Marks, mark: int) -> bool:
    at = int(np.searchsorted(marks, np.uint64(mark)))
    return at < len(marks) and int(marks[at]) == mark
