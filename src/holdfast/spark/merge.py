"""Merge: sorted blocks that overlap a little become sorted blocks that do not.

- Input: blocks that are sorted, without nulls and without duplicates, each by itself. Output: all rows in
  one order. A block that overlaps no other keeps its number and is not rewritten.
- A sweep over the keys reads every block once. It holds the blocks whose key ranges cover the current key
  and one output block, so its memory is `open_bytes_max` of the blocks. The caller compares that with
  `MEMORY_BYTES` first: an input in no order at all is sorted by Spark instead (`ingest`).
- The merge runs in the ledger service through two callables: `read(n)` and `write(data)`.
- Nothing is deleted here. `Merged.spent` names the blocks that are not needed once the new list is
  recorded, so a crash in between loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import pyarrow as pa

from holdfast.codec import Record
from holdfast.spark import keys
from holdfast.spark.keys import Comparable, KeyDuplicate

BLOCK_ROWS = 262_144
BLOCK_BYTES = 8 << 20
CUT_MORE = 1.05
CUT_ROWS_MIN = 64
# What the open blocks of a merge may take. Rows on their way out are in memory twice more.
MEMORY_BYTES = 96 << 20

Read = Callable[[int], bytes | memoryview]
Write = Callable[[bytes], int]


class Staged(Record, frozen=True):
    """A stored block. `bounds` is an Arrow stream of its key columns: the first row and the last."""

    n: int
    rows: int
    size_bytes: int
    bounds: bytes


class Merged(Record, frozen=True):
    blocks: list[tuple[int, int]]
    spent: list[int]


def merge(
    staged: Sequence[Staged],
    key: Sequence[str],
    read: Read,
    write: Write,
    *,
    block_rows: int = BLOCK_ROWS,
    block_bytes: int = BLOCK_BYTES,
) -> Merged:
    """The blocks (number, rows) in seq order; `KeyDuplicate` if two blocks share a key."""
    blocks: list[tuple[int, int]] = []
    spent: list[int] = []
    for group in overlapping(staged, key):
        if len(group) == 1:
            blocks.append((group[0].n, group[0].rows))
            continue
        for batch in _joined(_sweep(group, key, read), block_rows, block_bytes):
            for block in cut(batch, block_rows, block_bytes):
                blocks.append((write(encode(block)), block.num_rows))
        spent += [block.n for block in group]
    return Merged(blocks, spent)


def open_bytes_max(staged: Sequence[Staged], key: Sequence[str]) -> int:
    """The memory that `merge` needs for blocks: the most bytes of blocks whose key ranges share a key."""
    edges: list[tuple[Comparable, int, int]] = []
    for block in staged:
        first, last = bounds(block, key)
        # At one key the blocks that begin count before those that end there go.
        edges += [(first, 0, block.size_bytes), (last, 1, -block.size_bytes)]
    edges.sort()
    return max(accumulate(size for _, _, size in edges), default=0)


def overlapping(staged: Sequence[Staged], key: Sequence[str]) -> list[list[Staged]]:
    """Blocks in the order of their first key, those that cannot be told apart by keys together."""
    bounded = [(*bounds(block, key), block) for block in staged]
    bounded.sort(key=lambda entry: entry[:2])
    groups: list[list[Staged]] = []
    reach: Comparable | None = None
    for first, last, block in bounded:
        if reach is None or reach < first:
            groups.append([block])
            reach = last
        else:
            groups[-1].append(block)
            reach = max(reach, last)
    return groups


def bounds(block: Staged, key: Sequence[str]) -> tuple[Comparable, Comparable]:
    keyed = keys.columns(decode(block.bounds), key)
    return keys.at(keyed, 0), keys.at(keyed, 1)


def encode(batch: pa.RecordBatch) -> bytes:
    """One Arrow stream of one batch, not compressed: a reader maps it and copies nothing."""
    return bytes(encoded(batch))


def encoded(batch: pa.RecordBatch) -> memoryview:
    """The same without another copy."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())


def decode(data: bytes | memoryview) -> pa.RecordBatch:
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        return stream.read_next_batch()


def cut(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Slices within both limits, in order; a row that is over the limit by itself is a slice."""
    rows = batch.num_rows
    if rows > rows_max:
        parts = -(-rows // rows_max)
        size = -(-rows // parts)
        for lo in range(0, rows, size):
            yield from cut(batch.slice(lo, size), rows_max, bytes_max)
    elif rows > 1 and batch.nbytes > bytes_max:
        # A little more pieces than fit: rows of one size then need no second cut. Few rows may differ much.
        parts = int(batch.nbytes / bytes_max * CUT_MORE) + 1 if rows >= CUT_ROWS_MIN else 2
        parts = min(parts, max(rows // 2, 2))
        size = -(-rows // parts)
        for lo in range(0, rows, size):
            yield from cut(batch.slice(lo, size), rows_max, bytes_max)
    elif rows:
        yield batch


def ordered(batch: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """The same rows in the order of their keys; the same object if they are so already."""
    keyed = keys.columns(batch, key)
    return batch if keys.ascends(keyed) else batch.take(keys.order(keyed))


def _sweep(group: Sequence[Staged], key: Sequence[str], read: Read) -> Iterator[pa.RecordBatch]:
    """The rows of a group in order. A block is read when the sweep reaches its first key, once, and
    dropped when all of its rows are out."""
    firsts = [bounds(block, key)[0] for block in group]
    active: list[_Open] = []
    for at, block in enumerate(group):
        batch = decode(read(block.n))
        active.append(_Open(batch, keys.columns(batch, key)))
        # Rows below the first key of the next block are complete: only open blocks hold them.
        bound = firsts[at + 1] if at + 1 < len(group) else None
        pieces = [piece for one in active if (piece := one.below(bound)).num_rows]
        active = [one for one in active if one.left]
        if pieces:
            rows = ordered(pa.concat_batches(pieces), key)
            _check_unique(rows, key)
            yield rows


class _Open:
    """A block of which some rows are out."""

    def __init__(self, batch: pa.RecordBatch, keyed: list[pa.Array]) -> None:
        self._batch = batch
        self._keyed = keyed
        self._start = 0

    @property
    def left(self) -> int:
        return int(self._batch.num_rows) - self._start

    def below(self, bound: Comparable | None) -> pa.RecordBatch:
        end = self._batch.num_rows
        if bound is not None:
            end = keys.lower_bound(self._keyed, bound, self._start)
        piece = self._batch.slice(self._start, end - self._start)
        self._start = end
        return piece


def _joined(
    batches: Iterable[pa.RecordBatch], rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about the limits: a sweep gives small ones."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= rows_max or size >= bytes_max:
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def _check_unique(batch: pa.RecordBatch, key: Sequence[str]) -> None:
    keyed = keys.columns(batch, key)
    if keys.ascends(keyed):
        return
    rows = keys.repeats(keyed)
    raise KeyDuplicate(key=list(key), found=len(rows), examples=keys.examples(batch, key, rows))
