"""When a task worker leases nothing, so that it has nothing in hand and can take a suspect.

Nobody knows how long that takes. So it is tried for a while, and if it was in vain, work goes on for ten times
as long, and the next try takes twice as long: suspects get their turn in the end, and the others lose a tenth
at most.
"""

from __future__ import annotations

from holdfast.clock import S

# How long the first try takes.
PATIENCE_NS = 2 * S


class Drain:
    def __init__(self) -> None:
        self._drain_until_ns = 0
        self._serve_until_ns = 0
        self._patience_ns = PATIENCE_NS

    def wanted(self, now_ns: int) -> bool:
        """Whether to lease nothing now."""
        if now_ns < self._serve_until_ns:
            return False
        if now_ns < self._drain_until_ns:
            return True
        if self._drain_until_ns <= self._serve_until_ns:
            self._drain_until_ns = now_ns + self._patience_ns
            return True
        self._serve_until_ns = now_ns + 10 * self._patience_ns
        self._patience_ns *= 2
        return False

    def served(self) -> None:
        """A suspect has had its turn."""
        self._patience_ns = PATIENCE_NS

    def next_ns(self, now_ns: int) -> list[int]:
        """When the answer may be another."""
        return [at_ns for at_ns in (self._drain_until_ns, self._serve_until_ns) if at_ns > now_ns]
