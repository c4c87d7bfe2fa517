"""A queue: items that someone claims. Ready, then claimed, then done or dead (see `item`, `dead`).

- A claim token is (queue, seq, number). Every step that ends or extends a claim needs the current
  number, its owner, and `now < expires`; else the claim is lost and nothing changes.
- Failures and expiries are counted on the item, each with its budget; when one is used up the item
  becomes a dead letter, once, in the same transaction.
- A retry keeps its seq and gets a `not_before`: it never loses its place in history. Sequence
  numbers are never reused. Whatever comes back to ready takes its turn anew (see `item`): however
  many of a group come back, they never keep others from being looked at.
- No call costs more for a longer backlog: all finding is by index, with a limit, and the counts are
  maintained.

Everything that changes a queue is an operation: it runs where commits are applied, so claimers
never conflict and expiry is judged by the time of the commit. There is no reaper to depend on:
`claim` itself first expires what is overdue and wakes what is due, a bounded number of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.config import QUEUE_PRIORITY_MAX, QUEUE_SWEEP_EXTRA
from holdfast.durable import dead as letters
from holdfast.durable import item as items
from holdfast.durable.admission import TAKE, Admission, Candidate, Verdict
from holdfast.durable.bounds import check_limit, check_name, check_time, check_ttl
from holdfast.durable.claim import (
    DEFAULT_BUDGET,
    Budget,
    Claim,
    Failure,
    Then,
    Token,
    ack,
    bury,
    check_budget,
    claim_of,
    extend,
    fail,
    give_back,
    holds,
    release,
    settle,
)
from holdfast.durable.dead import Dead, dead, discard_dead, post_dead, purge_dead, redrive
from holdfast.durable.item import (
    ITEM,
    Counts,
    Event,
    Hold,
    Item,
    Keys,
    State,
    Tally,
    Tried,
    decode,
    keys_of,
    pack,
    pack_int,
    pack_owner,
    seq_of,
    topic,
)
from holdfast.errors import Invalid
from holdfast.store import blobs, tuples
from holdfast.store.api import Row, Txn, operation, resolve

__all__ = [
    "ITEM", "TAKE", "Admission", "Budget", "Candidate", "Claim", "Counts", "Dead", "Event", "Failure", "State", "Then", "Token", "Tried", "Verdict", "Wanted", "ack",
    "bury", "call_up", "claim", "claim_judged", "claimed", "claims_of", "counts", "dead", "discard_dead", "extend", "fail", "holds", "next_due_ns", "payload_of",
    "peek", "post_dead", "purge_dead", "put", "put_all", "put_many", "reap", "redrive", "release", "settle", "topic", "withdraw", "withdrawn",
]  # fmt: skip


@operation
def put(
    txn: Txn,
    queue: str,
    payload: bytes,
    priority: int = 0,
    not_before_ns: int = 0,
    group: str = "",
    will: str = "",
) -> int:
    """Add an item; its seq. Larger priorities are claimed first; groups take turns.

    `will` names an operation that is given the dead letter when the item dies, however it dies, in
    the same commit. Like everything that joins a commit, it must not raise.
    """
    return put_many.fn(txn, queue, [payload], priority, not_before_ns, group, will)[0]


@operation
def put_many(
    txn: Txn,
    queue: str,
    payloads: list[bytes],
    priority: int = 0,
    not_before_ns: int = 0,
    group: str = "",
    will: str = "",
) -> list[int]:
    keys = keys_of(queue)
    if will:
        resolve(will)
    if group:
        check_name("group", group)
    check_limit(len(payloads), "payloads")
    check_time("not_before_ns", not_before_ns)
    if not -QUEUE_PRIORITY_MAX <= priority <= QUEUE_PRIORITY_MAX:
        raise Invalid(what="priority", why="out of bounds", found=priority, max=QUEUE_PRIORITY_MAX)
    bodies = [(*items.place(txn, payload), priority, None, group, will) for payload in payloads]
    return items.insert(txn, keys, bodies, not_before_ns)


class Wanted(NamedTuple):
    """An item to be put, as `put` takes it."""

    payload: bytes
    priority: int = 0
    group: str = ""
    will: str = ""


def put_all(txn: Txn, queue: str, wanted: Sequence[Wanted]) -> list[int]:
    """Add items of different priorities, groups and wills, in order; their seqs. For operations."""
    bodies = []
    for payload, priority, group, will in wanted:
        if not -QUEUE_PRIORITY_MAX <= priority <= QUEUE_PRIORITY_MAX:
            raise Invalid(what="priority", found=priority, max=QUEUE_PRIORITY_MAX)
        bodies.append((*items.place(txn, payload), priority, None, group, will))
    return items.insert(txn, keys_of(queue), bodies, 0)


@operation
def claim(
    txn: Txn,
    queue: str,
    owner: str,
    limit: int,
    ttl_ns: int,
    budget: Budget = DEFAULT_BUDGET,
    admission: Admission | None = None,
) -> list[Claim]:
    """Take up to `limit` items, by priority and seq, for `ttl_ns`."""
    return claim_judged(txn, queue, owner, limit, ttl_ns, budget, admission)[0]


def claim_judged(
    txn: Txn,
    queue: str,
    owner: str,
    limit: int,
    ttl_ns: int,
    budget: Budget,
    admission: Admission | None,
    again_max: int | None = None,
    *,
    by_due: bool = False,
) -> tuple[list[Claim], int]:
    """`claim`, and how many were not admitted. For operations.

    Of items that have outlived a claim no more than `again_max` are taken: what cannot be begun at
    once should not be charged with another expiry. `by_due`: by the time that each waited for, then by
    seq, whatever their priorities; an item that waits for no time is due since it was put.
    """
    keys = keys_of(queue)
    check_name("owner", owner)
    check_limit(limit)
    check_ttl(ttl_ns)
    check_budget(budget)
    tally = Tally()
    sweep = limit + QUEUE_SWEEP_EXTRA
    _expire(txn, keys, _overdue(txn, keys, sweep), budget, tally)
    if by_due:
        assert admission is None, "what is judged is ready"
        _line_up(txn, keys, sweep, tally)
    else:
        _wake(txn, keys, sweep, tally)

    now_ns = txn.now_ns
    start, end = keys.ready, tuples.after(keys.ready)
    if by_due:
        start, end = keys.delayed, keys.delayed + pack_int(now_ns + 1)
    expires_ns = now_ns + ttl_ns
    by_expiry = keys.claims + pack_int(expires_ns)
    by_owner = keys.owners + pack_owner(owner)
    put, delete, holds = txn.put, txn.delete, keys.holds
    claims: list[Claim] = []
    care = _Care(budget.alone_from, limit if again_max is None else again_max)
    found = _next(txn, keys, start, end, limit, care)
    turned_away = 0
    if admission is not None and found:
        asked, looked, seen = limit, len(found), found
        found = _admitted(txn, keys, seen, admission, tally)
        # What is not admitted makes room for those behind it.
        while seen and len(seen) == asked and len(found) < limit and looked < sweep:
            asked = min(limit - len(found), sweep - looked)
            seen = _next(txn, keys, seen[-1][0] + b"\x00", end, asked, care, beside=found)
            looked += len(seen)
            found += _admitted(txn, keys, seen, admission, tally) if seen else []
        turned_away = looked - len(found)
    for key, packed_seq, was in found:
        hold = Hold(was.claims + 1, owner, expires_ns, now_ns, was.blob)
        delete(key)
        put(holds + packed_seq, pack(hold))
        put(by_expiry + packed_seq, packed_seq)
        put(by_owner + packed_seq, packed_seq)
        claims.append(claim_of(queue, packed_seq, was, hold))
    if claims:
        if by_due:
            tally.move(State.DELAYED, Event.DUE, len(claims))
        tally.move(State.READY, Event.CLAIM, len(claims))
    tally.save(txn, keys)
    return claims, turned_away


# An item that is ready: its key in the index, its packed seq, its row.
_Ready = tuple[bytes, bytes, Item]


class _Care(NamedTuple):
    """How items are taken that have outlived claims: alone from so many on, and only so many."""

    alone_from: int
    again_max: int


def _next(
    txn: Txn,
    keys: Keys,
    start: bytes,
    end: bytes,
    limit: int,
    care: _Care,
    beside: Sequence[_Ready] = (),
) -> list[_Ready]:
    """What is next in a range of an index. It has its turn now, whatever becomes of it.

    A suspect is found by itself, when it is the first; others pass by it.
    """
    get, by_seq = txn.get, keys.items
    found: list[_Ready] = []
    again = sum(was.expiries > 0 for _, _, was in beside)
    page = txn.scan(start, end, limit)
    txn.prefetch(by_seq + packed_seq for _, packed_seq in page)
    for key, packed_seq in page:
        row = get(by_seq + packed_seq)
        was = decode(row) if row is not None else items.load(txn, keys, packed_seq)
        alone = 0 < care.alone_from <= was.expiries
        if (alone and (found or beside)) or (was.expiries and again >= care.again_max):
            continue
        found.append((key, packed_seq, was))
        again += was.expiries > 0
        if alone:
            break
    grouped = [was for _, _, was in found if was.group]
    if grouped:
        items.take_turns(txn, keys, grouped)
    return found


def _admitted(
    txn: Txn, keys: Keys, found: list[_Ready], admission: Admission, tally: Tally
) -> list[_Ready]:
    """Those that may be claimed. What becomes of the others is done here."""
    candidates = [
        Candidate(
            seq_of(packed),
            item.group,
            payload_of(txn, item),
            item.failures,
            item.expiries,
            item.claims + 1,
            item.priority,
            item.turn,
        )
        for _, packed, item in found
    ]
    verdicts: list[Verdict] = resolve(admission.operation).fn(
        txn, keys.queue, candidates, admission.args
    )
    taken: list[_Ready] = []
    for one, verdict in zip(found, verdicts, strict=True):
        key, packed_seq, item = one
        if verdict.end == TAKE.end:
            taken.append(one)
            continue
        txn.delete(key)
        if verdict.end == "later":
            not_before_ns = txn.now_ns + max(verdict.delay_ns, 1)
            after = replace(item, not_before_ns=not_before_ns, code=verdict.code)
            txn.put(keys.items + packed_seq, pack(after))
            txn.put(keys.delayed + pack_int(not_before_ns) + packed_seq, packed_seq)
            tally.move(State.READY, Event.DEFER)
        elif verdict.end == "refuse":
            letters.inter(txn, keys, packed_seq, item, verdict.code or "refused", verdict.error)
            tally.move(State.READY, Event.BURY)
        elif verdict.end != "drop":
            raise Invalid(what="verdict", found=verdict.end, operation=admission.operation)
        else:
            txn.delete(keys.items + packed_seq)
            if item.blob:
                blobs.release(txn, item.blob)
            tally.move(State.READY, Event.WITHDRAW)
    return taken


def call_up(txn: Txn, queue: str, seq: int, code: str) -> bool:
    """Make an item ready that an admission has put off for this reason; whether it was. For
    operations, and for those who know that the reason is gone."""
    keys = keys_of(queue)
    packed_seq = pack_int(seq)
    row = txn.get(keys.items + packed_seq)
    if row is None:
        return False
    was = decode(row)
    waits = keys.delayed + pack_int(was.not_before_ns) + packed_seq
    if was.code != code or txn.get(waits) is None:
        return False
    _woken(txn, keys, waits, packed_seq, was)
    tally = Tally()
    tally.move(State.DELAYED, Event.DUE)
    tally.save(txn, keys)
    txn.notify(keys.topic)
    return True


@operation
def withdraw(txn: Txn, queue: str, seq: int, claimed: bool = False) -> bool:
    """Take back an item that nobody has claimed; whether it could be taken back.

    With `claimed`, from whoever has it, too: the claim is lost, and `withdrawn` counts it.
    """
    keys = keys_of(queue)
    packed_seq = pack_int(seq)
    if txn.get(keys.items + packed_seq) is None:
        return False
    item = items.whole(txn, keys, packed_seq)
    if item.expires_ns and not claimed:
        return False
    tally = Tally()
    ready = keys.ready_key(item.priority, item.turn, packed_seq)
    if item.expires_ns:
        items.drop_claim(txn, keys, item, packed_seq)
        txn.add(keys.withdrawn, 1)
        txn.notify(keys.topic)
        tally.move(State.CLAIMED, Event.WITHDRAW)
    elif txn.get(ready) is not None:
        txn.delete(ready)
        tally.move(State.READY, Event.WITHDRAW)
    else:
        txn.delete(keys.delayed + pack_int(item.not_before_ns) + packed_seq)
        tally.move(State.DELAYED, Event.WITHDRAW)
    txn.delete(keys.items + packed_seq)
    if not item.expires_ns:
        items.end_turns(txn, keys, item)
    if item.blob:
        blobs.release(txn, item.blob)
    tally.save(txn, keys)
    return True


@operation
def hasten(txn: Txn, queue: str, seq: int) -> bool:
    """Let an item that waits for its time be due now; False if it does not wait."""
    keys = keys_of(queue)
    packed_seq = pack_int(seq)
    row = txn.get(keys.items + packed_seq)
    if row is None:
        return False
    item = decode(row)
    waits = keys.delayed + pack_int(item.not_before_ns) + packed_seq
    if txn.get(waits) is None:
        return False
    txn.delete(waits)
    txn.put(keys.items + packed_seq, pack(replace(item, not_before_ns=txn.now_ns)))
    txn.put(keys.delayed + pack_int(txn.now_ns) + packed_seq, packed_seq)
    txn.notify(keys.topic)
    return True


@operation
def reap(txn: Txn, queue: str, limit: int, budget: Budget = DEFAULT_BUDGET) -> int:
    """Expire overdue claims, longest overdue first; how many."""
    keys = keys_of(queue)
    check_limit(limit)
    check_budget(budget)
    tally = Tally()
    overdue = _overdue(txn, keys, limit)
    _expire(txn, keys, overdue, budget, tally)
    tally.save(txn, keys)
    return len(overdue)


# -- looking -------------------------------------------------------------------------------------


def counts(txn: Txn, queue: str) -> Counts:
    return items.counts_of(txn, keys_of(queue))


def withdrawn(txn: Txn, queue: str) -> int:
    """How many were taken from whoever had claimed them, ever: a change says that it is time to
    look whether a claim still holds."""
    return txn.count(keys_of(queue).withdrawn)


def peek(txn: Txn, queue: str, limit: int) -> list[tuple[int, bytes]]:
    """The (seq, payload) that would be claimed next, of those that are ready."""
    keys = keys_of(queue)
    check_limit(limit)
    found = []
    for _, packed_seq in txn.scan(keys.ready, tuples.after(keys.ready), limit):
        item = items.load(txn, keys, packed_seq)
        found.append((seq_of(packed_seq), payload_of(txn, item)))
    return found


def claims_of(txn: Txn, queue: str, owner: str, limit: int) -> list[Claim]:
    """What an owner holds, by seq; overdue claims are among it until somebody sweeps them."""
    keys = keys_of(queue)
    check_name("owner", owner)
    check_limit(limit)
    mine = keys.owners + pack_owner(owner)
    found = []
    for _, packed_seq in txn.scan(mine, tuples.after(mine), limit):
        item = items.whole(txn, keys, packed_seq)
        found.append(claim_of(queue, packed_seq, item, item))
    return found


def claimed(txn: Txn, token: Token) -> Candidate | None:
    """The item of a claim as its admission saw it; None if the claim is lost."""
    if not holds(txn, token):
        return None
    item = items.whole(txn, keys_of(token.queue), pack_int(token.seq))
    return Candidate(
        token.seq,
        item.group,
        payload_of(txn, item),
        item.failures,
        item.expiries,
        item.claims,
        item.priority,
        item.turn,
    )


def next_due_ns(txn: Txn, queue: str, ahead_ns: int = 0) -> int | None:
    """When there is something to claim, by store time: 0 for now, None for nothing in sight.

    `ahead_ns` is by how much the clock of what is delayed is ahead of store time.
    """
    keys = keys_of(queue)
    if txn.scan(keys.ready, tuples.after(keys.ready), 1):
        return 0
    times = [
        _time_in(key, prefix) - clock_ns
        for prefix, clock_ns in ((keys.delayed, ahead_ns), (keys.claims, 0))
        for key, _ in txn.scan(prefix, tuples.after(prefix), 1)
    ]
    return max(min(times), 0) if times else None


def payload_of(txn: Txn, holder: Claim | Dead | Item) -> bytes:
    # A claim checks no payload, so that one damaged item does not stop the queue. `verify` names a damaged blob.
    return blobs.get(txn, holder.blob, checked=False) if holder.blob else holder.payload


# -- inside --------------------------------------------------------------------------------------


def _overdue(txn: Txn, keys: Keys, limit: int) -> list[Row]:
    return txn.scan(keys.claims, keys.claims + pack_int(txn.now_ns + 1), limit)


def _expire(txn: Txn, keys: Keys, overdue: list[Row], budget: Budget, tally: Tally) -> None:
    txn.prefetch(
        prefix + packed_seq for _, packed_seq in overdue for prefix in (keys.items, keys.holds)
    )
    for _, packed_seq in overdue:
        item = items.whole(txn, keys, packed_seq)
        tried = items.tried(item, "expired", item.expires_ns, "claim_expired", "")
        after = replace(item, expiries=item.expiries + 1, tried=tried)
        if after.expiries >= budget.expiries_max:
            letters.inter(txn, keys, packed_seq, after, "expiries_exhausted", item.error)
            tally.move(State.CLAIMED, Event.EXHAUST)
        else:
            give_back(txn, keys, packed_seq, item, after)
            tally.move(State.CLAIMED, Event.EXPIRE)


def _wake(txn: Txn, keys: Keys, limit: int, tally: Tally) -> None:
    due = txn.scan(keys.delayed, keys.delayed + pack_int(txn.now_ns + 1), limit)
    txn.prefetch(keys.items + packed_seq for _, packed_seq in due)
    for key, packed_seq in due:
        _woken(txn, keys, key, packed_seq, items.load(txn, keys, packed_seq))
    if due:
        tally.move(State.DELAYED, Event.DUE, len(due))


def _line_up(txn: Txn, keys: Keys, limit: int, tally: Tally) -> None:
    """Put what is ready among what waits for its time, by the time it waited for: that index alone is
    the order then. Items are ready that were due when they were put, or have come back from a claim."""
    ready = txn.scan(keys.ready, tuples.after(keys.ready), limit)
    txn.prefetch(keys.items + packed_seq for _, packed_seq in ready)
    for key, packed_seq in ready:
        was = items.load(txn, keys, packed_seq)
        due_ns = min(was.not_before_ns or was.enqueued_ns, txn.now_ns)
        if due_ns != was.not_before_ns:
            txn.put(keys.items + packed_seq, pack(replace(was, not_before_ns=due_ns)))
        txn.delete(key)
        txn.put(keys.delayed + pack_int(due_ns) + packed_seq, packed_seq)
    if ready:
        tally.move(State.READY, Event.DEFER, len(ready))


def _woken(txn: Txn, keys: Keys, waits: bytes, packed_seq: bytes, was: Item) -> None:
    item = items.come_back(txn, keys, was)
    if item is not was:
        txn.put(keys.items + packed_seq, pack(item))
    txn.delete(waits)
    txn.put(keys.ready_key(item.priority, item.turn, packed_seq), packed_seq)


def _time_in(key: bytes, prefix: bytes) -> int:
    time_ns = tuples.unpack(key[len(prefix) :])[0]
    assert isinstance(time_ns, int)
    return time_ns
