"""A stage in a local session with a PostgreSQL store: a run and the lazy form."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.postgres import fresh_url
from tests.spark.test_stage import StageRig

pytestmark = pytest.mark.timeout(120)

ROWS = 40


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    made = StageRig(tmp_path)
    made.store = fresh_url(
        lasting=True
    )  # the service of the lazy form runs until the process exits
    return made


def test_run_reuses_calls_of_the_lazy_form_on_postgres(
    spark: SparkSession, place: StageRig
) -> None:
    df = spark.range(0, ROWS, 1, 3)
    stage = place.stage(place.counting_function())
    lazy = df.transform(stage)
    assert sorted(row.y for row in lazy.collect()) == [2 * n for n in range(ROWS)]
    assert lazy.count() == ROWS
    with stage.run(df) as run:
        assert run.counts()["COMMITTED"] == ROWS
        assert [row.y for row in run.output().collect()] == [2 * n for n in range(ROWS)]
    assert sorted(map(int, place.calls())) == list(range(ROWS))
