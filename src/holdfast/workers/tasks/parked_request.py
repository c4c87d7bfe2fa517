"""The parked lease request of an idle task worker (long poll): the commit that submits tasks leases
them for this worker.
"""

from __future__ import annotations

from holdfast.store.api import ParkedTransaction, Store
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import GrantRequest, LeaseResult
from holdfast.workers.tasks.demand import NO_CAPACITY, capacity_of


class ParkedRequest:
    """At most one request is parked. `capacity` is the capacity that the last one asked for."""

    def __init__(
        self, store: Store, universe: str, owner: str, queues: list[str], names: tuple[str, ...]
    ) -> None:
        self.capacity = NO_CAPACITY
        self._store = store
        self._universe = universe
        self._owner = owner
        self._queues = queues
        self._names = names
        keys = keys_of(universe)
        self._queue_topics = [keys.queue_topic(queue) for queue in queues]
        self._own_topic = keys.worker_topic(owner)
        # The last commit that notified this worker's own topic.
        self._last_wakeup = 0
        self._parked: ParkedTransaction | None = None

    @property
    def is_open(self) -> bool:
        return self._parked is not None

    @property
    def is_answered(self) -> bool:
        return self._parked is not None and self._parked.is_answered

    def park(self, idle_slots: tuple[int, ...], due_ns: int | None) -> None:
        """Park a request for the idle slots, unless one is parked. The worker polls at `due_ns`."""
        if self._parked is None:
            self.capacity = capacity_of(idle_slots)
            request = GrantRequest(
                self._owner,
                self._queues,
                self.capacity.limit,
                free_slots=idle_slots,
                names=self._names,
            )
            self._parked = self._store.submit_when(
                self._queue_topics, tasks.lease_or_park, self._universe, request, due_ns or 0
            )

    def wait(self, timeout_s: float) -> None:
        """Wait for the answer, a notification of this worker or the timeout."""
        assert self._parked is not None
        self._last_wakeup = self._parked.wait([self._own_topic], self._last_wakeup, timeout_s)

    def take(self) -> LeaseResult | None:
        """Cancel the request. Returns its result if the store has granted it already."""
        parked, self._parked = self._parked, None
        if parked is None or (not parked.is_answered and parked.cancel()):
            return None
        result: LeaseResult = parked.result()
        return result
