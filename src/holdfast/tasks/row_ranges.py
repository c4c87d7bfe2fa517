"""Row ranges: consecutive tasks that differ only in their arguments share one index row and one
lease row.

A row of a queue index holds one task, or the first and last seq of a range of new tasks. A grant
takes tasks from the front of the range. The leased part of a range is one row as well:

    w <queue> <kind> <-priority> <first>     one task, or the first and last seq of a range
    l <lease>                                `RangeLease`: the tasks still leased under it
    i <first>                                the lease number, for lookups by task

Any other event splits a task off its range and gives it its own status row. A task is therefore in
a range of its queue index, or in a range lease, or has a status row, or has a single index row and
no status.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from operator import itemgetter

from holdfast import codec
from holdfast.codec import Record
from holdfast.store.api import Txn
from holdfast.tasks import status_fold
from holdfast.tasks.model import (
    NEW_STATUS,
    TaskKeys,
    TaskStatusRow,
    decode_int_at,
    decode_status,
    int_end,
    pack,
    pack_int,
    unpack_seq,
)
from holdfast.tasks.states import TaskState

# Greater than every seq.
SEQ_END = 1 << 62

# -- in a queue index ------------------------------------------------------------------------------


def encode_range(first: int, last: int) -> bytes:
    return pack_int(first) if first == last else pack_int(first) + pack_int(last)


def decode_range(row: bytes) -> tuple[int, int]:
    """Decode the first and last seq of an index row."""
    end = int_end(row, 0)
    first = int.from_bytes(row[1:end], "big")
    return first, (first if len(row) == end else decode_int_at(row, end))


def find_range(txn: Txn, index_prefix: bytes, packed_seq: bytes) -> tuple[bytes, int, int] | None:
    """Find the index row that contains a task: its key, first and last seq."""
    key = index_prefix + packed_seq
    row = txn.get(key)
    if row is None:
        preceding = txn.scan(index_prefix, key, 1, True)
        if not preceding:
            return None
        key, row = preceding[0]
    first, last = decode_range(row)
    return (key, first, last) if unpack_seq(packed_seq) <= last else None


def remove_from_range(txn: Txn, index_prefix: bytes, packed_seq: bytes) -> bool:
    """Remove a task from its queue index. Returns whether it was there."""
    found = find_range(txn, index_prefix, packed_seq)
    if found is None:
        return False
    key, first, last = found
    seq = unpack_seq(packed_seq)
    txn.delete(key)
    if first < seq:
        txn.put(key, encode_range(first, seq - 1))
    if seq < last:
        txn.put(index_prefix + pack_int(seq + 1), encode_range(seq + 1, last))
    return True


def iter_range(index_prefix: bytes, row: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the tasks of an index row, each with the key of a single row."""
    first, last = decode_range(row)
    for seq in range(first, last + 1):
        yield index_prefix + pack_int(seq), seq


def index_prefix_of(key: bytes, row: bytes) -> bytes:
    """Return the index prefix of a row: its key without the seq."""
    return key[: -int_end(row, 0)]


# -- leased ----------------------------------------------------------------------------------------


class RangeLease(Record, frozen=True):
    """A range lease: the tasks still leased under it, as sorted (first, last, spec hash) ranges."""

    worker: str
    expires_ns: int
    granted_ns: int
    ranges: list[tuple[int, int, bytes]]
    # The first seq of each range at the time of the grant.
    firsts: list[int]
    # Whether tasks were split off and are still leased under their own status rows.
    has_split_off: bool = False


class ExpiryBatch(Record, frozen=True):
    """An expiry row: leases granted together, checked at their original expiry time."""

    lease: int
    worker: str
    # None: the `RangeLease` holds the tasks. Releases without range support fail to decode None, so
    # they cannot mistake it for an empty batch.
    tasks: list[int] | None
    # Tasks split off a range that are leased until this time.
    split_off: tuple[int, ...] = ()

    @property
    def listed_tasks(self) -> list[int]:
        return [*(self.tasks or ()), *self.split_off]


def next_lease_no(last_lease_no: int, *, for_ranges: bool) -> int:
    """Return the next lease number. Range leases have even numbers and single leases odd ones, so a
    report can distinguish them without a read.
    """
    number = last_lease_no + 1
    return number + (number % 2 == 1) if for_ranges else number + (number % 2 == 0)


def is_range_lease(lease: int) -> bool:
    return lease % 2 == 0 and 0 < lease < 1 << 63


class OpenRangeLease:
    """A range lease that an operation modifies."""

    __slots__ = ("changed", "has_split_off", "lease", "ranges", "status", "stored")

    def __init__(self, lease: int, held: RangeLease) -> None:
        self.lease = lease
        self.stored = held
        self.ranges = list(held.ranges)
        self.has_split_off = held.has_split_off
        self.changed = False
        # All tasks of the lease share this status: granted once, no event since.
        self.status = status_fold.apply_grant(
            NEW_STATUS, lease, held.worker, held.expires_ns, held.granted_ns
        )

    def index_of(self, seq: int) -> int:
        """Return the index of the range that contains a task, or -1."""
        ranges = self.ranges
        if not ranges:
            return -1
        at = 0 if ranges[0][0] == seq else bisect_right(ranges, seq, key=_range_start) - 1
        return at if at >= 0 and seq <= ranges[at][1] else -1

    def remove(self, seq: int) -> bytes | None:
        """Remove a task. Returns its spec hash, or None if the lease does not contain it."""
        at = self.index_of(seq)
        if at < 0:
            return None
        ranges = self.ranges
        first, last, spec = ranges[at]
        if first == last:
            del ranges[at]
        elif seq == first:
            ranges[at] = (seq + 1, last, spec)
        elif seq == last:
            ranges[at] = (first, seq - 1, spec)
        else:
            ranges[at : at + 1] = [(first, seq - 1, spec), (seq + 1, last, spec)]
        self.changed = True
        return spec

    def tasks(self) -> list[int]:
        return [seq for first, last, _ in self.ranges for seq in range(first, last + 1)]


_range_start = itemgetter(0)


class RangeLeaseTable:
    """The range leases that an operation reads and changes. Written once, at the end."""

    def __init__(self, txn: Txn, keys: TaskKeys) -> None:
        self._txn = txn
        self._keys = keys
        self._loaded: dict[int, OpenRangeLease | None] = {}
        # Sorted first seqs of the loaded ranges. Ranges do not overlap.
        self._range_starts: list[int] = []
        self._by_range_start: dict[int, OpenRangeLease] = {}
        # The range lease that supplied the status of each task.
        self._split_candidates: dict[bytes, OpenRangeLease] = {}
        # Expiry rows to add for split-off tasks, by (time, lease).
        self._expiries_to_add: dict[tuple[int, int], tuple[str, list[int]]] = {}

    def get(self, lease: int) -> OpenRangeLease | None:
        if lease in self._loaded:
            return self._loaded[lease]
        open_lease = open_range_lease(self._txn, self._keys, lease)
        self._loaded[lease] = open_lease
        if open_lease is not None:
            for first in open_lease.stored.firsts:
                insort(self._range_starts, first)
                self._by_range_start[first] = open_lease
        return open_lease

    def put(self, lease: int, range_lease: RangeLease) -> None:
        txn, keys = self._txn, self._keys
        number = pack_int(lease)
        txn.put(keys.range_leases + number, pack(range_lease))
        for first in range_lease.firsts:
            txn.put(keys.range_lease_starts + pack_int(first), number)

    def status(self, packed_seq: bytes) -> TaskStatusRow:
        """Read the status of a task. NEW_STATUS if no event has changed it."""
        seq = unpack_seq(packed_seq)
        near = bisect_right(self._range_starts, seq) - 1
        if near >= 0:
            open_lease = self._by_range_start[self._range_starts[near]]
            if open_lease.index_of(seq) >= 0:
                self._split_candidates[packed_seq] = open_lease
                return open_lease.status
        row = self._txn.get(self._keys.statuses + packed_seq)
        if row is not None:
            return decode_status(row)
        lease = _covering_lease(self._txn, self._keys, packed_seq)
        covering = self.get(lease) if lease else None
        if covering is None or covering.index_of(seq) < 0:
            return NEW_STATUS
        self._split_candidates[packed_seq] = covering
        return covering.status

    def split_off(self, packed_seq: bytes, status: TaskStatusRow) -> None:
        """Split a task off its range lease, because it gets its own status row."""
        open_lease = (
            self._split_candidates.pop(packed_seq, None) if self._split_candidates else None
        )
        if open_lease is not None:
            seq = unpack_seq(packed_seq)
            open_lease.remove(seq)
            if status.state == TaskState.LEASED:
                open_lease.has_split_off = True
                self.schedule_expiry(status.expires_ns, open_lease.lease, status.worker, [seq])

    def schedule_expiry(self, at_ns: int, lease: int, worker: str, seqs: list[int]) -> None:
        """Add tasks to the expiry row of this time and lease."""
        self._expiries_to_add.setdefault((at_ns, lease), (worker, []))[1].extend(seqs)

    def save(self) -> None:
        txn, keys = self._txn, self._keys
        for open_lease in self._loaded.values():
            if open_lease is None or not open_lease.changed:
                continue
            open_lease.changed = False
            number, held = pack_int(open_lease.lease), open_lease.stored
            if open_lease.ranges:
                runs = open_lease.ranges
                remaining = RangeLease(
                    held.worker,
                    held.expires_ns,
                    held.granted_ns,
                    runs,
                    held.firsts,
                    open_lease.has_split_off,
                )
                txn.put(keys.range_leases + number, pack(remaining))
                continue
            txn.delete(keys.range_leases + number)
            for first in held.firsts:
                txn.delete(keys.range_lease_starts + pack_int(first))
            if not open_lease.has_split_off:
                txn.delete(keys.expiries + pack_int(held.expires_ns) + number)
        for (at_ns, lease), (worker, seqs) in self._expiries_to_add.items():
            key = keys.expiries + pack_int(at_ns) + pack_int(lease)
            row = txn.get(key)
            if row is None:
                batch = ExpiryBatch(lease, worker, seqs)
            else:
                stored_batch = codec.unpack_as(ExpiryBatch, row)
                batch = ExpiryBatch(
                    lease, worker, stored_batch.tasks, (*stored_batch.split_off, *seqs)
                )
            txn.put(key, pack(batch))
        self._expiries_to_add = {}


# -- reads ---------------------------------------------------------------------------------------


def get_status(txn: Txn, keys: TaskKeys, packed_seq: bytes) -> TaskStatusRow:
    return RangeLeaseTable(txn, keys).status(packed_seq)


def open_range_lease(txn: Txn, keys: TaskKeys, lease: int) -> OpenRangeLease | None:
    """Load a range lease. None if the number is not one, or nothing is leased under it."""
    row = txn.get(keys.range_leases + pack_int(lease)) if is_range_lease(lease) else None
    return None if row is None else OpenRangeLease(lease, codec.unpack_as(RangeLease, row))


def load_expiry_batch(
    txn: Txn, keys: TaskKeys, key: bytes, row: bytes
) -> tuple[ExpiryBatch, list[int]]:
    """Decode an expiry row and list its tasks, sorted by seq."""
    batch = codec.unpack_as(ExpiryBatch, row)
    open_lease = open_range_lease(txn, keys, batch.lease)
    # Split-off tasks have their own expiry rows at other times.
    if open_lease is None or open_lease.stored.expires_ns != decode_int_at(key, len(keys.expiries)):
        return batch, sorted(batch.listed_tasks)
    return batch, sorted(batch.listed_tasks + open_lease.tasks())


def range_lease_statuses(txn: Txn, keys: TaskKeys, lo: int, hi: int) -> dict[int, TaskStatusRow]:
    """Return the statuses of tasks with lo <= seq < hi under range leases."""
    start = keys.range_lease_starts + pack_int(lo)
    preceding = txn.scan(keys.range_lease_starts, start, 1, True)
    rows = preceding + txn.scan(start, keys.range_lease_starts + pack_int(hi))
    statuses: dict[int, TaskStatusRow] = {}
    for lease in dict.fromkeys(unpack_seq(row) for _, row in rows):
        open_lease = open_range_lease(txn, keys, lease)
        if open_lease is not None:
            statuses |= {seq: open_lease.status for seq in open_lease.tasks() if lo <= seq < hi}
    return statuses


def _covering_lease(txn: Txn, keys: TaskKeys, packed_seq: bytes) -> int:
    """Return the range lease that may cover a task, or 0. Ranges do not overlap."""
    found = txn.scan(
        keys.range_lease_starts, keys.range_lease_starts + packed_seq + b"\x00", 1, True
    )
    return unpack_seq(found[0][1]) if found else 0
