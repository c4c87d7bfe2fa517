"""Universe location: checks that a universe does not already exist in another configured store.

A universe that is new in its configured store may exist in another store, because of a mistake or an older
configuration. Opening it would split it in two. Therefore the first open of a universe in a store reads
all other configured stores. If one of them is unreachable, the open fails.

A universe that ever had a leader in the configured store counts as known there, even without data, and
opens without reading the other stores. In another store a former leader is not enough: the universe
exists there only if it has worlds, workers or tasks.
"""

from __future__ import annotations

from holdfast.errors import Busy, CopyUnfinished, HoldfastError, Invalid, NotFound, StoreMoved
from holdfast.leadership import leader_lease
from holdfast.store import open as open_store
from holdfast.store import schema, tuples
from holdfast.store.admin.routing import StoreRouting
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.store.urls import redact


class UniverseElsewhere(Invalid):
    code = "universe_elsewhere"
    hint = "map the universe to the store that holds it; `holdfast store copy` moves a whole store"


class LocationUnknown(Busy):
    code = "universe_unknown"
    hint = (
        "the universe is not in its configured store, and another store that may hold it is unreachable: "
        "retry when that store is reachable"
    )


def require_here(store: Store, universe: str, routing: StoreRouting) -> None:
    configured_url = routing.url_of(universe)
    if store.read(is_known, universe):
        return
    for url in routing.urls():
        if url != configured_url and _exists_at(url, universe):
            raise UniverseElsewhere(
                universe=universe, mapped=redact(configured_url), lives=redact(url)
            )


def is_known(txn: Txn, universe: str) -> bool:
    """Whether a universe ever had a leader in this store, or has data there."""
    return leader_lease.epoch(txn, universe) > 0 or exists_in(txn, universe)


def exists_in(txn: Txn, universe: str) -> bool:
    """Whether this store has worlds, workers or tasks of a universe."""
    prefixes = [
        schema.key_prefix(space, universe) for space in (Space.WORLD, Space.WORKER, Space.TASK)
    ]
    return any(txn.scan(prefix, tuples.prefix_end(prefix), 1) for prefix in prefixes)


def _exists_at(url: str, universe: str) -> bool:
    try:
        with open_store(url, bootstrap=False) as other:
            return bool(other.read(exists_in, universe))
    except (NotFound, StoreMoved, CopyUnfinished):
        return False  # not a store that clients can write to
    except HoldfastError as error:
        raise LocationUnknown(universe=universe, store=redact(url), why=str(error)) from error
