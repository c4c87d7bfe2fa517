"""Ingest on a real Spark: seq order, blocks, refused inputs, and fingerprints of inputs."""

import datetime as dt
import os
from collections.abc import Callable
from decimal import Decimal
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.errors import ValueTooLarge
from holdfast.spark import block_merge, fingerprint
from holdfast.spark.ingest import (
    ColumnRepeated,
    ColumnReserved,
    IngestResult,
    IngestTask,
    InputStreaming,
    KeyDuplicate,
    KeyMissing,
    KeyNull,
    KeyTypeUnsupported,
    RowTooLarge,
    ingest,
)
from holdfast.spark.ledger_protocol import STOP_INGEST
from holdfast.spark.row_match import HASH_COLUMNS


class FileBlockSink:
    """A block sink of an ingest task that stores blocks as files."""

    def __init__(self, path: str, unordered_max: int = 1 << 40, bytes_max: int = 1 << 40) -> None:
        self.path = path
        self.unordered_max = unordered_max
        self.bytes_max = bytes_max

    def put_batch(self, batch: pa.RecordBatch, in_order: bool = True) -> tuple[int, int]:
        data = block_merge.encode_block(batch)
        if len(data) > self.bytes_max:
            raise ValueTooLarge(what="input row", bytes=len(data), max=self.bytes_max)
        return self.put_block(data, in_order), len(data)

    def put_block(self, data: bytes, in_order: bool = True) -> int:
        if not in_order and len(os.listdir(self.path)) >= self.unordered_max:
            return STOP_INGEST
        n = len(os.listdir(self.path))
        while True:
            try:
                with open(os.path.join(self.path, str(n)), "xb") as file:
                    file.write(data)
                return n
            except FileExistsError:
                n += 1


class BlockFolder:
    """A directory of blocks, with the block operations of the ledger service."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def sink_factory(self) -> Callable[[], FileBlockSink]:
        return partial(FileBlockSink, str(self.path))

    def read(self, n: int) -> bytes:
        return (self.path / str(n)).read_bytes()

    def write(self, data: bytes) -> int:
        return self.sink_factory().put_block(data)

    def names(self) -> set[int]:
        return {int(path.name) for path in self.path.iterdir()}

    def rows(self, got: IngestResult, key: list[str]) -> list[dict[str, Any]]:
        """The stored input rows in seq order."""
        blocks = got.blocks
        if got.needs_merge:
            blocks = block_merge.merge_blocks(got.staged, key, self.read, self.write).blocks
        assert sum(rows for _, rows in blocks) == got.size
        batches = [block_merge.decode_block(self.read(n)) for n, _ in blocks]
        assert all(batch.schema.names == [*got.schema.names, *HASH_COLUMNS] for batch in batches)
        batches = [batch.select(got.schema.names) for batch in batches]
        assert all(batch.schema == got.schema for batch in batches)
        return [row for batch in batches for row in batch.to_pylist()]

    def hashes(self, got: IngestResult, key: str) -> dict[Any, tuple[int, int]]:
        """The two match hashes of each row, by its key."""
        blocks = [block_merge.decode_block(self.read(n)) for n, _ in got.blocks]
        columns = [
            [row for b in blocks for row in b[name].to_pylist()] for name in (key, *HASH_COLUMNS)
        ]
        return {k: (one, two) for k, one, two in zip(*columns, strict=True)}


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    path = tmp_path / "blocks"
    path.mkdir()
    return BlockFolder(path)


# --- order and blocks ---------------------------------------------------------------------------


def test_sorted_input_is_stored_once_and_not_merged(
    spark: SparkSession, folder: BlockFolder
) -> None:
    got = ingest(spark.range(1000), ["id"], folder.sink_factory, block_rows=150)
    assert not got.needs_merge
    assert got.size == 1000
    assert {n for n, _ in got.blocks} == folder.names()
    assert [row["id"] for row in folder.rows(got, ["id"])] == list(range(1000))


def test_sorted_parquet_input_is_not_merged(
    spark: SparkSession, folder: BlockFolder, tmp_path: Path
) -> None:
    path = str(tmp_path / "sorted")
    spark.range(500, numPartitions=3).select(
        F.format_string("k%05d", "id").alias("k")
    ).write.parquet(path)
    got = ingest(spark.read.parquet(path), ["k"], folder.sink_factory)
    assert not got.needs_merge
    assert [row["k"] for row in folder.rows(got, ["k"])] == [f"k{at:05}" for at in range(500)]


def test_descending_input_needs_no_merge(spark: SparkSession, folder: BlockFolder) -> None:
    df = spark.range(1000).select((-F.col("id")).alias("k"))
    got = ingest(df, ["k"], folder.sink_factory, block_rows=100)
    assert not got.needs_merge
    assert [row["k"] for row in folder.rows(got, ["k"])] == list(range(-999, 1))


def test_seq_order_equals_the_sort_order_of_spark(spark: SparkSession, folder: BlockFolder) -> None:
    texts = ["", "a", "B", "é", "ab", "\U0001f600", "\uffee", "a\0", "10", "9"]
    df = spark.createDataFrame([(text,) for text in texts], "k string").repartition(3)
    got = ingest(df, ["k"], folder.sink_factory, block_rows=2)
    assert got.needs_merge
    assert got.blocks == []
    expected = [row.k for row in df.orderBy("k").collect()]
    assert [row["k"] for row in folder.rows(got, ["k"])] == expected


def test_seq_order_does_not_depend_on_the_partitions(
    spark: SparkSession, folder: BlockFolder
) -> None:
    df = spark.range(3000).select(F.sha2(F.col("id").cast("string"), 256).alias("k"), "id")
    ingested = []
    for parts in (1, 5):
        got = ingest(df.repartition(parts), ["k"], folder.sink_factory, block_rows=400)
        ingested.append((got.input_hash, folder.rows(got, ["k"])))
    assert ingested[0] == ingested[1]


def test_composite_key_has_the_sort_order_of_spark(
    spark: SparkSession, folder: BlockFolder
) -> None:
    df = spark.range(200).select(
        (F.col("id") % 2 == 0).alias("flag"),
        F.expr("date_add(date'1969-12-25', cast(id % 10 as int))").alias("day"),
        F.expr("cast(id % 5 - 2 as decimal(9,1))").alias("amount"),
        F.expr("timestamp_seconds(1792900000 - id * 600)").alias("at"),
        F.expr("cast(cast(id as string) as binary)").alias("raw"),
        "id",
    )
    key = ["flag", "day", "amount", "at", "raw"]
    got = ingest(df.repartition(3), key, folder.sink_factory, block_rows=30)
    expected = [row.id for row in df.orderBy(*key).collect()]
    assert [row["id"] for row in folder.rows(got, key)] == expected


def test_empty_partitions_leave_no_block(spark: SparkSession, folder: BlockFolder) -> None:
    df = spark.range(100, numPartitions=10).filter("id in (5, 95)")
    got = ingest(df, ["id"], folder.sink_factory)
    assert [rows for _, rows in got.blocks] == [1, 1]
    assert len(folder.names()) == 2


def test_empty_input_has_a_schema_and_no_rows(spark: SparkSession, folder: BlockFolder) -> None:
    kinds = "k string, at timestamp, tags array<string>"
    got = ingest(spark.createDataFrame([], kinds), ["k"], folder.sink_factory)
    assert (got.size, got.blocks, got.staged, got.needs_merge) == (0, [], [], False)
    full = spark.sql("select 'a' k, timestamp'2026-01-01' at, array('x') tags")
    assert got.schema.names == ["k", "at", "tags"]
    other = ingest(full, ["k"], folder.sink_factory).schema
    assert [pa.types.is_timestamp(field.type) for field in got.schema] == [
        pa.types.is_timestamp(field.type) for field in other
    ]
    assert got.input_hash == fingerprint.content_hash(spark.createDataFrame([], kinds))


def test_block_bytes_bounds_blocks_of_large_rows(spark: SparkSession, folder: BlockFolder) -> None:
    df = spark.range(40, numPartitions=1).select("id", F.repeat(F.lit("x"), 10_000).alias("text"))
    got = ingest(df, ["id"], folder.sink_factory, block_bytes=50_000)
    assert got.size == 40
    assert all(rows <= 5 for _, rows in got.blocks)
    assert all(block.size_bytes < 60_000 for block in got.staged)


def test_ingest_keeps_columns_of_every_type(spark: SparkSession, folder: BlockFolder) -> None:
    df = spark.sql(
        """select id, array(1, null) a, map('x', id) m, named_struct('q', array(map(1, 'y'))) s,
        cast(id as decimal(20, 3)) d, timestamp'2026-01-01 00:00:00.000001' t, date'2026-01-01' day,
        x'00ff' b, cast(null as string) nothing, interval 1 day i, true yes, 1.5f f
        from range(1, 4)"""
    )
    got = ingest(df.orderBy(F.desc("id")).coalesce(1), ["id"], folder.sink_factory)
    rows = folder.rows(got, ["id"])
    assert [row["id"] for row in rows] == [1, 2, 3]
    first = rows[0]
    assert first["a"] == [1, None]
    assert first["m"] == [("x", 1)]
    assert first["s"] == {"q": [[(1, "y")]]}
    assert first["d"] == Decimal("1.000")
    assert first["t"].microsecond == 1
    assert (first["day"], first["b"], first["nothing"]) == (dt.date(2026, 1, 1), b"\0\xff", None)
    assert (first["i"], first["yes"], first["f"]) == (dt.timedelta(days=1), True, 1.5)
    assert got.input_hash == fingerprint.content_hash(df)


def test_repeated_ingest_task_writes_separate_blocks(folder: BlockFolder) -> None:
    body = IngestTask(folder.sink_factory, ("id",), 10, 1 << 20)
    ids, hashes = pa.array(range(25)), pa.array([1] * 25)
    batch = pa.RecordBatch.from_arrays([ids, hashes], names=["id", "_holdfast_hash"])
    [lost], [reported] = list(body([batch])), list(body([batch]))
    assert set(lost["n"].to_pylist()) | set(reported["n"].to_pylist()) == folder.names()
    assert set(lost["n"].to_pylist()).isdisjoint(reported["n"].to_pylist())
    assert reported["rows"].to_pylist() == lost["rows"].to_pylist()
    assert sum(reported["rows"].to_pylist()) == 25


def test_ingest_task_fails_when_its_block_is_refused(folder: BlockFolder) -> None:
    class RefusingBlockSink:
        def put_batch(self, batch: pa.RecordBatch, in_order: bool = True) -> tuple[int, int]:
            raise ConnectionError("gone")

    batch = pa.RecordBatch.from_pydict({"id": [1], "_holdfast_hash": [1]})
    with pytest.raises(ConnectionError, match="gone"):
        list(IngestTask(RefusingBlockSink, ("id",), 10, 1 << 20)([batch]))


# --- refused inputs -----------------------------------------------------------------------------


def test_key_missing_lists_the_existing_columns(spark: SparkSession, folder: BlockFolder) -> None:
    with pytest.raises(KeyMissing) as caught:
        ingest(spark.range(3), ["doc_id"], folder.sink_factory)
    assert caught.value.missing == ["doc_id"]
    assert caught.value.columns == ["id"]


@pytest.mark.parametrize(
    "kind",
    [
        "double",
        "float",
        "array<int>",
        "struct<a: int>",
        "map<int, int>",
        "string collate UTF8_LCASE",
    ],
)
def test_key_type_without_an_order_is_refused(
    spark: SparkSession, folder: BlockFolder, kind: str
) -> None:
    with pytest.raises(KeyTypeUnsupported) as caught:
        ingest(spark.sql(f"select cast(null as {kind}) k"), ["k"], folder.sink_factory)
    assert caught.value.column == "k"


def test_null_keys_are_refused(spark: SparkSession, folder: BlockFolder) -> None:
    df = spark.createDataFrame([(1, "a"), (2, None), (3, None)], "id int, k string")
    with pytest.raises(KeyNull) as caught:
        ingest(df, ["id", "k"], folder.sink_factory)
    assert caught.value.rows_min == 2


def test_duplicate_keys_are_refused_with_examples(spark: SparkSession, folder: BlockFolder) -> None:
    df = spark.range(100, numPartitions=1).select((F.col("id") % 90).alias("k"))
    with pytest.raises(KeyDuplicate) as caught:
        ingest(df, ["k"], folder.sink_factory)
    assert caught.value.found == 10
    assert caught.value.examples == ["0", "1", "2", "3", "4"]
    assert folder.names() == set()


def test_duplicate_keys_in_different_partitions_are_found_by_the_merge(
    spark: SparkSession, folder: BlockFolder
) -> None:
    df = spark.range(10, numPartitions=1)
    got = ingest(df.union(df.filter("id = 4")), ["id"], folder.sink_factory, block_rows=10)
    assert got.needs_merge
    with pytest.raises(KeyDuplicate) as caught:
        folder.rows(got, ["id"])
    assert caught.value.examples == ["4"]


def random_keys(spark: SparkSession, rows: int) -> DataFrame:
    return spark.range(rows, numPartitions=4).select(
        F.sha2(F.col("id").cast("string"), 256).alias("k"), "id"
    )


def test_unordered_input_is_sorted_by_spark(spark: SparkSession, folder: BlockFolder) -> None:
    df = random_keys(spark, 3000)
    first = ingest(df, ["k"], folder.sink_factory, block_rows=100, memory_bytes=50_000)
    assert (first.needs_sort, first.needs_merge, first.blocks) == (True, False, [])
    got = ingest(df, ["k"], folder.sink_factory, block_rows=100, sort=True)
    assert (got.needs_sort, got.needs_merge, got.size) == (False, False, 3000)
    key_column = [row["k"] for row in folder.rows(got, ["k"])]
    assert key_column == sorted(key_column)
    assert got.input_hash == ingest(df, ["k"], folder.sink_factory).input_hash
    assert got.input_hash == fingerprint.content_hash(df)


def test_ingest_of_an_unordered_input_ends_at_stop_ingest(
    spark: SparkSession, folder: BlockFolder
) -> None:
    connect = partial(FileBlockSink, str(folder.path), 5)
    got = ingest(random_keys(spark, 20_000), ["k"], connect, block_rows=100)
    assert got.needs_sort
    # Of 200 blocks. Requests sent before the fifth block was stored may have been stored, too.
    assert len(folder.names()) <= 5 + 4


def test_slightly_overlapping_blocks_are_merged_beyond_memory_bytes(
    spark: SparkSession, folder: BlockFolder
) -> None:
    """Each partition contains a few keys of the range of the next partition."""
    key = F.when(F.col("id") % 500 == 499, F.col("id") + 3).otherwise(F.col("id"))
    df = spark.range(5000, numPartitions=10).select(key.alias("k")).dropDuplicates(["k"])
    df = df.repartitionByRange(10, (F.col("k") / 500).cast("int")).sortWithinPartitions("k")
    got = ingest(df, ["k"], folder.sink_factory, block_rows=100, memory_bytes=20_000)
    assert not got.needs_sort
    key_column = [row["k"] for row in folder.rows(got, ["k"])]
    assert key_column == sorted(key_column)


def test_duplicate_keys_are_found_after_a_sort(spark: SparkSession, folder: BlockFolder) -> None:
    """After a sort equal keys are adjacent: in one block, or at the end of one block and the start of the next."""
    df = random_keys(spark, 300)
    for rows in (1, 100):
        with pytest.raises(KeyDuplicate) as caught:
            ingest(
                df.union(df.filter("id = 7")),
                ["k"],
                folder.sink_factory,
                block_rows=rows,
                sort=True,
            )
        assert caught.value.examples == [df.filter("id = 7").first()["k"]]


def test_row_too_large_reports_the_key_of_the_row(spark: SparkSession, folder: BlockFolder) -> None:
    """The error has the largest row that any task found."""
    size = F.when(F.col("id") == 7, 300_000).when(F.col("id") == 31, 200_000).otherwise(10)
    df = spark.range(0, 40, 1, 2).select(
        "id", (F.col("id") % 3).alias("part"), F.repeat(F.lit("x"), size).alias("text")
    )
    connect = partial(FileBlockSink, str(folder.path), bytes_max=100_000)
    with pytest.raises(RowTooLarge) as caught:
        ingest(df, ["part", "id"], connect, block_bytes=50_000)
    assert (caught.value.key, caught.value.row) == (["part", "id"], "1, 7")
    assert 300_000 < caught.value.bytes < 302_000
    assert caught.value.max == 100_000
    assert "no call was made" in caught.value.hint


def test_ingest_task_stops_after_a_row_too_large(folder: BlockFolder) -> None:
    texts = ["x" * 200_000 if at == 3 else "x" * 30_000 for at in range(40)]
    columns = {"id": list(range(40)), "_holdfast_hash": [1] * 40, "text": texts}
    body = IngestTask(
        partial(FileBlockSink, str(folder.path), bytes_max=100_000), ("id",), 100, 50_000
    )
    [reported] = body([pa.RecordBatch.from_pydict(columns)])
    large = [row for row in reported.to_pylist() if row["too_large"]]
    assert [(row["n"], row["examples"]) for row in large] == [(-1, ["3"])]
    # The task encodes the next block while it sends this one.
    assert len(folder.names()) <= 5


@pytest.mark.parametrize(
    "name", ["_seq", "_state", "_Attempts", "_error", "_holdfast_hash", "_holdfast_match_1"]
)
def test_reserved_column_name_is_refused(
    spark: SparkSession, folder: BlockFolder, name: str
) -> None:
    with pytest.raises(ColumnReserved) as caught:
        ingest(spark.range(1).withColumn(name, F.lit(1)), ["id"], folder.sink_factory)
    assert caught.value.columns == [name]


def test_repeated_column_name_is_refused(spark: SparkSession, folder: BlockFolder) -> None:
    with pytest.raises(ColumnRepeated):
        ingest(spark.sql("select 1 id, 2 a, 3 A"), ["id"], folder.sink_factory)
    with pytest.raises(ColumnRepeated):
        ingest(spark.range(1), ["id", "id"], folder.sink_factory)


def test_streaming_input_is_refused(spark: SparkSession, folder: BlockFolder) -> None:
    with pytest.raises(InputStreaming):
        ingest(spark.readStream.format("rate").load(), ["value"], folder.sink_factory)


# --- fingerprints -------------------------------------------------------------------------------


def test_content_hash_equals_the_ingest_hash_in_any_row_order(
    spark: SparkSession, folder: BlockFolder
) -> None:
    df = spark.range(500).select("id", F.when(F.col("id") % 3 == 0, F.col("id")).alias("v"))
    got = ingest(df, ["id"], folder.sink_factory, block_rows=50)
    assert fingerprint.content_hash(df.orderBy(F.desc("id"))) == got.input_hash
    assert got.input_hash.startswith("500:")


def test_row_hash_differs_for_different_rows(spark: SparkSession) -> None:
    selects = [
        "1 a, 0 b",
        "1 a, cast(null as int) b",
        "cast(null as int) a, 1 b",
        "0 a, 1 b",
        "array(1, 2) a, array(3) b",
        "array(1) a, array(2, 3) b",
        "array(1, null, 2) a, array(3) b",
        "array(null, 1, 2) a, array(3) b",
        "array(true, true) a, 0 b",
        "array(cast(null as boolean), null) a, 0 b",
        "map('x', 1) a, 0 b",
        "map('x', 2) a, 0 b",
        "map(x'01', array(map(1, 2))) a, 0 b",
        "map(x'01', array(map(1, 3))) a, 0 b",
        "named_struct('x', cast(null as int), 'y', 1) a, 0 b",
        "named_struct('x', 1, 'y', cast(null as int)) a, 0 b",
        "array(named_struct('t', timestamp'2026-01-01 00:00:00.000001')) a, 0 b",
        "array(named_struct('t', timestamp'2026-01-01 00:00:00.000002')) a, 0 b",
        "'A' collate UTF8_LCASE a, 0 b",
        "'a' collate UTF8_LCASE a, 0 b",
    ]
    rows = [spark.sql(f"select {text}") for text in selects]
    hashed = [df.select(fingerprint.row_hash(df.schema).alias("h")) for df in rows]
    assert reduce(DataFrame.union, hashed).distinct().count() == len(selects)


def test_match_hashes_cover_only_the_match_columns(
    spark: SparkSession, folder: BlockFolder
) -> None:
    df = spark.sql("select id k, id % 2 text, -id at from range(6)")
    whole = folder.hashes(ingest(df, ["k"], folder.sink_factory), "k")
    text = folder.hashes(ingest(df, ["k"], folder.sink_factory, match=["text"]), "k")
    assert len(set(whole.values())) == 6
    assert len(set(text.values())) == 2
    assert len({one for pair in text.values() for one in pair}) == 4, "the two differ"
    # The order of the columns and further columns do not change the hashes.
    again = spark.sql("select 9 new, -id at, id % 2 text, id k from range(6)")
    got = ingest(again, ["k"], folder.sink_factory, match=["text"])
    assert folder.hashes(got, "k") == text
    assert got.match_digest == fingerprint.match_digest(df.schema, ["text"])
    assert got.match_digest != fingerprint.match_digest(df.schema, ["text", "at"])
    swapped = spark.sql("select id k, -id text, id % 2 at from range(6)")
    assert folder.hashes(ingest(swapped, ["k"], folder.sink_factory), "k") != whole


def test_null_changes_both_match_hashes(spark: SparkSession) -> None:
    selects = ["1 a, 0 b", "1 a, cast(null as int) b", "cast(null as int) a, 1 b", "0 a, 1 b"]
    pairs = []
    for text in selects:
        df = spark.sql(f"select {text}")
        [row] = df.select(*fingerprint.match_hashes(df.schema, ["b", "a"])).collect()
        pairs.append(tuple(row))
    assert len({one for pair in pairs for one in pair}) == 2 * len(selects)


def test_input_hash_includes_column_names_and_types(spark: SparkSession) -> None:
    selects = ["1 a, 0 b", "1 b, 0 a", "1L a, 0 b"]
    schemas = [spark.sql(f"select {text}").schema for text in selects]
    assert len({fingerprint.format_input_hash(schema, 1, 7) for schema in schemas}) == len(selects)


def test_content_hash_ignores_nullability(spark: SparkSession) -> None:
    sure = spark.range(3)
    unsure = spark.createDataFrame(sure.collect(), "id bigint")
    assert unsure.schema["id"].nullable
    assert fingerprint.content_hash(sure) == fingerprint.content_hash(unsure)


def plan_fingerprints(spark: SparkSession, path: str) -> dict[str, str]:
    files = spark.read.parquet(path)
    frames = {
        "range": spark.range(10),
        "renamed": spark.range(10).withColumnRenamed("id", "doc"),
        "files": files,
        "columns": files.select("id", F.upper(F.col("id").cast("string")).alias("x")),
        "filter": files.filter("id > 3"),
        "other filter": files.filter("id > 4"),
        "text": files.filter("cast(id as string) = 'id'"),
        "column": files.filter("cast(id as string) = id"),
        "join": files.alias("l").join(files, "id").orderBy("id"),
        "sum": files.groupBy("id").agg(F.sum("id")),
        "wide": files.select("*", *[F.lit(at).alias(f"c{at}") for at in range(60)]),
        "wider": files.select("*", *[F.lit(at // 59).alias(f"c{at}") for at in range(60)]),
    }
    return {name: fingerprint.plan_fingerprint(df) for name, df in frames.items()}


def test_plan_fingerprint_over_files_is_trusted_and_stable(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "in")
    spark.range(10).write.parquet(path)
    once = plan_fingerprints(spark, path)
    assert plan_fingerprints(spark, path) == once
    assert len(set(once.values())) == len(once)
    assert {name for name, plan in once.items() if not fingerprint.is_trusted(plan)} == set()


def test_plan_fingerprint_of_a_nondeterministic_plan_is_not_trusted(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "in")
    spark.range(10).write.parquet(path)
    spark.range(10).write.csv(path + "csv")
    files = spark.read.parquet(path)
    identity = F.udf(lambda value: value, "bigint")
    cases = {
        "local rows": spark.createDataFrame([(1,)], "id int"),
        "values": spark.sql("values (1), (2)"),
        "udf": files.select(identity("id").alias("id")),
        "map": files.mapInArrow(lambda batches: batches, "id bigint"),
        "clock": files.withColumn("now", F.current_timestamp()),
        "random": files.withColumn("r", F.rand()),
        "limit": files.limit(3),
        "options": spark.read.schema("id bigint").csv(path + "csv"),
        "like an id": files.filter("cast(id as string) = 'x#5'"),
    }
    trusted = [
        name
        for name, df in cases.items()
        if fingerprint.is_trusted(fingerprint.plan_fingerprint(df))
    ]
    assert trusted == []


def test_plan_fingerprint_of_a_cached_input_is_not_trusted(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "in")
    spark.range(10).write.parquet(path)
    df = spark.read.parquet(path).cache()
    try:
        assert not fingerprint.is_trusted(fingerprint.plan_fingerprint(df.union(spark.range(3))))
    finally:
        df.unpersist()


def test_changed_file_changes_the_plan_fingerprint(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "in"
    spark.range(10, numPartitions=1).write.parquet(str(path))
    before = fingerprint.plan_fingerprint(spark.read.parquet(str(path)))
    [file] = path.glob("*.parquet")
    os.utime(file, ns=(1, 1))
    assert fingerprint.plan_fingerprint(spark.read.parquet(str(path))) != before


def test_same_input_with_an_equal_trusted_plan_reads_no_data(spark: SparkSession) -> None:
    plan = fingerprint.plan_fingerprint(spark.range(10))
    assert fingerprint.same_input(spark.range(10), plan, "never compared")
    assert not fingerprint.same_input(
        spark.range(11), plan, fingerprint.content_hash(spark.range(10))
    )


def test_same_input_compares_content_hashes_without_a_trusted_plan(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1,), (2,)], "id int")
    plan, content = fingerprint.plan_fingerprint(df), fingerprint.content_hash(df)
    assert fingerprint.same_input(spark.createDataFrame([(2,), (1,)], "id int"), plan, content)
    assert not fingerprint.same_input(spark.createDataFrame([(1,), (3,)], "id int"), plan, content)
    assert fingerprint.same_input(spark.range(10), plan, fingerprint.content_hash(spark.range(10)))
