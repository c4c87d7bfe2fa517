"""Store time from the server's clock, which may be set, and from our own, which may not.

Store time runs on our boot clock and is steered by what the server says whenever it is asked: small
differences are drift, and followed. A large one is a clock that was set, or another server after a failover.
Then store time goes on as it was, by our own clock, and `lead_ns` takes the difference up: set back, nothing
freezes; set forward, or right again, nothing expires at once. Each process finds that out by itself; what they
agree on is the floor, the time of the last commit, before which nobody's time is.

Who opens a store has no time of its own to compare with. So how far a server's clock has run ahead of store
time is kept in the store (`ahead_ns`). It is made up for slowly: a clock that was set right stays right.
"""

from __future__ import annotations

from holdfast.clock import S
from holdfast.store import schema

# Where a store's record has the id of a boot: its time is that of a server.
SERVER = "server"
# A difference by more than this, and by more than two good clocks drift apart, is a clock that was set.
STEP_NS = 50_000_000
DRIFT = 1_000
# Store time that is behind a server's clock runs faster by this part until it is not.
FASTER = 100
# After a silence no more is made up for than after this long.
SILENCE_NS = 10 * S
# A difference to what is kept in the store that is worth a row in a commit.
WORTH_NS = 1 * S


def ahead_of(meta: schema.Meta | None) -> int:
    """How far the server's clock was ahead of store time when that was last written down."""
    return 0 if meta is None or meta.boot_id != SERVER else max(meta.offset_ns, 0)


class Timing:
    def __init__(self) -> None:
        # By how much store time is ahead of the server's clock, or behind it.
        self.lead_ns = 0
        # By how much it is ahead of our own clock.
        self.offset_ns = 0
        self._heard_ns = 0

    @property
    def ahead_ns(self) -> int:
        """By how much the server's clock is ahead of store time, if it is."""
        return max(-self.lead_ns, 0)

    def start(self, server_ns: int, boot_ns: int, *, floor_ns: int, ahead_ns: int) -> None:
        """The first that is heard of a server whose clock was so far ahead."""
        now_ns = max(server_ns - ahead_ns, floor_ns)
        self.lead_ns = now_ns - server_ns
        self.offset_ns = now_ns - boot_ns
        self._heard_ns = boot_ns

    def hear(self, server_ns: int, asked_ns: int, boot_ns: int, *, floor_ns: int) -> None:
        """What the server's clock said after it was asked, `asked_ns` by ours, and before now.

        An answer that took long says little: it allows for all that lies between.
        """
        silence_ns = max(asked_ns - self._heard_ns, 0)
        step_ns = STEP_NS + silence_ns // DRIFT
        self._heard_ns = boot_ns
        # Others' commits show that our own clock has stood still, as that of a halted machine does.
        self.offset_ns = max(self.offset_ns, floor_ns - boot_ns)
        least_ns = server_ns + self.lead_ns - boot_ns
        most_ns = server_ns + self.lead_ns - asked_ns
        set_ns = 0
        if least_ns > self.offset_ns + step_ns:
            set_ns = self.offset_ns - least_ns
        elif most_ns < self.offset_ns - step_ns:
            set_ns = self.offset_ns - most_ns
        made_up_ns = min(min(silence_ns, SILENCE_NS) // FASTER, self.ahead_ns)
        by_ns = set_ns + made_up_ns
        self.lead_ns += by_ns
        self.offset_ns = min(max(self.offset_ns, least_ns + by_ns), most_ns + by_ns)
