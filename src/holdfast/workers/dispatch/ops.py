"""Dispatch operations: reconcile dispatch requests with the effects that created them.

They are separate from the service that calls them (`dispatcher`), so that the store writer does not
import tmux code.
"""

from __future__ import annotations

from holdfast.dispatch import log
from holdfast.dispatch.request import DispatchRecord, DispatchStatus, intent_hash_of
from holdfast.durable import queue
from holdfast.store.api import Txn, operation
from holdfast.world import intents


@operation("dispatch.abandon_requests")
def abandon_requests(txn: Txn, universe: str, request_ids: list[str], reason: str) -> int:
    """Fail requests whose effects have ended. The check is repeated here, because an effect may
    have restarted.
    """
    orphaned = [
        request_id for request_id in request_ids if not _has_effect(txn, universe, request_id)
    ]
    return sum(log.abandon.fn(txn, universe, request_id, reason) for request_id in orphaned)


@operation("dispatch.expedite_deferred")
def expedite_deferred(txn: Txn, universe: str, limit: int) -> int:
    """Make deferred requests ready now, except those in progress. Returns their number."""
    expedited = 0
    for record in log.list_by_status(txn, universe, DispatchStatus.PENDING, None, limit):
        intent_hash = intent_hash_of(record.request_id)
        if not record.deferred or intent_hash is None:
            continue
        pending = intents.find_pending(txn, universe, intent_hash)
        if pending is not None and not pending.dead:
            expedited += queue.expedite.fn(txn, pending.queue(universe), pending.seq)
    return expedited


def requests_without_effect(txn: Txn, universe: str, page: list[DispatchRecord]) -> list[str]:
    """Return the ids of requests whose effects have ended."""
    return [
        record.request_id for record in page if not _has_effect(txn, universe, record.request_id)
    ]


def _has_effect(txn: Txn, universe: str, request_id: str) -> bool:
    intent_hash = intent_hash_of(request_id)
    if intent_hash is None:
        return True  # not created by an effect
    pending = intents.find_pending(txn, universe, intent_hash)
    return pending is not None and not pending.dead
