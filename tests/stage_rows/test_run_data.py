"""Input and outcomes of a run, read by seq from a memory store."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast import codec
from holdfast.clock import SimClock
from holdfast.ledger import runs
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.states import RowState
from holdfast.spark.block_merge import encode_block
from holdfast.spark.run_data import SLICES_MAX, RunInput, RunOutcomes, encode_schema
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

MODULES = ("holdfast.spark.run_data",)

BLOCK_ROWS, BLOCKS, PAGE_ROWS = 1000, 7, 300
ROWS = BLOCK_ROWS * BLOCKS
RESULT = pa.schema([("y", pa.int64())])


def block(lo: int) -> bytes:
    numbers = range(lo, lo + BLOCK_ROWS)
    return encode_block(
        pa.RecordBatch.from_pydict({"k": [f"k{n:05}" for n in numbers], "n": list(numbers)})
    )


def store_with_outcomes(state_by_seq: dict[int, RowState]) -> tuple[Store, runs.RunRecord]:
    """A run whose rows ended in these states, with one chunk per page."""
    store = InProcessStore("memory:", MemoryBackend(), SimClock())
    record = runs.RunRecord(
        run_id="r-1",
        name="job",
        size=ROWS,
        key=["k"],
        blocks=[(n, BLOCK_ROWS) for n in range(BLOCKS)],
        input_schema=encode_schema(pa.schema([("k", pa.string()), ("n", pa.int64())])),
        result_schema=encode_schema(RESULT),
        policy=RunPolicy(page_rows=PAGE_ROWS),
    )

    def write(txn: Txn) -> None:
        runs.create(txn, record)
        for n in range(BLOCKS):
            txn.put(runs.block_key("r-1", n), block(n * BLOCK_ROWS))
        pages: dict[int, list[runs.ResultlessRow]] = {}
        for seq, state in state_by_seq.items():
            resultless_row = runs.ResultlessRow(seq, int(state), 2, 1, f"error of {seq}")
            pages.setdefault(seq // PAGE_ROWS, []).append(resultless_row)
        for page, resultless_rows in pages.items():
            chunk = runs.OutcomeChunk(
                lo=0,
                seqs=b"",
                batch=b"",
                resultless=resultless_rows,
                attempts=[],
                cost=0.0,
                calls=0,
                spent_us_log2=[],
            )
            txn.put(runs.chunk_key("r-1", page, page + 1), codec.pack(chunk))

    store.transact(write)
    return store, record


@pytest.mark.parametrize("step", [1, 2, 7, 900])
def test_failed_returns_rows_in_order_with_their_keys(step: int) -> None:
    """The reader slices a block for few ranges and gathers rows for many. Both return the same rows."""
    assert BLOCK_ROWS // 2 > SLICES_MAX > BLOCK_ROWS // 900
    failed = list(range(0, ROWS, step))
    skipped = [seq for seq in range(3, ROWS, 11) if seq not in set(failed)]
    ended = dict.fromkeys(reversed(failed), RowState.TERMINAL_FAIL)
    ended |= dict.fromkeys(skipped, RowState.TERMINAL_SKIP)
    store, record = store_with_outcomes(ended)
    outcomes = RunOutcomes(store, record, RunInput(store, record))
    table = outcomes.failed(0, ROWS)
    assert table.column("_seq").to_pylist() == failed
    assert table.column("k").to_pylist() == [f"k{seq:05}" for seq in failed]
    assert table.column("_error").to_pylist() == [f"error of {seq}" for seq in failed]
    assert set(table.column("_state").to_pylist()) == {"TERMINAL_FAIL"}
    assert outcomes.skipped(0, ROWS).column("_seq").to_pylist() == skipped
    inner = outcomes.resultless_rows(150, 650).column("_seq").to_pylist()
    assert inner == sorted(seq for seq in ended if 150 <= seq < 650)


def test_failed_of_a_run_without_failures_is_an_empty_table() -> None:
    store, record = store_with_outcomes({})
    empty = RunOutcomes(store, record, RunInput(store, record)).failed(0, ROWS)
    assert empty.num_rows == 0
    store, record = store_with_outcomes({5: RowState.TERMINAL_FAIL})
    assert (
        RunOutcomes(store, record, RunInput(store, record)).failed(0, ROWS).schema == empty.schema
    )


def test_input_rows_are_read_across_block_ends() -> None:
    store, record = store_with_outcomes({})
    source = RunInput(store, record)
    ranges = [(998, 1003), (1999, 2000), (2000, 2001), (5000, 7000)]
    expected = [n for lo, hi in ranges for n in range(lo, hi)]
    assert source.rows(ranges, ["n"]).column("n").to_pylist() == expected
    assert source.rows([], ["n"]).schema.names == ["n"]
