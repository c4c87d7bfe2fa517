"""The seq ledger: one state byte per row, moved by event in ranges, in sets or singly.

- A move is checked as a whole before any write. If one row may not move, `IllegalTransition` names
  that row and no row moves.
- Every write updates the counters by state. Reading them takes constant time and no scan.
- `BEGIN` requires the owner epoch of every row. A report may name an epoch, and it is then checked
  too. A final row has no owner.
- A final row (terminal or committed) stays final, except for `RETRY`, which a decision applies
  together with the failure. The prefix of final rows therefore only grows, and a cursor follows it.

Array slices are views, so the prior states are counted before the write.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger.pages import LedgerPage, decode_page, encode_page
from holdfast.ledger.ranges import Range
from holdfast.ledger.run_policy import ATTEMPTS_MAX, PAGE_ROWS, ErrorClass
from holdfast.ledger.states import FINAL_MIN, LEDGER, TARGET_STATE, RowEvent, RowState, event_of

ByteArray = NDArray[np.uint8]
SeqArray = NDArray[np.int64]

SIZE_MAX = 1 << 40
EPOCH_MAX = (1 << 31) - 1
# Stride of the cursor over final rows. It starts at the minimum and doubles up to the maximum.
_STRIDE_MIN, _STRIDE_MAX = 64, 1 << 16

_OWNER_EVENTS = frozenset({RowEvent.BEGIN, RowEvent.SUCCEED, RowEvent.SKIP, RowEvent.FAIL})
# The next state by event and prior code; None if the transition is illegal.
_NEXT: dict[RowEvent, tuple[int | None, ...]] = {
    event: tuple(
        None if (after := LEDGER.table.get((state, event))) is None else int(after)
        for state in RowState
    )
    for event in RowEvent
}
# The legal prior states by event, derived from the table.
_LEGAL_PRIORS: dict[RowEvent, NDArray[np.bool_]] = {
    event: np.array([after is not None for after in row]) for event, row in _NEXT.items()
}
_ENDED_INDEX = {RowEvent.SUCCEED: 0, RowEvent.SKIP: 1, RowEvent.FAIL: 2, RowEvent.CANCEL: 3}


class SeqLedger:
    def __init__(self, size: int, *, page_rows: int = PAGE_ROWS) -> None:
        if not 0 <= size <= SIZE_MAX:
            raise Invalid(what="size", why="out of bounds", found=size, min=0, max=SIZE_MAX)
        self.size = size
        self.page_rows = page_rows
        self.state: ByteArray = np.zeros(size, dtype=np.uint8)
        # Retries of each row: 0 during the first try.
        self.attempts: ByteArray = np.zeros(size, dtype=np.uint8)
        # The error class of the last failure; 0 after a success.
        self.reason: ByteArray = np.zeros(size, dtype=np.uint8)
        # The epoch of the grant that owns the row; 0 means no owner.
        self.owner_epochs: NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        self._counts = [size, 0, 0, 0, 0, 0, 0, 0]
        # Rows by outcome, committed or not: succeeded, skipped, failed, cancelled.
        self.ended = [0, 0, 0, 0]
        # A memoryview reads one element in a third of the time of the array.
        self._state, self._attempts = self.state.data, self.attempts.data
        self._reason, self._owner_epochs = self.reason.data, self.owner_epochs.data
        self._final_prefix = 0
        pages = -(-size // page_rows)
        self._final_pages: NDArray[np.bool_] = np.zeros(pages, dtype=np.bool_)
        self._pages: list[LedgerPage | None] = [None] * pages

    # -- counters ------------------------------------------------------------------------------

    @property
    def dispatched_count(self) -> int:
        return self._counts[RowState.DISPATCHED]

    @property
    def in_flight_count(self) -> int:
        return self._counts[RowState.IN_FLIGHT]

    @property
    def terminal_count(self) -> int:
        """Rows in one of the four terminal states, without committed rows."""
        return sum(self._counts[3:7])

    @property
    def committed_count(self) -> int:
        return self._counts[RowState.COMMITTED]

    @property
    def final_count(self) -> int:
        return sum(self._counts[3:])

    def counters(self) -> dict[str, int]:
        """The four counters under the names of document 002."""
        return {
            "terminalCount": self.terminal_count,
            "inFlightCount": self.in_flight_count,
            "dispatchedCount": self.dispatched_count,
            "committedCount": self.committed_count,
        }

    def counts(self) -> list[int]:
        """Row counts by state code, 0 to 7."""
        return list(self._counts)

    def failed_by_class(self) -> list[int]:
        """Count the failed rows by error class, committed or not. Reads the whole ledger."""
        failed = (self.state == RowState.TERMINAL_FAIL) | (
            (self.state == RowState.COMMITTED)
            & (self.reason != ErrorClass.NONE)
            & (self.reason != ErrorClass.CANCELLATION)
        )
        class_counts = np.bincount(self.reason[failed], minlength=len(ErrorClass))
        return [int(count) for count in class_counts[: len(ErrorClass)]]

    # -- moves ---------------------------------------------------------------------------------

    def move(
        self,
        lo: int,
        hi: int,
        event: RowEvent,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move the rows of [lo, hi) atomically."""
        if not 0 <= lo <= hi <= self.size:
            raise Invalid(what="range", why="not in the ledger", found=(lo, hi), size=self.size)
        count = hi - lo
        if count <= 1:
            if count:
                self.move_one(lo, event, epoch=epoch, reason=reason, owner=owner, wall_ns=wall_ns)
            return
        prior = self.state[lo:hi]
        counted = self._check_priors(prior, event, lo, None, owner, wall_ns)
        if event in _OWNER_EVENTS:
            owned = self.owner_epochs[lo:hi] == epoch if epoch or event is RowEvent.BEGIN else None
            if owned is not None and not (epoch and owned.all()):
                at = int(owned.argmin()) if epoch else 0
                self._raise_not_owner(lo + at, event, epoch, owner, wall_ns)
        if event is RowEvent.RETRY:
            attempts = self.attempts[lo:hi]
            if int(attempts.max()) >= ATTEMPTS_MAX:
                raise Invalid(what="attempts", why="one byte", seq=lo + int(attempts.argmax()))
            attempts += 1
        elif event in _ENDED_INDEX:
            self.reason[lo:hi] = reason
            self.owner_epochs[lo:hi] = 0
        prior[:] = TARGET_STATE[event]
        self._update_counts(counted, event, count)
        first, last = lo // self.page_rows, (hi - 1) // self.page_rows
        for page in range(first, last + 1):
            self._pages[page] = None

    def move_set(
        self,
        seqs: SeqArray,
        event: RowEvent,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move a set of rows atomically. A repeated seq is an illegal second move."""
        if not len(seqs):
            return
        seqs = np.asarray(seqs, dtype=np.int64)
        if not (seqs[1:] > seqs[:-1]).all():
            seqs = np.sort(seqs)
            same = seqs[1:] == seqs[:-1]
            if same.any():
                self._raise_illegal(
                    int(seqs[int(same.argmax())]), TARGET_STATE[event], event, owner, wall_ns,
                    why="named twice",
                )  # fmt: skip
        # A negative index would count from the end.
        if int(seqs[0]) < 0 or int(seqs[-1]) >= self.size:
            raise Invalid(
                what="seq", why="not in the ledger", found=(int(seqs[0]), int(seqs[-1])),
                size=self.size,
            )  # fmt: skip
        counted = self._check_priors(self.state[seqs], event, 0, seqs, owner, wall_ns)
        if event in _OWNER_EVENTS and (epoch or event is RowEvent.BEGIN):
            owned = self.owner_epochs[seqs] == epoch
            if not (epoch and owned.all()):
                at = int(owned.argmin()) if epoch else 0
                self._raise_not_owner(int(seqs[at]), event, epoch, owner, wall_ns)
        if event is RowEvent.RETRY:
            attempts = self.attempts[seqs]
            if int(attempts.max()) >= ATTEMPTS_MAX:
                raise Invalid(
                    what="attempts", why="one byte", seq=int(seqs[int(attempts.argmax())])
                )
            self.attempts[seqs] = attempts + 1
        elif event in _ENDED_INDEX:
            self.reason[seqs] = reason
            self.owner_epochs[seqs] = 0
        self.state[seqs] = TARGET_STATE[event]
        self._update_counts(counted, event, len(seqs))
        pages = seqs // self.page_rows
        for page in (int(pages[0]), *pages[1:][pages[1:] != pages[:-1]].tolist()):
            self._pages[page] = None

    def move_one(
        self,
        seq: int,
        event: RowEvent,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move one row without the cost of vector operations."""
        if not 0 <= seq < self.size:
            raise Invalid(what="seq", why="not in the ledger", found=seq, size=self.size)
        prior = self._state[seq]
        after = _NEXT[event][prior]
        if after is None:
            self._raise_illegal(seq, RowState(prior), event, owner, wall_ns)
        if event in _OWNER_EVENTS and (epoch or event is RowEvent.BEGIN):
            if not epoch or self._owner_epochs[seq] != epoch:
                self._raise_not_owner(seq, event, epoch, owner, wall_ns)
        if event is RowEvent.RETRY:
            if self._attempts[seq] >= ATTEMPTS_MAX:
                raise Invalid(what="attempts", why="one byte", seq=seq)
            self._attempts[seq] += 1
            self.ended[_ENDED_INDEX[RowEvent.FAIL]] -= 1
        elif event in _ENDED_INDEX:
            self.ended[_ENDED_INDEX[event]] += 1
            self._reason[seq] = reason
            self._owner_epochs[seq] = 0
        self._state[seq] = after
        self._counts[prior] -= 1
        self._counts[after] += 1
        self._pages[seq // self.page_rows] = None

    def move_to(
        self,
        seq: int,
        attempted: RowState,
        *,
        epoch: int = 0,
        reason: int = 0,
        owner: str = "",
        wall_ns: int = 0,
    ) -> None:
        """Move one row to the state with this code, as in external reports."""
        if not 0 <= seq < self.size:
            raise Invalid(what="seq", why="not in the ledger", found=seq, size=self.size)
        prior = RowState(self._state[seq])
        event = event_of(prior, attempted)
        if event is None:
            raise illegal_transition(seq, prior.name, attempted.name, owner, wall_ns)
        self.move_one(seq, event, epoch=epoch, reason=reason, owner=owner, wall_ns=wall_ns)

    def assign(self, lo: int, hi: int, epoch: int) -> None:
        """Assign DISPATCHED rows to a grant, or release them with epoch 0. The state does not
        change.
        """
        if not 0 <= epoch <= EPOCH_MAX:
            raise Invalid(what="epoch", why="out of bounds", found=epoch, max=EPOCH_MAX)
        if hi - lo == 1:
            if self._state[lo] == RowState.DISPATCHED and not (epoch and self._owner_epochs[lo]):
                self._owner_epochs[lo] = epoch
                return
        rows, owners = self.state[lo:hi], self.owner_epochs[lo:hi]
        if not (rows == RowState.DISPATCHED).all() or (epoch and owners.any()):
            raise Invalid(what="lease", why="only rows that are ready and free", found=(lo, hi))
        owners[:] = epoch

    # -- queries -------------------------------------------------------------------------------

    def state_of(self, seq: int) -> RowState:
        return RowState(self._state[seq])

    def is_unseen(self, seq: int) -> bool:
        return self._state[seq] == RowState.UNSEEN

    def owner_epoch_of(self, seq: int) -> int:
        """The epoch of the grant that owns the row."""
        return self._owner_epochs[seq]

    def attempts_by_range(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """Split [lo, hi) into consecutive ranges whose rows have the same number of retries.

        Return (lo, hi, retries) of each range.
        """
        if hi - lo == 1:
            return [(lo, hi, self._attempts[lo])]
        attempts = self.attempts[lo:hi]
        if not (attempts != attempts[0]).any():
            return [(lo, hi, int(attempts[0]))]
        cuts = [0, *(np.flatnonzero(attempts[1:] != attempts[:-1]) + 1).tolist(), hi - lo]
        return [(lo + a, lo + b, int(attempts[a])) for a, b in pairwise(cuts)]

    def final_prefix(self) -> int:
        """Return the first seq that is not final. Costs the distance advanced, amortised over the
        run.
        """
        at, stride = self._final_prefix, _STRIDE_MIN
        while at < self.size and self._state[at] >= FINAL_MIN:
            open_rows = self.state[at : at + stride] < FINAL_MIN
            first = int(open_rows.argmax())
            if open_rows[first]:
                at += first
                break
            at += len(open_rows)
            stride = min(stride * 2, _STRIDE_MAX)
        self._final_prefix = at
        return at

    def is_final(self, lo: int, hi: int) -> bool:
        """Return whether every row of [lo, hi) is final. A page found final is not read again."""
        size = self.page_rows
        lo = max(lo, min(self._final_prefix, hi))
        first, last = -(-lo // size), hi // size
        if first >= last:
            return bool((self.state[lo:hi] >= FINAL_MIN).all())
        for page in (np.flatnonzero(~self._final_pages[first:last]) + first).tolist():
            if not (self.state[page * size : (page + 1) * size] >= FINAL_MIN).all():
                return False
            self._final_pages[page] = True
        edges = self.state[lo : first * size], self.state[last * size : hi]
        return all(bool((edge >= FINAL_MIN).all()) for edge in edges)

    def ranges_in_state(self, state: int) -> list[Range]:
        """Return the ranges of rows in a state. Reads every page, so it is used only for loading."""
        ranges: list[Range] = []
        for lo in range(0, self.size, self.page_rows):
            same = np.concatenate(([False], self.state[lo : lo + self.page_rows] == state, [False]))
            edges = np.flatnonzero(same[1:] != same[:-1]) + lo
            ranges += zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        return ranges

    # -- range records -------------------------------------------------------------------------

    def encode_pages(self) -> list[LedgerPage]:
        """Encode every page as range records. Unchanged pages are not read again."""
        for page, known in enumerate(self._pages):
            if known is None:
                lo = page * self.page_rows
                rows = slice(lo, lo + self.page_rows)
                self._pages[page] = encode_page(
                    self.state[rows], self.attempts[rows], self.reason[rows]
                )
        return [page for page in self._pages if page is not None]

    @classmethod
    def from_pages(
        cls, size: int, pages: list[LedgerPage], ended: list[int], *, page_rows: int = PAGE_ROWS
    ) -> SeqLedger:
        """Build a ledger from encoded pages. Owners are not included: the grants restore them.

        `ended` is separate because a committed row does not record its outcome.
        """
        ledger = cls(size, page_rows=page_rows)
        if len(pages) != len(ledger._pages):
            raise Invalid(what="pages", found=len(pages), expected=len(ledger._pages))
        counts = np.zeros(8, dtype=np.int64)
        for page, encoded in enumerate(pages):
            rows = slice(page * page_rows, min(size, (page + 1) * page_rows))
            decode_page(encoded, ledger.state[rows], ledger.attempts[rows], ledger.reason[rows])
            page_counts = np.bincount(ledger.state[rows], minlength=8)
            if len(page_counts) > 8:
                raise Invalid(what="page", why="no such state", found=int(ledger.state[rows].max()))
            counts += page_counts
        ledger._counts = counts.tolist()
        ledger.ended = list(ended)
        ledger._pages = list(pages)
        return ledger

    # -- internals -----------------------------------------------------------------------------

    def _check_priors(
        self,
        prior: ByteArray,
        event: RowEvent,
        lo: int,
        seqs: SeqArray | None,
        owner: str,
        wall_ns: int,
    ) -> list[tuple[int, int]]:
        """Count the rows by prior state. Raises if the event may not leave one of these states."""
        first = int(prior[0])
        if _NEXT[event][first] is not None and not (prior != first).any():
            return [(first, len(prior))]
        allowed = _LEGAL_PRIORS[event][prior]
        if not allowed.all():
            at = int(allowed.argmin())
            seq = lo + at if seqs is None else int(seqs[at])
            self._raise_illegal(seq, RowState(int(prior[at])), event, owner, wall_ns)
        state_counts = np.bincount(prior, minlength=8)
        return [
            (state, int(state_counts[state])) for state in np.flatnonzero(state_counts).tolist()
        ]

    def _update_counts(self, counted: list[tuple[int, int]], event: RowEvent, count: int) -> None:
        for state, rows in counted:
            self._counts[state] -= rows
        self._counts[TARGET_STATE[event]] += count
        if event in _ENDED_INDEX:
            self.ended[_ENDED_INDEX[event]] += count
        elif event is RowEvent.RETRY:
            self.ended[_ENDED_INDEX[RowEvent.FAIL]] -= count

    def _raise_illegal(
        self, seq: int, prior: RowState, event: RowEvent, owner: str, wall_ns: int, **more: Any
    ) -> NoReturn:
        raise illegal_transition(seq, prior.name, TARGET_STATE[event].name, owner, wall_ns, **more)

    def _raise_not_owner(
        self, seq: int, event: RowEvent, epoch: int, owner: str, wall_ns: int
    ) -> NoReturn:
        self._raise_illegal(
            seq, self.state_of(seq), event, owner, wall_ns,
            why="not the owner", held=epoch, current=self._owner_epochs[seq],
        )  # fmt: skip


def illegal_transition(
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
