"""The two kinds of cases of docs/spark-odd-inputs.md, and the test bench that runs them.

A `Case` has the user's action (`given`), the documented outcome (`outcome`) and `observe`. `observe` performs the
action on a real session and returns the outcome in the wording of `outcome`. A `ReferencedCase` has its test in
another file: `test` is the id of that test. The test must exist.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from holdfast.errors import HoldfastError
from holdfast.spark import Run, Stage
from tests.processes import ROOT

TESTS = "tests"


class Case(NamedTuple):
    """`observe` takes the bench and returns the outcome in the wording of `outcome`."""

    given: str
    outcome: str
    observe: Callable[[OddInputBench], str]


class ReferencedCase(NamedTuple):
    """`test` is `directory/file.py::name`, below tests/."""

    given: str
    outcome: str
    test: str


Topics = dict[str, list[Case | ReferencedCase]]


@dataclass
class OddInputBench:
    """A session, a directory per case, and results shared by cases: runs with one row per case."""

    spark: SparkSession
    path: Path
    shared: dict[str, Any]
    shared_path: Path

    def stage(self, fn: Callable[..., Any], **options: Any) -> Stage:
        settings: dict[str, Any] = {
            "key": "id", "schema": "y bigint", "store": str(self.path / "data"), "progress": "quiet",
            **options,
        }  # fmt: skip
        return Stage("odd", fn, **settings)

    def once(self, name: str, make: Callable[[OddInputBench], Any]) -> Any:
        """The result of `make` on a separate bench. It is computed once, for the first case that needs it."""
        if name not in self.shared:
            path = self.shared_path / name
            path.mkdir()
            self.shared[name] = make(OddInputBench(self.spark, path, {}, path))
        return self.shared[name]

    def calls(self) -> int:
        """The number of calls of functions made by `counted`."""
        log = self.path / "calls"
        return len(log.read_text()) if log.exists() else 0

    def refused(self, act: Callable[[], Any]) -> str:
        """The type of the error raised by `act`, and whether calls were made before it."""
        try:
            act()
        except HoldfastError as error:
            calls = self.calls()
            when = "before the first call" if not calls else f"after {calls} calls"
            lines = " in several lines" if "\n" in str(error) else ""
            return f"refused {when}: `{type(error).__name__}`{lines}"
        return "not refused"

    def run(self, df: DataFrame, fn: Callable[..., Any] | None = None, **options: Any) -> Run:
        return self.stage(fn or counted(self.path), **options).run(df)

    def rejects(self, df: DataFrame, **options: Any) -> str:
        return self.refused(lambda: self.run(df, **options))


def counted(path: Path) -> Callable[[Any], dict[str, int]]:
    """A function that appends one character per call to a file."""
    log = str(path / "calls")

    def work(row: Any) -> dict[str, int]:
        append_call(log)
        return {"y": 1}

    return work


def append_call(log: str) -> None:
    with open(log, "a") as calls:
        calls.write(".")


def row_outcomes(run: Run, row_text: Callable[[Any], str]) -> dict[int, str]:
    """The outcome of each row of a run, by `id`. The second argument formats a row of the output."""
    outcomes = {row.id: f"success: `{row_text(row)}`" for row in run.output().collect()}
    for row in run.failed().collect():
        attempts = f" after {row._attempts} tries" if row._attempts > 1 else ""
        raw_text = ", `_raw` keeps it" if row._raw else ""
        if row._raw and row._raw.startswith('{"$cut"'):
            raw_text = ", `_raw` keeps its beginning"
        outcomes[row.id] = f"row fails as `{row._error_class}`{attempts}{raw_text}"
    return outcomes


# --- tests in other files -------------------------------------------------------------------------


def missing_tests(topics: Topics, root: Path = ROOT) -> list[str]:
    """The ids of referenced tests that do not exist."""
    referenced = {
        case.test for cases in topics.values() for case in cases if isinstance(case, ReferencedCase)
    }
    known: dict[str, set[str]] = {}
    missing = []
    for test in sorted(referenced):
        file, _, name = test.partition("::")
        if file not in known:
            known[file] = set(_test_names_in(root / TESTS / file))
        if name not in known[file]:
            missing.append(test)
    return missing


def _test_names_in(path: Path) -> Iterable[str]:
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]
