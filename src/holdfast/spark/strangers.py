"""Connections without a token yet: an admission queue, bounded in number and in time.

Each has a thread of the ledger service until it has said the token of the run. One more than `STRANGERS_MAX`
ends the oldest of them, and each ends after `HELLO_S`, however slowly it speaks.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from holdfast.clock import SYSTEM, S

STRANGERS_MAX = 64
HELLO_S = 10.0


class Strangers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Since when each is here, the oldest first.
        self._lines: dict[socket.socket, int] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: socket.socket) -> None:
        with self._lock:
            self._lines[line] = SYSTEM.mono_ns()
            if len(self._lines) > STRANGERS_MAX:
                self._end_oldest()

    def remove(self, line: socket.socket) -> None:
        """It has said the token, or is gone."""
        with self._lock:
            self._lines.pop(line, None)

    def make_room(self) -> None:
        """End the oldest: the process has no more descriptors, or threads."""
        with self._lock:
            if self._lines:
                self._end_oldest()

    def end_late(self) -> None:
        """End those that have had their time."""
        before_ns = SYSTEM.mono_ns() - int(HELLO_S * S)
        with self._lock:
            while self._lines and next(iter(self._lines.values())) < before_ns:
                self._end_oldest()

    def _end_oldest(self) -> None:
        line = next(iter(self._lines))
        del self._lines[line]
        # Its thread finds the end, and closes it.
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
