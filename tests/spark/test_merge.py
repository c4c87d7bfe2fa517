"""Merge: overlapping sorted blocks become disjoint ones, in memory that is bounded by a parameter."""

import datetime as dt
import weakref
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
    st.integers(1, 4000),
    st.integers(1, 40),
)
def test_any_blocks_merge_to_the_sorted_whole_in_any_memory(
    values: set[bytes], random: Any, parts: int, memory_bytes: int, block_rows: int
) -> None:
    shuffled = sorted(values)
    random.shuffle(shuffled)
    blocks = Blocks()
    chunks = [chunk for at in range(parts) if (chunk := shuffled[at::parts])]
    staged = [blocks.stage(batch_of(chunk, pa.binary())) for chunk in chunks]
    merged = merge.merge(
        staged, ["k"], blocks.read, blocks.write, memory_bytes=memory_bytes, block_rows=block_rows
    )
    assert blocks.column(merged) == sorted(values)
    kept = {n for n, _ in merged.blocks}
    assert kept.isdisjoint(merged.spent)
    assert all(rows <= block_rows for n, rows in merged.blocks if n >= len(staged))


def test_a_merge_stays_within_its_memory() -> None:
    blocks = Blocks()
    rows, parts = 400_000, 10
    staged = [blocks.stage(batch_of(range(at, rows, parts))) for at in range(parts)]
    limit = 1 << 20
    assert sum(block.size_bytes for block in staged) > 3 * limit
    before = pa.total_allocated_bytes()
    held: list[int] = []

    def write(data: bytes) -> int:
        held.append(pa.total_allocated_bytes() - before)
        return blocks.write(data)

    merged = merge.merge(staged, ["k"], blocks.read, write, memory_bytes=limit)
    assert blocks.column(merged) == list(range(rows))
    assert max(held) <= limit


def test_what_does_not_fit_into_memory_is_read_one_block_at_a_time() -> None:
    class Loan(bytearray):
        __hash__ = object.__hash__
        """Unlike bytes, it can be watched."""

    blocks = Blocks()
    staged = [blocks.stage(batch_of(range(at, 20_000, 10))) for at in range(10)]
    alive: weakref.WeakSet[Loan] = weakref.WeakSet()
    most = 0

    def read(n: int) -> memoryview:
        nonlocal most
        loan = Loan(blocks.read(n))
        alive.add(loan)
        most = max(most, len(alive))
        return memoryview(loan)

    merged = merge.merge(staged, ["k"], read, blocks.write, memory_bytes=100_000)
    assert blocks.column(merged) == list(range(20_000))
    assert most <= 2


def test_a_chain_of_slight_overlaps_is_not_read_over_and_over() -> None:
    blocks = Blocks()
    chain = [[*range(lo, lo + 1000), lo + 1005] for lo in range(0, 50_000, 1000)]
    staged = [blocks.stage(batch_of(sorted(set(v) - {v[5]} if v[0] else v))) for v in chain]
    reads: list[int] = []

    def read(n: int) -> bytes:
        reads.append(n)
        return blocks.read(n)

    merged = merge.merge(staged, ["k"], read, blocks.write, memory_bytes=100_000)
    assert blocks.column(merged) == sorted({k for v in chain for k in v})
    assert len(merged.spent) == len(staged)
    assert len(reads) < 5 * len(staged)


@pytest.mark.parametrize("memory_bytes", [1, 2000, 1 << 20])
def test_a_key_in_two_blocks_is_a_duplicate_in_any_memory(memory_bytes: int) -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of([1, 7, 9])), blocks.stage(batch_of([2, 7, 8]))]
    with pytest.raises(KeyDuplicate) as caught:
        merge.merge(staged, ["k"], blocks.read, blocks.write, memory_bytes=memory_bytes)
    assert caught.value.examples == ["7"]
    assert caught.value.found == 1


def test_the_same_rows_in_every_block_are_found_without_holding_them_all() -> None:
    blocks = Blocks()
    staged = [blocks.stage(batch_of(range(2000))) for _ in range(20)]
    with pytest.raises(KeyDuplicate) as caught:
        merge.merge(staged, ["k"], blocks.read, blocks.write, memory_bytes=20_000)
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
    for memory_bytes in (1, 1 << 20):
        merged = merge.merge(staged, ["k"], blocks.read, blocks.write, memory_bytes=memory_bytes)
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
    merged = merge.merge(staged, key, blocks.read, blocks.write, memory_bytes=200)
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
    for memory_bytes in (300, 1 << 20):
        merged = merge.merge(staged, ["k"], blocks.read, blocks.write, memory_bytes=memory_bytes)
        assert blocks.column(merged, "k") == list(range(6))
        assert blocks.column(merged, "dictionary") == [f"t{k % 2}{k}" for k in range(6)]
        assert blocks.column(merged, "large") == [f"t{k % 2}{k}" for k in range(6)]
        assert blocks.column(merged, "nested") == [[{"a": k, "b": None}] for k in range(6)]
        assert blocks.column(merged, "map") == [[("x", k)] for k in range(6)]
        assert blocks.column(merged, "decimal") == [Decimal(k) for k in range(6)]
