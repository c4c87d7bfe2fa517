"""Parity: what crashes left behind is, byte for byte, what a run without any gives.

For every world that there is, from scratch and in one go, as a process that never dies would:

- the journal's chain holds, and no height is missing
- each entry's ingress, handled again with the time and entropy that the entry names, makes the very
  same entry: outcome, emissions, reply, and the digest of the state in the last entry of a cycle
- the state is the same at every snapshot, and at the end the same as what a worker would restore
- a fork starts with its parent's state at that height

So a reducer that looks at a clock, at chance, or at anything else than state, event and `cx` is found,
and named with its world and height.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from holdfast.app.app import App
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal, snapshot
from holdfast.errors import Invalid, ReplayDiverged
from holdfast.store.api import Txn
from holdfast.world import catalog, entry, kernel
from holdfast.world.catalog import Status, WorldRecord, subject_of
from holdfast.world.entry import Outcome, Step
from holdfast.world.program import BadState
from holdfast.world.recipients import types_of
from holdfast.world.restore import restore

Look = Callable[..., Any]


class Disparity(AssertionError):
    """A world is not what a run without faults would have made of it."""

    def __init__(self, world: WorldRecord, height: int, what: str) -> None:
        super().__init__(f"{world.type}/{world.name} at height {height}: {what}")
        self.world = world
        self.height = height
        self.what = what


def check(look: Look, app: App) -> None:
    """Raise for the first world that is not as it should be."""
    found: list[WorldRecord] = look(_worlds, app.universe)
    records = {record.world_id: record for record in found}
    forked: dict[str, set[int]] = {}
    for record in found:
        if record.lineage is not None:
            heights = forked.setdefault(record.lineage.parent_world_id, set())
            heights.add(record.lineage.forked_at_height)
    # States that forks start from, by (parent, height): parents are walked before their children.
    seeds: dict[tuple[str, int], bytes] = {}
    for record in sorted(found, key=lambda one: _depth(one, records)):
        _check_world(look, app, record, forked.get(record.world_id, set()), seeds)


def _check_world(
    look: Look,
    app: App,
    record: WorldRecord,
    forked: set[int],
    seeds: dict[tuple[str, int], bytes],
) -> None:
    if record.status is Status.PARKED and record.blocker is not None:
        raise Disparity(record, record.blocker.height, f"it is parked: {record.blocker.text}")
    program = app.programs[record.type]
    world = kernel.World(record.universe, record.world_id, record.name, program, app)
    start, state = _start(record, world, seeds)
    entries, saved = look(_history, world)
    if 0 in forked:
        seeds[record.world_id, 0] = program.dump(state)
    for at, body in enumerate(entries, start + 1):
        step = entry.decode(body)
        again, state = _handle(look, world, state, step, at)
        if entry.pack(again) != body:
            raise Disparity(record, at, _difference(step, again))
        if at in saved or at in forked:
            stored = program.canonical(state)
            if saved.get(at, stored) != stored:
                raise Disparity(record, at, "the snapshot holds another state")
            seeds[record.world_id, at] = stored
    try:
        restored = program.canonical(look(restore, world).state)
    except ReplayDiverged as error:
        raise Disparity(record, int(error.fields.get("height", 0)), str(error)) from None
    if restored != program.canonical(state):
        raise Disparity(record, start + len(entries), "a worker would restore another state")


def _handle(
    look: Look, world: kernel.World, state: Any, step: Step, height: int
) -> tuple[Step, Any]:
    """One step, as the host takes it: from stored bytes where it did, and back to them on failure."""
    program = world.program
    if step.base == height - 1:
        state = program.adopted(state, step.shape)
    again, after = _step(look, world, state, step, height)
    if not step.state:
        return replace(again, state=step.state), after
    return replace(again, state=sha256(program.canonical(after)).digest()), after


def _step(look: Look, world: kernel.World, state: Any, step: Step, height: int) -> tuple[Step, Any]:
    program = world.program
    if step.outcome is Outcome.UNKNOWN:
        # No code handled it: there is nothing to repeat.
        return step, state
    before = program.dump(state)
    made = kernel.advance(
        world,
        state,
        step.ingress,
        seq=step.seq,
        height=height,
        wall_ns=step.wall_ns,
        entropy=step.entropy,
        generation=step.generation,
        base=step.base,
    )
    if step.outcome is Outcome.FAILED and made.addressed:
        types = look(types_of, world.universe, [world_id for world_id, _ in made.addressed])
        for world_id, cause in made.addressed:
            try:
                world.vocabulary.check_known(types.get(world_id, ""), cause)
            except Invalid as error:
                made = kernel.spoil(made, error)
                break
    if step.outcome is Outcome.FAILED and not made.spoiled:
        # It did not raise; what it left could not be stored.
        try:
            program.storable(state)
        except BadState as error:
            made = kernel.spoil(made, error)
    return made.step, program.load(before) if made.spoiled else state


def _start(
    record: WorldRecord, world: kernel.World, seeds: dict[tuple[str, int], bytes]
) -> tuple[int, Any]:
    lineage = record.lineage
    if lineage is None:
        return 0, world.program.initial()
    seed = seeds[lineage.parent_world_id, lineage.forked_at_height]
    return lineage.forked_at_height, world.program.load(seed)


def _history(txn: Txn, world: kernel.World) -> tuple[list[bytes], dict[int, bytes]]:
    """The bodies of all entries, and all snapshots by height."""
    subject = subject_of(world.universe, world.world_id)
    journal.verify(txn, subject)
    head = journal.head(txn, subject)
    bodies: list[bytes] = []
    lo = head.floor
    while page := journal.read(txn, subject, lo, head.height + 1, SCAN_PAGE):
        bodies += [found.body for found in page]
        lo = page[-1].height + 1
    heights = snapshot.heights(txn, subject, SCAN_PAGE)
    return bodies, {height: snapshot.load(txn, subject, height) for height in heights}


def _worlds(txn: Txn, universe: str) -> list[WorldRecord]:
    found: list[WorldRecord] = []
    while page := catalog.worlds(txn, universe, found[-1].world_id if found else "", SCAN_PAGE):
        found += page
    return found


def _depth(record: WorldRecord, records: dict[str, WorldRecord]) -> int:
    """How many forks lead to it."""
    depth = 0
    while record.lineage is not None:
        record = records[record.lineage.parent_world_id]
        depth += 1
    return depth


def _difference(was: Step, now: Step) -> str:
    for name in was.__struct_fields__:
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            told = f"; it raised: {now.error}" if now.error and not was.error else ""
            return f"handled again, its {name} is {after!r}, was {before!r}{told}"
    return "handled again, its entry has other bytes"
