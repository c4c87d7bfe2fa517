"""A pytest plugin: the order of the test files.

The files with the longest stored time come first, so that no worker runs a long file alone at the end. Files with
Spark, which use the processor, and other files, which often wait, alternate in proportion to their time.
`tests/durations.json` has the seconds of each file (`python tools/suites.py --record`). A file without an entry
comes first, so that a new long file does not start last.

The first test with Spark makes the class archive that all others wait for (tests/spark/class_archive.py). The other
workers start with files that need no archive.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "tests" / "durations.json"
# The demo starts Spark too.
SPARK = ("tests/spark/", "tests/cli/test_demo.py")
# Files without Spark that come between the first and the second file with Spark: one for each other worker.
OTHERS_FIRST = 5
UNKNOWN_S = 1_000.0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not DURATIONS.exists():
        return
    stored: dict[str, float] = json.loads(DURATIONS.read_text())
    names = {item.path: _name(item.path) for item in items}
    # A file shorter than a second has the stored time 0.
    seconds = {name: stored.get(name, UNKNOWN_S) + 0.5 for name in names.values()}
    position = {name: number for number, name in enumerate(ordered(seconds))}
    items.sort(key=lambda item: position[names[item.path]])


def ordered(seconds: dict[str, float]) -> list[str]:
    """Return the files, longest first, with the files of Spark spread over the whole time."""
    longest_first = sorted(seconds, key=lambda name: -seconds[name])
    groups = [
        [name for name in longest_first if name.startswith(SPARK)],
        [name for name in longest_first if not name.startswith(SPARK)],
    ]
    totals = [sum(seconds[name] for name in group) for group in groups]
    started = [0.0, 0.0]
    order: list[str] = []
    while any(groups):
        # The group of which the smaller share has started.
        shares = [_share(*figures) for figures in zip(groups, started, totals, strict=True)]
        chosen = shares.index(min(shares))
        if 0 < len(order) <= OTHERS_FIRST and groups[1]:
            chosen = 1
        name = groups[chosen].pop(0)
        started[chosen] += seconds[name]
        order.append(name)
    return order


def _share(group: Sequence[str], started: float, total: float) -> float:
    return started / total if group else 2.0


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
