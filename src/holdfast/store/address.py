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
LOG = "writer.log"
LOG_BYTES_MAX = 1 << 20


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


def holds_store(path: Path) -> bool:
    """Whether any file with stored rows is there."""
    return any((path / name).exists() for name in ("data.mdb", "redo.0", "redo.1"))


def log_file(path: Path, *, create: bool) -> int | None:
    """A descriptor of the file that the writer's own errors go to, never the pipes of the process that
    started it. None if there is none."""
    flags = os.O_WRONLY | os.O_CREAT * create | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path / LOG, flags, 0o600)
    except OSError:
        return None


def keep_log(path: Path, mode: int) -> None:
    """Write standard error to the log from now on, if it went nowhere so far. A log that has grown too long begins
    anew: not before, because a refused open changes no file."""
    with contextlib.suppress(OSError):
        if os.stat(path / LOG).st_size > LOG_BYTES_MAX:
            os.truncate(path / LOG, 0)
    if not (path / LOG).exists() and (fd := log_file(path, create=True)) is not None:
        os.fchmod(fd, mode)
        os.dup2(fd, 2)
        os.close(fd)
