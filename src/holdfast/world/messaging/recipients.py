"""Recipient types: checks that mail by world id is declared by the recipient's world type.

A reducer has the id but not the type. So the host reads the type from the store after the step. A
step that sends an undeclared cause fails, as it does when it sends by class and name. Only ids of
the sender's universe are checked, because code of another universe declares its own events. A
replay skips the check, because a successful entry contains no refused mail.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Store, Txn
from holdfast.world import catalog
from holdfast.world.definition import Cause
from holdfast.world.step_inputs import TypeRegistry

# The number of cached types per host. The type of a world never changes.
TYPES_MAX = 1024


class RecipientTypes:
    """A cache of the types of worlds that one world addresses by id."""

    def __init__(self, universe: str, world_id: str, type: str) -> None:
        self._universe = universe
        self._types = {world_id: type}

    def find_refusal(
        self, store: Store, registry: TypeRegistry, mail_by_id: Iterable[tuple[str, Cause]]
    ) -> Invalid | None:
        """Return the first refusal of mail that a step sends by id, or None. An id without a world
        is not refused here: the receipt of its mail reports the error."""
        mail_by_id = list(mail_by_id)
        missing = [world_id for world_id, _ in mail_by_id if world_id not in self._types]
        if missing:
            if len(self._types) + len(missing) > TYPES_MAX:
                self._types.clear()
                missing = [world_id for world_id, _ in mail_by_id]
            self._types |= store.read(world_types_of, self._universe, missing)
        for world_id, cause in mail_by_id:
            type = self._types.get(world_id)
            if type is None:
                continue
            try:
                registry.check_known(type, cause)
            except Invalid as error:
                return error
        return None


def world_types_of(txn: Txn, universe: str, world_ids: Iterable[str]) -> dict[str, str]:
    """Return the type of each world that exists."""
    types: dict[str, str] = {}
    for world_id in world_ids:
        try:
            types[world_id] = catalog.get_record(txn, universe, world_id).type
        except NotFound:
            continue
    return types
