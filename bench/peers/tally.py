"""Completion times: the workers of a system append a record for each task to one file.

It imports none of our code: the peers' interpreter runs it, too. The clock is CLOCK_MONOTONIC, which
all processes of a machine share, so that producer and worker times can be subtracted. A record is one
`write` to a file opened for append, so that records of several processes do not mix.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

RECORD = struct.Struct("<qq")
# Path of the file, for workers that another program starts.
VARIABLE = "BENCH_TALLY"
NOTE = "x" * 64


class Tally:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def mark(self, sent_ns: int) -> None:
        """Record that a task with this send time is done now. A task does nothing else."""
        os.write(self._fd, RECORD.pack(sent_ns, time.monotonic_ns()))


def count(path: Path) -> int:
    return path.stat().st_size // RECORD.size if path.exists() else 0


def records(path: Path) -> list[tuple[int, int]]:
    """The times of send and completion of each task, in the order of completion."""
    result: list[tuple[int, int]] = list(RECORD.iter_unpack(path.read_bytes()))
    return result
