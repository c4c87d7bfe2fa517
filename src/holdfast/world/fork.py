"""Fork: a new world from a state of another. Pointers are copied, history is not.

The child's baseline is the parent's state after entry `at`, its head is that height, its inbox is
empty. What the parent wants and has not got is not inherited, unless `effects` and `timers` say so
(`world.inherit`). A state that no snapshot holds is made by replay, and the child keeps it as one.

`cut` reads, `plant` writes. What lies at a height never changes, so the two need not be one
transaction: a parent that is written to all the time is forked like any other.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.durable import journal, snapshot
from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Txn
from holdfast.world import catalog
from holdfast.world.catalog import Lineage, Status, WorldRecord, subject_of
from holdfast.world.inherit import Open, bequeath, check_policies, open_after
from holdfast.world.kernel import World
from holdfast.world.restore import below_floor, load_snapshot, restore


class Cutting(NamedTuple):
    """What a child grows from: the parent's state after an entry, and the entry's hash."""

    universe: str
    type: str
    parent_id: str
    height: int
    hash: bytes
    state: bytes
    # What the child takes over, and how.
    policy: str = "drop"
    wishes: Open = Open()


def fork(
    txn: Txn,
    parent: World,
    name: str,
    child_id: str,
    *,
    at: int | None = None,
    effects: str = "drop",
    timers: str = "drop",
) -> WorldRecord:
    """Make the child; forking again under the same name answers with the one that is there."""
    check_policies(effects, timers)
    known = made_before(txn, parent, name, at)
    return known or plant(txn, cut(txn, parent, at, effects=effects, timers=timers), name, child_id)


def cut(
    txn: Txn, parent: World, at: int | None = None, *, effects: str = "drop", timers: str = "drop"
) -> Cutting:
    """The parent's state after entry `at`, or after the last one, and what the child takes over."""
    check_policies(effects, timers)
    universe, parent_id = parent.universe, parent.world_id
    _require_parent(txn, universe, parent_id)
    subject = subject_of(universe, parent_id)
    head = journal.head(txn, subject)
    height = head.height if at is None else at
    if not 0 <= height <= head.height:
        raise NotFound(what="height", world=parent_id, found=height, head=head.height)
    if height < head.floor - 1:
        raise below_floor(parent_id, height, head.floor)
    hash = journal.hash_at(txn, subject, height)
    state = _state_bytes(txn, parent, subject, height)
    wishes = Open()
    if (effects, timers) != ("drop", "drop"):
        wishes = open_after(txn, parent, height)
    if effects == "drop":
        wishes = wishes._replace(effects=(), answers=(), names=())
    if timers == "drop":
        wishes = wishes._replace(timers=())
    return Cutting(universe, parent.program.type, parent_id, height, hash, state, effects, wishes)


def plant(txn: Txn, cutting: Cutting, name: str, child_id: str) -> WorldRecord:
    universe, height = cutting.universe, cutting.height
    _require_parent(txn, universe, cutting.parent_id)
    known = catalog.find(txn, universe, cutting.type, name)
    if known is not None:
        found = catalog.record(txn, universe, known)
        return _same(found, cutting.parent_id, height, name)
    made = catalog.create(txn, universe, cutting.type, name, child_id)
    child = subject_of(universe, child_id)
    hash = snapshot.save(txn, child, height, cutting.state)
    snapshot.set_baseline(txn, child, height)
    journal.begin_at(txn, child, height, cutting.hash)
    made = catalog.with_lineage(made, Lineage(cutting.parent_id, hash, height))
    catalog.save(txn, made)
    if cutting.wishes != Open():
        bequeath(txn, universe, child_id, name, cutting.policy, cutting.wishes)
    return made


def made_before(txn: Txn, parent: World, name: str, at: int | None) -> WorldRecord | None:
    """The child of this name, if there is one; Invalid if the name is another's.

    A fork of the latest state is the same fork when the parent has gone on since.
    """
    known = catalog.find(txn, parent.universe, parent.program.type, name)
    if known is None:
        return None
    return _same(catalog.record(txn, parent.universe, known), parent.world_id, at, name)


# -- inside --------------------------------------------------------------------------------------


def _require_parent(txn: Txn, universe: str, parent_id: str) -> None:
    if catalog.record(txn, universe, parent_id).status is Status.DELETED:
        raise NotFound(what="world", universe=universe, world_id=parent_id, why="it is deleted")


def _same(found: WorldRecord, parent_id: str, at: int | None, name: str) -> WorldRecord:
    lineage = found.lineage
    if (
        lineage is None
        or lineage.parent_world_id != parent_id
        or at not in (None, lineage.forked_at_height)
    ):
        raise Invalid(what="fork", why="the name belongs to another world", name=name)
    return found


def _state_bytes(txn: Txn, parent: World, subject: str, height: int) -> bytes:
    try:
        return load_snapshot(txn, parent.world_id, subject, height)[0]
    except NotFound:
        return parent.program.canonical(restore(txn, parent, at=height).state)
