"""The quarantine window: times when a task worker pauses leasing until it is idle and can run a
quarantined task.

The time until the worker is idle is unknown. A window therefore ends after a timeout. The worker
then leases normally for ten times as long, and the next window is twice as long. Quarantined tasks
run eventually, and normal tasks lose at most a tenth of the time.
"""

from __future__ import annotations

from holdfast.clock import S

# The length of the first window.
FIRST_DRAIN_NS = 2 * S


class QuarantineWindow:
    def __init__(self) -> None:
        self._drain_until_ns = 0
        self._lease_until_ns = 0
        self._drain_ns = FIRST_DRAIN_NS

    def should_drain(self, now_ns: int) -> bool:
        """Whether the worker leases nothing now."""
        if now_ns < self._lease_until_ns:
            return False
        if now_ns < self._drain_until_ns:
            return True
        if self._drain_until_ns <= self._lease_until_ns:
            self._drain_until_ns = now_ns + self._drain_ns
            return True
        self._lease_until_ns = now_ns + 10 * self._drain_ns
        self._drain_ns *= 2
        return False

    def reset(self) -> None:
        """Reset the window length after a quarantined task was leased."""
        self._drain_ns = FIRST_DRAIN_NS

    def next_changes_ns(self, now_ns: int) -> list[int]:
        """Return the times at which `should_drain` may change."""
        return [at_ns for at_ns in (self._drain_until_ns, self._lease_until_ns) if at_ns > now_ns]
