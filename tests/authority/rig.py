"""One universe, called as its commands are called: who leads, and what the log says of it."""

from typing import Any

from holdfast.authority import authority
from holdfast.authority.lease import AuthorityEvent, AuthorityLease
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.durable.lease import Lease
from holdfast.store.api import Store, Txn
from holdfast.store.postgres import PostgresStore

U = "bank"
TTL = 10 * S


def acquire(store: Store, owner: str = "a", incarnation: str = "1", ttl_ns: int = TTL) -> Lease:
    granted: Lease = store.transact(authority.acquire, U, owner, incarnation, ttl_ns)
    return granted


def renew(store: Store, held: Lease, ttl_ns: int = TTL) -> Lease:
    renewed: Lease = store.transact(authority.renew, U, held, ttl_ns)
    return renewed


def release(store: Store, held: Lease) -> None:
    store.transact(authority.release, U, held)


def mark_stale(store: Store) -> bool:
    marked: bool = store.transact(authority.mark_stale, U)
    return marked


def force_release(store: Store, reason: str = "an operator said so") -> int:
    epoch: int = store.transact(authority.force_release, U, reason)
    return epoch


def current(store: Store) -> AuthorityLease | None:
    return store.read(authority.current, U)


def log(store: Store) -> list[AuthorityEvent]:
    return store.read(authority.events, U, 0, 10_000)


def story(store: Store) -> list[tuple[str, str, int]]:
    return [(event.kind.value, event.owner, event.epoch) for event in log(store)]


def lead(store: Store, held: Lease) -> None:
    """What a leader does: a write that carries its lease."""

    def write(txn: Txn) -> None:
        txn.require_live(held)
        txn.put((0, "sim", "led"), b"")

    store.transact(write)


def restored(store: Any) -> None:
    """What a restore does to a store: the same rows under a higher generation."""
    engine = store._engine if isinstance(store, PostgresStore) else store.engine
    engine.generation += 1


def require_log_and_state_agree(store: Store) -> None:
    assert store.read(authority.rebuilt, U) == store.read(authority.read, U)
    store.read(journal.verify, authority.resource(U))
