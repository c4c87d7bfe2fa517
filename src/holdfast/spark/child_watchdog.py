"""The child watchdog: renews the leases of an unresponsive child, and ends it after a call times
out.

The watchdog runs in the Spark worker that started the child. It reads the child's call slots, so it does
not need the child's GIL. While the child's row executor ticks, the watchdog only samples. When the ticks
stop, it renews the child's leases at the ledger until a call has made no progress for longer than
`timeout_s`. Then it announces a successor, and the worker kills the process. A child without a call is
kept for at most `timeout_s`: no call can be the cause of its silence. A stopped process (SIGSTOP, a
debugger) is not kept. Its leases expire and other children get its rows.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.spark import ledger_protocol
from holdfast.spark.call_slots import CallSlots, StallDetector, decode_seq
from holdfast.spark.child_job import ChildJob
from holdfast.spark.hung_calls import CANCEL_S
from holdfast.spark.ledger_client import LedgerClient

CHECK_INTERVAL_S_MAX = 0.5
# Startup timeout of a child.
CHILD_START_S = 60.0


class ChildWatchdog:
    def __init__(self, job: ChildJob, slots: CallSlots, pid: int) -> None:
        self._job = job
        self._slots = slots
        self._pid = pid
        self._stalls = StallDetector(slots)
        self._missed_tick_ns = int(job.lease_s / 4 * 1e9)
        # The child enforces the timeout itself and needs a moment to do so.
        self._call_timeout_ns = int((job.timeout_s + 2 * CANCEL_S) * 1e9)
        # Grants of the predecessor are kept until the successor has started and requests them.
        starts = job.timed_out is not None
        self._idle_timeout_ns = (
            max(self._call_timeout_ns, int(CHILD_START_S * 1e9))
            if starts
            else self._call_timeout_ns
        )
        self.interval_s = min(CHECK_INTERVAL_S_MAX, job.lease_s / 8)
        self._ticks = slots.tick_count()
        self._ticked_ns = SYSTEM.mono_ns()
        self._renewed_ns = 0
        self._client: LedgerClient | None = None

    def check(self) -> list[int]:
        """Return the rows with a call that timed out; the child must be killed. Normally empty."""
        now_ns = SYSTEM.mono_ns()
        self._stalls.sample(now_ns)
        ticks = self._slots.tick_count()
        if ticks != self._ticks:
            self._ticks, self._ticked_ns = ticks, now_ns
            return []
        if now_ns - self._ticked_ns < self._missed_tick_ns:
            return []
        late = self._stalls.stalled_rows(self._call_timeout_ns, now_ns)
        if late:
            return self._announce_successor(sorted(decode_seq(row) for row in late.values()))
        keep_alive = (
            self._stalls.has_active_calls or now_ns - self._ticked_ns < self._idle_timeout_ns
        )
        if (
            keep_alive
            and now_ns - self._renewed_ns >= self._missed_tick_ns
            and not is_stopped(self._pid)
        ):
            self._renewed_ns = now_ns
            self._request(ledger_protocol.RenewChild(self._job.owner))
        return []

    def _announce_successor(self, seqs: list[int]) -> list[int]:
        return seqs if self._request(ledger_protocol.AnnounceHandover(self._job.owner)) else []

    def _request(self, message: ledger_protocol.WireMessage) -> bool:
        """Send a request. An unreachable ledger is retried at the next check."""
        if self._client is None:
            self._client = LedgerClient(self._job.address, "task", reconnect_s=self._job.lease_s)
        try:
            self._client.request(message)
        except HoldfastError:
            return False
        return True

    def __enter__(self) -> ChildWatchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._client.close()


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process. Always false on platforms without
    /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The process name in parentheses may contain anything. The state follows it.
    return stat.rpartition(b") ")[2][:1] in (b"T", b"t")
