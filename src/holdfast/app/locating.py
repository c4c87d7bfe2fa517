"""Before a universe is opened where the configuration says: does it live elsewhere already?

A universe that is new in its store may be one that was written into another by mistake or by an older
configuration, and would be two from now on. So the other stores are asked, once: when a universe is
opened in a store that knows nothing of it. One that cannot be asked then keeps it from being opened.

A universe that somebody led is known, though it holds nothing yet: it starts again, whoever is away. Elsewhere
it takes more than that to live: a start by mistake that left nothing behind is no second home.
"""

from __future__ import annotations

from holdfast.authority import authority
from holdfast.errors import Busy, CopyUnfinished, HoldfastError, Invalid, NotFound, StoreMoved
from holdfast.store import open as open_store
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.mapping import StoreMap
from holdfast.store.schema import Space
from holdfast.store.urls import shown


class UniverseElsewhere(Invalid):
    code = "universe_elsewhere"
    hint = (
        "map the universe to the store that it lives in; `holdfast store copy` moves a whole store"
    )


class CannotTell(Busy):
    code = "universe_unknown"
    hint = "it is new in its store, and this store, which may have it, cannot be asked: try again when it can"


def refuse_elsewhere(store: Store, universe: str, stores: StoreMap) -> None:
    here = stores.url_of(universe)
    if store.read(known, universe):
        return
    for url in stores.urls():
        if url != here and _lives_at(url, universe):
            raise UniverseElsewhere(universe=universe, mapped=shown(here), lives=shown(url))


def known(txn: Txn, universe: str) -> bool:
    """Whether a universe was ever run in a store, or lives there."""
    return authority.epoch(txn, universe) > 0 or lives(txn, universe)


def lives(txn: Txn, universe: str) -> bool:
    """Whether a store has worlds, workers or tasks of a universe."""
    prefixes = [schema.prefix(space, universe) for space in (Space.WORLD, Space.WORKER, Space.TASK)]
    return any(txn.scan(prefix, tuples.after(prefix), 1) for prefix in prefixes)


def _lives_at(url: str, universe: str) -> bool:
    try:
        with open_store(url, bootstrap=False) as other:
            return bool(other.read(lives, universe))
    except (NotFound, StoreMoved, CopyUnfinished):
        return False  # no store that anybody could have written to
    except HoldfastError as error:
        raise CannotTell(universe=universe, store=shown(url), why=str(error)) from error
