"""The standalone cluster and the Connect server of the Spark tests run Spark jobs."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from holdfast.spark.session import session
from tests.spark.clusters import cluster

COUNTS = "pid long, parent long, total long"


def count_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    total = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict(
        {"pid": [os.getpid()], "parent": [os.getppid()], "total": [total]}
    )


@pytest.mark.deep
def test_cluster_runs_a_job_on_both_workers_and_lists_its_processes(
    no_session: None, tmp_path: Path
) -> None:
    with cluster(tmp_path) as two_workers:
        spark = session(two_workers.url, app="tests", config=two_workers.config)
        try:
            rows = spark.range(0, 1000, 1, 2).mapInArrow(count_rows, COUNTS).collect()
            app_id = spark.conf.get("spark.app.id")
            executors = two_workers.executors(app_id)
        finally:
            spark.stop()

    assert [row.total for row in rows] == [500, 500]
    assert {executor.worker_pid for executor in executors} == {
        worker.pid for worker in two_workers.workers
    }
    assert {row.parent for row in rows} == {
        pid for executor in executors for pid in executor.python_processes.daemons
    }
    assert {row.pid for row in rows} == {
        pid for executor in executors for pid in executor.python_processes.workers
    }
    assert two_workers.executors() == []


@pytest.mark.xdist_group("connect")
def test_connect_server_runs_a_job(connected: SparkSession) -> None:
    rows = connected.range(0, 1000, 1, 2).mapInArrow(count_rows, COUNTS).collect()
    assert [row.total for row in rows] == [500, 500]
    assert session() is connected
