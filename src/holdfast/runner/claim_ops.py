"""Claim operations of a runner: one commit claims from queue and timers, one releases unstarted claims.

`claim_batch` is one operation because its steps depend on each other. Timers get their reserved slots
first, the queue gets the rest, and timers get the slots that the queue left empty. Neither starves the
other, and no slot stays empty while an item is due. Timers are claimed by due time.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.codec import Record
from holdfast.config import BATCH_MAX
from holdfast.durable import queue as queues
from holdfast.durable.queue import (
    Admission,
    Claim,
    ClaimToken,
    ItemFailure,
    JoinedOperation,
    RetryBudget,
)
from holdfast.errors import ClaimLost, NotFound
from holdfast.store.api import Txn, find_operation, operation


class ClaimedBatch(Record, frozen=True):
    items: list[Claim]
    timers: list[Claim]
    # Number of due items that were not admitted.
    not_admitted: int = 0


class ClaimRequest(Record, frozen=True):
    """A runner's request: up to `limit` items, `reserved` of them from timers first. An empty `timers`
    means no timers. At most `expired_before_max` of them have an expired claim."""

    queue: str
    timers: str
    owner: str
    limit: int
    reserved: int
    ttl_ns: int
    budget: RetryBudget
    admission: Admission | None = None
    expired_before_max: int | None = None


@operation("claims.claim_batch")
def claim_batch(txn: Txn, request: ClaimRequest) -> ClaimedBatch:
    """Claim the items of a request."""
    queue, timers, limit, reserved = request.queue, request.timers, request.limit, request.reserved
    not_admitted = 0

    def claim(name: str, slots: int) -> list[Claim]:
        nonlocal not_admitted
        if not slots:
            return []
        claimed, rejected = queues.claim_admitted(
            txn,
            name,
            request.owner,
            slots,
            request.ttl_ns,
            request.budget,
            admission=request.admission if name == queue else None,
            expired_before_max=request.expired_before_max,
            by_due=name == timers,
        )
        not_admitted += rejected
        return claimed

    due = claim(timers, reserved) if timers else []
    items = claim(queue, limit - len(due))
    if timers and len(due) == reserved:
        due += claim(timers, limit - len(due) - len(items))
    return ClaimedBatch(items, due, not_admitted)


class SettledAndClaimed(Record, frozen=True):
    """The outcomes of settled claims, and the newly claimed batch."""

    ends: list[str]
    taken: ClaimedBatch


@operation("claims.settle_and_claim")
def settle_and_claim(
    txn: Txn,
    acks: list[ClaimToken],
    fails: list[ItemFailure],
    operations: list[JoinedOperation],
    request: ClaimRequest,
) -> SettledAndClaimed:
    """Run `queue.finish_batch` and `claim_batch` in one commit, the normal step of a busy runner."""
    outcomes = queues.finish_batch.fn(txn, acks, fails, request.budget, operations)
    return SettledAndClaimed(outcomes, claim_batch.fn(txn, request))


@operation("claims.release_unstarted")
def release_unstarted(
    txn: Txn,
    claims: list[ClaimToken],
    unstarted: Sequence[ClaimToken] = (),
    admission: Admission | None = None,
) -> list[bool]:
    """Release claims, each separately. Return False for each lost claim. The admission of unstarted items
    is undone."""
    if admission is not None and admission.undo:
        for token in unstarted:
            candidate = queues.candidate_of(txn, token)
            if candidate is not None:
                find_operation(admission.undo).fn(txn, token.queue, [candidate], admission.args)
    return [_try_release(txn, claim) for claim in claims]


def next_due_ns(txn: Txn, names: Sequence[str]) -> int | None:
    """Return the earliest time at which one of the queues has a claimable item: 0 for now, None if there is none."""
    dues = [queues.next_due_ns(txn, name) for name in names]
    return min((due for due in dues if due is not None), default=None)


def live_claims(txn: Txn, names: Sequence[str], owner: str) -> list[Claim]:
    """Return the live claims of an owner in the store."""
    owned = [claim for name in names for claim in queues.claims_of(txn, name, owner, BATCH_MAX)]
    return [claim for claim in owned if txn.now_ns < claim.expires_ns]


def are_lost(txn: Txn, tokens: Sequence[ClaimToken]) -> list[bool]:
    """Return for each claim whether it is lost."""
    return [not queues.is_held(txn, token) for token in tokens]


def read_payloads(txn: Txn, claims: Sequence[Claim]) -> list[bytes | None]:
    """Read the payloads of claims. None for a claim that was cancelled and whose blob a purge has deleted."""
    return [_read_payload(txn, claim) for claim in claims]


def _read_payload(txn: Txn, claim: Claim) -> bytes | None:
    try:
        return queues.payload_of(txn, claim)
    except NotFound:
        if queues.is_held(txn, claim.token):
            raise
        return None


def _try_release(txn: Txn, claim: ClaimToken) -> bool:
    try:
        queues.release.fn(txn, [claim])
    except ClaimLost:
        return False
    return True
