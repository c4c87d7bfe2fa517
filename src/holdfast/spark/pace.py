"""A rate across all tasks of a run: who wants to start calls asks for leave first.

Tokens are given out in blocks; a block may take what has gathered in `BURST_S`, so that asking
costs little, and nobody is given more than is there. Pure: the caller brings the time.
"""

from __future__ import annotations

BURST_S = 0.2


class Pace:
    def __init__(self, per_s: float, now_ns: int) -> None:
        self.per_s = per_s
        self._burst = max(per_s * BURST_S, 1.0)
        self._tokens = 1.0
        self._at_ns = now_ns

    def take(self, count: int, now_ns: int) -> tuple[int, int]:
        """How many calls may start now, and in how many milliseconds to ask again if none."""
        gathered = max(now_ns - self._at_ns, 0) / 1e9 * self.per_s
        self._tokens = min(self._tokens + gathered, self._burst)
        self._at_ns = max(now_ns, self._at_ns)
        given = min(int(self._tokens), count)
        self._tokens -= given
        # Worth asking for: half a burst, or the one call that is due next.
        wanted = max(min(self._burst / 2, count), 1.0)
        wait_s = 0.0 if given else max(wanted - self._tokens, 0.0) / self.per_s
        return given, max(int(wait_s * 1000), 0 if given else 1)
