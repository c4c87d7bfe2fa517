"""Speaks for a child that cannot: its leases are kept, and a call that is out of time ends it.

The guard runs in the Spark worker that started the child and reads the child's slots, so it does not
need the child's GIL. As long as the child's executor goes its rounds, the guard only looks. When the
rounds stop, it renews the child's leases at the ledger, until a call of the child has been silent for
longer than `timeout_s`. Then it announces a successor; the caller ends the process. A child without a
call at work is kept for `timeout_s` at most: whatever stops it then is no call. A process that is
stopped (SIGSTOP, a debugger) is not kept: its leases run out, and its rows go to others.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.spark import wire
from holdfast.spark.call_slots import CallSlots, Silence, seq_of
from holdfast.spark.client import Client
from holdfast.spark.engine import CANCEL_S, Duty

EVERY_S_MAX = 0.5
# How long a child may take to start.
START_S = 60.0


class ChildGuard:
    def __init__(self, duty: Duty, slots: CallSlots, pid: int) -> None:
        self._duty = duty
        self._slots = slots
        self._pid = pid
        self._silence = Silence(slots)
        self._quiet_ns = int(duty.lease_s / 4 * 1e9)
        # The child itself gives up a call at its time, and needs a moment for it.
        self._allowed_ns = int((duty.timeout_s + 2 * CANCEL_S) * 1e9)
        # What a predecessor held is kept until the successor has started, and asks for it.
        starts = duty.timed_out is not None
        self._patience_ns = (
            max(self._allowed_ns, int(START_S * 1e9)) if starts else self._allowed_ns
        )
        self.every_s = min(EVERY_S_MAX, duty.lease_s / 8)
        self._ticks = slots.ticks()
        self._ticked_ns = SYSTEM.mono_ns()
        self._kept_ns = 0
        self._client: Client | None = None

    def look(self) -> list[int]:
        """The rows that ended the child: their calls are out of time. Mostly none."""
        now_ns = SYSTEM.mono_ns()
        self._silence.look(now_ns)
        ticks = self._slots.ticks()
        if ticks != self._ticks:
            self._ticks, self._ticked_ns = ticks, now_ns
            return []
        if now_ns - self._ticked_ns < self._quiet_ns:
            return []
        late = self._silence.beyond(self._allowed_ns, now_ns)
        if late:
            return self._end(sorted(seq_of(row) for row in late.values()))
        kept = self._silence.at_work or now_ns - self._ticked_ns < self._patience_ns
        if kept and now_ns - self._kept_ns >= self._quiet_ns and not is_stopped(self._pid):
            self._kept_ns = now_ns
            self._ask(wire.ChildAlive(self._duty.owner))
        return []

    def _end(self, seqs: list[int]) -> list[int]:
        return seqs if self._ask(wire.HandOver(self._duty.owner)) else []

    def _ask(self, message: wire.Message) -> bool:
        """A ledger that cannot be reached now is asked again with the next look."""
        if self._client is None:
            self._client = Client(self._duty.address, "task", patience_s=self._duty.lease_s)
        try:
            self._client.ask(message)
        except HoldfastError:
            return False
        return True

    def __enter__(self) -> ChildGuard:
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
    """Whether a signal or a debugger has stopped the process. Known on Linux; elsewhere it is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The name, in brackets, may hold anything; the state comes after it.
    return stat.rpartition(b") ")[2][:1] in (b"T", b"t")
