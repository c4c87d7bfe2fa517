"""Runs over a changed input: their options, and a comparison with stored runs.

    checked_options(...)     validates the arguments of `Stage.run` for a changed input
    rehash_kept_inputs(...)  hashes stored inputs over other columns
    compare_input(...)       counts reused, new, changed, failed and removed rows, without a run

The ledger service adopts the outcomes (`adoption`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.ledger.summary import cost_text, tally_rows
from holdfast.spark import fingerprint
from holdfast.spark.errors import NotAStage
from holdfast.spark.outcome_reuse import (
    OutcomeAdoption,
    ReuseSource,
    iter_keyed_rows,
    key_types,
    list_reuse_sources,
    match_bytes,
)
from holdfast.spark.retry_run import retry_chain
from holdfast.spark.row_match import HASH_COLUMNS, MatchCursor, MatchResult
from holdfast.spark.run_data import RunInput, decode_schema
from holdfast.spark.sinks import open_sink
from holdfast.spark.sinks.api import SuccessorSink
from holdfast.store.api import Store, Txn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

PAGE_ROWS = 65_536
_POSITION_COLUMN = "_holdfast_at"
_NUMBERS = {"_seq": pa.int64()}


class ExtendOptions(msgspec.Struct, frozen=True):
    """The options for a changed input."""

    extend: bool
    match: list[str]
    digest: str
    retry_failed: bool


# The options of `holdfast runs retry`: the same input, failed rows are called again.
RETRY_OPTIONS = ExtendOptions(True, [], "", True)


def checked_options(df: DataFrame, changed: Any, match: Any, retry_failed: Any) -> ExtendOptions:
    if changed not in ("refuse", "extend"):
        raise NotAStage(what="changed", why='must be "refuse" or "extend"', found=changed)
    if not isinstance(retry_failed, bool):
        raise NotAStage(what="retry_failed", why="must be True or False", found=retry_failed)
    if match is None:
        match = df.columns
    elif isinstance(match, str) or not isinstance(match, Sequence) or not match:
        raise NotAStage(what="match", why="must be a list of input columns", found=match)
    unknown = [name for name in match if name not in df.columns]
    if unknown:
        raise NotAStage(what="match", why="no such column", found=unknown, columns=df.columns)
    names = [name for name in df.columns if name in set(match)]
    digest = fingerprint.match_digest(df.schema, names)
    return ExtendOptions(changed == "extend", names, digest, retry_failed)


def needs_new_run(store: Store, record: runs.RunRecord, options: ExtendOptions) -> bool:
    """Return whether an unchanged input needs a new run: rows failed, or the run was cancelled."""
    if record.status is runs.RunLifecycle.CANCELLED:
        return True
    if record.status is not runs.RunLifecycle.FINISHED or not options.retry_failed:
        return False
    return tally_rows(store.read(runs.get_progress, record.run_id) or runs.RunProgress()).failed > 0


def can_follow(record: runs.RunRecord) -> bool:
    """Return whether another run may write to the output of this one."""
    if not record.sink:
        return True
    sink = open_sink(record.sink)
    return isinstance(sink, SuccessorSink) or bool(getattr(sink, "in_driver", False))


def require_can_follow(record: runs.RunRecord) -> None:
    if not can_follow(record):
        why = "this sink cannot continue the output of another run: it has no owner() and begin_after()"
        raise NotAStage(what="output", why=why, found=record.sink.get("kind", ""))


# --- rehash -------------------------------------------------------------------------------------


def rehash_kept_inputs(
    run_store: Store,
    spark: SparkSession,
    record: runs.RunRecord,
    schema: StructType,
    options: ExtendOptions,
) -> None:
    """Hash the inputs of stored runs over the columns to match now.

    A run whose input lacks one of them, or has it with another type, is skipped: none of its rows
    can match.
    """
    for donor in run_store.read(list_reuse_sources, record):
        if donor.match_digest != options.digest and _is_comparable(donor, schema, options.match):
            _rehash_input(run_store, spark, donor, schema, options)


def _is_comparable(donor: runs.RunRecord, schema: StructType, match: Sequence[str]) -> bool:
    from pyspark.sql.pandas.types import from_arrow_type

    input_schema = decode_schema(donor.input_schema)
    for name in match:
        if name not in input_schema.names:
            return False
        try:
            kind = from_arrow_type(input_schema.field(name).type).simpleString()
        except Exception:
            return False
        if kind != schema[name].dataType.simpleString():
            return False
    return True


def _rehash_input(
    run_store: Store,
    spark: SparkSession,
    donor: runs.RunRecord,
    schema: StructType,
    options: ExtendOptions,
) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    fields = [schema[name] for name in options.match]
    frame_schema = StructType([*fields, StructField(_POSITION_COLUMN, LongType())])
    source = RunInput(run_store, donor)
    for _, n, block in source.blocks():
        known = run_store.read(_get_match_row, donor.blocks_run, n)
        if known is not None and known.startswith(options.digest.encode()):
            continue
        at = pa.array(np.arange(block.num_rows, dtype=np.int64))
        table = block.select(options.match).append_column(_POSITION_COLUMN, at).combine_chunks()
        frame = spark.createDataFrame(table, schema=frame_schema)
        hashes = fingerprint.match_hashes(frame_schema, options.match)
        pair = [column.alias(name) for name, column in zip(HASH_COLUMNS, hashes, strict=True)]
        found = frame.select(_POSITION_COLUMN, *pair).toArrow().sort_by(_POSITION_COLUMN)
        first, second = (found.column(name).to_numpy() for name in HASH_COLUMNS)
        run_store.transact(
            _put_match_row, donor.run_id, n, match_bytes(options.digest, first, second)
        )


def _get_match_row(txn: Txn, run_id: str, n: int) -> bytes | None:
    return txn.get(runs.match_key(run_id, n))


def _put_match_row(txn: Txn, run_id: str, n: int, data: bytes) -> None:
    record = runs.get_record(txn, run_id)
    if record is not None and not record.deleting:
        txn.put(runs.match_key(record.blocks_run, n), data)


# --- comparison with the previous run -------------------------------------------------------------


def previous_run(store: Store, record: runs.RunRecord) -> runs.RunRecord | None:
    """Return the previous run with the whole input; None if there was none."""
    if not record.base_run:
        return None
    base = store.read(runs.get_record, record.base_run)
    if base is None:
        raise NotFound(what="run", run_id=record.base_run, why="the previous run was deleted")
    return retry_chain(store, base)[-1]


def removed_rows(store: Store, record: runs.RunRecord) -> pa.Table:
    """Return the key columns of the previous run's rows that are not in this one; `_seq` is the seq
    there.
    """
    base = previous_run(store, record)
    if base is None or base.blocks_run == record.blocks_run:
        return _key_table(record, RunInput(store, record), [], _NUMBERS)
    return _select_rows(store, base, record, lambda found: found.seqs < 0)


def changed_rows(store: Store, record: runs.RunRecord) -> pa.Table:
    """Return the key columns of the rows with other content than in the previous run."""
    base = previous_run(store, record)
    if base is None or base.blocks_run == record.blocks_run:
        return _key_table(record, RunInput(store, record), [], _NUMBERS)
    return _select_rows(store, record, base, lambda found: (found.seqs >= 0) & ~found.same)


def _select_rows(store: Store, of: runs.RunRecord, other: runs.RunRecord, wanted: Any) -> pa.Table:
    """Select the rows of one run by their match result in another."""
    digest = of.match_digest or other.match_digest
    cursor = (
        MatchCursor(iter_keyed_rows(store, other, digest))
        if key_types(of) == key_types(other)
        else None
    )
    source = RunInput(store, of)
    tables = [_key_table(of, source, [], _NUMBERS)]
    for keyed_rows in iter_keyed_rows(store, of, digest):
        matches = cursor.find(keyed_rows) if cursor is not None else _no_matches(keyed_rows.rows)
        rows = np.flatnonzero(wanted(matches))
        if len(rows):
            keys = source.rows(
                [(keyed_rows.lo, keyed_rows.lo + keyed_rows.rows)], list(of.key)
            ).take(pa.array(rows))
            tables.append(keys.append_column("_seq", pa.array(keyed_rows.lo + rows, pa.int64())))
    return pa.concat_tables(tables)


def _no_matches(rows: int) -> MatchResult:
    return MatchResult(np.full(rows, -1, dtype=np.int64), np.zeros(rows, dtype=np.bool_))


def _key_table(
    record: runs.RunRecord, source: RunInput, ranges: list[tuple[int, int]], more: dict[str, Any]
) -> pa.Table:
    keys = source.rows(ranges, list(record.key))
    for name, kind in more.items():
        keys = keys.append_column(name, pa.array([], kind))
    return keys


# --- dry run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """The effect of `run(df, changed="extend")` on the rows of an input."""

    name: str
    rows: int
    reused: int
    new: int
    changed: int
    failed: int
    gone: int
    # The mean cost of a call in the last run with calls.
    mean_cost: float

    @property
    def to_call(self) -> int:
        return self.new + self.changed + self.failed

    @property
    def cost(self) -> float:
        return self.to_call * self.mean_cost

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.rows:,} rows: {self.reused:,} reused, {self.new:,} new, "
            f"{self.changed:,} changed, {self.failed:,} failed, {self.gone:,} gone",
            f"  {self.to_call:,} to call",
        ]
        if self.mean_cost:
            parts = [
                f"{what} {cost_text(count * self.mean_cost)}"
                for what, count in (
                    ("new", self.new),
                    ("changed", self.changed),
                    ("failed", self.failed),
                )
                if count
            ]
            of = f" ({', '.join(parts)})" if parts else ""
            lines.append(
                f"  cost {cost_text(self.cost)}{of}, at {cost_text(self.mean_cost)} a call"
            )
        return "\n".join(lines)


def compare_input(
    run_store: Store, base: runs.RunRecord | None, scratch: Store, ingested: runs.RunRecord
) -> Changes:
    """Compare an input that was ingested into a scratch store with the stored runs."""
    counts = dict.fromkeys(("reused", "new", "changed", "failed"), 0)
    if base is None:
        counts["new"] = ingested.size
        return Changes(ingested.name, ingested.size, **counts, gone=0, mean_cost=0.0)
    adoption = OutcomeAdoption(
        run_store, ingested, run_store.read(list_reuse_sources, ingested), scratch
    )
    before = ReuseSource(run_store, base, ingested)
    known = 0
    for keyed_rows in adoption.iter_pages():
        matches = before.find(keyed_rows)
        page = adoption.adopt_rows(keyed_rows)
        adopted = np.zeros(keyed_rows.rows, dtype=np.bool_)
        for _, ranges in page.adopted_ranges:
            for one in ranges:
                adopted[one.lo - keyed_rows.lo : one.hi - keyed_rows.lo] = True
        again = page.failed_before
        other = ~adopted & ~again & (matches.seqs >= 0) & ~matches.same
        counts["reused"] += int(adopted.sum())
        counts["failed"] += int(again.sum())
        counts["changed"] += int(other.sum())
        counts["new"] += int((~adopted & ~again & ~other).sum())
        known += int((matches.seqs >= 0).sum())
    mean = mean_call_cost(run_store, base)
    return Changes(ingested.name, ingested.size, **counts, gone=base.size - known, mean_cost=mean)


def mean_call_cost(store: Store, record: runs.RunRecord) -> float:
    """Return the mean cost of a call of this run, or of the newest earlier run with calls."""
    at: runs.RunRecord | None = record
    while at is not None:
        progress = store.read(runs.get_progress, at.run_id)
        if progress is not None and progress.calls:
            return progress.cost / progress.calls
        before = at.base_run or at.retry_of
        at = store.read(runs.get_record, before) if before else None
    return 0.0
