"""Odd inputs of a stage and odd results of its function.

A case runs on a real session, and the test compares the observed outcome with the documented one. A referenced case
names its test in another file. `tools/odd_inputs.py` writes docs/spark-odd-inputs.md from `TOPICS`, so the page agrees
with the code. Add a case to the list of its topic (`odd_keys`, `odd_columns`, `odd_functions`, `odd_runs`), then run
`make docs`.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.odd_bench import Case, OddInputBench, ReferencedCase, Topics, missing_tests
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


def deep_marks(topic: str, given: str) -> list[pytest.MarkDecorator]:
    """`make test` runs half of the cases, selected by a hash so that every run selects the same ones. `make chaos`
    runs the other half."""
    return [pytest.mark.deep] if zlib.crc32(f"{topic}: {given}".encode()) % 2 else []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    return {}, tmp_path_factory.mktemp("shared")


@pytest.fixture
def bench(
    spark: SparkSession, tmp_path: Path, shared: tuple[dict[str, Any], Path]
) -> OddInputBench:
    return OddInputBench(spark, tmp_path, *shared)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{topic}: {case.given}", marks=deep_marks(topic, case.given))
        for topic, cases in TOPICS.items()
        for case in cases
        if isinstance(case, Case)
    ],
)
def test_observed_outcome_equals_the_documented_outcome(case: Case, bench: OddInputBench) -> None:
    assert case.observe(bench) == case.outcome


def test_each_case_is_listed_once() -> None:
    for topic, cases in TOPICS.items():
        given = [case.given for case in cases]
        assert len(set(given)) == len(given), topic


def test_each_referenced_test_exists() -> None:
    assert missing_tests(TOPICS) == []


def test_missing_tests_returns_references_to_unknown_tests(tmp_path: Path) -> None:
    home = tmp_path / "tests" / "spark"
    home.mkdir(parents=True)
    (home / "test_a.py").write_text("def test_here(): ...\n\ndef helper(): ...\n")
    named = [
        "spark/test_a.py::test_here",
        "spark/test_a.py::test_gone",
        "spark/test_a.py::helper",
        "spark/test_b.py::test_b",
    ]
    topics: Topics = {"Topic": [ReferencedCase("a case", "an outcome", test) for test in named]}
    assert missing_tests(topics, tmp_path) == sorted(named[1:])
