"""Claims: time-limited leases on single queue items, and their ends (ack, fail, release, dead letter).

A claim token is (queue, seq, number), a fencing token. Every operation here requires the current
number, its owner and `now < expires`, checked when the commit is applied. Otherwise the claim is lost
and nothing changes. A late worker therefore cannot settle an item that expired or was claimed again.

`ack` and `release` are all or none. `finish_batch` ends each claim of a batch separately and returns one
outcome per claim, so that one lost claim does not void the rest of a worker's tick.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX, TTL_NS_MAX
from holdfast.durable import dead_letters
from holdfast.durable import item as items
from holdfast.durable.item import (
    ClaimRow,
    FailedAttempt,
    ItemEvent,
    ItemState,
    QueueCounterDelta,
    QueueItem,
    QueueKeys,
    decode_claim_row,
    keys_of,
    pack,
    pack_int,
)
from holdfast.durable.validation import check_limit, check_ttl
from holdfast.errors import ClaimLost, HoldfastError, Invalid
from holdfast.store import blobs
from holdfast.store.api import Txn, find_operation, operation
from holdfast.store.txn import run_in_savepoint

DONE = ItemState.DONE.value
LOST = "lost"


class RetryBudget(Record, frozen=True):
    """Maximum failures and maximum expired claims of an item before it becomes a dead letter."""

    failures_max: int = 5
    expiries_max: int = 3
    # An item with at least this number of expiries is claimed in isolation (poison suspect): if it crashes
    # its worker again, no other item is charged with an expiry. 0: never.
    isolate_from_expiries: int = 0


class ClaimToken(Record, frozen=True):
    """The fencing token of a claim. `Claim` is a subclass, so it is accepted as a token."""

    queue: str
    seq: int
    number: int
    owner: str


class Claim(ClaimToken, frozen=True):
    """A claimed item. `payload_of` fetches a payload that is stored as a blob."""

    expires_ns: int
    priority: int
    failures: int
    expiries: int
    enqueued_ns: int
    payload: bytes
    blob: bytes = b""
    failed_attempts: tuple[FailedAttempt, ...] = ()

    @property
    def token(self) -> ClaimToken:
        return ClaimToken(self.queue, self.seq, self.number, self.owner)


class ItemFailure(Record, frozen=True):
    claim: ClaimToken
    code: str
    error: str
    retryable: bool = True
    delay_ns: int = 0


DEFAULT_RETRY_BUDGET = RetryBudget()


@operation("queue.ack")
def ack(txn: Txn, claims: Sequence[ClaimToken]) -> None:
    """Complete items: remove them and their claims. All or none: ClaimLost names the first lost claim."""
    for keys, tokens in _by_queue(claims):
        for token in tokens:
            packed_seq = pack_int(token.seq)
            claim_row = _live_claim_row(txn, keys, token, packed_seq)
            if claim_row is None:
                raise _claim_lost(token)
            _delete_done(txn, keys, claim_row, packed_seq)
        delta = QueueCounterDelta()
        delta.transition(ItemState.CLAIMED, ItemEvent.ACK, len(tokens))
        delta.apply(txn, keys)


class JoinedOperation(Record, frozen=True):
    """An operation that commits with the end of a claim, if and only if the claim is still live.

    `index` is the position of the claim among the acks followed by the failures.
    """

    index: int
    operation: str
    args: bytes


@operation("queue.finish_batch")
def finish_batch(
    txn: Txn,
    acks: Sequence[ClaimToken],
    fails: Sequence[ItemFailure],
    budget: RetryBudget = DEFAULT_RETRY_BUDGET,
    operations: Sequence[JoinedOperation] = (),
) -> list[str]:
    """End a batch of claims, each separately. Return done, ready, delayed, dead or lost for each, in order.

    `operations` are joined operations, which commit with the claim at their index. If one that is joined to
    an ack fails, its item counts as failed with that error. The rest of the batch is not affected.
    """
    check_limit(len(acks) + len(fails), "claims")
    check_budget(budget)
    deltas: defaultdict[str, QueueCounterDelta] = defaultdict(QueueCounterDelta)
    acked: Counter[str] = Counter()
    outcomes: list[str] = []
    joined: defaultdict[int, list[JoinedOperation]] = defaultdict(list)
    for joined_operation in operations:
        joined[joined_operation.index].append(joined_operation)
    txn.prefetch(_keys_to_prefetch(acks, fails))
    for index, token in enumerate(acks):
        keys = keys_of(token.queue)
        packed_seq = pack_int(token.seq)
        claim_row = _live_claim_row(txn, keys, token, packed_seq)
        if claim_row is None:
            outcomes.append(LOST)
            continue
        join_error = _run_joined(txn, joined.get(index, ()))
        if join_error is not None:
            item = items.load_with_claim(txn, keys, packed_seq)
            failure = ItemFailure(token, join_error.code, str(join_error), join_error.retryable)
            item_state = _fail(txn, keys, item, packed_seq, failure, budget, deltas[token.queue])
            outcomes.append(item_state.value)
            continue
        _delete_done(txn, keys, claim_row, packed_seq)
        acked[token.queue] += 1
        outcomes.append(DONE)
    for queue, n in acked.items():
        deltas[queue].transition(ItemState.CLAIMED, ItemEvent.ACK, n)
    for index, failure in enumerate(fails, start=len(acks)):
        _check_failure(failure)
        queue = failure.claim.queue
        keys = keys_of(queue)
        packed_seq = pack_int(failure.claim.seq)
        held_item = _load_if_held(txn, keys, failure.claim, packed_seq)
        if held_item is None:
            outcomes.append(LOST)
            continue
        _run_joined(txn, joined.get(index, ()))
        item_state = _fail(txn, keys, held_item, packed_seq, failure, budget, deltas[queue])
        outcomes.append(item_state.value)
    for queue, delta in deltas.items():
        delta.apply(txn, keys_of(queue))
    return outcomes


def _keys_to_prefetch(acks: Sequence[ClaimToken], fails: Sequence[ItemFailure]) -> Iterator[bytes]:
    for token in acks:
        yield keys_of(token.queue).claim_rows + pack_int(token.seq)
    for failure in fails:
        keys, packed_seq = keys_of(failure.claim.queue), pack_int(failure.claim.seq)
        yield keys.claim_rows + packed_seq
        yield keys.items + packed_seq


def _run_joined(txn: Txn, operations: Sequence[JoinedOperation]) -> HoldfastError | None:
    for joined_operation in operations:
        try:
            operation_fn = find_operation(joined_operation.operation)
            raised_error = run_in_savepoint(
                txn, operation_fn, *operation_fn.decode_args(joined_operation.args)
            )
        except (HoldfastError, msgspec.MsgspecError) as error:
            raised_error = error
        if raised_error is not None:
            if isinstance(raised_error, HoldfastError):
                return raised_error
            return Invalid(
                what="joined operation", name=joined_operation.operation, why=repr(raised_error)
            )
    return None


@operation("queue.fail")
def fail(
    txn: Txn,
    claim: ClaimToken,
    code: str,
    error: str,
    retryable: bool = True,
    delay_ns: int = 0,
    budget: RetryBudget = DEFAULT_RETRY_BUDGET,
) -> str:
    """Record a failure. The item becomes ready, delayed, or dead when its retry budget is exhausted."""
    failure = ItemFailure(claim, code, error, retryable, delay_ns)
    [outcome] = finish_batch.fn(txn, [], [failure], budget)
    if outcome == LOST:
        raise _claim_lost(claim)
    return outcome


@operation("queue.dead_letter")
def dead_letter(txn: Txn, claim: ClaimToken, code: str, error: str) -> None:
    """Dead-letter a claimed item immediately, without counting a failure: no retry can handle it."""
    keys = keys_of(claim.queue)
    _check_code(code)
    packed_seq = pack_int(claim.seq)
    item = _load_if_held(txn, keys, claim, packed_seq)
    if item is None:
        raise _claim_lost(claim)
    dead_letters.write_letter(txn, keys, packed_seq, item, code, error)
    delta = QueueCounterDelta()
    delta.transition(ItemState.CLAIMED, ItemEvent.BURY)
    delta.apply(txn, keys)


@operation("queue.release")
def release(txn: Txn, claims: Sequence[ClaimToken]) -> None:
    """Release claims without counting a failure. All or none."""
    for keys, tokens in _by_queue(claims):
        for token in tokens:
            packed_seq = pack_int(token.seq)
            item = _load_if_held(txn, keys, token, packed_seq)
            if item is None:
                raise _claim_lost(token)
            release_claim(txn, keys, packed_seq, item, item)
        delta = QueueCounterDelta()
        delta.transition(ItemState.CLAIMED, ItemEvent.RELEASE, len(tokens))
        delta.apply(txn, keys)


@operation("queue.extend")
def extend(txn: Txn, claims: Sequence[ClaimToken], ttl_ns: int) -> list[int | None]:
    """Extend claims to `ttl_ns` from now. An expiry never moves back. Return None for each lost claim."""
    check_limit(len(claims), "claims")
    check_ttl(ttl_ns)
    expiries: list[int | None] = []
    txn.prefetch(_keys_to_prefetch(claims, ()))
    for token in claims:
        keys = keys_of(token.queue)
        packed_seq = pack_int(token.seq)
        claim_row = _live_claim_row(txn, keys, token, packed_seq)
        if claim_row is None:
            expiries.append(None)
            continue
        expires_ns = max(claim_row.expires_ns, txn.now_ns + ttl_ns)
        txn.delete(keys.by_expiry + pack_int(claim_row.expires_ns) + packed_seq)
        txn.put(keys.by_expiry + pack_int(expires_ns) + packed_seq, packed_seq)
        txn.put(keys.claim_rows + packed_seq, pack(replace(claim_row, expires_ns=expires_ns)))
        expiries.append(expires_ns)
    return expiries


def is_held(txn: Txn, claim: ClaimToken) -> bool:
    """Whether the token is the item's current claim and the claim is live."""
    return _live_claim_row(txn, keys_of(claim.queue), claim, pack_int(claim.seq)) is not None


def _live_claim_row(
    txn: Txn, keys: QueueKeys, token: ClaimToken, packed_seq: bytes
) -> ClaimRow | None:
    """Return the claim row if it matches the token and is live."""
    row = txn.get(keys.claim_rows + packed_seq)
    if row is None:
        return None
    claim_row = decode_claim_row(row)
    if (
        claim_row.claims != token.number
        or claim_row.owner != token.owner
        or txn.now_ns >= claim_row.expires_ns
    ):
        return None
    return claim_row


def _load_if_held(
    txn: Txn, keys: QueueKeys, token: ClaimToken, packed_seq: bytes
) -> QueueItem | None:
    """Load the item if the token is its current claim and the claim is live."""
    if _live_claim_row(txn, keys, token, packed_seq) is None:
        return None
    return items.load_with_claim(txn, keys, packed_seq)


def _delete_done(txn: Txn, keys: QueueKeys, claim_row: ClaimRow, packed_seq: bytes) -> None:
    txn.delete(keys.items + packed_seq)
    items.delete_claim(txn, keys, claim_row, packed_seq)
    if claim_row.blob:
        blobs.release(txn, claim_row.blob)


def _fail(
    txn: Txn,
    keys: QueueKeys,
    item: QueueItem,
    packed_seq: bytes,
    failure: ItemFailure,
    budget: RetryBudget,
    delta: QueueCounterDelta,
) -> ItemState:
    failures = item.failures + 1
    failed_attempts = items.add_failed_attempt(
        item, "failed", txn.now_ns, failure.code, failure.error
    )
    if not failure.retryable or failures >= budget.failures_max:
        after = replace(item, failures=failures, failed_attempts=failed_attempts)
        dead_letters.write_letter(txn, keys, packed_seq, after, failure.code, failure.error)
        return delta.transition(
            ItemState.CLAIMED, ItemEvent.EXHAUST if failure.retryable else ItemEvent.BURY
        )
    after = replace(
        item,
        failures=failures,
        code=failure.code[:ERROR_CODE_CHARS_MAX],
        error=failure.error[:ERROR_TEXT_CHARS_MAX],
        not_before_ns=txn.now_ns + failure.delay_ns if failure.delay_ns else item.not_before_ns,
        failed_attempts=failed_attempts,
    )
    release_claim(txn, keys, packed_seq, item, after)
    return delta.transition(
        ItemState.CLAIMED, ItemEvent.DEFER if failure.delay_ns else ItemEvent.RETRY
    )


def release_claim(
    txn: Txn, keys: QueueKeys, packed_seq: bytes, item: QueueItem, after: QueueItem
) -> None:
    """End a claim and requeue its item: ready with a new fair rank, or delayed. The seq stays."""
    items.delete_claim(txn, keys, item, packed_seq)
    if after.not_before_ns > txn.now_ns:
        index = keys.delayed + pack_int(after.not_before_ns) + packed_seq
    else:
        after = items.assign_requeue_rank(txn, keys, after)
        index = keys.ready_key(after.priority, after.fair_rank, packed_seq)
    txn.put(keys.items + packed_seq, pack(replace(after, owner="", expires_ns=0)))
    txn.put(index, packed_seq)
    txn.notify(keys.topic)


def make_claim(
    queue: str, packed_seq: bytes, item: QueueItem, claim_row: ClaimRow | QueueItem
) -> Claim:
    return Claim(
        queue,
        int.from_bytes(packed_seq[1:], "big"),
        claim_row.claims,
        claim_row.owner,
        claim_row.expires_ns,
        item.priority,
        item.failures,
        item.expiries,
        item.enqueued_ns,
        item.payload,
        item.blob,
        item.failed_attempts,
    )


def _by_queue(claims: Sequence[ClaimToken]) -> Iterator[tuple[QueueKeys, list[ClaimToken]]]:
    check_limit(len(claims), "claims")
    groups: dict[str, list[ClaimToken]] = {}
    for token in claims:
        groups.setdefault(token.queue, []).append(token)
    for queue, tokens in groups.items():
        yield keys_of(queue), tokens


def _claim_lost(token: ClaimToken) -> ClaimLost:
    return ClaimLost(queue=token.queue, seq=token.seq, number=token.number)


def check_budget(budget: RetryBudget) -> None:
    if budget.failures_max < 1 or budget.expiries_max < 1 or budget.isolate_from_expiries < 0:
        raise Invalid(
            what="budget",
            why="each must be at least 1",
            failures_max=budget.failures_max,
            expiries_max=budget.expiries_max,
        )


def _check_failure(failure: ItemFailure) -> None:
    _check_code(failure.code)
    if not 0 <= failure.delay_ns <= TTL_NS_MAX:
        raise Invalid(what="delay_ns", why="out of bounds", found=failure.delay_ns, max=TTL_NS_MAX)


def _check_code(code: str) -> None:
    if not code:
        raise Invalid(what="code", why="a failure needs a code")
