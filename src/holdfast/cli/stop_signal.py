"""The stop signal: a flag that a signal handler sets and the main thread waits for.

A `threading.Event` would deadlock: the handler may interrupt the thread that holds the event's lock. Here
the handler sets a flag and writes a byte to a pipe, which needs no lock.
"""

from __future__ import annotations

import contextlib
import os
import select


class StopSignal:
    def __init__(self) -> None:
        self._is_set = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)

    def set(self) -> None:
        """Set the flag. Safe in a signal handler at any point."""
        self._is_set = True
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"\x00")

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait for the flag or the timeout; return whether it is set. The byte stays in the pipe, so all
        waiting threads wake."""
        if not self._is_set:
            select.select([self._read_fd], [], [], timeout_s)
        return self._is_set
