"""What the cases of docs/spark-odd-inputs.md share: their two forms, and the bench that they run on.

A `Case` is what a user does (`given`), the outcome that is documented (`outcome`), and `observe`, which does it on a
real session and says in the same words what came of it. A `Named` case is tested elsewhere: `test` is the id of that
test, which must exist.
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

HERE = "tests/spark"


class Case(NamedTuple):
    """`observe` gets the bench and answers with the outcome, in the words of `outcome`."""

    given: str
    outcome: str
    observe: Callable[[Bench], str]


class Named(NamedTuple):
    """`test` is `file.py::name`, the file one of tests/spark."""

    given: str
    outcome: str
    test: str


Topics = dict[str, list[Case | Named]]


@dataclass
class Bench:
    """A session, a directory of its own, and what cases share: runs of many rows, a case each."""

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

    def once(self, name: str, make: Callable[[Bench], Any]) -> Any:
        """What `make` returns, on a bench of its own; made for the first case that asks."""
        if name not in self.shared:
            path = self.shared_path / name
            path.mkdir()
            self.shared[name] = make(Bench(self.spark, path, {}, path))
        return self.shared[name]

    def calls(self) -> int:
        """How many calls the functions of `counted` have had."""
        log = self.path / "calls"
        return len(log.read_text()) if log.exists() else 0

    def refused(self, act: Callable[[], Any]) -> str:
        """The type of the refusal, which is one line, and when it came."""
        try:
            act()
        except HoldfastError as error:
            made = self.calls()
            when = "before the first call" if not made else f"after {made} calls"
            lines = " in several lines" if "\n" in str(error) else ""
            return f"refused {when}: `{type(error).__name__}`{lines}"
        return "not refused"

    def run(self, df: DataFrame, fn: Callable[..., Any] | None = None, **options: Any) -> Run:
        return self.stage(fn or counted(self.path), **options).run(df)

    def rejects(self, df: DataFrame, **options: Any) -> str:
        return self.refused(lambda: self.run(df, **options))


def counted(path: Path) -> Callable[[Any], dict[str, int]]:
    """A function that counts its calls in a file, one character a call."""
    log = str(path / "calls")

    def work(row: Any) -> dict[str, int]:
        note(log)
        return {"y": 1}

    return work


def note(log: str) -> None:
    with open(log, "a") as calls:
        calls.write(".")


def ends_of(run: Run, shown: Callable[[Any], str]) -> dict[int, str]:
    """How each row of a run ended, by `id`; `shown` tells a row of the output."""
    found = {row.id: f"success: `{shown(row)}`" for row in run.output().collect()}
    for row in run.failed().collect():
        tries = f" after {row._attempts} tries" if row._attempts > 1 else ""
        kept = ", `_raw` keeps it" if row._raw else ""
        if row._raw and row._raw.startswith('{"$cut"'):
            kept = ", `_raw` keeps its beginning"
        found[row.id] = f"row fails as `{row._error_class}`{tries}{kept}"
    return found


# --- tests elsewhere ------------------------------------------------------------------------------


def missing_tests(topics: Topics, root: Path = ROOT) -> list[str]:
    """The ids of named tests that do not exist."""
    named = {case.test for cases in topics.values() for case in cases if isinstance(case, Named)}
    known: dict[str, set[str]] = {}
    missing = []
    for test in sorted(named):
        file, _, name = test.partition("::")
        if file not in known:
            known[file] = set(_tests_in(root / HERE / file))
        if name not in known[file]:
            missing.append(test)
    return missing


def _tests_in(path: Path) -> Iterable[str]:
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in found if name.startswith("test_")]
