"""A claim: somebody's hold on one item, for a time, and the ways it ends.

A token is (queue, seq, number). Every step here needs the current number, its owner, and
`now < expires`, judged where the commit is applied; else the claim is lost and nothing changes. A
late worker may do what it likes: the number has moved on, or the time has, and its answer counts
for nothing.

`ack` and `release` are all or none; `settle` ends a batch with an answer for each, which is what a
worker's tick wants, for one slow item must not void the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX, TTL_NS_MAX
from holdfast.durable import dead
from holdfast.durable import item as items
from holdfast.durable.bounds import check_limit, check_ttl
from holdfast.durable.item import (
    Event,
    Hold,
    Item,
    Keys,
    State,
    Tally,
    Tried,
    decode_hold,
    keys_of,
    pack,
    pack_int,
)
from holdfast.errors import ClaimLost, HoldfastError, Invalid
from holdfast.store import blobs
from holdfast.store.api import Txn, operation, resolve
from holdfast.store.txn import attempt

DONE = State.DONE.value
LOST = "lost"


class Budget(Record, frozen=True):
    """How often an item may fail, and how often its claim may expire, before it is dead."""

    failures_max: int = 5
    expiries_max: int = 3
    # From so many expiries on an item is claimed by itself, for it may be what its workers died of:
    # what is claimed beside it would be held to account for the next death. 0: never.
    alone_from: int = 0


class Token(Record, frozen=True):
    """What proves a claim. A Claim is one, and may be given wherever a Token is asked for."""

    queue: str
    seq: int
    number: int
    owner: str


class Claim(Token, frozen=True):
    """An item in somebody's hands. `payload_of` fetches a payload that is too large for the row."""

    expires_ns: int
    priority: int
    failures: int
    expiries: int
    enqueued_ns: int
    payload: bytes
    blob: bytes = b""
    tried: tuple[Tried, ...] = ()

    @property
    def token(self) -> Token:
        return Token(self.queue, self.seq, self.number, self.owner)


class Failure(Record, frozen=True):
    claim: Token
    code: str
    error: str
    retryable: bool = True
    delay_ns: int = 0


DEFAULT_BUDGET = Budget()


@operation
def ack(txn: Txn, claims: Sequence[Token]) -> None:
    """Done: the items and their claims go. All or none: ClaimLost names the first that is lost."""
    for keys, tokens in _by_queue(claims):
        for token in tokens:
            packed_seq = pack_int(token.seq)
            hold = _hold(txn, keys, token, packed_seq)
            if hold is None:
                raise _lost(token)
            _finish(txn, keys, hold, packed_seq)
        tally = Tally()
        tally.move(State.CLAIMED, Event.ACK, len(tokens))
        tally.save(txn, keys)


class Then(Record, frozen=True):
    """An operation that is part of how a claim ends: done if and only if it was still good.

    `of` counts acks and then failures.
    """

    of: int
    operation: str
    args: bytes


@operation
def settle(
    txn: Txn,
    acks: Sequence[Token],
    fails: Sequence[Failure],
    budget: Budget = DEFAULT_BUDGET,
    then: Sequence[Then] = (),
) -> list[str]:
    """The end of a batch, each claim judged alone: done, ready, delayed, dead or lost, in order.

    `then` names what else is committed with an end, by its index. If that of an ack cannot be done,
    the item has failed, for a reason of its own: the rest of the batch goes on.
    """
    check_limit(len(acks) + len(fails), "claims")
    check_budget(budget)
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    acked: Counter[str] = Counter()
    ends: list[str] = []
    joined: defaultdict[int, list[Then]] = defaultdict(list)
    for one in then:
        joined[one.of].append(one)
    txn.prefetch(_rows_of(acks, fails))
    for index, token in enumerate(acks):
        keys = keys_of(token.queue)
        packed_seq = pack_int(token.seq)
        hold = _hold(txn, keys, token, packed_seq)
        if hold is None:
            ends.append(LOST)
            continue
        refused = _join(txn, joined.get(index, ()))
        if refused is not None:
            item = items.whole(txn, keys, packed_seq)
            failure = Failure(token, refused.code, str(refused), refused.retryable)
            end = _fail(txn, keys, item, packed_seq, failure, budget, tallies[token.queue])
            ends.append(end.value)
            continue
        _finish(txn, keys, hold, packed_seq)
        acked[token.queue] += 1
        ends.append(DONE)
    for queue, n in acked.items():
        tallies[queue].move(State.CLAIMED, Event.ACK, n)
    for index, failure in enumerate(fails, start=len(acks)):
        _check_failure(failure)
        queue = failure.claim.queue
        keys = keys_of(queue)
        packed_seq = pack_int(failure.claim.seq)
        held = _held(txn, keys, failure.claim, packed_seq)
        if held is None:
            ends.append(LOST)
            continue
        _join(txn, joined.get(index, ()))
        end = _fail(txn, keys, held, packed_seq, failure, budget, tallies[queue])
        ends.append(end.value)
    for queue, tally in tallies.items():
        tally.save(txn, keys_of(queue))
    return ends


def _rows_of(acks: Sequence[Token], fails: Sequence[Failure]) -> Iterator[bytes]:
    for token in acks:
        yield keys_of(token.queue).holds + pack_int(token.seq)
    for failure in fails:
        keys, packed_seq = keys_of(failure.claim.queue), pack_int(failure.claim.seq)
        yield keys.holds + packed_seq
        yield keys.items + packed_seq


def _join(txn: Txn, then: Sequence[Then]) -> HoldfastError | None:
    for one in then:
        try:
            joins = resolve(one.operation)
            raised = attempt(txn, joins, *joins.decode_args(one.args))
        except (HoldfastError, msgspec.MsgspecError) as error:
            raised = error
        if raised is not None:
            if isinstance(raised, HoldfastError):
                return raised
            return Invalid(what="joined operation", name=one.operation, why=repr(raised))
    return None


@operation
def fail(
    txn: Txn,
    claim: Token,
    code: str,
    error: str,
    retryable: bool = True,
    delay_ns: int = 0,
    budget: Budget = DEFAULT_BUDGET,
) -> str:
    """Count a failure; the item is then ready, delayed, or dead when its budget is used up."""
    failure = Failure(claim, code, error, retryable, delay_ns)
    [end] = settle.fn(txn, [], [failure], budget)
    if end == LOST:
        raise _lost(claim)
    return end


@operation
def bury(txn: Txn, claim: Token, code: str, error: str) -> None:
    """Dead at once, without counting a failure: nobody could ever handle this."""
    keys = keys_of(claim.queue)
    _check_code(code)
    packed_seq = pack_int(claim.seq)
    item = _held(txn, keys, claim, packed_seq)
    if item is None:
        raise _lost(claim)
    dead.inter(txn, keys, packed_seq, item, code, error)
    tally = Tally()
    tally.move(State.CLAIMED, Event.BURY)
    tally.save(txn, keys)


@operation
def release(txn: Txn, claims: Sequence[Token]) -> None:
    """Give items back unharmed. All or none."""
    for keys, tokens in _by_queue(claims):
        for token in tokens:
            packed_seq = pack_int(token.seq)
            item = _held(txn, keys, token, packed_seq)
            if item is None:
                raise _lost(token)
            give_back(txn, keys, packed_seq, item, item)
        tally = Tally()
        tally.move(State.CLAIMED, Event.RELEASE, len(tokens))
        tally.save(txn, keys)


@operation
def extend(txn: Txn, claims: Sequence[Token], ttl_ns: int) -> list[int | None]:
    """Hold claims for `ttl_ns` from now, never for less than before; None for each that is lost."""
    check_limit(len(claims), "claims")
    check_ttl(ttl_ns)
    answers: list[int | None] = []
    txn.prefetch(_rows_of(claims, ()))
    for token in claims:
        keys = keys_of(token.queue)
        packed_seq = pack_int(token.seq)
        hold = _hold(txn, keys, token, packed_seq)
        if hold is None:
            answers.append(None)
            continue
        expires_ns = max(hold.expires_ns, txn.now_ns + ttl_ns)
        txn.delete(keys.claims + pack_int(hold.expires_ns) + packed_seq)
        txn.put(keys.claims + pack_int(expires_ns) + packed_seq, packed_seq)
        txn.put(keys.holds + packed_seq, pack(replace(hold, expires_ns=expires_ns)))
        answers.append(expires_ns)
    return answers


def holds(txn: Txn, claim: Token) -> bool:
    """Whether this is the item's current claim, and live."""
    return _hold(txn, keys_of(claim.queue), claim, pack_int(claim.seq)) is not None


def _hold(txn: Txn, keys: Keys, token: Token, packed_seq: bytes) -> Hold | None:
    """The claim, if the token is its and it is live."""
    row = txn.get(keys.holds + packed_seq)
    if row is None:
        return None
    hold = decode_hold(row)
    if hold.claims != token.number or hold.owner != token.owner or txn.now_ns >= hold.expires_ns:
        return None
    return hold


def _held(txn: Txn, keys: Keys, token: Token, packed_seq: bytes) -> Item | None:
    """The item, if the token is its current claim and live."""
    if _hold(txn, keys, token, packed_seq) is None:
        return None
    return items.whole(txn, keys, packed_seq)


def _finish(txn: Txn, keys: Keys, hold: Hold, packed_seq: bytes) -> None:
    txn.delete(keys.items + packed_seq)
    items.drop_claim(txn, keys, hold, packed_seq)
    if hold.blob:
        blobs.release(txn, hold.blob)


def _fail(
    txn: Txn,
    keys: Keys,
    item: Item,
    packed_seq: bytes,
    failure: Failure,
    budget: Budget,
    tally: Tally,
) -> State:
    failures = item.failures + 1
    tried = items.tried(item, "failed", txn.now_ns, failure.code, failure.error)
    if not failure.retryable or failures >= budget.failures_max:
        after = replace(item, failures=failures, tried=tried)
        dead.inter(txn, keys, packed_seq, after, failure.code, failure.error)
        return tally.move(State.CLAIMED, Event.EXHAUST if failure.retryable else Event.BURY)
    after = replace(
        item,
        failures=failures,
        code=failure.code[:ERROR_CODE_CHARS_MAX],
        error=failure.error[:ERROR_TEXT_CHARS_MAX],
        not_before_ns=txn.now_ns + failure.delay_ns if failure.delay_ns else item.not_before_ns,
        tried=tried,
    )
    give_back(txn, keys, packed_seq, item, after)
    return tally.move(State.CLAIMED, Event.DEFER if failure.delay_ns else Event.RETRY)


def give_back(txn: Txn, keys: Keys, packed_seq: bytes, item: Item, after: Item) -> None:
    """Back to ready, at a turn of now, or to delayed when it must wait; the seq stays."""
    items.drop_claim(txn, keys, item, packed_seq)
    if after.not_before_ns > txn.now_ns:
        index = keys.delayed + pack_int(after.not_before_ns) + packed_seq
    else:
        after = items.come_back(txn, keys, after)
        index = keys.ready_key(after.priority, after.turn, packed_seq)
    txn.put(keys.items + packed_seq, pack(replace(after, owner="", expires_ns=0)))
    txn.put(index, packed_seq)
    txn.notify(keys.topic)


def claim_of(queue: str, packed_seq: bytes, item: Item, hold: Hold | Item) -> Claim:
    return Claim(
        queue,
        int.from_bytes(packed_seq[1:], "big"),
        hold.claims,
        hold.owner,
        hold.expires_ns,
        item.priority,
        item.failures,
        item.expiries,
        item.enqueued_ns,
        item.payload,
        item.blob,
        item.tried,
    )


def _by_queue(claims: Sequence[Token]) -> Iterator[tuple[Keys, list[Token]]]:
    check_limit(len(claims), "claims")
    groups: dict[str, list[Token]] = {}
    for token in claims:
        groups.setdefault(token.queue, []).append(token)
    for queue, tokens in groups.items():
        yield keys_of(queue), tokens


def _lost(token: Token) -> ClaimLost:
    return ClaimLost(queue=token.queue, seq=token.seq, number=token.number)


def check_budget(budget: Budget) -> None:
    if budget.failures_max < 1 or budget.expiries_max < 1 or budget.alone_from < 0:
        raise Invalid(
            what="budget",
            why="each is 1 or more",
            failures_max=budget.failures_max,
            expiries_max=budget.expiries_max,
        )


def _check_failure(failure: Failure) -> None:
    _check_code(failure.code)
    if not 0 <= failure.delay_ns <= TTL_NS_MAX:
        raise Invalid(what="delay_ns", why="out of bounds", found=failure.delay_ns, max=TTL_NS_MAX)


def _check_code(code: str) -> None:
    if not code:
        raise Invalid(what="code", why="a failure has a code")
