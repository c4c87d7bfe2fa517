"""Ingest and fingerprints over Spark Connect, where there is no JVM to ask."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from holdfast.spark import fingerprint
from holdfast.spark.ingest import KeyMissing, ingest
from tests.spark.test_ingest import Folder, plans


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    path = tmp_path / "blocks"
    path.mkdir()
    return Folder(path)


def test_rows_are_ingested_in_order_and_hashed(connected: SparkSession, folder: Folder) -> None:
    df = connected.range(300).select(F.format_string("k%03d", 299 - F.col("id")).alias("k"), "id")
    got = ingest(df.repartition(3), ["k"], folder.connect, block_rows=40)
    rows = folder.rows(got, ["k"])
    assert [row["k"] for row in rows] == [f"k{at:03}" for at in range(300)]
    assert got.input_hash == fingerprint.content_hash(df)


def test_a_missing_key_column_is_refused(connected: SparkSession, folder: Folder) -> None:
    with pytest.raises(KeyMissing):
        ingest(connected.range(3), ["doc_id"], folder.connect)


@pytest.mark.deep
def test_a_plan_over_files_is_trusted_however_wide(connected: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "in")
    connected.range(10).write.parquet(path)
    once = plans(connected, path)
    assert plans(connected, path) == once
    assert len(set(once.values())) == len(once)
    assert {name for name, plan in once.items() if not fingerprint.trusted(plan)} == set()


def test_rows_that_live_in_the_session_are_not_trusted(connected: SparkSession) -> None:
    df = connected.createDataFrame([(1,), (2,)], "id int")
    plan = fingerprint.plan_of(df)
    assert not fingerprint.trusted(plan)
    assert fingerprint.same_input(df, plan, fingerprint.content_hash(df))
