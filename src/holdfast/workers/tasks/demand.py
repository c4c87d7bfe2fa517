"""The lease demand of a task worker: how many tasks it requests, from which queues, and when.

`LeaseDemand` is pure. It reads no store, no clock and no executor. The worker loop passes their
state in and sends the resulting request.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.tasks.leases import LEASE_BATCH_MAX
from holdfast.tasks.operations import LeaseResult
from holdfast.workers.tasks.quarantine_window import QuarantineWindow

# Queues that one commit leases from.
QUEUES_PER_COMMIT = 16


class LeaseCapacity(NamedTuple):
    """The number of tasks to lease, whether a quarantined task may be leased, and the slots by
    executor kind.
    """

    limit: int
    quarantine: bool
    free_slots: tuple[int, ...]


NO_CAPACITY = LeaseCapacity(0, False, ())


class LeasePlan(NamedTuple):
    """The next commit: the capacity to fill and the queues to ask. `due` means that a delayed task
    or an expired lease is due.
    """

    capacity: LeaseCapacity
    queues: list[str]
    due: bool


def capacity_of(free_slots: tuple[int, ...]) -> LeaseCapacity:
    """Return the capacity of free slots, within one lease batch."""
    return LeaseCapacity(min(sum(free_slots), LEASE_BATCH_MAX), False, free_slots)


class LeaseDemand:
    def __init__(self, queues: list[str]) -> None:
        # Whether the worker looks for tasks without a notification.
        self.look_for_tasks = True
        # Whether an operator drains the worker: it asks for no task.
        self.draining = False
        # Whether finished outcomes wait for others to join their commit.
        self.reports_delayed = False
        # The store time of the next delayed task or lease expiry.
        self.due_ns: int | None = None
        self._queues = queues
        # Queues found with work but not asked yet.
        self._queues_left: list[str] = []
        self._rotation = 0
        # Whether the last lease left tasks behind.
        self._more = False
        self._quarantine_waits = False
        self._window = QuarantineWindow()

    @property
    def can_park(self) -> bool:
        """Whether a parked request may cover the demand. It grants no quarantined task."""
        return (
            len(self._queues) <= QUEUES_PER_COMMIT
            and not self._quarantine_waits
            and not self.draining
        )

    def capacity(
        self, free_slots: tuple[int, ...], *, busy: bool, quarantined_runs: bool, now_ns: int
    ) -> LeaseCapacity:
        """Return the capacity of the worker. A quarantined task runs alone."""
        if quarantined_runs or self.draining:
            return NO_CAPACITY
        if not self._quarantine_waits:
            return capacity_of(free_slots)
        if not busy:
            return LeaseCapacity(1, True, free_slots)
        return NO_CAPACITY if self._window.should_drain(now_ns) else capacity_of(free_slots)

    def known_queues(self) -> list[str] | None:
        """Return the queues to ask next, rotated, so that a queue that is always full starves no
        other. None means that the worker must read which queues have work.
        """
        if self._more and len(self._queues) <= QUEUES_PER_COMMIT:
            return self._rotate(self._queues)
        if self._queues_left:
            return self._rotate(self._take_queues())
        return None

    def found_queues(self, queues: list[str], due_ns: int | None) -> list[str]:
        """Note the queues with work and the next due time, as read from the store. Returns the
        queues to ask next.
        """
        self._queues_left, self.due_ns = queues, due_ns
        return self._rotate(self._take_queues())

    def _take_queues(self) -> list[str]:
        queues = self._queues_left[:QUEUES_PER_COMMIT]
        self._queues_left = self._queues_left[QUEUES_PER_COMMIT:]
        return queues

    def _rotate(self, queues: list[str]) -> list[str]:
        if not queues:
            return queues
        self._rotation = (self._rotation + 1) % len(queues)
        return queues[self._rotation :] + queues[: self._rotation]

    def plan(
        self,
        capacity: LeaseCapacity,
        queues: list[str],
        *,
        report_count: int,
        queued_count: int,
        now_ns: int,
    ) -> LeasePlan | None:
        """Return the next commit, or None if there is nothing to commit yet.

        `queues` are the queues with work, `queued_count` the tasks that wait in the executors.
        """
        if capacity.limit and not queues:
            # No queue has work. The check is a local read, a lease request would be a commit.
            self.look_for_tasks = False
            capacity = capacity._replace(limit=0)
        due = self.due_ns is not None and now_ns >= self.due_ns
        # A worker without free slots also processes due tasks, because other workers may wait for
        # them.
        if not report_count and not (self.look_for_tasks and capacity.limit) and not due:
            return None
        full = capacity.limit >= LEASE_BATCH_MAX
        if report_count < queued_count and not self.reports_delayed and not full:
            # The executors have queued work: outcomes that follow shortly join the same commit.
            self.reports_delayed = True
            return None
        self.reports_delayed = False
        return LeasePlan(capacity, queues, due)

    def on_leased(self, leased: LeaseResult, capacity: LeaseCapacity) -> bool:
        """Process a lease result. Returns whether the worker must read the next due time."""
        if leased.grants and leased.grants[0].suspect:
            self._window.reset()
        if capacity.limit:
            # If the grants filled the slots of a kind, more tasks may be ready.
            full = len(leased.grants) >= min(capacity.limit, max(capacity.free_slots))
            self._more = full or leased.suspects or leased.overdue
            self.look_for_tasks = self._more or bool(self._queues_left)
            if not leased.overdue:
                self._quarantine_waits = leased.suspects
        return not capacity.limit or not self.look_for_tasks

    def next_check_ns(self, now_ns: int, *, busy: bool) -> int | None:
        """Return the time at which the demand changes without a notification, or None."""
        times = [] if self.due_ns is None else [self.due_ns]
        if self._quarantine_waits and busy:
            times += self._window.next_changes_ns(now_ns)
        return min(times, default=None)
