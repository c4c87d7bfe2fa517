"""The purge of a world: rejects a world in use, else fences and erases it and lists its remaining copies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from holdfast.clock import S
from holdfast.errors import Conflict
from holdfast.ops import catalog_queries
from holdfast.store.api import Store, Txn
from holdfast.world import purge
from holdfast.world.purge import Tombstone


class PurgeResult(NamedTuple):
    """The tombstone of a purged world, and the forks that hold copies of its state."""

    tombstone: Tombstone
    forks: list[str]


def world_purge(
    store: Store,
    universe: str,
    world_id: str,
    *,
    force: bool = False,
    tries: int = 10,
    record: Callable[[Txn], object] = lambda txn: None,
) -> PurgeResult:
    """Erase a world permanently. Raise InUse if it is leased or has open effects; `force` fences it and drops
    them. A repeated call resumes an interrupted purge or returns the first result. `record` writes the audit entry in
    the commit that begins the purge."""
    tombstone = store.read(purge.tombstone, universe, world_id)
    forks = purge.descendants(store, universe, world_id)
    if tombstone is None:

        def begin(txn: Txn, head: int) -> None:
            purge.begin_purge(txn, universe, world_id, head, force)
            record(txn)

        _begin_purge(store, (universe, world_id), begin, force, tries)
        for _ in purge.erase_steps(store, universe, [world_id]):
            pass
        tombstone = store.read(purge.tombstone, universe, world_id)
        assert tombstone is not None
    return PurgeResult(tombstone, forks)


def find_purgeable(txn: Txn, name: str, universe: str | None) -> tuple[str, str]:
    """Return universe and id of a world, or of a world that is already purged."""
    for universe_name in catalog_queries.universes(txn) if universe is None else [universe]:
        if purge.tombstone(txn, universe_name, name) is not None:
            return universe_name, name
    record = catalog_queries.resolve(txn, name, universe)
    return record.universe, record.world_id


def backups_text(tombstone: Tombstone) -> str:
    """Say which backups hold a copy of a purged world."""
    moment = datetime.fromtimestamp(tombstone.purged_ns // S, UTC)
    return f"every backup made before {moment:%Y-%m-%d %H:%M:%S} holds a copy"


def _begin_purge(
    store: Store,
    world: tuple[str, str],
    begin: Callable[[Txn, int], None],
    force: bool,
    tries: int,
) -> None:
    for tries_left in range(tries - 1, -1, -1):
        use = purge.find_use(store, *world)
        if not force and (use.holder or use.effects):
            raise purge.WorldInUse(
                what="world", world_id=world[1], worker=use.holder or None, open_effects=use.effects
            )
        try:
            store.transact(begin, use.head)
            return
        except Conflict:
            if not tries_left:
                raise
