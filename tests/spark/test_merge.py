"""Merge: overlapping sorted blocks become disjoint ones, in memory that is bounded by a parameter."""

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark import keys, merge
from holdfast.spark.keys import KeyDuplicate
from holdfast.spark.merge import Merged, Staged


class Blocks:
    """What the ledger service does for a merge: blocks by number, in memory."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []

    def read(self, n: int) -> bytes:
        return self.stored[n]

    def write(self, data: bytes) -> int:
        self.stored.append(data)
        return len(self.stored) - 1

    def stage(self, batch: pa.RecordBatch, key: Sequence[str] = ("k",)) -> Staged:
        batch = merge.ordered(batch, key)
        data = merge.encode(batch)
        ends = batch.select(list(key)).take(pa.array([0, batch.num_rows - 1]))
        return Staged(self.write(data), batch.num_rows, len(data), merge.encode(ends))

    def column(self, merged: Merged, name: str = "k") -> list[Any]:
        batches = [merge.decode(self.stored[n]) for n, _ in merged.blocks]
        assert [batch.num_rows for batch in batches] == [rows for _, rows in merged.blocks]
        return [value for batch in batches for value in batch.column(name).to_pylist()]


def batch_of(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.RecordBatch:
    kind = kind or pa.int64()
    return pa.RecordBatch.from_arrays([pa.array(values, kind)], names=["k"])


def test_blocks_that_overlap_no_other_are_kept_under_their_number() -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of(range(lo, lo + 10))) for lo in (20, 0, 10)]
    merged = merge.merge(staged, ["k"], blocks.read, blocks.write)
    assert merged == Merged(blocks=[(1, 10), (2, 10), (0, 10)], spent=[])
    assert len(blocks.stored) == 3


def test_only_the_blocks_that_overlap_are_rewritten() -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of(v)) for v in ([0, 1, 2], [3, 5, 7], [4, 6], [8, 9])]
    merged = merge.merge(staged, ["k"], blocks.read, blocks.write)
    assert merged.spent == [1, 2]
    assert merged.blocks == [(0, 3), (4, 5), (3, 2)]
    assert blocks.column(merged) == list(range(10))


def test_a_block_inside_the_reach_of_an_earlier_one_belongs_to_its_group() -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of(v)) for v in ([0, 100], [1, 2], [50, 60])]
    merged = merge.merge(staged, ["k"], blocks.read, blocks.write)
    assert blocks.column(merged) == [0, 1, 2, 50, 60, 100]


def test_nothing_staged_is_nothing_merged() -> None:
    blocks = Blocks()
    assert merge.merge([], ["k"], blocks.read, blocks.write) == Merged([], [])


@given(
    st.sets(st.binary(max_size=6), min_size=1, max_size=120),
    st.randoms(use_true_random=False),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 4000),
)
def test_any_blocks_merge_to_the_sorted_whole(
    values: set[bytes], random: Any, parts: int, block_rows: int, block_bytes: int
) -> None:
    shuffled = sorted(values)
    random.shuffle(shuffled)
    blocks = Blocks()
    chunks = [chunk for at in range(parts) if (chunk := shuffled[at::parts])]
    staged = [blocks.stage(batch_of(chunk, pa.binary())) for chunk in chunks]
    merged = merge.merge(
        staged, ["k"], blocks.read, blocks.write, block_rows=block_rows, block_bytes=block_bytes
    )
    assert blocks.column(merged) == sorted(values)
    kept = {n for n, _ in merged.blocks}
    assert kept.isdisjoint(merged.spent)
    assert all(rows <= block_rows for n, rows in merged.blocks if n >= len(staged))


def test_a_merge_holds_the_open_blocks_and_no_more() -> None:
    blocks = Blocks()
    chain = [
        sorted({*range(lo, lo + 30_000), lo + 30_005} - {lo + 5})
        for lo in range(0, 600_000, 30_000)
    ]
    staged = [blocks.stage(batch_of(v)) for v in chain]
    most = merge.open_bytes_max(staged, ["k"])
    assert most < sum(block.size_bytes for block in staged) / 5
    before = pa.total_allocated_bytes()
    held: list[int] = []

    def write(data: bytes) -> int:
        held.append(pa.total_allocated_bytes() - before)
        return blocks.write(data)

    merged = merge.merge(staged, ["k"], blocks.read, write, block_bytes=200_000)
    assert blocks.column(merged) == sorted({k for v in chain for k in v})
    assert max(held) <= 3 * (most + 200_000)


@pytest.mark.parametrize("overlap", ["slight", "complete"])
def test_a_merge_reads_every_block_once(overlap: str) -> None:
    blocks = Blocks()
    if overlap == "slight":
        values = [
            sorted({*range(lo, lo + 1000), lo + 1005} - {lo + 5}) for lo in range(0, 50_000, 1000)
        ]
    else:
        values = [list(range(at, 20_000, 10)) for at in range(10)]
    staged = [blocks.stage(batch_of(one)) for one in values]
    reads: list[int] = []

    def read(n: int) -> bytes:
        reads.append(n)
        return blocks.read(n)

    merged = merge.merge(staged, ["k"], read, blocks.write, block_bytes=50_000)
    assert blocks.column(merged) == sorted(k for v in values for k in v)
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
def test_open_blocks_are_those_whose_ranges_share_a_key(values: list[list[int]], most: int) -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of(one)) for one in values]
    size = staged[0].size_bytes if staged else 0
    assert merge.open_bytes_max(staged, ["k"]) == most * size


def test_a_key_in_two_blocks_is_a_duplicate() -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of([1, 7, 9])), blocks.stage(batch_of([2, 7, 8]))]
    with pytest.raises(KeyDuplicate) as caught:
        merge.merge(staged, ["k"], blocks.read, blocks.write)
    assert caught.value.examples == ["7"]
    assert caught.value.found == 1


def test_the_same_rows_in_every_block_are_found_before_anything_is_written() -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of(range(2000))) for _ in range(20)]
    with pytest.raises(KeyDuplicate) as caught:
        merge.merge(staged, ["k"], blocks.read, blocks.write)
    assert len(caught.value.examples) == keys.EXAMPLES_MAX
    assert len(blocks.stored) == 20


def test_blocks_that_touch_in_one_key_hold_a_duplicate() -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of([1, 2])), blocks.stage(batch_of([2, 3]))]
    with pytest.raises(KeyDuplicate):
        merge.merge(staged, ["k"], blocks.read, blocks.write)


def test_blocks_are_cut_by_bytes_and_a_huge_row_is_a_block() -> None:
    blocks = Blocks()
    texts = ["x" * 10, "y" * 5000, "z" * 10, "w" * 10]
    batches = [
        pa.RecordBatch.from_pydict({"k": [at, at + 2], "t": [texts[at], texts[at + 2]]})
        for at in (0, 1)
    ]
    staged = [blocks.stage(batch) for batch in batches]
    merged = merge.merge(staged, ["k"], blocks.read, blocks.write, block_bytes=1000)
    assert blocks.column(merged, "t") == texts
    assert [rows for _, rows in merged.blocks] == [1, 1, 2]


def test_a_slice_is_stored_without_the_rest_of_its_buffers() -> None:
    batch = batch_of(range(100_000))
    assert len(merge.encode(batch.slice(50_000, 10))) < 2000


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
def test_every_type_of_key_has_its_stated_order(kind: pa.DataType, ascending: list[Any]) -> None:
    blocks = Blocks()
    mixed = [ascending[1::2], ascending[0::2]]
    staged = [blocks.stage(batch_of(chunk, kind)) for chunk in mixed]
    merged = merge.merge(staged, ["k"], blocks.read, blocks.write)
    batches = [merge.decode(blocks.read(n)) for n, _ in merged.blocks]
    column = pa.concat_batches(batches).column("k")
    assert column.equals(pa.array(ascending, kind))


def test_text_that_is_no_utf8_is_ordered_by_its_bytes() -> None:
    broken = pa.array([b"\xff", b"a", b"\xc3"], pa.binary()).view(pa.string())
    batch = pa.RecordBatch.from_arrays([broken], names=["k"])
    keyed = keys.columns(merge.ordered(batch, ["k"]), ["k"])
    assert [keys.at(keyed, row) for row in range(3)] == [(b"a",), (b"\xc3",), (b"\xff",)]


@given(st.sets(st.tuples(st.integers(0, 3), st.text("ab", max_size=2)), min_size=2, max_size=20))
def test_a_composite_key_is_ordered_column_by_column(pairs: set[tuple[int, str]]) -> None:
    blocks = Blocks()
    key = ["k", "s"]
    shuffled = list(pairs)
    staged = []
    for chunk in (shuffled[0::2], shuffled[1::2]):
        rows = [{"k": number, "s": text} for number, text in chunk]
        schema = pa.schema([("k", pa.int32()), ("s", pa.string())])
        staged.append(blocks.stage(pa.RecordBatch.from_pylist(rows, schema=schema), key))
    merged = merge.merge(staged, key, blocks.read, blocks.write)
    both = zip(blocks.column(merged, "k"), blocks.column(merged, "s"), strict=True)
    assert list(both) == sorted(pairs)


def test_a_composite_duplicate_shows_all_of_its_key() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, 1, 1], "b": ["x", "y", "y"]})
    keyed = keys.columns(batch, ["a", "b"])
    assert not keys.ascends(keyed)
    assert keys.examples(batch, ["a", "b"], keys.repeats(keyed)) == ["1, y"]


def test_payload_columns_of_any_type_follow_their_key() -> None:
    blocks = Blocks()
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
        staged.append(blocks.stage(pa.RecordBatch.from_pydict(columns)))
    merged = merge.merge(staged, ["k"], blocks.read, blocks.write)
    assert blocks.column(merged, "k") == list(range(6))
    assert blocks.column(merged, "dictionary") == [f"t{k % 2}{k}" for k in range(6)]
    assert blocks.column(merged, "large") == [f"t{k % 2}{k}" for k in range(6)]
    assert blocks.column(merged, "nested") == [[{"a": k, "b": None}] for k in range(6)]
    assert blocks.column(merged, "map") == [[("x", k)] for k in range(6)]
    assert blocks.column(merged, "decimal") == [Decimal(k) for k in range(6)]
