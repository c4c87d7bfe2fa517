"""Runs over an input that changed: what a driver asks for, and what such a run would do.

    checked(...)      the arguments of `Stage.run` that say how a changed input is taken
    rehash(...)       hashes over other columns than a kept run was hashed by
    compare(...)      which rows are reused, new, changed, failed, gone, without making a run

The outcomes themselves are taken over by the ledger service (`adoption`).
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
from holdfast.ledger.summary import cost_text, tally
from holdfast.spark import fingerprint
from holdfast.spark.adoption import Adoption, Donor, donors_of, key_types, lots, match_bytes
from holdfast.spark.again import chain
from holdfast.spark.errors import NotAStage
from holdfast.spark.journal import Input, schema_of
from holdfast.spark.match import HASHES, Cursor, Found
from holdfast.spark.sinks import open_sink
from holdfast.spark.sinks.api import SuccessorSink
from holdfast.store.api import Store, Txn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

PAGE_ROWS = 65_536
_AT = "_holdfast_at"
_NUMBERS = {"_seq": pa.int64()}


class Growth(msgspec.Struct, frozen=True):
    """How a changed input is taken."""

    extend: bool
    match: list[str]
    digest: str
    retry_failed: bool


# What `holdfast runs retry` asks for: the same input, and what failed is called again.
RETRY = Growth(True, [], "", True)


def checked(df: DataFrame, changed: Any, match: Any, retry_failed: Any) -> Growth:
    if changed not in ("refuse", "extend"):
        raise NotAStage(what="changed", why='"refuse" or "extend"', found=changed)
    if not isinstance(retry_failed, bool):
        raise NotAStage(what="retry_failed", why="True or False", found=retry_failed)
    if match is None:
        match = df.columns
    elif isinstance(match, str) or not isinstance(match, Sequence) or not match:
        raise NotAStage(what="match", why="a list of columns of the input", found=match)
    unknown = [name for name in match if name not in df.columns]
    if unknown:
        raise NotAStage(what="match", why="no such column", found=unknown, columns=df.columns)
    names = [name for name in df.columns if name in set(match)]
    digest = fingerprint.match_digest(df.schema, names)
    return Growth(changed == "extend", names, digest, retry_failed)


def is_again(store: Store, record: runs.RunRecord, growth: Growth) -> bool:
    """Whether the same input makes another run: rows of it failed, or it was cancelled."""
    if record.status is runs.Status.CANCELLED:
        return True
    if record.status is not runs.Status.FINISHED or not growth.retry_failed:
        return False
    return tally(store.read(runs.progress, record.run_id) or runs.Progress()).failed > 0


def succeeds(record: runs.RunRecord) -> bool:
    """Whether another run may write where this one did."""
    if not record.sink:
        return True
    sink = open_sink(record.sink)
    return isinstance(sink, SuccessorSink) or bool(getattr(sink, "in_driver", False))


def check_succeeds(record: runs.RunRecord) -> None:
    if not succeeds(record):
        why = "its sink cannot follow another run: it has no owner() and begin_after()"
        raise NotAStage(what="output", why=why, found=record.sink.get("kind", ""))


# --- hashes over other columns ------------------------------------------------------------------


def rehash(
    home: Store, spark: SparkSession, record: runs.RunRecord, schema: StructType, growth: Growth
) -> None:
    """Hash the inputs of kept runs over the columns that are to be matched now.

    A run whose input lacks one of them, or has it as another type, is left as it is: none of its rows
    has the content that is asked for.
    """
    for donor in home.read(donors_of, record):
        if donor.match_digest != growth.digest and _comparable(donor, schema, growth.match):
            _rehash(home, spark, donor, schema, growth)


def _comparable(donor: runs.RunRecord, schema: StructType, match: Sequence[str]) -> bool:
    from pyspark.sql.pandas.types import from_arrow_type

    found = schema_of(donor.input_schema)
    for name in match:
        if name not in found.names:
            return False
        try:
            kind = from_arrow_type(found.field(name).type).simpleString()
        except Exception:
            return False
        if kind != schema[name].dataType.simpleString():
            return False
    return True


def _rehash(
    home: Store, spark: SparkSession, donor: runs.RunRecord, schema: StructType, growth: Growth
) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    fields = [schema[name] for name in growth.match]
    told = StructType([*fields, StructField(_AT, LongType())])
    source = Input(home, donor)
    for _, n, block in source.blocks():
        known = home.read(_match_row, donor.blocks_run, n)
        if known is not None and known.startswith(growth.digest.encode()):
            continue
        at = pa.array(np.arange(block.num_rows, dtype=np.int64))
        table = block.select(growth.match).append_column(_AT, at).combine_chunks()
        frame = spark.createDataFrame(table, schema=told)
        hashes = fingerprint.match_hashes(told, growth.match)
        pair = [column.alias(name) for name, column in zip(HASHES, hashes, strict=True)]
        found = frame.select(_AT, *pair).toArrow().sort_by(_AT)
        first, second = (found.column(name).to_numpy() for name in HASHES)
        home.transact(_put_match, donor.run_id, n, match_bytes(growth.digest, first, second))


def _match_row(txn: Txn, run_id: str, n: int) -> bytes | None:
    return txn.get(runs.match_key(run_id, n))


def _put_match(txn: Txn, run_id: str, n: int, data: bytes) -> None:
    found = runs.get(txn, run_id)
    if found is not None and not found.deleting:
        txn.put(runs.match_key(found.blocks_run, n), data)


# --- what a run has to do with the one before -----------------------------------------------------


def base_of(store: Store, record: runs.RunRecord) -> runs.RunRecord | None:
    """The run before this one that has all of its input; None if there was none."""
    if not record.base_run:
        return None
    found = store.read(runs.get, record.base_run)
    if found is None:
        raise NotFound(what="run", run_id=record.base_run, why="the run before this one is deleted")
    return chain(store, found)[-1]


def gone(store: Store, record: runs.RunRecord) -> pa.Table:
    """Key columns of the rows of the run before that are not in this one; `_seq` is theirs there."""
    base = base_of(store, record)
    if base is None or base.blocks_run == record.blocks_run:
        return _keys(record, Input(store, record), [], _NUMBERS)
    return _selected(store, base, record, lambda found: found.seqs < 0)


def changed(store: Store, record: runs.RunRecord) -> pa.Table:
    """Key columns of the rows that the run before had with another content."""
    base = base_of(store, record)
    if base is None or base.blocks_run == record.blocks_run:
        return _keys(record, Input(store, record), [], _NUMBERS)
    return _selected(store, record, base, lambda found: (found.seqs >= 0) & ~found.same)


def _selected(store: Store, of: runs.RunRecord, other: runs.RunRecord, wanted: Any) -> pa.Table:
    """The rows of one run that another one has so."""
    digest = of.match_digest or other.match_digest
    cursor = Cursor(lots(store, other, digest)) if key_types(of) == key_types(other) else None
    source = Input(store, of)
    tables = [_keys(of, source, [], _NUMBERS)]
    for lot in lots(store, of, digest):
        found = cursor.find(lot) if cursor is not None else _nothing(lot.rows)
        rows = np.flatnonzero(wanted(found))
        if len(rows):
            keys = source.rows([(lot.lo, lot.lo + lot.rows)], list(of.key)).take(pa.array(rows))
            tables.append(keys.append_column("_seq", pa.array(lot.lo + rows, pa.int64())))
    return pa.concat_tables(tables)


def _nothing(rows: int) -> Found:
    return Found(np.full(rows, -1, dtype=np.int64), np.zeros(rows, dtype=np.bool_))


def _keys(
    record: runs.RunRecord, source: Input, ranges: list[tuple[int, int]], more: dict[str, Any]
) -> pa.Table:
    keys = source.rows(ranges, list(record.key))
    for name, kind in more.items():
        keys = keys.append_column(name, pa.array([], kind))
    return keys


# --- what a run would do --------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """What `run(df, changed="extend")` would do with each row of an input."""

    name: str
    rows: int
    reused: int
    new: int
    changed: int
    failed: int
    gone: int
    # What a call cost on average in the last run that made one.
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


def compare(
    home: Store, base: runs.RunRecord | None, scratch: Store, taken: runs.RunRecord
) -> Changes:
    """What would come of an input that was taken in as a run of another store."""
    counts = dict.fromkeys(("reused", "new", "changed", "failed"), 0)
    if base is None:
        counts["new"] = taken.size
        return Changes(taken.name, taken.size, **counts, gone=0, mean_cost=0.0)
    adoption = Adoption(home, taken, home.read(donors_of, taken), scratch)
    before = Donor(home, base, taken)
    known = 0
    for lot in adoption.lots():
        found = before.find(lot)
        page = adoption.taken(lot)
        mine = np.zeros(lot.rows, dtype=np.bool_)
        for _, ranges in page.rows:
            for one in ranges:
                mine[one.lo - lot.lo : one.hi - lot.lo] = True
        again = page.failed
        other = ~mine & ~again & (found.seqs >= 0) & ~found.same
        counts["reused"] += int(mine.sum())
        counts["failed"] += int(again.sum())
        counts["changed"] += int(other.sum())
        counts["new"] += int((~mine & ~again & ~other).sum())
        known += int((found.seqs >= 0).sum())
    mean = mean_cost(home, base)
    return Changes(taken.name, taken.size, **counts, gone=base.size - known, mean_cost=mean)


def mean_cost(store: Store, record: runs.RunRecord) -> float:
    """Of a call of this run, or of the newest run before it that made one."""
    at: runs.RunRecord | None = record
    while at is not None:
        told = store.read(runs.progress, at.run_id)
        if told is not None and told.calls:
            return told.cost / told.calls
        before = at.base_run or at.retry_of
        at = store.read(runs.get, before) if before else None
    return 0.0
