"""Outcome bundles: the index rows with which an executor reads outcomes of an interval from the
spool.

    make_bundle(store, record, lo, hi)    on the driver's side: the store rows that name the objects
    open_bundle(data)                     on an executor: `RunOutcomes` over these rows; data comes from the spool
    outcome_frame(spark, store, record)   a DataFrame; its tasks read one bundle after the other

A bundle has a few hundred bytes per report and contains no results. For adopted rows it includes rows of
the older runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec
import pyarrow as pa

from holdfast import codec
from holdfast.ledger import runs
from holdfast.ledger.lineage import RunLineage
from holdfast.ledger.states import RowState
from holdfast.spark.reused_rows import read_reused_rows
from holdfast.spark.run_data import RunInput, RunOutcomes, encode_schema
from holdfast.spark.sinks.object_store import keep_options, options_for
from holdfast.spark.spool import chunk_range
from holdfast.spark.spool_access import SpoolAccess
from holdfast.store import open as open_store
from holdfast.store.api import Store, Txn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Rows that an executor reads at a time.
READ_ROWS = 65_536


class OutcomeBundle(msgspec.Struct, frozen=True):
    """Rows of a store. It contains no credentials: only functions carry them."""

    run_id: str
    lo: int
    hi: int
    rows: list[tuple[bytes, bytes]]


def can_bundle(store: Store, record: runs.RunRecord) -> bool:
    """Whether all data of the outcomes of a run is in spools."""
    run_ids = {*store.read(runs.list_pinned_runs, record.run_id), record.blocks_run}
    older = [store.read(runs.get_record, run_id) for run_id in run_ids]
    return bool(record.spool) and all(one is not None and one.spool for one in older)


def make_bundle(
    store: Store, record: runs.RunRecord, lo: int, hi: int, *, successes_only: bool = False
) -> bytes:
    """Collect the store rows for the outcomes of [lo, hi), which must be final and durable.
    `successes_only` omits failed and skipped rows, since their texts may be long.
    """
    rows: dict[bytes, bytes] = {}
    _collect_rows(store, record, [(lo, hi)], rows, successes_only=successes_only)
    return msgspec.msgpack.encode(OutcomeBundle(record.run_id, lo, hi, sorted(rows.items())))


def open_bundle(data: bytes | memoryview) -> tuple[RunOutcomes, int, int]:
    """Open a bundle. Return the outcomes and the interval [lo, hi)."""
    bundle = msgspec.msgpack.decode(data, type=OutcomeBundle)
    store = open_store("memory:")
    store.transact(_put_rows, bundle.rows)
    record = store.read(runs.get_existing, bundle.run_id)
    return RunOutcomes(store, record, RunInput(store, record)), bundle.lo, bundle.hi


def read_bundle(
    data: bytes | memoryview, access: SpoolAccess | None, *, meta: bool
) -> tuple[pa.Table, int, str]:
    """Read a bundle in a task of the lazy form. Return its rows, the number of failures and an
    example error.
    """
    if access is not None:
        keep_options(access.url, access.options or None)
    outcomes, lo, hi = open_bundle(data)
    failed = outcomes.resultless_rows(lo, hi, RowState.TERMINAL_FAIL)
    example = failed.column("_error")[0].as_py() if failed.num_rows else ""
    table = outcomes.all_rows(lo, hi) if meta else outcomes.successes(lo, hi)
    return table, failed.num_rows, example


class OutcomeReader(msgspec.Struct, frozen=True):
    """The body of a job: each input row is a bundle. It yields the bundle's rows in one state."""

    schema: bytes
    rows: RowState | Literal["reused"]
    # Storage options (credentials) by URL.
    options: dict[str, dict[str, str]]

    def __repr__(self) -> str:
        return "ReadOutcomes()"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        for url, options in self.options.items():
            keep_options(url, options)
        for batch in batches:
            for one in batch.column(0):
                outcomes, lo, hi = open_bundle(one.as_py())
                while lo < hi:
                    upto = min(lo + READ_ROWS, hi)
                    found = read_rows(outcomes, self.rows, lo, upto)
                    yield from found.cast(schema).to_batches()
                    lo = upto


def read_rows(
    outcomes: RunOutcomes, rows: RowState | Literal["reused"], lo: int, hi: int
) -> pa.Table:
    """Return the rows of [lo, hi) in a state, or with an adopted outcome, in the form for users."""
    if rows == "reused":
        return read_reused_rows(outcomes.store, outcomes.record, lo, hi)
    state = rows
    if state is RowState.TERMINAL_SUCCESS:
        return outcomes.successes(lo, hi)
    if state is RowState.TERMINAL_FAIL:
        return outcomes.failed(lo, hi)
    return outcomes.resultless_rows(lo, hi, state)


def outcome_frame(
    spark: SparkSession, store: Store, record: runs.RunRecord, rows: RowState | Literal["reused"]
) -> DataFrame:
    """Return a DataFrame of the rows of a run in a state, or with an adopted outcome, in key order.
    Executors read it from the spool. The driver sends only bundles, and only for pages with such
    rows.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from holdfast.spark.spark_jobs import use_driver_python

    outcomes = RunOutcomes(store, record, RunInput(store, record))
    schema = read_rows(outcomes, rows, 0, 0).schema
    page_rows = record.policy.page_rows
    pages: Iterable[tuple[int, int]] = (
        (lo, min(lo + page_rows, record.size)) for lo in range(0, record.size, page_rows)
    )
    if isinstance(rows, RowState) and rows is not RowState.TERMINAL_SUCCESS:
        pages = outcomes.pages_with(rows)
    good = rows is RowState.TERMINAL_SUCCESS
    bundles = [make_bundle(store, record, lo, hi, successes_only=good) for lo, hi in pages]
    spark_schema = from_arrow_schema(schema)
    if not bundles:
        return spark.createDataFrame([], spark_schema)
    source = spark.createDataFrame(pa.table({"bundle": pa.array(bundles, pa.binary())}))
    with use_driver_python(spark):
        body = OutcomeReader(encode_schema(schema), rows, options_for(record.spool))
        return source.mapInArrow(body, spark_schema)


def _collect_rows(
    store: Store,
    record: runs.RunRecord,
    ranges: list[tuple[int, int]],
    rows: dict[bytes, bytes],
    *,
    with_input: bool = True,
    successes_only: bool = False,
) -> None:
    """Add to `rows` the store rows from which the outcomes of these ranges can be read: run records, blocks, pages."""
    for run_id in {record.run_id, record.blocks_run}:
        one = store.read(runs.get_existing, run_id)
        key, value = runs.record_row(one)
        rows[key] = value
    if with_input:
        numbers = [n for n, _ in record.blocks]
        for at, _ in RunInput(store, record).by_block(ranges):
            n = numbers[at]
            block = store.read(runs.get_block, record.blocks_run, n)
            if block is not None:
                rows[runs.block_key(record.blocks_run, n)] = bytes(block)
    page_rows = record.policy.page_rows
    ancestry = RunLineage(store, record)
    donors: dict[str, list[tuple[int, int]]] = {}
    for lo, hi in ranges:
        for page in range(lo // page_rows, (hi - 1) // page_rows + 1):
            for height, chunk in store.read(runs.list_chunks, record.run_id, page):
                if successes_only:
                    if chunk.hi <= chunk.lo:
                        continue
                    chunk = msgspec.structs.replace(chunk, resultless=[], attempts=[])
                first, last = chunk_range(chunk)
                if first < hi and last > lo:
                    for key, value in runs.chunk_rows(record.run_id, page, height, chunk):
                        rows[key] = value
            if record.base_run:
                lineage = codec.pack(ancestry.page(page))
                rows[runs.lineage_key(record.run_id, page)] = lineage
        for there in ancestry.adopted(lo, hi):
            upto = there.from_lo + there.hi - there.lo
            donors.setdefault(there.run, []).append((there.from_lo, upto))
    for run_id, source_ranges in donors.items():
        # Only outcomes: the input of such a run may be deleted.
        older = store.read(runs.get_existing, run_id)
        _collect_rows(
            store, older, source_ranges, rows, with_input=False, successes_only=successes_only
        )


def _put_rows(txn: Txn, rows: list[tuple[bytes, bytes]]) -> None:
    for key, value in rows:
        txn.put(key, value)
