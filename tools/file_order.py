"""A pytest plugin: the order of the test files.

The files with the longest stored time come first, so that no worker runs a long file alone at the end. Files with
Spark, which use the processor, and other files, which often wait, alternate in proportion to their time.
`tests/durations.json` has the seconds of each file (`python tools/suites.py --record`). A file without an entry
comes first, so that a new long file does not start last.

Files that share a Spark session run in one worker (`SessionScheduling`).

The first test with Spark makes the class archive that all others wait for (tests/spark/class_archive.py). The other
workers start with files that need no archive.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "tests" / "durations.json"
# The demo starts Spark too.
SPARK = ("tests/spark/", "tests/cli/test_demo.py")
# The files whose tests share a Connect server, and the files that start separate processes or clusters.
CONNECT_FILES = frozenset({"test_stage_connect", "test_ingest_connect", "test_clusters"})
OWN_PROCESS_FILES = frozenset(
    {"test_tutorial", "test_hosts", "test_hosts_spool", "test_user_session", "test_faults", "test_postgres"}
)  # fmt: skip
# The other files of Spark share local sessions, each in one worker.
LOCAL_SESSIONS = ("local session 1", "local session 2")
# Files without Spark that come between the first and the second file with Spark: one for each other worker.
OTHERS_FIRST = 3
UNKNOWN_S = 1_000.0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not DURATIONS.exists():
        return
    names = {item.path: _name(item.path) for item in items}
    stored = read_durations()
    # A file shorter than a second has the stored time 0.
    seconds = {name: stored.get(name, UNKNOWN_S) + 0.5 for name in names.values()}
    position = {name: number for number, name in enumerate(ordered(seconds, session_of(stored)))}
    items.sort(key=lambda item: position[names[item.path]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return SessionScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class SessionScheduling(LoadFileScheduling):
    """A worker takes the next file, or all files that share a Spark session."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._session_of = session_of(read_durations())

    def _split_scope(self, nodeid: str) -> str:
        name = super()._split_scope(nodeid)
        return self._session_of.get(name, name)


def read_durations() -> dict[str, float]:
    if not DURATIONS.exists():
        return {}
    stored: dict[str, float] = json.loads(DURATIONS.read_text())
    return stored


def session_of(stored: Mapping[str, float]) -> dict[str, str]:
    """Return the session that each file with Spark shares with other files. A start of a session takes ten seconds."""
    sessions = {f"{SPARK[0]}{name}.py": "connect" for name in CONNECT_FILES}
    local = {
        name: stored.get(name, 1.0)
        for path in (ROOT / SPARK[0]).glob("test_*.py")
        if path.stem not in CONNECT_FILES | OWN_PROCESS_FILES
        for name in [_name(path)]
    }
    totals = dict.fromkeys(LOCAL_SESSIONS, 0.0)
    for name, seconds in sorted(local.items(), key=lambda item: (-item[1], item[0])):
        chosen = min(totals, key=totals.__getitem__)
        totals[chosen] += seconds
        sessions[name] = chosen
    return sessions


def ordered(seconds: Mapping[str, float], session_of: Mapping[str, str] | None = None) -> list[str]:
    """Return the files, longest first, with the files of Spark spread over the whole time. Files that share a session
    follow each other."""
    units: dict[str, list[str]] = {}
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        units.setdefault((session_of or {}).get(name, name), []).append(name)
    total = {unit: sum(seconds[name] for name in names) for unit, names in units.items()}
    longest_first = sorted(units, key=lambda unit: (-total[unit], unit))
    groups: list[list[str]] = [[], []]
    for unit in longest_first:
        groups[0 if units[unit][0].startswith(SPARK) else 1].append(unit)
    totals = [sum(total[unit] for unit in group) for group in groups]
    started = [0.0, 0.0]
    order: list[str] = []
    starts = 0
    while any(groups):
        # The group of which the smaller share has started.
        shares = [_share(*figures) for figures in zip(groups, started, totals, strict=True)]
        chosen = shares.index(min(shares))
        if 0 < starts <= OTHERS_FIRST and groups[1]:
            chosen = 1
        unit = groups[chosen].pop(0)
        started[chosen] += total[unit]
        order += units[unit]
        starts += 1
    return order


def _share(group: Sequence[str], started: float, total: float) -> float:
    return started / total if group else 2.0


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
