"""The store clock: store time from the server's adjustable clock and the local boot clock.

Store time runs on the local boot clock and is corrected at each observation of the server's clock. Small
differences are drift and are followed. A large difference is a clock step, or another server after a failover.
Store time then continues by the local clock, and `lead_ns` absorbs the difference: after a backward step time
does not freeze, after a forward step leases do not expire at once. Each process detects steps separately. All
processes share the floor: store time is never before the last commit.

A process that opens the store has no earlier time to compare with. The store therefore records how far the
server's clock is ahead of store time (`ahead_ns`). Store time catches up slowly, so that a corrected clock
stays correct.
"""

from __future__ import annotations

from holdfast.clock import S
from holdfast.store import schema

# The boot id in the meta row of a store that uses the server's clock.
SERVER_BOOT_ID = "server"
# A difference above this plus the possible drift of two clocks is a clock step.
STEP_NS = 50_000_000
DRIFT_DIVISOR = 1_000
# Store time behind the server's clock runs faster by 1/100 until it has caught up.
CATCH_UP_DIVISOR = 100
# The longest interval without an observation that counts for catching up.
CATCH_UP_SPAN_MAX_NS = 10 * S
# A change of the recorded value above this is written with the next commit.
PERSIST_THRESHOLD_NS = 1 * S


def saved_ahead_ns(meta: schema.StoreMeta | None) -> int:
    """The recorded lead of the server's clock over store time."""
    return 0 if meta is None or meta.boot_id != SERVER_BOOT_ID else max(meta.offset_ns, 0)


class StoreClock:
    def __init__(self) -> None:
        # Store time minus the server's clock.
        self.lead_ns = 0
        # Store time minus the local boot clock.
        self.offset_ns = 0
        self._observed_ns = 0

    @property
    def ahead_ns(self) -> int:
        """The lead of the server's clock over store time, at least 0."""
        return max(-self.lead_ns, 0)

    def start(self, server_ns: int, boot_ns: int, *, floor_ns: int, ahead_ns: int) -> None:
        """Set store time from the first observation and the recorded lead of the server's clock."""
        now_ns = max(server_ns - ahead_ns, floor_ns)
        self.lead_ns = now_ns - server_ns
        self.offset_ns = now_ns - boot_ns
        self._observed_ns = boot_ns

    def observe(self, server_ns: int, started_ns: int, boot_ns: int, *, floor_ns: int) -> None:
        """Correct store time by the server's clock, read between `started_ns` of the local clock and now.

        The correction allows any value in that interval, so a slow answer has little weight.
        """
        silence_ns = max(started_ns - self._observed_ns, 0)
        step_ns = STEP_NS + silence_ns // DRIFT_DIVISOR
        self._observed_ns = boot_ns
        # Remote commits show that the local clock was paused, as on a suspended machine.
        self.offset_ns = max(self.offset_ns, floor_ns - boot_ns)
        least_ns = server_ns + self.lead_ns - boot_ns
        most_ns = server_ns + self.lead_ns - started_ns
        step_by_ns = 0
        if least_ns > self.offset_ns + step_ns:
            step_by_ns = self.offset_ns - least_ns
        elif most_ns < self.offset_ns - step_ns:
            step_by_ns = self.offset_ns - most_ns
        caught_up_ns = min(min(silence_ns, CATCH_UP_SPAN_MAX_NS) // CATCH_UP_DIVISOR, self.ahead_ns)
        shift_ns = step_by_ns + caught_up_ns
        self.lead_ns += shift_ns
        self.offset_ns = min(max(self.offset_ns, least_ns + shift_ns), most_ns + shift_ns)
