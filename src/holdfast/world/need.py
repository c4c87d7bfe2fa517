"""What a worker must know to go on with a world that stopped, and where such worlds are listed.

A row lies under a digest of the need, the time since which the world waits, and the world's id. So the
worlds of one need lie together, the one that waits longest first.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.store import schema, tuples

# In the place of a side: the world type itself is what is needed.
WORLD = "world"
# ... the code that made an entry, which other code repeats otherwise: its state has other fields (it is
# waited for), or the same ones (a live worker has that code, or the world is parked).
CODE = "code"
REPEAT = "repeat"


class Need(Record, frozen=True):
    # The world type, and what it must know: `event`, `receipt` or `inbox`, and the name of that; or
    # which code it must be.
    world: str
    side: str
    type: str
    version: int = 0

    @property
    def cause(self) -> str:
        return f"{CODE if self.by_code else self.side}:{self.type}"

    @property
    def by_code(self) -> bool:
        """Whether it is code that is needed, not the knowledge of a type."""
        return self.side in (CODE, REPEAT)


@lru_cache(maxsize=1024)
def rows(universe: str) -> bytes:
    """Where all stopped worlds of a universe are listed."""
    return schema.prefix(schema.Space.WORLD, universe, "u")


def rows_of(universe: str, need: Need) -> bytes:
    # A digest: two type names and the rest would be too long for a key.
    return rows(universe) + tuples.pack((codec.digest(codec.pack(need))[:16],))


def row_key(universe: str, need: Need, since_ns: int, world_id: str) -> bytes:
    return rows_of(universe, need) + tuples.pack((since_ns, world_id))
