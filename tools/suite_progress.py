"""A pytest plugin: each collected test and each report appends one byte to the file of a suite.

`tools/suites.py` loads it with `-p tools.suite_progress`. A growing file shows that a suite makes progress.
A suite is ended when the size has not changed for minutes, not after a total time.
"""

import os
from pathlib import Path

VARIABLE = "HOLDFAST_SUITE_PROGRESS"


def pytest_itemcollected() -> None:
    _note()


def pytest_runtest_logreport() -> None:
    _note()


def _note() -> None:
    if path := os.environ.get(VARIABLE):
        # Appends of one byte by several processes do not overwrite each other.
        with Path(path).open("ab") as file:
            file.write(b".")
