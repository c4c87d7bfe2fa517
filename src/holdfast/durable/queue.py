"""A leased work queue: items are ready or delayed, then claimed, then done or dead (see `item`, `dead_letters`).

- A claim token is (queue, seq, number). Every operation that ends or extends a claim requires the
  current number, its owner and `now < expires`. Otherwise the claim is lost and nothing changes.
- The item counts its failures and expiries. When either exceeds its budget, the item becomes a dead
  letter, once, in the same transaction.
- A retry keeps its seq and gets a `not_before`. Seqs are never reused. A requeued item gets a new fair
  rank (see `item`), so requeued items of one group never starve other groups.
- The cost of a call does not depend on the backlog: all searches use an index with a limit, and the
  counters are maintained incrementally.

All changes are operations. The writer runs them when it applies a commit, so claimers never conflict and
expiry is checked against commit time. No separate reaper is required: `claim` first expires overdue
claims and promotes due items, a bounded number of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.config import QUEUE_PRIORITY_MAX, QUEUE_SWEEP_EXTRA
from holdfast.durable import dead_letters as letters
from holdfast.durable import item as items
from holdfast.durable.admission import ADMIT, Admission, AdmissionVerdict, Candidate
from holdfast.durable.claim import (
    DEFAULT_RETRY_BUDGET,
    Claim,
    ClaimToken,
    ItemFailure,
    JoinedOperation,
    RetryBudget,
    ack,
    check_budget,
    dead_letter,
    extend,
    fail,
    finish_batch,
    is_held,
    make_claim,
    release,
    release_claim,
)
from holdfast.durable.dead_letters import (
    DeadLetter,
    add_dead_letter,
    discard_dead,
    list_dead,
    purge_dead,
    redrive,
)
from holdfast.durable.item import (
    ITEM_TRANSITIONS,
    ClaimRow,
    FailedAttempt,
    ItemEvent,
    ItemState,
    QueueCounterDelta,
    QueueCounts,
    QueueItem,
    QueueKeys,
    decode_item,
    keys_of,
    pack,
    pack_int,
    pack_owner,
    seq_of,
    topic,
)
from holdfast.durable.validation import check_limit, check_name, check_time, check_ttl
from holdfast.errors import Invalid
from holdfast.store import blobs, tuples
from holdfast.store.api import Row, Txn, find_operation, operation

__all__ = [
    "ADMIT",
    "ITEM_TRANSITIONS",
    "Admission",
    "AdmissionVerdict",
    "Candidate",
    "Claim",
    "ClaimToken",
    "DeadLetter",
    "FailedAttempt",
    "ItemEvent",
    "ItemFailure",
    "ItemState",
    "JoinedOperation",
    "NewItem",
    "QueueCounts",
    "RetryBudget",
    "ack",
    "add_dead_letter",
    "cancel",
    "cancelled_count",
    "candidate_of",
    "claim",
    "claim_admitted",
    "claims_of",
    "counts",
    "dead_letter",
    "discard_dead",
    "expire_overdue",
    "extend",
    "fail",
    "finish_batch",
    "is_held",
    "list_dead",
    "make_ready",
    "next_due_ns",
    "payload_of",
    "peek",
    "purge_dead",
    "put",
    "put_all",
    "put_many",
    "redrive",
    "release",
    "topic",
]  # fmt: skip


@operation("queue.put")
def put(
    txn: Txn,
    queue: str,
    payload: bytes,
    priority: int = 0,
    not_before_ns: int = 0,
    group: str = "",
    on_dead: str = "",
) -> int:
    """Add an item and return its seq. Larger priorities are claimed first. Groups share the queue fairly.

    `on_dead` names an operation that runs with the dead letter when the item dies for any reason, in the
    same commit. Like every joined operation, it must not raise.
    """
    return put_many.fn(txn, queue, [payload], priority, not_before_ns, group, on_dead)[0]


@operation("queue.put_many")
def put_many(
    txn: Txn,
    queue: str,
    payloads: list[bytes],
    priority: int = 0,
    not_before_ns: int = 0,
    group: str = "",
    on_dead: str = "",
) -> list[int]:
    keys = keys_of(queue)
    if on_dead:
        find_operation(on_dead)
    if group:
        check_name("group", group)
    check_limit(len(payloads), "payloads")
    check_time("not_before_ns", not_before_ns)
    if not -QUEUE_PRIORITY_MAX <= priority <= QUEUE_PRIORITY_MAX:
        raise Invalid(what="priority", why="out of bounds", found=priority, max=QUEUE_PRIORITY_MAX)
    bodies = [
        (*items.inline_or_blob(txn, payload), priority, None, group, on_dead)
        for payload in payloads
    ]
    return items.insert(txn, keys, bodies, not_before_ns)


class NewItem(NamedTuple):
    """The arguments of `put` for one item."""

    payload: bytes
    priority: int = 0
    group: str = ""
    on_dead: str = ""


def put_all(txn: Txn, queue: str, new_items: Sequence[NewItem]) -> list[int]:
    """Add items with different priorities, groups and `on_dead` operations, in order, and return their seqs.
    For use inside operations."""
    bodies = []
    for payload, priority, group, on_dead in new_items:
        if not -QUEUE_PRIORITY_MAX <= priority <= QUEUE_PRIORITY_MAX:
            raise Invalid(what="priority", found=priority, max=QUEUE_PRIORITY_MAX)
        bodies.append((*items.inline_or_blob(txn, payload), priority, None, group, on_dead))
    return items.insert(txn, keys_of(queue), bodies, 0)


@operation("queue.claim")
def claim(
    txn: Txn,
    queue: str,
    owner: str,
    limit: int,
    ttl_ns: int,
    budget: RetryBudget = DEFAULT_RETRY_BUDGET,
    admission: Admission | None = None,
) -> list[Claim]:
    """Claim up to `limit` items for `ttl_ns`, by priority, fair rank and seq."""
    return claim_admitted(txn, queue, owner, limit, ttl_ns, budget, admission)[0]


def claim_admitted(
    txn: Txn,
    queue: str,
    owner: str,
    limit: int,
    ttl_ns: int,
    budget: RetryBudget,
    admission: Admission | None,
    expired_before_max: int | None = None,
    *,
    by_due: bool = False,
) -> tuple[list[Claim], int]:
    """Claim items like `claim`, and also return the number of items that were not admitted. For operations.

    At most `expired_before_max` items with expired claims are claimed: an item that cannot start at once
    should not risk another expiry. `by_due` orders by due time, then seq, and ignores priorities. The due
    time of an item without `not_before` is its insertion time.
    """
    keys = keys_of(queue)
    check_name("owner", owner)
    check_limit(limit)
    check_ttl(ttl_ns)
    check_budget(budget)
    delta = QueueCounterDelta()
    sweep = limit + QUEUE_SWEEP_EXTRA
    _expire(txn, keys, _overdue_claims(txn, keys, sweep), budget, delta)
    if by_due:
        assert admission is None, "admission requires items in the ready index"
        _move_ready_to_delayed(txn, keys, sweep, delta)
    else:
        _promote_due(txn, keys, sweep, delta)

    now_ns = txn.now_ns
    start, end = keys.ready, tuples.prefix_end(keys.ready)
    if by_due:
        start, end = keys.delayed, keys.delayed + pack_int(now_ns + 1)
    expires_ns = now_ns + ttl_ns
    by_expiry = keys.by_expiry + pack_int(expires_ns)
    by_owner = keys.by_owner + pack_owner(owner)
    put, delete, holds = txn.put, txn.delete, keys.claim_rows
    claims: list[Claim] = []
    rules = _ExpiredItemRules(
        budget.isolate_from_expiries, limit if expired_before_max is None else expired_before_max
    )
    ready_items = _scan_next(txn, keys, start, end, limit, rules)
    not_admitted = 0
    if admission is not None and ready_items:
        page_limit, scanned, page = limit, len(ready_items), ready_items
        ready_items = _apply_admission(txn, keys, page, admission, delta)
        # Each rejected item frees a slot for the items behind it.
        while page and len(page) == page_limit and len(ready_items) < limit and scanned < sweep:
            page_limit = min(limit - len(ready_items), sweep - scanned)
            page = _scan_next(
                txn, keys, page[-1][0] + b"\x00", end, page_limit, rules, already_found=ready_items
            )
            scanned += len(page)
            ready_items += _apply_admission(txn, keys, page, admission, delta) if page else []
        not_admitted = scanned - len(ready_items)
    for key, packed_seq, item in ready_items:
        claim_row = ClaimRow(item.claims + 1, owner, expires_ns, now_ns, item.blob)
        delete(key)
        put(holds + packed_seq, pack(claim_row))
        put(by_expiry + packed_seq, packed_seq)
        put(by_owner + packed_seq, packed_seq)
        claims.append(make_claim(queue, packed_seq, item, claim_row))
    if claims:
        if by_due:
            delta.transition(ItemState.DELAYED, ItemEvent.DUE, len(claims))
        delta.transition(ItemState.READY, ItemEvent.CLAIM, len(claims))
    delta.apply(txn, keys)
    return claims, not_admitted


# A ready item: its index key, its packed seq, its row.
_ReadyItem = tuple[bytes, bytes, QueueItem]


class _ExpiredItemRules(NamedTuple):
    """Claim rules for items with expired claims: isolation threshold and maximum number."""

    isolate_from_expiries: int
    expired_before_max: int


def _scan_next(
    txn: Txn,
    keys: QueueKeys,
    start: bytes,
    end: bytes,
    limit: int,
    rules: _ExpiredItemRules,
    already_found: Sequence[_ReadyItem] = (),
) -> list[_ReadyItem]:
    """Return the next items of an index range, and advance the fair ranks of their groups.

    A poison suspect is returned only as the first and single item. Otherwise the scan skips it.
    """
    get, by_seq = txn.get, keys.items
    selected: list[_ReadyItem] = []
    expired_before = sum(item.expiries > 0 for _, _, item in already_found)
    page = txn.scan(start, end, limit)
    txn.prefetch(by_seq + packed_seq for _, packed_seq in page)
    for key, packed_seq in page:
        row = get(by_seq + packed_seq)
        item = decode_item(row) if row is not None else items.load_item(txn, keys, packed_seq)
        isolated = 0 < rules.isolate_from_expiries <= item.expiries
        if (isolated and (selected or already_found)) or (
            item.expiries and expired_before >= rules.expired_before_max
        ):
            continue
        selected.append((key, packed_seq, item))
        expired_before += item.expiries > 0
        if isolated:
            break
    grouped = [item for _, _, item in selected if item.group]
    if grouped:
        items.advance_groups(txn, keys, grouped)
    return selected


def _apply_admission(
    txn: Txn,
    keys: QueueKeys,
    ready_items: list[_ReadyItem],
    admission: Admission,
    delta: QueueCounterDelta,
) -> list[_ReadyItem]:
    """Run the admission operation. Return the admitted items, and delay, dead-letter or drop the rejected ones."""
    candidates = [
        Candidate(
            seq=seq_of(packed),
            group=item.group,
            payload=payload_of(txn, item),
            failures=item.failures,
            expiries=item.expiries,
            claim=item.claims + 1,
            priority=item.priority,
            fair_rank=item.fair_rank,
        )
        for _, packed, item in ready_items
    ]
    verdicts: list[AdmissionVerdict] = find_operation(admission.operation).fn(
        txn, keys.queue, candidates, admission.args
    )
    admitted: list[_ReadyItem] = []
    for ready_item, verdict in zip(ready_items, verdicts, strict=True):
        key, packed_seq, item = ready_item
        if verdict.action == ADMIT.action:
            admitted.append(ready_item)
            continue
        txn.delete(key)
        if verdict.action == "later":
            not_before_ns = txn.now_ns + max(verdict.delay_ns, 1)
            after = replace(item, not_before_ns=not_before_ns, code=verdict.code)
            txn.put(keys.items + packed_seq, pack(after))
            txn.put(keys.delayed + pack_int(not_before_ns) + packed_seq, packed_seq)
            delta.transition(ItemState.READY, ItemEvent.DEFER)
        elif verdict.action == "refuse":
            letters.write_letter(
                txn, keys, packed_seq, item, verdict.code or "refused", verdict.error
            )
            delta.transition(ItemState.READY, ItemEvent.BURY)
        elif verdict.action != "drop":
            raise Invalid(what="verdict", found=verdict.action, operation=admission.operation)
        else:
            txn.delete(keys.items + packed_seq)
            if item.blob:
                blobs.release(txn, item.blob)
            delta.transition(ItemState.READY, ItemEvent.WITHDRAW)
    return admitted


def make_ready(txn: Txn, queue: str, seq: int, code: str) -> bool:
    """Make an item ready that admission delayed with this code, once the reason is gone. Return False if
    the item is not delayed for it. For operations."""
    keys = keys_of(queue)
    packed_seq = pack_int(seq)
    row = txn.get(keys.items + packed_seq)
    if row is None:
        return False
    item = decode_item(row)
    delayed_key = keys.delayed + pack_int(item.not_before_ns) + packed_seq
    if item.code != code or txn.get(delayed_key) is None:
        return False
    _write_ready(txn, keys, delayed_key, packed_seq, item)
    delta = QueueCounterDelta()
    delta.transition(ItemState.DELAYED, ItemEvent.DUE)
    delta.apply(txn, keys)
    txn.notify(keys.topic)
    return True


@operation("queue.cancel")
def cancel(txn: Txn, queue: str, seq: int, claimed: bool = False) -> bool:
    """Cancel an unclaimed item, and return whether it was cancelled.

    With `claimed`, cancel a claimed item too: its claim is lost, and `cancelled_count` rises.
    """
    keys = keys_of(queue)
    packed_seq = pack_int(seq)
    if txn.get(keys.items + packed_seq) is None:
        return False
    item = items.load_with_claim(txn, keys, packed_seq)
    if item.expires_ns and not claimed:
        return False
    delta = QueueCounterDelta()
    ready_key = keys.ready_key(item.priority, item.fair_rank, packed_seq)
    if item.expires_ns:
        items.delete_claim(txn, keys, item, packed_seq)
        txn.add(keys.cancelled, 1)
        txn.notify(keys.topic)
        delta.transition(ItemState.CLAIMED, ItemEvent.WITHDRAW)
    elif txn.get(ready_key) is not None:
        txn.delete(ready_key)
        delta.transition(ItemState.READY, ItemEvent.WITHDRAW)
    else:
        txn.delete(keys.delayed + pack_int(item.not_before_ns) + packed_seq)
        delta.transition(ItemState.DELAYED, ItemEvent.WITHDRAW)
    txn.delete(keys.items + packed_seq)
    if not item.expires_ns:
        items.drop_group(txn, keys, item)
    if item.blob:
        blobs.release(txn, item.blob)
    delta.apply(txn, keys)
    return True


@operation("queue.expedite")
def expedite(txn: Txn, queue: str, seq: int) -> bool:
    """Make a delayed item due now. Return False if the item is not delayed."""
    keys = keys_of(queue)
    packed_seq = pack_int(seq)
    row = txn.get(keys.items + packed_seq)
    if row is None:
        return False
    item = decode_item(row)
    delayed_key = keys.delayed + pack_int(item.not_before_ns) + packed_seq
    if txn.get(delayed_key) is None:
        return False
    txn.delete(delayed_key)
    txn.put(keys.items + packed_seq, pack(replace(item, not_before_ns=txn.now_ns)))
    txn.put(keys.delayed + pack_int(txn.now_ns) + packed_seq, packed_seq)
    txn.notify(keys.topic)
    return True


@operation("queue.expire_overdue")
def expire_overdue(
    txn: Txn, queue: str, limit: int, budget: RetryBudget = DEFAULT_RETRY_BUDGET
) -> int:
    """Expire overdue claims, most overdue first, and return their number."""
    keys = keys_of(queue)
    check_limit(limit)
    check_budget(budget)
    delta = QueueCounterDelta()
    overdue = _overdue_claims(txn, keys, limit)
    _expire(txn, keys, overdue, budget, delta)
    delta.apply(txn, keys)
    return len(overdue)


# -- queries -------------------------------------------------------------------------------------


def counts(txn: Txn, queue: str) -> QueueCounts:
    return items.counts_of(txn, keys_of(queue))


def cancelled_count(txn: Txn, queue: str) -> int:
    """Total number of claimed items that were cancelled. When it changes, a claim holder checks whether
    its claims are still live."""
    return txn.count(keys_of(queue).cancelled)


def peek(txn: Txn, queue: str, limit: int) -> list[tuple[int, bytes]]:
    """Return (seq, payload) of the ready items that would be claimed next."""
    keys = keys_of(queue)
    check_limit(limit)
    ready_items = []
    for _, packed_seq in txn.scan(keys.ready, tuples.prefix_end(keys.ready), limit):
        item = items.load_item(txn, keys, packed_seq)
        ready_items.append((seq_of(packed_seq), payload_of(txn, item)))
    return ready_items


def claims_of(txn: Txn, queue: str, owner: str, limit: int) -> list[Claim]:
    """Return the claims of an owner by seq, including overdue claims that no sweep has expired yet."""
    keys = keys_of(queue)
    check_name("owner", owner)
    check_limit(limit)
    owner_prefix = keys.by_owner + pack_owner(owner)
    claims = []
    for _, packed_seq in txn.scan(owner_prefix, tuples.prefix_end(owner_prefix), limit):
        item = items.load_with_claim(txn, keys, packed_seq)
        claims.append(make_claim(queue, packed_seq, item, item))
    return claims


def candidate_of(txn: Txn, token: ClaimToken) -> Candidate | None:
    """Return the candidate that admission received for a claim, or None if the claim is lost."""
    if not is_held(txn, token):
        return None
    item = items.load_with_claim(txn, keys_of(token.queue), pack_int(token.seq))
    return Candidate(
        seq=token.seq,
        group=item.group,
        payload=payload_of(txn, item),
        failures=item.failures,
        expiries=item.expiries,
        claim=item.claims,
        priority=item.priority,
        fair_rank=item.fair_rank,
    )


def next_due_ns(txn: Txn, queue: str, ahead_ns: int = 0) -> int | None:
    """Return the store time at which an item becomes claimable: 0 for now, None if there is no item.

    `ahead_ns` is the offset of the delayed items' clock from store time.
    """
    keys = keys_of(queue)
    if txn.scan(keys.ready, tuples.prefix_end(keys.ready), 1):
        return 0
    times = [
        _time_of_key(key, prefix) - clock_ns
        for prefix, clock_ns in ((keys.delayed, ahead_ns), (keys.by_expiry, 0))
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 1)
    ]
    return max(min(times), 0) if times else None


def payload_of(txn: Txn, holder: Claim | DeadLetter | QueueItem) -> bytes:
    # Unchecked, so that one damaged blob does not block the queue. `verify` reports damaged blobs.
    return blobs.get(txn, holder.blob, verify_hash=False) if holder.blob else holder.payload


# -- inside --------------------------------------------------------------------------------------


def _overdue_claims(txn: Txn, keys: QueueKeys, limit: int) -> list[Row]:
    return txn.scan(keys.by_expiry, keys.by_expiry + pack_int(txn.now_ns + 1), limit)


def _expire(
    txn: Txn, keys: QueueKeys, overdue: list[Row], budget: RetryBudget, delta: QueueCounterDelta
) -> None:
    txn.prefetch(
        prefix + packed_seq for _, packed_seq in overdue for prefix in (keys.items, keys.claim_rows)
    )
    for _, packed_seq in overdue:
        item = items.load_with_claim(txn, keys, packed_seq)
        failed_attempts = items.add_failed_attempt(
            item, "expired", item.expires_ns, "claim_expired", ""
        )
        after = replace(item, expiries=item.expiries + 1, failed_attempts=failed_attempts)
        if after.expiries >= budget.expiries_max:
            letters.write_letter(txn, keys, packed_seq, after, "expiries_exhausted", item.error)
            delta.transition(ItemState.CLAIMED, ItemEvent.EXHAUST)
        else:
            release_claim(txn, keys, packed_seq, item, after)
            delta.transition(ItemState.CLAIMED, ItemEvent.EXPIRE)


def _promote_due(txn: Txn, keys: QueueKeys, limit: int, delta: QueueCounterDelta) -> None:
    due = txn.scan(keys.delayed, keys.delayed + pack_int(txn.now_ns + 1), limit)
    txn.prefetch(keys.items + packed_seq for _, packed_seq in due)
    for key, packed_seq in due:
        _write_ready(txn, keys, key, packed_seq, items.load_item(txn, keys, packed_seq))
    if due:
        delta.transition(ItemState.DELAYED, ItemEvent.DUE, len(due))


def _move_ready_to_delayed(txn: Txn, keys: QueueKeys, limit: int, delta: QueueCounterDelta) -> None:
    """Move ready items to the delayed index under their due time, so that this index alone defines the
    order. An item is ready if it was due at insertion or was requeued after a claim."""
    ready = txn.scan(keys.ready, tuples.prefix_end(keys.ready), limit)
    txn.prefetch(keys.items + packed_seq for _, packed_seq in ready)
    for key, packed_seq in ready:
        item = items.load_item(txn, keys, packed_seq)
        due_ns = min(item.not_before_ns or item.enqueued_ns, txn.now_ns)
        if due_ns != item.not_before_ns:
            txn.put(keys.items + packed_seq, pack(replace(item, not_before_ns=due_ns)))
        txn.delete(key)
        txn.put(keys.delayed + pack_int(due_ns) + packed_seq, packed_seq)
    if ready:
        delta.transition(ItemState.READY, ItemEvent.DEFER, len(ready))


def _write_ready(
    txn: Txn, keys: QueueKeys, delayed_key: bytes, packed_seq: bytes, delayed_item: QueueItem
) -> None:
    item = items.assign_requeue_rank(txn, keys, delayed_item)
    if item is not delayed_item:
        txn.put(keys.items + packed_seq, pack(item))
    txn.delete(delayed_key)
    txn.put(keys.ready_key(item.priority, item.fair_rank, packed_seq), packed_seq)


def _time_of_key(key: bytes, prefix: bytes) -> int:
    time_ns = tuples.unpack(key[len(prefix) :])[0]
    assert isinstance(time_ns, int)
    return time_ns
