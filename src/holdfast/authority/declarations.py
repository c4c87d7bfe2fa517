"""What the code of workers declares: for each world type, the causes that it knows.

A worker writes its declaration down once, under a digest, and names the digest in every heartbeat. So
the orchestrator gives a world that stopped before an unknown item only to a worker that knows it, and
a world only to a worker that has its type.

- A declaration never changes: other code has another digest.
- One that no worker names any more is collected. A worker whose declaration is gone is told so by its
  next heartbeat, and writes it down again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.bounds import check_limit, check_name
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

# For a world type: "side:type" of each known cause, and the newest version of it.
Known = Mapping[str, int]


class Declaration(Record, frozen=True):
    # What all world types know, and what each knows besides.
    common: dict[str, int]
    worlds: dict[str, dict[str, int]]

    def has(self, world: str) -> bool:
        """Whether the code has a world type."""
        return world in self.worlds

    def knows(self, world: str, cause: str, version: int) -> bool:
        """Whether a world type of the code knows a cause, in this version of it or a newer one."""
        own = self.worlds.get(world)
        if own is None:
            return False
        found = own.get(cause, self.common.get(cause))
        return found is not None and found >= version


def declaration(worlds: Mapping[str, Known]) -> Declaration:
    """The declaration of code with these world types."""
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


@operation
def write(txn: Txn, universe: str, found: Declaration) -> None:
    """Write a declaration down, unless it is there."""
    key = _key(universe, digest(found))
    if txn.get(key) is None:
        txn.put(key, codec.pack(found))


def written(txn: Txn, universe: str, digest: str) -> bool:
    return txn.get(_key(universe, digest)) is not None


def read(txn: Txn, universe: str, digest: str) -> Declaration | None:
    row = txn.get(_key(universe, digest))
    return None if row is None else _decoded(row)


@operation
def collect(txn: Txn, universe: str, named: Collection[str], limit: int) -> int:
    """Remove declarations that no worker names; how many."""
    check_limit(limit)
    prefix = _prefix(universe)
    rows = txn.scan(prefix, tuples.after(prefix), limit)
    gone = [key for key, _ in rows if tuples.unpack(key[len(prefix) :])[0] not in named]
    for key in gone:
        txn.delete(key)
    return len(gone)


# -- inside --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _prefix(universe: str) -> bytes:
    check_name("universe", universe)
    return schema.prefix(schema.Space.APP_STATE, "code", universe)


def _key(universe: str, digest: str) -> bytes:
    check_name("code", digest)
    return _prefix(universe) + tuples.pack((digest,))


@lru_cache(maxsize=256)
def _decoded(row: bytes) -> Declaration:
    return codec.unpack_as(Declaration, row)
