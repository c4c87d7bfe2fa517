"""Claims of a runner: one commit takes from queue and timers, one gives back what was not begun.

`take` is an operation of its own because its second half depends on its first: timers get their
reserved places, the queue the others, and timers again what the queue left over. So neither can
starve the other, and no place stays empty while there is work. Timers come by the time they are due.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.codec import Record
from holdfast.config import BATCH_MAX
from holdfast.durable import queue as queues
from holdfast.durable.queue import Admission, Budget, Claim, Failure, Then, Token
from holdfast.errors import ClaimLost, NotFound
from holdfast.store.api import Txn, operation, resolve


class Taken(Record, frozen=True):
    items: list[Claim]
    timers: list[Claim]
    # Items that were due and not admitted.
    turned_away: int = 0


@operation
def take(
    txn: Txn,
    queue: str,
    timers: str,
    owner: str,
    limit: int,
    reserved: int,
    ttl_ns: int,
    budget: Budget,
    admission: Admission | None = None,
    again_max: int | None = None,
) -> Taken:
    """Claim up to `limit`, `reserved` of them from timers first. `timers` may be empty: no timers."""

    turned_away = 0

    def claim(name: str, places: int) -> list[Claim]:
        nonlocal turned_away
        if not places:
            return []
        judged = admission if name == queue else None
        taken, away = queues.claim_judged(
            txn, name, owner, places, ttl_ns, budget, judged, again_max, by_due=name == timers
        )
        turned_away += away
        return taken

    due = claim(timers, reserved) if timers else []
    items = claim(queue, limit - len(due))
    if timers and len(due) == reserved:
        due += claim(timers, limit - len(due) - len(items))
    return Taken(items, due, turned_away)


class Turned(Record, frozen=True):
    """How claims ended, and what was taken in their place."""

    ends: list[str]
    taken: Taken


@operation
def turn(
    txn: Txn,
    acks: list[Token],
    fails: list[Failure],
    then: list[Then],
    queue: str,
    timers: str,
    owner: str,
    limit: int,
    reserved: int,
    ttl_ns: int,
    budget: Budget,
    admission: Admission | None,
    again_max: int | None,
) -> Turned:
    """`queue.settle` and `take` in one commit: what a busy runner does over and over."""
    ends = queues.settle.fn(txn, acks, fails, budget, then)
    taken = take.fn(
        txn, queue, timers, owner, limit, reserved, ttl_ns, budget, admission, again_max
    )
    return Turned(ends, taken)


@operation
def hand_back(
    txn: Txn,
    claims: list[Token],
    unbegun: Sequence[Token] = (),
    admission: Admission | None = None,
) -> list[bool]:
    """Release claims, each alone; False for one that was lost already. What was admitted and never
    begun is as if it had not been admitted."""
    if admission is not None and admission.undo:
        for token in unbegun:
            candidate = queues.claimed(txn, token)
            if candidate is not None:
                resolve(admission.undo).fn(txn, token.queue, [candidate], admission.args)
    return [_released(txn, claim) for claim in claims]


def next_due_ns(txn: Txn, names: Sequence[str]) -> int | None:
    """When the first of these queues has something to claim: 0 for now, None for not in sight."""
    dues = [queues.next_due_ns(txn, name) for name in names]
    return min((due for due in dues if due is not None), default=None)


def live_claims(txn: Txn, names: Sequence[str], owner: str) -> list[Claim]:
    """What an owner holds by now, whatever it was told."""
    held = [claim for name in names for claim in queues.claims_of(txn, name, owner, BATCH_MAX)]
    return [claim for claim in held if txn.now_ns < claim.expires_ns]


def lost(txn: Txn, tokens: Sequence[Token]) -> list[bool]:
    """Of each claim, whether it holds no more."""
    return [not queues.holds(txn, token) for token in tokens]


def payloads(txn: Txn, claims: Sequence[Claim]) -> list[bytes | None]:
    """What claims are of; None for one that was taken away since, and its content with it (a purge)."""
    return [_payload(txn, claim) for claim in claims]


def _payload(txn: Txn, claim: Claim) -> bytes | None:
    try:
        return queues.payload_of(txn, claim)
    except NotFound:
        if queues.holds(txn, claim.token):
            raise
        return None


def _released(txn: Txn, claim: Token) -> bool:
    try:
        queues.release.fn(txn, [claim])
    except ClaimLost:
        return False
    return True
