"""Ingest and fingerprints over Spark Connect, without access to the JVM."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from holdfast.spark import fingerprint
from holdfast.spark.ingest import KeyMissing, ingest
from tests.spark.test_ingest import BlockFolder, plan_fingerprints

pytestmark = pytest.mark.xdist_group("connect")


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    path = tmp_path / "blocks"
    path.mkdir()
    return BlockFolder(path)


def test_connect_ingest_orders_and_hashes_rows(
    connected: SparkSession, folder: BlockFolder
) -> None:
    df = connected.range(300).select(F.format_string("k%03d", 299 - F.col("id")).alias("k"), "id")
    got = ingest(df.repartition(3), ["k"], folder.sink_factory, block_rows=40)
    rows = folder.rows(got, ["k"])
    assert [row["k"] for row in rows] == [f"k{at:03}" for at in range(300)]
    assert got.input_hash == fingerprint.content_hash(df)


def test_connect_ingest_refuses_a_missing_key_column(
    connected: SparkSession, folder: BlockFolder
) -> None:
    with pytest.raises(KeyMissing):
        ingest(connected.range(3), ["doc_id"], folder.sink_factory)


@pytest.mark.deep
def test_connect_plan_fingerprint_over_files_is_trusted(
    connected: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "in")
    connected.range(10).write.parquet(path)
    once = plan_fingerprints(connected, path)
    assert plan_fingerprints(connected, path) == once
    assert len(set(once.values())) == len(once)
    assert {name for name, plan in once.items() if not fingerprint.is_trusted(plan)} == set()


def test_connect_plan_fingerprint_of_local_rows_is_not_trusted(connected: SparkSession) -> None:
    df = connected.createDataFrame([(1,), (2,)], "id int")
    plan = fingerprint.plan_fingerprint(df)
    assert not fingerprint.is_trusted(plan)
    assert fingerprint.same_input(df, plan, fingerprint.content_hash(df))
