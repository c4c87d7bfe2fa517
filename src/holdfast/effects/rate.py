"""A rate limiter across processes: worker pools lease blocks of tokens from the store.

The tokens of a queue are consecutive time slots, spaced so that no second contains more of them than the
rate. A block is the next n slots in store time. Its row stores the end of the last leased slot. A token is
valid for `LATENESS_NS` from the start of its slot, and the spacing accounts for that lateness. Therefore:

- in any interval of one second, the number of starts does not exceed the rate, for any number of pools;
- unused time is lost: there is no burst after a pause;
- no pool starves: each request gets the next slots, and a block extends only `PREFETCH_NS` ahead.

A pool requests its next block while it uses the current one, so commit latency does not limit the rate. A
pool that crashes wastes its block. A pool whose work another pool has done wastes it too.
"""

from __future__ import annotations

from collections import deque

from holdfast.clock import MS, S
from holdfast.codec import Record
from holdfast.durable.validation import check_name
from holdfast.errors import Invalid
from holdfast.store import schema
from holdfast.store.api import Future, Store, Txn, operation

# Maximum reach of a block beyond now. It bounds the tokens that a crashed pool wastes.
PREFETCH_NS = 100 * MS
# Validity of a token after the start of its slot. It tolerates delays in a busy process.
LATENESS_NS = 50 * MS
# A pool requests the next block when its last token starts within this time.
REFILL_NS = PREFETCH_NS // 2
TOKENS_MAX = 1_000
REPLY_LATENCY_NS_MAX = 5 * S
RATE_MAX = 1e9


class TokenBlock(Record, frozen=True):
    """A block of slots, leased to one pool: the first starts at `from_ns`, each is `slot_ns` long."""

    from_ns: int
    slot_ns: int
    tokens: int


@operation("rate.grant")
def grant(txn: Txn, queue: str, rate_per_s: float, wanted: int, lead_ns: int = 0) -> TokenBlock:
    """Lease the next slots of a rate: at least one, at most `wanted`, within `PREFETCH_NS`.

    They start after `lead_ns` at the earliest, which is about the latency of the reply.
    """
    check_name("queue", queue)
    if not 0 < rate_per_s <= RATE_MAX or not 1 <= wanted <= TOKENS_MAX:
        raise Invalid(what="rate", queue=queue, rate_per_s=rate_per_s, wanted=wanted)
    key = _key(queue)
    # Rounded up, so that the rate is never exceeded.
    slot_ns = -int(-(S + LATENESS_NS) // rate_per_s)
    from_ns = max(txn.now_ns + min(max(lead_ns, 0), REPLY_LATENCY_NS_MAX), txn.count(key))
    slots_ahead = (txn.now_ns + lead_ns + PREFETCH_NS - from_ns) // slot_ns
    tokens = max(1, min(wanted, slots_ahead))
    txn.put(key, schema.encode_int(from_ns + tokens * slot_ns))
    return TokenBlock(from_ns, slot_ns, tokens)


def granted_until_ns(txn: Txn, queue: str) -> int:
    """Return the time up to which the slots of a rate are leased; 0 if none was."""
    return txn.count(_key(queue))


def _key(queue: str) -> bytes:
    return schema.key_prefix(schema.Space.QUEUE, queue, "rate")


class RateTokens:
    """The tokens of one pool for one rate. Not thread-safe."""

    def __init__(self, store: Store, queue: str, rate_per_s: float) -> None:
        self._store = store
        self._queue = queue
        self._rate_per_s = rate_per_s
        self._slots: deque[int] = deque()
        # Reply latency of the store, if it is high.
        self._reply_latency_ns = 0
        # The prefetched block.
        self._prefetched: Future[TokenBlock] | None = None

    def available(self, wanted: int) -> int:
        """Return how many of `wanted` starts have a token now or within `PREFETCH_NS`. Requests a block if
        there is no token, and prefetches one if the tokens run out soon."""
        self._on_granted()
        self._drop_expired()
        if not self._slots:
            requested_ns = self._store.now_ns()
            self._add(self._request_block(wanted).result())
            # With a slow store, request slots far enough ahead that they are valid on arrival.
            latency_ns = self._store.now_ns() - requested_ns
            self._reply_latency_ns = (
                min(latency_ns, REPLY_LATENCY_NS_MAX) if latency_ns > LATENESS_NS // 2 else 0
            )
        now_ns = self._store.now_ns()
        if (
            wanted > len(self._slots)
            and self._prefetched is None
            and self._slots[-1] < now_ns + REFILL_NS
        ):
            self._prefetched = self._request_block(wanted)
        return min(wanted, sum(slot_ns <= now_ns + PREFETCH_NS for slot_ns in self._slots))

    def _request_block(self, wanted: int) -> Future[TokenBlock]:
        """Return the future of the requested block, or request the next one."""
        pending, self._prefetched = self._prefetched, None
        if pending is not None:
            return pending
        return self._store.submit(
            grant, self._queue, self._rate_per_s, min(wanted, TOKENS_MAX), self._reply_latency_ns
        )

    def _on_granted(self) -> None:
        """Add the prefetched block if it has arrived."""
        if self._prefetched is not None and self._prefetched.done():
            block, self._prefetched = self._prefetched, None
            self._add(block.result())

    def _add(self, block: TokenBlock) -> None:
        self._slots.extend(block.from_ns + n * block.slot_ns for n in range(block.tokens))

    def acquire(self, wanted: int) -> int:
        """Acquire up to `wanted` tokens for starts now, and return their number. Unused tokens are wasted."""
        self._on_granted()
        if not self._slots:
            self.available(wanted)
        self._drop_expired()
        now_ns = self._store.now_ns()
        acquired = 0
        while self._slots and acquired < wanted and self._slots[0] <= now_ns:
            self._slots.popleft()
            acquired += 1
        return acquired

    def _drop_expired(self) -> None:
        """Drop tokens that are past their validity."""
        now_ns = self._store.now_ns()
        while self._slots and self._slots[0] + LATENESS_NS < now_ns:
            self._slots.popleft()

    def wait_ns(self) -> int:
        """Return the time until the next token is valid. 0 if there is none: a request may get one."""
        return max(0, self._slots[0] - self._store.now_ns()) if self._slots else 0
