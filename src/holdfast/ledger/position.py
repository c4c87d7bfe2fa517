"""Where a run stands: what its log comes to when its entries are applied in order.

`apply` is the only way a position changes, live and in a replay alike; it looks at the entry and at
what earlier entries left, never at a clock. So two positions after the same entries are the same,
and `dump` gives the same bytes for both.

    unseen     never handed out
    free       DISPATCHED and nobody's: given back un-begun, or a retry whose time has come
    resting    DISPATCHED and nobody's: a retry that waits, by time
    suspects   DISPATCHED and nobody's: begun once and never finished
    grants     everything else that is not final, each row in exactly one grant

When grants expire is not part of it: heartbeats are not logged, and whoever loads a position lets
all of its grants live for a whole lease again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from msgspec import field

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import Invalid, StoreCorrupt
from holdfast.ledger.answers import Taken
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.ledger import Ledger
from holdfast.ledger.pages import Page
from holdfast.ledger.ranges import Pool, Range, Ranges
from holdfast.ledger.records import (
    Adopted,
    Advanced,
    Cancelled,
    Cancelling,
    Committed,
    Counted,
    Halted,
    Leased,
    LogEntry,
    Opened,
    Reclaimed,
    Resumed,
    Retuned,
    Ripened,
    Stopped,
)
from holdfast.ledger.states import REPORTED, Event
from holdfast.ledger.stop_rules import Tally, add_errors

# Answers that are kept for repeats: of one grant, and grants that are over.
REPLIES_KEPT = 16
OVER_KEPT = 256
# ... as long as they tell of no more retries than this altogether.
OVER_RETRIED_MAX = 10_000
# One entry frees so many ranges of retries at most; the next claim frees more.
RIPEN_MAX = 1024


class Reply(Record, frozen=True):
    n: int
    digest: bytes
    taken: Taken


class Holding:
    """A grant that is not over: its rows that are not begun, and those that are."""

    __slots__ = ("alone", "begun", "epoch", "idle", "n", "owner", "replies")

    def __init__(self, epoch: int, owner: str, alone: bool) -> None:
        self.epoch = epoch
        self.owner = owner
        self.alone = alone
        self.idle = Ranges()
        self.begun = Ranges()
        # The last request that was taken.
        self.n = 0
        self.replies: deque[Reply] = deque(maxlen=REPLIES_KEPT)

    @property
    def rows(self) -> int:
        return self.idle.rows + self.begun.rows


class Held(Record, frozen=True):
    epoch: int
    owner: str
    alone: bool
    idle: list[Range]
    begun: list[Range]
    n: int
    replies: list[Reply]


class Over(Record, frozen=True):
    """A grant that ended well; its last answers, for whoever did not get them."""

    epoch: int
    owner: str
    replies: list[Reply]

    @property
    def retried(self) -> int:
        return sum(len(reply.taken.retried) for reply in self.replies)


class Dump(Record, frozen=True):
    size: int
    policy: Policy
    decided_ns: int
    epoch: int
    retries: int
    reclaims: int
    next_commit: int
    version: int
    grace_ends_ns: int
    cancelling: bool
    halted: Halted | None
    resting: list[tuple[int, int, int]]
    suspects: list[Range]
    grants: list[Held]
    over: list[Over]
    pages: list[Page]
    ended: list[int]
    # Of the stop rules: what was reached; rows that had failed and ended when they began to count; cost and
    # equal errors since.
    stopped: Stopped | None = None
    stop_base: tuple[int, int] = (0, 0)
    stop_cost: float = 0.0
    stop_errors: list[tuple[int, int]] = field(default_factory=list)


def adopter(from_run: str) -> str:
    """The owner of rows that are adopted from a run, as errors name it."""
    return f"run/{from_run}"


class Position:
    def __init__(self, size: int, policy: Policy) -> None:
        self.policy = policy
        self.ledger = Ledger(size, page_rows=policy.page_rows)
        self.unseen = Pool(policy.page_rows)
        self.unseen.add(0, size)
        self._clear(policy)

    def _clear(self, policy: Policy) -> None:
        self.free = Pool(policy.page_rows)
        self.suspects = Pool(policy.page_rows)
        # (not_before_ns, lo, hi), a heap.
        self.resting: list[tuple[int, int, int]] = []
        self.grants: dict[int, Holding] = {}
        self.over: dict[int, Over] = {}
        self._over_retried = 0
        # The last epoch that was given.
        self.epoch = 0
        self.retries = 0
        self.reclaims = 0
        self.next_commit = 0
        self.version = -1
        self.cancelling = False
        self.grace_ends_ns = 0
        self.halted: Halted | None = None
        self.stopped: Stopped | None = None
        # Rows that had failed and ended when the stop rules began to count; cost and equal errors since.
        self._stop_base = (0, 0)
        self._stop_cost = 0.0
        self.stop_errors: dict[int, int] = {}
        # When the last entry was decided; time never runs backward in a log.
        self.decided_ns = 0

    @property
    def size(self) -> int:
        return self.ledger.size

    @property
    def ended(self) -> list[int]:
        """Rows that succeeded, were skipped, failed, were cancelled; committed or not."""
        return list(self.ledger.ended)

    @property
    def finished(self) -> bool:
        """Every row is terminal for good."""
        return self.ledger.final_count == self.size

    def counted(self) -> Tally:
        """What counts towards the stop rules so far."""
        failed, ended = self._stop_base
        return Tally(self.ledger.ended[2] - failed, sum(self.ledger.ended) - ended, self._stop_cost)

    # -- the fold ------------------------------------------------------------------------------

    def apply(self, entry: LogEntry) -> None:
        self.decided_ns = entry.decided_ns
        match entry:
            case Advanced():
                self._advanced(entry)
            case Leased():
                self._leased(entry)
            case Committed():
                self._move(self.next_commit, entry.upto, Event.COMMIT)
                self.next_commit, self.version = entry.upto, entry.version
            case Ripened():
                for _ in range(RIPEN_MAX):
                    if not self.resting or self.resting[0][0] > entry.decided_ns:
                        break
                    _, lo, hi = heappop(self.resting)
                    self.free.add(lo, hi)
            case Reclaimed():
                self._reclaimed(entry)
            case Cancelling():
                self._cancelling(entry)
            case Cancelled():
                for held in list(self.grants.values()):
                    for lo, hi in held.begun:
                        self._move(lo, hi, Event.CANCEL, held, reason=ErrorClass.CANCELLATION)
                    self._forget(held)
            case Adopted():
                self._adopted(entry)
            case Retuned():
                self.policy = entry.policy
            case Counted():
                self._stop_cost += entry.cost
                self.stop_errors = add_errors(self.stop_errors, entry.errors)
            case Stopped():
                self.stopped = entry
            case Resumed():
                self.stopped = None
                self._stop_base = (self.ledger.ended[2], sum(self.ledger.ended))
                self._stop_cost, self.stop_errors = 0.0, {}
            case Halted():
                self.halted = entry
            case Opened():
                pass

    def _adopted(self, entry: Adopted) -> None:
        """The moves of a row that is called, each checked by the table; the grant is never held."""
        self.epoch = entry.epoch
        failed, ended = self.ledger.ended[2], sum(self.ledger.ended)
        held = Holding(entry.epoch, adopter(entry.from_run), False)
        for one in entry.rows:
            self.unseen.remove(one.lo, one.hi)
            self._move(one.lo, one.hi, Event.DISPATCH, held)
            self.ledger.own(one.lo, one.hi, entry.epoch)
            self._move(one.lo, one.hi, Event.BEGIN, held, epoch=entry.epoch)
            self._move(
                one.lo, one.hi, REPORTED[one.code], held, epoch=entry.epoch,
                reason=one.error_class,
            )  # fmt: skip
        # What was paid for before counts towards no stop rule.
        self._stop_base = (
            self._stop_base[0] + self.ledger.ended[2] - failed,
            self._stop_base[1] + sum(self.ledger.ended) - ended,
        )

    def _leased(self, entry: Leased) -> None:
        held = self.grants[entry.epoch] = Holding(entry.epoch, entry.owner, entry.alone)
        self.epoch = entry.epoch
        for part in entry.parts:
            lo, hi = part.lo, part.hi
            if entry.alone:
                self.suspects.remove(lo, hi)
            elif self.ledger.is_unseen(lo):
                self.unseen.remove(lo, hi)
                self._move(lo, hi, Event.DISPATCH, held)
            else:
                self.free.remove(lo, hi)
            self.ledger.own(lo, hi, entry.epoch)
            held.idle.add(lo, hi)
        self._begin(held, entry.begun)

    def _advanced(self, entry: Advanced) -> None:
        held = self.grants[entry.epoch]
        for done in entry.done:
            self._move(
                done.lo, done.hi, REPORTED[done.code], held, epoch=held.epoch,
                reason=done.error_class,
            )  # fmt: skip
            held.begun.remove(done.lo, done.hi)
        for again in entry.retried:
            self._fail(held, again.lo, again.hi, again.error_class, epoch=held.epoch)
            self._move(again.lo, again.hi, Event.RETRY, held)
            self.retries += again.hi - again.lo
            if again.not_before_ns > entry.decided_ns:
                heappush(self.resting, (again.not_before_ns, again.lo, again.hi))
            else:
                self.free.add(again.lo, again.hi)
        self._begin(held, entry.begun)
        held.n = entry.n
        taken = Taken(held.rows, not entry.stop, entry.stop, entry.retried)
        held.replies.append(Reply(entry.n, entry.digest, taken))
        if not held.rows:
            self._forget(held)
            self._keep(Over(held.epoch, held.owner, list(held.replies)))

    def _reclaimed(self, entry: Reclaimed) -> None:
        held = self.grants[entry.epoch]
        # What is given back by its owner is no loss.
        self.reclaims += entry.why != "returned"
        for lo, hi in held.idle:
            self.ledger.own(lo, hi, 0)
            self.free.add(lo, hi)
        for lo, hi in entry.suspects:
            self._fail(held, lo, hi, ErrorClass.LEASE_EXPIRED)
            self._move(lo, hi, Event.RETRY, held)
            self.retries += hi - lo
            self.suspects.add(lo, hi)
        for lo, hi in entry.failed:
            self._fail(held, lo, hi, ErrorClass.LEASE_EXPIRED)
        for lo, hi in entry.cancelled:
            self._move(lo, hi, Event.CANCEL, held, reason=ErrorClass.CANCELLATION)
        self._forget(held)

    def _cancelling(self, entry: Cancelling) -> None:
        self.cancelling, self.grace_ends_ns = True, entry.grace_ends_ns
        for lo, hi in self.unseen:
            self._move(lo, hi, Event.DISPATCH)
        waiting = [(lo, hi) for _, lo, hi in self.resting]
        for lo, hi in (*self.unseen, *self.free, *self.suspects, *waiting):
            self._move(lo, hi, Event.CANCEL, reason=ErrorClass.CANCELLATION)
        for pool in (self.unseen, self.free, self.suspects):
            pool.clear()
        self.resting.clear()
        for held in list(self.grants.values()):
            for lo, hi in held.idle:
                self._move(lo, hi, Event.CANCEL, held, reason=ErrorClass.CANCELLATION)
            held.idle = Ranges()
            if not held.rows:
                self._forget(held)

    def _begin(self, held: Holding, begun: Iterable[Range]) -> None:
        for lo, hi in begun:
            self._move(lo, hi, Event.BEGIN, held, epoch=held.epoch)
            held.idle.remove(lo, hi)
            held.begun.add(lo, hi)

    def _fail(self, held: Holding, lo: int, hi: int, why: int, *, epoch: int = 0) -> None:
        self._move(lo, hi, Event.FAIL, held, epoch=epoch, reason=why)
        if epoch:
            held.begun.remove(lo, hi)

    def _move(
        self,
        lo: int,
        hi: int,
        event: Event,
        held: Holding | None = None,
        *,
        epoch: int = 0,
        reason: int = 0,
    ) -> None:
        owner = held.owner if held else ""
        self.ledger.move(
            lo, hi, event, epoch=epoch, reason=reason, owner=owner, wall_ns=self.decided_ns
        )

    def _forget(self, held: Holding) -> None:
        del self.grants[held.epoch]

    def _keep(self, ended: Over) -> None:
        self.over[ended.epoch] = ended
        self._over_retried += ended.retried
        while len(self.over) > OVER_KEPT or (
            len(self.over) > 1 and self._over_retried > OVER_RETRIED_MAX
        ):
            self._over_retried -= self.over.pop(next(iter(self.over))).retried

    # -- checkpoints ---------------------------------------------------------------------------

    def dump(self) -> bytes:
        """All of it, as range records; equal positions have equal bytes."""
        return codec.pack(
            Dump(
                self.size,
                self.policy,
                self.decided_ns,
                self.epoch,
                self.retries,
                self.reclaims,
                self.next_commit,
                self.version,
                self.grace_ends_ns,
                self.cancelling,
                self.halted,
                sorted(self.resting),
                list(self.suspects),
                [
                    Held(
                        held.epoch,
                        held.owner,
                        held.alone,
                        list(held.idle),
                        list(held.begun),
                        held.n,
                        list(held.replies),
                    )
                    for held in self.grants.values()
                ],
                list(self.over.values()),
                self.ledger.ranges(),
                self.ledger.ended,
                self.stopped,
                self._stop_base,
                self._stop_cost,
                sorted(self.stop_errors.items()),
            )
        )

    def restore(self, told: Dump) -> None:
        """Become what a dump tells of. Free rows are those that nothing else accounts for."""
        self._clear(told.policy)
        policy = self.policy = told.policy
        self.ledger = Ledger.from_ranges(
            told.size, told.pages, told.ended, page_rows=policy.page_rows
        )
        self.decided_ns = told.decided_ns
        self.epoch = told.epoch
        self.retries = told.retries
        self.reclaims = told.reclaims
        self.next_commit = told.next_commit
        self.version = told.version
        self.grace_ends_ns = told.grace_ends_ns
        self.cancelling = told.cancelling
        self.halted = told.halted
        self.stopped = told.stopped
        self._stop_base = told.stop_base
        self._stop_cost = told.stop_cost
        self.stop_errors = dict(told.stop_errors)
        # Sorted is a heap, too.
        self.resting = list(told.resting)
        for ended in told.over:
            self._keep(ended)
        self.unseen = Pool(policy.page_rows)
        for lo, hi in self.ledger.runs_of(0):
            self.unseen.add(lo, hi)
        for lo, hi in self.ledger.runs_of(1):
            self.free.add(lo, hi)
        try:
            for lo, hi in told.suspects:
                self.free.remove(lo, hi)
                self.suspects.add(lo, hi)
            for _, lo, hi in told.resting:
                self.free.remove(lo, hi)
            for grant in told.grants:
                self._regrant(grant)
        except Invalid:
            raise StoreCorrupt(what="checkpoint", why="its parts do not fit together") from None

    def _regrant(self, told: Held) -> None:
        held = self.grants[told.epoch] = Holding(told.epoch, told.owner, told.alone)
        held.n = told.n
        held.replies.extend(told.replies)
        for lo, hi in told.idle:
            self.free.remove(lo, hi)
            held.idle.add(lo, hi)
            self.ledger.lease[lo:hi] = told.epoch
        for lo, hi in told.begun:
            held.begun.add(lo, hi)
            self.ledger.lease[lo:hi] = told.epoch
