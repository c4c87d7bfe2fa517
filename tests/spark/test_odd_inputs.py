"""Odd inputs of a stage and odd results of its function, one case a row.

Every case is observed on a real session and its outcome compared with the one that is documented, or names the test
that does so elsewhere. `tools/odd_inputs.py` writes docs/spark-odd-inputs.md from `TOPICS`: the table of the docs
cannot say what the code does not do. Add a case to the list of its topic (`odd_keys`, `odd_columns`, `odd_functions`,
`odd_runs`), then run `make docs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.odd_bench import Bench, Case, Named, Topics, missing_tests
from tests.spark.odd_columns import INPUT_COLUMNS, INPUTS, SIZES
from tests.spark.odd_functions import FUNCTIONS, RESULTS
from tests.spark.odd_keys import KEYS
from tests.spark.odd_runs import AGAIN, EXECUTORS, OUTPUTS

pytestmark = pytest.mark.timeout(300)

TOPICS: Topics = {
    "Keys": [*KEYS],
    "Input": [*INPUTS],
    "Columns": [*INPUT_COLUMNS],
    "Size of rows": [*SIZES],
    "Results": [*RESULTS],
    "Functions": [*FUNCTIONS],
    "Executors": [*EXECUTORS],
    "Running again": [*AGAIN],
    "Outputs and disks": [*OUTPUTS],
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    return {}, tmp_path_factory.mktemp("shared")


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path, shared: tuple[dict[str, Any], Path]) -> Bench:
    return Bench(spark, tmp_path, *shared)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{topic}: {case.given}")
        for topic, cases in TOPICS.items()
        for case in cases
        if isinstance(case, Case)
    ],
)
def test_the_documented_outcome_is_the_one_that_is_seen(case: Case, bench: Bench) -> None:
    assert case.observe(bench) == case.outcome


def test_a_case_is_listed_once() -> None:
    for topic, cases in TOPICS.items():
        given = [case.given for case in cases]
        assert len(set(given)) == len(given), topic


def test_a_test_that_a_case_names_exists() -> None:
    assert missing_tests(TOPICS) == []


def test_a_test_that_does_not_exist_is_found(tmp_path: Path) -> None:
    home = tmp_path / "tests" / "spark"
    home.mkdir(parents=True)
    (home / "test_a.py").write_text("def test_here(): ...\n\ndef helper(): ...\n")
    named = [
        "test_a.py::test_here",
        "test_a.py::test_gone",
        "test_a.py::helper",
        "test_b.py::test_b",
    ]
    topics: Topics = {"Topic": [Named("a case", "an outcome", test) for test in named]}
    assert missing_tests(topics, tmp_path) == sorted(named[1:])
