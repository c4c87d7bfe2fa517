"""Ingest: a DataFrame becomes a journal of sorted Arrow blocks, and every row gets its seq.

    ingest(df, key, connect) -> Ingested
    ingest(df, key, connect, sort=True)     after a first pass that ended with `needs_sort`

The seq of a row is its rank in the ascending order of the key (`keys` states that order). A pass over the
input does all of it: each Spark task cuts its rows into blocks, sorts a block unless it is in order
already, hands it over, and returns for each block its number, size, first and last key and the sum of its
row hashes. From these the driver knows the order of the blocks:

- Disjoint (an input that comes sorted): seq is a prefix sum over the blocks, nothing is rewritten.
- Overlapping a little: `needs_merge`, and `blocks` is empty until `merge.merge` has run where the blocks are.
- In no order (random keys): `needs_sort`. The ledger service counts the bytes of blocks that came out of
  order and stops the pass when a merge could not hold them, so that such a pass ends early. The driver
  drops the blocks and runs a second pass over `repartitionByRange` and `sortWithinPartitions` of Spark,
  whose blocks are disjoint.

Invariants:

- Executors never open the store. `connect()` is called in the task, once, in the thread that uses it.
- Only the blocks that the collected result names are input. A task that runs twice (retry, speculation)
  leaves blocks that no result names: the service deletes what is not in `staged`.
- `input_hash` is "rows:sum" of the hashes of all rows, so it depends on neither order nor partitions;
  `fingerprint.content_hash` computes the same without ingesting.
- A block has two columns beside those of the input: hashes of the columns that make a row the same
  (`match.HASHES`). They travel with their row through every sort and merge.
- What can be refused without a pass (columns, types) is refused before anything runs. A block with a
  bad key, or with a row above the limit, is not stored, and a task that has seen one stores nothing more.
  The driver raises it as one error.

Why Spark does not sort every input: a sort samples, shuffles and spills all of it, which costs several
times this pass, and inputs that come sorted are common.
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
from holdfast.spark import fingerprint, keys, merge
from holdfast.spark.keys import KeyDuplicate, KeyMissing, KeyNull, KeyTypeUnsupported
from holdfast.spark.match import HASHES
from holdfast.spark.merge import BLOCK_BYTES, BLOCK_ROWS, MEMORY_BYTES, Staged
from holdfast.spark.wire import STOP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "ColumnRepeated",
    "ColumnReserved",
    "Ingested",
    "InputStreaming",
    "InputUnstable",
    "KeyDuplicate",
    "KeyMissing",
    "KeyNull",
    "KeyTypeUnsupported",
    "Put",
    "RowTooLarge",
    "TaskBody",
    "ingest",
]

RESERVED = frozenset({"_seq", "_state", "_attempts", "_error_class", "_error"})
HASH = "_holdfast_hash"
# Characters that mean something when Spark looks a column up by its name.
_SPECIAL = frozenset(".`*")

_STATS = (
    "n bigint, rows bigint, size_bytes bigint, bounds binary, hash bigint, "
    "nulls bigint, repeats bigint, too_large bigint, bytes_max bigint, examples array<string>, schema binary"
)


class ColumnReserved(Invalid):
    code = "column_reserved"
    hint = "the output has columns of these names; rename the input's"


class ColumnRepeated(Invalid):
    code = "column_repeated"
    hint = "Spark tells columns apart regardless of case; rename or drop one of them"


class InputUnstable(Invalid):
    code = "input_unstable"
    hint = "Spark gave rows out of the order it sorted them by: the key changes from one evaluation to the next; write the input to files first"


class InputStreaming(Invalid):
    code = "input_streaming"
    hint = "a stage takes a batch DataFrame; use it inside foreachBatch"


class RowTooLarge(Invalid):
    code = "row_too_large"
    hint = "no call was made; drop the columns that the function does not need, or keep the data in files and pass their paths"


class Put(Protocol):
    def put_batch(self, batch: pa.RecordBatch, in_order: bool) -> tuple[int, int]:
        """Store the block; its number, or `STOP`, and its bytes. `in_order`: its rows came in the order of the key.

        `ValueTooLarge`: the block is one row, and that is above the limit."""


@dataclass(frozen=True)
class Ingested:
    size: int
    blocks: list[tuple[int, int]]
    schema: pa.Schema
    input_hash: str
    needs_merge: bool
    staged: list[Staged] = field(repr=False)
    # Names and types of what the two hashes of a row are made of.
    match_digest: str = ""
    # Nothing else here counts then.
    needs_sort: bool = False


def ingest(
    df: DataFrame,
    key: Sequence[str],
    connect: Callable[[], Put],
    *,
    match: Sequence[str] | None = None,
    keep: Sequence[str] | None = None,
    block_rows: int = BLOCK_ROWS,
    block_bytes: int = BLOCK_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    sort: bool = False,
) -> Ingested:
    """`memory_bytes` is what a merge may hold; 0: blocks that overlap are left to a sort."""
    check_input(df, key)
    match = df.columns if match is None else match
    hashed = with_hashes(df, match, keep)
    if sort:
        named = [fingerprint.quoted(name) for name in key]
        hashed = hashed.repartitionByRange(*named).sortWithinPartitions(*named)
    names = tuple(hashed.columns)
    body = TaskBody(connect, tuple(key), block_rows, block_bytes, names)
    stats = _plainly_named(hashed).mapInArrow(body, fingerprint.struct(_STATS)).collect()

    _check_keys(stats, key)
    stopped = any(row.n == STOP for row in stats)
    staged = [
        Staged(row.n, row.rows, row.size_bytes, bytes(row.bounds)) for row in stats if row.n >= 0
    ]
    groups = merge.overlapping(staged, key)
    needs_merge = len(groups) < len(staged)
    if sort:
        _check_sorted(groups, key, stopped)
    elif stopped or (needs_merge and merge.open_bytes_max(staged, key) > memory_bytes):
        return Ingested(0, [], _schema_of(df, stats), "", False, [], needs_sort=True)
    size = sum(block.rows for block in staged)
    return Ingested(
        size=size,
        blocks=[] if needs_merge else [(block.n, block.rows) for [block] in groups],
        schema=_schema_of(df, stats),
        input_hash=fingerprint.text_of(df.schema, size, sum(row.hash for row in stats)),
        needs_merge=needs_merge,
        staged=staged,
        match_digest=fingerprint.match_digest(df.schema, match),
    )


def with_hashes(
    df: DataFrame, match: Sequence[str], keep: Sequence[str] | None = None
) -> DataFrame:
    """The input or the columns to keep of it, the hash of each row, and the two of its `match`."""
    kept = ["*"] if keep is None else [fingerprint.quoted(name) for name in keep]
    pair = zip(HASHES, fingerprint.match_hashes(df.schema, match), strict=True)
    hashes = [column.alias(name) for name, column in pair]
    return df.select(*kept, fingerprint.row_hash(df.schema).alias(HASH), *hashes)


def _plainly_named(df: DataFrame) -> DataFrame:
    """For `mapInArrow`, which looks its columns up by name and takes a dot for the way into a struct."""
    if not any(_SPECIAL & set(name) for name in df.columns):
        return df
    return df.toDF(*(f"_{at}" for at in range(len(df.columns))))


def check_input(df: DataFrame, key: Sequence[str]) -> None:
    """Everything that can be refused without running the input."""
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
    hidden = {HASH, *HASHES}
    reserved = [name for name in names if name.lower() in RESERVED or name.lower() in hidden]
    if reserved:
        raise ColumnReserved(columns=reserved)
    for name in key:
        kind = df.schema[name].dataType
        if not _is_key_type(kind):
            raise KeyTypeUnsupported(column=name, type=kind.simpleString())


def _is_key_type(kind: Any) -> bool:
    from pyspark.sql import types

    if isinstance(kind, types.StringType):
        # Keys are ordered and told apart by their bytes; a collation has another idea of both.
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
        told = [text for row in stats if row.repeats for text in row.examples]
        raise KeyDuplicate(key=list(key), found=repeats, examples=told[: keys.EXAMPLES_MAX])
    large = max(stats, key=lambda row: row.too_large, default=None)
    if large is not None and large.too_large:
        [told] = large.examples
        raise RowTooLarge(key=list(key), row=told, bytes=large.too_large, max=large.bytes_max)


def _check_sorted(groups: list[list[Staged]], key: Sequence[str], stopped: bool) -> None:
    """After a sort only equal keys can make blocks touch: a sort puts them side by side."""
    for group in groups:
        for before, after in pairwise(group):
            if merge.bounds(before, key)[1] == merge.bounds(after, key)[0]:
                last = merge.decode(before.bounds)
                told = keys.examples(last, key, pa.array([1], pa.int64()))
                raise KeyDuplicate(key=list(key), found=1, examples=told)
    if stopped or any(len(group) > 1 for group in groups):
        raise InputUnstable(key=list(key))


def _schema_of(df: DataFrame, stats: list[Any]) -> pa.Schema:
    for row in stats:
        if row.schema is not None:
            return pa.ipc.read_schema(pa.py_buffer(row.schema))
    from pyspark.sql.pandas.types import to_arrow_schema

    zone = df.sparkSession.conf.get("spark.sql.session.timeZone")
    return to_arrow_schema(df.schema, timezone=zone)


# --- in the task --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskBody:
    """What `mapInArrow` runs. One row of statistics for each block, all of them at the end."""

    connect: Callable[[], Put]
    key: tuple[str, ...]
    block_rows: int
    block_bytes: int
    # The names of the columns: those that come may stand for them.
    names: tuple[str, ...] = ()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        bad = False
        with _Sender(self.connect, self.key) as sender:
            for hash_sum, batch in self._blocks(self._named(batches)):
                batch, row = self._sorted(batch)
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

    def _named(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.rename_columns(list(self.names)) if self.names else batch

    def _sorted(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[str, Any]]:
        """The block in order, and what there is to say about its keys."""
        keyed = keys.columns(batch, self.key)
        row: dict[str, Any] = {"n": -1, "rows": batch.num_rows, "repeats": 0, "examples": []}
        row["too_large"] = row["bytes_max"] = 0
        row["nulls"] = keys.nulls(keyed)
        row["in_order"] = True
        if not row["nulls"] and not keys.ascends(keyed):
            row["in_order"] = False
            batch = batch.take(keys.order(keyed))
            keyed = keys.columns(batch, self.key)
            if not keys.ascends(keyed):
                repeats = keys.repeats(keyed)
                row["repeats"] = len(repeats)
                row["examples"] = keys.examples(batch, self.key, repeats)
        return batch, row

    def _blocks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Blocks within the limits, each with the sum of its hashes, the hash column left out."""
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for whole in batches:
            for batch in merge.cut(whole, self.block_rows, self.block_bytes):
                over = rows + batch.num_rows > self.block_rows or (
                    size + batch.nbytes > self.block_bytes
                )
                if held and over:
                    yield _joined(held)
                    held, rows, size = [], 0, 0
                held.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
        if held:
            yield _joined(held)

    def _bounds(self, batch: pa.RecordBatch) -> bytes:
        ends = pa.array([0, batch.num_rows - 1], pa.int64())
        return merge.encode(batch.select(list(self.key)).take(ends))


class _Sender:
    """Hands over one block while the next is being read. The connection lives in its one thread."""

    def __init__(self, connect: Callable[[], Put], key: Sequence[str]) -> None:
        self._connect = connect
        self._key = key
        self._put: Put | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._under_way: Future[None] | None = None
        # The service wants no more blocks of this pass.
        self.stopped = False
        # A block was a row above the limit.
        self.refused = False

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._thread:
            if error is None:
                self._wait()

    def send(self, batch: pa.RecordBatch, row: dict[str, Any]) -> None:
        """At most one block is under way; its number and size will be in `row`, or how large a row of it is."""
        self._wait()
        self._under_way = self._thread.submit(self._send, batch, row)

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _send(self, batch: pa.RecordBatch, row: dict[str, Any]) -> None:
        if self._put is None:
            self._put = self._connect()
        try:
            row["n"], row["size_bytes"] = self._put.put_batch(batch, row["in_order"])
        except ValueTooLarge as error:
            self.refused = True
            row["too_large"], row["bytes_max"] = error.bytes, error.max
            row["examples"] = keys.examples(batch, self._key, pa.array([0], pa.int64()))
        self.stopped = self.stopped or row["n"] == STOP


def _without_hashes(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in HASHES])


def _joined(held: list[pa.RecordBatch]) -> tuple[int, pa.RecordBatch]:
    batch = held[0] if len(held) == 1 else pa.concat_batches(held)
    at = batch.schema.get_field_index(HASH)
    # The sum wraps at 64 bits, which is what a sum modulo 2^64 is.
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
