"""A pytest plugin: the test files with the longest stored time come first.

With two workers the order decides how long one of them works alone at the end. `tests/durations.json` has the
seconds of each file (`python tools/suites.py --record`). A file without an entry comes first, so that a new long
file does not start last.
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "tests" / "durations.json"
UNKNOWN_S = 10_000


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not DURATIONS.exists():
        return
    seconds: dict[str, float] = json.loads(DURATIONS.read_text())
    order = {path: position for position, path in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(key=lambda item: (-_seconds(item.path, seconds), order[item.path]))


def _seconds(path: Path, seconds: dict[str, float]) -> float:
    if not path.is_relative_to(ROOT):
        return 0.0
    return seconds.get(path.relative_to(ROOT).as_posix(), UNKNOWN_S)
