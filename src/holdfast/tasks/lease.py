"""Leases: granting, extending, expiring. `LeaseGranted`, `LeaseExtended`, `LeaseExpired`, and `TaskDead`
for a task that has outlived too many.

Nothing is granted before all leases that are overdue have expired. A decision ends a bounded number of them; if
that are not all, it grants nothing and says so (`Leased.overdue`), and is to be repeated at once. A task whose leases
expire may be what kills its workers, and takes those with it that are leased beside it. Each task's last
lease is therefore granted by itself (`rows.is_suspect`): nobody ends DEAD for what another one did.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid
from holdfast.store import tuples
from holdfast.store.api import Row, Txn, operation
from holdfast.tasks import board, dependents
from holdfast.tasks.decision import Decision
from holdfast.tasks.giving import LEASE_BYTES_MAX, Giving, Grant
from holdfast.tasks.records import Dead, Expired, Extended
from holdfast.tasks.rows import (
    KINDS,
    Body,
    Keys,
    Spec,
    Status,
    decode_body,
    int_at,
    keys_of,
    missing,
    pack_int,
    packed_text,
    spec_of,
)
from holdfast.tasks.runs import (
    Batch,
    batch_of,
    lane_of,
    run_of,
    run_row,
    status_of,
)
from holdfast.tasks.states import State

# Tasks whose leases one decision ends because their time is up, before it grants anything.
EXPIRED_MAX = 2_000
# Delayed tasks that one decision wakes, beyond what it was asked to grant.
SWEEP_EXTRA = 256
LEASE_BATCH_MAX = 1_000
# A decision that has parked this many leaves the rest to the next.
PARKED_MAX = 1_000
# A row of a lane may name many tasks: so many rows are looked at first, and bodies of a run at a time.
ROWS_FIRST = 16
BODIES_PAGE = 250
EXPIRIES_EXHAUSTED = "expiries_exhausted"


class Leased(Record, frozen=True):
    """What was granted, and whether there are suspects, which are granted only by themselves.

    `revocations` counts the leases that were ever taken from their workers: when it has changed, it
    is time to look whether one's own still hold. `overdue`: leases are left whose time is up. Nothing
    was granted, and the same request is to be made again at once.
    """

    grants: list[Grant]
    suspects: bool = False
    revocations: int = 0
    overdue: bool = False


@operation
def lease(
    txn: Txn,
    universe: str,
    worker: str,
    queues: list[str],
    limit: int,
    alone: bool = False,
    rooms: tuple[int, ...] = (),
    names: tuple[str, ...] = (),
) -> Leased:
    """Grant up to `limit` tasks, by priority and age, from the queues in the order given; of each kind
    up to its room, if `rooms` says so, and only those of `names`, if there are any.

    A suspect is granted when asked for `alone`, and then only one of them and nothing beside it.
    """
    decision = Decision(txn, universe)
    granted = grant(decision, worker, queues, limit, alone, rooms, frozenset(names))
    decision.close()
    return granted


def grant(
    decision: Decision,
    worker: str,
    queues: list[str],
    limit: int,
    alone: bool,
    rooms: tuple[int, ...],
    names: frozenset[str],
    *,
    swept: bool = False,
) -> Leased:
    """What an operation that leases does. `swept` if it has seen that nothing is overdue."""
    check_name("worker", worker)
    check_limit(limit)
    limit = min(limit, LEASE_BATCH_MAX)
    for queue in queues:
        check_name("queue", queue)
    left = list(rooms) or [limit] * len(KINDS)
    if len(left) != len(KINDS):
        raise Invalid(what="rooms", found=list(rooms), why="one for each kind, or none")
    if not swept:
        _expire(decision, EXPIRED_MAX)
        if _overdue(decision):
            revocations = decision.txn.count(decision.keys.revocations)
            return Leased([], False, revocations, overdue=True)
        decision.wake_due(limit + SWEEP_EXTRA)
        dependents.release(decision)
    decision.admit()
    grants: list[Grant] = []
    suspects = False
    for queue in queues:
        decision.recall(queue, names, limit)
    if alone and limit:
        for queue, kind in product(queues, KINDS):
            _grant_from(decision, worker, queue, kind, 1, grants, names, suspects=True)
            if grants:
                break
    if not grants:
        for queue in queues:
            for kind, room, one in _shares(decision, queue, limit, left, grants):
                had = len(grants)
                _grant_from(
                    decision, worker, queue, kind, room, grants, names, suspects=False, one=one
                )
                left[kind] -= len(grants) - had
    if not alone:
        # Of a queue without room there is nobody to make room for.
        suspects = any(
            decision.tally.now(queue, "suspect") and _room(decision, queue, 1) for queue in queues
        )
    return Leased(grants, suspects, decision.txn.count(decision.keys.revocations))


def _shares(
    decision: Decision, queue: str, limit: int, left: list[int], grants: list[Grant]
) -> Iterator[tuple[int, int, bool]]:
    """What kinds to grant from, in what order, how much, and whether to look no further than the first.
    Kinds are independent while there is room for all that their hands can take; where there is not,
    priority and age decide, task by task."""
    kinds = [kind for kind in KINDS if left[kind] > 0]
    ready = decision.tally.now
    size, aside_before = 0, decision.aside
    while kinds and size < LEASE_BYTES_MAX:
        total = sum(left[kind] for kind in kinds)
        room = _room(decision, queue, min(limit - len(grants), total))
        if room <= 0:
            return
        if room >= total or len(kinds) == 1:
            for kind in kinds:
                if ready(queue, "ready"):
                    yield kind, min(room, left[kind]), False
            return
        firsts = {kind: first for kind in kinds if (first := _first(decision, queue, kind))}
        kinds = sorted(firsts, key=lambda kind: firsts[kind])
        if len(kinds) > 1:
            had, aside = len(grants), decision.aside
            yield kinds[0], 1, True
            size += sum(len(grant.args) for grant in grants[had:])
            if decision.aside - aside_before >= PARKED_MAX:
                decision.wake(queue)
                return
            # One that was put aside has made way for another, of whatever kind that is.
            if (len(grants) == had and decision.aside == aside) or not left[kinds[0]]:
                del kinds[0]


def _first(decision: Decision, queue: str, kind: int) -> bytes:
    """Priority and age of the first task of a kind, in their order; empty for none."""
    lane = decision.keys.ready + packed_text(queue) + pack_int(kind)
    found = decision.txn.scan(lane, tuples.after(lane), 1)
    return found[0][0][len(lane) :] if found else b""


def _grant_from(
    decision: Decision,
    worker: str,
    queue: str,
    kind: int,
    limit: int,
    grants: list[Grant],
    names: frozenset[str],
    *,
    suspects: bool,
    one: bool = False,
) -> None:
    """Grant from a lane; `one`: the first task of it, or none."""
    txn, keys = decision.txn, decision.keys
    limit = _room(decision, queue, limit)
    if limit <= 0:
        return
    per_key = decision.limits(queue).per_key
    place = "suspect" if suspects else "ready"
    lane = (keys.suspects if suspects else keys.ready) + packed_text(queue) + pack_int(kind)
    giving = Giving(decision, worker, queue, place, grants)
    aside = 0
    start, more, asked = lane, True, min(limit, ROWS_FIRST)
    while more and giving.room(limit) and aside < PARKED_MAX and not (one and aside):
        page = txn.scan(start, tuples.after(lane), asked)
        more = len(page) == asked
        for key, row, first, last in _runs_of(txn, keys, page):
            if not giving.room(limit) or aside >= PARKED_MAX:
                break
            bodies = _front(txn, keys, row, first, last, limit - giving.count, giving.size)
            spec = spec_of(txn, keys, bodies[0].spec)
            if names and spec.name not in names:
                count = min(last + 1 - first, PARKED_MAX - aside)
                _shorten(txn, key, row, first, last, count)
                for seq in range(first, first + count):
                    decision.stray(pack_int(seq), bodies[0], spec, place)
                aside += count
            elif bodies[0].limit and not decision.begin_limited(spec, bodies[0].limit, per_key):
                decision.park(key, row, bodies[0], spec, place)
                aside += 1
            else:
                _shorten(txn, key, row, first, last, len(bodies))
                giving.give(first, bodies, spec, fresh=first < last)
        if more:
            start, asked = page[-1][0] + b"\x00", limit - giving.count
    if aside >= PARKED_MAX:
        decision.wake(queue)
    giving.save()


def _runs_of(txn: Txn, keys: Keys, page: list[Row]) -> list[tuple[bytes, bytes, int, int]]:
    """Rows of a lane, with the first and the last task of each. What single ones need is on its way."""
    rows = [(key, row, *run_of(row)) for key, row in page]
    txn.prefetch(
        prefix + row
        for _, row, first, last in rows
        if first == last
        for prefix in (keys.bodies, keys.statuses)
    )
    return rows


def _shorten(txn: Txn, key: bytes, row: bytes, first: int, last: int, count: int) -> None:
    """Take the first tasks of a row of a lane out of it."""
    txn.delete(key)
    if first + count <= last:
        txn.put(lane_of(key, row) + pack_int(first + count), run_row(first + count, last))


def _front(
    txn: Txn, keys: Keys, row: bytes, first: int, last: int, limit: int, size: int
) -> list[Body]:
    """The bodies of the first tasks of a row, as many as are not too much to grant at once."""
    if first == last:
        body_row = txn.get(keys.bodies + row)
        if body_row is None:
            raise missing(row)
        return [decode_body(body_row)]
    found: list[Body] = []
    last = min(last, first + limit - 1)
    at, end = keys.bodies + pack_int(first), tuples.after(keys.bodies)
    while first + len(found) <= last and size < LEASE_BYTES_MAX:
        page = txn.scan(at, end, min(last + 1 - first - len(found), BODIES_PAGE))
        if not page or page[-1][0] != keys.bodies + pack_int(first + len(found) + len(page) - 1):
            raise missing(pack_int(first + len(found)))
        at = page[-1][0] + b"\x00"
        for _, body_row in page:
            if size >= LEASE_BYTES_MAX:
                break
            body = decode_body(body_row)
            size += len(body.args)
            found.append(body)
    return found


def _room(decision: Decision, queue: str, wanted: int) -> int:
    """How many of those wanted the queue's own limit allows."""
    most = decision.limits(queue).concurrency
    if not most:
        return wanted
    return max(min(wanted, most - decision.tally.now(queue, "leased")), 0)


def sweep(decision: Decision, limit: int) -> int:
    """End leases whose time is up, wake tasks whose time has come, release dependents."""
    done = _expire(decision, limit)
    done += decision.wake_due(limit)
    done += dependents.release(decision)
    return done


def _expire(decision: Decision, limit: int) -> int:
    txn, keys, now_ns = decision.txn, decision.keys, decision.now_ns
    seen = 0
    while seen < limit and (overdue := _overdue(decision)):
        key, row = overdue[0]
        batch = codec.unpack_as(Batch, row)
        held = decision.leases.get(batch.lease)
        tasks = batch.named if held is None else batch.named + held.tasks()
        txn.delete(key)
        seen += len(tasks) + 1
        txn.prefetch(
            prefix + pack_int(seq) for seq in tasks for prefix in (keys.bodies, keys.statuses)
        )
        out: list[tuple[int, bytes, Status]] = []
        for seq in tasks:
            packed_seq = pack_int(seq)
            status = decision.status(packed_seq)
            if status.state != State.LEASED or status.lease != batch.lease:
                continue
            if status.expires_ns > now_ns:
                decision.leases.look_at(status.expires_ns, batch.lease, batch.worker, [seq])
            else:
                out.append((seq, packed_seq, status))
        if out:
            decision.log.say(Expired(batch.lease, [seq for seq, _, _ in out]))
            for seq, packed_seq, status in out:
                _give_up(decision, seq, packed_seq, status)
    return seen


def _overdue(decision: Decision) -> list[Row]:
    """The batch of leases that is overdue for the longest; empty if none is."""
    expiries = decision.keys.expiries
    return decision.txn.scan(expiries, expiries + pack_int(decision.now_ns + 1), 1)


def _give_up(decision: Decision, seq: int, packed_seq: bytes, was: Status) -> None:
    """What becomes of a task whose lease expired."""
    body, spec = decision.known(packed_seq)
    after = board.expired(was)
    decision.unlease(spec, body.limit)
    if after.expiries >= spec.expiries_max:
        bury(decision, seq, packed_seq, spec, after, EXPIRIES_EXHAUSTED)
        return
    decision.write(packed_seq, after)
    decision.enter(packed_seq, body, spec, after)


def bury(
    decision: Decision, seq: int, packed_seq: bytes, spec: Spec, was: Status, reason: str
) -> None:
    decision.log.say(Dead([seq], reason))
    decision.write(packed_seq, board.buried(was, reason, decision.now_ns))
    decision.ended(seq, spec, "dead", awaited=was.awaited)


class Hold(Record, frozen=True):
    """A lease that a worker has, and whether it has seen it go on since it last said so."""

    seq: int
    lease: int
    progressed: bool = False


@operation
def extend(txn: Txn, universe: str, generation: int, holds: list[Hold]) -> list[int]:
    """Let leases last as long again; when each runs out now, 0 for one that is lost.

    Without progress a lease ends with its window: it is then not extended any more, but still holds
    until it runs out.
    """
    check_limit(len(holds), "holds")
    decision = Decision(txn, universe)
    now_ns = decision.now_ns
    answers: list[int] = []
    said = Extended([], [], [], [])
    for hold in holds:
        packed_seq = pack_int(hold.seq)
        decision.leases.get(hold.lease)
        status = decision.status(packed_seq)
        if generation != txn.generation or not live(status, hold.lease, now_ns):
            answers.append(0)
            continue
        _, spec = decision.known(packed_seq)
        since_ns = now_ns if hold.progressed else status.progress_ns
        until_ns = min(now_ns + spec.lease_ns, since_ns + spec.window_ns)
        if until_ns <= status.expires_ns and not hold.progressed:
            answers.append(status.expires_ns)
            continue
        until_ns = max(until_ns, status.expires_ns)
        decision.write(packed_seq, board.extended(status, until_ns, hold.progressed, now_ns))
        said.tasks.append(hold.seq)
        said.leases.append(hold.lease)
        said.expires_ns.append(until_ns)
        said.progressed.append(hold.progressed)
        answers.append(until_ns)
    if said.tasks:
        decision.log.say(said)
    decision.close()
    return answers


def live(status: Status, lease: int, now_ns: int) -> bool:
    return status.state == State.LEASED and status.lease == lease and now_ns < status.expires_ns


# -- looking -------------------------------------------------------------------------------------


def next_due_ns(txn: Txn, universe: str) -> int | None:
    """When a task comes up, or a lease may run out, by store time; None for nothing in sight."""
    keys = keys_of(universe)
    if txn.scan(keys.ended, tuples.after(keys.ended), 1):
        return 0  # dependents that nobody has told yet
    times = [
        int_at(key, len(prefix))
        for prefix in (keys.delayed, keys.expiries)
        for key, _ in txn.scan(prefix, tuples.after(prefix), 1)
    ]
    return min(times, default=None)


def held_by(txn: Txn, universe: str, worker: str) -> list[tuple[int, int]]:
    """(seq, lease) of what a worker has leased: for one that lost an answer. It looks at every batch
    of leases that there is."""
    keys = keys_of(universe)
    found = []
    for key, row in txn.scan(keys.expiries, tuples.after(keys.expiries)):
        batch, tasks = batch_of(txn, keys, key, row)
        if batch.worker == worker:
            found += [(seq, batch.lease) for seq in tasks]
    return [one for one in found if holds(txn, universe, *one)]


def holds(txn: Txn, universe: str, seq: int, lease: int) -> bool:
    """Whether a lease is the task's current one. Whether its time is up is the commit's to judge."""
    keys = keys_of(universe)
    status = status_of(txn, keys, pack_int(seq))
    return status.state == State.LEASED and status.lease == lease
