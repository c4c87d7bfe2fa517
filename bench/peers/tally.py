"""What was done and when: the workers of a system append a record for each task to one file.

It imports nothing of ours: the peers' interpreter runs it, too. The clock is CLOCK_MONOTONIC, which
all processes of a machine share, so that a time taken in the producer can be taken from one in the
worker. A record is one `write` of a file opened to append: those of several processes do not mix.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

RECORD = struct.Struct("<qq")
# Where it is, for workers that are started by others than us.
VARIABLE = "BENCH_TALLY"
NOTE = "x" * 64


class Tally:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def mark(self, sent_ns: int) -> None:
        """A task that was sent then has been done now. The whole of what a task does."""
        os.write(self._fd, RECORD.pack(sent_ns, time.monotonic_ns()))


def count(path: Path) -> int:
    return path.stat().st_size // RECORD.size if path.exists() else 0


def records(path: Path) -> list[tuple[int, int]]:
    """When each was sent and done, in the order in which they were done."""
    found: list[tuple[int, int]] = list(RECORD.iter_unpack(path.read_bytes()))
    return found
