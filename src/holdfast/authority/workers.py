"""The worker registry: who said lately that it is alive, and what for.

It is advisory. It tells the orchestrator where to place worlds; whether a worker may act on one is
the lease's question, and nothing here is ever read to answer it.

- A worker is live while `now < heartbeat + ttl`, by store time, and only if that heartbeat was
  committed under the current authority epoch. So a new leader starts with an empty registry, and
  trusts nobody who has not spoken since.
- Both the time and the epoch are stamped where the heartbeat is applied: a worker with an old clock,
  or one that has not heard of the new leader, cannot claim either.
- Draining is an operator's word. It stands through heartbeats and restarts, until it is taken back
  or the worker leaves in good order and is forgotten.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.authority import authority, declarations
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, S
from holdfast.durable.bounds import check_limit, check_name, check_time, check_ttl
from holdfast.errors import Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

# A worker that was silent for this long is dead, unless the caller has another opinion.
TTL_NS = 10 * S
ROLES_MAX = 32


class WorkerRecord(Record, frozen=True):
    worker: str
    incarnation: str
    roles: tuple[str, ...]
    heartbeat_ns: int
    authority_epoch: int
    draining: bool = False
    # How many worlds it hosts, and tasks it has leased, by its own account.
    worlds: int = 0
    leases: int = 0
    # What its code declares (`declarations`); empty while that is not written down.
    code: str = ""

    def live(self, now_ns: int, ttl_ns: int, authority_epoch: int) -> bool:
        return self.authority_epoch == authority_epoch and now_ns < self.heartbeat_ns + ttl_ns

    def takes(self, role: str) -> bool:
        """Whether new work of a role may go there."""
        return role in self.roles and not self.draining


@operation
def heartbeat(
    txn: Txn,
    universe: str,
    worker: str,
    incarnation: str,
    roles: tuple[str, ...],
    worlds: int = 0,
    leases: int = 0,
    code: str = "",
) -> WorkerRecord:
    """Say that a worker is alive. The answer tells it whether it is to drain, who leads, and whether
    the declaration of its code is written down."""
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
    now = WorkerRecord(
        worker,
        incarnation,
        tuple(roles),
        txn.now_ns,
        authority.epoch(txn, universe),
        was is not None and was.draining,
        worlds,
        leases,
        code if code and declarations.written(txn, universe, code) else "",
    )
    txn.put(key, codec.pack(now))
    if was is None or _standing(was) != _standing(now):
        txn.notify(topic(universe))
    return now


@operation
def drain(txn: Txn, universe: str, worker: str, draining: bool) -> WorkerRecord:
    """Say that a worker shall give up its worlds and get no more, or take that back."""
    was = find(txn, universe, worker)
    if was is None:
        raise NotFound(what="worker", universe=universe, worker=worker)
    now = replace(was, draining=draining)
    if now != was:
        txn.put(_key(universe, worker), codec.pack(now))
        txn.notify(topic(universe))
    return now


@operation
def forget(txn: Txn, universe: str, worker: str, incarnation: str | None = None) -> bool:
    """Remove a worker; whether it was there. A leaver names itself, to spare its successor."""
    was = find(txn, universe, worker)
    if was is None or incarnation not in (None, was.incarnation):
        return False
    txn.delete(_key(universe, worker))
    txn.notify(topic(universe))
    return True


@operation
def sweep(txn: Txn, universe: str, before_ns: int, limit: int) -> int:
    """Forget workers that were last heard of before a time; how many. The leader's to call."""
    check_time("before_ns", before_ns)
    check_limit(limit)
    gone = [r for r in known(txn, universe) if r.heartbeat_ns < before_ns][:limit]
    for record in gone:
        txn.delete(_key(universe, record.worker))
    return len(gone)


def live(
    txn: Txn, universe: str, now_ns: int, ttl_ns: int, authority_epoch: int
) -> list[WorkerRecord]:
    """Workers that spoke under this authority and lately, by name; draining ones too."""
    check_ttl(ttl_ns)
    return [r for r in known(txn, universe) if r.live(now_ns, ttl_ns, authority_epoch)]


def known(txn: Txn, universe: str, after: str = "", limit: int = BATCH_MAX) -> list[WorkerRecord]:
    """Everyone who ever spoke and was not forgotten, by name."""
    check_limit(limit)
    prefix = _prefix(universe)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [codec.unpack_as(WorkerRecord, row) for _, row in rows]


def find(txn: Txn, universe: str, worker: str) -> WorkerRecord | None:
    row = txn.get(_key(universe, worker))
    return None if row is None else codec.unpack_as(WorkerRecord, row)


def topic(universe: str) -> str:
    """Notified when somebody comes, goes, starts to drain, or speaks to a new leader first."""
    return f"workers/{universe}"


# -- inside --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _prefix(universe: str) -> bytes:
    check_name("universe", universe)
    return schema.prefix(schema.Space.WORKER, universe)


def _key(universe: str, worker: str) -> bytes:
    check_name("worker", worker)
    return _prefix(universe) + tuples.pack((worker,))


def _standing(record: WorkerRecord) -> tuple[object, ...]:
    """What placement depends on; the rest changes with every heartbeat."""
    return record.incarnation, record.roles, record.authority_epoch, record.draining, record.code
