"""Adoption: what a run over a grown input takes over from the runs of its name that are kept.

The ledger service does it when the input is sealed, page by page, before the run is open:

- A row is looked up by its key and the hashes of its content in every kept run with the same version
  and schema, newest first. If it succeeded or was skipped there, it is adopted; if it failed, only
  when the run does not call failed rows again, and no older run has it better.
- The first run that has the row, however it ended there, also gives its origin, of which idempotency
  keys are made. So a call that may have been made before is made again under the same key.
- Successes are pointers to the run that holds them. Records of skipped and failed rows are copied:
  they are small, and lists of failed rows read one run alone.
- A page is one commit: its log entries, its lineage, its copied records. A service that dies goes on
  with the first page that has no lineage.

Memory: one page of keys and hashes of this run, one block of each other run, and a byte for each row of
runs in which not all rows ended well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable.lease import Lease
from holdfast.ledger import runs
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.lineage import Ancestry, Lineage, Places, page_of, ranges_of
from holdfast.ledger.log import load
from holdfast.ledger.records import AdoptedRange, LogEntry
from holdfast.ledger.states import State
from holdfast.spark.desk import Desk, Ticket
from holdfast.spark.journal import Input, schema_of
from holdfast.spark.match import HASHES, Cursor, Found, Lot, lot_of
from holdfast.spark.spool import chunk_name, spool_of, spooled, with_raws, writer_id
from holdfast.store.api import Store, Txn

Seqs = NDArray[np.int64]
Codes = NDArray[np.uint8]

# Records that are copied go into one value of the store up to about this size.
CHUNK_BYTES = 4 * 1024 * 1024
# Pages that are decided and not durable yet.
PAGES_PENDING = 4

_GOOD = (int(State.TERMINAL_SUCCESS), int(State.TERMINAL_SKIP))
_FAILED = int(State.TERMINAL_FAIL)
_WITHOUT = frozenset({runs.Status.INGESTING, runs.Status.HALTED})
# What a run must share with another to take over its outcomes.
_MEANING = ("schema", "version")


class PageTaken(NamedTuple):
    """What one page takes over: rows by the run they come from, and what is kept of it."""

    rows: list[tuple[str, list[AdoptedRange]]]
    lineage: Lineage
    others: list[runs.Other]
    # For each row: it failed in a run before, and ended well in none.
    failed: NDArray[np.bool_]


def donors_of(txn: Txn, record: runs.RunRecord) -> list[runs.RunRecord]:
    """The kept runs that a run may take outcomes from, newest first."""
    kept = runs.of_name(txn, record.name)
    with_input = {one.run_id for one in kept if not one.input_dropped and not one.deleting}
    return [
        one
        for one in kept
        if one.run_id != record.run_id
        and one.blocks_run in with_input
        and one.status not in _WITHOUT
        and not one.deleting
        and not one.input_dropped
        and one.key == record.key
        and one.result_schema == record.result_schema
        and all(one.config.get(what) == record.config.get(what) for what in _MEANING)
    ]


def lots(store: Store, record: runs.RunRecord, digest: str) -> Iterator[Lot]:
    """The keys of a run block by block, with hashes where they are of this digest."""
    source = Input(store, record)
    hashed = bool(digest) and record.match_digest == digest
    wanted = [*record.key, *(HASHES if hashed else ())]
    for lo, n, table in source.blocks(wanted):
        lot = lot_of(lo, table.select(wanted), record.key, hashed=hashed)
        if not hashed and digest:
            lot = lot._replace(hashes=_later(store, record, n, digest, lot.rows))
        yield lot


def match_bytes(digest: str, first: Seqs, second: Seqs) -> bytes:
    """The hashes of a block as they are kept when they were computed after the run."""
    return digest.encode() + first.tobytes() + second.tobytes()


def _later(
    store: Store, record: runs.RunRecord, n: int, digest: str, rows: int
) -> tuple[Seqs, Seqs] | None:
    data = store.read(_match_row, record.blocks_run, n)
    if data is None or not data.startswith(digest.encode()):
        return None
    both = np.frombuffer(data, dtype=np.int64, offset=len(digest)).reshape(2, rows)
    return both[0], both[1]


def _match_row(txn: Txn, run_id: str, n: int) -> bytes | None:
    return txn.get(runs.match_key(run_id, n))


def key_types(record: runs.RunRecord) -> list[pa.DataType]:
    schema = schema_of(record.input_schema)
    return [schema.field(name).type for name in record.key]


class Donor:
    """A kept run, read once from its first key to its last."""

    def __init__(self, store: Store, record: runs.RunRecord, onto: runs.RunRecord) -> None:
        self.store = store
        self.record = record
        self.run_id = record.run_id
        self._ancestry = Ancestry(store, record)
        self._spool = spool_of(record)
        self._same_input = record.blocks_run == onto.blocks_run
        self._cursor: Cursor | None = None
        if not self._same_input and key_types(record) == key_types(onto):
            self._cursor = Cursor(lots(store, record, onto.match_digest))
        self._codes: Codes | None = None
        self._reasons: Codes | None = None

    def find(self, lot: Lot) -> Found:
        if self._same_input:
            seqs = np.arange(lot.lo, lot.lo + lot.rows, dtype=np.int64)
            return Found(seqs, np.ones(lot.rows, dtype=np.bool_))
        if self._cursor is None:
            none = np.full(lot.rows, -1, dtype=np.int64)
            return Found(none, np.zeros(lot.rows, dtype=np.bool_))
        return self._cursor.find(lot)

    def endings(self, seqs: Seqs) -> tuple[Codes, Codes]:
        """How rows stand here: the state they ended in, or one below; and the error class."""
        if self._codes is None or self._reasons is None:
            self._codes, self._reasons = endings(self.store, self.record)
        return self._codes[seqs], self._reasons[seqs]

    def outcomes(self, seqs: Seqs, numbers: Numbers) -> tuple[Seqs, Seqs]:
        """Where the outcomes of ascending rows lie: the numbers of runs, and seqs there."""
        return self._traced(seqs, numbers, origins=False)

    def origins(self, seqs: Seqs, numbers: Numbers) -> tuple[Seqs, Seqs]:
        return self._traced(seqs, numbers, origins=True)

    def _traced(self, seqs: Seqs, numbers: Numbers, *, origins: bool) -> tuple[Seqs, Seqs]:
        found = np.full(len(seqs), numbers.of(self.run_id), dtype=np.int64)
        places = seqs.copy()
        pages = seqs // self.record.policy.page_rows
        for page in np.unique(pages).tolist():
            lineage = self._ancestry.page(page)
            ranges = lineage.origins if origins else lineage.adopted
            if not ranges:
                continue
            rows = np.flatnonzero(pages == page)
            run, place = Places(ranges).find(seqs[rows])
            rows, run, place = rows[run >= 0], run[run >= 0], place[run >= 0]
            known = np.array([numbers.of(one) for one in lineage.runs], dtype=np.int64)
            found[rows], places[rows] = known[run], place
        return found, places

    def others(self, seqs: Seqs) -> dict[int, runs.Other]:
        """What is kept of rows that ended without a result."""
        wanted = set(seqs.tolist())
        found: dict[int, runs.Other] = {}
        for page in np.unique(seqs // self.record.policy.page_rows).tolist():
            for _, chunk in self.store.read(runs.chunks, self.run_id, page):
                if any(other.seq in wanted for other in chunk.others):
                    others = with_raws(self._spool, chunk)
                    found |= {other.seq: other for other in others if other.seq in wanted}
        return found


class Numbers:
    """Run ids by number, for arrays."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._known: dict[str, int] = {}

    def of(self, run_id: str) -> int:
        if run_id not in self._known:
            self._known[run_id] = len(self.ids)
            self.ids.append(run_id)
        return self._known[run_id]


class Adoption:
    """Of one run, whose pages are asked for in order."""

    def __init__(
        self,
        store: Store,
        record: runs.RunRecord,
        donors: Sequence[runs.RunRecord],
        home: Store | None = None,
    ) -> None:
        """`home` is where the run itself lies, if not with the others."""
        self.record = record
        self._source = Input(home or store, record)
        self._donors = [Donor(store, one, record) for one in donors]

    def page(self, page: int) -> PageTaken:
        page_rows = self.record.policy.page_rows
        lo, hi = page * page_rows, min((page + 1) * page_rows, self.record.size)
        return self.taken(self._lot(lo, hi))

    def taken(self, lot: Lot) -> PageTaken:
        numbers = Numbers()
        taken = _Columns(lot)
        failed = _Columns(lot)
        origin = _Columns(lot)
        failed_before = np.zeros(lot.rows, dtype=np.bool_)
        others: dict[int, runs.Other] = {}
        for donor in self._donors:
            if taken.complete:
                break
            found = donor.find(lot)
            rows = np.flatnonzero(found.same)
            first = rows[origin.run[rows] < 0]
            if len(first):
                origin.fill(first, donor.origins(found.seqs[first], numbers))
            rows = rows[taken.run[rows] < 0]
            if not len(rows):
                continue
            codes, reasons = donor.endings(found.seqs[rows])
            good = np.isin(codes, _GOOD)
            self._take(taken, rows[good], codes[good], reasons[good], donor, found, numbers, others)
            bad = codes == _FAILED
            failed_before[rows[bad]] = True
            if not self.record.retry_failed:
                bad &= failed.run[rows] < 0
                self._take(
                    failed, rows[bad], codes[bad], reasons[bad], donor, found, numbers, others
                )
        taken.fill_from(failed)
        kept = [others[seq] for seq in sorted(others) if _kept(taken, others[seq], lot)]
        failed_before &= taken.run < 0
        lineage = _lineage(taken, origin, numbers)
        return PageTaken(taken.by_run(numbers), lineage, kept, failed_before)

    def lots(self) -> Iterator[Lot]:
        """The rows of the run, page by page."""
        page_rows = self.record.policy.page_rows
        for lo in range(0, self.record.size, page_rows):
            yield self._lot(lo, min(lo + page_rows, self.record.size))

    def _take(
        self,
        into: _Columns,
        rows: Seqs,
        codes: Codes,
        reasons: Codes,
        donor: Donor,
        found: Found,
        numbers: Numbers,
        others: dict[int, runs.Other],
    ) -> None:
        if not len(rows):
            return
        there = found.seqs[rows]
        into.fill(rows, donor.outcomes(there, numbers), codes, reasons)
        without = np.flatnonzero(codes != int(State.TERMINAL_SUCCESS))
        if not len(without):
            return
        told = donor.others(there[without])
        for row, seq in zip(rows[without].tolist(), there[without].tolist(), strict=True):
            if seq in told:
                now = into.lot.lo + row
                others[now] = _renumbered(told[seq], now)

    def _lot(self, lo: int, hi: int) -> Lot:
        hashed = bool(self.record.match_digest)
        wanted = [*self.record.key, *(HASHES if hashed else ())]
        table = self._source.rows([(lo, hi)], wanted)
        return lot_of(lo, table, self.record.key, hashed=hashed)


class _Columns:
    """For each row of a lot: the number of a run or -1, the seq there, how it ended."""

    def __init__(self, lot: Lot) -> None:
        self.lot = lot
        self.seqs = np.arange(lot.lo, lot.lo + lot.rows, dtype=np.int64)
        self.run = np.full(lot.rows, -1, dtype=np.int64)
        self.place = np.full(lot.rows, -1, dtype=np.int64)
        self.code = np.zeros(lot.rows, dtype=np.int64)
        self.reason = np.zeros(lot.rows, dtype=np.int64)

    @property
    def complete(self) -> bool:
        return bool((self.run >= 0).all())

    def fill(
        self,
        rows: Seqs,
        places: tuple[Seqs, Seqs],
        codes: Codes | None = None,
        reasons: Codes | None = None,
    ) -> None:
        self.run[rows], self.place[rows] = places
        if codes is not None and reasons is not None:
            self.code[rows], self.reason[rows] = codes, reasons

    def fill_from(self, other: _Columns) -> None:
        rows = np.flatnonzero((self.run < 0) & (other.run >= 0))
        self.fill(rows, (other.run[rows], other.place[rows]))
        self.code[rows], self.reason[rows] = other.code[rows], other.reason[rows]

    def by_run(self, numbers: Numbers) -> list[tuple[str, list[AdoptedRange]]]:
        found = []
        for run in np.unique(self.run[self.run >= 0]).tolist():
            rows = np.flatnonzero(self.run == run)
            columns = (self.place[rows], self.code[rows], self.reason[rows])
            ranges = ranges_of(self.seqs[rows], *columns, steps=[True, False, False])
            found.append((numbers.ids[run], [AdoptedRange(*one) for one in ranges]))
        return found


def _lineage(taken: _Columns, origin: _Columns, numbers: Numbers) -> Lineage:
    used = sorted({*np.unique(taken.run).tolist(), *np.unique(origin.run).tolist()} - {-1})
    local = np.full(len(numbers.ids) + 1, -1, dtype=np.int64)
    local[used] = np.arange(len(used))
    adopted = np.flatnonzero(taken.run >= 0)
    seen = np.flatnonzero(origin.run >= 0)
    return Lineage(
        [numbers.ids[number] for number in used],
        ranges_of(
            taken.seqs[adopted],
            local[taken.run[adopted]],
            taken.place[adopted],
            taken.code[adopted],
            steps=[False, True, False],
        ),  # type: ignore[arg-type]
        ranges_of(
            origin.seqs[seen],
            local[origin.run[seen]],
            origin.place[seen],
            steps=[False, True],
        ),  # type: ignore[arg-type]
    )


def _renumbered(other: runs.Other, seq: int) -> runs.Other:
    return replace(other, seq=seq)


def _kept(taken: _Columns, other: runs.Other, lot: Lot) -> bool:
    """Of a row that failed in one run and ended well in another, the failure is not kept."""
    return int(taken.code[other.seq - lot.lo]) == other.state


def chunks_of(others: Sequence[runs.Other]) -> Iterator[runs.Chunk]:
    """Records in values that the store takes."""
    held: list[runs.Other] = []
    size = 0
    for other in others:
        bytes_ = len(codec.pack(other))
        if held and size + bytes_ > CHUNK_BYTES:
            yield _chunk(held)
            held, size = [], 0
        held.append(other)
        size += bytes_
    if held:
        yield _chunk(held)


def _chunk(others: list[runs.Other]) -> runs.Chunk:
    return runs.Chunk(0, b"", b"", others, [], 0.0, 0, [])


def endings(store: Store, record: runs.RunRecord) -> tuple[Codes, Codes]:
    """The state that each row of a run ended in, or is in; and the error class of failed ones."""
    board = load(store, record.run_id)
    state, reason = board.ledger.state, board.ledger.reason
    codes = state.copy()
    # A committed row does not say how it ended, but its error class does; not whether it was skipped.
    done = state == int(State.COMMITTED)
    codes[done] = _FAILED
    codes[done & (reason == int(ErrorClass.CANCELLATION))] = int(State.TERMINAL_CANCEL)
    codes[done & (reason == int(ErrorClass.NONE))] = int(State.TERMINAL_SUCCESS)
    succeeded, skipped, *_ = board.ended
    if skipped or int((codes == int(State.TERMINAL_SUCCESS)).sum()) != succeeded:
        for page in range(-(-record.size // record.policy.page_rows)):
            for _, chunk in store.read(runs.chunks, record.run_id, page):
                for other in chunk.others:
                    if done[other.seq]:
                        codes[other.seq] = other.state
    return codes, reason.copy()


def take_over(store: Store, desk: Desk, record: runs.RunRecord) -> None:
    """Adopt what the kept runs have for the rows of a run whose board is open; all of it durable."""
    lease = desk.log.lease
    donors = store.transact(_pinned, lease, record)
    adoption = Adoption(store, record, donors)
    used: set[str] = set()
    pending: deque[Ticket] = deque()
    for page in range(-(-record.size // record.policy.page_rows)):
        lineage = store.read(page_of, record.run_id, page)
        if lineage is None:
            taken = adoption.page(page)
            lineage = taken.lineage
            pending.append(_decided(store, desk, record, page, taken))
            if len(pending) > PAGES_PENDING:
                pending.popleft().wait()
        used |= {lineage.runs[number] for _, _, number, _, _ in lineage.adopted}
    for ticket in pending:
        ticket.wait()
    if record.input_run:
        used.add(record.input_run)
    store.transact(_unpinned, lease, record.run_id, used)


def _decided(
    store: Store, desk: Desk, record: runs.RunRecord, page: int, taken: PageTaken
) -> Ticket:
    chunks = list(chunks_of(taken.others))
    spool = spool_of(record)
    if spool is not None:
        writer = writer_id()
        chunks = [
            spooled(spool, chunk, chunk_name(page, n, writer)) for n, chunk in enumerate(chunks)
        ]
    puts = [(runs.lineage_key(record.run_id, page), codec.pack(taken.lineage))]
    entries: list[LogEntry] = []
    with desk.lock:
        for run_id, rows in _pieces(taken.rows, len(chunks)):
            _, more = desk.board.adopt(run_id, rows, store.now_ns())
            entries += more
        # Each lies under the height of an entry of its own, as every chunk does.
        for height, chunk in enumerate(chunks, desk.height + 1):
            puts += runs.chunk_rows(record.run_id, page, height, chunk)
        return desk.enqueue(entries, puts)


def _pieces(
    rows: list[tuple[str, list[AdoptedRange]]], count: int
) -> list[tuple[str, list[AdoptedRange]]]:
    """The same rows in at least so many pieces; there are no fewer rows than that."""
    pieces = list(rows)
    while len(pieces) < count:
        sizes = [sum(one.hi - one.lo for one in piece) for _, piece in pieces]
        at = sizes.index(max(sizes))
        run_id, piece = pieces[at]
        pieces[at : at + 1] = [(run_id, half) for half in _halves(piece, sizes[at] // 2)]
    return pieces


def _halves(piece: list[AdoptedRange], count: int) -> tuple[list[AdoptedRange], list[AdoptedRange]]:
    left: list[AdoptedRange] = []
    for at, one in enumerate(piece):
        size = one.hi - one.lo
        if size >= count:
            cut = one.lo + count
            rest = piece[at + 1 :]
            if count < size:
                rest = [replace(one, lo=cut, from_lo=one.from_lo + count), *rest]
            return [*left, replace(one, hi=cut)], rest
        left.append(one)
        count -= size
    return left, []


def _pinned(txn: Txn, lease: Lease, record: runs.RunRecord) -> list[runs.RunRecord]:
    """Every kept run of the name is pinned while it is read; those to take outcomes from."""
    txn.require_live(lease)
    for one in runs.of_name(txn, record.name):
        if one.run_id != record.run_id:
            runs.pin(txn, one.run_id, record.run_id)
    return donors_of(txn, record)


def _unpinned(txn: Txn, lease: Lease, run_id: str, used: set[str]) -> None:
    txn.require_live(lease)
    for other in runs.rests_on(txn, run_id, SCAN_PAGE):
        if other not in used:
            runs.unpin(txn, other, run_id)
