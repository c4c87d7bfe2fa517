"""A Spark job cancelled by a user ends the driver of the run: the run stays open, and no job is restarted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.spark import Run
from holdfast.spark.errors import JobCancelled
from tests.processes import TIMEOUT_S
from tests.spark.test_stage import (
    RunThread,
    StageRig,
    blocking_function,
    count_spark_jobs,
    tuples,
    wait_until_blocked,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    return StageRig(tmp_path)


def cancel_all_jobs(spark: SparkSession) -> None:
    spark.sparkContext.cancelAllJobs()


def cancel_job(spark: SparkSession) -> None:
    """Cancel the job, like the "kill" link of a job in the web UI."""
    [job] = spark.sparkContext.statusTracker().getActiveJobsIds()
    spark.sparkContext._jsc.sc().cancelJob(job)


def cancel_stage(spark: SparkSession) -> None:
    """Cancel the stage, like the "kill" link of a stage in the web UI."""
    [stage] = spark.sparkContext.statusTracker().getActiveStageIds()
    spark.sparkContext._jsc.sc().cancelStage(stage)


@pytest.mark.parametrize(
    "kill",
    [
        cancel_job,
        *(pytest.param(one, marks=pytest.mark.deep) for one in (cancel_all_jobs, cancel_stage)),
    ],
)
def test_cancelled_spark_job_raises_job_cancelled_and_the_run_resumes(
    spark: SparkSession, place: StageRig, kill: Callable[[SparkSession], None]
) -> None:
    stage = place.stage(blocking_function(place), flush_rows=1)
    df = spark.range(0, 50, 1, 2)
    thread = RunThread(lambda: stage.run(df, output=place.output))
    wait_until_blocked(place)
    before = count_spark_jobs(spark)
    kill(spark)
    thread.join(2 * TIMEOUT_S)
    assert isinstance(thread.error, JobCancelled)
    assert "\n" not in str(thread.error)
    assert "resumes" in str(thread.error.hint)
    assert count_spark_jobs(spark) == before
    with Run.of("job", spark, place.store) as run:
        assert run.status == "open"
    (place.path / "go").touch()
    with stage.run(df, output=place.output) as run:
        assert tuples(run.output()) == [(n, n) for n in range(50)]
    # Two tasks, each with one running call and one unreported row.
    assert len(place.calls()) <= 50 + 2 * 2
