"""Receipts that nobody outside has a part in: they follow from what a world wanted, or from a fork.

    refused     its key stands for something else: `key_conflict`
    cancelled   its world took it back
    dropped     it is its parent's alone: a fork was made before its receipt came

All are errors with a code, after no attempt. A world that was promised one of these gets it in the
commit that makes it true.
"""

from __future__ import annotations

from holdfast.errors import KeyConflict
from holdfast.messages import Ingress, Intent, Receipt, Status, receipt_ingress

CANCELLED = "cancelled"
DROPPED = "dropped_by_fork"


def refused(intent: Intent) -> Ingress:
    """Under the identity of this one use of the key: what the key stands for has a receipt of its own."""
    return _error(
        intent.place_hash(),
        intent.effect_kind,
        KeyConflict.code,
        KeyConflict.hint,
        tag=intent.tag,
        correlation_id=intent.correlation_id,
    )


def cancelled(
    intent_hash: bytes,
    effect_kind: str,
    *,
    tag: str,
    correlation_id: str | None,
    redrive_of: bytes | None,
) -> Ingress:
    return _error(
        intent_hash,
        effect_kind,
        CANCELLED,
        "by its world",
        tag=tag,
        correlation_id=correlation_id,
        redrive_of=redrive_of,
    )


def dropped(intent: Intent) -> Ingress:
    return _error(
        intent.intent_hash,
        intent.effect_kind,
        DROPPED,
        "the world was forked before its receipt came",
        tag=intent.tag,
        correlation_id=intent.correlation_id,
        redrive_of=intent.redrive_of,
    )


def _error(
    intent_hash: bytes,
    effect_kind: str,
    code: str,
    error: str,
    *,
    tag: str,
    correlation_id: str | None,
    redrive_of: bytes | None = None,
) -> Ingress:
    told = Receipt(
        intent_hash,
        effect_kind,
        Status.ERROR,
        code=code,
        error=error,
        attempts=0,
        tag=tag,
        redrive_of=redrive_of,
    )
    return receipt_ingress(told, correlation_id=correlation_id)
