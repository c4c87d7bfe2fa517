"""Leases: time-limited exclusive permission to act on a resource. The epoch is the fencing token.

- A lease is live while `now < expires` in store time, checked when the commit is applied.
- A fence is (generation, epoch). Epochs only grow: release and force-release keep the record, and
  the next grant has the next epoch. A restored store has a higher generation. A lease of an older
  generation is not live, regardless of its expiry.
- A holder is (worker, incarnation). The same incarnation gets its current lease, not extended. A
  restarted process is a new incarnation: it waits for the expiry, and the new epoch fences its former
  self.
- A grant after an expiry first logs that expiry, in the same transaction.

A lease has two rows for concurrency. Guarded writes read the fence row and renewals rewrite only the
expiry row, so renewing never conflicts with guarded writes. The lease log records every decision with
its time, so replay needs no clock. Renewals are not logged because they change no holder.

The log is bounded by age and by number (`truncate_events`, `truncate_excess`). The last removed line of a
resource stays as its baseline until the resource is deleted. So baseline and log together always have the last
decision about a resource (`baselines`, `events`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from itertools import takewhile

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.durable.validation import check_limit, check_name, check_time, check_ttl
from holdfast.errors import Fenced, Held, Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import LeaseGuard, Row, Txn, operation
from holdfast.store.prefix_scan import iter_rows
from holdfast.transitions import Transitions


class LeaseState(Enum):
    FREE = "free"
    HELD = "held"
    STALE = "stale"


class LeaseAction(Enum):
    ACQUIRE = "acquire"
    RENEW = "renew"
    EXPIRE = "expire"
    RELEASE = "release"
    FORCE_RELEASE = "force_release"


LEASE_TRANSITIONS = Transitions(
    "lease",
    LeaseState.FREE,
    {
        (LeaseState.FREE, LeaseAction.ACQUIRE): LeaseState.HELD,
        (LeaseState.STALE, LeaseAction.ACQUIRE): LeaseState.HELD,
        (LeaseState.HELD, LeaseAction.RENEW): LeaseState.HELD,
        (LeaseState.HELD, LeaseAction.EXPIRE): LeaseState.STALE,
        (LeaseState.HELD, LeaseAction.RELEASE): LeaseState.FREE,
        (LeaseState.STALE, LeaseAction.RELEASE): LeaseState.FREE,
        (LeaseState.FREE, LeaseAction.FORCE_RELEASE): LeaseState.FREE,
        (LeaseState.HELD, LeaseAction.FORCE_RELEASE): LeaseState.FREE,
        (LeaseState.STALE, LeaseAction.FORCE_RELEASE): LeaseState.FREE,
    },
)


class LeaseHolder(Record, frozen=True):
    worker: str
    incarnation: str


class Lease(Record, frozen=True):
    resource: str
    worker: str
    incarnation: str
    generation: int
    epoch: int
    expires_ns: int

    @property
    def holder(self) -> LeaseHolder:
        return LeaseHolder(self.worker, self.incarnation)

    @property
    def lease_id(self) -> str:
        return f"{self.worker}/{self.incarnation}/{self.generation}.{self.epoch}"

    @property
    def guard(self) -> LeaseGuard:
        keys = _keys(self.resource)
        fence = LeaseFence(
            LeaseState.HELD, self.worker, self.incarnation, self.generation, self.epoch
        )
        return LeaseGuard(
            self.resource, keys.fence, codec.pack(fence), keys.expiry, self.generation
        )


class LeaseFence(Record, frozen=True):
    """The row that guarded writes read. It has no holder when free, and the last holder when stale."""

    state: LeaseState
    worker: str
    incarnation: str
    generation: int
    epoch: int


class LeaseStatus(LeaseFence, frozen=True):
    """The stored status of a resource. A held lease may be overdue: check `is_live`."""

    expires_ns: int

    def is_live(self, now_ns: int, generation: int) -> bool:
        return (
            self.state is LeaseState.HELD
            and self.generation == generation
            and now_ns < self.expires_ns
        )


class LeaseEvent(Record, frozen=True):
    """One entry of the lease log. `kind` is granted, expired, released or forced."""

    n: int
    resource: str
    kind: str
    worker: str
    incarnation: str
    generation: int
    epoch: int
    decided_ns: int
    expires_ns: int
    reason: str = ""


@operation("lease.acquire")
def acquire(txn: Txn, resource: str, worker: str, incarnation: str, ttl_ns: int) -> Lease:
    """Grant the lease, or raise Held if another holder's lease is live. The current holder gets its lease
    back, not extended."""
    check_name("resource", resource)
    check_name("worker", worker)
    check_name("incarnation", incarnation)
    check_ttl(ttl_ns)
    status = current_status(txn, resource) or LeaseStatus(
        LEASE_TRANSITIONS.initial, "", "", txn.generation, 0, 0
    )
    if status.is_live(txn.now_ns, txn.generation):
        if (status.worker, status.incarnation) != (worker, incarnation):
            raise Held(resource=resource, worker=status.worker, until_ns=status.expires_ns)
        return _to_lease(resource, status)
    if status.state is LeaseState.HELD:
        status = _expire(txn, resource, status)
    granted = LeaseStatus(
        LEASE_TRANSITIONS.next(status.state, LeaseAction.ACQUIRE, resource=resource, worker=worker),
        worker,
        incarnation,
        txn.generation,
        status.epoch + 1,
        txn.now_ns + ttl_ns,
    )
    _write(txn, resource, granted)
    txn.put(_worker_prefix(worker) + tuples.pack((resource,)), b"")
    _log(txn, resource, "granted", granted)
    return _to_lease(resource, granted)


@operation("lease.renew")
def renew(txn: Txn, leases: list[Lease], ttl_ns: int) -> list[Lease | None]:
    """Renew leases to `ttl_ns` from now. An expiry never moves back. Return None for each fenced lease."""
    check_limit(len(leases), "leases")
    check_ttl(ttl_ns)
    renewed: list[Lease | None] = []
    for lease in leases:
        status = current_status(txn, lease.resource)
        if (
            status is None
            or not _matches(status, lease)
            or not status.is_live(txn.now_ns, txn.generation)
        ):
            renewed.append(None)
            continue
        LEASE_TRANSITIONS.next(
            status.state, LeaseAction.RENEW, resource=lease.resource, worker=lease.worker
        )
        expires_ns = max(status.expires_ns, txn.now_ns + ttl_ns)
        txn.put(_keys(lease.resource).expiry, schema.encode_int(expires_ns))
        renewed.append(replace(lease, expires_ns=expires_ns))
    return renewed


@operation("lease.release")
def release(txn: Txn, lease: Lease) -> None:
    """Release a live or expired lease. Raises Fenced after a later grant or release."""
    status = current_status(txn, lease.resource)
    if status is None or not _matches(status, lease) or lease.generation != txn.generation:
        held_fence = f"{lease.generation}.{lease.epoch}"
        current_fence = None if status is None else f"{status.generation}.{status.epoch}"
        raise Fenced(resource=lease.resource, held=held_fence, current=current_fence)
    _set_free(txn, lease.resource, status, LeaseAction.RELEASE, "released", "")


@operation("lease.force_release")
def force_release(txn: Txn, resource: str, reason: str) -> int:
    """Free a resource in any state, and return its epoch, which does not change."""
    check_name("resource", resource)
    status = current_status(txn, resource)
    if status is None:
        raise NotFound(what="lease", resource=resource)
    _set_free(txn, resource, status, LeaseAction.FORCE_RELEASE, "forced", reason)
    return status.epoch


def delete_lease(txn: Txn, resource: str) -> None:
    """Delete the rows of a resource that will never be granted again. Its log entries stay until truncation."""
    check_name("resource", resource)
    status = current_status(txn, resource)
    if status is not None and status.state is not LeaseState.FREE:
        raise Invalid(
            what="lease", why="the lease is held", resource=resource, worker=status.worker
        )
    keys = _keys(resource)
    txn.delete(keys.fence)
    txn.delete(keys.expiry)
    txn.delete(keys.baseline)


@operation("lease.mark_stale")
def mark_stale(txn: Txn, resource: str) -> bool:
    """Record the expiry of an overdue lease without a new grant. Return False if no lease is overdue."""
    check_name("resource", resource)
    status = current_status(txn, resource)
    if (
        status is None
        or status.state is not LeaseState.HELD
        or status.is_live(txn.now_ns, txn.generation)
    ):
        return False
    _expire(txn, resource, status)
    return True


@operation("lease.truncate_events")
def truncate_events(txn: Txn, before_ns: int, limit: int) -> int:
    """Remove lease log entries older than a time, oldest first, and return their number."""
    check_time("before_ns", before_ns)
    check_limit(limit)
    rows = txn.scan(_LOG, tuples.prefix_end(_LOG), limit)
    return _truncate(txn, takewhile(lambda row: _decode_event(row[1]).decided_ns < before_ns, rows))


@operation("lease.truncate_excess")
def truncate_excess(txn: Txn, lines_max: int, limit: int) -> int:
    """Remove the oldest lease log entries beyond the last `lines_max`, and return their number."""
    check_limit(lines_max, "lines_max")
    check_limit(limit)
    end = _LOG + tuples.pack_int(max(txn.count(schema.sequence_key(_LOG)) - lines_max, 0) + 1)
    return _truncate(txn, txn.scan(_LOG, end, limit))


def current_status(txn: Txn, resource: str) -> LeaseStatus | None:
    """Return the stored status, or None when the resource was never granted."""
    keys = _keys(resource)
    row = txn.get(keys.fence)
    if row is None:
        return None
    fence = _decode_fence(row)
    expires_ns = txn.count(keys.expiry)
    return LeaseStatus(
        fence.state, fence.worker, fence.incarnation, fence.generation, fence.epoch, expires_ns
    )


def list_by_worker(txn: Txn, worker: str, limit: int) -> list[str]:
    """List the resources leased by a worker, by name, including overdue leases that are not marked stale."""
    check_name("worker", worker)
    check_limit(limit)
    prefix = _worker_prefix(worker)
    return [
        str(tuples.unpack(key[len(prefix) :])[0])
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), limit)
    ]


def events(txn: Txn, after: int, limit: int) -> list[LeaseEvent]:
    """Return lease log entries after an entry number, in order."""
    if after < 0:
        raise Invalid(what="after", why="negative", found=after)
    check_limit(limit)
    rows = txn.scan(_LOG + tuples.pack_int(after + 1), tuples.prefix_end(_LOG), limit)
    return [
        replace(_decode_event(row), n=tuples.unpack_last_int(key, len(_LOG))) for key, row in rows
    ]


def baselines(txn: Txn) -> Iterator[LeaseEvent]:
    """Yield the last removed log entry of each resource, without its number."""
    for _, row in iter_rows(txn, schema.key_prefix(schema.Space.LEASE, "base")):
        yield _decode_event(row)


# -- inside --------------------------------------------------------------------------------------


class _LeaseKeys:
    __slots__ = ("baseline", "expiry", "fence")

    def __init__(self, resource: str) -> None:
        self.fence = schema.key_prefix(schema.Space.LEASE, "fence", resource)
        self.expiry = schema.key_prefix(schema.Space.LEASE, "expiry", resource)
        self.baseline = schema.key_prefix(schema.Space.LEASE, "base", resource)


_keys = lru_cache(maxsize=65536)(_LeaseKeys)


@lru_cache(maxsize=4096)
def _worker_prefix(worker: str) -> bytes:
    return schema.key_prefix(schema.Space.LEASE, "by", worker)


def _to_lease(resource: str, status: LeaseStatus) -> Lease:
    return Lease(
        resource,
        status.worker,
        status.incarnation,
        status.generation,
        status.epoch,
        status.expires_ns,
    )


def _matches(status: LeaseStatus, lease: Lease) -> bool:
    return replace(lease, expires_ns=status.expires_ns) == _to_lease(lease.resource, status)


def _expire(txn: Txn, resource: str, status: LeaseStatus) -> LeaseStatus:
    state = LEASE_TRANSITIONS.next(
        status.state, LeaseAction.EXPIRE, resource=resource, worker=status.worker
    )
    stale = replace(status, state=state)
    _write(txn, resource, stale)
    _unindex(txn, resource, status)
    _log(txn, resource, "expired", status)
    return stale


def _set_free(
    txn: Txn, resource: str, status: LeaseStatus, action: LeaseAction, kind: str, reason: str
) -> None:
    state = LEASE_TRANSITIONS.next(status.state, action, resource=resource, worker=status.worker)
    _write(txn, resource, LeaseStatus(state, "", "", status.generation, status.epoch, 0))
    _unindex(txn, resource, status)
    _log(txn, resource, kind, status, reason[:ERROR_TEXT_CHARS_MAX])


def _write(txn: Txn, resource: str, status: LeaseStatus) -> None:
    keys = _keys(resource)
    fence = LeaseFence(
        status.state, status.worker, status.incarnation, status.generation, status.epoch
    )
    txn.put(keys.fence, codec.pack(fence))
    txn.put(keys.expiry, schema.encode_int(status.expires_ns))


def _unindex(txn: Txn, resource: str, status: LeaseStatus) -> None:
    if status.worker:
        txn.delete(_worker_prefix(status.worker) + tuples.pack((resource,)))


def _log(txn: Txn, resource: str, kind: str, status: LeaseStatus, reason: str = "") -> None:
    log_event = LeaseEvent(
        n=0,  # the key has the number
        resource=resource,
        kind=kind,
        worker=status.worker,
        incarnation=status.incarnation,
        generation=status.generation,
        epoch=status.epoch,
        decided_ns=txn.now_ns,
        expires_ns=status.expires_ns,
        reason=reason,
    )
    txn.append(_LOG, codec.pack(log_event))


def _truncate(txn: Txn, oldest: Iterable[Row]) -> int:
    """Remove the oldest log entries. The last one of each resource that still exists becomes its baseline."""
    removed, last = 0, dict[str, bytes]()
    for key, row in oldest:
        last[_decode_event(row).resource] = row
        txn.delete(key)
        removed += 1
    txn.prefetch([_keys(resource).fence for resource in last])
    for resource, row in last.items():
        keys = _keys(resource)
        # Without a fence the resource was deleted.
        if txn.get(keys.fence) is not None:
            txn.put(keys.baseline, row)
    return removed


_LOG = schema.key_prefix(schema.Space.LEASE_LOG)
_decode_fence = codec.decoder(LeaseFence).decode
_decode_event = codec.decoder(LeaseEvent).decode
