"""The writer's socket path, log file and start arguments.

This module is separate from the writer so that a client can start a writer without importing it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

WRITER_LOCK_FILE = "writer.lock"
SOCKET_FILE = "writer.sock"
LOG_FILE = "writer.log"
LOG_BYTES_MAX = 1 << 20


class WriterArguments(msgspec.Struct):
    path: str
    bootstrap: bool
    linger_s: float
    backlog_bytes: int
    reader_check_s: float


@contextlib.contextmanager
def short_directory(path: Path) -> Iterator[str]:
    """Yield a short path of the directory: a Unix socket path has at most 108 bytes."""
    if len(os.fsencode(path)) < 90 or not os.path.isdir("/proc/self/fd"):
        yield str(path)
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def has_store_files(path: Path) -> bool:
    """Whether the directory contains a file with stored rows."""
    return any((path / name).exists() for name in ("data.mdb", "redo.0", "redo.1"))


def open_log(path: Path, *, create: bool) -> int | None:
    """Open the writer's error log and return its descriptor, or None if that fails. The writer never inherits the
    error pipe of the process that started it."""
    flags = os.O_WRONLY | os.O_CREAT * create | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path / LOG_FILE, flags, 0o600)
    except OSError:
        return None


def redirect_stderr_to_log(path: Path, mode: int) -> None:
    """Redirect standard error to the log if it has no log yet, and truncate a log that is too long. The writer calls
    this after the inspection, because a refused open changes no file."""
    with contextlib.suppress(OSError):
        if os.stat(path / LOG_FILE).st_size > LOG_BYTES_MAX:
            os.truncate(path / LOG_FILE, 0)
    if not (path / LOG_FILE).exists() and (fd := open_log(path, create=True)) is not None:
        os.fchmod(fd, mode)
        os.dup2(fd, 2)
        os.close(fd)
