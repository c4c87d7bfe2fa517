"""Purging a world: refused while it is in use, else fenced and erased, with its copies named."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.errors import Conflict
from holdfast.store.api import Store
from holdfast.world import purge
from holdfast.world.purge import Tombstone


class Erasure(NamedTuple):
    """What is left of a purged world, and the worlds that hold copies of its state."""

    tombstone: Tombstone
    forks: list[str]


def world_purge(
    store: Store, universe: str, world_id: str, *, force: bool = False, tries: int = 10
) -> Erasure:
    """Erase a world for good. InUse for one that is held or has open effects, unless `force` says to
    fence it and to drop them. Asked again, it goes on, or answers as the first time."""
    known = store.read(purge.tombstone, universe, world_id)
    forks = purge.descendants(store, universe, world_id)
    if known is None:
        _begin_purge(store, universe, world_id, force, tries)
        for _ in purge.steps(store, universe, [world_id]):
            pass
        known = store.read(purge.tombstone, universe, world_id)
        assert known is not None
    return Erasure(known, forks)


def _begin_purge(store: Store, universe: str, world_id: str, force: bool, tries: int) -> None:
    for left in range(tries - 1, -1, -1):
        use = purge.use_of(store, universe, world_id)
        if not force and (use.holder or use.effects):
            raise purge.InUse(
                what="world", world_id=world_id, worker=use.holder or None, open_effects=use.effects
            )
        try:
            store.transact(purge.begin, universe, world_id, use.head, force)
            return
        except Conflict:
            if not left:
                raise
