"""Detection of hung calls in a child: calls that exceed their timeout and that the child cannot stop."""

from __future__ import annotations

from holdfast.spark.call_pool import CallPool
from holdfast.spark.call_slots import CallSlots, StallDetector

# An `async def` is cancelled at its timeout. This much later its loop is blocked, or it ignores
# cancellation.
CANCEL_S = 1.0
CHECK_NS = 50_000_000


class HungCallDetector:
    def __init__(
        self, slots: CallSlots, pool: CallPool, timeout_s: float, *, is_async: bool
    ) -> None:
        self._slots = slots
        self._pool = pool
        self._stalls = StallDetector(slots)
        self._allowed_ns = (timeout_s + (CANCEL_S if is_async else 0.0)) * 1e9
        self._next_check_ns = 0
        # Permanent: the process exits when its other calls have ended.
        self.found = False

    def tick(self) -> None:
        """Show the parent that the child is not blocked."""
        self._slots.tick()

    def check(self, now_ns: int) -> dict[int, int] | None:
        """Return the hung rows by slot; None if the next check is not due or no call ever hung."""
        if now_ns < self._next_check_ns:
            return None
        self._next_check_ns = now_ns + CHECK_NS
        self._stalls.sample(now_ns)
        hung = self._pool.stuck_calls(self._stalls.stalled_rows(self._allowed_ns, now_ns))
        if hung:
            # Queued units are not started but left to the successor.
            self.found = self._pool.draining = True
        return hung if self.found else None
