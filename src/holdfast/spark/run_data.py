"""Run data: the input of a run by seq, and its outcomes in seq order.

Input blocks are Arrow streams of any length. `RunInput.rows` slices and joins them, so no other module
depends on block boundaries. Outcomes are stored as chunks in report order. `RunOutcomes` sorts the
outcomes of an interval by seq and joins the key columns.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from holdfast.errors import StoreCorrupt
from holdfast.ledger import runs
from holdfast.ledger.lineage import OutcomePointer, RunLineage
from holdfast.ledger.ranges import Range
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState
from holdfast.spark import spool as spools
from holdfast.spark.arrow_rows import decode_batch, decode_table
from holdfast.spark.result_chunks import ChunkIndex
from holdfast.spark.row_match import HASH_COLUMNS
from holdfast.spark.row_sizes import RowSizes, row_sizes, row_width
from holdfast.store.api import Store

BLOCKS_CACHED = 8
LARGE_TABLE_BYTES = 1 << 30
# Above this number of pieces per block, rows are picked by index: a slice costs kilobytes.
SLICES_MAX = 64

META_SCHEMA = pa.schema(
    [
        pa.field("_seq", pa.int64()),
        pa.field("_state", pa.string()),
        pa.field("_attempts", pa.int32()),
        pa.field("_error_class", pa.string()),
        pa.field("_error", pa.string()),
    ]
)


RAW_FIELD = pa.field("_raw", pa.large_string())


def decode_schema(data: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(data))


def encode_schema(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize().to_pybytes())


def carried_names(text: str, names: Sequence[str], key: Sequence[str]) -> list[str]:
    """Return the input columns that the stored option `carry` adds to the output."""
    if not text:
        return []
    selected = list(names) if text == "*" else json.loads(text)
    return [name for name in selected if name not in key]


class RunInput:
    """Rows of the input by seq. Not thread-safe."""

    def __init__(self, store: Store, record: runs.RunRecord) -> None:
        self.store = store
        self.run_id = record.blocks_run
        self.size = record.size
        self.schema = decode_schema(record.input_schema)
        self._blocks = [n for n, _ in record.blocks]
        self._ends = list(accumulate(rows for _, rows in record.blocks))
        self._keys = {*record.key, *HASH_COLUMNS}
        self._spool = _spool_of_blocks(store, record)
        self._cache = spools.BlockCache(BLOCKS_CACHED)
        self._row_bytes: dict[int, int] = {}

    def rows(self, ranges: Iterable[Range], columns: list[str] | None = None) -> pa.Table:
        """Read rows of the input. `columns` may also name internal columns of the blocks."""
        names = self.schema.names if columns is None else columns
        tables: list[pa.Table] = []
        for at, pieces in self.by_block(ranges):
            block = self._block(self._blocks[at], names).select(names)
            if len(pieces) > SLICES_MAX:
                wanted = np.concatenate([np.arange(lo, hi) for lo, hi in pieces])
                tables.append(block.take(pa.array(wanted)))
            else:
                tables += [block.slice(lo, hi - lo) for lo, hi in pieces]
        if not tables:
            return self.schema.empty_table().select(names)
        return pa.concat_tables(tables) if len(tables) > 1 else tables[0]

    def by_block(self, ranges: Iterable[Range]) -> Iterator[tuple[int, list[Range]]]:
        """Group consecutive ranges by block. Yields the block's index and the ranges as positions
        in the block.
        """
        at, pieces = -1, list[Range]()
        for lo, hi in ranges:
            while lo < hi:
                here = bisect_right(self._ends, lo)
                if here != at:
                    if pieces:
                        yield at, pieces
                    at, pieces = here, []
                first = self._ends[here - 1] if here else 0
                upto = min(hi, self._ends[here])
                pieces.append((lo - first, upto - first))
                lo = upto
        if pieces:
            yield at, pieces

    def blocks(self, columns: list[str] | None = None) -> Iterator[tuple[int, int, pa.Table]]:
        """Yield (first seq, number, rows) of each non-empty block in seq order, with at least these
        columns.
        """
        for at, n in enumerate(self._blocks):
            first = self._ends[at - 1] if at else 0
            if self._ends[at] > first:
                yield first, n, self._block(n, columns)

    def row_bytes(self, seq: int) -> int:
        """Return the approximate size of a row, from the block that holds the seq."""
        if not self.size:
            return 1
        n = self._blocks[bisect_right(self._ends, min(seq, self.size - 1))]
        if n not in self._row_bytes:
            if self._spool is not None:
                block = self._spool_block(n)
                size, rows = block.at.size, block.rows
            else:
                table = self._block(n)
                size, rows = table.nbytes, table.num_rows
            self._row_bytes[n] = max(size // max(rows, 1), 1)
        return self._row_bytes[n]

    def keys_of_block(self, n: int) -> pa.Table:
        """Read a block by its number, with at least the key columns."""
        return self._block(n, sorted(self._keys))

    @property
    def is_spooled(self) -> bool:
        return self._spool is not None

    def block_locations(self, ranges: Iterable[Range]) -> list[tuple[int, runs.SpoolBlock]]:
        """Return (first seq, location) of the spool blocks that hold these rows, each once, in
        order.
        """
        indexes = sorted({at for at, _ in self.by_block(ranges)})
        return [
            (self._ends[at - 1] if at else 0, self._spool_block(self._blocks[at])) for at in indexes
        ]

    def _block(self, n: int, columns: list[str] | None = None) -> pa.Table:
        """Read a block. With a spool, read no more than these columns need."""
        keys_only = (
            self._spool is not None and columns is not None and self._keys.issuperset(columns)
        )
        return self._cache.get(n, keys_only, lambda: self._read(n, keys_only))

    def _read(self, n: int, keys_only: bool) -> pa.Table:
        if self._spool is not None:
            block = self._spool_block(n)
            try:
                return spools.read_block(self._spool, block, keys_only=keys_only)
            except spools.ObjectLost as why:
                at = self._blocks.index(n)
                rows = (self._ends[at - 1] if at else 0, self._ends[at])
                raise spools.lost_error(
                    self._spool, "input", [rows], block.at.name, str(why)
                ) from None
        data = self.store.read(runs.get_block, self.run_id, n)
        if data is None:
            raise StoreCorrupt(what="input block", run_id=self.run_id, block=n)
        return decode_table(data)

    def _spool_block(self, n: int) -> runs.SpoolBlock:
        found = self.store.read(runs.get_spool_block, self.run_id, n)
        if found is None:
            raise StoreCorrupt(what="input block", run_id=self.run_id, block=n)
        return found


def _spool_of_blocks(store: Store, record: runs.RunRecord) -> spools.Spool | None:
    """Return the spool with the blocks of a run. They may belong to an older run."""
    if record.blocks_run == record.run_id:
        return spools.open_spool(record)
    older = store.read(runs.get_record, record.blocks_run)
    if older is None:
        raise StoreCorrupt(
            what="run", run_id=record.blocks_run, why="the run with the input was deleted"
        )
    return spools.open_spool(older)


class RunOutcomes:
    """The outcomes of rows in seq order. The interval must be final and its chunks durable."""

    def __init__(self, store: Store, record: runs.RunRecord, source: RunInput) -> None:
        self.store = store
        self.record = record
        self.input = source
        self.result_schema = decode_schema(record.result_schema)
        # Carried columns are read like the key: both are input columns.
        names = self.input.schema.names
        self._carried = carried_names(record.config.get("carry", ""), names, record.key)
        self._input_columns = [*record.key, *self._carried]
        fields = [self.input.schema.field(name) for name in self._input_columns]
        self.schema = pa.schema([*fields, *self.result_schema])
        self._page_rows = record.policy.page_rows
        self._chunk_index = ChunkIndex(store, record, self.result_schema)
        self._ancestry = RunLineage(store, record)
        self._source_runs: dict[str, RunOutcomes] = {}

    def successes(self, lo: int, hi: int) -> pa.Table:
        """Return key, carried and result columns of the successful rows. It sorts one page at a
        time.
        """
        tables = []
        while lo < hi:
            upto = min(lo - lo % self._page_rows + self._page_rows, hi)
            seqs, results = self._results(lo, upto)
            keys = self._key_rows(lo, upto, seqs)
            columns = [*keys.columns, *results.columns]
            tables.append(pa.Table.from_arrays(columns, schema=self.schema))
            lo = upto
        return pa.concat_tables(tables) if tables else self.schema.empty_table()

    def all_rows(self, lo: int, hi: int) -> pa.Table:
        """Return key, carried and result columns of every row, with its outcome (`META_SCHEMA`)."""
        seqs, results = self._results(lo, hi)
        ended = [
            self._with_meta(others, self._input_columns)
            for others in self._iter_resultless(lo, hi, ())
        ]
        others = pa.concat_tables(ended) if ended else self._with_meta([], self._input_columns)
        good = pa.Table.from_arrays(
            [*self._key_rows(lo, hi, seqs).columns, *results.columns], schema=self.schema
        )
        count = good.num_rows
        state = pa.repeat(pa.scalar(RowState.TERMINAL_SUCCESS.name), count)
        nothing = pa.nulls(count, pa.string())
        meta = [pc.add(seqs, lo), state, self._attempts(lo, hi, seqs), nothing, nothing]
        for field, column in zip(META_SCHEMA, meta, strict=True):
            good = good.append_column(field, column)
        rest = pa.Table.from_arrays(
            [
                others.column(field.name)
                if field.name in others.column_names
                else pa.nulls(others.num_rows, field.type)
                for field in good.schema
            ],
            schema=pa.schema([field.with_nullable(True) for field in good.schema]),
        )
        good = good.cast(rest.schema)
        return pa.concat_tables([good, rest]).sort_by("_seq")

    def _attempts(self, lo: int, hi: int, seqs: pa.Array) -> pa.Array:
        more = self._attempts_above_one(lo, hi)
        for donor, pointers in self._adopted_pointers(lo, hi):
            last = pointers[-1]
            there = donor._attempts_above_one(pointers[0].from_lo, last.from_lo + last.hi - last.lo)
            for one in pointers:
                upto = one.from_lo + one.hi - one.lo
                more |= {
                    seq - one.from_lo + one.lo: tries
                    for seq, tries in there.items()
                    if one.from_lo <= seq < upto
                }
        if not more:
            return pa.repeat(pa.scalar(1, pa.int32()), len(seqs))
        return pa.array([more.get(lo + at, 1) for at in seqs.to_pylist()], pa.int32())

    def _attempts_above_one(self, lo: int, hi: int) -> dict[int, int]:
        """Return the attempts of successes of this run that took more than one."""
        return {
            seq: part.attempt
            for chunk in self._chunk_index.without_results(lo, hi)
            for part in chunk.attempts
            for seq in range(part.lo, part.hi)
        }

    def resultless_rows(self, lo: int, hi: int, *states: RowState) -> pa.Table:
        """Return key columns and outcome (`META_SCHEMA`) of the rows without a result, in these states or
        in any.
        """
        pages = [self._with_meta(others) for others in self._iter_resultless(lo, hi, states)]
        return pa.concat_tables(pages) if pages else self._with_meta([])

    def failed(self, lo: int, hi: int) -> pa.Table:
        """Return the failed rows, with `_raw`: a result that did not fit the schema, as JSON text,
        or null.
        """
        states = (RowState.TERMINAL_FAIL,)
        pages = [
            self._failed_table(others)
            for others in self._iter_resultless(lo, hi, states, raws=True)
        ]
        return pa.concat_tables(pages) if pages else self._failed_table([])

    def _failed_table(self, others: Sequence[runs.ResultlessRow]) -> pa.Table:
        raws = pa.array([one.raw or None for one in others], pa.large_string())
        return self._with_meta(others).append_column(RAW_FIELD, raws)

    def _iter_resultless(
        self, lo: int, hi: int, states: Sequence[RowState], *, raws: bool = False
    ) -> Iterator[list[runs.ResultlessRow]]:
        """Yield records in order, page by page: a million failures never become a million objects
        at once.
        """
        while lo < hi:
            upto = min(lo - lo % self._page_rows + self._page_rows, hi)
            records = {
                other.seq: other
                for chunk in self._chunk_index.without_results(lo, upto, raws=raws)
                for other in chunk.resultless
                if lo <= other.seq < upto and (not states or other.state in states)
            }
            if records:
                yield [records[seq] for seq in sorted(records)]
            lo = upto

    def success_count(self, lo: int, hi: int) -> int:
        """Return how many rows of [lo, hi) succeeded. Reads no result."""
        ended = {one.seq for others in self._iter_resultless(lo, hi, ()) for one in others}
        for pointer in self._ancestry.adopted(lo, hi):
            if pointer.code != RowState.TERMINAL_SUCCESS:
                ended.update(range(max(pointer.lo, lo), min(pointer.hi, hi)))
        return hi - lo - len(ended)

    def pages_with(self, state: RowState) -> Iterator[Range]:
        """Yield the seq ranges of the pages with a row in this state, which must not be success."""
        for others in self._iter_resultless(0, self.record.size, (state,)):
            lo = others[0].seq - others[0].seq % self._page_rows
            yield lo, min(lo + self._page_rows, self.record.size)

    def skipped(self, lo: int, hi: int) -> pa.Table:
        return self.resultless_rows(lo, hi, RowState.TERMINAL_SKIP)

    def _with_meta(
        self, others: Sequence[runs.ResultlessRow], columns: Sequence[str] | None = None
    ) -> pa.Table:
        names = list(self.record.key if columns is None else columns)
        keys = self.input.rows([(other.seq, other.seq + 1) for other in others], names)
        meta = [
            pa.array([other.seq for other in others], pa.int64()),
            pa.array([RowState(other.state).name for other in others], pa.string()),
            pa.array([other.attempts for other in others], pa.int32()),
            pa.array([ErrorClass(other.error_class).name.lower() for other in others], pa.string()),
            pa.array([other.error for other in others], pa.string()),
        ]
        schema = pa.schema([*keys.schema, *META_SCHEMA])
        return pa.Table.from_arrays([*keys.columns, *meta], schema=schema)

    def _results(self, lo: int, hi: int) -> tuple[pa.Array, pa.Table]:
        """Return seqs, as offsets from lo, and results of the successes in [lo, hi), in order."""
        positions, tables = self._own_results(lo, hi)
        for donor, pointers in self._adopted_pointers(lo, hi):
            donor._append_results(pointers, lo, positions, tables)
        return self._sort_results(positions, tables)

    def _own_results(self, lo: int, hi: int) -> tuple[list[pa.Array], list[pa.Table]]:
        """Return offsets and results of the rows in [lo, hi) that this run itself called, chunk by chunk."""
        positions: list[pa.Array] = []
        tables: list[pa.Table] = []
        for chunk in self._chunks(lo, hi):
            if not chunk.batch:
                continue
            table = pa.Table.from_batches([decode_batch(chunk.batch, self.result_schema)])
            if chunk.seqs:
                offsets = pa.Array.from_buffers(
                    pa.uint32(), table.num_rows, [None, pa.py_buffer(chunk.seqs)]
                ).cast(pa.int64())
                at = pc.add(offsets, chunk.lo - lo)
            else:
                at = _consecutive(chunk.lo - lo, table.num_rows)
            first, last = at[0].as_py(), at[-1].as_py()
            if first < 0 or last >= hi - lo:
                mask = pc.and_(pc.greater_equal(at, 0), pc.less(at, hi - lo))
                at, table = at.filter(mask), table.filter(mask)
            if len(at):
                positions.append(at)
                tables.append(table)
        return positions, tables

    def _adopted_pointers(self, lo: int, hi: int) -> list[tuple[RunOutcomes, list[OutcomePointer]]]:
        """Return the adopted results of [lo, hi) by source run, ascending in both runs."""
        by_run: dict[str, list[OutcomePointer]] = {}
        for one in self._ancestry.adopted(lo, hi):
            if one.code == RowState.TERMINAL_SUCCESS:
                by_run.setdefault(one.run, []).append(one)
        return [(self._open_source_run(run), pointers) for run, pointers in by_run.items()]

    def _open_source_run(self, run_id: str) -> RunOutcomes:
        source_run = self._source_runs.get(run_id)
        if source_run is None:
            record = self.store.read(runs.get_record, run_id)
            if record is None:
                raise StoreCorrupt(
                    what="run", run_id=run_id, why="the run with the outcomes was deleted"
                )
            source_run = RunOutcomes(self.store, record, RunInput(self.store, record))
            self._source_runs[run_id] = source_run
        return source_run

    def _append_results(
        self,
        pointers: list[OutcomePointer],
        base: int,
        positions: list[pa.Array],
        tables: list[pa.Table],
    ) -> None:
        """Append the results of these pointers. Positions are offsets from `base`."""
        wanted = found = 0
        for lo, upto, group in self._group_pointers(pointers):
            target = np.full(upto - lo, -1, dtype=np.int64)
            for one in group:
                first = one.from_lo - lo
                target[first : first + _pointer_rows(one)] = np.arange(one.lo - base, one.hi - base)
                wanted += _pointer_rows(one)
            for place, table in zip(*self._own_results(lo, upto), strict=True):
                there = target[place.to_numpy(zero_copy_only=False)]
                mask = there >= 0
                if mask.any():
                    positions.append(pa.array(there[mask]))
                    tables.append(table if mask.all() else table.filter(pa.array(mask)))
                    found += int(mask.sum())
        if found != wanted:
            raise StoreCorrupt(
                what="outcomes", run_id=self.record.run_id, expected=wanted, found=found
            )

    def _group_pointers(
        self, pointers: list[OutcomePointer]
    ) -> Iterator[tuple[int, int, list[OutcomePointer]]]:
        """Group pointers into about one page of this run each, with the first and last row of the
        group.
        """
        at = 0
        while at < len(pointers):
            lo = pointers[at].from_lo
            # A pointer never crosses a page of the adopting run, but may cross one here.
            hi = lo - lo % self._page_rows + 2 * self._page_rows
            group = [pointers[at]]
            at += 1
            while at < len(pointers) and pointers[at].from_lo + _pointer_rows(pointers[at]) <= hi:
                group.append(pointers[at])
                at += 1
            yield lo, group[-1].from_lo + _pointer_rows(group[-1]), group

    def _sort_results(
        self, positions: list[pa.Array], tables: list[pa.Table]
    ) -> tuple[pa.Array, pa.Table]:
        if not tables:
            return pa.array([], pa.int64()), self.result_schema.empty_table()
        order = sorted(range(len(tables)), key=lambda i: positions[i][0].as_py())
        positions = [positions[i] for i in order]
        table = pa.concat_tables([tables[i] for i in order])
        disjoint = all(one[-1].as_py() < two[0].as_py() for one, two in pairwise(positions))
        at = pa.concat_arrays(positions)
        if not disjoint:
            indices = pc.sort_indices(at)
            at, table = at.take(indices), _take_rows(table, indices)
        return at, table

    def _key_rows(self, lo: int, hi: int, seqs: pa.Array) -> pa.Table:
        keys = self.input.rows([(lo, hi)], self._input_columns)
        return keys if len(seqs) == hi - lo else keys.take(seqs)

    def row_width(self) -> int | None:
        """Return the bytes of every output row without its key, if all columns have a fixed width."""
        fields = [self.input.schema.field(name) for name in self._carried]
        return row_width(pa.schema([*fields, *self.result_schema]))

    def row_bytes(self, lo: int, hi: int) -> RowSizes:
        """Return the bytes of the output row of each seq in [lo, hi), without its key; 0 for a row
        without output.
        """
        sizes = self._result_bytes(lo, hi)
        if self._carried and hi > lo:
            more = row_sizes(self.input.rows([(lo, hi)], self._carried))
            sizes += np.where(sizes > 0, more, 0)
        return sizes

    def _result_bytes(self, lo: int, hi: int) -> RowSizes:
        sizes = np.zeros(hi - lo, np.int64)
        for chunk in self._chunks(lo, hi):
            if chunk.batch:
                batch = decode_batch(chunk.batch, self.result_schema)
                at = chunk_seqs(chunk, batch.num_rows) - lo
                found = row_sizes(batch) + 1
                inside = (at >= 0) & (at < hi - lo)
                sizes[at[inside]] = found[inside]
        for donor, pointers in self._adopted_pointers(lo, hi):
            for first, upto, group in donor._group_pointers(pointers):
                there = donor._result_bytes(first, upto)
                for one in group:
                    at_row = one.from_lo - first
                    sizes[one.lo - lo : one.hi - lo] = there[at_row : at_row + _pointer_rows(one)]
        return sizes

    def _chunks(self, lo: int, hi: int) -> Iterable[runs.OutcomeChunk]:
        return self._chunk_index.overlapping(lo, hi)


def _pointer_rows(pointer: OutcomePointer) -> int:
    return pointer.hi - pointer.lo


def _take_rows(table: pa.Table, indices: pa.Array) -> pa.Table:
    """Reorder rows. Arrow concatenates a column before it takes rows, and text columns have 31-bit
    offsets.
    """
    if table.nbytes < LARGE_TABLE_BYTES:
        return table.take(indices)
    wide = pa.schema(
        [
            field.with_type(
                pa.large_string()
                if pa.types.is_string(field.type)
                else pa.large_binary()
                if pa.types.is_binary(field.type)
                else field.type
            )
            for field in table.schema
        ]
    )
    wider = table.cast(wide)
    step = max(len(indices) * (LARGE_TABLE_BYTES // 4) // table.nbytes, 1)
    return pa.concat_tables(
        wider.take(indices.slice(at, step)).cast(table.schema)
        for at in range(0, len(indices), step)
    )


def warm_up_arrow() -> None:
    """Warm up Arrow: its first sum imports pandas, if installed. Do that before the first commit."""
    _consecutive(0, 1)


def _consecutive(first: int, count: int) -> pa.Array:
    ones = pa.repeat(pa.scalar(1, pa.int64()), count)
    return pc.add(pc.cumulative_sum(ones), first - 1)


def chunk_seqs(chunk: runs.OutcomeChunk, rows: int) -> NDArray[np.int64]:
    """Return the seqs of the results of a chunk."""
    if not chunk.seqs:
        return np.arange(chunk.lo, chunk.lo + rows, dtype=np.int64)
    return np.frombuffer(chunk.seqs, np.uint32).astype(np.int64) + chunk.lo
