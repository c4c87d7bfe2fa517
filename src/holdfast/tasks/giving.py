"""Giving leases: what is written of tasks that a worker is granted, and what it is told of them.

Leases of equal length that are given together have one number, and one row to find them by when their time
is up. Tasks that follow each other in a run stay together: they need no row for each (see `runs`).
"""

from __future__ import annotations

from holdfast.codec import Record
from holdfast.errors import NotFound, StoreCorrupt
from holdfast.store import blobs
from holdfast.store.schema import int_bytes
from holdfast.tasks import board
from holdfast.tasks.decision import Decision
from holdfast.tasks.records import Granted
from holdfast.tasks.rows import FRESH, Body, Spec, pack, pack_int
from holdfast.tasks.runs import Batch, Held, next_number

# A decision that has granted arguments of this much leaves the rest to the next.
LEASE_BYTES_MAX = 4 * 1024 * 1024


class Grant(Record, frozen=True):
    """A task that a worker may run until `expires_ns`, and how."""

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


class Giving:
    """What a worker is granted from one lane: leases of equal length have one number."""

    __slots__ = (
        "_alike", "_decision", "_grants", "_number", "_place", "_queue", "_worker", "count", "size",
    )  # fmt: skip

    def __init__(
        self, decision: Decision, worker: str, queue: str, place: str, grants: list[Grant]
    ) -> None:
        self._decision = decision
        self._worker = worker
        self._queue = queue
        self._place = place
        self._grants = grants
        self._number = decision.txn.count(decision.keys.lease)
        self._alike: dict[tuple[int, bool], _Leases] = {}
        self.count = self.size = 0

    def room(self, limit: int) -> bool:
        return self.count < limit and self.size < LEASE_BYTES_MAX

    def give(self, first: int, bodies: list[Body], spec: Spec, *, fresh: bool) -> None:
        """Tasks that follow each other; `fresh` if no status can be there. More than one stay together, and
        need no row for each."""
        decision, txn = self._decision, self._decision.txn
        count = len(bodies)
        batch = self._batch(spec.lease_ns, runs=count > 1)
        attempt = 1
        if count > 1:
            batch.runs.append((first, first + count - 1, bodies[0].spec))
        else:
            packed_seq = pack_int(first)
            was = FRESH if fresh else decision.resting(packed_seq)
            after = board.granted(was, batch.lease, self._worker, batch.expires_ns, decision.now_ns)
            txn.put(decision.keys.statuses + packed_seq, pack(after))
            attempt = after.attempt
        self.count += count
        lease, name, queue = batch.lease, spec.name, self._queue
        lease_ns, window_ns, expires_ns = spec.lease_ns, spec.window_ns, batch.expires_ns
        suspect = self._place == "suspect"
        for seq, body in enumerate(bodies, first):
            args = self._args(body)
            self.size += len(args)
            batch.tasks.append(seq)
            self._grants.append(
                Grant(
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
                )
            )

    def _args(self, body: Body) -> bytes:
        """Its arguments; none if damage has changed them. The worker fails such a task, and others are given."""
        if not body.blob:
            return body.args
        try:
            return blobs.get(self._decision.txn, body.blob)
        except (NotFound, StoreCorrupt):
            return b""

    def _batch(self, lease_ns: int, *, runs: bool) -> _Leases:
        found = self._alike.get((lease_ns, runs))
        if found is None:
            self._number = next_number(self._number, runs=runs)
            found = _Leases(self._number, self._decision.now_ns + lease_ns)
            self._alike[lease_ns, runs] = found
        return found

    def save(self) -> None:
        if not self.count:
            return
        decision, worker = self._decision, self._worker
        txn, keys = decision.txn, decision.keys
        decision.tally.add(self._queue, self._place, -self.count)
        decision.tally.add(self._queue, "leased", self.count)
        txn.put(keys.lease, int_bytes(self._number))
        for batch in self._alike.values():
            lease_no, expires_ns = batch.lease, batch.expires_ns
            decision.log.say(Granted(lease_no, worker, expires_ns, batch.tasks))
            row_key = keys.expiries + pack_int(expires_ns) + pack_int(lease_no)
            txn.put(row_key, pack(Batch(lease_no, worker, None if batch.runs else batch.tasks)))
            if batch.runs:
                # By age: they were taken by priority.
                runs = sorted(batch.runs)
                firsts = [first for first, _, _ in runs]
                held = Held(worker, expires_ns, decision.now_ns, runs, firsts)
                decision.leases.give(lease_no, held)


class _Leases:
    """Leases of one number, and one row to find them by when their time is up."""

    __slots__ = ("expires_ns", "lease", "runs", "tasks")

    def __init__(self, lease: int, expires_ns: int) -> None:
        self.lease = lease
        self.expires_ns = expires_ns
        self.tasks: list[int] = []
        self.runs: list[tuple[int, int, bytes]] = []
