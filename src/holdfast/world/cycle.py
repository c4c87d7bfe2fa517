"""One cycle of a world, as it is committed: entries, cursor, intents, snapshot, all or nothing.

`commit` runs where commits are applied, for many worlds of a worker in one call. Each cycle counts
by itself: one that is fenced, or whose journal has gone on, leaves nothing behind and takes nobody
along. The lease is judged there too, by the time of the commit.
"""

from __future__ import annotations

from typing import Any

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.durable.bounds import check_limit
from holdfast.durable.lease import Lease, release
from holdfast.durable.queue import Token
from holdfast.errors import Conflict, HeadMoved, HoldfastError, Invalid, to_wire
from holdfast.messages import TIMER_SET, Intent
from holdfast.store.api import Txn, operation
from holdfast.store.txn import attempt
from holdfast.world import catalog, history, publish, timers, unknown
from holdfast.world.catalog import UNKNOWN_EVENT, subject_of
from holdfast.world.history import Bound
from holdfast.world.need import Need
from holdfast.world.redrive import Letter, failures
from holdfast.world.timers import Alarm


class Failed(Record, frozen=True):
    """An ingress that becomes a dead letter: its reducer raised, or no code knew it in time."""

    seq: int
    body: bytes
    error: str
    code: str = "reducer_failed"
    type: str = ""
    key: str = ""


class Carried(Record, frozen=True):
    """An effect, or a timer, that ends in the commit in which its world goes on: which it is, and
    who did it or where it waits."""

    token: Token | None
    intent_hash: bytes
    alarm: Alarm | None = None


class Cycle(Record, frozen=True):
    """One world's work, ready to be committed under its lease."""

    universe: str
    world_id: str
    lease: Lease
    expected_head: int
    to_seq: int
    bodies: list[bytes]
    intents: list[Intent]
    failed: list[Failed]
    snapshot: bytes | None
    snapshots_kept: int
    # Nothing was left in the inbox: if that is still so at the commit, the hint goes.
    drained: bool
    # The store time when the reducers ran: delays count from there.
    wanted_ns: int = 0
    # Effects whose receipts were handled last, and timers, before they were in the inbox: they are
    # settled with it, and get the numbers up to `to_seq`.
    carried: tuple[Carried, ...] = ()
    # How much history the world keeps; None: all of it.
    history: Bound | None = None
    # The item that the world stopped before, as one that its code did not know, is behind it.
    clears: bool = False

    @property
    def size(self) -> int:
        """About how much there is to send."""
        wanted = sum(len(intent.params) for intent in self.intents)
        return sum(map(len, self.bodies)) + wanted + len(self.snapshot or b"")


@operation
def commit(txn: Txn, cycles: list[Cycle]) -> list[list[Any] | None]:
    """Commit cycles, each all or nothing; None for each that is, else its error (`from_wire`)."""
    check_limit(len(cycles), "cycles")
    told: dict[int, Exception] = {}
    sound: list[Cycle] = []
    for index, cycle in enumerate(cycles):
        try:
            _check(txn, cycle)
            sound.append(cycle)
        except HoldfastError as error:
            told[index] = error
    # All at once, as a rule. If something cannot be done, each by itself, to find out whose it is.
    if attempt(txn, apply_all, sound) is not None:
        for index, cycle in enumerate(cycles):
            if index not in told:
                raised = attempt(txn, apply, cycle)
                if raised is not None:
                    told[index] = raised
    return [_answer(cycle, told.get(index)) for index, cycle in enumerate(cycles)]


@operation
def leave(txn: Txn, cycles: list[Cycle], held: list[Lease]) -> None:
    """The last cycles of worlds, and their leases given back; what cannot be done is left undone:
    a lease runs out, and a snapshot is made another time."""
    check_limit(len(cycles), "cycles")
    for cycle in cycles:
        attempt(txn, apply, cycle)
    for lease in held:
        attempt(txn, release, lease)


@operation
def stop(
    txn: Txn,
    universe: str,
    world_id: str,
    held: Lease,
    need: Need,
    seq: int,
    last: Cycle | None = None,
    since_ns: int = 0,
    height: int = 0,
    why: str = "",
) -> None:
    """Give a world back before an item that its host does not know: nothing of it is consumed until
    a worker that knows it has the world. Before it there may be a last snapshot to make. Seq 0: it is
    in the journal, or the world type is what the host does not know. `since_ns`: it has waited since
    then, behind an item of the same need that this host has given up. `height` and `why`: an entry in the
    journal that other code made, and that the host repeats otherwise."""
    txn.require_live(held)
    if last is not None:
        attempt(txn, apply, last)
    if seq and inbox.cursor(txn, subject_of(universe, world_id)) != seq - 1:
        raise Conflict(world=world_id, seq=seq, why="the inbox has gone on")
    record = catalog.record(txn, universe, world_id)
    unknown.mark(txn, record, need, seq, since_ns, height, why)
    release.fn(txn, held)


@operation
def apply(txn: Txn, cycle: Cycle) -> None:
    """The transaction of one cycle."""
    _check(txn, cycle)
    apply_all.fn(txn, [cycle])


@operation
def apply_all(txn: Txn, cycles: list[Cycle]) -> None:
    """The transactions of cycles whose leases are good, as one."""
    carried = [one.token for cycle in cycles for one in cycle.carried if one.token is not None]
    if carried:
        queue.ack.fn(txn, carried)
    for cycle in cycles:
        _advance(txn, cycle)
    # What is delivered by it leaves a new hint where the last one was taken away.
    intents: list[Intent] = []
    for cycle in cycles:
        if any(intent.effect_kind == TIMER_SET for intent in cycle.intents):
            publish.publish.fn(txn, cycle.intents, cycle.wanted_ns)
        else:
            intents += cycle.intents
    if intents:
        publish.publish.fn(txn, intents)


def _check(txn: Txn, cycle: Cycle) -> None:
    """The lease and the head, judged before anything is written."""
    txn.require_live(cycle.lease)
    subject = subject_of(cycle.universe, cycle.world_id)
    found = journal.head(txn, subject).height
    if found != cycle.expected_head:
        raise HeadMoved(subject=subject, expected=cycle.expected_head, found=found)
    for failed in cycle.failed:
        if failed.code == UNKNOWN_EVENT:
            now = catalog.record(txn, cycle.universe, cycle.world_id).unknown
            if now is None or not now.given_up or now.seq != failed.seq:
                raise Conflict(world=cycle.world_id, seq=failed.seq, why="it was not given up")
    if cycle.carried:
        last = inbox.last_seq(txn, subject)
        if last != cycle.to_seq - len(cycle.carried):
            raise Conflict(world=cycle.world_id, seq=last, why="others came first")
        for one in cycle.carried:
            if one.alarm is not None:
                if not timers.rings(
                    txn, cycle.universe, cycle.world_id, one.intent_hash, one.alarm
                ):
                    raise Conflict(world=cycle.world_id, why="a timer is not the one that is due")
                continue
            waits = publish.pending(txn, cycle.universe, one.intent_hash)
            if waits is None or waits.dead or waits.world_id != cycle.world_id:
                raise Conflict(world=cycle.world_id, why="an effect has had its receipt")
            if one.token is None or not queue.holds(txn, one.token):
                raise Conflict(world=cycle.world_id, why="a claim is lost")


def _advance(txn: Txn, cycle: Cycle) -> None:
    universe, world_id = cycle.universe, cycle.world_id
    subject = subject_of(universe, world_id)
    head = journal.append(txn, subject, cycle.bodies, expected_head=cycle.expected_head)
    if cycle.bodies:
        for one in cycle.carried:
            if one.alarm is None:
                publish.end(txn, universe, one.intent_hash)
            else:
                timers.end(txn, universe, world_id, one.alarm)
        inbox.advance(txn, subject, cycle.to_seq, len(cycle.carried))
    for failed in cycle.failed:
        letter = codec.pack(Letter(world_id, failed.seq, failed.body, failed.key))
        seq = queue.post_dead.fn(txn, failures(universe), letter, failed.code, failed.error)
        if failed.code == UNKNOWN_EVENT:
            unknown.keep(txn, universe, world_id, failed.seq, failed.type, seq)
    if cycle.clears:
        unknown.clear(txn, universe, world_id)
    txn.notify(entries_topic(subject))
    if cycle.snapshot is not None:
        snapshot.save(txn, subject, head.height, cycle.snapshot)
        snapshot.set_baseline(txn, subject, head.height)
        journal.checkpoint(txn, subject, head.height)
        bound = cycle.history
        window = None if bound is None else bound.window
        snapshot.prune(txn, subject, cycle.snapshots_kept, window)
        history.plan(txn, universe, world_id, bound)
    if cycle.drained:
        catalog.settle.fn(txn, universe, world_id, cycle.lease.worker)


def _answer(cycle: Cycle, error: Exception | None) -> list[Any] | None:
    if error is None:
        return None
    if not isinstance(error, HoldfastError):
        error = Invalid(what="cycle", world=cycle.world_id, why=repr(error))
    return to_wire(error)


def entries_topic(subject: str) -> str:
    """Notified when a world's journal goes on."""
    return f"entries/{subject}"
