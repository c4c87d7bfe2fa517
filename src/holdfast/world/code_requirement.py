"""The code requirement of a stopped world, and the index of stopped worlds by requirement.

An index key consists of a digest of the requirement, the time at which the world stopped, and the
world id. So the worlds with one requirement are adjacent, the longest waiting first.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.store import schema, tuples

# As `side`: the world type itself is required.
WORLD_TYPE = "world"
# As `side`: the code that made an entry is required, because other code replays it differently.
# CODE: its state has other fields, so the world waits for that code. REPLAY: its state has the same
# fields, so the world waits for a live worker with that code, or is parked.
CODE = "code"
REPLAY = "repeat"


class CodeRequirement(Record, frozen=True):
    """The code that a worker needs to continue a stopped world."""

    # The world type, and the required cause: `event`, `receipt` or `inbox` with its name, or the
    # name of the required code.
    world: str
    side: str
    type: str
    version: int = 0

    @property
    def cause(self) -> str:
        return f"{CODE if self.needs_code else self.side}:{self.type}"

    @property
    def needs_code(self) -> bool:
        """Whether a version of the code is required, and not a declaration of a type."""
        return self.side in (CODE, REPLAY)


@lru_cache(maxsize=1024)
def stopped_prefix(universe: str) -> bytes:
    """The key prefix of all stopped worlds of a universe."""
    return schema.key_prefix(schema.Space.WORLD, universe, "u")


def stopped_prefix_of(universe: str, need: CodeRequirement) -> bytes:
    """The key prefix of the stopped worlds with one requirement."""
    # A digest, because two type names may exceed the maximum key length.
    return stopped_prefix(universe) + tuples.pack((codec.digest(codec.pack(need))[:16],))


def stopped_key(universe: str, need: CodeRequirement, since_ns: int, world_id: str) -> bytes:
    return stopped_prefix_of(universe, need) + tuples.pack((since_ns, world_id))
