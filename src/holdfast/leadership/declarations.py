"""Code declarations of workers: for each world type, the causes that it declares.

A worker stores its declaration once, under a digest, and sends the digest with every heartbeat. So
the orchestrator places a world only on a worker that has its type, and a world that stopped before
an undeclared item only on a worker that declares the item.

- A declaration is immutable: other code has another digest.
- A declaration that no worker refers to is garbage-collected. The next heartbeat reports the loss
  to its worker, which then stores it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.validation import check_limit, check_name
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

# For a world type: "side:type" of each declared cause, with its newest version.
KnownVersions = Mapping[str, int]


class Declaration(Record, frozen=True):
    """The causes that the code of a worker declares."""

    # Causes that all world types declare, and the other causes by world type.
    common: dict[str, int]
    worlds: dict[str, dict[str, int]]

    def has_world_type(self, world: str) -> bool:
        """Whether the code has a world type."""
        return world in self.worlds

    def declares(self, world: str, cause: str, version: int) -> bool:
        """Whether a world type of the code declares a cause in this version or a newer one."""
        own = self.worlds.get(world)
        if own is None:
            return False
        found = own.get(cause, self.common.get(cause))
        return found is not None and found >= version


def make_declaration(worlds: Mapping[str, KnownVersions]) -> Declaration:
    """Make the declaration of code with these world types."""
    shared = [set(known.items()) for known in worlds.values()]
    common = dict(sorted(set.intersection(*shared))) if shared else {}
    return Declaration(
        common,
        {
            world: {cause: known[cause] for cause in sorted(known.keys() - common.keys())}
            for world, known in worlds.items()
        },
    )


def digest(found: Declaration) -> str:
    return codec.digest(codec.pack(found))[:16].hex()


@operation("declarations.store_declaration")
def store_declaration(txn: Txn, universe: str, found: Declaration) -> None:
    """Store a declaration, unless it is already stored."""
    key = _key(universe, digest(found))
    if txn.get(key) is None:
        txn.put(key, codec.pack(found))


def is_stored(txn: Txn, universe: str, digest: str) -> bool:
    return txn.get(_key(universe, digest)) is not None


def read(txn: Txn, universe: str, digest: str) -> Declaration | None:
    row = txn.get(_key(universe, digest))
    return None if row is None else _decoded(row)


@operation("declarations.remove_unreferenced")
def remove_unreferenced(txn: Txn, universe: str, named: Collection[str], limit: int) -> int:
    """Remove declarations that no worker refers to. Return their number."""
    check_limit(limit)
    prefix = _prefix(universe)
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit)
    gone = [key for key, _ in rows if tuples.unpack(key[len(prefix) :])[0] not in named]
    for key in gone:
        txn.delete(key)
    return len(gone)


# -- inside --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _prefix(universe: str) -> bytes:
    check_name("universe", universe)
    return schema.key_prefix(schema.Space.APP_STATE, "code", universe)


def _key(universe: str, digest: str) -> bytes:
    check_name("code", digest)
    return _prefix(universe) + tuples.pack((digest,))


@lru_cache(maxsize=256)
def _decoded(row: bytes) -> Declaration:
    return codec.unpack_as(Declaration, row)
