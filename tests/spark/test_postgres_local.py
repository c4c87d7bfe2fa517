"""A stage in a local session, kept on PostgreSQL: the run, and the lazy form."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.postgres import fresh_url
from tests.spark.test_stage import Place

pytestmark = pytest.mark.timeout(120)

ROWS = 40


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.store = fresh_url(
        lasting=True
    )  # the lazy form keeps its service to the end of the process
    return made


def test_what_the_lazy_form_paid_for_a_run_does_not_pay_again(
    spark: SparkSession, place: Place
) -> None:
    df = spark.range(0, ROWS, 1, 3)
    stage = place.stage(place.counting())
    lazy = df.transform(stage)
    assert sorted(row.y for row in lazy.collect()) == [2 * n for n in range(ROWS)]
    assert lazy.count() == ROWS
    with stage.run(df) as run:
        assert run.counts()["COMMITTED"] == ROWS
        assert [row.y for row in run.output().collect()] == [2 * n for n in range(ROWS)]
    assert sorted(map(int, place.calls())) == list(range(ROWS))
