"""Dispatches and the effects that made them: what becomes of one when the other has ended, or waits.

Operations, apart from the role that calls them (`dispatcher`), so that the store's writer loads neither
tmux nor anything else that types.
"""

from __future__ import annotations

from holdfast.authority import dispatch_log
from holdfast.authority.dispatch import DispatchRecord, DispatchStatus, intent_hash_of
from holdfast.durable import queue
from holdfast.store.api import Txn, operation
from holdfast.world import publish


@operation
def abandon_all(txn: Txn, universe: str, request_ids: list[str], reason: str) -> int:
    """Requests fail whose effects have ended; looked at again here, for one may have begun anew."""
    gone = [one for one in request_ids if not _has_effect(txn, universe, one)]
    return sum(dispatch_log.abandon.fn(txn, universe, one, reason) for one in gone)


@operation
def hasten(txn: Txn, universe: str, limit: int) -> int:
    """Have requests that were deferred tried at once; how many. One that is being tried is left."""
    hastened = 0
    for record in dispatch_log.listed(txn, universe, DispatchStatus.PENDING, None, limit):
        intent_hash = intent_hash_of(record.request_id)
        if not record.deferred or intent_hash is None:
            continue
        waits = publish.pending(txn, universe, intent_hash)
        if waits is not None and not waits.dead:
            hastened += queue.hasten.fn(txn, waits.queue(universe), waits.seq)
    return hastened


def without_effect(txn: Txn, universe: str, page: list[DispatchRecord]) -> list[str]:
    """Those of some requests whose effects have ended."""
    return [one.request_id for one in page if not _has_effect(txn, universe, one.request_id)]


def _has_effect(txn: Txn, universe: str, request_id: str) -> bool:
    intent_hash = intent_hash_of(request_id)
    if intent_hash is None:
        return True  # somebody else's to end
    found = publish.pending(txn, universe, intent_hash)
    return found is not None and not found.dead
