"""Ingest: converts a DataFrame into sorted Arrow blocks and assigns every row its seq.

    ingest(df, key, connect) -> IngestResult
    ingest(df, key, connect, sort=True)     after a first pass that ended with `needs_sort`

The seq of a row is its rank in ascending key order (see `keys`). One pass over the input does all
of it. Each Spark task cuts its rows into blocks, sorts a block unless it is sorted, sends it, and
returns the block's number, size, first and last key and the sum of its row hashes. From these the
driver derives the order of the blocks:

- Disjoint (a sorted input): seq is a prefix sum over the blocks, and nothing is rewritten.
- Slightly overlapping: `needs_merge`. `blocks` is empty until `block_merge.merge_blocks` has run
  where the blocks are.
- Unsorted (random keys): `needs_sort`. The ledger service counts the bytes of out-of-order blocks
  and stops the pass early when a merge could not hold them. The driver deletes the blocks and runs
  a second pass over Spark's `repartitionByRange` and `sortWithinPartitions`, which yields disjoint
  blocks.

Invariants:

- Executors never open the store. The task calls `connect()` once, in the thread that uses it.
- Only blocks named by the collected result are input. A task that runs twice (retry, speculation)
  leaves unnamed blocks, and the service deletes all blocks that are not in `staged`.
- `input_hash` is "rows:sum" of the hashes of all rows, so it is independent of order and
  partitions. `fingerprint.content_hash` computes the same without an ingest.
- A block has two additional columns: hashes of the columns that identify equal content
  (`row_match.HASH_COLUMNS`). They stay with their row through every sort and merge.
- Invalid columns and types are refused before any job runs. A block with an invalid key or an
  oversized row is not stored, and its task stores nothing further. The driver raises one error.

Spark does not sort every input, because a sort samples, shuffles and spills all of it. That costs
several times this pass, and sorted inputs are common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import Invalid, ValueTooLarge
from holdfast.spark import block_merge, fingerprint, keys
from holdfast.spark.block_merge import BLOCK_BYTES, BLOCK_ROWS, MEMORY_BYTES, StagedBlock
from holdfast.spark.keys import KeyDuplicate, KeyMissing, KeyNull, KeyTypeUnsupported
from holdfast.spark.ledger_protocol import STOP_INGEST
from holdfast.spark.row_match import HASH_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "BlockSink",
    "ColumnRepeated",
    "ColumnReserved",
    "IngestResult",
    "IngestTask",
    "InputStreaming",
    "InputUnstable",
    "KeyDuplicate",
    "KeyMissing",
    "KeyNull",
    "KeyTypeUnsupported",
    "RowTooLarge",
    "ingest",
]

RESERVED_COLUMNS = frozenset({"_seq", "_state", "_attempts", "_error_class", "_error"})
HASH_COLUMN = "_holdfast_hash"
# Characters with a meaning in Spark's column names.
_SPECIAL = frozenset(".`*")

_STATS = (
    "n bigint, rows bigint, size_bytes bigint, bounds binary, hash bigint, "
    "nulls bigint, repeats bigint, too_large bigint, bytes_max bigint, examples array<string>, schema binary"
)


class ColumnReserved(Invalid):
    code = "column_reserved"
    hint = "these column names are reserved for the output; rename the input's columns"


class ColumnRepeated(Invalid):
    code = "column_repeated"
    hint = "Spark compares column names without case; rename or drop one of them"


class InputUnstable(Invalid):
    code = "input_unstable"
    hint = "Spark returned rows out of sort order: the key changes between evaluations of the input; write the input to files first"


class InputStreaming(Invalid):
    code = "input_streaming"
    hint = "a stage takes a batch DataFrame; use it inside foreachBatch"


class RowTooLarge(Invalid):
    code = "row_too_large"
    hint = "no call was made; drop the columns that the function does not need, or keep the data in files and pass their paths"


class BlockSink(Protocol):
    """Stores blocks of the input."""

    def put_batch(self, batch: pa.RecordBatch, in_order: bool) -> tuple[int, int]:
        """Store the block and return its number, or `STOP`, and its size in bytes. `in_order`: its
        rows arrived in key order.

        Raises `ValueTooLarge` if the block is one row above the limit.
        """


@dataclass(frozen=True)
class IngestResult:
    size: int
    blocks: list[tuple[int, int]]
    schema: pa.Schema
    input_hash: str
    needs_merge: bool
    staged: list[StagedBlock] = field(repr=False)
    # Digest of the names and types of the hashed columns.
    match_digest: str = ""
    # If set, the other fields are invalid.
    needs_sort: bool = False


def ingest(
    df: DataFrame,
    key: Sequence[str],
    connect: Callable[[], BlockSink],
    *,
    match: Sequence[str] | None = None,
    keep: Sequence[str] | None = None,
    block_rows: int = BLOCK_ROWS,
    block_bytes: int = BLOCK_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    sort: bool = False,
) -> IngestResult:
    """Ingest a DataFrame. `memory_bytes` is the memory for a merge; 0: overlapping blocks require a
    sort.
    """
    check_input(df, key)
    match = df.columns if match is None else match
    hashed = add_hashes(df, match, keep)
    if sort:
        named = [fingerprint.quote_name(name) for name in key]
        hashed = hashed.repartitionByRange(*named).sortWithinPartitions(*named)
    names = tuple(hashed.columns)
    body = IngestTask(connect, tuple(key), block_rows, block_bytes, names)
    stats = (
        _rename_special_columns(hashed).mapInArrow(body, fingerprint.struct_type(_STATS)).collect()
    )

    _check_keys(stats, key)
    stopped = any(row.n == STOP_INGEST for row in stats)
    staged = [
        StagedBlock(row.n, row.rows, row.size_bytes, bytes(row.bounds))
        for row in stats
        if row.n >= 0
    ]
    groups = block_merge.group_overlapping(staged, key)
    needs_merge = len(groups) < len(staged)
    if sort:
        _check_sorted(groups, key, stopped)
    elif stopped or (needs_merge and block_merge.open_bytes_max(staged, key) > memory_bytes):
        return IngestResult(0, [], _schema_of(df, stats), "", False, [], needs_sort=True)
    size = sum(block.rows for block in staged)
    return IngestResult(
        size=size,
        blocks=[] if needs_merge else [(block.n, block.rows) for [block] in groups],
        schema=_schema_of(df, stats),
        input_hash=fingerprint.format_input_hash(df.schema, size, sum(row.hash for row in stats)),
        needs_merge=needs_merge,
        staged=staged,
        match_digest=fingerprint.match_digest(df.schema, match),
    )


def add_hashes(df: DataFrame, match: Sequence[str], keep: Sequence[str] | None = None) -> DataFrame:
    """Select the columns to keep, the hash of each row, and the two hashes of its `match` columns."""
    kept = ["*"] if keep is None else [fingerprint.quote_name(name) for name in keep]
    pair = zip(HASH_COLUMNS, fingerprint.match_hashes(df.schema, match), strict=True)
    hashes = [column.alias(name) for name, column in pair]
    return df.select(*kept, fingerprint.row_hash(df.schema).alias(HASH_COLUMN), *hashes)


def _rename_special_columns(df: DataFrame) -> DataFrame:
    """Rename columns for `mapInArrow`, which resolves names and treats a dot as a struct access."""
    if not any(_SPECIAL & set(name) for name in df.columns):
        return df
    return df.toDF(*(f"_{at}" for at in range(len(df.columns))))


def check_input(df: DataFrame, key: Sequence[str]) -> None:
    """Refuse every input error that is visible without running the input."""
    if df.isStreaming:
        raise InputStreaming()
    names = df.columns
    absent = [name for name in key if name not in names]
    if absent or not key:
        raise KeyMissing(missing=absent, columns=names)
    folded = [name.lower() for name in names]
    repeated = sorted({name for name in names if folded.count(name.lower()) > 1})
    if repeated or len(set(key)) < len(key):
        raise ColumnRepeated(columns=repeated or list(key))
    hidden = {HASH_COLUMN, *HASH_COLUMNS}
    reserved = [
        name for name in names if name.lower() in RESERVED_COLUMNS or name.lower() in hidden
    ]
    if reserved:
        raise ColumnReserved(columns=reserved)
    for name in key:
        kind = df.schema[name].dataType
        if not _is_key_type(kind):
            raise KeyTypeUnsupported(column=name, type=kind.simpleString())


def _is_key_type(kind: Any) -> bool:
    from pyspark.sql import types

    if isinstance(kind, types.StringType):
        # Keys are ordered and compared by their bytes. A collation orders and compares differently.
        return kind == types.StringType()
    return isinstance(
        kind,
        types.IntegralType
        | types.DecimalType
        | types.DateType
        | types.TimestampType
        | types.TimestampNTZType
        | types.BinaryType
        | types.BooleanType,
    )


def _check_keys(stats: list[Any], key: Sequence[str]) -> None:
    nulls = sum(row.nulls for row in stats)
    if nulls:
        raise KeyNull(key=list(key), rows_min=nulls)
    repeats = sum(row.repeats for row in stats)
    if repeats:
        shown_keys = [text for row in stats if row.repeats for text in row.examples]
        raise KeyDuplicate(key=list(key), found=repeats, examples=shown_keys[: keys.EXAMPLES_MAX])
    large = max(stats, key=lambda row: row.too_large, default=None)
    if large is not None and large.too_large:
        [shown_keys] = large.examples
        raise RowTooLarge(key=list(key), row=shown_keys, bytes=large.too_large, max=large.bytes_max)


def _check_sorted(groups: list[list[StagedBlock]], key: Sequence[str], stopped: bool) -> None:
    """Refuse overlapping blocks after a sort: equal keys are duplicates, otherwise the input is
    unstable.
    """
    for group in groups:
        for before, after in pairwise(group):
            if block_merge.key_bounds(before, key)[1] == block_merge.key_bounds(after, key)[0]:
                last = block_merge.decode_block(before.bounds)
                shown_keys = keys.key_examples(last, key, pa.array([1], pa.int64()))
                raise KeyDuplicate(key=list(key), found=1, examples=shown_keys)
    if stopped or any(len(group) > 1 for group in groups):
        raise InputUnstable(key=list(key))


def _schema_of(df: DataFrame, stats: list[Any]) -> pa.Schema:
    for row in stats:
        if row.schema is not None:
            return pa.ipc.read_schema(pa.py_buffer(row.schema))
    from pyspark.sql.pandas.types import to_arrow_schema

    zone = df.sparkSession.conf.get("spark.sql.session.timeZone")
    return to_arrow_schema(df.schema, timezone=zone)


# --- task side ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class IngestTask:
    """The function of `mapInArrow`. It yields one row of statistics per block, at the end."""

    connect: Callable[[], BlockSink]
    key: tuple[str, ...]
    block_rows: int
    block_bytes: int
    # The original column names, if the batches have substitutes.
    names: tuple[str, ...] = ()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        bad = False
        with _BlockSender(self.connect, self.key) as sender:
            for hash_sum, batch in self._cut_blocks(self._restore_names(batches)):
                batch, row = self._sort_block(batch)
                row["hash"] = hash_sum
                bad = bad or bool(row["nulls"] or row["repeats"]) or sender.refused
                if not bad:
                    row["bounds"] = self._bounds(batch)
                    if not rows:
                        row["schema"] = bytes(_without_hashes(batch.schema).serialize())
                    sender.send(batch, row)
                rows.append(row)
                if sender.stopped:
                    break
        yield pa.RecordBatch.from_pylist(rows, schema=_STATS_ARROW)

    def _restore_names(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.rename_columns(list(self.names)) if self.names else batch

    def _sort_block(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[str, Any]]:
        """Return the sorted block and the statistics of its keys."""
        keyed = keys.comparable_columns(batch, self.key)
        row: dict[str, Any] = {"n": -1, "rows": batch.num_rows, "repeats": 0, "examples": []}
        row["too_large"] = row["bytes_max"] = 0
        row["nulls"] = keys.count_nulls(keyed)
        row["in_order"] = True
        if not row["nulls"] and not keys.is_ascending(keyed):
            row["in_order"] = False
            batch = batch.take(keys.sort_order(keyed))
            keyed = keys.comparable_columns(batch, self.key)
            if not keys.is_ascending(keyed):
                repeats = keys.repeated_rows(keyed)
                row["repeats"] = len(repeats)
                row["examples"] = keys.key_examples(batch, self.key, repeats)
        return batch, row

    def _cut_blocks(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield blocks within the limits with the sum of their hashes, without the hash column."""
        gathered: list[pa.RecordBatch] = []
        rows = size = 0
        for whole in batches:
            for batch in block_merge.split_batch(whole, self.block_rows, self.block_bytes):
                over = rows + batch.num_rows > self.block_rows or (
                    size + batch.nbytes > self.block_bytes
                )
                if gathered and over:
                    yield _join_batches(gathered)
                    gathered, rows, size = [], 0, 0
                gathered.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
        if gathered:
            yield _join_batches(gathered)

    def _bounds(self, batch: pa.RecordBatch) -> bytes:
        ends = pa.array([0, batch.num_rows - 1], pa.int64())
        return block_merge.encode_block(batch.select(list(self.key)).take(ends))


class _BlockSender:
    """Sends one block while the next is read. The connection belongs to its single thread."""

    def __init__(self, connect: Callable[[], BlockSink], key: Sequence[str]) -> None:
        self._connect = connect
        self._key = key
        self._sink: BlockSink | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._in_flight: Future[None] | None = None
        # The service ended this pass.
        self.stopped = False
        # A block consisted of one row above the limit.
        self.refused = False

    def __enter__(self) -> _BlockSender:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._thread:
            if error is None:
                self._wait()

    def send(self, batch: pa.RecordBatch, row: dict[str, Any]) -> None:
        """Send a block asynchronously, one at a time. Sets the number and size in `row`, or the
        size of a row above the limit.
        """
        self._wait()
        self._in_flight = self._thread.submit(self._send, batch, row)

    def _wait(self) -> None:
        if self._in_flight is not None:
            self._in_flight.result()

    def _send(self, batch: pa.RecordBatch, row: dict[str, Any]) -> None:
        if self._sink is None:
            self._sink = self._connect()
        try:
            row["n"], row["size_bytes"] = self._sink.put_batch(batch, row["in_order"])
        except ValueTooLarge as error:
            self.refused = True
            row["too_large"], row["bytes_max"] = error.bytes, error.max
            row["examples"] = keys.key_examples(batch, self._key, pa.array([0], pa.int64()))
        self.stopped = self.stopped or row["n"] == STOP_INGEST


def _without_hashes(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in HASH_COLUMNS])


def _join_batches(batches: list[pa.RecordBatch]) -> tuple[int, pa.RecordBatch]:
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    at = batch.schema.get_field_index(HASH_COLUMN)
    # The sum wraps at 64 bits, as intended.
    hash_sum = pc.sum(batch.column(at)).as_py()
    return hash_sum, batch.remove_column(at).replace_schema_metadata(None)


_STATS_ARROW = pa.schema(
    [
        ("n", pa.int64()),
        ("rows", pa.int64()),
        ("size_bytes", pa.int64()),
        ("bounds", pa.binary()),
        ("hash", pa.int64()),
        ("nulls", pa.int64()),
        ("repeats", pa.int64()),
        ("too_large", pa.int64()),
        ("bytes_max", pa.int64()),
        ("examples", pa.list_(pa.string())),
        ("schema", pa.binary()),
    ]
)
