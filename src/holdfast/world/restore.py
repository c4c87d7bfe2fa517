"""Restore: a world's state from its baseline snapshot and the journal after it.

Every replayed step is compared with its entry, and the state with the digest in the last entry of
each cycle. A difference raises `ReplayDiverged`, and the caller parks the world. A snapshot is
compared with the digest of its height. This module writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox, journal, snapshot
from holdfast.errors import NotFound, ReplayDiverged
from holdfast.store.api import Txn
from holdfast.world import journal_entry, reducer
from holdfast.world.catalog import subject_of
from holdfast.world.reducer import WorldSpec


class RestoredState(NamedTuple):
    """A restored state and its position."""

    state: Any
    height: int
    # The height of the snapshot that the restore started from; 0 for the initial state.
    snapshot_height: int
    # The bytes of the entries that were replayed on top of the snapshot.
    tail_bytes: int
    cursor: int
    # The digest in the entry at this height; None if it has none.
    digest: bytes | None = None


class ReplayCheck(NamedTuple):
    """The result of a replay of a journal up to a height."""

    steps: int
    # Entries of cycles whose state was compared with a digest, and all other entries.
    compared: int
    not_compared: int
    height: int
    # The digest of the replayed state at that height.
    digest: bytes


def restore(txn: Txn, world: WorldSpec, *, at: int | None = None) -> RestoredState:
    """Restore the state at the head, or after entry `at`.

    An entry in the middle of a cycle has no digest. To compare its state too, the rest of the cycle
    is replayed.
    """
    subject = subject_of(world.universe, world.world_id)
    head = journal.head(txn, subject)
    height = head.height if at is None else at
    if not 0 <= height <= head.height:
        raise NotFound(what="height", world=world.world_id, found=height, head=head.height)
    if height < head.floor - 1:
        raise below_floor_error(world.world_id, height, head.floor)
    base = _nearest_snapshot(txn, subject, height) if height else None
    state, done, digest = _start_state(txn, world, subject, base, head)
    tail_bytes = 0
    for found in _entries(txn, subject, done + 1, height):
        step = journal_entry.decode(found.body)
        state = reducer.replay_step(world, state, step, height=found.height)
        tail_bytes += len(found.body)
        digest = step.state
    if digest == b"":
        state = _compare_rest_of_cycle(txn, world, subject, state, height, head.height)
    return RestoredState(
        state, height, done, tail_bytes, inbox.cursor(txn, subject), digest or None
    )


def load_snapshot(txn: Txn, world_id: str, subject: str, height: int) -> tuple[bytes, bytes | None]:
    """Return the state of a snapshot and the digest of its height. Raise ReplayDiverged if they
    differ."""
    state = snapshot.load(txn, subject, height)
    digest = _digest_at(txn, subject, height)
    if digest and sha256(state).digest() != digest:
        raise ReplayDiverged(
            world=world_id,
            height=height,
            what="state",
            why="the snapshot holds another state",
        )
    return state, digest


def check_snapshots(txn: Txn, world: WorldSpec, *, since: int = 0) -> int:
    """Replay the kept journal and compare the state at every snapshot. Return the number of
    steps."""
    return replay_and_check(txn, world, since=since).steps


def replay_and_check(
    txn: Txn, world: WorldSpec, *, since: int = 0, to: int | None = None
) -> ReplayCheck:
    """Replay the kept journal, up to the head or a height, and compare the state with every digest
    and every snapshot.

    The replay starts at the snapshot at or below `since`, or at the lowest snapshot that the
    journal continues from.
    """
    subject = subject_of(world.universe, world.world_id)
    head = journal.head(txn, subject)
    to = head.height if to is None else to
    saved = sorted(snapshot.heights(txn, subject, SCAN_PAGE))
    usable = [height for height in saved if height >= head.floor - 1]
    below = [height for height in usable if height <= since]
    base = below[-1] if below else usable[0] if usable and head.floor > 1 else None
    state, start, _ = _start_state(txn, world, subject, base, head)
    compared = since_digest = 0
    for found in _entries(txn, subject, start + 1, to):
        step = journal_entry.decode(found.body)
        state = reducer.replay_step(world, state, step, height=found.height)
        since_digest = 0 if step.state is None else since_digest + 1
        if step.state:
            compared, since_digest = compared + since_digest, 0
        if found.height in saved:
            held = snapshot.load(txn, subject, found.height)
            reducer.compare_state(world, state, sha256(held).digest(), height=found.height)
    steps = max(to - start, 0)
    digest = sha256(world.definition.canonical_bytes(state)).digest()
    return ReplayCheck(steps, compared, steps - compared, max(to, start), digest)


def below_floor_error(world_id: str, height: int, floor: int) -> NotFound:
    why = "the history below the floor is removed"
    return NotFound(what="height", world=world_id, found=height, floor=floor, why=why)


def state_hash(world: WorldSpec, state: Any) -> str:
    return codec.digest(world.definition.canonical_bytes(state)).hex()


# -- inside --------------------------------------------------------------------------------------


def _digest_at(txn: Txn, subject: str, height: int) -> bytes | None:
    """Return the digest in an entry; None if there is no entry."""
    if height < journal.head(txn, subject).floor:
        return None
    [found] = journal.read(txn, subject, height, height + 1, 1)
    return journal_entry.decode(found.body).state


def _nearest_snapshot(txn: Txn, subject: str, height: int) -> int | None:
    """Return the highest snapshot at or below a height."""
    saved = snapshot.heights(txn, subject, SCAN_PAGE)
    return next((found for found in saved if found <= height), None)


def _start_state(
    txn: Txn, world: WorldSpec, subject: str, base: int | None, head: journal.JournalHead
) -> tuple[Any, int, bytes | None]:
    """Return the state to start from, its height, and its digest."""
    if base is not None:
        state, digest = load_snapshot(txn, world.world_id, subject, base)
        return world.definition.load_state(state), base, digest
    if head.floor > 1:
        raise NotFound(
            what="snapshot",
            subject=subject,
            floor=head.floor,
            why="the journal below this floor was deleted",
        )
    return world.definition.initial_state(), 0, None


def _compare_rest_of_cycle(
    txn: Txn, world: WorldSpec, subject: str, state: Any, height: int, to: int
) -> Any:
    """Replay the rest of a cycle to compare its digest. Return the state from before that."""
    state_bytes = world.definition.dump_state(state)
    for found in _entries(txn, subject, height + 1, to):
        step = journal_entry.decode(found.body)
        state = reducer.replay_step(world, state, step, height=found.height)
        if step.state != b"":
            break
    return world.definition.load_state(state_bytes)


def _entries(txn: Txn, subject: str, lo: int, to: int) -> Iterator[journal.ChainedEntry]:
    """Yield the entries from `lo` to `to`. Raise NotFound if one is missing."""
    while lo <= to:
        page = journal.read(txn, subject, lo, to + 1, SCAN_PAGE)
        if not page:
            raise NotFound(what="journal entry", subject=subject, height=lo)
        yield from page
        lo = page[-1].height + 1
