"""A Spark job that somebody ends ends the drive: the run stays open, and nothing is started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.spark import Run
from holdfast.spark.errors import JobCancelled
from tests.processes import TIMEOUT_S
from tests.spark.test_stage import Place, Thread, held_up, jobs_of, tuples, until_held_up

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def all_jobs(spark: SparkSession) -> None:
    spark.sparkContext.cancelAllJobs()


def the_job(spark: SparkSession) -> None:
    """What the link "kill" of a job in the web UI does."""
    [job] = spark.sparkContext.statusTracker().getActiveJobsIds()
    spark.sparkContext._jsc.sc().cancelJob(job)


def the_stage(spark: SparkSession) -> None:
    """The same of a stage."""
    [stage] = spark.sparkContext.statusTracker().getActiveStageIds()
    spark.sparkContext._jsc.sc().cancelStage(stage)


@pytest.mark.parametrize(
    "kill", [the_job, *(pytest.param(one, marks=pytest.mark.deep) for one in (all_jobs, the_stage))]
)
def test_a_killed_job_ends_the_drive_and_the_run_resumes(
    spark: SparkSession, place: Place, kill: Callable[[SparkSession], None]
) -> None:
    stage = place.stage(held_up(place), flush_rows=1)
    df = spark.range(0, 50, 1, 2)
    thread = Thread(lambda: stage.run(df, output=place.output))
    until_held_up(place)
    before = jobs_of(spark)
    kill(spark)
    thread.join(2 * TIMEOUT_S)
    assert isinstance(thread.error, JobCancelled)
    assert "\n" not in str(thread.error)
    assert "resumes" in str(thread.error.hint)
    assert jobs_of(spark) == before
    with Run.of("job", spark, place.store) as run:
        assert run.status == "open"
    (place.path / "go").touch()
    with stage.run(df, output=place.output) as run:
        assert tuples(run.output()) == [(n, n) for n in range(50)]
    # Two tasks, each with one call under way and one row that was not reported.
    assert len(place.calls()) <= 50 + 2 * 2
