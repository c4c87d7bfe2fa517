"""The commit of a world cycle: entries, cursor, intents and snapshot, all or nothing.

`commit` runs where commits are applied, for many worlds of a worker in one call. Cycles are
independent: a cycle that is fenced, or whose journal head has moved, writes nothing and does not
affect other cycles. The lease is checked there too, at the time of the commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import CYCLES_BYTES_MAX, CYCLES_MAX
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.durable.lease import Lease, release
from holdfast.durable.queue import ClaimToken
from holdfast.durable.validation import check_limit
from holdfast.errors import Conflict, HeadMoved, HoldfastError, Invalid, to_wire
from holdfast.messages import TIMER_SET, Intent
from holdfast.store.api import Txn, operation
from holdfast.store.txn import run_in_savepoint
from holdfast.world import catalog, history, timers, unknown_events
from holdfast.world import intents as world_intents
from holdfast.world.catalog import UNKNOWN_EVENT, subject_of
from holdfast.world.code_requirement import CodeRequirement
from holdfast.world.history import HistoryBound
from holdfast.world.redrive import FailedEventRow, failed_events_queue
from holdfast.world.timers import DueTimerRef

T = TypeVar("T")


class FailedEvent(Record, frozen=True):
    """An ingress that becomes a dead letter: its reducer raised, or no worker declared its type in
    time."""

    seq: int
    body: bytes
    error: str
    code: str = "reducer_failed"
    type: str = ""
    key: str = ""
    # The trace context of the sender.
    trace: bytes = b""


class AppliedInline(Record, frozen=True):
    """An effect or a timer that completes in the commit of its world's cycle, without an inbox
    item. It holds the claim token of the effect, or the reference of the due timer."""

    token: ClaimToken | None
    intent_hash: bytes
    alarm: DueTimerRef | None = None


class Cycle(Record, frozen=True):
    """The work of one world, ready to commit under its lease."""

    universe: str
    world_id: str
    lease: Lease
    expected_head: int
    to_seq: int
    bodies: list[bytes]
    intents: list[Intent]
    failed: list[FailedEvent]
    snapshot: bytes | None
    snapshots_kept: int
    # The cycle emptied the inbox. The commit clears the runnable mark if the inbox is still empty.
    drained: bool
    # The store time at which the reducers ran. Delays count from it.
    wanted_ns: int = 0
    # Effects whose receipts the cycle handled last, and timers, without inbox items. The commit
    # completes them and assigns them the last seqs up to `to_seq`.
    carried: tuple[AppliedInline, ...] = ()
    # How much history the world keeps; None for all of it.
    history: HistoryBound | None = None
    # The cycle consumes the undeclared item that the world had stopped before.
    clears: bool = False

    @property
    def size(self) -> int:
        """The approximate number of bytes to send."""
        wanted = sum(len(intent.params) for intent in self.intents)
        return sum(map(len, self.bodies)) + wanted + len(self.snapshot or b"")


@operation("cycle.commit")
def commit(txn: Txn, cycles: list[Cycle]) -> list[list[Any] | None]:
    """Commit cycles, each all or nothing. Return None for each committed cycle, else its error
    (`from_wire`)."""
    check_limit(len(cycles), "cycles")
    errors: dict[int, Exception] = {}
    valid: list[Cycle] = []
    for index, cycle in enumerate(cycles):
        try:
            _check(txn, cycle)
            valid.append(cycle)
        except HoldfastError as error:
            errors[index] = error
    # Apply all cycles together. After an error apply each alone, to find the cycle that caused it.
    if run_in_savepoint(txn, apply_all, valid) is not None:
        for index, cycle in enumerate(cycles):
            if index not in errors:
                raised = run_in_savepoint(txn, apply, cycle)
                if raised is not None:
                    errors[index] = raised
    return [_wire_error(cycle, errors.get(index)) for index, cycle in enumerate(cycles)]


@operation("cycle.commit_and_release")
def commit_and_release(txn: Txn, cycles: list[Cycle], held: list[Lease]) -> None:
    """Commit the final cycles of worlds and release their leases. Failures are ignored: a lease
    expires, and another host makes the snapshot."""
    check_limit(len(cycles), "cycles")
    for cycle in cycles:
        run_in_savepoint(txn, apply, cycle)
    for lease in held:
        run_in_savepoint(txn, release, lease)


@operation("cycle.stop_and_release")
def stop_and_release(
    txn: Txn,
    universe: str,
    world_id: str,
    held: Lease,
    need: CodeRequirement,
    *,
    seq: int,
    last: Cycle | None = None,
    since_ns: int = 0,
    height: int = 0,
    why: str = "",
) -> None:
    """Release a world before an item that its host does not declare. The item is not consumed until
    a worker that declares it hosts the world. `last` is a final snapshot to commit first. Seq 0
    means that the undeclared item is in the journal, or that the world type itself is not declared.
    `since_ns` is the time since which the item has waited behind an item with the same requirement
    that this host gave up. `height` and `why` describe a journal entry of other code that this host
    replays differently."""
    txn.require_live(held)
    if last is not None:
        run_in_savepoint(txn, apply, last)
    if seq and inbox.cursor(txn, subject_of(universe, world_id)) != seq - 1:
        raise Conflict(world=world_id, seq=seq, why="the inbox cursor has moved")
    record = catalog.get_record(txn, universe, world_id)
    unknown_events.mark_stopped(
        txn, record, need, seq=seq, since_ns=since_ns, height=height, why=why
    )
    release.fn(txn, held)


@operation("cycle.apply")
def apply(txn: Txn, cycle: Cycle) -> None:
    """Commit one cycle."""
    _check(txn, cycle)
    apply_all.fn(txn, [cycle])


@operation("cycle.apply_all")
def apply_all(txn: Txn, cycles: list[Cycle]) -> None:
    """Apply cycles with valid leases in one transaction."""
    tokens = [one.token for cycle in cycles for one in cycle.carried if one.token is not None]
    if tokens:
        queue.ack.fn(txn, tokens)
    for cycle in cycles:
        _apply_cycle(txn, cycle)
    # Delivery after the cycles: it writes a new runnable hint where a cycle removed the former one.
    intents: list[Intent] = []
    for cycle in cycles:
        if any(intent.effect_kind == TIMER_SET for intent in cycle.intents):
            world_intents.publish.fn(txn, cycle.intents, cycle.wanted_ns)
        else:
            intents += cycle.intents
    if intents:
        world_intents.publish.fn(txn, intents)


def _check(txn: Txn, cycle: Cycle) -> None:
    """Check the lease and the journal head before any write."""
    txn.require_live(cycle.lease)
    subject = subject_of(cycle.universe, cycle.world_id)
    height = journal.head(txn, subject).height
    if height != cycle.expected_head:
        raise HeadMoved(subject=subject, expected=cycle.expected_head, found=height)
    for failed in cycle.failed:
        if failed.code == UNKNOWN_EVENT:
            now = catalog.get_record(txn, cycle.universe, cycle.world_id).unknown
            if now is None or not now.given_up or now.seq != failed.seq:
                raise Conflict(
                    world=cycle.world_id,
                    seq=failed.seq,
                    why="no worker has given this unknown event up; it stays in the inbox",
                )
    if cycle.carried:
        last = inbox.last_seq(txn, subject)
        if last != cycle.to_seq - len(cycle.carried):
            raise Conflict(world=cycle.world_id, seq=last, why="other items arrived first")
        for one in cycle.carried:
            if one.alarm is not None:
                if not timers.is_due(
                    txn, cycle.universe, cycle.world_id, one.intent_hash, one.alarm
                ):
                    raise Conflict(world=cycle.world_id, why="a timer is not due, or was replaced")
                continue
            pending = world_intents.find_pending(txn, cycle.universe, one.intent_hash)
            if pending is None or pending.dead or pending.world_id != cycle.world_id:
                raise Conflict(world=cycle.world_id, why="an effect has its receipt already")
            if one.token is None or not queue.is_held(txn, one.token):
                raise Conflict(world=cycle.world_id, why="the worker lost the claim of an effect")


def _apply_cycle(txn: Txn, cycle: Cycle) -> None:
    universe, world_id = cycle.universe, cycle.world_id
    subject = subject_of(universe, world_id)
    head = journal.append(txn, subject, cycle.bodies, expected_head=cycle.expected_head)
    if cycle.bodies:
        for one in cycle.carried:
            if one.alarm is None:
                world_intents.resolve(txn, universe, one.intent_hash)
            else:
                timers.complete(txn, universe, world_id, one.alarm)
        inbox.advance(txn, subject, cycle.to_seq, len(cycle.carried))
    for failed in cycle.failed:
        letter = codec.pack(
            FailedEventRow(world_id, failed.seq, failed.body, failed.key, failed.trace)
        )
        seq = queue.add_dead_letter.fn(
            txn, failed_events_queue(universe), letter, failed.code, failed.error
        )
        if failed.code == UNKNOWN_EVENT:
            unknown_events.record_given_up(txn, universe, world_id, failed.seq, failed.type, seq)
    if cycle.clears:
        unknown_events.clear_stop(txn, universe, world_id)
    txn.notify(entries_topic(subject))
    if cycle.snapshot is not None:
        snapshot.save(txn, subject, head.height, cycle.snapshot)
        snapshot.set_baseline(txn, subject, head.height)
        journal.checkpoint(txn, subject, head.height)
        bound = cycle.history
        window = None if bound is None else bound.window
        snapshot.prune(txn, subject, cycle.snapshots_kept, window)
        history.schedule_trim(txn, universe, world_id, bound)
    if cycle.drained:
        catalog.clear_runnable.fn(txn, universe, world_id, cycle.lease.worker)


def _wire_error(cycle: Cycle, error: Exception | None) -> list[Any] | None:
    if error is None:
        return None
    if not isinstance(error, HoldfastError):
        error = Invalid(what="cycle", world=cycle.world_id, why=repr(error))
    return to_wire(error)


def commit_batches(cycles: list[tuple[T, Cycle]]) -> Iterator[list[tuple[T, Cycle]]]:
    """Split cycles into batches of one commit each, limited in number and bytes."""
    some: list[tuple[T, Cycle]] = []
    size = 0
    for of, cycle in cycles:
        if some and (len(some) == CYCLES_MAX or size + cycle.size > CYCLES_BYTES_MAX):
            yield some
            some, size = [], 0
        some.append((of, cycle))
        size += cycle.size
    if some:
        yield some


def entries_topic(subject: str) -> str:
    """The topic that is notified when a world's journal grows."""
    return f"entries/{subject}"
