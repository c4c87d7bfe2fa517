"""A world's state from its baseline and the journal after it.

Every repeated step is compared with what its entry says; a difference is `ReplayDiverged`, and the
caller parks the world. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox, journal, snapshot
from holdfast.errors import NotFound, ReplayDiverged
from holdfast.store.api import Txn
from holdfast.world import entry, kernel
from holdfast.world.catalog import subject_of
from holdfast.world.kernel import World


class Restored(NamedTuple):
    state: Any
    height: int
    # The snapshot that it started from; 0 for the initial state.
    snapshot_height: int
    # What was repeated on top of it, in bytes.
    tail_bytes: int
    cursor: int


def restore(txn: Txn, world: World, *, at: int | None = None) -> Restored:
    """The state after the head, or after entry `at`."""
    subject = subject_of(world.universe, world.world_id)
    head = journal.head(txn, subject)
    height = head.height if at is None else at
    if not 0 <= height <= head.height:
        raise NotFound(what="height", world=world.world_id, found=height, head=head.height)
    if height < head.floor - 1:
        raise below_floor(world.world_id, height, head.floor)
    base = _nearest_snapshot(txn, subject, height) if height else None
    state, done = _start(txn, world, subject, base, head)
    tail_bytes = 0
    for found in _entries(txn, subject, done + 1, height):
        state = kernel.repeat(world, state, entry.decode(found.body), height=found.height)
        tail_bytes += len(found.body)
    return Restored(state, height, done, tail_bytes, inbox.cursor(txn, subject))


def check_snapshots(txn: Txn, world: World, *, since: int = 0) -> int:
    """Repeat the kept journal and compare the state at every snapshot; how many steps.

    It starts at the snapshot at or below `since`, or at the lowest one that the journal goes on from.
    """
    subject = subject_of(world.universe, world.world_id)
    head = journal.head(txn, subject)
    saved = sorted(snapshot.heights(txn, subject, SCAN_PAGE))
    usable = [height for height in saved if height >= head.floor - 1]
    below = [height for height in usable if height <= since]
    base = below[-1] if below else usable[0] if usable and head.floor > 1 else None
    state, start = _start(txn, world, subject, base, head)
    steps = 0
    for found in _entries(txn, subject, start + 1, head.height):
        state = kernel.repeat(world, state, entry.decode(found.body), height=found.height)
        steps += 1
        if found.height in saved:
            told = world.program.dump(world.program.fresh(state))
            if snapshot.load(txn, subject, found.height) != told:
                raise ReplayDiverged(
                    world=world.world_id,
                    type=world.program.type,
                    name=world.name,
                    height=found.height,
                    what="state",
                    why="the snapshot holds another state",
                )
    return steps


def below_floor(world_id: str, height: int, floor: int) -> NotFound:
    why = "the history below the floor is removed"
    return NotFound(what="height", world=world_id, found=height, floor=floor, why=why)


def state_hash(world: World, state: Any) -> str:
    return codec.digest(world.program.dump(world.program.fresh(state))).hex()


# -- inside --------------------------------------------------------------------------------------


def _nearest_snapshot(txn: Txn, subject: str, height: int) -> int | None:
    """The highest snapshot at or below a height."""
    saved = snapshot.heights(txn, subject, SCAN_PAGE)
    return next((found for found in saved if found <= height), None)


def _start(
    txn: Txn, world: World, subject: str, base: int | None, head: journal.Head
) -> tuple[Any, int]:
    """A state to start from, and its height."""
    if base is not None:
        return world.program.load(snapshot.load(txn, subject, base)), base
    if head.floor > 1:
        raise NotFound(
            what="snapshot", subject=subject, floor=head.floor, why="the journal is cut off there"
        )
    return world.program.initial(), 0


def _entries(txn: Txn, subject: str, lo: int, to: int) -> Iterator[journal.Entry]:
    """Entries from lo to `to`, all of them: one that is missing is NotFound."""
    while lo <= to:
        page = journal.read(txn, subject, lo, to + 1, SCAN_PAGE)
        if not page:
            raise NotFound(what="journal entry", subject=subject, height=lo)
        yield from page
        lo = page[-1].height + 1
