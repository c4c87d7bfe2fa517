"""The stop of a hosted world: the data of its release to another worker."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.durable import lease as leases
from holdfast.world.code_requirement import CodeRequirement
from holdfast.world.cycle import Cycle


class WorldStop(NamedTuple):
    """A world to stop and release until a worker with the needed code hosts it."""

    world_id: str
    lease: leases.Lease
    need: CodeRequirement
    # The undeclared inbox item, or 0, and the time since which it has waited.
    seq: int = 0
    since_ns: int = 0
    # A final snapshot to commit first.
    last: Cycle | None = None
    # The journal entry of other code that this worker replays differently, or 0, and the difference.
    diverging_height: int = 0
    why: str = ""
