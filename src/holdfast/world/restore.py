"""A world's state from its baseline and the journal after it.

Every repeated step is compared with what its entry says, and the state with the digest in the last
entry of each cycle; a difference is `ReplayDiverged`, and the caller parks the world. A snapshot is
compared with the digest of its height. Nothing is written here.
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
    # The digest in the entry at this height; None when it has none.
    digest: bytes | None = None


class Checked(NamedTuple):
    """A journal that was repeated up to a height, and what its states were compared with."""

    steps: int
    # Entries of cycles whose state was compared with a digest, and all others.
    compared: int
    not_compared: int
    height: int
    # Of the state at that height, as this replay made it.
    digest: bytes


def restore(txn: Txn, world: World, *, at: int | None = None) -> Restored:
    """The state after the head, or after entry `at`.

    An entry in the middle of a cycle has no digest. So that its state is compared, too, the cycle is
    repeated to its end.
    """
    subject = subject_of(world.universe, world.world_id)
    head = journal.head(txn, subject)
    height = head.height if at is None else at
    if not 0 <= height <= head.height:
        raise NotFound(what="height", world=world.world_id, found=height, head=head.height)
    if height < head.floor - 1:
        raise below_floor(world.world_id, height, head.floor)
    base = _nearest_snapshot(txn, subject, height) if height else None
    state, done, digest = _start(txn, world, subject, base, head)
    tail_bytes = 0
    for found in _entries(txn, subject, done + 1, height):
        step = entry.decode(found.body)
        state = kernel.repeat(world, state, step, height=found.height)
        tail_bytes += len(found.body)
        digest = step.state
    if digest == b"":
        state = _through_cycle(txn, world, subject, state, height, head.height)
    return Restored(state, height, done, tail_bytes, inbox.cursor(txn, subject), digest or None)


def load_snapshot(txn: Txn, world_id: str, subject: str, height: int) -> tuple[bytes, bytes | None]:
    """The state that a snapshot holds, and the digest of its height: one state, or ReplayDiverged."""
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


def check_snapshots(txn: Txn, world: World, *, since: int = 0) -> int:
    """Repeat the kept journal and compare the state at every snapshot; how many steps."""
    return check(txn, world, since=since).steps


def check(txn: Txn, world: World, *, since: int = 0, to: int | None = None) -> Checked:
    """Repeat the kept journal, up to the head or to a height, and compare the state with every digest
    and every snapshot.

    It starts at the snapshot at or below `since`, or at the lowest one that the journal goes on from.
    """
    subject = subject_of(world.universe, world.world_id)
    head = journal.head(txn, subject)
    to = head.height if to is None else to
    saved = sorted(snapshot.heights(txn, subject, SCAN_PAGE))
    usable = [height for height in saved if height >= head.floor - 1]
    below = [height for height in usable if height <= since]
    base = below[-1] if below else usable[0] if usable and head.floor > 1 else None
    state, start, _ = _start(txn, world, subject, base, head)
    compared = since_digest = 0
    for found in _entries(txn, subject, start + 1, to):
        step = entry.decode(found.body)
        state = kernel.repeat(world, state, step, height=found.height)
        since_digest = 0 if step.state is None else since_digest + 1
        if step.state:
            compared, since_digest = compared + since_digest, 0
        if found.height in saved:
            held = snapshot.load(txn, subject, found.height)
            kernel.compare_state(world, state, sha256(held).digest(), height=found.height)
    steps = max(to - start, 0)
    digest = sha256(world.program.canonical(state)).digest()
    return Checked(steps, compared, steps - compared, max(to, start), digest)


def below_floor(world_id: str, height: int, floor: int) -> NotFound:
    why = "the history below the floor is removed"
    return NotFound(what="height", world=world_id, found=height, floor=floor, why=why)


def state_hash(world: World, state: Any) -> str:
    return codec.digest(world.program.canonical(state)).hex()


# -- inside --------------------------------------------------------------------------------------


def _digest_at(txn: Txn, subject: str, height: int) -> bytes | None:
    """The digest in an entry; None where there is no entry."""
    if height < journal.head(txn, subject).floor:
        return None
    [found] = journal.read(txn, subject, height, height + 1, 1)
    return entry.decode(found.body).state


def _nearest_snapshot(txn: Txn, subject: str, height: int) -> int | None:
    """The highest snapshot at or below a height."""
    saved = snapshot.heights(txn, subject, SCAN_PAGE)
    return next((found for found in saved if found <= height), None)


def _start(
    txn: Txn, world: World, subject: str, base: int | None, head: journal.Head
) -> tuple[Any, int, bytes | None]:
    """A state to start from, its height, and the digest there."""
    if base is not None:
        state, digest = load_snapshot(txn, world.world_id, subject, base)
        return world.program.load(state), base, digest
    if head.floor > 1:
        raise NotFound(
            what="snapshot", subject=subject, floor=head.floor, why="the journal is cut off there"
        )
    return world.program.initial(), 0, None


def _through_cycle(txn: Txn, world: World, subject: str, state: Any, height: int, to: int) -> Any:
    """Repeat the rest of a cycle, so that its digest is compared; the state as it was before that."""
    kept = world.program.dump(state)
    for found in _entries(txn, subject, height + 1, to):
        step = entry.decode(found.body)
        state = kernel.repeat(world, state, step, height=found.height)
        if step.state != b"":
            break
    return world.program.load(kept)


def _entries(txn: Txn, subject: str, lo: int, to: int) -> Iterator[journal.Entry]:
    """Entries from lo to `to`, all of them: one that is missing is NotFound."""
    while lo <= to:
        page = journal.read(txn, subject, lo, to + 1, SCAN_PAGE)
        if not page:
            raise NotFound(what="journal entry", subject=subject, height=lo)
        yield from page
        lo = page[-1].height + 1
