"""Block merge: merges slightly overlapping sorted blocks into disjoint ones.

- Input: blocks that are sorted, without nulls and duplicates, each within itself. Output: all rows
  in one order. A block without overlap keeps its number and is not rewritten.
- A sweep over the keys reads every block once. It holds the blocks whose key ranges cover the
  current key, and one output block. Its memory is `open_bytes_max` of the blocks, and the caller
  compares that with `MEMORY_BYTES` first. Spark sorts an unsorted input instead (`ingest`).
- The merge runs in the ledger service with two callables: `read(n)` and `write(data)`.
- The merge deletes nothing. `MergeResult.obsolete` names the blocks that can be deleted after the
  new list is recorded, so a crash in between loses nothing.
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
SPLIT_SLACK = 1.05
SPLIT_ROWS_MIN = 64
# Memory limit for the open blocks of a merge. Output rows need up to twice that in addition.
MEMORY_BYTES = 96 << 20

ReadBlockBytes = Callable[[int], bytes | memoryview]
WriteBlockBytes = Callable[[bytes], int]


class StagedBlock(Record, frozen=True):
    """A stored block. `bounds` is an Arrow stream of the key columns of its first and last row."""

    n: int
    rows: int
    size_bytes: int
    bounds: bytes


class MergeResult(Record, frozen=True):
    blocks: list[tuple[int, int]]
    obsolete: list[int]


def merge_blocks(
    staged: Sequence[StagedBlock],
    key: Sequence[str],
    read: ReadBlockBytes,
    write: WriteBlockBytes,
    *,
    block_rows: int = BLOCK_ROWS,
    block_bytes: int = BLOCK_BYTES,
) -> MergeResult:
    """Return the blocks (number, rows) in seq order. Raises `KeyDuplicate` if two blocks share a
    key.
    """
    blocks: list[tuple[int, int]] = []
    obsolete: list[int] = []
    for group in group_overlapping(staged, key):
        if len(group) == 1:
            blocks.append((group[0].n, group[0].rows))
            continue
        for batch in _coalesce(_sweep(group, key, read), block_rows, block_bytes):
            for block in split_batch(batch, block_rows, block_bytes):
                blocks.append((write(encode_block(block)), block.num_rows))
        obsolete += [block.n for block in group]
    return MergeResult(blocks, obsolete)


def open_bytes_max(staged: Sequence[StagedBlock], key: Sequence[str]) -> int:
    """Return the memory that a merge needs: the maximum bytes of blocks with a common key."""
    edges: list[tuple[Comparable, int, int]] = []
    for block in staged:
        first, last = key_bounds(block, key)
        # At equal keys, count starting blocks before ending ones.
        edges += [(first, 0, block.size_bytes), (last, 1, -block.size_bytes)]
    edges.sort()
    return max(accumulate(size for _, _, size in edges), default=0)


def group_overlapping(staged: Sequence[StagedBlock], key: Sequence[str]) -> list[list[StagedBlock]]:
    """Group blocks with overlapping key ranges, ordered by first key."""
    bounded = [(*key_bounds(block, key), block) for block in staged]
    bounded.sort(key=lambda entry: entry[:2])
    groups: list[list[StagedBlock]] = []
    reach: Comparable | None = None
    for first, last, block in bounded:
        if reach is None or reach < first:
            groups.append([block])
            reach = last
        else:
            groups[-1].append(block)
            reach = max(reach, last)
    return groups


def key_bounds(block: StagedBlock, key: Sequence[str]) -> tuple[Comparable, Comparable]:
    keyed = keys.comparable_columns(decode_block(block.bounds), key)
    return keys.key_at(keyed, 0), keys.key_at(keyed, 1)


def encode_block(batch: pa.RecordBatch) -> bytes:
    """Encode one batch as an uncompressed Arrow stream, which readers map without copying."""
    return bytes(encode_block_view(batch))


def encode_block_view(batch: pa.RecordBatch) -> memoryview:
    """Encode without an additional copy."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())


def decode_block(data: bytes | memoryview) -> pa.RecordBatch:
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        return stream.read_next_batch()


def split_batch(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Yield slices within both limits, in order. A single row above the limit is a slice."""
    rows = batch.num_rows
    if rows > rows_max:
        parts = -(-rows // rows_max)
        size = -(-rows // parts)
        for lo in range(0, rows, size):
            yield from split_batch(batch.slice(lo, size), rows_max, bytes_max)
    elif rows > 1 and batch.nbytes > bytes_max:
        # Slightly more pieces than necessary, so that rows of equal size need no second split. A
        # few rows may differ much.
        parts = int(batch.nbytes / bytes_max * SPLIT_SLACK) + 1 if rows >= SPLIT_ROWS_MIN else 2
        parts = min(parts, max(rows // 2, 2))
        size = -(-rows // parts)
        for lo in range(0, rows, size):
            yield from split_batch(batch.slice(lo, size), rows_max, bytes_max)
    elif rows:
        yield batch


def sort_by_key(batch: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """Return the rows in key order; the same object if they are sorted."""
    keyed = keys.comparable_columns(batch, key)
    return batch if keys.is_ascending(keyed) else batch.take(keys.sort_order(keyed))


def _sweep(
    group: Sequence[StagedBlock], key: Sequence[str], read: ReadBlockBytes
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a group in order. A block is read once, when the sweep reaches its first
    key, and dropped when all its rows are emitted.
    """
    firsts = [key_bounds(block, key)[0] for block in group]
    active: list[_OpenBlock] = []
    for at, block in enumerate(group):
        batch = decode_block(read(block.n))
        active.append(_OpenBlock(batch, keys.comparable_columns(batch, key)))
        # Rows below the next block's first key are complete, because only open blocks can contain
        # them.
        bound = firsts[at + 1] if at + 1 < len(group) else None
        pieces = [piece for one in active if (piece := one.take_below(bound)).num_rows]
        active = [one for one in active if one.remaining]
        if pieces:
            rows = sort_by_key(pa.concat_batches(pieces), key)
            _check_unique(rows, key)
            yield rows


class _OpenBlock:
    """A block with some rows emitted."""

    def __init__(self, batch: pa.RecordBatch, keyed: list[pa.Array]) -> None:
        self._batch = batch
        self._keyed = keyed
        self._start = 0

    @property
    def remaining(self) -> int:
        return int(self._batch.num_rows) - self._start

    def take_below(self, bound: Comparable | None) -> pa.RecordBatch:
        end = self._batch.num_rows
        if bound is not None:
            end = keys.lower_bound(self._keyed, bound, self._start)
        piece = self._batch.slice(self._start, end - self._start)
        self._start = end
        return piece


def _coalesce(
    batches: Iterable[pa.RecordBatch], rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """Combine small batches into batches of about the limits."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        gathered.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= rows_max or size >= bytes_max:
            yield pa.concat_batches(gathered)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield pa.concat_batches(gathered)


def _check_unique(batch: pa.RecordBatch, key: Sequence[str]) -> None:
    keyed = keys.comparable_columns(batch, key)
    if keys.is_ascending(keyed):
        return
    rows = keys.repeated_rows(keyed)
    raise KeyDuplicate(key=list(key), found=len(rows), examples=keys.key_examples(batch, key, rows))
