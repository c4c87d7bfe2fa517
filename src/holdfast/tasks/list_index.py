"""The index of the task list: a bitmap index of the tasks by queue, name and state.

    "li" <queue> <name> <place> <chunk>   one bit for each task of a chunk of `CHUNK` seqs
    "ls"                                  the first indexed seq: an older version wrote the tasks before it

- The place `""` has every stored task. Each of `PLACES` has the tasks in that state or wait state.
- A commit writes one row for the tasks of one queue and name that it creates or ends, and not one row for each task.
- Ready and leased tasks have no place: a task that runs without a failure is written when it is created and when it ends.
- Tasks that another layer submitted for itself are not indexed: the activations of flows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from functools import lru_cache

from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks.model import TaskKeys, TaskSpec, decode_int_at, pack_int

# The tasks of a row. A power of two.
CHUNK = 1_024
ALL = ""
ENDED = ("completed", "failed", "dead")
PLACES = (*ENDED, "delayed", "blocked")
# The pairs of queue and name that one list reads. A list of more pairs reads the tasks themselves.
PAIRS_MAX = 200
# The rows that a list reads at a time, at most.
_PAGE_MAX = 64

Pair = tuple[str, str]


class ListIndexDeltas:
    """The changes of the index by one operation. Written once, at the end."""

    def __init__(self) -> None:
        # The bits to set and to clear, by row.
        self._set: dict[bytes, int] = {}
        self._clear: dict[bytes, int] = {}
        self._first_created = 0

    def create(self, keys: TaskKeys, spec: TaskSpec, first: int, last: int) -> None:
        """Index new tasks with consecutive seqs."""
        if spec.owner:
            return
        prefix = _prefix(keys, spec.queue, spec.name, ALL)
        self._first_created = self._first_created or first
        while first <= last:
            chunk = first // CHUNK
            end = min(last + 1, (chunk + 1) * CHUNK)
            bits = ((1 << (end - first)) - 1) << (first % CHUNK)
            key = prefix + pack_int(chunk)
            self._set[key] = self._set.get(key, 0) | bits
            first = end

    def enter(self, keys: TaskKeys, spec: TaskSpec, place: str, seqs: Iterable[int]) -> None:
        """Put tasks into a place."""
        if not spec.owner:
            _move(self._set, self._clear, _prefix(keys, spec.queue, spec.name, place), seqs)

    def leave(self, keys: TaskKeys, spec: TaskSpec, place: str, seqs: Iterable[int]) -> None:
        """Take tasks out of a place."""
        if not spec.owner:
            _move(self._clear, self._set, _prefix(keys, spec.queue, spec.name, place), seqs)

    def remove(self, keys: TaskKeys, spec: TaskSpec, place: str, seq: int) -> None:
        """Take out a removed task, which had ended."""
        self.leave(keys, spec, ALL, (seq,))
        self.leave(keys, spec, place, (seq,))

    def save(self, txn: Txn, keys: TaskKeys) -> None:
        for key in dict.fromkeys((*self._set, *self._clear)):
            row = txn.get(key)
            before = decode_bits(row)
            after = (before | self._set.get(key, 0)) & ~self._clear.get(key, 0)
            if after == before:
                continue
            if row is None and self._first_created and txn.get(keys.listed_since) is None:
                txn.put(keys.listed_since, schema.encode_int(self._first_created))
            if after:
                txn.put(key, encode_bits(after))
            else:
                txn.delete(key)


def encode_bits(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def decode_bits(row: bytes | None) -> int:
    return int.from_bytes(row or b"", "little")


def indexed_since(txn: Txn, keys: TaskKeys) -> int | None:
    """Return the first indexed seq; None if no task is indexed."""
    row = txn.get(keys.listed_since)
    return None if row is None else schema.decode_int(row)


def list_pairs(txn: Txn, keys: TaskKeys, queue: str, name: str) -> list[Pair] | None:
    """Return the pairs of queue and name that match. None if there are more than `PAIRS_MAX`, whether they match or not."""
    if queue and name:
        return [(queue, name)]
    prefix = keys.listed + (tuples.pack((queue,)) if queue else b"")
    pairs: list[Pair] = []
    lo, hi = prefix, tuples.prefix_end(prefix)
    for _ in range(PAIRS_MAX):
        found = txn.scan(lo, hi, 1)
        if not found:
            return [pair for pair in pairs if name in ("", pair[1])]
        of_queue, of_name = (str(part) for part in tuples.unpack(found[0][0])[3:5])
        pairs.append((of_queue, of_name))
        lo = tuples.prefix_end(keys.listed + _pack_pair(of_queue, of_name))
    return None


def iter_seqs(
    txn: Txn, keys: TaskKeys, pairs: Iterable[Pair], place: str, before: int, first: int
) -> Iterator[int]:
    """Yield the seqs of a place from `before` - 1 down to `first`. The place `waiting` has the tasks that have not ended."""
    streams = [_iter_pair(txn, keys, pair, place, before, first) for pair in pairs]
    return iter(streams[0]) if len(streams) == 1 else heapq.merge(*streams, reverse=True)


def _iter_pair(
    txn: Txn, keys: TaskKeys, pair: Pair, place: str, before: int, first: int
) -> Iterator[int]:
    is_live = place == "waiting"
    prefix = _prefix(keys, *pair, ALL if is_live else place)
    lo, hi = prefix + pack_int(first // CHUNK), prefix + pack_int((before - 1) // CHUNK + 1)
    rows = 1
    while before > first and (found := txn.scan(lo, hi, rows, True)):
        for key, row in found:
            chunk, bits = decode_int_at(key, len(prefix)), decode_bits(row)
            if is_live:
                for ended in ENDED:
                    bits &= ~decode_bits(txn.get(_prefix(keys, *pair, ended) + pack_int(chunk)))
            yield from _seqs_of(chunk, bits, before, first)
        hi, rows = found[-1][0], min(2 * rows, _PAGE_MAX)


def _seqs_of(chunk: int, bits: int, before: int, first: int) -> Iterator[int]:
    """Yield the seqs of a row, the newest first."""
    start = chunk * CHUNK
    if start + CHUNK > before:
        bits &= (1 << (before - start)) - 1
    while bits:
        at = bits.bit_length() - 1
        if start + at < first:
            return
        yield start + at
        bits ^= 1 << at


def expected_rows(keys: TaskKeys, tasks: Iterable[tuple[int, TaskSpec, str]]) -> dict[bytes, bytes]:
    """Return the rows of these tasks, given as seq, spec and place."""
    marks: dict[bytes, int] = {}
    for seq, spec, place in tasks:
        if not spec.owner:
            for one in {ALL, place}:
                _move(marks, {}, _prefix(keys, spec.queue, spec.name, one), (seq,))
    return {key: encode_bits(bits) for key, bits in marks.items()}


def _move(
    into: dict[bytes, int], out_of: dict[bytes, int], prefix: bytes, seqs: Iterable[int]
) -> None:
    """Mark bits in one set of changes. An operation may move a task twice: the last move counts."""
    marks: dict[int, int] = {}
    for seq in seqs:
        chunk = seq // CHUNK
        marks[chunk] = marks.get(chunk, 0) | 1 << (seq % CHUNK)
    for chunk, bits in marks.items():
        key = prefix + pack_int(chunk)
        into[key] = into.get(key, 0) | bits
        if key in out_of:
            out_of[key] &= ~bits


@lru_cache(4096)
def _pack_pair(queue: str, name: str) -> bytes:
    return tuples.pack((queue, name))


@lru_cache(4096)
def _prefix(keys: TaskKeys, queue: str, name: str, place: str) -> bytes:
    return keys.listed + tuples.pack((queue, name, place))
