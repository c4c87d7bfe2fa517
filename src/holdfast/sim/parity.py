"""Parity check: the state after crashes equals, byte for byte, the state of a run without faults.

Every world is replayed from scratch, as in a process that never dies:

- the hash chain of the journal is intact and no height is missing
- each entry's ingress, applied with the recorded time and entropy, produces the same entry: outcome,
  emissions, reply, and the state digest in the last entry of a cycle
- the state is equal at every snapshot, and the final state equals the one that a worker restores
- a fork starts with its parent's state at that height

The check detects reducers that read a clock, randomness, or anything else beside state, event and
`cx`. It names the world and the height.
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
from holdfast.world import catalog, journal_entry, reducer
from holdfast.world.catalog import WorldRecord, WorldStatus, subject_of
from holdfast.world.definition import BadState
from holdfast.world.journal_entry import JournalStep, StepOutcome
from holdfast.world.messaging.recipients import world_types_of
from holdfast.world.restore import restore

ReadFunction = Callable[..., Any]


class Disparity(AssertionError):
    """A world differs from the result of a run without faults."""

    def __init__(self, world: WorldRecord, height: int, what: str) -> None:
        super().__init__(f"{world.type}/{world.name} at height {height}: {what}")
        self.world = world
        self.height = height
        self.what = what


def check_parity(read: ReadFunction, app: App) -> None:
    """Raise Disparity for the first world that differs."""
    worlds: list[WorldRecord] = read(_worlds, app.universe)
    records = {record.world_id: record for record in worlds}
    forked: dict[str, set[int]] = {}
    for record in worlds:
        if record.lineage is not None:
            heights = forked.setdefault(record.lineage.parent_world_id, set())
            heights.add(record.lineage.forked_at_height)
    # Initial states of forks, by (parent, height). Parents are checked before their children.
    fork_states: dict[tuple[str, int], bytes] = {}
    for record in sorted(worlds, key=lambda one: _fork_depth(one, records)):
        _check_world(read, app, record, forked.get(record.world_id, set()), fork_states)


def _check_world(
    read: ReadFunction,
    app: App,
    record: WorldRecord,
    forked: set[int],
    fork_states: dict[tuple[str, int], bytes],
) -> None:
    if record.status is WorldStatus.PARKED and record.blocker is not None:
        raise Disparity(record, record.blocker.height, f"it is parked: {record.blocker.text}")
    program = app.programs[record.type]
    world = reducer.WorldSpec(record.universe, record.world_id, record.name, program, app)
    start, state = _initial_state(record, world, fork_states)
    entries, saved = read(_history, world)
    if 0 in forked:
        fork_states[record.world_id, 0] = program.dump_state(state)
    for at, body in enumerate(entries, start + 1):
        step = journal_entry.decode(body)
        again, state = _repeat_step(read, world, state, step, at)
        if journal_entry.pack(again) != body:
            raise Disparity(record, at, _difference(step, again))
        if at in saved or at in forked:
            stored = program.canonical_bytes(state)
            if saved.get(at, stored) != stored:
                raise Disparity(record, at, "the snapshot holds another state")
            fork_states[record.world_id, at] = stored
    try:
        restored = program.canonical_bytes(read(restore, world).state)
    except ReplayDiverged as error:
        raise Disparity(record, int(error.fields.get("height", 0)), str(error)) from None
    if restored != program.canonical_bytes(state):
        raise Disparity(record, start + len(entries), "a worker would restore another state")


def _repeat_step(
    read: ReadFunction, world: reducer.WorldSpec, state: Any, step: JournalStep, height: int
) -> tuple[JournalStep, Any]:
    """Repeat one step as the host ran it: from stored bytes where the host did, and rolled back on
    failure."""
    program = world.definition
    if step.base == height - 1:
        state = program.reload_as_shape(state, step.shape)
    again, after = _apply_step(read, world, state, step, height)
    if not step.state:
        return replace(again, state=step.state), after
    return replace(again, state=sha256(program.canonical_bytes(after)).digest()), after


def _apply_step(
    read: ReadFunction, world: reducer.WorldSpec, state: Any, step: JournalStep, height: int
) -> tuple[JournalStep, Any]:
    program = world.definition
    if step.outcome is StepOutcome.UNKNOWN:
        # No code handled the event, so there is nothing to repeat.
        return step, state
    before = program.dump_state(state)
    result = reducer.run_step(
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
    if step.outcome is StepOutcome.FAILED and result.mail_by_id:
        types = read(
            world_types_of, world.universe, [world_id for world_id, _ in result.mail_by_id]
        )
        for world_id, cause in result.mail_by_id:
            try:
                world.registry.check_known(types.get(world_id, ""), cause)
            except Invalid as error:
                result = reducer.fail_step(result, error)
                break
    if step.outcome is StepOutcome.FAILED and not result.state_dirty:
        # The reducer did not raise. The state it left could not be stored.
        try:
            program.storable_bytes(state)
        except BadState as error:
            result = reducer.fail_step(result, error)
    return result.step, program.load_state(before) if result.state_dirty else state


def _initial_state(
    record: WorldRecord, world: reducer.WorldSpec, fork_states: dict[tuple[str, int], bytes]
) -> tuple[int, Any]:
    lineage = record.lineage
    if lineage is None:
        return 0, world.definition.initial_state()
    fork_state = fork_states[lineage.parent_world_id, lineage.forked_at_height]
    return lineage.forked_at_height, world.definition.load_state(fork_state)


def _history(txn: Txn, world: reducer.WorldSpec) -> tuple[list[bytes], dict[int, bytes]]:
    """Return the bodies of all entries, and all snapshots by height."""
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
    worlds: list[WorldRecord] = []
    while page := catalog.list_worlds(
        txn, universe, worlds[-1].world_id if worlds else "", SCAN_PAGE
    ):
        worlds += page
    return worlds


def _fork_depth(record: WorldRecord, records: dict[str, WorldRecord]) -> int:
    """Number of forks between the world and its root."""
    depth = 0
    while record.lineage is not None:
        record = records[record.lineage.parent_world_id]
        depth += 1
    return depth


def _difference(recorded: JournalStep, repeated: JournalStep) -> str:
    for name in recorded.__struct_fields__:
        before, after = getattr(recorded, name), getattr(repeated, name)
        if before != after:
            suffix = (
                f"; it raised: {repeated.error}" if repeated.error and not recorded.error else ""
            )
            return f"handled again, its {name} is {after!r}, was {before!r}{suffix}"
    return "handled again, its entry has other bytes"
