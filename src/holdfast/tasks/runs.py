"""Runs: tasks that were submitted together, alike in all but their arguments, as one row.

A row of a lane names one task, or the first and the last of a run: fresh tasks, whose seqs follow each
other. Whoever leases takes from its front. What was leased of a run is one row as well:

    w <queue> <kind> <-priority> <first>     the task, or the first and the last
    l <lease>                                `Held`: what is still leased of them
    i <first>                                that lease, for who has the number of a task only

A task of a run that anything else happens to leaves it, and has a status of its own from then on. So a
task is in a run of its lane, or held in one, or has a status, or has none and is a row of its own.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from operator import itemgetter

from holdfast import codec
from holdfast.codec import Record
from holdfast.store.api import Txn
from holdfast.tasks import board
from holdfast.tasks.rows import (
    FRESH,
    Keys,
    Status,
    after_int,
    decode_status,
    int_at,
    pack,
    pack_int,
    seq_of,
)
from holdfast.tasks.states import State

# No seq is as large.
SEQ_END = 1 << 62

# -- in a lane -----------------------------------------------------------------------------------


def run_row(first: int, last: int) -> bytes:
    return pack_int(first) if first == last else pack_int(first) + pack_int(last)


def run_of(row: bytes) -> tuple[int, int]:
    """The first and the last task that a row of a lane names."""
    end = after_int(row, 0)
    first = int.from_bytes(row[1:end], "big")
    return first, (first if len(row) == end else int_at(row, end))


def find(txn: Txn, lane: bytes, packed_seq: bytes) -> tuple[bytes, int, int] | None:
    """The row of a lane that names a task: its key, its first and its last."""
    key = lane + packed_seq
    row = txn.get(key)
    if row is None:
        before = txn.scan(lane, key, 1, True)
        if not before:
            return None
        key, row = before[0]
    first, last = run_of(row)
    return (key, first, last) if seq_of(packed_seq) <= last else None


def lift(txn: Txn, lane: bytes, packed_seq: bytes) -> bool:
    """Take a task from its lane; whether it was there."""
    found = find(txn, lane, packed_seq)
    if found is None:
        return False
    key, first, last = found
    seq = seq_of(packed_seq)
    txn.delete(key)
    if first < seq:
        txn.put(key, run_row(first, seq - 1))
    if seq < last:
        txn.put(lane + pack_int(seq + 1), run_row(seq + 1, last))
    return True


def members(lane: bytes, row: bytes) -> Iterator[tuple[bytes, int]]:
    """The tasks of a row, each with the key that it would have by itself."""
    first, last = run_of(row)
    for seq in range(first, last + 1):
        yield lane + pack_int(seq), seq


def lane_of(key: bytes, row: bytes) -> bytes:
    """The lane that a row is in."""
    return key[: -after_int(row, 0)]


# -- leased ----------------------------------------------------------------------------------------


class Held(Record, frozen=True):
    """Tasks of runs that were leased together, and still are: (first, last, spec) of each run, in the
    order of their seqs."""

    worker: str
    expires_ns: int
    granted_ns: int
    runs: list[tuple[int, int, bytes]]
    # Where the runs began when they were leased.
    firsts: list[int]
    # Whether tasks have left the runs and are still leased: they have a status.
    others: bool = False


class Batch(Record, frozen=True):
    """Leases given together: looked at when the time is up that they were first given for."""

    lease: int
    worker: str
    # None: a `Held` says which they are. Releases before there were runs stop at that, and do not take
    # it for a batch without tasks.
    tasks: list[int] | None
    # Those that have left a run, and are still leased until then.
    left: tuple[int, ...] = ()

    @property
    def named(self) -> list[int]:
        return [*(self.tasks or ()), *self.left]


def next_number(given: int, *, runs: bool) -> int:
    """The number of the next lease. Those of runs are even, so that whoever reports under a lease need
    not look whether it is one."""
    number = given + 1
    return number + (number % 2 == 1) if runs else number + (number % 2 == 0)


def of_runs(lease: int) -> bool:
    return lease % 2 == 0 and 0 < lease < 1 << 63


class Open:
    """A `Held` while a decision has it in hand."""

    __slots__ = ("changed", "held", "lease", "others", "runs", "status")

    def __init__(self, lease: int, held: Held) -> None:
        self.lease = lease
        self.held = held
        self.runs = list(held.runs)
        self.others = held.others
        self.changed = False
        # What each of them is: first granted, and nothing since.
        self.status = board.granted(FRESH, lease, held.worker, held.expires_ns, held.granted_ns)

    def at(self, seq: int) -> int:
        """Which of the runs a task is in; -1 for none."""
        runs = self.runs
        if not runs:
            return -1
        at = 0 if runs[0][0] == seq else bisect_right(runs, seq, key=_first_of) - 1
        return at if at >= 0 and seq <= runs[at][1] else -1

    def take(self, seq: int) -> bytes | None:
        """Take a task out; its spec, or None if it is not in."""
        at = self.at(seq)
        if at < 0:
            return None
        runs = self.runs
        first, last, spec = runs[at]
        if first == last:
            del runs[at]
        elif seq == first:
            runs[at] = (seq + 1, last, spec)
        elif seq == last:
            runs[at] = (first, seq - 1, spec)
        else:
            runs[at : at + 1] = [(first, seq - 1, spec), (seq + 1, last, spec)]
        self.changed = True
        return spec

    def tasks(self) -> list[int]:
        return [seq for first, last, _ in self.runs for seq in range(first, last + 1)]


_first_of = itemgetter(0)


class Leases:
    """The leases of runs that a decision looks at, and what becomes of them; saved once, at its end."""

    def __init__(self, txn: Txn, keys: Keys) -> None:
        self._txn = txn
        self._keys = keys
        self._seen: dict[int, Open | None] = {}
        # Where the runs of those that are open began, in order: no run reaches into the next.
        self._firsts: list[int] = []
        self._open: dict[int, Open] = {}
        # Tasks whose status was taken from a run here.
        self._of: dict[bytes, Open] = {}
        # Tasks with a status of their own that are to be looked at: when, by lease.
        self._listed: dict[tuple[int, int], tuple[str, list[int]]] = {}

    def get(self, lease: int) -> Open | None:
        if lease in self._seen:
            return self._seen[lease]
        found = held_by(self._txn, self._keys, lease)
        self._seen[lease] = found
        if found is not None:
            for first in found.held.firsts:
                insort(self._firsts, first)
                self._open[first] = found
        return found

    def give(self, lease: int, held: Held) -> None:
        txn, keys = self._txn, self._keys
        number = pack_int(lease)
        txn.put(keys.held + number, pack(held))
        for first in held.firsts:
            txn.put(keys.held_at + pack_int(first), number)

    def status(self, packed_seq: bytes) -> Status:
        """What a task is; FRESH if nobody has touched it."""
        seq = seq_of(packed_seq)
        near = bisect_right(self._firsts, seq) - 1
        if near >= 0:
            one = self._open[self._firsts[near]]
            if one.at(seq) >= 0:
                self._of[packed_seq] = one
                return one.status
        row = self._txn.get(self._keys.statuses + packed_seq)
        if row is not None:
            return decode_status(row)
        lease = _lease_of(self._txn, self._keys, packed_seq)
        found = self.get(lease) if lease else None
        if found is None or found.at(seq) < 0:
            return FRESH
        self._of[packed_seq] = found
        return found.status

    def leave(self, packed_seq: bytes, status: Status) -> None:
        """A task has a status of its own from now on."""
        one = self._of.pop(packed_seq, None) if self._of else None
        if one is not None:
            seq = seq_of(packed_seq)
            one.take(seq)
            if status.state == State.LEASED:
                one.others = True
                self.look_at(status.expires_ns, one.lease, status.worker, [seq])

    def look_at(self, at_ns: int, lease: int, worker: str, seqs: list[int]) -> None:
        """Have tasks looked at when their time is up."""
        self._listed.setdefault((at_ns, lease), (worker, []))[1].extend(seqs)

    def save(self) -> None:
        txn, keys = self._txn, self._keys
        for one in self._seen.values():
            if one is None or not one.changed:
                continue
            one.changed = False
            number, held = pack_int(one.lease), one.held
            if one.runs:
                runs = one.runs
                left = Held(
                    held.worker, held.expires_ns, held.granted_ns, runs, held.firsts, one.others
                )
                txn.put(keys.held + number, pack(left))
                continue
            txn.delete(keys.held + number)
            for first in held.firsts:
                txn.delete(keys.held_at + pack_int(first))
            if not one.others:
                txn.delete(keys.expiries + pack_int(held.expires_ns) + number)
        for (at_ns, lease), (worker, seqs) in self._listed.items():
            key = keys.expiries + pack_int(at_ns) + pack_int(lease)
            row = txn.get(key)
            if row is None:
                batch = Batch(lease, worker, seqs)
            else:
                was = codec.unpack_as(Batch, row)
                batch = Batch(lease, worker, was.tasks, (*was.left, *seqs))
            txn.put(key, pack(batch))
        self._listed = {}


# -- looking ---------------------------------------------------------------------------------------


def status_of(txn: Txn, keys: Keys, packed_seq: bytes) -> Status:
    return Leases(txn, keys).status(packed_seq)


def held_by(txn: Txn, keys: Keys, lease: int) -> Open | None:
    """What is still leased of runs by a lease."""
    row = txn.get(keys.held + pack_int(lease)) if of_runs(lease) else None
    return None if row is None else Open(lease, codec.unpack_as(Held, row))


def batch_of(txn: Txn, keys: Keys, key: bytes, row: bytes) -> tuple[Batch, list[int]]:
    """Leases that were given together, and the tasks to look at then, in the order of their seqs."""
    batch = codec.unpack_as(Batch, row)
    found = held_by(txn, keys, batch.lease)
    # Those that have left their run have rows of their own, at other times.
    if found is None or found.held.expires_ns != int_at(key, len(keys.expiries)):
        return batch, sorted(batch.named)
    return batch, sorted(batch.named + found.tasks())


def held_between(txn: Txn, keys: Keys, lo: int, hi: int) -> dict[int, Status]:
    """Tasks with lo <= seq < hi that are leased in runs, with what they are."""
    start = keys.held_at + pack_int(lo)
    before = txn.scan(keys.held_at, start, 1, True)
    rows = before + txn.scan(start, keys.held_at + pack_int(hi))
    statuses: dict[int, Status] = {}
    for lease in dict.fromkeys(seq_of(row) for _, row in rows):
        found = held_by(txn, keys, lease)
        if found is not None:
            statuses |= {seq: found.status for seq in found.tasks() if lo <= seq < hi}
    return statuses


def _lease_of(txn: Txn, keys: Keys, packed_seq: bytes) -> int:
    """The lease of the run that a task may be in; 0 for none. Runs do not overlap."""
    found = txn.scan(keys.held_at, keys.held_at + packed_seq + b"\x00", 1, True)
    return seq_of(found[0][1]) if found else 0
