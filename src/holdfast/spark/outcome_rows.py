"""Outcomes of an interval, read where they are wanted: on an executor, from the spool.

    bundle(store, record, lo, hi)    on the driver's side: the rows of the store that name the objects
    opened(bundle)                   on an executor: `Outcomes` over these rows; objects come from the spool
    frame_of(spark, store, record)   a DataFrame whose tasks read one bundle after the other

A bundle is a few hundred bytes for each report and has no results in it. Rows that older runs hold are named by
rows of these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec
import pyarrow as pa

from holdfast import codec
from holdfast.ledger import runs
from holdfast.ledger.lineage import Ancestry
from holdfast.ledger.states import State
from holdfast.spark.journal import Input, Outcomes, schema_bytes
from holdfast.spark.reused_rows import reused_between
from holdfast.spark.sinks.object_store import keep_options, options_for
from holdfast.spark.spool import extent
from holdfast.spark.spool_access import SpoolAccess
from holdfast.store import open as open_store
from holdfast.store.api import Store, Txn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Read at a time on an executor.
READ_ROWS = 65_536


class Bundle(msgspec.Struct, frozen=True):
    """Rows of a store. No credentials: they travel with functions alone."""

    run_id: str
    lo: int
    hi: int
    rows: list[tuple[bytes, bytes]]


def is_bundled(store: Store, record: runs.RunRecord) -> bool:
    """Whether everything that the outcomes of a run are made of is in spools."""
    needed = {*store.read(runs.rests_on, record.run_id), record.blocks_run}
    older = [store.read(runs.get, run_id) for run_id in needed]
    return bool(record.spool) and all(one is not None and one.spool for one in older)


def bundle(
    store: Store, record: runs.RunRecord, lo: int, hi: int, *, successes_only: bool = False
) -> bytes:
    """What an executor needs for the outcomes of [lo, hi), which is final and durable. `successes_only`: without rows
    that failed or were skipped, whose texts may be long."""
    rows: dict[bytes, bytes] = {}
    _collect(store, record, [(lo, hi)], rows, successes_only=successes_only)
    return msgspec.msgpack.encode(Bundle(record.run_id, lo, hi, sorted(rows.items())))


def opened(data: bytes | memoryview) -> tuple[Outcomes, int, int]:
    """Outcomes to read [lo, hi) of."""
    found = msgspec.msgpack.decode(data, type=Bundle)
    store = open_store("memory:")
    store.transact(_put, found.rows)
    record = store.read(runs.the, found.run_id)
    return Outcomes(store, record, Input(store, record)), found.lo, found.hi


def read_lazily(
    data: bytes | memoryview, access: SpoolAccess | None, *, meta: bool
) -> tuple[pa.Table, int, str]:
    """For a task of the lazy form: the rows of a bundle, how many failed, and the error of one of them."""
    if access is not None:
        keep_options(access.url, access.options or None)
    outcomes, lo, hi = opened(data)
    failed = outcomes.records(lo, hi, State.TERMINAL_FAIL)
    example = failed.column("_error")[0].as_py() if failed.num_rows else ""
    table = outcomes.all(lo, hi) if meta else outcomes.successes(lo, hi)
    return table, failed.num_rows, example


class ReadOutcomes(msgspec.Struct, frozen=True):
    """The body of a job: each input row is a bundle, and its rows in a state are yielded."""

    schema: bytes
    rows: State | Literal["reused"]
    # Credentials by URL.
    options: dict[str, dict[str, str]]

    def __repr__(self) -> str:
        return "ReadOutcomes()"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        for url, options in self.options.items():
            keep_options(url, options)
        for batch in batches:
            for one in batch.column(0):
                outcomes, lo, hi = opened(one.as_py())
                while lo < hi:
                    upto = min(lo + READ_ROWS, hi)
                    found = read_rows(outcomes, self.rows, lo, upto)
                    yield from found.cast(schema).to_batches()
                    lo = upto


def read_rows(outcomes: Outcomes, rows: State | Literal["reused"], lo: int, hi: int) -> pa.Table:
    """The rows of [lo, hi) that ended in a state, or that an earlier run had, as users see them."""
    if rows == "reused":
        return reused_between(outcomes.store, outcomes.record, lo, hi)
    state = rows
    if state is State.TERMINAL_SUCCESS:
        return outcomes.successes(lo, hi)
    if state is State.TERMINAL_FAIL:
        return outcomes.failed(lo, hi)
    return outcomes.records(lo, hi, state)


def frame_of(
    spark: SparkSession, store: Store, record: runs.RunRecord, rows: State | Literal["reused"]
) -> DataFrame:
    """A DataFrame of the rows of a run that ended in a state, or that an earlier run had, in the order of the key.
    Executors read it from the spool; the driver sends what names the objects, for pages alone that have such rows."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from holdfast.spark.jobs import own_python

    outcomes = Outcomes(store, record, Input(store, record))
    schema = read_rows(outcomes, rows, 0, 0).schema
    page_rows = record.policy.page_rows
    pages: Iterable[tuple[int, int]] = (
        (lo, min(lo + page_rows, record.size)) for lo in range(0, record.size, page_rows)
    )
    if isinstance(rows, State) and rows is not State.TERMINAL_SUCCESS:
        pages = outcomes.pages_with(rows)
    good = rows is State.TERMINAL_SUCCESS
    bundles = [bundle(store, record, lo, hi, successes_only=good) for lo, hi in pages]
    told = from_arrow_schema(schema)
    if not bundles:
        return spark.createDataFrame([], told)
    source = spark.createDataFrame(pa.table({"bundle": pa.array(bundles, pa.binary())}))
    with own_python(spark):
        body = ReadOutcomes(schema_bytes(schema), rows, options_for(record.spool))
        return source.mapInArrow(body, told)


def _collect(
    store: Store,
    record: runs.RunRecord,
    ranges: list[tuple[int, int]],
    rows: dict[bytes, bytes],
    *,
    with_input: bool = True,
    successes_only: bool = False,
) -> None:
    """Add the rows of the store that lead to the outcomes of these ranges."""
    for run_id in {record.run_id, record.blocks_run}:
        one = store.read(runs.the, run_id)
        key, value = runs.record_row(one)
        rows[key] = value
    if with_input:
        numbers = [n for n, _ in record.blocks]
        for at, _ in Input(store, record).by_block(ranges):
            n = numbers[at]
            block = store.read(runs.block, record.blocks_run, n)
            if block is not None:
                rows[runs.block_key(record.blocks_run, n)] = bytes(block)
    page_rows = record.policy.page_rows
    ancestry = Ancestry(store, record)
    donors: dict[str, list[tuple[int, int]]] = {}
    for lo, hi in ranges:
        for page in range(lo // page_rows, (hi - 1) // page_rows + 1):
            for height, chunk in store.read(runs.chunks, record.run_id, page):
                if successes_only:
                    if chunk.hi <= chunk.lo:
                        continue
                    chunk = msgspec.structs.replace(chunk, others=[], attempts=[])
                first, last = extent(chunk)
                if first < hi and last > lo:
                    for key, value in runs.chunk_rows(record.run_id, page, height, chunk):
                        rows[key] = value
            if record.base_run:
                lineage = codec.pack(ancestry.page(page))
                rows[runs.lineage_key(record.run_id, page)] = lineage
        for there in ancestry.adopted(lo, hi):
            upto = there.from_lo + there.hi - there.lo
            donors.setdefault(there.run, []).append((there.from_lo, upto))
    for run_id, theirs in donors.items():
        # Outcomes alone: the input of such a run may be deleted.
        older = store.read(runs.the, run_id)
        _collect(store, older, theirs, rows, with_input=False, successes_only=successes_only)


def _put(txn: Txn, rows: list[tuple[bytes, bytes]]) -> None:
    for key, value in rows:
        txn.put(key, value)
