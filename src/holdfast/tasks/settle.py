"""Reports of workers: `TaskCompleted`, `TaskFailed`, and `TaskCancelled` for whoever has lost its lease.

An answer to a report is COMMITTED, CANCELLED (the lease was lost: discard the work; it is logged) or
REJECTED (no such task, or a lease that was never given: the worker's bug; nothing is logged). The same
report again, under the lease that completed the task, gets the first answer again.
"""

from __future__ import annotations

from enum import IntEnum

from holdfast.codec import Record
from holdfast.config import (
    BLOB_THRESHOLD_BYTES,
    ERROR_CODE_CHARS_MAX,
    ERROR_TEXT_CHARS_MAX,
    MESSAGE_BYTES_MAX,
)
from holdfast.durable.bounds import check_limit, check_name
from holdfast.retry import Backoff, spread
from holdfast.store import blobs
from holdfast.store.api import Txn, operation
from holdfast.tasks import board, dependents
from holdfast.tasks.decision import Decision
from holdfast.tasks.lease import EXPIRIES_EXHAUSTED, Leased, bury, grant, live
from holdfast.tasks.records import Cancelled, Completed, Failed, digest_of
from holdfast.tasks.rows import (
    FRESH,
    Body,
    Spec,
    Status,
    pack,
    pack_int,
    spec_of,
)
from holdfast.tasks.states import State


class End(IntEnum):
    """How an attempt ended, as its worker saw it."""

    OK = 0
    FAILED = 1
    # It says itself that trying again is useless.
    REFUSED = 2
    # The process it ran in died.
    EXITED = 3
    # It was not begun: given back, and counted as nothing.
    RELEASED = 4


class Answer(IntEnum):
    COMMITTED = 0
    CANCELLED = 1
    REJECTED = 2


_ENDS = frozenset(End)
_COUNTS = {
    End.FAILED: "failure",
    End.REFUSED: "failure",
    End.EXITED: "expiry",
    End.RELEASED: "",
}


class Report(Record, frozen=True):
    seq: int
    lease: int
    end: int = End.OK
    result: bytes = b""
    reason: str = ""
    error: str = ""


@operation
def settle(
    txn: Txn, universe: str, worker: str, generation: int, reports: list[Report]
) -> list[int]:
    """Take reports of a worker; an `Answer` for each."""
    decision = Decision(txn, universe)
    answers = _settle(decision, worker, generation, reports)
    dependents.release(decision)
    decision.close()
    return answers


class Turned(Record, frozen=True):
    answers: list[int]
    leased: Leased


@operation
def turn(
    txn: Txn,
    universe: str,
    worker: str,
    generation: int,
    reports: list[Report],
    queues: list[str],
    limit: int,
    alone: bool = False,
    rooms: tuple[int, ...] = (),
    names: tuple[str, ...] = (),
) -> Turned:
    """`settle` and `lease` in one commit."""
    decision = Decision(txn, universe)
    answers = _settle(decision, worker, generation, reports)
    granted = grant(decision, worker, queues, limit, alone, rooms, frozenset(names))
    decision.close()
    return Turned(answers, granted)


def _settle(decision: Decision, worker: str, generation: int, reports: list[Report]) -> list[int]:
    check_limit(len(reports), "reports")
    check_name("worker", worker)
    txn, keys, now_ns = decision.txn, decision.keys, decision.now_ns
    get, put, statuses = txn.get, txn.put, keys.statuses
    if generation > txn.generation:
        return [Answer.REJECTED] * len(reports)  # nobody was ever given such leases
    leases_given = txn.count(keys.lease)
    current = generation == txn.generation
    answers: list[int] = []
    tasks: list[int] = []
    leases: list[int] = []
    results: list[bytes] = []
    # Those of runs, which have no row to be looked at: by their spec.
    finished: dict[bytes, list[int]] = {}
    lease, held, live_run = 0, None, False
    last, row = None, b""
    fetched = False
    for index, report in enumerate(reports):
        if report.lease != lease:
            lease, last = report.lease, None
            held = decision.leases.get(lease) if current else None
            live_run = held is not None and now_ns < held.held.expires_ns
        result = report.result
        if live_run and report.end == End.OK and len(result) <= BLOB_THRESHOLD_BYTES:
            assert held is not None
            name = held.take(report.seq)
            if name is not None:
                if result != last:
                    last, row = result, pack(board.completed(held.status, now_ns, result))
                put(statuses + pack_int(report.seq), row)
                answers.append(Answer.COMMITTED)
                finished.setdefault(name, []).append(report.seq)
                tasks.append(report.seq)
                leases.append(lease)
                results.append(result)
                continue
        if not fetched:
            _fetch(decision, reports[index:])
            fetched = True
        packed_seq = pack_int(report.seq)
        was = decision.status(packed_seq)
        if was is FRESH or (not 0 < report.lease <= leases_given and current):
            # Never granted, or collected since: nothing is known of such a lease.
            known = was is not FRESH or get(keys.bodies + packed_seq) is not None
            answers.append(Answer.REJECTED if current or not known else Answer.CANCELLED)
            continue
        if not current or not live(was, report.lease, now_ns):
            again = (
                report.end == End.OK
                and was.state == State.COMPLETED
                and was.lease == report.lease
                and current
            )
            if not again:
                decision.log.say(Cancelled(report.seq, report.lease, worker))
            answers.append(Answer.COMMITTED if again else Answer.CANCELLED)
            continue
        if len(result) > MESSAGE_BYTES_MAX or report.end not in _ENDS:
            answers.append(Answer.REJECTED)
            continue
        answers.append(Answer.COMMITTED)
        body, spec = decision.known(packed_seq)
        decision.unlease(spec, body.limit)
        if report.end != End.OK:
            _fail(decision, report, packed_seq, body, spec, was)
            continue
        blob = b""
        if len(result) > BLOB_THRESHOLD_BYTES:
            result, blob = b"", blobs.put(txn, result)
        decision.write(packed_seq, board.completed(was, now_ns, result, blob))
        decision.ended(report.seq, spec, "completed", awaited=was.awaited)
        tasks.append(report.seq)
        leases.append(report.lease)
        results.append(report.result)
    for name, seqs in finished.items():
        spec = spec_of(txn, keys, name)
        decision.unlease(spec, count=len(seqs))
        decision.end_all(seqs, spec, "completed")
    if tasks:
        decision.log.say(Completed(tasks, leases, digest_of(results)))
    return answers


def _fetch(decision: Decision, reports: list[Report]) -> None:
    """Rows of tasks that are not in runs, at once."""
    keys, leases = decision.keys, decision.leases
    single, held = (keys.statuses, keys.bodies), (keys.bodies,)
    decision.txn.prefetch(
        prefix + pack_int(one.seq)
        for one in reports
        for prefix in (single if leases.get(one.lease) is None else held if one.end else ())
    )


def _fail(
    decision: Decision, report: Report, packed_seq: bytes, body: Body, spec: Spec, was: Status
) -> None:
    now_ns = decision.now_ns
    end = End(report.end)
    counts = _COUNTS[end]
    reason = (report.reason or end.name.lower())[:ERROR_CODE_CHARS_MAX]
    error = report.error[:ERROR_TEXT_CHARS_MAX]
    failures = was.failures + (counts == "failure")
    final = end == End.REFUSED or (counts == "failure" and failures >= spec.attempts)
    not_before_ns = 0
    if counts and not final:
        tries = failures if counts == "failure" else was.expiries + 1
        backoff = Backoff(spec.backoff_ns, 2.0, spec.backoff_ns_max)
        not_before_ns = now_ns + max(backoff.delay_ns(tries, spread(report.seq, tries)), 1)
    decision.log.say(Failed(report.seq, report.lease, reason, error, counts, final, not_before_ns))
    after = board.failed(
        was,
        reason=reason,
        error=error,
        counts=counts,
        final=final,
        not_before_ns=not_before_ns,
        at_ns=now_ns,
    )
    if final:
        decision.write(packed_seq, after)
        decision.ended(report.seq, spec, "failed", awaited=was.awaited)
    elif counts == "expiry" and after.expiries >= spec.expiries_max:
        bury(decision, report.seq, packed_seq, spec, after, EXPIRIES_EXHAUSTED)
    else:
        decision.write(packed_seq, after)
        decision.enter(packed_seq, body, spec, after)
