"""Ended work per minute: how many tasks and flows of a queue ended in a minute, by outcome (throughput counters).

    "m" <minute> <kind> <queue>    the ends of a queue in a minute, since 1970 by store time
    "msince"                       ends before this time are not counted: an older version wrote them

- The commit that ends work counts it. Merged per commit: one row for each queue and kind.
- A row is kept for `KEPT_MINUTES`. A commit that writes a new row deletes expired ones, so their number is bounded.
- A minute has at most `QUEUES_MAX` queues of a kind. Ends of further queues are counted under the queue "".
- Ended work that is removed, or runs again, stays counted. `removed` has its number, so that `verify` can compare the
  counts with the stored work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.store import schema, tuples
from holdfast.store.api import Txn

TASK, FLOW = KINDS = ("task", "flow")
OUTCOMES = ("completed", "failed", "dead", "cancelled")
MINUTE_NS = 60 * S
KEPT_MINUTES = 24 * 60
QUEUES_MAX = 64
# Expired rows that a commit deletes when it writes a new one.
EXPIRED_MAX = 4
OTHER_QUEUES = ""

_NONE = (0, 0, 0, 0)
_POSITIONS = {outcome: at for at, outcome in enumerate(OUTCOMES)}


class EndedRow(Record, frozen=True):
    """The ends of a queue in a minute, in the order of `OUTCOMES`."""

    ended: tuple[int, int, int, int] = _NONE
    removed: tuple[int, int, int, int] = _NONE


class EndedCount(NamedTuple):
    """The ends of a queue in a minute."""

    minute: int
    kind: str
    queue: str
    ended: tuple[int, int, int, int]


@lru_cache(maxsize=1024)
def row_prefix(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.STATISTIC, universe, "m")


@lru_cache(maxsize=1024)
def since_key(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.STATISTIC, universe, "msince")


decode_row = codec.decoder(EndedRow).decode


@lru_cache(maxsize=4096)
def _row_key(universe: str, minute: int, kind: str, queue: str) -> bytes:
    return row_prefix(universe) + tuples.pack((minute, kind, queue))


class EndedDeltas:
    """The ends and removals of one operation, written once at its end."""

    __slots__ = ("_ended", "_removed")

    def __init__(self) -> None:
        self._ended: dict[str, list[int]] = {}
        self._removed: dict[tuple[str, int, str], int] = {}

    def add(self, queue: str, outcome: str, count: int = 1) -> None:
        counts = self._ended.get(queue)
        if counts is None:
            counts = self._ended[queue] = [0, 0, 0, 0]
        counts[_POSITIONS[outcome]] += count

    def remove(self, queue: str, ended_ns: int, outcome: str) -> None:
        """Note that ended work is removed, or runs again."""
        key = (queue, ended_ns, outcome)
        self._removed[key] = self._removed.get(key, 0) + 1

    def save(self, txn: Txn, universe: str, kind: str, now_ns: int) -> None:
        if self._ended:
            minute = now_ns // MINUTE_NS
            for queue, counts in self._ended.items():
                key = _row_key(universe, minute, kind, queue)
                stored = txn.get(key)
                if stored is not None:
                    row = decode_row(stored)
                else:
                    key, row = _create(txn, universe, minute, kind, queue, now_ns)
                txn.put(key, codec.pack(EndedRow(_sum(row.ended, counts), row.removed)))
            self._ended = {}
        if self._removed:
            self._save_removed(txn, universe, kind, now_ns)

    def _save_removed(self, txn: Txn, universe: str, kind: str, now_ns: int) -> None:
        first_minute = now_ns // MINUTE_NS - KEPT_MINUTES
        since = since_ns(txn, universe)
        for (queue, ended_ns, outcome), count in self._removed.items():
            if since is None or ended_ns < since or ended_ns // MINUTE_NS < first_minute:
                continue
            found = _find(txn, universe, ended_ns // MINUTE_NS, kind, queue)
            if found is not None:
                key, row = found
                counts = tuple(count if one == outcome else 0 for one in OUTCOMES)
                txn.put(key, codec.pack(EndedRow(row.ended, _sum(row.removed, counts))))
        self._removed = {}


def since_ns(txn: Txn, universe: str) -> int | None:
    """The time from which ends are counted; None if nothing has ended since."""
    row = txn.get(since_key(universe))
    return None if row is None else schema.decode_int(row)


def list_counts(
    txn: Txn, universe: str, first: int, last: int, after: bytes, limit: int
) -> list[tuple[bytes, EndedCount]]:
    """Return the counts of minutes from `first` to `last`, in order, after a key; each with its key."""
    prefix = row_prefix(universe)
    lo = max(after + b"\x00" if after else b"", prefix + tuples.pack((first,)))
    rows = txn.scan(lo, prefix + tuples.pack((last + 1,)), limit)
    return [(key, count_of(universe, key, row)) for key, row in rows]


def queue_counts(
    txn: Txn, universe: str, kind: str, queue: str, first: int, last: int
) -> list[EndedCount]:
    """Return the counts of one queue in minutes from `first` to `last`, without minutes in which nothing ended."""
    keys = [_row_key(universe, minute, kind, queue) for minute in range(first, last + 1)]
    txn.prefetch(keys)
    rows = ((key, txn.get(key)) for key in keys)
    return [count_of(universe, key, row) for key, row in rows if row is not None]


def count_of(universe: str, key: bytes, row: bytes) -> EndedCount:
    minute, kind, queue = tuples.unpack(key[len(row_prefix(universe)) :])
    assert isinstance(minute, int)
    return EndedCount(minute, str(kind), str(queue), decode_row(row).ended)


def _create(
    txn: Txn, universe: str, minute: int, kind: str, queue: str, now_ns: int
) -> tuple[bytes, EndedRow]:
    """Return the key of a new row and its counts: those of the other queues if the minute has too many queues."""
    if txn.get(since_key(universe)) is None:
        txn.put(since_key(universe), schema.encode_int(now_ns))
    prefix = row_prefix(universe)
    for expired, _ in txn.scan(prefix, prefix + tuples.pack((minute - KEPT_MINUTES,)), EXPIRED_MAX):
        txn.delete(expired)
    of_kind = prefix + tuples.pack((minute, kind))
    if len(txn.scan(of_kind, tuples.prefix_end(of_kind), QUEUES_MAX)) < QUEUES_MAX:
        return _row_key(universe, minute, kind, queue), EndedRow()
    key = _row_key(universe, minute, kind, OTHER_QUEUES)
    row = txn.get(key)
    return key, EndedRow() if row is None else decode_row(row)


def _find(
    txn: Txn, universe: str, minute: int, kind: str, queue: str
) -> tuple[bytes, EndedRow] | None:
    for name in (queue, OTHER_QUEUES):
        key = _row_key(universe, minute, kind, name)
        row = txn.get(key)
        if row is not None:
            return key, decode_row(row)
    return None


def _sum(counts: tuple[int, int, int, int], changes: Sequence[int]) -> tuple[int, int, int, int]:
    completed, failed, dead, cancelled = counts
    return (
        completed + changes[0],
        failed + changes[1],
        dead + changes[2],
        cancelled + changes[3],
    )
