"""Tasks that wait for others: `after=[…]`.

A dependent is blocked while one of those it names has not ended. When one completes, it counts one
less; when one ends otherwise the dependent cannot run any more and is DEAD. A task that ended and is
awaited leaves a row behind (`e`), which this and the next decisions work off, a bounded number of
dependents each, so that no commit is as long as the longest list.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.store import tuples
from holdfast.tasks import board
from holdfast.tasks.decision import DEPENDENTS_MAX, Decision
from holdfast.tasks.records import Dead
from holdfast.tasks.rows import FRESH, pack_int, seq_of
from holdfast.tasks.states import State

DEPENDENCY_FAILED = "dependency_failed"


def block(decision: Decision, packed_seq: bytes, others: Sequence[int]) -> int | None:
    """Register a new task with those it waits for: how many, or None if one has failed already."""
    waits = 0
    for other in others:
        packed = pack_int(other)
        status = decision.status(packed)
        if status.state in (State.FAILED, State.DEAD):
            return None
        if status.state == State.COMPLETED:
            continue
        decision.txn.put(decision.keys.dependents + packed + packed_seq, packed_seq)
        if not status.awaited:
            if status == FRESH:
                decision.single_out(packed, decision.known(packed)[1])
            decision.write(packed, replace(status, awaited=True))
        waits += 1
    return waits


def release(decision: Decision, limit: int = DEPENDENTS_MAX) -> int:
    """Tell dependents of tasks that have ended, of those that end by this as well; how many."""
    txn, keys = decision.txn, decision.keys
    told = 0
    while told < limit:
        ended = txn.scan(keys.ended, tuples.after(keys.ended), 1)
        if not ended:
            return told
        key, place = ended[0]
        packed = key[len(keys.ended) :]
        completed = place == b"completed"
        mine = keys.dependents + packed
        found = txn.scan(mine, tuples.after(mine), limit - told)
        for row, packed_seq in found:
            txn.delete(row)
            _tell(decision, packed_seq, completed)
        told += len(found)
        if told < limit:
            txn.delete(key)
            told += 1
    return told


def _tell(decision: Decision, packed_seq: bytes, completed: bool) -> None:
    # One that waits for others is in no run.
    status = decision.resting(packed_seq)
    if status.state != State.WAITING or not status.waits:
        return  # cancelled meanwhile, or dead by another's end
    body, spec = decision.known(packed_seq)
    if completed:
        after = replace(status, waits=status.waits - 1)
        decision.write(packed_seq, after)
        if not after.waits:
            decision.tally.add(spec.queue, "blocked", -1)
            decision.enter(packed_seq, body, spec, after)
        return
    seq = seq_of(packed_seq)
    decision.log.say(Dead([seq], DEPENDENCY_FAILED))
    decision.write(packed_seq, board.buried(status, DEPENDENCY_FAILED, decision.now_ns))
    decision.tally.add(spec.queue, "blocked", -1)
    decision.ended(seq, spec, "dead", awaited=status.awaited)
