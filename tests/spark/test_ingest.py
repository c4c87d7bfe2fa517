"""Ingest on a real Spark: the order, the blocks, what is refused, and when an input is the same."""

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
from holdfast.spark import fingerprint, merge
from holdfast.spark.ingest import (
    ColumnRepeated,
    ColumnReserved,
    Ingested,
    InputStreaming,
    KeyDuplicate,
    KeyMissing,
    KeyNull,
    KeyTypeUnsupported,
    RowTooLarge,
    TaskBody,
    ingest,
)
from holdfast.spark.match import HASHES
from holdfast.spark.wire import STOP


class Put:
    """What a task has of the service: it hands over blocks, here as files."""

    def __init__(self, path: str, unordered_max: int = 1 << 40, bytes_max: int = 1 << 40) -> None:
        self.path = path
        self.unordered_max = unordered_max
        self.bytes_max = bytes_max

    def put_batch(self, batch: pa.RecordBatch, in_order: bool = True) -> tuple[int, int]:
        data = merge.encode(batch)
        if len(data) > self.bytes_max:
            raise ValueTooLarge(what="input row", bytes=len(data), max=self.bytes_max)
        return self.put_block(data, in_order), len(data)

    def put_block(self, data: bytes, in_order: bool = True) -> int:
        if not in_order and len(os.listdir(self.path)) >= self.unordered_max:
            return STOP
        n = len(os.listdir(self.path))
        while True:
            try:
                with open(os.path.join(self.path, str(n)), "xb") as file:
                    file.write(data)
                return n
            except FileExistsError:
                n += 1


class Folder:
    """Where the blocks are, and what the service does with them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def connect(self) -> Callable[[], Put]:
        return partial(Put, str(self.path))

    def read(self, n: int) -> bytes:
        return (self.path / str(n)).read_bytes()

    def write(self, data: bytes) -> int:
        return self.connect().put_block(data)

    def names(self) -> set[int]:
        return {int(path.name) for path in self.path.iterdir()}

    def rows(self, got: Ingested, key: list[str]) -> list[dict[str, Any]]:
        """What the journal holds, in seq order."""
        blocks = got.blocks
        if got.needs_merge:
            blocks = merge.merge(got.staged, key, self.read, self.write).blocks
        assert sum(rows for _, rows in blocks) == got.size
        batches = [merge.decode(self.read(n)) for n, _ in blocks]
        assert all(batch.schema.names == [*got.schema.names, *HASHES] for batch in batches)
        batches = [batch.select(got.schema.names) for batch in batches]
        assert all(batch.schema == got.schema for batch in batches)
        return [row for batch in batches for row in batch.to_pylist()]

    def hashes(self, got: Ingested, key: str) -> dict[Any, tuple[int, int]]:
        """The two hashes of each row, by its key."""
        blocks = [merge.decode(self.read(n)) for n, _ in got.blocks]
        columns = [[row for b in blocks for row in b[name].to_pylist()] for name in (key, *HASHES)]
        return {k: (one, two) for k, one, two in zip(*columns, strict=True)}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    path = tmp_path / "blocks"
    path.mkdir()
    return Folder(path)


# --- order and blocks ---------------------------------------------------------------------------


def test_an_input_that_comes_sorted_is_stored_once_and_not_rewritten(
    spark: SparkSession, folder: Folder
) -> None:
    got = ingest(spark.range(1000), ["id"], folder.connect, block_rows=150)
    assert not got.needs_merge
    assert got.size == 1000
    assert {n for n, _ in got.blocks} == folder.names()
    assert [row["id"] for row in folder.rows(got, ["id"])] == list(range(1000))


def test_a_sorted_parquet_is_not_rewritten(
    spark: SparkSession, folder: Folder, tmp_path: Path
) -> None:
    path = str(tmp_path / "sorted")
    spark.range(500, numPartitions=3).select(
        F.format_string("k%05d", "id").alias("k")
    ).write.parquet(path)
    got = ingest(spark.read.parquet(path), ["k"], folder.connect)
    assert not got.needs_merge
    assert [row["k"] for row in folder.rows(got, ["k"])] == [f"k{at:05}" for at in range(500)]


def test_blocks_in_descending_order_are_sorted_and_disjoint(
    spark: SparkSession, folder: Folder
) -> None:
    df = spark.range(1000).select((-F.col("id")).alias("k"))
    got = ingest(df, ["k"], folder.connect, block_rows=100)
    assert not got.needs_merge
    assert [row["k"] for row in folder.rows(got, ["k"])] == list(range(-999, 1))


def test_rows_are_numbered_as_spark_sorts_them(spark: SparkSession, folder: Folder) -> None:
    texts = ["", "a", "B", "é", "ab", "\U0001f600", "\uffee", "a\0", "10", "9"]
    df = spark.createDataFrame([(text,) for text in texts], "k string").repartition(3)
    got = ingest(df, ["k"], folder.connect, block_rows=2)
    assert got.needs_merge
    assert got.blocks == []
    expected = [row.k for row in df.orderBy("k").collect()]
    assert [row["k"] for row in folder.rows(got, ["k"])] == expected


def test_the_order_does_not_depend_on_the_partitions(spark: SparkSession, folder: Folder) -> None:
    df = spark.range(3000).select(F.sha2(F.col("id").cast("string"), 256).alias("k"), "id")
    told = []
    for parts in (1, 5):
        got = ingest(df.repartition(parts), ["k"], folder.connect, block_rows=400)
        told.append((got.input_hash, folder.rows(got, ["k"])))
    assert told[0] == told[1]


def test_a_composite_key_of_several_types_is_ordered_as_spark_sorts_it(
    spark: SparkSession, folder: Folder
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
    got = ingest(df.repartition(3), key, folder.connect, block_rows=30)
    expected = [row.id for row in df.orderBy(*key).collect()]
    assert [row["id"] for row in folder.rows(got, key)] == expected


def test_empty_partitions_leave_no_block(spark: SparkSession, folder: Folder) -> None:
    df = spark.range(100, numPartitions=10).filter("id in (5, 95)")
    got = ingest(df, ["id"], folder.connect)
    assert [rows for _, rows in got.blocks] == [1, 1]
    assert len(folder.names()) == 2


def test_an_empty_input_has_a_schema_and_no_rows(spark: SparkSession, folder: Folder) -> None:
    kinds = "k string, at timestamp, tags array<string>"
    got = ingest(spark.createDataFrame([], kinds), ["k"], folder.connect)
    assert (got.size, got.blocks, got.staged, got.needs_merge) == (0, [], [], False)
    full = spark.sql("select 'a' k, timestamp'2026-01-01' at, array('x') tags")
    assert got.schema.names == ["k", "at", "tags"]
    other = ingest(full, ["k"], folder.connect).schema
    assert [pa.types.is_timestamp(field.type) for field in got.schema] == [
        pa.types.is_timestamp(field.type) for field in other
    ]
    assert got.input_hash == fingerprint.content_hash(spark.createDataFrame([], kinds))


def test_rows_of_many_bytes_are_cut_by_bytes(spark: SparkSession, folder: Folder) -> None:
    df = spark.range(40, numPartitions=1).select("id", F.repeat(F.lit("x"), 10_000).alias("text"))
    got = ingest(df, ["id"], folder.connect, block_bytes=50_000)
    assert got.size == 40
    assert all(rows <= 5 for _, rows in got.blocks)
    assert all(block.size_bytes < 60_000 for block in got.staged)


def test_columns_of_every_type_are_kept_as_they_are(spark: SparkSession, folder: Folder) -> None:
    df = spark.sql(
        """select id, array(1, null) a, map('x', id) m, named_struct('q', array(map(1, 'y'))) s,
        cast(id as decimal(20, 3)) d, timestamp'2026-01-01 00:00:00.000001' t, date'2026-01-01' day,
        x'00ff' b, cast(null as string) nothing, interval 1 day i, true yes, 1.5f f
        from range(1, 4)"""
    )
    got = ingest(df.orderBy(F.desc("id")).coalesce(1), ["id"], folder.connect)
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


def test_blocks_of_a_task_that_ran_twice_are_not_named(folder: Folder) -> None:
    body = TaskBody(folder.connect, ("id",), 10, 1 << 20)
    ids, hashes = pa.array(range(25)), pa.array([1] * 25)
    batch = pa.RecordBatch.from_arrays([ids, hashes], names=["id", "_holdfast_hash"])
    [lost], [told] = list(body([batch])), list(body([batch]))
    assert set(lost["n"].to_pylist()) | set(told["n"].to_pylist()) == folder.names()
    assert set(lost["n"].to_pylist()).isdisjoint(told["n"].to_pylist())
    assert told["rows"].to_pylist() == lost["rows"].to_pylist()
    assert sum(told["rows"].to_pylist()) == 25


def test_a_task_whose_block_is_not_taken_fails(folder: Folder) -> None:
    class Refusing:
        def put_batch(self, batch: pa.RecordBatch, in_order: bool = True) -> tuple[int, int]:
            raise ConnectionError("gone")

    batch = pa.RecordBatch.from_pydict({"id": [1], "_holdfast_hash": [1]})
    with pytest.raises(ConnectionError, match="gone"):
        list(TaskBody(Refusing, ("id",), 10, 1 << 20)([batch]))


# --- what is refused ----------------------------------------------------------------------------


def test_a_missing_key_column_names_those_there_are(spark: SparkSession, folder: Folder) -> None:
    with pytest.raises(KeyMissing) as caught:
        ingest(spark.range(3), ["doc_id"], folder.connect)
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
def test_a_key_without_an_order_is_refused(spark: SparkSession, folder: Folder, kind: str) -> None:
    with pytest.raises(KeyTypeUnsupported) as caught:
        ingest(spark.sql(f"select cast(null as {kind}) k"), ["k"], folder.connect)
    assert caught.value.column == "k"


def test_rows_without_a_key_are_refused(spark: SparkSession, folder: Folder) -> None:
    df = spark.createDataFrame([(1, "a"), (2, None), (3, None)], "id int, k string")
    with pytest.raises(KeyNull) as caught:
        ingest(df, ["id", "k"], folder.connect)
    assert caught.value.rows_min == 2


def test_duplicate_keys_are_refused_with_examples(spark: SparkSession, folder: Folder) -> None:
    df = spark.range(100, numPartitions=1).select((F.col("id") % 90).alias("k"))
    with pytest.raises(KeyDuplicate) as caught:
        ingest(df, ["k"], folder.connect)
    assert caught.value.found == 10
    assert caught.value.examples == ["0", "1", "2", "3", "4"]
    assert folder.names() == set()


def test_duplicate_keys_in_different_partitions_are_found_by_the_merge(
    spark: SparkSession, folder: Folder
) -> None:
    df = spark.range(10, numPartitions=1)
    got = ingest(df.union(df.filter("id = 4")), ["id"], folder.connect, block_rows=10)
    assert got.needs_merge
    with pytest.raises(KeyDuplicate) as caught:
        folder.rows(got, ["id"])
    assert caught.value.examples == ["4"]


def random_keys(spark: SparkSession, rows: int) -> DataFrame:
    return spark.range(rows, numPartitions=4).select(
        F.sha2(F.col("id").cast("string"), 256).alias("k"), "id"
    )


def test_an_input_in_no_order_is_sorted_by_spark(spark: SparkSession, folder: Folder) -> None:
    df = random_keys(spark, 3000)
    first = ingest(df, ["k"], folder.connect, block_rows=100, memory_bytes=50_000)
    assert (first.needs_sort, first.needs_merge, first.blocks) == (True, False, [])
    got = ingest(df, ["k"], folder.connect, block_rows=100, sort=True)
    assert (got.needs_sort, got.needs_merge, got.size) == (False, False, 3000)
    found = [row["k"] for row in folder.rows(got, ["k"])]
    assert found == sorted(found)
    assert got.input_hash == ingest(df, ["k"], folder.connect).input_hash
    assert got.input_hash == fingerprint.content_hash(df)


def test_a_pass_over_an_input_in_no_order_ends_when_the_service_says_stop(
    spark: SparkSession, folder: Folder
) -> None:
    connect = partial(Put, str(folder.path), 5)
    got = ingest(random_keys(spark, 20_000), ["k"], connect, block_rows=100)
    assert got.needs_sort
    # Of 200 blocks: what was asked for before the fifth was stored may have been stored, too.
    assert len(folder.names()) <= 5 + 4


def test_an_input_whose_blocks_overlap_a_little_is_merged_whatever_its_size(
    spark: SparkSession, folder: Folder
) -> None:
    """Each partition holds a few keys of the next one's range."""
    key = F.when(F.col("id") % 500 == 499, F.col("id") + 3).otherwise(F.col("id"))
    df = spark.range(5000, numPartitions=10).select(key.alias("k")).dropDuplicates(["k"])
    df = df.repartitionByRange(10, (F.col("k") / 500).cast("int")).sortWithinPartitions("k")
    got = ingest(df, ["k"], folder.connect, block_rows=100, memory_bytes=20_000)
    assert not got.needs_sort
    found = [row["k"] for row in folder.rows(got, ["k"])]
    assert found == sorted(found)


def test_duplicate_keys_are_found_after_a_sort(spark: SparkSession, folder: Folder) -> None:
    """Equal keys are side by side then: in one block, or at the end of one and the start of the next."""
    df = random_keys(spark, 300)
    for rows in (1, 100):
        with pytest.raises(KeyDuplicate) as caught:
            ingest(df.union(df.filter("id = 7")), ["k"], folder.connect, block_rows=rows, sort=True)
        assert caught.value.examples == [df.filter("id = 7").first()["k"]]


def test_a_row_above_the_limit_is_refused_with_its_key(spark: SparkSession, folder: Folder) -> None:
    """The largest of those that were seen, of whatever task."""
    size = F.when(F.col("id") == 7, 300_000).when(F.col("id") == 31, 200_000).otherwise(10)
    df = spark.range(0, 40, 1, 2).select(
        "id", (F.col("id") % 3).alias("part"), F.repeat(F.lit("x"), size).alias("text")
    )
    connect = partial(Put, str(folder.path), bytes_max=100_000)
    with pytest.raises(RowTooLarge) as caught:
        ingest(df, ["part", "id"], connect, block_bytes=50_000)
    assert (caught.value.key, caught.value.row) == (["part", "id"], "1, 7")
    assert 300_000 < caught.value.bytes < 302_000
    assert caught.value.max == 100_000
    assert "no call was made" in caught.value.hint


def test_a_task_stores_nothing_after_a_row_above_the_limit(folder: Folder) -> None:
    texts = ["x" * 200_000 if at == 3 else "x" * 30_000 for at in range(40)]
    columns = {"id": list(range(40)), "_holdfast_hash": [1] * 40, "text": texts}
    body = TaskBody(partial(Put, str(folder.path), bytes_max=100_000), ("id",), 100, 50_000)
    [told] = body([pa.RecordBatch.from_pydict(columns)])
    large = [row for row in told.to_pylist() if row["too_large"]]
    assert [(row["n"], row["examples"]) for row in large] == [(-1, ["3"])]
    # The next block is made while this one is on its way.
    assert len(folder.names()) <= 5


@pytest.mark.parametrize(
    "name", ["_seq", "_state", "_Attempts", "_error", "_holdfast_hash", "_holdfast_match_1"]
)
def test_a_column_named_like_ours_is_refused(
    spark: SparkSession, folder: Folder, name: str
) -> None:
    with pytest.raises(ColumnReserved) as caught:
        ingest(spark.range(1).withColumn(name, F.lit(1)), ["id"], folder.connect)
    assert caught.value.columns == [name]


def test_two_columns_of_one_name_are_refused(spark: SparkSession, folder: Folder) -> None:
    with pytest.raises(ColumnRepeated):
        ingest(spark.sql("select 1 id, 2 a, 3 A"), ["id"], folder.connect)
    with pytest.raises(ColumnRepeated):
        ingest(spark.range(1), ["id", "id"], folder.connect)


def test_a_streaming_input_is_refused(spark: SparkSession, folder: Folder) -> None:
    with pytest.raises(InputStreaming):
        ingest(spark.readStream.format("rate").load(), ["value"], folder.connect)


# --- fingerprints -------------------------------------------------------------------------------


def test_the_content_hash_is_that_of_ingest_in_any_order(
    spark: SparkSession, folder: Folder
) -> None:
    df = spark.range(500).select("id", F.when(F.col("id") % 3 == 0, F.col("id")).alias("v"))
    got = ingest(df, ["id"], folder.connect, block_rows=50)
    assert fingerprint.content_hash(df.orderBy(F.desc("id"))) == got.input_hash
    assert got.input_hash.startswith("500:")


def test_whatever_differs_in_a_row_differs_in_its_hash(spark: SparkSession) -> None:
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


def test_a_row_has_two_hashes_of_the_columns_that_are_matched(
    spark: SparkSession, folder: Folder
) -> None:
    df = spark.sql("select id k, id % 2 text, -id at from range(6)")
    whole = folder.hashes(ingest(df, ["k"], folder.connect), "k")
    text = folder.hashes(ingest(df, ["k"], folder.connect, match=["text"]), "k")
    assert len(set(whole.values())) == 6
    assert len(set(text.values())) == 2
    assert len({one for pair in text.values() for one in pair}) == 4, "the two differ"
    # Neither the order of the columns nor others beside them count.
    again = spark.sql("select 9 new, -id at, id % 2 text, id k from range(6)")
    got = ingest(again, ["k"], folder.connect, match=["text"])
    assert folder.hashes(got, "k") == text
    assert got.match_digest == fingerprint.match_digest(df.schema, ["text"])
    assert got.match_digest != fingerprint.match_digest(df.schema, ["text", "at"])
    swapped = spark.sql("select id k, -id text, id % 2 at from range(6)")
    assert folder.hashes(ingest(swapped, ["k"], folder.connect), "k") != whole


def test_nothing_in_place_of_a_value_changes_both_hashes(spark: SparkSession) -> None:
    selects = ["1 a, 0 b", "1 a, cast(null as int) b", "cast(null as int) a, 1 b", "0 a, 1 b"]
    pairs = []
    for text in selects:
        df = spark.sql(f"select {text}")
        [row] = df.select(*fingerprint.match_hashes(df.schema, ["b", "a"])).collect()
        pairs.append(tuple(row))
    assert len({one for pair in pairs for one in pair}) == 2 * len(selects)


def test_names_and_types_of_columns_are_part_of_the_content(spark: SparkSession) -> None:
    selects = ["1 a, 0 b", "1 b, 0 a", "1L a, 0 b"]
    schemas = [spark.sql(f"select {text}").schema for text in selects]
    assert len({fingerprint.text_of(schema, 1, 7) for schema in schemas}) == len(selects)


def test_nullability_is_no_part_of_the_content(spark: SparkSession) -> None:
    sure = spark.range(3)
    unsure = spark.createDataFrame(sure.collect(), "id bigint")
    assert unsure.schema["id"].nullable
    assert fingerprint.content_hash(sure) == fingerprint.content_hash(unsure)


def plans(spark: SparkSession, path: str) -> dict[str, str]:
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
    return {name: fingerprint.plan_of(df) for name, df in frames.items()}


def test_a_plan_over_files_is_trusted_and_the_same_when_built_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "in")
    spark.range(10).write.parquet(path)
    once = plans(spark, path)
    assert plans(spark, path) == once
    assert len(set(once.values())) == len(once)
    assert {name for name, plan in once.items() if not fingerprint.trusted(plan)} == set()


def test_a_plan_that_does_not_determine_its_data_is_not_trusted(
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
    trusted = [name for name, df in cases.items() if fingerprint.trusted(fingerprint.plan_of(df))]
    assert trusted == []


def test_a_cached_input_is_not_trusted(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "in")
    spark.range(10).write.parquet(path)
    df = spark.read.parquet(path).cache()
    try:
        assert not fingerprint.trusted(fingerprint.plan_of(df.union(spark.range(3))))
    finally:
        df.unpersist()


def test_a_file_that_changed_is_another_plan(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "in"
    spark.range(10, numPartitions=1).write.parquet(str(path))
    before = fingerprint.plan_of(spark.read.parquet(str(path)))
    [file] = path.glob("*.parquet")
    os.utime(file, ns=(1, 1))
    assert fingerprint.plan_of(spark.read.parquet(str(path))) != before


def test_an_equal_trusted_plan_needs_no_pass(spark: SparkSession) -> None:
    plan = fingerprint.plan_of(spark.range(10))
    assert fingerprint.same_input(spark.range(10), plan, "never compared")
    assert not fingerprint.same_input(
        spark.range(11), plan, fingerprint.content_hash(spark.range(10))
    )


def test_without_a_trusted_plan_the_contents_decide(spark: SparkSession) -> None:
    df = spark.createDataFrame([(1,), (2,)], "id int")
    plan, told = fingerprint.plan_of(df), fingerprint.content_hash(df)
    assert fingerprint.same_input(spark.createDataFrame([(2,), (1,)], "id int"), plan, told)
    assert not fingerprint.same_input(spark.createDataFrame([(1,), (3,)], "id int"), plan, told)
    assert fingerprint.same_input(spark.range(10), plan, fingerprint.content_hash(spark.range(10)))
