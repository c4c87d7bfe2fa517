"""What operators and time do to tasks: cancel, redrive, limits, retention.

A task that is cancelled while it runs is DEAD at once; its lease is none any more, and its worker is
told. Whatever the worker reports is answered CANCELLED.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from holdfast.config import BATCH_MAX
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid, NotFound
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.tasks import dependents
from holdfast.tasks.decision import Decision
from holdfast.tasks.lease import ROWS_FIRST, bury, live, sweep
from holdfast.tasks.records import Created, digest_of
from holdfast.tasks.rows import (
    FRESH,
    Limits,
    int_at,
    is_plain,
    keys_of,
    limits_of,
    pack,
    pack_int,
    packed_text,
    spec_of,
)
from holdfast.tasks.states import State


@operation
def cancel(txn: Txn, universe: str, seqs: list[int], reason: str = "cancelled") -> list[bool]:
    """End tasks that have not ended, running ones too; whether each was ended by this."""
    check_limit(len(seqs), "tasks")
    check_name("reason", reason)
    decision = Decision(txn, universe)
    found: list[bool] = []
    for seq in seqs:
        packed_seq = pack_int(seq)
        body = decision.body(packed_seq)
        if body is None:
            raise NotFound(what="task", task=seq)
        status = decision.status(packed_seq) if is_plain(body) else decision.resting(packed_seq)
        if status.state not in (State.WAITING, State.LEASED):
            found.append(False)
            continue
        spec = spec_of(txn, decision.keys, body.spec)
        if status.state == State.LEASED:
            decision.unlease(spec, body.limit)
            txn.add(decision.keys.revocations, 1)
            txn.notify(decision.keys.revoked)
        else:
            decision.leave(packed_seq, body, spec, status)
        bury(decision, seq, packed_seq, spec, status, reason)
        found.append(True)
    dependents.release(decision)
    decision.close()
    return found


@operation
def redrive(txn: Txn, universe: str, seqs: list[int]) -> list[int]:
    """Submit FAILED and DEAD tasks anew, with all their attempts; the seqs of the new tasks.

    One that was redriven already answers with the task in its place; any other state is Invalid.
    """
    check_limit(len(seqs), "tasks")
    decision = Decision(txn, universe)
    keys = decision.keys
    answers: list[int] = []
    created: list[int] = []
    rows: list[bytes] = []
    seq = last = txn.count(keys.seq)
    for old in seqs:
        packed_old = pack_int(old)
        body = decision.body(packed_old)
        if body is None:
            raise NotFound(what="task", task=old)
        status = decision.status(packed_old)
        if status.redriven_by:
            answers.append(status.redriven_by)
            continue
        if status.state not in (State.FAILED, State.DEAD):
            raise Invalid(
                what="task",
                task=old,
                why="only FAILED and DEAD tasks are redriven",
                state=State(status.state).name,
            )
        seq += 1
        packed_seq = pack_int(seq)
        if body.blob:
            blobs.retain.fn(txn, body.blob)
        anew = replace(
            body,
            created_ns=decision.now_ns,
            generation=txn.generation,
            not_before_ns=0,
            after=[],
            redrive_of=old,
        )
        row = pack(anew)
        txn.put(keys.bodies + packed_seq, row)
        spec = spec_of(txn, keys, body.spec)
        if body.key:
            txn.put(keys.keys + tuples.pack((spec.name, body.key)), packed_seq)
        decision.write(packed_old, replace(status, redriven_by=seq))
        decision.enter(packed_seq, anew, spec, FRESH)
        created.append(seq)
        rows.append(row)
        answers.append(seq)
    if created:
        txn.add(keys.seq, seq - last)
        decision.log.say(Created(created, digest_of(rows)))
    decision.close()
    return answers


@operation
def limit(txn: Txn, universe: str, queue: str, limits: Limits, declared: bool = False) -> None:
    """How many tasks of a queue may be leased at a time. What is leased already stays so.

    What an app has `declared` counts when it is declared anew: an operator's word stands until then.
    """
    check_name("queue", queue)
    for what in ("concurrency", "per_key"):
        if not 0 <= getattr(limits, what) <= 1_000_000:
            raise Invalid(what=what, found=getattr(limits, what), min=0, max=1_000_000)
    keys = keys_of(universe)
    key = keys.limits + packed_text(queue)
    was = limits_of(txn, keys, queue)
    said = (limits.concurrency, limits.per_key)
    if declared and was.declared == said:
        return
    now = Limits(*said, said if declared else was.declared)
    if now == was:
        return
    txn.put(key, pack(now))
    decision = Decision(txn, universe)
    _unpark(decision, queue)
    decision.wake(queue)
    decision.close()


def _unpark(decision: Decision, queue: str) -> None:
    """What is parked is looked at anew: whatever still has no room is parked again. If there is more
    than a commit should take, the rest follows as leases of its limit end."""
    txn, keys = decision.txn, decision.keys
    parked = keys.parked + packed_text(queue)
    for key, packed_seq in txn.scan(parked, tuples.after(parked), BATCH_MAX):
        txn.delete(key)
        body, spec = decision.known(packed_seq)
        decision.tally.add(queue, "parked", -1)
        decision.enter(packed_seq, body, spec, decision.resting(packed_seq))


@operation
def report_progress(txn: Txn, universe: str, said: list[tuple[int, int, bytes]]) -> None:
    """What running tasks say of themselves, (seq, lease, text). Soft state: it is not in the log."""
    decision = Decision(txn, universe)
    for seq, lease_no, text in said:
        packed_seq = pack_int(seq)
        if live(decision.status(packed_seq), lease_no, decision.now_ns):
            txn.put(decision.keys.progress + packed_seq, text)
            txn.notify(decision.keys.task_topic(seq))


@operation
def maintain(txn: Txn, universe: str, limit: int) -> int:
    """Sweep, and forget tasks whose retention is over; how much there was to do."""
    check_limit(limit)
    decision = Decision(txn, universe)
    done = sweep(decision, limit)
    done += _collect(decision, limit)
    decision.close()
    return done


def _collect(decision: Decision, limit: int) -> int:
    """Forget the first tasks whose retention is over, `limit` of them at most; how many."""
    txn, keys = decision.txn, decision.keys
    over: list[int] = []
    at, end = keys.retained, keys.retained + pack_int(decision.now_ns + 1)
    # A row names the tasks that one decision ended: one of them, or thousands.
    asked = min(ROWS_FIRST, limit)
    while len(over) < limit:
        page = txn.scan(at, end, asked)
        for key, row in page:
            room = limit - len(over)
            if not room:
                break
            txn.delete(key)
            seqs = msgspec.msgpack.decode(row, type=list[int])
            over += seqs[:room]
            rest = seqs[room:]
            if rest:
                until = pack_int(int_at(key, len(keys.retained)))
                txn.put(keys.retained + until + pack_int(rest[0]), pack(rest))
        if len(page) < asked:
            break
        at, asked = page[-1][0] + b"\x00", limit - len(over)
    packed = [pack_int(seq) for seq in over]
    txn.prefetch(prefix + one for one in packed for prefix in (keys.bodies, keys.statuses))
    for packed_seq in packed:
        _forget(decision, packed_seq)
    return len(over)


def _forget(decision: Decision, packed_seq: bytes) -> None:
    txn, keys = decision.txn, decision.keys
    body = decision.body(packed_seq)
    if body is None:
        return
    status = decision.status(packed_seq)
    spec = spec_of(txn, keys, body.spec)
    for blob in (body.blob, status.blob):
        if blob:
            blobs.release.fn(txn, blob)
    if body.key:
        key = keys.keys + tuples.pack((spec.name, body.key))
        if txn.get(key) == packed_seq:
            txn.delete(key)
    txn.delete(keys.bodies + packed_seq)
    txn.delete(keys.statuses + packed_seq)
    txn.delete(keys.progress + packed_seq)
    decision.tally.add(spec.queue, State(status.state).name.lower(), -1)
