"""Where the writer of a directory is found, and what it is told when it starts.

Apart from the writer itself: whoever starts one should not have to import it first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

LOCK = "writer.lock"
SOCKET = "writer.sock"


class Arguments(msgspec.Struct):
    path: str
    bootstrap: bool
    linger_s: float
    backlog_bytes: int
    reader_check_s: float


@contextlib.contextmanager
def directory_of(path: Path) -> Iterator[str]:
    """A short name for the directory: a socket's path has 108 bytes at most."""
    if len(os.fsencode(path)) < 90 or not os.path.isdir("/proc/self/fd"):
        yield str(path)
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
