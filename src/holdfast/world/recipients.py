"""Mail that is addressed by a world id: whether the sender's own code handles it in that world type.

A reducer has an id, and no type. So the host asks the store for the type after the step, and a step
that sends what this code does not handle there fails, like one that sends it by class and name. Only
ids of the sender's own universe are looked at: code of another universe has events of its own. A
replay does not ask again, because an entry that counts holds no refused mail.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Store, Txn
from holdfast.world import catalog
from holdfast.world.frame import Vocabulary
from holdfast.world.program import Cause

# How many types one host remembers. The type of a world never changes.
TYPES_MAX = 1024


class Recipients:
    """The types of the worlds that one world writes to by id."""

    def __init__(self, universe: str, world_id: str, type: str) -> None:
        self._universe = universe
        self._types = {world_id: type}

    def refusal(
        self, store: Store, vocabulary: Vocabulary, addressed: Iterable[tuple[str, Cause]]
    ) -> Invalid | None:
        """The first refusal of what a step sends by id; None when all of it may go. An id that leads to
        no world is not refused here: the receipt of its mail says so."""
        addressed = list(addressed)
        missing = [world_id for world_id, _ in addressed if world_id not in self._types]
        if missing:
            if len(self._types) + len(missing) > TYPES_MAX:
                self._types.clear()
                missing = [world_id for world_id, _ in addressed]
            self._types |= store.read(types_of, self._universe, missing)
        for world_id, cause in addressed:
            type = self._types.get(world_id)
            if type is None:
                continue
            try:
                vocabulary.check_known(type, cause)
            except Invalid as error:
                return error
        return None


def types_of(txn: Txn, universe: str, world_ids: Iterable[str]) -> dict[str, str]:
    """The type of each world that is there."""
    found: dict[str, str] = {}
    for world_id in world_ids:
        try:
            found[world_id] = catalog.record(txn, universe, world_id).type
        except NotFound:
            continue
    return found
