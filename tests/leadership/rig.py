"""The leader-lease commands of one universe, its current lease and its event log."""

from typing import Any

from holdfast.clock import S
from holdfast.durable import journal
from holdfast.durable.lease import Lease
from holdfast.leadership import leader_lease
from holdfast.leadership.leader_lease_state import LeaderLease, LeaderLeaseEvent
from holdfast.store.api import Store, Txn
from holdfast.store.postgres.store import PostgresStore

U = "bank"
TTL = 10 * S


def acquire(store: Store, owner: str = "a", incarnation: str = "1", ttl_ns: int = TTL) -> Lease:
    granted: Lease = store.transact(leader_lease.acquire, U, owner, incarnation, ttl_ns)
    return granted


def renew(store: Store, lease: Lease, ttl_ns: int = TTL) -> Lease:
    renewed: Lease = store.transact(leader_lease.renew, U, lease, ttl_ns)
    return renewed


def release(store: Store, lease: Lease) -> None:
    store.transact(leader_lease.release, U, lease)


def mark_stale(store: Store) -> bool:
    marked: bool = store.transact(leader_lease.mark_stale, U)
    return marked


def force_release(store: Store, reason: str = "an operator said so") -> int:
    epoch: int = store.transact(leader_lease.force_release, U, reason)
    return epoch


def current(store: Store) -> LeaderLease | None:
    return store.read(leader_lease.current, U)


def log(store: Store) -> list[LeaderLeaseEvent]:
    return store.read(leader_lease.events, U, 0, 10_000)


def logged_events(store: Store) -> list[tuple[str, str, int]]:
    return [(event.kind.value, event.owner, event.epoch) for event in log(store)]


def write_with_lease(store: Store, lease: Lease) -> None:
    """Write a row under the fencing check of the lease, as a leader does."""

    def write(txn: Txn) -> None:
        txn.require_live(lease)
        txn.put((0, "sim", "led"), b"")

    store.transact(write)


def simulate_restore(store: Any) -> None:
    """Raise the store generation and keep the rows, as a restore does."""
    engine = store._engine if isinstance(store, PostgresStore) else store.engine
    engine.generation += 1


def require_log_and_state_agree(store: Store) -> None:
    assert store.read(leader_lease.rebuild, U) == store.read(leader_lease.read, U)
    store.read(journal.verify, leader_lease.resource(U))
