"""Fork: a new world from a past or current state of another. Pointers are copied, history is not.

The child's baseline is the parent's state after entry `at`, its head is that height, and its inbox
is empty. Pending effects and timers of the parent are not inherited, unless `effects` and `timers`
request it (`world.fork_inheritance`). A state without a snapshot is restored by replay and saved as the
child's snapshot.

`plan_fork` reads, `create_fork` writes. The state at a height never changes, so the two need not be
one transaction: a parent under constant writes can be forked as well.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.durable import journal, snapshot
from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Txn
from holdfast.world import catalog
from holdfast.world.catalog import ForkLineage, WorldRecord, WorldStatus, subject_of
from holdfast.world.fork_inheritance import (
    PendingAtHeight,
    check_policies,
    copy_to_child,
    pending_after,
)
from holdfast.world.reducer import WorldSpec
from holdfast.world.restore import below_floor_error, load_snapshot, restore


class ForkPlan(NamedTuple):
    """The plan of a fork: the parent's state after an entry, and the hash of that entry."""

    universe: str
    type: str
    parent_id: str
    height: int
    hash: bytes
    state: bytes
    # The policy for pending effects, and the pending intents to inherit.
    policy: str = "drop"
    pending: PendingAtHeight = PendingAtHeight()


def fork(
    txn: Txn,
    parent: WorldSpec,
    name: str,
    child_id: str,
    *,
    at: int | None = None,
    effects: str = "drop",
    timers: str = "drop",
) -> WorldRecord:
    """Create the child. Forking again under the same name returns the existing child."""
    check_policies(effects, timers)
    known = find_existing_fork(txn, parent, name, at)
    return known or create_fork(
        txn, plan_fork(txn, parent, at, effects=effects, timers=timers), name, child_id
    )


def plan_fork(
    txn: Txn,
    parent: WorldSpec,
    at: int | None = None,
    *,
    effects: str = "drop",
    timers: str = "drop",
) -> ForkPlan:
    """Read the parent's state after entry `at`, or at the head, and the pending intents to
    inherit."""
    check_policies(effects, timers)
    universe, parent_id = parent.universe, parent.world_id
    _require_parent(txn, universe, parent_id)
    subject = subject_of(universe, parent_id)
    head = journal.head(txn, subject)
    height = head.height if at is None else at
    if not 0 <= height <= head.height:
        raise NotFound(what="height", world=parent_id, found=height, head=head.height)
    if height < head.floor - 1:
        raise below_floor_error(parent_id, height, head.floor)
    hash = journal.hash_at(txn, subject, height)
    state = _state_bytes(txn, parent, subject, height)
    pending = PendingAtHeight()
    if (effects, timers) != ("drop", "drop"):
        pending = pending_after(txn, parent, height)
    if effects == "drop":
        pending = pending._replace(effects=(), answers=(), names=())
    if timers == "drop":
        pending = pending._replace(timers=())
    return ForkPlan(
        universe=universe,
        type=parent.definition.type,
        parent_id=parent_id,
        height=height,
        hash=hash,
        state=state,
        policy=effects,
        pending=pending,
    )


def create_fork(txn: Txn, plan: ForkPlan, name: str, child_id: str) -> WorldRecord:
    """Create the child world of a fork plan."""
    universe, height = plan.universe, plan.height
    _require_parent(txn, universe, plan.parent_id)
    known = catalog.find_id(txn, universe, plan.type, name)
    if known is not None:
        found = catalog.get_record(txn, universe, known)
        return _require_same_fork(found, plan.parent_id, height, name)
    made = catalog.create(txn, universe, plan.type, name, child_id)
    child = subject_of(universe, child_id)
    hash = snapshot.save(txn, child, height, plan.state)
    snapshot.set_baseline(txn, child, height)
    journal.start_at(txn, child, height, plan.hash)
    made = catalog.with_lineage(made, ForkLineage(plan.parent_id, hash, height))
    catalog.save_record(txn, made)
    if plan.pending != PendingAtHeight():
        copy_to_child(txn, universe, child_id, name, plan.policy, plan.pending)
    return made


def find_existing_fork(
    txn: Txn, parent: WorldSpec, name: str, at: int | None
) -> WorldRecord | None:
    """Return the existing child with this name, or None. Raise Invalid if the name belongs to
    another world.

    A fork of the latest state matches the existing child even if the parent has advanced since.
    """
    known = catalog.find_id(txn, parent.universe, parent.definition.type, name)
    if known is None:
        return None
    return _require_same_fork(
        catalog.get_record(txn, parent.universe, known), parent.world_id, at, name
    )


# -- inside --------------------------------------------------------------------------------------


def _require_parent(txn: Txn, universe: str, parent_id: str) -> None:
    if catalog.get_record(txn, universe, parent_id).status is WorldStatus.DELETED:
        raise NotFound(what="world", universe=universe, world_id=parent_id, why="it is deleted")


def _require_same_fork(
    found: WorldRecord, parent_id: str, at: int | None, name: str
) -> WorldRecord:
    lineage = found.lineage
    if (
        lineage is None
        or lineage.parent_world_id != parent_id
        or at not in (None, lineage.forked_at_height)
    ):
        raise Invalid(what="fork", why="the name belongs to another world", name=name)
    return found


def _state_bytes(txn: Txn, parent: WorldSpec, subject: str, height: int) -> bytes:
    try:
        return load_snapshot(txn, parent.world_id, subject, height)[0]
    except NotFound:
        return parent.definition.canonical_bytes(restore(txn, parent, at=height).state)
