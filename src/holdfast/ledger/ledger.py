"""The ledger: a byte of state for every seq, moved by event, in ranges, in sets or one by one.

- A move is checked against the table as a whole before anything is written. If one row of it may
  not move, `IllegalTransition` names that row and no row has moved.
- Counters by state are kept with every write; asking is constant time, and nothing is ever scanned
  to answer.
- `BEGIN` needs the epoch that owns every row of the move; a report may name it, and then it is held
  to it. A final row has no owner.
- A row that is final (terminal or committed) stays so, except for `RETRY`, which a decision makes in
  one breath with the failure. So the prefix of final rows only grows, and a cursor follows it.

Surprising: slices of an array are views. Priors are counted before the write, for afterwards there
is nothing left to count.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger.classes import ATTEMPTS_MAX, PAGE_ROWS, ErrorClass
from holdfast.ledger.pages import Page, decode_page, encode_page
from holdfast.ledger.ranges import Range
from holdfast.ledger.states import FINAL_MIN, LEDGER, TARGET, Event, State, event_of

Bytes = NDArray[np.uint8]
Seqs = NDArray[np.int64]

SIZE_MAX = 1 << 40
EPOCH_MAX = (1 << 31) - 1
# The cursor over final rows looks at so many at first, then at twice as many, ...
_STRIDE_MIN, _STRIDE_MAX = 64, 1 << 16

_BY_OWNER = frozenset({Event.BEGIN, Event.SUCCEED, Event.SKIP, Event.FAIL})
# The state after, by event and prior code; None where it is illegal.
_NEXT: dict[Event, tuple[int | None, ...]] = {
    event: tuple(
        None if (after := LEDGER.table.get((state, event))) is None else int(after)
        for state in State
    )
    for event in Event
}
# By event, the priors it is legal from. Read off the table, as all of these.
_ALLOWED: dict[Event, NDArray[np.bool_]] = {
    event: np.array([after is not None for after in row]) for event, row in _NEXT.items()
}
_ENDED = {Event.SUCCEED: 0, Event.SKIP: 1, Event.FAIL: 2, Event.CANCEL: 3}


class Ledger:
    def __init__(self, size: int, *, page_rows: int = PAGE_ROWS) -> None:
        if not 0 <= size <= SIZE_MAX:
            raise Invalid(what="size", why="out of bounds", found=size, min=0, max=SIZE_MAX)
        self.size = size
        self.page_rows = page_rows
        self.state: Bytes = np.zeros(size, dtype=np.uint8)
        # Retries so far: 0 during the first try.
        self.attempts: Bytes = np.zeros(size, dtype=np.uint8)
        # The error class of the last failure; 0 after a success.
        self.reason: Bytes = np.zeros(size, dtype=np.uint8)
        # The epoch of the grant that has the row; 0 is nobody's.
        self.lease: NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        self._counts = [size, 0, 0, 0, 0, 0, 0, 0]
        # How rows ended, committed or not: succeeded, skipped, failed, cancelled.
        self.ended = [0, 0, 0, 0]
        # Reading one element through a view costs a third of what the array takes for it.
        self._state, self._attempts = self.state.data, self.attempts.data
        self._reason, self._lease = self.reason.data, self.lease.data
        self._prefix = 0
        pages = -(-size // page_rows)
        self._final_pages: NDArray[np.bool_] = np.zeros(pages, dtype=np.bool_)
        self._pages: list[Page | None] = [None] * pages

    # -- counters ------------------------------------------------------------------------------

    @property
    def dispatched_count(self) -> int:
        return self._counts[State.DISPATCHED]

    @property
    def in_flight_count(self) -> int:
        return self._counts[State.IN_FLIGHT]

    @property
    def terminal_count(self) -> int:
        """Rows in one of the four terminal states; those that are committed count there instead."""
        return sum(self._counts[3:7])

    @property
    def committed_count(self) -> int:
        return self._counts[State.COMMITTED]

    @property
    def final_count(self) -> int:
        return sum(self._counts[3:])

    def counters(self) -> dict[str, int]:
        """The four counters, by the names of document 002."""
        return {
            "terminalCount": self.terminal_count,
            "inFlightCount": self.in_flight_count,
            "dispatchedCount": self.dispatched_count,
            "committedCount": self.committed_count,
        }

    def counts(self) -> list[int]:
        """Rows by state code, 0 to 7."""
        return list(self._counts)

    def failed_by_class(self) -> list[int]:
        """Rows that failed for good by error class, committed or not. Reads the whole ledger."""
        failed = (self.state == State.TERMINAL_FAIL) | (
            (self.state == State.COMMITTED)
            & (self.reason != ErrorClass.NONE)
            & (self.reason != ErrorClass.CANCELLATION)
        )
        found = np.bincount(self.reason[failed], minlength=len(ErrorClass))
        return [int(count) for count in found[: len(ErrorClass)]]

    # -- moves ---------------------------------------------------------------------------------

    def move(
        self,
        lo: int,
        hi: int,
        event: Event,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move the rows of [lo, hi), all or none."""
        if not 0 <= lo <= hi <= self.size:
            raise Invalid(what="range", why="not in the ledger", found=(lo, hi), size=self.size)
        count = hi - lo
        if count <= 1:
            if count:
                self.move_one(lo, event, epoch=epoch, reason=reason, owner=owner, wall_ns=wall_ns)
            return
        prior = self.state[lo:hi]
        counted = self._priors(prior, event, lo, None, owner, wall_ns)
        if event in _BY_OWNER:
            owned = self.lease[lo:hi] == epoch if epoch or event is Event.BEGIN else None
            if owned is not None and not (epoch and owned.all()):
                at = int(owned.argmin()) if epoch else 0
                self._refuse_owner(lo + at, event, epoch, owner, wall_ns)
        if event is Event.RETRY:
            attempts = self.attempts[lo:hi]
            if int(attempts.max()) >= ATTEMPTS_MAX:
                raise Invalid(what="attempts", why="one byte", seq=lo + int(attempts.argmax()))
            attempts += 1
        elif event in _ENDED:
            self.reason[lo:hi] = reason
            self.lease[lo:hi] = 0
        prior[:] = TARGET[event]
        self._count(counted, event, count)
        first, last = lo // self.page_rows, (hi - 1) // self.page_rows
        for page in range(first, last + 1):
            self._pages[page] = None

    def move_at(
        self,
        seqs: Seqs,
        event: Event,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move a set of rows, all or none. A seq that is named twice is an illegal second move."""
        if not len(seqs):
            return
        seqs = np.asarray(seqs, dtype=np.int64)
        if not (seqs[1:] > seqs[:-1]).all():
            seqs = np.sort(seqs)
            same = seqs[1:] == seqs[:-1]
            if same.any():
                self._refuse(
                    int(seqs[int(same.argmax())]), TARGET[event], event, owner, wall_ns,
                    why="named twice",
                )  # fmt: skip
        # Below zero an index would count from the end.
        if int(seqs[0]) < 0 or int(seqs[-1]) >= self.size:
            raise Invalid(
                what="seq", why="not in the ledger", found=(int(seqs[0]), int(seqs[-1])),
                size=self.size,
            )  # fmt: skip
        counted = self._priors(self.state[seqs], event, 0, seqs, owner, wall_ns)
        if event in _BY_OWNER and (epoch or event is Event.BEGIN):
            owned = self.lease[seqs] == epoch
            if not (epoch and owned.all()):
                at = int(owned.argmin()) if epoch else 0
                self._refuse_owner(int(seqs[at]), event, epoch, owner, wall_ns)
        if event is Event.RETRY:
            attempts = self.attempts[seqs]
            if int(attempts.max()) >= ATTEMPTS_MAX:
                raise Invalid(
                    what="attempts", why="one byte", seq=int(seqs[int(attempts.argmax())])
                )
            self.attempts[seqs] = attempts + 1
        elif event in _ENDED:
            self.reason[seqs] = reason
            self.lease[seqs] = 0
        self.state[seqs] = TARGET[event]
        self._count(counted, event, len(seqs))
        pages = seqs // self.page_rows
        for page in (int(pages[0]), *pages[1:][pages[1:] != pages[:-1]].tolist()):
            self._pages[page] = None

    def move_one(
        self,
        seq: int,
        event: Event,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move one row: the same, without the price of starting vector operations."""
        if not 0 <= seq < self.size:
            raise Invalid(what="seq", why="not in the ledger", found=seq, size=self.size)
        prior = self._state[seq]
        after = _NEXT[event][prior]
        if after is None:
            self._refuse(seq, State(prior), event, owner, wall_ns)
        if event in _BY_OWNER and (epoch or event is Event.BEGIN):
            if not epoch or self._lease[seq] != epoch:
                self._refuse_owner(seq, event, epoch, owner, wall_ns)
        if event is Event.RETRY:
            if self._attempts[seq] >= ATTEMPTS_MAX:
                raise Invalid(what="attempts", why="one byte", seq=seq)
            self._attempts[seq] += 1
            self.ended[_ENDED[Event.FAIL]] -= 1
        elif event in _ENDED:
            self.ended[_ENDED[event]] += 1
            self._reason[seq] = reason
            self._lease[seq] = 0
        self._state[seq] = after
        self._counts[prior] -= 1
        self._counts[after] += 1
        self._pages[seq // self.page_rows] = None

    def move_to(
        self,
        seq: int,
        attempted: State,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move one row to a state that is named by its code, as reports from outside do."""
        if not 0 <= seq < self.size:
            raise Invalid(what="seq", why="not in the ledger", found=seq, size=self.size)
        prior = State(self._state[seq])
        event = event_of(prior, attempted)
        if event is None:
            raise illegal(seq, prior.name, attempted.name, owner, wall_ns)
        self.move_one(seq, event, epoch=epoch, reason=reason, owner=owner, wall_ns=wall_ns)

    def own(self, lo: int, hi: int, epoch: int) -> None:
        """Give DISPATCHED rows to a grant, or with epoch 0 back to nobody. It is no move."""
        if not 0 <= epoch <= EPOCH_MAX:
            raise Invalid(what="epoch", why="out of bounds", found=epoch, max=EPOCH_MAX)
        if hi - lo == 1:
            if self._state[lo] == State.DISPATCHED and not (epoch and self._lease[lo]):
                self._lease[lo] = epoch
                return
        rows, owners = self.state[lo:hi], self.lease[lo:hi]
        if not (rows == State.DISPATCHED).all() or (epoch and owners.any()):
            raise Invalid(what="lease", why="only rows that are ready and free", found=(lo, hi))
        owners[:] = epoch

    # -- questions -----------------------------------------------------------------------------

    def state_of(self, seq: int) -> State:
        return State(self._state[seq])

    def is_unseen(self, seq: int) -> bool:
        return self._state[seq] == State.UNSEEN

    def owner_of(self, seq: int) -> int:
        """The epoch of the grant that has the row."""
        return self._lease[seq]

    def tries(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """[lo, hi) cut into runs of rows with equally many retries: (lo, hi, attempts)."""
        if hi - lo == 1:
            return [(lo, hi, self._attempts[lo])]
        runs = self.attempts[lo:hi]
        if not (runs != runs[0]).any():
            return [(lo, hi, int(runs[0]))]
        cuts = [0, *(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist(), hi - lo]
        return [(lo + a, lo + b, int(runs[a])) for a, b in pairwise(cuts)]

    def final_prefix(self) -> int:
        """The first seq that is not final. Costs what it advances by, over the life of a run."""
        at, stride = self._prefix, _STRIDE_MIN
        while at < self.size and self._state[at] >= FINAL_MIN:
            open_rows = self.state[at : at + stride] < FINAL_MIN
            first = int(open_rows.argmax())
            if open_rows[first]:
                at += first
                break
            at += len(open_rows)
            stride = min(stride * 2, _STRIDE_MAX)
        self._prefix = at
        return at

    def is_final(self, lo: int, hi: int) -> bool:
        """Whether every row of [lo, hi) is final. A page once found so is not looked at again."""
        size = self.page_rows
        lo = max(lo, min(self._prefix, hi))
        first, last = -(-lo // size), hi // size
        if first >= last:
            return bool((self.state[lo:hi] >= FINAL_MIN).all())
        for page in (np.flatnonzero(~self._final_pages[first:last]) + first).tolist():
            if not (self.state[page * size : (page + 1) * size] >= FINAL_MIN).all():
                return False
            self._final_pages[page] = True
        edges = self.state[lo : first * size], self.state[last * size : hi]
        return all(bool((edge >= FINAL_MIN).all()) for edge in edges)

    def runs_of(self, state: int) -> list[Range]:
        """Where rows of a state lie; reads every page, so it is for loading."""
        found: list[Range] = []
        for lo in range(0, self.size, self.page_rows):
            same = np.concatenate(([False], self.state[lo : lo + self.page_rows] == state, [False]))
            edges = np.flatnonzero(same[1:] != same[:-1]) + lo
            found += zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        return found

    # -- as range records ----------------------------------------------------------------------

    def ranges(self) -> list[Page]:
        """Every page as range records. Pages that did not change since are not read again."""
        for page, known in enumerate(self._pages):
            if known is None:
                lo = page * self.page_rows
                rows = slice(lo, lo + self.page_rows)
                self._pages[page] = encode_page(
                    self.state[rows], self.attempts[rows], self.reason[rows]
                )
        return [page for page in self._pages if page is not None]

    @classmethod
    def from_ranges(
        cls, size: int, pages: list[Page], ended: list[int], *, page_rows: int = PAGE_ROWS
    ) -> Ledger:
        """The ledger that `ranges` told of; owners are not in it, grants say whose rows are.

        `ended` comes beside them: a committed row does not say how it ended.
        """
        made = cls(size, page_rows=page_rows)
        if len(pages) != len(made._pages):
            raise Invalid(what="pages", found=len(pages), expected=len(made._pages))
        counts = np.zeros(8, dtype=np.int64)
        for page, told in enumerate(pages):
            rows = slice(page * page_rows, min(size, (page + 1) * page_rows))
            decode_page(told, made.state[rows], made.attempts[rows], made.reason[rows])
            found = np.bincount(made.state[rows], minlength=8)
            if len(found) > 8:
                raise Invalid(what="page", why="no such state", found=int(made.state[rows].max()))
            counts += found
        made._counts = counts.tolist()
        made.ended = list(ended)
        made._pages = list(pages)
        return made

    # -- inside --------------------------------------------------------------------------------

    def _priors(
        self, prior: Bytes, event: Event, lo: int, seqs: Seqs | None, owner: str, wall_ns: int
    ) -> list[tuple[int, int]]:
        """How many rows are in which state, all of them states that the event may leave."""
        first = int(prior[0])
        if _NEXT[event][first] is not None and not (prior != first).any():
            return [(first, len(prior))]
        allowed = _ALLOWED[event][prior]
        if not allowed.all():
            at = int(allowed.argmin())
            seq = lo + at if seqs is None else int(seqs[at])
            self._refuse(seq, State(int(prior[at])), event, owner, wall_ns)
        found = np.bincount(prior, minlength=8)
        return [(state, int(found[state])) for state in np.flatnonzero(found).tolist()]

    def _count(self, counted: list[tuple[int, int]], event: Event, count: int) -> None:
        for state, rows in counted:
            self._counts[state] -= rows
        self._counts[TARGET[event]] += count
        if event in _ENDED:
            self.ended[_ENDED[event]] += count
        elif event is Event.RETRY:
            self.ended[_ENDED[Event.FAIL]] -= count

    def _refuse(
        self, seq: int, prior: State, event: Event, owner: str, wall_ns: int, **more: Any
    ) -> NoReturn:
        raise illegal(seq, prior.name, TARGET[event].name, owner, wall_ns, **more)

    def _refuse_owner(
        self, seq: int, event: Event, epoch: int, owner: str, wall_ns: int
    ) -> NoReturn:
        self._refuse(
            seq, self.state_of(seq), event, owner, wall_ns,
            why="not the owner", held=epoch, current=self._lease[seq],
        )  # fmt: skip


def illegal(
    seq: int, prior: str, attempted: str, owner: str, wall_ns: int, **more: Any
) -> IllegalTransition:
    return IllegalTransition(
        machine=LEDGER.name,
        seq=seq,
        prior=prior,
        attempted=attempted,
        owner=owner,
        wall_ns=wall_ns,
        **more,
    )
