"""The trace window: three bytes that all processes of a trace share through a mapped file.

OPEN      the round that is recorded now, 0 if none
NEXT      the round that the next `open` starts
FINISHED  the last round whose item is finished
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

DIRECTORY = "HOLDFAST_TRACE_DIRECTORY"
FILE = "window"
OPEN, NEXT, FINISHED = range(3)


def map_file() -> mmap.mmap:
    with open(Path(os.environ[DIRECTORY]) / FILE, "r+b") as file:
        return mmap.mmap(file.fileno(), 3)


shared = map_file()


def open_next() -> None:
    shared[OPEN] = shared[NEXT]


def finish() -> None:
    shared[FINISHED] = shared[OPEN]
