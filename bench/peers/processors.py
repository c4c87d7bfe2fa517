"""Processor time of process trees: a server has children, and they have children."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import clock_gettime_ns

SCHEDULED = 2


def used_by_side(sides: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """Processor time of each side so far.

    A side may be a descendant of another one: the writer of a store is a child of the process that opened the store
    first. It counts for its own side only.
    """
    roots = {side: frozenset(pids) for side, pids in sides.items()}
    known = frozenset().union(*roots.values())
    return {side: used_ns(pids, without=known - pids) for side, pids in roots.items()}


def used_ns(roots: Iterable[int], *, without: Iterable[int] = ()) -> int:
    """Processor time of these processes and their descendants so far, without some descendants and theirs.

    It excludes processes that have ended.
    """
    total = 0
    for pid in _families(roots, frozenset(without)):
        with contextlib.suppress(OSError):
            total += clock_gettime_ns(_clock(pid))
    return total


def _clock(pid: int) -> int:
    """The processor-time clock of another process on Linux. It includes ended threads."""
    return ~pid << 3 | SCHEDULED


def _families(roots: Iterable[int], without: frozenset[int]) -> set[int]:
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name is in parentheses and may contain any character.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(stat.parent.name))
    found: set[int] = set()
    left = list(roots)
    while left:
        pid = left.pop()
        if pid not in found and pid not in without:
            found.add(pid)
            left += children[pid]
    return found
