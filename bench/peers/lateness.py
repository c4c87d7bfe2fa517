"""Lateness: flows and tasks with a common due time append their delay to one file when their code runs.

It imports none of our code: the peers' interpreter runs it, too. A line is one `write` to a file opened for append, so
that lines of several processes do not mix.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# Path of the file, for workers that another program starts.
VARIABLE = "BENCH_LATENESS_FILE"

_opened: list[int] = []


def mark(due_s: float) -> None:
    """Record the milliseconds since the due time, by the wall clock."""
    late = 1000 * (time.time() - due_s)
    if not _opened:
        _opened.append(os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    os.write(_opened[0], f"{late:.4f}\n".encode())


def clear(path: Path) -> None:
    """Remove all lines. The file stays: the workers have it open."""
    path.write_bytes(b"")


def lines(path: Path) -> list[float]:
    return [float(line) for line in path.read_text("ascii").split()] if path.exists() else []
