"""Outcome reuse: a run over a grown input adopts outcomes from the kept runs of its name.

The ledger service adopts when the input is sealed, page by page, before the run opens:

- It looks up each row by key and content hashes in every kept run with the same version and schema,
  newest first. A row that succeeded or was skipped there is adopted. A failed row is adopted only if
  the run does not retry failed rows and no older run holds a better outcome.
- The first run that has the row, in any state, also supplies the row's origin. Idempotency keys are
  built from the origin, so a call that may already have been made is repeated under the same key.
- Successes become pointers to the run that holds them. Records of skipped and failed rows are copied:
  they are small, and lists of failed rows then read a single run.
- A page is one commit: its log entries, its lineage and its copied records. After a crash the service
  resumes at the first page without a lineage.

Memory: one page of keys and hashes of this run, one block of each source run, and one byte per row of
each run in which not all rows succeeded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast import codec, failpoints
from holdfast.config import SCAN_PAGE
from holdfast.durable.lease import Lease
from holdfast.ledger import runs
from holdfast.ledger.events import AdoptedRange, LogEntry
from holdfast.ledger.lineage import PageLineage, RunLineage, SeqMap, compress_ranges, read_page
from holdfast.ledger.log import load_run
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState
from holdfast.spark.row_match import (
    HASH_COLUMNS,
    KeyedRows,
    MatchCursor,
    MatchResult,
    keyed_rows_of,
)
from holdfast.spark.run_data import RunInput, decode_schema
from holdfast.spark.service_log_writer import BlockingTicket, ServiceLogWriter
from holdfast.spark.spool import (
    chunk_name,
    move_raws_to_spool,
    open_spool,
    resultless_with_raws,
    writer_id,
)
from holdfast.store.api import Store, Txn

SeqArray = NDArray[np.int64]
CodeArray = NDArray[np.uint8]

# Copied records share one store value up to about this size.
CHUNK_BYTES = 4 * 1024 * 1024
# Pages with an enqueued commit that is not yet durable.
PAGES_PENDING = 4

_GOOD_STATES = (int(RowState.TERMINAL_SUCCESS), int(RowState.TERMINAL_SKIP))
_FAILED_STATE = int(RowState.TERMINAL_FAIL)
_STATUSES_WITHOUT_OUTCOMES = frozenset({runs.RunLifecycle.INGESTING, runs.RunLifecycle.HALTED})
# Settings that must be equal before a run may adopt outcomes from another.
_EQUAL_SETTINGS = ("schema", "version")


class PageAdoption(NamedTuple):
    """The adoption of one page: row ranges by source run, the lineage to store, and the copied
    records.
    """

    adopted_ranges: list[tuple[str, list[AdoptedRange]]]
    lineage: PageLineage
    resultless: list[runs.ResultlessRow]
    # Per row: an earlier run failed it, and no run holds a better outcome.
    failed_before: NDArray[np.bool_]


def list_reuse_sources(txn: Txn, record: runs.RunRecord) -> list[runs.RunRecord]:
    """Return the kept runs from which a run may adopt outcomes, newest first."""
    kept = runs.list_runs_of(txn, record.name)
    with_input = {one.run_id for one in kept if not one.input_dropped and not one.deleting}
    return [
        one
        for one in kept
        if one.run_id != record.run_id
        and one.blocks_run in with_input
        and one.status not in _STATUSES_WITHOUT_OUTCOMES
        and not one.deleting
        and not one.input_dropped
        and one.key == record.key
        and one.result_schema == record.result_schema
        and all(one.config.get(what) == record.config.get(what) for what in _EQUAL_SETTINGS)
    ]


def iter_keyed_rows(store: Store, record: runs.RunRecord, digest: str) -> Iterator[KeyedRows]:
    """Yield the keys of a run block by block, with content hashes if they have this digest."""
    source = RunInput(store, record)
    hashed = bool(digest) and record.match_digest == digest
    columns = [*record.key, *(HASH_COLUMNS if hashed else ())]
    for lo, n, table in source.blocks(columns):
        keyed_rows = keyed_rows_of(lo, table.select(columns), record.key, hashed=hashed)
        if not hashed and digest:
            keyed_rows = keyed_rows._replace(
                hashes=_read_late_hashes(store, record, n, digest, keyed_rows.rows)
            )
        yield keyed_rows


def match_bytes(digest: str, first: SeqArray, second: SeqArray) -> bytes:
    """Encode the hashes of a block that were computed after its run."""
    return digest.encode() + first.tobytes() + second.tobytes()


def _read_late_hashes(
    store: Store, record: runs.RunRecord, n: int, digest: str, rows: int
) -> tuple[SeqArray, SeqArray] | None:
    data = store.read(_get_match_row, record.blocks_run, n)
    if data is None or not data.startswith(digest.encode()):
        return None
    both = np.frombuffer(data, dtype=np.int64, offset=len(digest)).reshape(2, rows)
    return both[0], both[1]


def _get_match_row(txn: Txn, run_id: str, n: int) -> bytes | None:
    return txn.get(runs.match_key(run_id, n))


def key_types(record: runs.RunRecord) -> list[pa.DataType]:
    schema = decode_schema(record.input_schema)
    return [schema.field(name).type for name in record.key]


class ReuseSource:
    """A kept run, read once in key order."""

    def __init__(self, store: Store, record: runs.RunRecord, target: runs.RunRecord) -> None:
        self.store = store
        self.record = record
        self.run_id = record.run_id
        self._ancestry = RunLineage(store, record)
        self._spool = open_spool(record)
        self._same_input = record.blocks_run == target.blocks_run
        self._cursor: MatchCursor | None = None
        if not self._same_input and key_types(record) == key_types(target):
            self._cursor = MatchCursor(iter_keyed_rows(store, record, target.match_digest))
        self._codes: CodeArray | None = None
        self._reasons: CodeArray | None = None

    def find(self, keyed_rows: KeyedRows) -> MatchResult:
        if self._same_input:
            seqs = np.arange(keyed_rows.lo, keyed_rows.lo + keyed_rows.rows, dtype=np.int64)
            return MatchResult(seqs, np.ones(keyed_rows.rows, dtype=np.bool_))
        if self._cursor is None:
            none = np.full(keyed_rows.rows, -1, dtype=np.int64)
            return MatchResult(none, np.zeros(keyed_rows.rows, dtype=np.bool_))
        return self._cursor.find(keyed_rows)

    def row_states(self, seqs: SeqArray) -> tuple[CodeArray, CodeArray]:
        """Return per row its state, final or not, and its error class."""
        if self._codes is None or self._reasons is None:
            self._codes, self._reasons = read_row_states(self.store, self.record)
        return self._codes[seqs], self._reasons[seqs]

    def outcome_locations(self, seqs: SeqArray, numbers: RunNumbers) -> tuple[SeqArray, SeqArray]:
        """Return where the outcomes of ascending rows are stored: run numbers, and seqs in these
        runs.
        """
        return self._trace(seqs, numbers, origins=False)

    def row_origins(self, seqs: SeqArray, numbers: RunNumbers) -> tuple[SeqArray, SeqArray]:
        """Return which run had each row first: run numbers, and seqs in these runs."""
        return self._trace(seqs, numbers, origins=True)

    def _trace(
        self, seqs: SeqArray, numbers: RunNumbers, *, origins: bool
    ) -> tuple[SeqArray, SeqArray]:
        run_numbers = np.full(len(seqs), numbers.number_of(self.run_id), dtype=np.int64)
        there = seqs.copy()
        pages = seqs // self.record.policy.page_rows
        for page in np.unique(pages).tolist():
            lineage = self._ancestry.page(page)
            ranges = lineage.origins if origins else lineage.adopted
            if not ranges:
                continue
            rows = np.flatnonzero(pages == page)
            run, place = SeqMap(ranges).find(seqs[rows])
            rows, run, place = rows[run >= 0], run[run >= 0], place[run >= 0]
            known = np.array([numbers.number_of(one) for one in lineage.runs], dtype=np.int64)
            run_numbers[rows], there[rows] = known[run], place
        return run_numbers, there

    def resultless_rows(self, seqs: SeqArray) -> dict[int, runs.ResultlessRow]:
        """Return the stored records of rows without a result, by seq."""
        wanted = set(seqs.tolist())
        records: dict[int, runs.ResultlessRow] = {}
        for page in np.unique(seqs // self.record.policy.page_rows).tolist():
            for _, chunk in self.store.read(runs.list_chunks, self.run_id, page):
                if any(other.seq in wanted for other in chunk.resultless):
                    others = resultless_with_raws(self._spool, chunk)
                    records |= {other.seq: other for other in others if other.seq in wanted}
        return records


class RunNumbers:
    """Interned run ids: numbers that fit into arrays."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._by_id: dict[str, int] = {}

    def number_of(self, run_id: str) -> int:
        if run_id not in self._by_id:
            self._by_id[run_id] = len(self.ids)
            self.ids.append(run_id)
        return self._by_id[run_id]


class OutcomeAdoption:
    """The adoption for one run. Its pages must be requested in order."""

    def __init__(
        self,
        store: Store,
        record: runs.RunRecord,
        sources: Sequence[runs.RunRecord],
        own_store: Store | None = None,
    ) -> None:
        """`own_store` is the store of the run itself, if it is not the store of the source runs."""
        self.record = record
        self._input = RunInput(own_store or store, record)
        self._sources = [ReuseSource(store, one, record) for one in sources]

    def adopt_page(self, page: int) -> PageAdoption:
        if failpoints.armed:
            failpoints.hit("spark.adopt_page", page)
        page_rows = self.record.policy.page_rows
        lo, hi = page * page_rows, min((page + 1) * page_rows, self.record.size)
        return self.adopt_rows(self._read_page(lo, hi))

    def adopt_rows(self, keyed_rows: KeyedRows) -> PageAdoption:
        numbers = RunNumbers()
        adopted = _AdoptedColumns(keyed_rows)
        failed = _AdoptedColumns(keyed_rows)
        origin = _AdoptedColumns(keyed_rows)
        failed_before = np.zeros(keyed_rows.rows, dtype=np.bool_)
        resultless: dict[int, runs.ResultlessRow] = {}
        for source in self._sources:
            if adopted.is_complete:
                break
            match = source.find(keyed_rows)
            rows = np.flatnonzero(match.same)
            first = rows[origin.run[rows] < 0]
            if len(first):
                origin.assign(first, source.row_origins(match.seqs[first], numbers))
            rows = rows[adopted.run[rows] < 0]
            if not len(rows):
                continue
            codes, reasons = source.row_states(match.seqs[rows])
            good = np.isin(codes, _GOOD_STATES)
            self._add_outcomes(
                adopted,
                rows[good],
                codes[good],
                reasons[good],
                source,
                match,
                numbers=numbers,
                resultless=resultless,
            )
            bad = codes == _FAILED_STATE
            failed_before[rows[bad]] = True
            if not self.record.retry_failed:
                bad &= failed.run[rows] < 0
                self._add_outcomes(
                    failed,
                    rows[bad],
                    codes[bad],
                    reasons[bad],
                    source,
                    match,
                    numbers=numbers,
                    resultless=resultless,
                )
        adopted.assign_missing(failed)
        kept = [
            resultless[seq]
            for seq in sorted(resultless)
            if _is_kept(adopted, resultless[seq], keyed_rows)
        ]
        failed_before &= adopted.run < 0
        lineage = _build_lineage(adopted, origin, numbers)
        return PageAdoption(adopted.ranges_by_run(numbers), lineage, kept, failed_before)

    def iter_pages(self) -> Iterator[KeyedRows]:
        """Yield the keys of the run page by page."""
        page_rows = self.record.policy.page_rows
        for lo in range(0, self.record.size, page_rows):
            yield self._read_page(lo, min(lo + page_rows, self.record.size))

    def _add_outcomes(
        self,
        into: _AdoptedColumns,
        rows: SeqArray,
        codes: CodeArray,
        reasons: CodeArray,
        source: ReuseSource,
        match: MatchResult,
        *,
        numbers: RunNumbers,
        resultless: dict[int, runs.ResultlessRow],
    ) -> None:
        if not len(rows):
            return
        there = match.seqs[rows]
        into.assign(rows, source.outcome_locations(there, numbers), codes, reasons)
        without = np.flatnonzero(codes != int(RowState.TERMINAL_SUCCESS))
        if not len(without):
            return
        records = source.resultless_rows(there[without])
        for row, seq in zip(rows[without].tolist(), there[without].tolist(), strict=True):
            if seq in records:
                now = into.keyed_rows.lo + row
                resultless[now] = _renumber(records[seq], now)

    def _read_page(self, lo: int, hi: int) -> KeyedRows:
        hashed = bool(self.record.match_digest)
        wanted = [*self.record.key, *(HASH_COLUMNS if hashed else ())]
        table = self._input.rows([(lo, hi)], wanted)
        return keyed_rows_of(lo, table, self.record.key, hashed=hashed)


class _AdoptedColumns:
    """Per row of a key batch: a run number or -1, the seq in that run, the state and the error
    class.
    """

    def __init__(self, keyed_rows: KeyedRows) -> None:
        self.keyed_rows = keyed_rows
        self.seqs = np.arange(keyed_rows.lo, keyed_rows.lo + keyed_rows.rows, dtype=np.int64)
        self.run = np.full(keyed_rows.rows, -1, dtype=np.int64)
        self.source_seq = np.full(keyed_rows.rows, -1, dtype=np.int64)
        self.code = np.zeros(keyed_rows.rows, dtype=np.int64)
        self.reason = np.zeros(keyed_rows.rows, dtype=np.int64)

    @property
    def is_complete(self) -> bool:
        return bool((self.run >= 0).all())

    def assign(
        self,
        rows: SeqArray,
        places: tuple[SeqArray, SeqArray],
        codes: CodeArray | None = None,
        reasons: CodeArray | None = None,
    ) -> None:
        self.run[rows], self.source_seq[rows] = places
        if codes is not None and reasons is not None:
            self.code[rows], self.reason[rows] = codes, reasons

    def assign_missing(self, other: _AdoptedColumns) -> None:
        rows = np.flatnonzero((self.run < 0) & (other.run >= 0))
        self.assign(rows, (other.run[rows], other.source_seq[rows]))
        self.code[rows], self.reason[rows] = other.code[rows], other.reason[rows]

    def ranges_by_run(self, numbers: RunNumbers) -> list[tuple[str, list[AdoptedRange]]]:
        result = []
        for run in np.unique(self.run[self.run >= 0]).tolist():
            rows = np.flatnonzero(self.run == run)
            columns = (self.source_seq[rows], self.code[rows], self.reason[rows])
            ranges = compress_ranges(self.seqs[rows], *columns, steps=[True, False, False])
            result.append((numbers.ids[run], [AdoptedRange(*one) for one in ranges]))
        return result


def _build_lineage(
    adopted_columns: _AdoptedColumns, origin: _AdoptedColumns, numbers: RunNumbers
) -> PageLineage:
    used = sorted(
        {*np.unique(adopted_columns.run).tolist(), *np.unique(origin.run).tolist()} - {-1}
    )
    local = np.full(len(numbers.ids) + 1, -1, dtype=np.int64)
    local[used] = np.arange(len(used))
    adopted = np.flatnonzero(adopted_columns.run >= 0)
    seen = np.flatnonzero(origin.run >= 0)
    return PageLineage(
        [numbers.ids[number] for number in used],
        compress_ranges(
            adopted_columns.seqs[adopted],
            local[adopted_columns.run[adopted]],
            adopted_columns.source_seq[adopted],
            adopted_columns.code[adopted],
            steps=[False, True, False],
        ),  # type: ignore[arg-type]
        compress_ranges(
            origin.seqs[seen],
            local[origin.run[seen]],
            origin.source_seq[seen],
            steps=[False, True],
        ),  # type: ignore[arg-type]
    )


def _renumber(other: runs.ResultlessRow, seq: int) -> runs.ResultlessRow:
    return replace(other, seq=seq)


def _is_kept(adopted: _AdoptedColumns, other: runs.ResultlessRow, keyed_rows: KeyedRows) -> bool:
    """Whether the record is kept: the failure of a row is dropped when another run holds a better
    outcome.
    """
    return int(adopted.code[other.seq - keyed_rows.lo]) == other.state


def group_chunks(others: Sequence[runs.ResultlessRow]) -> Iterator[runs.OutcomeChunk]:
    """Group records into values that fit the store."""
    pending: list[runs.ResultlessRow] = []
    size = 0
    for other in others:
        bytes_ = len(codec.pack(other))
        if pending and size + bytes_ > CHUNK_BYTES:
            yield _resultless_chunk(pending)
            pending, size = [], 0
        pending.append(other)
        size += bytes_
    if pending:
        yield _resultless_chunk(pending)


def _resultless_chunk(others: list[runs.ResultlessRow]) -> runs.OutcomeChunk:
    return runs.OutcomeChunk(
        lo=0,
        seqs=b"",
        batch=b"",
        resultless=others,
        attempts=[],
        cost=0.0,
        calls=0,
        spent_us_log2=[],
    )


def read_row_states(store: Store, record: runs.RunRecord) -> tuple[CodeArray, CodeArray]:
    """Return for each row of a run its state, final or not, and the error class of failed rows."""
    scheduler = load_run(store, record.run_id)
    state, reason = scheduler.ledger.state, scheduler.ledger.reason
    codes = state.copy()
    # COMMITTED hides the final state. The error class reveals it, except for skipped rows.
    done = state == int(RowState.COMMITTED)
    codes[done] = _FAILED_STATE
    codes[done & (reason == int(ErrorClass.CANCELLATION))] = int(RowState.TERMINAL_CANCEL)
    codes[done & (reason == int(ErrorClass.NONE))] = int(RowState.TERMINAL_SUCCESS)
    succeeded, skipped, *_ = scheduler.ended
    if skipped or int((codes == int(RowState.TERMINAL_SUCCESS)).sum()) != succeeded:
        for page in range(-(-record.size // record.policy.page_rows)):
            for _, chunk in store.read(runs.list_chunks, record.run_id, page):
                for other in chunk.resultless:
                    if done[other.seq]:
                        codes[other.seq] = other.state
    return codes, reason.copy()


def adopt_outcomes(store: Store, log_writer: ServiceLogWriter, record: runs.RunRecord) -> None:
    """Adopt the outcomes of kept runs for the rows of a run with an open scheduler. Return
    when all is durable.
    """
    lease = log_writer.log.lease
    sources = store.transact(_pin_sources, lease, record)
    adoption = OutcomeAdoption(store, record, sources)
    used: set[str] = set()
    pending: deque[BlockingTicket] = deque()
    for page in range(-(-record.size // record.policy.page_rows)):
        lineage = store.read(read_page, record.run_id, page)
        if lineage is None:
            page_adoption = adoption.adopt_page(page)
            lineage = page_adoption.lineage
            pending.append(_enqueue_page(store, log_writer, record, page, page_adoption))
            if len(pending) > PAGES_PENDING:
                pending.popleft().wait()
        used |= {lineage.runs[number] for _, _, number, _, _ in lineage.adopted}
    for ticket in pending:
        ticket.wait()
    if record.input_run:
        used.add(record.input_run)
    store.transact(_unpin_unused, lease, record.run_id, used)


def _enqueue_page(
    store: Store,
    log_writer: ServiceLogWriter,
    record: runs.RunRecord,
    page: int,
    page_adoption: PageAdoption,
) -> BlockingTicket:
    chunks = list(group_chunks(page_adoption.resultless))
    spool = open_spool(record)
    if spool is not None:
        writer = writer_id()
        chunks = [
            move_raws_to_spool(spool, chunk, chunk_name(page, n, writer))
            for n, chunk in enumerate(chunks)
        ]
    puts = [(runs.lineage_key(record.run_id, page), codec.pack(page_adoption.lineage))]
    entries: list[LogEntry] = []
    with log_writer.lock:
        for run_id, rows in _split_ranges(page_adoption.adopted_ranges, len(chunks)):
            _, more = log_writer.scheduler.adopt(run_id, rows, store.now_ns())
            entries += more
        # Each chunk is stored under the height of a separate log entry.
        for height, chunk in enumerate(chunks, log_writer.height + 1):
            puts += runs.chunk_rows(record.run_id, page, height, chunk)
        return log_writer.enqueue(entries, puts)


def _split_ranges(
    rows: list[tuple[str, list[AdoptedRange]]], count: int
) -> list[tuple[str, list[AdoptedRange]]]:
    """Split the ranges into at least `count` pieces. There are never fewer rows than pieces."""
    pieces = list(rows)
    while len(pieces) < count:
        sizes = [sum(one.hi - one.lo for one in piece) for _, piece in pieces]
        at = sizes.index(max(sizes))
        run_id, piece = pieces[at]
        pieces[at : at + 1] = [(run_id, half) for half in _split_at(piece, sizes[at] // 2)]
    return pieces


def _split_at(
    piece: list[AdoptedRange], count: int
) -> tuple[list[AdoptedRange], list[AdoptedRange]]:
    remaining: list[AdoptedRange] = []
    for at, one in enumerate(piece):
        size = one.hi - one.lo
        if size >= count:
            cut = one.lo + count
            rest = piece[at + 1 :]
            if count < size:
                rest = [replace(one, lo=cut, from_lo=one.from_lo + count), *rest]
            return [*remaining, replace(one, hi=cut)], rest
        remaining.append(one)
        count -= size
    return remaining, []


def _pin_sources(txn: Txn, lease: Lease, record: runs.RunRecord) -> list[runs.RunRecord]:
    """Pin every kept run of the name while it is read. Return the runs to adopt from."""
    txn.require_live(lease)
    for one in runs.list_runs_of(txn, record.name):
        if one.run_id != record.run_id:
            runs.pin(txn, one.run_id, record.run_id)
    return list_reuse_sources(txn, record)


def _unpin_unused(txn: Txn, lease: Lease, run_id: str, used: set[str]) -> None:
    txn.require_live(lease)
    for other in runs.list_pinned_runs(txn, run_id, SCAN_PAGE):
        if other not in used:
            runs.unpin(txn, other, run_id)
