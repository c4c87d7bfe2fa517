"""Parked lease requests (long poll): the writer holds a worker's request (`store.parked_requests`) and
grants tasks in the commit that submits them.

A parked request asks only for idle executor slots and prefetches nothing. A worker that is
suspended while its request is parked therefore delays no more tasks than it can start.
"""

from __future__ import annotations

from holdfast.clock import S
from holdfast.errors import NothingToDo
from holdfast.store.api import Txn, operation
from holdfast.tasks.leases import GrantRequest, LeaseResult, grant_tasks, next_due_ns
from holdfast.tasks.unit_of_work import UnitOfWork

# A parked request ignores due times later than this, because its worker polls more often.
SOON_NS = 5 * S


@operation("tasks.lease_or_park")
def lease_or_park(txn: Txn, universe: str, request: GrantRequest, due_ns: int) -> LeaseResult:
    """Lease tasks, or stay parked while there is nothing to grant.

    The request also returns when a due time that the worker does not know is near. The worker polls
    at `due_ns` (0: it knows none), and within `SOON_NS` in any case.
    """
    next_ns = next_due_ns(txn, universe)
    soon_ns = txn.now_ns + SOON_NS
    due = next_ns is not None and next_ns < (min(soon_ns, due_ns) if due_ns else soon_ns)
    unit = UnitOfWork(txn, universe)
    if not due and not any(_may_grant(unit, queue) for queue in request.queues):
        raise NothingToDo(what="task", worker=request.worker)
    swept = next_ns is None or next_ns > txn.now_ns
    granted = grant_tasks(unit, request, swept=swept)
    if not due and not granted.grants and not granted.suspects and not unit.skipped:
        raise NothingToDo(what="task", worker=request.worker)
    unit.close()
    return granted


def _may_grant(unit: UnitOfWork, queue: str) -> bool:
    """Whether the counters show a task to grant. This keeps the retry of many parked requests
    cheap.
    """
    count = unit.counts.current
    return bool(count(queue, "ready") or count(queue, "suspect") or count(queue, "stray"))
