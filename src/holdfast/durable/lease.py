"""A lease: permission to act on a resource, for a time. Its epoch is the fence.

- A lease is live exactly while `now < expires`, by store time, judged where the commit is applied.
- A fence is (generation, epoch). Epochs only grow: release and force-release keep the record, and
  the next grant is one higher. A restored store has a higher generation, and a lease of an older
  one is not live, whatever its expiry says.
- A holder is (worker, incarnation). The same incarnation gets the lease it has, not extended. A
  restarted process is another incarnation: it waits for the expiry, and the new epoch fences its
  former self.
- A grant that follows an expiry writes the record of that expiry first, in the same transaction.

There are two rows, for the sake of concurrency: guarded writes read the fence, renewals rewrite the
expiry alone, so renewing never conflicts with working. Every decision is in the lease log with the
time it was taken, so that a replay needs no clock; renewals, which decide nothing, are not.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.durable.bounds import check_limit, check_name, check_time, check_ttl
from holdfast.errors import Fenced, Held, Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import Guard, Txn, operation
from holdfast.transitions import Transitions


class State(Enum):
    FREE = "free"
    HELD = "held"
    STALE = "stale"


class Event(Enum):
    ACQUIRE = "acquire"
    RENEW = "renew"
    EXPIRE = "expire"
    RELEASE = "release"
    FORCE_RELEASE = "force_release"


LEASE = Transitions(
    "lease",
    State.FREE,
    {
        (State.FREE, Event.ACQUIRE): State.HELD,
        (State.STALE, Event.ACQUIRE): State.HELD,
        (State.HELD, Event.RENEW): State.HELD,
        (State.HELD, Event.EXPIRE): State.STALE,
        (State.HELD, Event.RELEASE): State.FREE,
        (State.STALE, Event.RELEASE): State.FREE,
        (State.FREE, Event.FORCE_RELEASE): State.FREE,
        (State.HELD, Event.FORCE_RELEASE): State.FREE,
        (State.STALE, Event.FORCE_RELEASE): State.FREE,
    },
)


class Holder(Record, frozen=True):
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
    def holder(self) -> Holder:
        return Holder(self.worker, self.incarnation)

    @property
    def lease_id(self) -> str:
        return f"{self.worker}/{self.incarnation}/{self.generation}.{self.epoch}"

    @property
    def guard(self) -> Guard:
        keys = _keys(self.resource)
        fence = Fence(State.HELD, self.worker, self.incarnation, self.generation, self.epoch)
        return Guard(self.resource, keys.fence, codec.pack(fence), keys.expiry, self.generation)


class Fence(Record, frozen=True):
    """The row that guarded writes read. Without a holder when free; of the last one when stale."""

    state: State
    worker: str
    incarnation: str
    generation: int
    epoch: int


class Status(Fence, frozen=True):
    """What is written about a resource. A held lease may be overdue: ask `live`."""

    expires_ns: int

    def live(self, now_ns: int, generation: int) -> bool:
        return (
            self.state is State.HELD and self.generation == generation and now_ns < self.expires_ns
        )


class LeaseEvent(Record, frozen=True):
    """One line of the lease log; `kind` is granted, expired, released or forced."""

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


@operation
def acquire(txn: Txn, resource: str, worker: str, incarnation: str, ttl_ns: int) -> Lease:
    """The lease, or Held by another. Again by its holder: the same, not extended."""
    check_name("resource", resource)
    check_name("worker", worker)
    check_name("incarnation", incarnation)
    check_ttl(ttl_ns)
    found = current(txn, resource) or Status(LEASE.initial, "", "", txn.generation, 0, 0)
    if found.live(txn.now_ns, txn.generation):
        if (found.worker, found.incarnation) != (worker, incarnation):
            raise Held(resource=resource, worker=found.worker, until_ns=found.expires_ns)
        return _lease(resource, found)
    if found.state is State.HELD:
        found = _expire(txn, resource, found)
    granted = Status(
        LEASE.next(found.state, Event.ACQUIRE, resource=resource, worker=worker),
        worker,
        incarnation,
        txn.generation,
        found.epoch + 1,
        txn.now_ns + ttl_ns,
    )
    _write(txn, resource, granted)
    txn.put(_by(worker) + tuples.pack((resource,)), b"")
    _log(txn, resource, "granted", granted)
    return _lease(resource, granted)


@operation
def renew(txn: Txn, leases: list[Lease], ttl_ns: int) -> list[Lease | None]:
    """Hold leases for `ttl_ns` from now, never for less than before; None for each that is fenced."""
    check_limit(len(leases), "leases")
    check_ttl(ttl_ns)
    renewed: list[Lease | None] = []
    for lease in leases:
        found = current(txn, lease.resource)
        if found is None or not _is_of(found, lease) or not found.live(txn.now_ns, txn.generation):
            renewed.append(None)
            continue
        LEASE.next(found.state, Event.RENEW, resource=lease.resource, worker=lease.worker)
        expires_ns = max(found.expires_ns, txn.now_ns + ttl_ns)
        txn.put(_keys(lease.resource).expiry, schema.int_bytes(expires_ns))
        renewed.append(replace(lease, expires_ns=expires_ns))
    return renewed


@operation
def release(txn: Txn, lease: Lease) -> None:
    """Give the lease back, live or expired; Fenced when another grant or a release followed."""
    found = current(txn, lease.resource)
    if found is None or not _is_of(found, lease) or lease.generation != txn.generation:
        held = f"{lease.generation}.{lease.epoch}"
        now = None if found is None else f"{found.generation}.{found.epoch}"
        raise Fenced(resource=lease.resource, held=held, current=now)
    _free(txn, lease.resource, found, Event.RELEASE, "released", "")


@operation
def force_release(txn: Txn, resource: str, reason: str) -> int:
    """Take the resource from whoever has it, stale or not; the epoch, which stands."""
    check_name("resource", resource)
    found = current(txn, resource)
    if found is None:
        raise NotFound(what="lease", resource=resource)
    _free(txn, resource, found, Event.FORCE_RELEASE, "forced", reason)
    return found.epoch


def forget(txn: Txn, resource: str) -> None:
    """Remove the rows of a resource that will never be granted again. Its log stays as long as any."""
    check_name("resource", resource)
    found = current(txn, resource)
    if found is not None and found.state is not State.FREE:
        raise Invalid(what="lease", why="it is held", resource=resource, worker=found.worker)
    keys = _keys(resource)
    txn.delete(keys.fence)
    txn.delete(keys.expiry)


@operation
def mark_stale(txn: Txn, resource: str) -> bool:
    """Write the expiry of an overdue lease now, without a grant; False when there is none."""
    check_name("resource", resource)
    found = current(txn, resource)
    if found is None or found.state is not State.HELD or found.live(txn.now_ns, txn.generation):
        return False
    _expire(txn, resource, found)
    return True


@operation
def truncate_events(txn: Txn, before_ns: int, limit: int) -> int:
    """Remove the oldest lines of the lease log, decided before a time; how many."""
    check_time("before_ns", before_ns)
    check_limit(limit)
    removed = 0
    for key, row in txn.scan(_LOG, tuples.after(_LOG), limit):
        if _decode_event(row).decided_ns >= before_ns:
            break
        txn.delete(key)
        removed += 1
    return removed


def current(txn: Txn, resource: str) -> Status | None:
    """What is written; None when the resource was never granted."""
    keys = _keys(resource)
    row = txn.get(keys.fence)
    if row is None:
        return None
    fence = _decode_fence(row)
    expires_ns = txn.count(keys.expiry)
    return Status(
        fence.state, fence.worker, fence.incarnation, fence.generation, fence.epoch, expires_ns
    )


def of_worker(txn: Txn, worker: str, limit: int) -> list[str]:
    """Resources whose lease is the worker's, by name; overdue ones until somebody marks them."""
    check_name("worker", worker)
    check_limit(limit)
    by = _by(worker)
    return [
        str(tuples.unpack(key[len(by) :])[0]) for key, _ in txn.scan(by, tuples.after(by), limit)
    ]


def events(txn: Txn, after: int, limit: int) -> list[LeaseEvent]:
    """The lease log, after a line, in the order of decisions."""
    if after < 0:
        raise Invalid(what="after", why="negative", found=after)
    check_limit(limit)
    rows = txn.scan(_LOG + tuples.pack_int(after + 1), tuples.after(_LOG), limit)
    return [
        replace(_decode_event(row), n=tuples.unpack_last_int(key, len(_LOG))) for key, row in rows
    ]


# -- inside --------------------------------------------------------------------------------------


class _Keys:
    __slots__ = ("expiry", "fence")

    def __init__(self, resource: str) -> None:
        self.fence = schema.prefix(schema.Space.LEASE, "fence", resource)
        self.expiry = schema.prefix(schema.Space.LEASE, "expiry", resource)


_keys = lru_cache(maxsize=65536)(_Keys)


@lru_cache(maxsize=4096)
def _by(worker: str) -> bytes:
    return schema.prefix(schema.Space.LEASE, "by", worker)


def _lease(resource: str, status: Status) -> Lease:
    return Lease(
        resource,
        status.worker,
        status.incarnation,
        status.generation,
        status.epoch,
        status.expires_ns,
    )


def _is_of(found: Status, lease: Lease) -> bool:
    return replace(lease, expires_ns=found.expires_ns) == _lease(lease.resource, found)


def _expire(txn: Txn, resource: str, found: Status) -> Status:
    state = LEASE.next(found.state, Event.EXPIRE, resource=resource, worker=found.worker)
    stale = replace(found, state=state)
    _write(txn, resource, stale)
    _unindex(txn, resource, found)
    _log(txn, resource, "expired", found)
    return stale


def _free(txn: Txn, resource: str, found: Status, event: Event, kind: str, reason: str) -> None:
    state = LEASE.next(found.state, event, resource=resource, worker=found.worker)
    _write(txn, resource, Status(state, "", "", found.generation, found.epoch, 0))
    _unindex(txn, resource, found)
    _log(txn, resource, kind, found, reason[:ERROR_TEXT_CHARS_MAX])


def _write(txn: Txn, resource: str, status: Status) -> None:
    keys = _keys(resource)
    fence = Fence(status.state, status.worker, status.incarnation, status.generation, status.epoch)
    txn.put(keys.fence, codec.pack(fence))
    txn.put(keys.expiry, schema.int_bytes(status.expires_ns))


def _unindex(txn: Txn, resource: str, found: Status) -> None:
    if found.worker:
        txn.delete(_by(found.worker) + tuples.pack((resource,)))


def _log(txn: Txn, resource: str, kind: str, status: Status, reason: str = "") -> None:
    line = LeaseEvent(
        0,  # known from the key
        resource,
        kind,
        status.worker,
        status.incarnation,
        status.generation,
        status.epoch,
        txn.now_ns,
        status.expires_ns,
        reason,
    )
    txn.append(_LOG, codec.pack(line))


_LOG = schema.prefix(schema.Space.LEASE_LOG)
_decode_fence = codec.decoder(Fence).decode
_decode_event = codec.decoder(LeaseEvent).decode
