"""The worker registry: heartbeats of workers, and the roles that they serve.

The registry is advisory. The orchestrator uses it to place worlds. The lease alone decides whether
a worker may act on a world.

- A worker is live while `now < heartbeat + ttl` in store time, and only if that heartbeat was
  committed under the current authority epoch. So a new leader starts with an empty registry and
  counts only workers with a heartbeat since then.
- The commit stamps the heartbeat with both the time and the epoch. So neither a worker with a slow
  clock nor one that has not noticed the new leader can forge them.
- An operator sets `draining`. It survives heartbeats and restarts, until the operator clears it or
  the worker leaves in an orderly way and is removed.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, S
from holdfast.durable.validation import check_limit, check_name, check_time, check_ttl
from holdfast.errors import Invalid, NotFound
from holdfast.leadership import declarations, leader_lease
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

# The default time without a heartbeat after which a worker is dead.
TTL_NS = 10 * S
ROLES_MAX = 32
VERSION_CHARS_MAX = 64


class WorkerRecord(Record, frozen=True):
    """The registry entry of a worker."""

    worker: str
    incarnation: str
    roles: tuple[str, ...]
    heartbeat_ns: int
    authority_epoch: int
    draining: bool = False
    # The number of worlds that it hosts and of tasks that it has leased, as reported by the worker.
    worlds: int = 0
    leases: int = 0
    # The digest of its code declaration (`declarations`); empty while the declaration is not
    # stored.
    code: str = ""
    # The version of Holdfast, and the time of the first heartbeat of this incarnation. Older versions send neither.
    version: str = ""
    since_ns: int = 0

    def live(self, now_ns: int, ttl_ns: int, authority_epoch: int) -> bool:
        return self.authority_epoch == authority_epoch and now_ns < self.heartbeat_ns + ttl_ns

    def accepts(self, role: str) -> bool:
        """Whether the worker accepts new work of a role."""
        return role in self.roles and not self.draining


@operation("worker_registry.heartbeat")
def heartbeat(
    txn: Txn,
    universe: str,
    worker: str,
    incarnation: str,
    roles: tuple[str, ...],
    worlds: int = 0,
    leases: int = 0,
    code: str = "",
    version: str = "",
) -> WorkerRecord:
    """Record a heartbeat. The returned record shows the worker whether it is draining, the current
    epoch, and whether its code declaration is stored."""
    key = _key(universe, worker)
    check_name("incarnation", incarnation)
    if len(roles) > ROLES_MAX:
        raise Invalid(what="roles", why="too many", found=len(roles), max=ROLES_MAX)
    for role in roles:
        check_name("role", role)
    for what, found in (("worlds", worlds), ("leases", leases)):
        if found < 0:
            raise Invalid(what=what, why="negative", found=found)
    was = find(txn, universe, worker)
    continues = was is not None and was.incarnation == incarnation
    now = WorkerRecord(
        worker=worker,
        incarnation=incarnation,
        roles=tuple(roles),
        heartbeat_ns=txn.now_ns,
        authority_epoch=leader_lease.epoch(txn, universe),
        draining=was is not None and was.draining,
        worlds=worlds,
        leases=leases,
        code=code if code and declarations.is_stored(txn, universe, code) else "",
        version=version[:VERSION_CHARS_MAX],
        since_ns=(was.since_ns if was is not None and continues else 0) or txn.now_ns,
    )
    txn.put(key, codec.pack(now))
    if was is None or _placement_fields(was) != _placement_fields(now):
        txn.notify(topic(universe))
    return now


@operation("worker_registry.set_draining")
def set_draining(txn: Txn, universe: str, worker: str, draining: bool) -> WorkerRecord:
    """Set or clear draining: a draining worker releases its worlds, finishes its tasks, and gets no more. The id of a
    process stands for all of its services (`ID:task`). Return the first record."""
    records = find_services(txn, universe, worker)
    if not records:
        raise NotFound(what="worker", universe=universe, worker=worker)
    changed = [replace(was, draining=draining) for was in records if was.draining != draining]
    for now in changed:
        txn.put(_key(universe, now.worker), codec.pack(now))
    if changed:
        txn.notify(topic(universe))
    return replace(records[0], draining=draining)


@operation("worker_registry.remove")
def remove(txn: Txn, universe: str, worker: str, incarnation: str | None = None) -> bool:
    """Remove a worker and return whether it existed. A worker that leaves passes its incarnation,
    so that its successor is not removed."""
    was = find(txn, universe, worker)
    if was is None or incarnation not in (None, was.incarnation):
        return False
    txn.delete(_key(universe, worker))
    txn.notify(topic(universe))
    return True


@operation("worker_registry.sweep")
def sweep(txn: Txn, universe: str, before_ns: int, limit: int) -> int:
    """Remove workers whose last heartbeat is before a time. Return their number. Only the leader
    calls this."""
    check_time("before_ns", before_ns)
    check_limit(limit)
    expired = [r for r in list_registered(txn, universe) if r.heartbeat_ns < before_ns][:limit]
    for record in expired:
        txn.delete(_key(universe, record.worker))
    return len(expired)


def list_live(
    txn: Txn, universe: str, now_ns: int, ttl_ns: int, authority_epoch: int
) -> list[WorkerRecord]:
    """Return the live workers under this authority epoch by name, including draining ones."""
    check_ttl(ttl_ns)
    return [r for r in list_registered(txn, universe) if r.live(now_ns, ttl_ns, authority_epoch)]


def list_registered(
    txn: Txn, universe: str, after: str = "", limit: int = BATCH_MAX
) -> list[WorkerRecord]:
    """Return all registered workers by name, live or not."""
    check_limit(limit)
    prefix = _prefix(universe)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [codec.unpack_as(WorkerRecord, row) for _, row in rows]


def find(txn: Txn, universe: str, worker: str) -> WorkerRecord | None:
    row = txn.get(_key(universe, worker))
    return None if row is None else codec.unpack_as(WorkerRecord, row)


def find_services(txn: Txn, universe: str, worker: str) -> list[WorkerRecord]:
    """Return the record of a worker, and of the services of its process (`ID:task`)."""
    found = find(txn, universe, worker)
    services = list_registered(txn, universe, f"{worker}:")
    return ([] if found is None else [found]) + [
        record for record in services if record.worker.startswith(f"{worker}:")
    ]


def topic(universe: str) -> str:
    """The topic that is notified when a worker appears, leaves, changes draining, or first reports
    to a new leader."""
    return f"workers/{universe}"


# -- inside --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _prefix(universe: str) -> bytes:
    check_name("universe", universe)
    return schema.key_prefix(schema.Space.WORKER, universe)


def _key(universe: str, worker: str) -> bytes:
    check_name("worker", worker)
    return _prefix(universe) + tuples.pack((worker,))


def _placement_fields(record: WorkerRecord) -> tuple[object, ...]:
    """Return the fields that placement depends on. Other fields change with every heartbeat."""
    return record.incarnation, record.roles, record.authority_epoch, record.draining, record.code
