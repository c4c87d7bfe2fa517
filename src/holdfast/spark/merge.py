"""Merge: sorted blocks that overlap become sorted blocks that do not, in bounded memory.

- What comes in is sorted, without nulls and without duplicates, block by block; what goes out is all
  of it in one order. Blocks that overlap no other are kept as they are, under their own number.
- It runs where the blocks are, in the ledger service, by two callables: `read(n)` and `write(data)`.
  What is read is let go before the next block is read, unless all of it fits into memory.
- Nothing is deleted here: `Merged.spent` names the blocks that nobody needs once the new list is
  recorded, so a crash in between loses nothing.
- Overlapping blocks are cut at *splitters*, keys taken from samples of all of them; what lies between
  two splitters is gathered by binary search, sorted in memory and written.

Why samples bound the memory: a sample stands for at most `step` bytes of its block, so between two
splitters that are k samples apart lie at most (k + blocks) * step bytes. Keys that repeat cannot
break this: a block has each key once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from holdfast.codec import Record
from holdfast.spark import keys
from holdfast.spark.keys import Comparable, KeyDuplicate

BLOCK_ROWS = 262_144
BLOCK_BYTES = 8 << 20
MEMORY_BYTES = 256 << 20
# A range is in memory as slices, as one batch, and as that batch in order.
COPIES = 3

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
    memory_bytes: int = MEMORY_BYTES,
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
        for batch in _ranges(group, key, read, memory_bytes // COPIES):
            for block in cut(batch, block_rows, block_bytes):
                blocks.append((write(encode(block)), block.num_rows))
        spent += [block.n for block in group]
    return Merged(blocks, spent)


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
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


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
        yield from cut(batch.slice(0, rows // 2), rows_max, bytes_max)
        yield from cut(batch.slice(rows // 2), rows_max, bytes_max)
    elif rows:
        yield batch


def ordered(batch: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """The same rows in the order of their keys; the same object if they are so already."""
    keyed = keys.columns(batch, key)
    return batch if keys.ascends(keyed) else batch.take(keys.order(keyed))


def _ranges(
    group: Sequence[Staged], key: Sequence[str], read: Read, budget: int
) -> Iterator[pa.RecordBatch]:
    """The rows of a group in order, in batches of about `budget` bytes at most."""
    starts = [0] * len(group)
    firsts = [bounds(block, key)[0] for block in group]
    splitters = _splitters(group, key, read, budget)
    for splitter in [*splitters, None]:
        slices = []
        for at, block in enumerate(group):
            if splitter is not None and firsts[at] >= splitter:
                break  # the group is in the order of first keys
            if starts[at] == block.rows:
                continue
            batch = decode(read(block.n))
            end = block.rows
            if splitter is not None:
                end = keys.lower_bound(keys.columns(batch, key), splitter, starts[at])
            if end > starts[at]:
                piece = batch.slice(starts[at], end - starts[at])
                # A slice would keep all of its block; a copy of it does not.
                slices.append(decode(encode(piece)) if splitters else piece)
                starts[at] = end
            del batch
        if slices:
            batch = ordered(pa.concat_batches(slices), key)
            del slices
            _check_unique(batch, key)
            yield batch


def _splitters(
    group: Sequence[Staged], key: Sequence[str], read: Read, budget: int
) -> list[Comparable]:
    """Ascending keys, with at most `budget` bytes of rows between two neighbours."""
    if sum(block.size_bytes for block in group) <= budget:
        return []
    step = max(1, budget // (2 * len(group)))
    samples = []
    for block in group:
        stride = max(1, block.rows * step // max(1, block.size_bytes))
        picked = pa.array(range(0, block.rows, stride), pa.int64())
        samples.append(decode(read(block.n)).select(list(key)).take(picked))
    sample = ordered(pa.concat_batches(samples), key)
    keyed = keys.columns(sample, key)
    return [keys.at(keyed, row) for row in range(len(group), sample.num_rows, len(group))]


def _check_unique(batch: pa.RecordBatch, key: Sequence[str]) -> None:
    keyed = keys.columns(batch, key)
    if keys.ascends(keyed):
        return
    rows = keys.repeats(keyed)
    raise KeyDuplicate(key=list(key), found=len(rows), examples=keys.examples(batch, key, rows))
