"""What a signal says, for a program that waits for it.

An `Event` will not do: its lock may be in the hands of the very thread that the handler interrupts, and then
both stand for ever. Here the handler sets a flag and writes a byte to a pipe, which takes no lock.
"""

from __future__ import annotations

import contextlib
import os
import select


class Told:
    def __init__(self) -> None:
        self._told = False
        self._heard, self._say = os.pipe()
        os.set_blocking(self._say, False)

    def set(self) -> None:
        """For handlers of signals, too, wherever they come in."""
        self._told = True
        with contextlib.suppress(OSError):
            os.write(self._say, b"\x00")

    def is_set(self) -> bool:
        return self._told

    def wait(self, timeout_s: float) -> bool:
        """Until it is said, or the time is up; whether it was. The byte stays: all who wait hear it."""
        if not self._told:
            select.select([self._heard], [], [], timeout_s)
        return self._told
