"""The timer worker: delivers what is due, after any downtime, once (document 004, role 4).

Timers wait in two indexes ordered by time, one by store time, one by the clock on the wall: a million
pending ones cost nothing while none is due. What is due is fired in the order of its times, a batch in
one commit; nothing is claimed, so that no timer is ever in the hands of a worker that can die.

It sleeps until the next one is due, but never for long, so that it notices when the wall clock is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.clock import SYSTEM, Clock, S
from holdfast.durable import queue
from holdfast.roles.firing import fire_due
from holdfast.roles.role import Role
from holdfast.store.api import Store, Txn
from holdfast.world import timers

# What one commit fires at most: more would keep other commits waiting.
BATCH_MAX = 200
# After a commit that found nothing, although something seemed to be due.
PAUSE_S = 0.01


class TimerWorker(Role):
    name = "timer"
    idle_s = 1.0

    def __init__(self, store: Store, *, universe: str, clock: Clock = SYSTEM) -> None:
        super().__init__(store, clock)
        self._universe = universe
        self._delays, self._calendar = timers.delays(universe), timers.calendar(universe)
        self._pause_s = 0.0

    @property
    def topics(self) -> Sequence[str]:
        return [queue.topic(self._delays), queue.topic(self._calendar)]

    def tick(self) -> bool:
        self._pause_s = 0.0
        # Looking is free, firing is a commit: so look first.
        left_ns = self._left_ns()
        if left_ns is None or left_ns > 0:
            return False
        fired = self.store.transact(fire_due, self._universe, self.clock.wall_ns(), BATCH_MAX)
        self._pause_s = 0.0 if fired else PAUSE_S
        return bool(fired)

    def next_s(self) -> float:
        left_ns = self._left_ns()
        if left_ns is None:
            return self.idle_s
        return max(min(left_ns / S, self.idle_s), self._pause_s)

    def _left_ns(self) -> int | None:
        """How long until something is due by its clock; None for nothing in sight."""
        return self.store.read(self._look)

    def _look(self, txn: Txn) -> int | None:
        now_ns = self.store.now_ns()
        ahead_ns = self.clock.wall_ns() - now_ns
        found = (
            queue.next_due_ns(txn, self._delays),
            queue.next_due_ns(txn, self._calendar, ahead_ns),
        )
        dues = [due_ns - now_ns for due_ns in found if due_ns is not None]
        return min(dues, default=None)
