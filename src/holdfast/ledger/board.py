"""The board: the one place that decides. It is a position, and what may be done from there.

Every decision looks, writes down what is to happen as entries, applies them to itself by the fold
that a replay uses, and answers `(answer, entries)`. The caller logs the entries before it lets the
answer out. What the log refuses leaves a board that is ahead of it: throw it away and load.

- Time is what callers say it is, and never runs backward: `now_ns` is the store's time.
- A row is granted to one epoch at a time. What an epoch does after it was reclaimed is `Fenced`,
  counted, and changes nothing.
- Terminals are single-shot for a (seq, attempt). A request sent again, with the same number and
  digest, gets its first answer. Any other illegal move halts the run: `halted` is the entry to log.
- A retryable failure within its budgets is DISPATCHED again in the same decision, so nobody ever
  sees a terminal state that is not final.
- Every decision costs what it hands out or takes in; none depends on the size of the run. Only
  `cancel` and `load` read it all.

Surprising: a row that was begun and never finished is handed out last, for it may take its worker
down again; but first when it holds up the commit, for then nothing else can move that on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NoReturn

from holdfast import codec
from holdfast.config import NAME_BYTES_MAX
from holdfast.errors import Fenced, IllegalTransition, Invalid
from holdfast.ledger import judge
from holdfast.ledger.answers import Answer, Finished, Grant, Stop, Taken, Wait
from holdfast.ledger.choose import choose, leading
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.error_text import normalise
from holdfast.ledger.ledger import illegal
from holdfast.ledger.position import Dump, Holding, Position, adopter
from holdfast.ledger.ranges import Range
from holdfast.ledger.records import (
    Adopted,
    AdoptedRange,
    Advanced,
    Cancelled,
    Cancelling,
    Committed,
    Counted,
    Done,
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
from holdfast.ledger.states import REPORTED, State
from holdfast.ledger.stop_rules import GONE, error_id, reached

Entries = list[LogEntry]

ROWS_MAX = 1 << 20


class Board(Position):
    def __init__(self, size: int, policy: Policy) -> None:
        super().__init__(size, policy)
        self._by_owner: dict[str, set[int]] = {}
        self._expires: dict[int, int] = {}
        # (not later than it expires, epoch): a heartbeat changes the dict alone.
        self._expiries: list[tuple[int, int]] = []
        # Calls by epochs that were reclaimed. Not logged: it decides nothing.
        self.fenced = 0

    # -- making one ----------------------------------------------------------------------------

    @classmethod
    def open(cls, size: int, policy: Policy, *, now_ns: int) -> tuple[Board, Entries]:
        """A new run's board, and the entry that its log begins with."""
        entry = Opened(now_ns, size, policy)
        return cls.replay([entry]), [entry]

    @classmethod
    def replay(cls, entries: Iterable[LogEntry], base: Board | None = None) -> Board:
        """The board after these entries, on top of a loaded one or from the first on."""
        board = base
        for entry in entries:
            if board is None:
                if not isinstance(entry, Opened):
                    raise Invalid(
                        what="log", why="it begins with Opened", found=type(entry).__name__
                    )
                board = cls(entry.size, entry.policy)
            board.apply(entry)
        if board is None:
            raise Invalid(what="log", why="it is empty")
        return board

    @classmethod
    def load(cls, dump: bytes) -> Board:
        """The board that was dumped. Call `renew` before its grants count as expired."""
        told = codec.unpack_as(Dump, dump)
        board = cls(0, told.policy)
        board.restore(told)
        for held in board.grants.values():
            board._by_owner.setdefault(held.owner, set()).add(held.epoch)
            board._expire_at(held.epoch, told.decided_ns + told.policy.lease_ns)
        return board

    def renew(self, now_ns: int) -> None:
        """Let every grant live for a whole lease from now: nobody could heartbeat meanwhile."""
        for epoch in self.grants:
            self._expires[epoch] = max(self._expires[epoch], now_ns + self.policy.lease_ns)

    # -- taking over ---------------------------------------------------------------------------

    def adopt(
        self, from_run: str, rows: Sequence[AdoptedRange], now_ns: int
    ) -> tuple[int, Entries]:
        """End rows that were never handed out as another run ended them; how many."""
        self._check_running()
        now_ns = max(now_ns, self.decided_ns)
        at = 0
        for one in rows:
            if not at <= one.lo < one.hi <= self.size or one.from_lo < 0:
                raise Invalid(what="adopted", why="not ascending rows of the run", found=one)
            if one.code not in REPORTED:
                raise Invalid(what="adopted", why="no outcome of a call", found=one.code)
            at = one.hi
            if not self.unseen.holds(one.lo, one.hi):
                seq = next(s for s in range(one.lo, at) if not self.ledger.is_unseen(s))
                prior, attempted = self.ledger.state_of(seq).name, State(one.code).name
                wrong = judge.Misfit(seq, prior, attempted, "adopted twice")
                self._halt(wrong, adopter(from_run), now_ns)
        if not rows:
            return 0, []
        entry = Adopted(now_ns, self.epoch + 1, from_run, list(rows))
        return sum(one.hi - one.lo for one in rows), [self._decide(entry)]

    # -- handing out ---------------------------------------------------------------------------

    def claim(
        self,
        owner: str,
        rows: int,
        *,
        now_ns: int,
        lo: int = 0,
        hi: int | None = None,
        begin: int = 0,
    ) -> tuple[Answer, Entries]:
        """Rows of one page of [lo, hi) to work on, the first `begin` of them begun right away."""
        hi = self.size if hi is None else hi
        _check_claim(owner, rows, begin)
        if not 0 <= lo <= hi <= self.size:
            raise Invalid(what="range", why="not in the run", found=(lo, hi), size=self.size)
        if self.halted is not None:
            return Stop("halted"), []
        if self.cancelling:
            return Stop("cancelling"), []
        if self.stopped is not None:
            return Stop("stopped"), []
        now_ns = max(now_ns, self.decided_ns)
        entries: Entries = []
        if self.resting and self.resting[0][0] <= now_ns:
            entries.append(self._decide(Ripened(now_ns)))
        parts, alone = choose(self, rows, lo, hi)
        if not parts:
            return self._nothing(lo, hi), entries
        epoch = self.epoch + 1
        begun = [] if alone else leading(self, parts, begin)
        entry = Leased(now_ns, epoch, owner, parts, begun, alone)
        entries.append(self._decide(entry))
        count = sum(last - first for first, last in begun)
        grant = Grant(epoch, owner, parts, count, alone, self._expires[epoch])
        return grant, entries

    def advance(
        self,
        epoch: int,
        n: int,
        digest: bytes,
        *,
        done: Sequence[Done] = (),
        begin: Sequence[Range] = (),
        now_ns: int,
        errors: Mapping[int, str] | None = None,
    ) -> tuple[Taken, Entries]:
        """Take a grant's report number n: rows that ended, rows that are about to be begun.

        `errors` has the text of failed rows by seq; it is looked at when the stop rules count equal errors.
        """
        self._check_running()
        now_ns = max(now_ns, self.decided_ns)
        held = self.grants.get(epoch)
        told = held or self.over.get(epoch)
        if told is None:
            raise self._fence(epoch)
        for reply in told.replies:
            if reply.n == n:
                if reply.digest != digest:
                    self._halt(judge.other_request(self, done, begin), told.owner, now_ns)
                return reply.taken, []
        if held is None:
            raise self._fence(epoch)
        if n != held.n + 1:
            raise Invalid(what="n", why="out of order", epoch=epoch, found=n, expected=held.n + 1)
        # Rows that a cancellation has ended meanwhile are refused, and not held against their owner.
        stop = "cancelling" if self.cancelling else "stopped" if self.stopped else ""
        begun = [] if stop else [(lo, hi) for lo, hi in begin]
        wrong = judge.misfit(self, held, done, begun)
        if wrong is not None:
            self._halt(wrong, held.owner, now_ns)
        final, retried = judge.judge(self, done, now_ns)
        self._expires[epoch] = max(self._expires[epoch], now_ns + self.policy.lease_ns)
        if not stop and self.policy.stop.armed and (why := self._reached(final, errors or {})):
            # The board begins no row that this report names.
            stop, begun = "stopped", []
            entries = [
                self._decide(Advanced(now_ns, epoch, n, digest, final, retried, begun, stop))
            ]
            entries += self._count(final, errors or {}, now_ns)
            if not self.finished:
                entries.append(self._decide(Stopped(now_ns, why)))
        else:
            entry = Advanced(now_ns, epoch, n, digest, final, retried, begun, stop)
            entries = [self._decide(entry)]
            if self.policy.stop.same_error:
                entries += self._count(final, errors or {}, now_ns)
        return Taken(held.rows, not stop, stop, retried), entries

    def was_taken(self, epoch: int, n: int) -> bool:
        """Whether a grant's report of this number was taken: it comes again."""
        told = self.grants.get(epoch) or self.over.get(epoch)
        return told is not None and any(reply.n == n for reply in told.replies)

    def spend(self, cost: float, now_ns: int) -> Entries:
        """Count what calls cost, if a stop rule asks for it."""
        if not cost or not self.policy.stop.cost or self.halted is not None:
            return []
        now_ns = max(now_ns, self.decided_ns)
        return [self._decide(Counted(now_ns, cost, [])), *self._stop([], now_ns)]

    def heartbeat(self, epoch: int, now_ns: int) -> int:
        """The grant lives on; until when. Not logged."""
        if epoch not in self.grants:
            raise self._fence(epoch)
        self._expires[epoch] = max(self._expires[epoch], now_ns + self.policy.lease_ns)
        return self._expires[epoch]

    # -- taking back ---------------------------------------------------------------------------

    def expire(self, now_ns: int) -> tuple[list[int], Entries]:
        """Reclaim the grants whose time is up; their epochs."""
        due: list[int] = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, epoch = heappop(self._expiries)
            until_ns = self._expires.get(epoch)
            if until_ns is None:
                continue
            if until_ns <= now_ns:
                due.append(epoch)
            else:
                heappush(self._expiries, (until_ns, epoch))
        return self._reclaim(due, "expired", now_ns)

    def owners(self) -> list[str]:
        """Who holds grants."""
        return list(self._by_owner)

    def drop(self, owner: str, now_ns: int) -> tuple[list[int], Entries]:
        """Reclaim what an owner holds: its connection is closed."""
        return self._reclaim(self._by_owner.get(owner, ()), "closed", now_ns)

    def drop_epoch(self, epoch: int, now_ns: int) -> tuple[list[int], Entries]:
        """Reclaim one grant: its owner gives it back. Nothing when it is over."""
        return self._reclaim([epoch] if epoch in self.grants else [], "returned", now_ns)

    def drop_all(self, now_ns: int) -> tuple[list[int], Entries]:
        """Reclaim everything: whoever held it belongs to a driver that is gone."""
        return self._reclaim(self.grants, "superseded", now_ns)

    def cancel(self, now_ns: int) -> tuple[bool, Entries]:
        """Cancel every row that is not begun, at once; False when that was done, or all has ended."""
        self._check_running()
        if self.cancelling or self.finished:
            return False, []
        now_ns = max(now_ns, self.decided_ns)
        return True, [self._decide(Cancelling(now_ns, now_ns + self.policy.grace_ns))]

    def end_grace(self, now_ns: int) -> tuple[bool, Entries]:
        """After the grace, cancel what is still begun; False when there is no need, or not yet."""
        self._check_running()
        if not self.cancelling or now_ns < self.grace_ends_ns or not self.grants:
            return False, []
        return True, [self._decide(Cancelled(max(now_ns, self.decided_ns)))]

    def resume(self, now_ns: int) -> Entries:
        """Hand out rows of a stopped run again. The stop rules count from zero."""
        if self.halted is not None or not (self.stopped or self.policy.stop.armed):
            return []
        return [self._decide(Resumed(max(now_ns, self.decided_ns)))]

    def retune(self, policy: Policy, now_ns: int) -> tuple[bool, Entries]:
        """Decide by other budgets and times from here on; False when they are the same."""
        self._check_running()
        if policy == self.policy:
            return False, []
        cut = (self.policy.page_rows, self.policy.batch_rows)
        if (policy.page_rows, policy.batch_rows) != cut:
            raise Invalid(what="policy", why="pages and batches are fixed when a run is opened")
        return True, [self._decide(Retuned(max(now_ns, self.decided_ns), policy))]

    # -- committing ----------------------------------------------------------------------------

    def terminal_prefix(self) -> int:
        """The first seq that is not final: what lies below may be committed."""
        return self.ledger.final_prefix()

    def commit(self, upto: int, version: int, now_ns: int) -> tuple[bool, Entries]:
        """Rows up to here are in the sink. False, and nothing to do, when that was known."""
        self._check_running()
        if not 0 <= upto <= self.size:
            raise Invalid(what="upto", why="not in the run", found=upto, size=self.size)
        now_ns = max(now_ns, self.decided_ns)
        if upto <= self.next_commit:
            return False, []
        head = self.terminal_prefix()
        if upto > head:
            prior = self.ledger.state_of(head).name
            wrong = judge.Misfit(head, prior, State.COMMITTED.name, "not final")
            self._halt(wrong, "commit", now_ns)
        return True, [self._decide(Committed(now_ns, upto, version))]

    # -- questions -----------------------------------------------------------------------------

    def next_due_ns(self) -> int | None:
        """When time alone will change something: a lease, a retry, the grace. None: never."""
        while self._expiries:
            early_ns, epoch = self._expiries[0]
            until_ns = self._expires.get(epoch)
            if until_ns == early_ns:
                break
            heappop(self._expiries)
            if until_ns is not None:
                heappush(self._expiries, (until_ns, epoch))
        due = [self._expiries[0][0]] if self._expiries else []
        if self.resting:
            due.append(self.resting[0][0])
        if self.cancelling and self.grants:
            due.append(self.grace_ends_ns)
        return min(due, default=None)

    def would_answer(self, lo: int, hi: int, now_ns: int) -> bool:
        """Whether a claim of [lo, hi) would be answered with rows or an end. Changes nothing."""
        if self.halted is not None or self.cancelling or self.stopped is not None or self.finished:
            return True
        if self.resting and self.resting[0][0] <= now_ns:
            return True
        if choose(self, 1, lo, hi)[0]:
            return True
        return (lo, hi) != (0, self.size) and self.ledger.is_final(lo, hi)

    def stats(self) -> dict[str, int]:
        return {
            "fenced": self.fenced,
            "reclaims": self.reclaims,
            "retries": self.retries,
            "suspects": self.suspects.rows,
            "grants": len(self.grants),
        }

    # -- the fold, and what is kept beside it --------------------------------------------------

    def apply(self, entry: LogEntry) -> None:
        super().apply(entry)
        if isinstance(entry, Leased):
            self._by_owner.setdefault(entry.owner, set()).add(entry.epoch)
            self._expire_at(entry.epoch, entry.decided_ns + self.policy.lease_ns)

    def _decide(self, entry: LogEntry) -> LogEntry:
        self.apply(entry)
        return entry

    def _forget(self, held: Holding) -> None:
        super()._forget(held)
        del self._expires[held.epoch]
        epochs = self._by_owner[held.owner]
        epochs.discard(held.epoch)
        if not epochs:
            del self._by_owner[held.owner]
        # Grants end faster than they expire: most of what the heap holds may be of ended ones.
        if len(self._expiries) > 2 * len(self._expires) + 64:
            self._expiries = [(ns, epoch) for epoch, ns in self._expires.items()]
            heapify(self._expiries)

    def _expire_at(self, epoch: int, until_ns: int) -> None:
        self._expires[epoch] = until_ns
        heappush(self._expiries, (until_ns, epoch))

    # -- inside --------------------------------------------------------------------------------

    def _nothing(self, lo: int, hi: int) -> Answer:
        if self.ledger.is_final(lo, hi):
            return Finished()
        if self.unseen.first(lo, hi) is not None:
            return Wait(self.next_due_ns() or 0, "lag")
        until_ns = self.next_due_ns() or 0
        return Wait(until_ns, "busy" if self.grants else "backoff")

    def _reclaim(self, epochs: Iterable[int], why: str, now_ns: int) -> tuple[list[int], Entries]:
        """Oldest grants first, so that a budget which runs out does so at the same row always."""
        if self.halted is not None:
            return [], []
        now_ns = max(now_ns, self.decided_ns)
        gone = sorted(epochs)
        entries: Entries = []
        for epoch in gone:
            entry = judge.reclaim(self, epoch, why, now_ns)
            entries.append(self._decide(entry))
            entries += self._count_lost(entry, now_ns)
        return gone, entries

    # -- stop rules ----------------------------------------------------------------------------

    def _reached(self, final: Sequence[Done], errors: Mapping[int, str]) -> str:
        """The stop rule that is reached when these rows have ended, in words."""
        failed = [done for done in final if done.code == State.TERMINAL_FAIL]
        failed_rows = sum(done.hi - done.lo for done in failed)
        so_far = self.counted()
        tally = so_far._replace(
            failed=so_far.failed + failed_rows,
            ended=so_far.ended + sum(done.hi - done.lo for done in final),
        )
        alike = _alike(failed, errors) if self.policy.stop.same_error else {}
        return reached(
            self.policy.stop,
            tally,
            [
                (self.stop_errors.get(error, 0) + rows, text)
                for error, (rows, text) in alike.items()
            ],
        )

    def _count(self, final: Sequence[Done], errors: Mapping[int, str], now_ns: int) -> Entries:
        if not self.policy.stop.same_error:
            return []
        alike = _alike([done for done in final if done.code == State.TERMINAL_FAIL], errors)
        counted = [(error, rows) for error, (rows, _) in sorted(alike.items())]
        return [self._decide(Counted(now_ns, 0.0, counted))] if counted else []

    def _count_lost(self, entry: Reclaimed, now_ns: int) -> Entries:
        """Count rows that a reclaim failed for good like reported failures."""
        rows = sum(hi - lo for lo, hi in entry.failed)
        if not rows or not self.policy.stop.armed:
            return []
        error = error_id(ErrorClass.LEASE_EXPIRED, GONE)
        entries: Entries = []
        if self.policy.stop.same_error:
            entries.append(self._decide(Counted(now_ns, 0.0, [(error, rows)])))
        return entries + self._stop([(self.stop_errors.get(error, 0), GONE)], now_ns)

    def _stop(self, alike: Sequence[tuple[int, str]], now_ns: int) -> Entries:
        if self.stopped is not None or self.cancelling or self.finished:
            return []
        why = reached(self.policy.stop, self.counted(), alike)
        return [self._decide(Stopped(now_ns, why))] if why else []

    def _fence(self, epoch: int) -> Fenced:
        self.fenced += 1
        return Fenced(resource="grant", held=epoch, current=self.epoch)

    def _halt(self, wrong: judge.Misfit, owner: str, now_ns: int) -> NoReturn:
        self._decide(Halted(now_ns, wrong.seq, wrong.prior, wrong.attempted, owner, wrong.why))
        raise self._refusal()

    def _check_running(self) -> None:
        if self.halted is not None:
            raise self._refusal()

    def _refusal(self) -> IllegalTransition:
        halted = self.halted
        assert halted is not None
        return illegal(
            halted.seq, halted.prior, halted.attempted, halted.owner, halted.decided_ns,
            why=halted.why,
        )  # fmt: skip


def _alike(failed: Sequence[Done], errors: Mapping[int, str]) -> dict[int, tuple[int, str]]:
    """Failed rows by their error: how many, and the error in words."""
    texts = Counter(
        (done.error_class, errors.get(seq, ""))
        for done in failed
        for seq in range(done.lo, done.hi)
    )
    found: dict[int, tuple[int, str]] = {}
    for (error_class, text), rows in texts.items():
        error = error_id(error_class, text)
        told = f"{ErrorClass(error_class).name.lower()}: {normalise(text)}"
        found[error] = found.get(error, (0, ""))[0] + rows, told
    return found


def _check_claim(owner: str, rows: int, begin: int) -> None:
    if not 0 < len(owner) <= NAME_BYTES_MAX:
        raise Invalid(what="owner", why="out of bounds", found=owner[:64], chars_max=NAME_BYTES_MAX)
    if not 0 < rows <= ROWS_MAX:
        raise Invalid(what="rows", why="out of bounds", found=rows, min=1, max=ROWS_MAX)
    if begin < 0:
        raise Invalid(what="begin", why="negative", found=begin)
