"""A pytest plugin for `tools/suites.py`: it records progress and the ids of failed tests in two files.

Each collected test and each report appends one byte to the file of `HOLDFAST_SUITE_PROGRESS`. A growing file shows
that a run makes progress. A run is ended when the size has not changed for minutes, not after a total time.
Each failed test appends a line with its id to the file of `HOLDFAST_SUITE_FAILED`. The first word is `final` for a
test that crashed its process, and `retried` for a test that may run a second time.
"""

import os
from pathlib import Path

import pytest

PROGRESS = "HOLDFAST_SUITE_PROGRESS"
FAILED = "HOLDFAST_SUITE_FAILED"
# The text of pytest-xdist for a crashed process.
CRASHED = "crashed while running"


# The process that starts the workers gets every report a second time.
_is_worker = False


def pytest_configure(config: pytest.Config) -> None:
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


def pytest_itemcollected() -> None:
    _append(PROGRESS, ".")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _append(PROGRESS, ".")
    if report.failed and not _is_worker:
        first_word = "final" if CRASHED in report.longreprtext else "retried"
        _append(FAILED, f"{first_word} {report.nodeid}\n")


def _append(variable: str, text: str) -> None:
    if path := os.environ.get(variable):
        # Short appends of several processes do not overwrite each other.
        with Path(path).open("a") as file:
            file.write(text)
