"""Input and outcomes of a run, read by seq from a store in memory."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast import codec
from holdfast.clock import SimClock
from holdfast.ledger import runs
from holdfast.ledger.classes import Policy
from holdfast.ledger.states import State
from holdfast.spark.journal import SLICES_MAX, Input, Outcomes, schema_bytes
from holdfast.spark.merge import encode
from holdfast.store.api import Store, Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend

MODULES = ("holdfast.spark.journal",)

BLOCK_ROWS, BLOCKS, PAGE_ROWS = 1000, 7, 300
ROWS = BLOCK_ROWS * BLOCKS
RESULT = pa.schema([("y", pa.int64())])


def block(lo: int) -> bytes:
    numbers = range(lo, lo + BLOCK_ROWS)
    return encode(
        pa.RecordBatch.from_pydict({"k": [f"k{n:05}" for n in numbers], "n": list(numbers)})
    )


def filled(others: dict[int, State]) -> tuple[Store, runs.RunRecord]:
    """A run whose rows ended so, one chunk for each page."""
    store = LocalStore("memory:", MemoryBackend(), SimClock())
    record = runs.RunRecord(
        run_id="r-1",
        name="job",
        size=ROWS,
        key=["k"],
        blocks=[(n, BLOCK_ROWS) for n in range(BLOCKS)],
        input_schema=schema_bytes(pa.schema([("k", pa.string()), ("n", pa.int64())])),
        result_schema=schema_bytes(RESULT),
        policy=Policy(page_rows=PAGE_ROWS),
    )

    def write(txn: Txn) -> None:
        runs.create(txn, record)
        for n in range(BLOCKS):
            txn.put(runs.block_key("r-1", n), block(n * BLOCK_ROWS))
        pages: dict[int, list[runs.Other]] = {}
        for seq, state in others.items():
            told = runs.Other(seq, int(state), 2, 1, f"error of {seq}")
            pages.setdefault(seq // PAGE_ROWS, []).append(told)
        for page, told_of in pages.items():
            chunk = runs.Chunk(0, b"", b"", told_of, [], 0.0, 0, [])
            txn.put(runs.chunk_key("r-1", page, page + 1), codec.pack(chunk))

    store.transact(write)
    return store, record


@pytest.mark.parametrize("step", [1, 2, 7, 900])
def test_failed_rows_come_in_order_with_their_keys(step: int) -> None:
    """Many pieces of a block are picked, few are sliced; both give the same rows."""
    assert BLOCK_ROWS // 2 > SLICES_MAX > BLOCK_ROWS // 900
    failed = list(range(0, ROWS, step))
    skipped = [seq for seq in range(3, ROWS, 11) if seq not in set(failed)]
    ended = dict.fromkeys(reversed(failed), State.TERMINAL_FAIL)
    ended |= dict.fromkeys(skipped, State.TERMINAL_SKIP)
    store, record = filled(ended)
    outcomes = Outcomes(store, record, Input(store, record))
    table = outcomes.failed(0, ROWS)
    assert table.column("_seq").to_pylist() == failed
    assert table.column("k").to_pylist() == [f"k{seq:05}" for seq in failed]
    assert table.column("_error").to_pylist() == [f"error of {seq}" for seq in failed]
    assert set(table.column("_state").to_pylist()) == {"TERMINAL_FAIL"}
    assert outcomes.skipped(0, ROWS).column("_seq").to_pylist() == skipped
    inner = outcomes.records(150, 650).column("_seq").to_pylist()
    assert inner == sorted(seq for seq in ended if 150 <= seq < 650)


def test_a_run_without_failures_has_an_empty_table_of_the_same_columns() -> None:
    store, record = filled({})
    empty = Outcomes(store, record, Input(store, record)).failed(0, ROWS)
    assert empty.num_rows == 0
    store, record = filled({5: State.TERMINAL_FAIL})
    assert Outcomes(store, record, Input(store, record)).failed(0, ROWS).schema == empty.schema


def test_rows_are_found_across_the_ends_of_blocks() -> None:
    store, record = filled({})
    source = Input(store, record)
    ranges = [(998, 1003), (1999, 2000), (2000, 2001), (5000, 7000)]
    expected = [n for lo, hi in ranges for n in range(lo, hi)]
    assert source.rows(ranges, ["n"]).column("n").to_pylist() == expected
    assert source.rows([], ["n"]).schema.names == ["n"]
