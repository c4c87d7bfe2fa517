"""Synthetic receipts: receipts that the runtime makes itself, without calling an effect.

    key_conflict_receipt      the key was used with other parameters: `key_conflict`
    cancelled_receipt         the world cancelled the effect
    dropped_by_fork_receipt   the effect belongs to the parent: a fork was made before its receipt

All are errors with a code and no attempts. A world gets such a receipt in the commit that causes
it.
"""

from __future__ import annotations

from holdfast.errors import KeyConflict
from holdfast.messages import Ingress, Intent, IntentReceipt, ReceiptStatus, receipt_ingress

CANCELLED = "cancelled"
DROPPED = "dropped_by_fork"


def key_conflict_receipt(intent: Intent) -> Ingress:
    """Make the receipt of one conflicting use of a key, under the positional id of that use. The
    first use of the key has its own receipt."""
    return _error_receipt(
        intent.positional_id(),
        intent.effect_kind,
        KeyConflict.code,
        KeyConflict.hint,
        tag=intent.tag,
        correlation_id=intent.correlation_id,
    )


def cancelled_receipt(
    intent_hash: bytes,
    effect_kind: str,
    *,
    tag: str,
    correlation_id: str | None,
    redrive_of: bytes | None,
) -> Ingress:
    """Make the receipt of an effect that its world cancelled."""
    return _error_receipt(
        intent_hash,
        effect_kind,
        CANCELLED,
        "by its world",
        tag=tag,
        correlation_id=correlation_id,
        redrive_of=redrive_of,
    )


def dropped_by_fork_receipt(intent: Intent) -> Ingress:
    """Make the receipt of a parent's effect that a fork does not inherit."""
    return _error_receipt(
        intent.intent_hash,
        intent.effect_kind,
        DROPPED,
        "the world was forked before its receipt came",
        tag=intent.tag,
        correlation_id=intent.correlation_id,
        redrive_of=intent.redrive_of,
    )


def _error_receipt(
    intent_hash: bytes,
    effect_kind: str,
    code: str,
    error: str,
    *,
    tag: str,
    correlation_id: str | None,
    redrive_of: bytes | None = None,
) -> Ingress:
    receipt = IntentReceipt(
        intent_hash,
        effect_kind,
        ReceiptStatus.ERROR,
        code=code,
        error=error,
        attempts=0,
        tag=tag,
        redrive_of=redrive_of,
    )
    return receipt_ingress(receipt, correlation_id=correlation_id)
