"""How often something may be begun, across all processes: blocks of tokens leased from the store.

The tokens of a queue are slots of time, one after the other, spaced so that no second holds more of
them than the rate. A block is the next n slots, by store time; its row says until when they are
given away. A token may be used from the start of its slot on, `LATE_NS` long, and the spacing
allows for that lateness. So

- over any second, wherever it starts, no more begin than the rate, however many pools there are;
- time in which nobody asked is lost: after a pause there is no burst;
- nobody starves: whoever asks gets the next slots, and a block reaches only `AHEAD_NS` ahead.

A pool asks for its next block while it uses the last one, so a rate is reached whatever a commit takes.
A pool that dies with a block in hand wastes it, and so does one whose work was done by another.
"""

from __future__ import annotations

from collections import deque

from holdfast.clock import MS, S
from holdfast.codec import Record
from holdfast.durable.bounds import check_name
from holdfast.errors import Invalid
from holdfast.store import schema
from holdfast.store.api import Future, Store, Txn, operation

# A block reaches no further than this beyond now: what a dead pool may waste of a fast rate.
AHEAD_NS = 100 * MS
# How late a token may be used: a busy process is not punctual.
LATE_NS = 50 * MS
# The next block is asked for when the last one is used up as soon as this.
SOON_NS = AHEAD_NS // 2
TOKENS_MAX = 1_000
LEAD_NS_MAX = 5 * S
RATE_MAX = 1e9


class Block(Record, frozen=True):
    """Slots that nobody else has: the first begins at `from_ns`, each is `slot_ns` long."""

    from_ns: int
    slot_ns: int
    tokens: int


@operation
def grant(txn: Txn, queue: str, rate_per_s: float, wanted: int, lead_ns: int = 0) -> Block:
    """The next slots of a rate: one at least, and as many as are wanted within `AHEAD_NS`.

    They begin after `lead_ns` at the earliest: about how long the answer takes to arrive.
    """
    check_name("queue", queue)
    if not 0 < rate_per_s <= RATE_MAX or not 1 <= wanted <= TOKENS_MAX:
        raise Invalid(what="rate", queue=queue, rate_per_s=rate_per_s, wanted=wanted)
    key = schema.prefix(schema.Space.QUEUE, queue, "rate")
    # Rounded up: never above the rate.
    slot_ns = -int(-(S + LATE_NS) // rate_per_s)
    from_ns = max(txn.now_ns + min(max(lead_ns, 0), LEAD_NS_MAX), txn.count(key))
    room = (txn.now_ns + lead_ns + AHEAD_NS - from_ns) // slot_ns
    tokens = max(1, min(wanted, room))
    txn.put(key, schema.int_bytes(from_ns + tokens * slot_ns))
    return Block(from_ns, slot_ns, tokens)


class Tokens:
    """One pool's tokens of one rate. Not for several threads at once."""

    def __init__(self, store: Store, queue: str, rate_per_s: float) -> None:
        self._store = store
        self._queue = queue
        self._rate_per_s = rate_per_s
        self._slots: deque[int] = deque()
        # How long the store takes to answer, if that is long.
        self._lead_ns = 0
        # The block that was asked for ahead.
        self._next: Future[Block] | None = None

    def stock(self, wanted: int) -> int:
        """How many of those wanted could begin now or within `AHEAD_NS`. A block is asked for if there
        are none, and ahead if those there are will not last."""
        self._arrive()
        self._forget()
        if not self._slots:
            asked_ns = self._store.now_ns()
            self._add(self._ask(wanted).result())
            # A store that answers late must not make its tokens worthless.
            took_ns = self._store.now_ns() - asked_ns
            self._lead_ns = min(took_ns, LEAD_NS_MAX) if took_ns > LATE_NS // 2 else 0
        now_ns = self._store.now_ns()
        if wanted > len(self._slots) and self._next is None and self._slots[-1] < now_ns + SOON_NS:
            self._next = self._ask(wanted)
        return min(wanted, sum(slot_ns <= now_ns + AHEAD_NS for slot_ns in self._slots))

    def _ask(self, wanted: int) -> Future[Block]:
        """The block that is on its way, or the next."""
        asked, self._next = self._next, None
        if asked is not None:
            return asked
        return self._store.submit(
            grant, self._queue, self._rate_per_s, min(wanted, TOKENS_MAX), self._lead_ns
        )

    def _arrive(self) -> None:
        """Take the block that was asked for ahead, if it is there."""
        if self._next is not None and self._next.done():
            block, self._next = self._next, None
            self._add(block.result())

    def _add(self, block: Block) -> None:
        self._slots.extend(block.from_ns + n * block.slot_ns for n in range(block.tokens))

    def take(self, wanted: int) -> int:
        """How many may begin now, of those wanted. What is taken and not begun is wasted."""
        self._arrive()
        if not self._slots:
            self.stock(wanted)
        self._forget()
        now_ns = self._store.now_ns()
        taken = 0
        while self._slots and taken < wanted and self._slots[0] <= now_ns:
            self._slots.popleft()
            taken += 1
        return taken

    def _forget(self) -> None:
        """A token is good for its slot and a little longer."""
        now_ns = self._store.now_ns()
        while self._slots and self._slots[0] + LATE_NS < now_ns:
            self._slots.popleft()

    def wait_ns(self) -> int:
        """How long until the next of ours begins; 0 when there is none, and one may be asked for."""
        return max(0, self._slots[0] - self._store.now_ns()) if self._slots else 0
