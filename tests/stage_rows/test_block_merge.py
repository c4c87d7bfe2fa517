"""Block merge: overlapping sorted blocks become disjoint blocks in bounded memory."""

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark import block_merge, keys
from holdfast.spark.block_merge import MergeResult, StagedBlock
from holdfast.spark.keys import KeyDuplicate


class MemoryBlocks:
    """Blocks in memory by number, with the block operations of the ledger service."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []

    def read(self, n: int) -> bytes:
        return self.stored[n]

    def write(self, data: bytes) -> int:
        self.stored.append(data)
        return len(self.stored) - 1

    def put_staged(self, batch: pa.RecordBatch, key: Sequence[str] = ("k",)) -> StagedBlock:
        batch = block_merge.sort_by_key(batch, key)
        data = block_merge.encode_block(batch)
        ends = batch.select(list(key)).take(pa.array([0, batch.num_rows - 1]))
        return StagedBlock(
            self.write(data), batch.num_rows, len(data), block_merge.encode_block(ends)
        )

    def merged_column(self, merged: MergeResult, name: str = "k") -> list[Any]:
        batches = [block_merge.decode_block(self.stored[n]) for n, _ in merged.blocks]
        assert [batch.num_rows for batch in batches] == [rows for _, rows in merged.blocks]
        return [value for batch in batches for value in batch.column(name).to_pylist()]


def make_batch(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.RecordBatch:
    kind = kind or pa.int64()
    return pa.RecordBatch.from_arrays([pa.array(values, kind)], names=["k"])


def test_merge_keeps_blocks_without_overlap() -> None:
    blocks = MemoryBlocks()
    staged = [blocks.put_staged(make_batch(range(lo, lo + 10))) for lo in (20, 0, 10)]
    merged = block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)
    assert merged == MergeResult(blocks=[(1, 10), (2, 10), (0, 10)], obsolete=[])
    assert len(blocks.stored) == 3


def test_merge_rewrites_only_overlapping_blocks() -> None:
    blocks = MemoryBlocks()
    staged = [blocks.put_staged(make_batch(v)) for v in ([0, 1, 2], [3, 5, 7], [4, 6], [8, 9])]
    merged = block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)
    assert merged.obsolete == [1, 2]
    assert merged.blocks == [(0, 3), (4, 5), (3, 2)]
    assert blocks.merged_column(merged) == list(range(10))


def test_merge_groups_a_block_within_the_range_of_an_earlier_block() -> None:
    blocks = MemoryBlocks()
    staged = [blocks.put_staged(make_batch(v)) for v in ([0, 100], [1, 2], [50, 60])]
    merged = block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)
    assert blocks.merged_column(merged) == [0, 1, 2, 50, 60, 100]


def test_merge_of_no_blocks_is_empty() -> None:
    blocks = MemoryBlocks()
    assert block_merge.merge_blocks([], ["k"], blocks.read, blocks.write) == MergeResult([], [])


@given(
    st.sets(st.binary(max_size=6), min_size=1, max_size=120),
    st.randoms(use_true_random=False),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 4000),
)
def test_merge_of_any_blocks_is_sorted_and_complete(
    values: set[bytes], random: Any, parts: int, block_rows: int, block_bytes: int
) -> None:
    shuffled = sorted(values)
    random.shuffle(shuffled)
    blocks = MemoryBlocks()
    chunks = [chunk for at in range(parts) if (chunk := shuffled[at::parts])]
    staged = [blocks.put_staged(make_batch(chunk, pa.binary())) for chunk in chunks]
    merged = block_merge.merge_blocks(
        staged, ["k"], blocks.read, blocks.write, block_rows=block_rows, block_bytes=block_bytes
    )
    assert blocks.merged_column(merged) == sorted(values)
    kept = {n for n, _ in merged.blocks}
    assert kept.isdisjoint(merged.obsolete)
    assert all(rows <= block_rows for n, rows in merged.blocks if n >= len(staged))


def test_merge_memory_is_bounded_by_the_open_blocks() -> None:
    blocks = MemoryBlocks()
    chain = [
        sorted({*range(lo, lo + 30_000), lo + 30_005} - {lo + 5})
        for lo in range(0, 600_000, 30_000)
    ]
    staged = [blocks.put_staged(make_batch(v)) for v in chain]
    open_bytes_max = block_merge.open_bytes_max(staged, ["k"])
    assert open_bytes_max < sum(block.size_bytes for block in staged) / 5
    before = pa.total_allocated_bytes()
    allocated: list[int] = []

    def write(data: bytes) -> int:
        allocated.append(pa.total_allocated_bytes() - before)
        return blocks.write(data)

    merged = block_merge.merge_blocks(staged, ["k"], blocks.read, write, block_bytes=200_000)
    assert blocks.merged_column(merged) == sorted({k for v in chain for k in v})
    assert max(allocated) <= 3 * (open_bytes_max + 200_000)


@pytest.mark.parametrize("overlap", ["slight", "complete"])
def test_merge_reads_each_block_once(overlap: str) -> None:
    blocks = MemoryBlocks()
    if overlap == "slight":
        values = [
            sorted({*range(lo, lo + 1000), lo + 1005} - {lo + 5}) for lo in range(0, 50_000, 1000)
        ]
    else:
        values = [list(range(at, 20_000, 10)) for at in range(10)]
    staged = [blocks.put_staged(make_batch(chunk)) for chunk in values]
    reads: list[int] = []

    def read(n: int) -> bytes:
        reads.append(n)
        return blocks.read(n)

    merged = block_merge.merge_blocks(staged, ["k"], read, blocks.write, block_bytes=50_000)
    assert blocks.merged_column(merged) == sorted(k for v in values for k in v)
    assert sorted(reads) == [block.n for block in staged]


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ([[0, 9], [10, 19]], 1),
        ([[0, 9], [9, 19]], 2),
        ([[0, 9], [5, 19], [9, 11], [20, 30]], 3),
        ([[0, 100], [1, 2], [3, 4], [5, 6]], 2),
        ([], 0),
    ],
)
def test_open_bytes_max_counts_blocks_whose_ranges_share_a_key(
    values: list[list[int]], most: int
) -> None:
    blocks = MemoryBlocks()
    staged = [blocks.put_staged(make_batch(chunk)) for chunk in values]
    size = staged[0].size_bytes if staged else 0
    assert block_merge.open_bytes_max(staged, ["k"]) == most * size


def test_merge_refuses_a_key_in_two_blocks() -> None:
    blocks = MemoryBlocks()
    staged = [blocks.put_staged(make_batch([1, 7, 9])), blocks.put_staged(make_batch([2, 7, 8]))]
    with pytest.raises(KeyDuplicate) as caught:
        block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)
    assert caught.value.examples == ["7"]
    assert caught.value.found == 1


def test_merge_refuses_equal_blocks_before_the_first_write() -> None:
    blocks = MemoryBlocks()
    staged = [blocks.put_staged(make_batch(range(2000))) for _ in range(20)]
    with pytest.raises(KeyDuplicate) as caught:
        block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)
    assert len(caught.value.examples) == keys.EXAMPLES_MAX
    assert len(blocks.stored) == 20


def test_merge_refuses_blocks_that_share_a_boundary_key() -> None:
    blocks = MemoryBlocks()
    staged = [blocks.put_staged(make_batch([1, 2])), blocks.put_staged(make_batch([2, 3]))]
    with pytest.raises(KeyDuplicate):
        block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)


def test_merge_splits_blocks_by_block_bytes() -> None:
    blocks = MemoryBlocks()
    texts = ["x" * 10, "y" * 5000, "z" * 10, "w" * 10]
    batches = [
        pa.RecordBatch.from_pydict({"k": [at, at + 2], "t": [texts[at], texts[at + 2]]})
        for at in (0, 1)
    ]
    staged = [blocks.put_staged(batch) for batch in batches]
    merged = block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write, block_bytes=1000)
    assert blocks.merged_column(merged, "t") == texts
    assert [rows for _, rows in merged.blocks] == [1, 1, 2]


def test_encode_block_of_a_slice_stores_only_its_rows() -> None:
    batch = make_batch(range(100_000))
    assert len(block_merge.encode_block(batch.slice(50_000, 10))) < 2000


INSTANTS = [
    dt.datetime(2026, 10, 25, hour, minute, tzinfo=dt.UTC) for hour in (0, 1) for minute in (10, 50)
]


@pytest.mark.parametrize(
    ("kind", "ascending"),
    [
        (pa.int8(), [-128, -1, 0, 127]),
        (pa.string(), ["", "Z", "a", "a\0", "ab", "é", "\uffff", "\U0001f600"]),
        (pa.large_string(), ["", "Z", "a", "ab", "\uffff", "\U0001f600"]),
        (pa.binary(), [b"", b"\x00", b"\x00\x00", b"\x7f", b"\x80", b"\xff"]),
        (pa.date32(), [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(2026, 1, 1)]),
        (
            pa.timestamp("us", "Europe/Berlin"),
            [instant.astimezone(ZoneInfo("Europe/Berlin")) for instant in INSTANTS],
        ),
        (
            pa.decimal128(38, 2),
            [Decimal("-" + "9" * 36), Decimal("-0.01"), Decimal("0.10"), Decimal(7)],
        ),
        (pa.bool_(), [False, True]),
    ],
    ids=str,
)
def test_merge_orders_every_key_type(kind: pa.DataType, ascending: list[Any]) -> None:
    blocks = MemoryBlocks()
    mixed = [ascending[1::2], ascending[0::2]]
    staged = [blocks.put_staged(make_batch(chunk, kind)) for chunk in mixed]
    merged = block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)
    batches = [block_merge.decode_block(blocks.read(n)) for n, _ in merged.blocks]
    column = pa.concat_batches(batches).column("k")
    assert column.equals(pa.array(ascending, kind))


def test_sort_by_key_orders_invalid_utf8_by_bytes() -> None:
    broken = pa.array([b"\xff", b"a", b"\xc3"], pa.binary()).view(pa.string())
    batch = pa.RecordBatch.from_arrays([broken], names=["k"])
    keyed = keys.comparable_columns(block_merge.sort_by_key(batch, ["k"]), ["k"])
    assert [keys.key_at(keyed, row) for row in range(3)] == [(b"a",), (b"\xc3",), (b"\xff",)]


@given(st.sets(st.tuples(st.integers(0, 3), st.text("ab", max_size=2)), min_size=2, max_size=20))
def test_merge_orders_a_composite_key_column_by_column(pairs: set[tuple[int, str]]) -> None:
    blocks = MemoryBlocks()
    key = ["k", "s"]
    shuffled = list(pairs)
    staged = []
    for chunk in (shuffled[0::2], shuffled[1::2]):
        rows = [{"k": number, "s": text} for number, text in chunk]
        schema = pa.schema([("k", pa.int32()), ("s", pa.string())])
        staged.append(blocks.put_staged(pa.RecordBatch.from_pylist(rows, schema=schema), key))
    merged = block_merge.merge_blocks(staged, key, blocks.read, blocks.write)
    both = zip(blocks.merged_column(merged, "k"), blocks.merged_column(merged, "s"), strict=True)
    assert list(both) == sorted(pairs)


def test_key_examples_show_all_columns_of_a_composite_key() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, 1, 1], "b": ["x", "y", "y"]})
    keyed = keys.comparable_columns(batch, ["a", "b"])
    assert not keys.is_ascending(keyed)
    assert keys.key_examples(batch, ["a", "b"], keys.repeated_rows(keyed)) == ["1, y"]


def test_merge_keeps_payload_columns_with_their_key() -> None:
    blocks = MemoryBlocks()
    staged = []
    for chunk in ([0, 2, 4], [1, 3, 5]):
        texts = pa.array([f"t{k % 2}{k}" for k in chunk])
        columns = {
            "k": pa.array(chunk),
            "dictionary": texts.dictionary_encode(),
            "large": texts.cast(pa.large_string()),
            "nested": pa.array([[{"a": k, "b": None}] for k in chunk]),
            "map": pa.array([[("x", k)] for k in chunk], pa.map_(pa.string(), pa.int64())),
            "decimal": pa.array([Decimal(k) for k in chunk]),
            "null": pa.nulls(len(chunk)),
        }
        staged.append(blocks.put_staged(pa.RecordBatch.from_pydict(columns)))
    merged = block_merge.merge_blocks(staged, ["k"], blocks.read, blocks.write)
    assert blocks.merged_column(merged, "k") == list(range(6))
    assert blocks.merged_column(merged, "dictionary") == [f"t{k % 2}{k}" for k in range(6)]
    assert blocks.merged_column(merged, "large") == [f"t{k % 2}{k}" for k in range(6)]
    assert blocks.merged_column(merged, "nested") == [[{"a": k, "b": None}] for k in range(6)]
    assert blocks.merged_column(merged, "map") == [[("x", k)] for k in range(6)]
    assert blocks.merged_column(merged, "decimal") == [Decimal(k) for k in range(6)]
