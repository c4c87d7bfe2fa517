"""Grants: writes the rows of leased tasks and builds the reply to the worker.

Leases of equal duration granted together share one lease number and one expiry row. Consecutive
tasks of a range stay a range and need no row each (see `row_ranges`).
"""

from __future__ import annotations

from holdfast.codec import Record
from holdfast.errors import NotFound, StoreCorrupt
from holdfast.store import blobs
from holdfast.store.schema import encode_int
from holdfast.tasks import status_fold
from holdfast.tasks.events import LeasesGranted
from holdfast.tasks.model import NEW_STATUS, TaskBodyRow, TaskSpec, pack, pack_int
from holdfast.tasks.row_ranges import ExpiryBatch, RangeLease, next_lease_no
from holdfast.tasks.unit_of_work import UnitOfWork

# The bytes of arguments that one operation grants. The next operation grants the rest.
LEASE_BYTES_MAX = 4 * 1024 * 1024


class TaskGrant(Record, frozen=True):
    """A task leased to a worker until `expires_ns`."""

    seq: int
    lease: int
    attempt: int
    name: str
    args: bytes
    queue: str
    lease_ns: int
    window_ns: int
    expires_ns: int
    suspect: bool
    created_ns: int
    generation: int
    # The trace context of the submission.
    trace: bytes = b""


class GrantBuilder:
    """Builds the grants of one worker from one queue index. Leases of equal duration share a
    number.
    """

    __slots__ = (
        "_batches", "_decision", "_grants", "_lease_no", "_place", "_queue", "_worker", "count", "size",
    )  # fmt: skip

    def __init__(
        self, decision: UnitOfWork, worker: str, queue: str, place: str, grants: list[TaskGrant]
    ) -> None:
        self._decision = decision
        self._worker = worker
        self._queue = queue
        self._place = place
        self._grants = grants
        self._lease_no = decision.txn.count(decision.keys.lease_counter)
        self._batches: dict[tuple[int, bool], _LeaseBatch] = {}
        self.count = self.size = 0

    def has_room(self, limit: int) -> bool:
        return self.count < limit and self.size < LEASE_BYTES_MAX

    def add(self, first: int, bodies: list[TaskBodyRow], spec: TaskSpec, *, fresh: bool) -> None:
        """Grant consecutive tasks. Several tasks form a range lease and need no status rows.
        `fresh` means that no status row can exist.
        """
        decision, txn = self._decision, self._decision.txn
        count = len(bodies)
        batch = self._lease_batch(spec.lease_ns, for_ranges=count > 1)
        attempt = 1
        if count > 1:
            batch.ranges.append((first, first + count - 1, bodies[0].spec))
        else:
            packed_seq = pack_int(first)
            prior = NEW_STATUS if fresh else decision.waiting_status(packed_seq)
            after = status_fold.apply_grant(
                prior, batch.lease, self._worker, batch.expires_ns, decision.now_ns
            )
            txn.put(decision.keys.statuses + packed_seq, pack(after))
            attempt = after.attempt
        self.count += count
        lease, name, queue = batch.lease, spec.name, self._queue
        lease_ns, window_ns, expires_ns = spec.lease_ns, spec.window_ns, batch.expires_ns
        suspect = self._place == "suspect"
        for seq, body in enumerate(bodies, first):
            args = self._load_args(body)
            self.size += len(args)
            batch.tasks.append(seq)
            self._grants.append(
                TaskGrant(
                    seq,
                    lease,
                    attempt,
                    name,
                    args,
                    queue,
                    lease_ns,
                    window_ns,
                    expires_ns,
                    suspect,
                    body.created_ns,
                    body.generation,
                    body.trace,
                )
            )

    def _load_args(self, body: TaskBodyRow) -> bytes:
        """Load the arguments. Empty if the blob is damaged: the worker then fails this task only."""
        if not body.blob:
            return body.args
        try:
            return blobs.get(self._decision.txn, body.blob)
        except (NotFound, StoreCorrupt):
            return b""

    def _lease_batch(self, lease_ns: int, *, for_ranges: bool) -> _LeaseBatch:
        batch = self._batches.get((lease_ns, for_ranges))
        if batch is None:
            self._lease_no = next_lease_no(self._lease_no, for_ranges=for_ranges)
            batch = _LeaseBatch(self._lease_no, self._decision.now_ns + lease_ns)
            self._batches[lease_ns, for_ranges] = batch
        return batch

    def save(self) -> None:
        if not self.count:
            return
        decision, worker = self._decision, self._worker
        txn, keys = decision.txn, decision.keys
        decision.counts.add(self._queue, self._place, -self.count)
        decision.counts.add(self._queue, "leased", self.count)
        txn.put(keys.lease_counter, encode_int(self._lease_no))
        for batch in self._batches.values():
            lease_no, expires_ns = batch.lease, batch.expires_ns
            decision.log.append(LeasesGranted(lease_no, worker, expires_ns, batch.tasks))
            row_key = keys.expiries + pack_int(expires_ns) + pack_int(lease_no)
            txn.put(
                row_key, pack(ExpiryBatch(lease_no, worker, None if batch.ranges else batch.tasks))
            )
            if batch.ranges:
                # Sorted by seq. The grant order is by priority.
                ranges = sorted(batch.ranges)
                firsts = [first for first, _, _ in ranges]
                range_lease = RangeLease(worker, expires_ns, decision.now_ns, ranges, firsts)
                decision.leases.put(lease_no, range_lease)


class _LeaseBatch:
    """The leases that share one number and one expiry row."""

    __slots__ = ("expires_ns", "lease", "ranges", "tasks")

    def __init__(self, lease: int, expires_ns: int) -> None:
        self.lease = lease
        self.expires_ns = expires_ns
        self.tasks: list[int] = []
        self.ranges: list[tuple[int, int, bytes]] = []
