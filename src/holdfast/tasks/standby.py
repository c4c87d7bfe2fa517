"""Leases for a worker that waits: its request stands where commits are made (`store.standers`), and is
granted what a commit brings in that very commit.

It gets as much as it has free hands for, and nothing ahead: one that was stopped while it waited holds up
no more than it could have begun.
"""

from __future__ import annotations

from holdfast.clock import S
from holdfast.errors import NotYet
from holdfast.store.api import Txn, operation
from holdfast.tasks.decision import Decision
from holdfast.tasks.lease import Leased, grant, next_due_ns

# What comes due later than this is no news: a worker that waits looks up more often.
SOON_NS = 5 * S


@operation
def lease_when(
    txn: Txn,
    universe: str,
    worker: str,
    queues: list[str],
    limit: int,
    rooms: tuple[int, ...],
    names: tuple[str, ...],
    due_ns: int,
) -> Leased:
    """`lease`, once there is something to grant, or something comes due soon, of which the worker does
    not know: it looks at `due_ns` (0: nothing is in sight), and within `SOON_NS` anyway."""
    next_ns = next_due_ns(txn, universe)
    soon_ns = txn.now_ns + SOON_NS
    due = next_ns is not None and next_ns < (min(soon_ns, due_ns) if due_ns else soon_ns)
    decision = Decision(txn, universe)
    if not due and not any(_offers(decision, queue) for queue in queues):
        raise NotYet(what="task", worker=worker)
    swept = next_ns is None or next_ns > txn.now_ns
    granted = grant(decision, worker, queues, limit, False, rooms, frozenset(names), swept=swept)
    if not due and not granted.grants and not granted.suspects and not decision.aside:
        raise NotYet(what="task", worker=worker)
    decision.close()
    return granted


def _offers(decision: Decision, queue: str) -> bool:
    """Whether there may be something to grant: of many who stand most are tried in vain."""
    now = decision.tally.now
    return bool(now(queue, "ready") or now(queue, "suspect") or now(queue, "stray"))
