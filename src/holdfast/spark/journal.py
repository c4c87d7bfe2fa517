"""The input of a run, by seq, and its outcomes, in order: what the ledger service reads.

Input blocks are Arrow streams of any length; `Input.rows` cuts and joins them, so that nobody else
knows where a block ends. Outcomes are chunks in the order of their reports; `outcomes` sorts those
of an interval by seq and joins the key columns to them.
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
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.lineage import Ancestry, Pointer
from holdfast.ledger.ranges import Range
from holdfast.ledger.states import State
from holdfast.spark import spool as spools
from holdfast.spark.match import HASHES
from holdfast.spark.result_chunks import Chunks
from holdfast.spark.row_sizes import Sizes, row_sizes, row_width
from holdfast.spark.rows import batch_of, table_of
from holdfast.store.api import Store

BLOCKS_CACHED = 8
LARGE_BYTES = 1 << 30
# More pieces of one block than this are picked by their numbers: a slice costs kilobytes.
SLICES_MAX = 64

META = pa.schema(
    [
        pa.field("_seq", pa.int64()),
        pa.field("_state", pa.string()),
        pa.field("_attempts", pa.int32()),
        pa.field("_error_class", pa.string()),
        pa.field("_error", pa.string()),
    ]
)


RAW = pa.field("_raw", pa.large_string())


def schema_of(data: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(data))


def schema_bytes(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize().to_pybytes())


def carried(text: str, names: Sequence[str], key: Sequence[str]) -> list[str]:
    """The input columns that the option `carry`, as a run keeps it, adds to the output."""
    if not text:
        return []
    wanted = list(names) if text == "*" else json.loads(text)
    return [name for name in wanted if name not in key]


class Input:
    """Rows of the input by seq. Not for more than one thread at a time."""

    def __init__(self, store: Store, record: runs.RunRecord) -> None:
        self.store = store
        self.run_id = record.blocks_run
        self.size = record.size
        self.schema = schema_of(record.input_schema)
        self._blocks = [n for n, _ in record.blocks]
        self._ends = list(accumulate(rows for _, rows in record.blocks))
        self._keys = {*record.key, *HASHES}
        self._spool = _blocks_spool(store, record)
        self._cache = spools.BlockCache(BLOCKS_CACHED)
        self._row_bytes: dict[int, int] = {}

    def rows(self, ranges: Iterable[Range], columns: list[str] | None = None) -> pa.Table:
        """Rows of the input; its columns alone, unless others of its blocks are named."""
        names = self.schema.names if columns is None else columns
        found: list[pa.Table] = []
        for at, pieces in self.by_block(ranges):
            block = self._block(self._blocks[at], names).select(names)
            if len(pieces) > SLICES_MAX:
                wanted = np.concatenate([np.arange(lo, hi) for lo, hi in pieces])
                found.append(block.take(pa.array(wanted)))
            else:
                found += [block.slice(lo, hi - lo) for lo, hi in pieces]
        if not found:
            return self.schema.empty_table().select(names)
        return pa.concat_tables(found) if len(found) > 1 else found[0]

    def by_block(self, ranges: Iterable[Range]) -> Iterator[tuple[int, list[Range]]]:
        """Consecutive ranges that lie in one block, by its place in the input, as places in it."""
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
        """(first seq, number, rows) of each block with rows, in the order of seqs; at least these columns."""
        for at, n in enumerate(self._blocks):
            first = self._ends[at - 1] if at else 0
            if self._ends[at] > first:
                yield first, n, self._block(n, columns)

    def row_bytes(self, seq: int) -> int:
        """About how large a row is, by the block that holds the seq."""
        if not self.size:
            return 1
        n = self._blocks[bisect_right(self._ends, min(seq, self.size - 1))]
        if n not in self._row_bytes:
            if self._spool is not None:
                block = self._stored(n)
                size, rows = block.at.size, block.rows
            else:
                table = self._block(n)
                size, rows = table.nbytes, table.num_rows
            self._row_bytes[n] = max(size // max(rows, 1), 1)
        return self._row_bytes[n]

    def keys_of_block(self, n: int) -> pa.Table:
        """A block by its number, with the key columns at least."""
        return self._block(n, sorted(self._keys))

    @property
    def is_spooled(self) -> bool:
        return self._spool is not None

    def places(self, ranges: Iterable[Range]) -> list[tuple[int, runs.StoredBlock]]:
        """(first seq, place) of the blocks of the spool that hold these rows, each once, in order."""
        found = sorted({at for at, _ in self.by_block(ranges)})
        return [(self._ends[at - 1] if at else 0, self._stored(self._blocks[at])) for at in found]

    def _block(self, n: int, columns: list[str] | None = None) -> pa.Table:
        """A block; of the spool no more than is needed for these columns."""
        keys_only = (
            self._spool is not None and columns is not None and self._keys.issuperset(columns)
        )
        return self._cache.get(n, keys_only, lambda: self._read(n, keys_only))

    def _read(self, n: int, keys_only: bool) -> pa.Table:
        if self._spool is not None:
            block = self._stored(n)
            try:
                return spools.read_block(self._spool, block, keys_only=keys_only)
            except spools.ObjectLost as why:
                at = self._blocks.index(n)
                rows = (self._ends[at - 1] if at else 0, self._ends[at])
                raise spools.lost(self._spool, "input", [rows], block.at.name, str(why)) from None
        data = self.store.read(runs.block, self.run_id, n)
        if data is None:
            raise StoreCorrupt(what="input block", run_id=self.run_id, block=n)
        return table_of(data)

    def _stored(self, n: int) -> runs.StoredBlock:
        found = self.store.read(runs.stored_block, self.run_id, n)
        if found is None:
            raise StoreCorrupt(what="input block", run_id=self.run_id, block=n)
        return found


def _blocks_spool(store: Store, record: runs.RunRecord) -> spools.Spool | None:
    """The spool that holds the blocks of a run, which may be those of an older one."""
    if record.blocks_run == record.run_id:
        return spools.spool_of(record)
    older = store.read(runs.get, record.blocks_run)
    if older is None:
        raise StoreCorrupt(what="run", run_id=record.blocks_run, why="its input is gone")
    return spools.spool_of(older)


class Outcomes:
    """What became of rows, in seq order. The interval must be final, and its chunks durable."""

    def __init__(self, store: Store, record: runs.RunRecord, source: Input) -> None:
        self.store = store
        self.record = record
        self.input = source
        self.result_schema = schema_of(record.result_schema)
        # Carried columns go the way of the key: both are of the input.
        names = self.input.schema.names
        self._carried = carried(record.config.get("carry", ""), names, record.key)
        self._columns = [*record.key, *self._carried]
        fields = [self.input.schema.field(name) for name in self._columns]
        self.schema = pa.schema([*fields, *self.result_schema])
        self._page_rows = record.policy.page_rows
        self._stored = Chunks(store, record, self.result_schema)
        self._ancestry = Ancestry(store, record)
        self._donors: dict[str, Outcomes] = {}

    def successes(self, lo: int, hi: int) -> pa.Table:
        """Key, carried and result columns of the rows that succeeded. Page by page: no more is
        sorted."""
        tables = []
        while lo < hi:
            upto = min(lo - lo % self._page_rows + self._page_rows, hi)
            seqs, results = self._results(lo, upto)
            keys = self._keys(lo, upto, seqs)
            columns = [*keys.columns, *results.columns]
            tables.append(pa.Table.from_arrays(columns, schema=self.schema))
            lo = upto
        return pa.concat_tables(tables) if tables else self.schema.empty_table()

    def all(self, lo: int, hi: int) -> pa.Table:
        """Key, carried and result columns of every row, with how it ended (`META`)."""
        seqs, results = self._results(lo, hi)
        ended = [self._described(others, self._columns) for others in self._others(lo, hi, ())]
        others = pa.concat_tables(ended) if ended else self._described([], self._columns)
        good = pa.Table.from_arrays(
            [*self._keys(lo, hi, seqs).columns, *results.columns], schema=self.schema
        )
        count = good.num_rows
        state = pa.repeat(pa.scalar(State.TERMINAL_SUCCESS.name), count)
        nothing = pa.nulls(count, pa.string())
        meta = [pc.add(seqs, lo), state, self._tries(lo, hi, seqs), nothing, nothing]
        for field, column in zip(META, meta, strict=True):
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

    def _tries(self, lo: int, hi: int, seqs: pa.Array) -> pa.Array:
        more = self._retried(lo, hi)
        for donor, pointers in self._adopted(lo, hi):
            last = pointers[-1]
            there = donor._retried(pointers[0].from_lo, last.from_lo + last.hi - last.lo)
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

    def _retried(self, lo: int, hi: int) -> dict[int, int]:
        """How often successes of this run were tried, if more than once."""
        return {
            seq: part.attempt
            for chunk in self._stored.records(lo, hi)
            for part in chunk.attempts
            for seq in range(part.lo, part.hi)
        }

    def records(self, lo: int, hi: int, *states: State) -> pa.Table:
        """Rows that ended without a result, in these states or in any: key columns and how it ended
        (`META`)."""
        pages = [self._described(others) for others in self._others(lo, hi, states)]
        return pa.concat_tables(pages) if pages else self._described([])

    def failed(self, lo: int, hi: int) -> pa.Table:
        """The rows that failed, with `_raw`: a result that did not fit, as JSON text, or null."""
        states = (State.TERMINAL_FAIL,)
        pages = [self._failed(others) for others in self._others(lo, hi, states, raws=True)]
        return pa.concat_tables(pages) if pages else self._failed([])

    def _failed(self, others: Sequence[runs.Other]) -> pa.Table:
        raws = pa.array([one.raw or None for one in others], pa.large_string())
        return self._described(others).append_column(RAW, raws)

    def _others(
        self, lo: int, hi: int, states: Sequence[State], *, raws: bool = False
    ) -> Iterator[list[runs.Other]]:
        """In order, page by page: a million failures are never a million objects at once."""
        while lo < hi:
            upto = min(lo - lo % self._page_rows + self._page_rows, hi)
            found = {
                other.seq: other
                for chunk in self._stored.records(lo, upto, raws=raws)
                for other in chunk.others
                if lo <= other.seq < upto and (not states or other.state in states)
            }
            if found:
                yield [found[seq] for seq in sorted(found)]
            lo = upto

    def success_count(self, lo: int, hi: int) -> int:
        """How many rows of [lo, hi) succeeded. Reads no result."""
        ended = {one.seq for others in self._others(lo, hi, ()) for one in others}
        for pointer in self._ancestry.adopted(lo, hi):
            if pointer.code != State.TERMINAL_SUCCESS:
                ended.update(range(max(pointer.lo, lo), min(pointer.hi, hi)))
        return hi - lo - len(ended)

    def pages_with(self, state: State) -> Iterator[Range]:
        """The seq ranges of the pages that have a row in this state, which is not success."""
        for others in self._others(0, self.record.size, (state,)):
            lo = others[0].seq - others[0].seq % self._page_rows
            yield lo, min(lo + self._page_rows, self.record.size)

    def skipped(self, lo: int, hi: int) -> pa.Table:
        return self.records(lo, hi, State.TERMINAL_SKIP)

    def _described(
        self, others: Sequence[runs.Other], columns: Sequence[str] | None = None
    ) -> pa.Table:
        names = list(self.record.key if columns is None else columns)
        keys = self.input.rows([(other.seq, other.seq + 1) for other in others], names)
        meta = [
            pa.array([other.seq for other in others], pa.int64()),
            pa.array([State(other.state).name for other in others], pa.string()),
            pa.array([other.attempts for other in others], pa.int32()),
            pa.array([ErrorClass(other.error_class).name.lower() for other in others], pa.string()),
            pa.array([other.error for other in others], pa.string()),
        ]
        schema = pa.schema([*keys.schema, *META])
        return pa.Table.from_arrays([*keys.columns, *meta], schema=schema)

    def _results(self, lo: int, hi: int) -> tuple[pa.Array, pa.Table]:
        """Seqs, as distances from lo, and results of the successes in [lo, hi), in order."""
        places, tables = self._own(lo, hi)
        for donor, pointers in self._adopted(lo, hi):
            donor._lend(pointers, lo, places, tables)
        return self._ordered(places, tables)

    def _own(self, lo: int, hi: int) -> tuple[list[pa.Array], list[pa.Table]]:
        """The same of the results that this run has itself, piece by piece."""
        places: list[pa.Array] = []
        tables: list[pa.Table] = []
        for chunk in self._chunks(lo, hi):
            if not chunk.batch:
                continue
            table = pa.Table.from_batches([batch_of(chunk.batch, self.result_schema)])
            if chunk.seqs:
                offsets = pa.Array.from_buffers(
                    pa.uint32(), table.num_rows, [None, pa.py_buffer(chunk.seqs)]
                ).cast(pa.int64())
                at = pc.add(offsets, chunk.lo - lo)
            else:
                at = _count_up(chunk.lo - lo, table.num_rows)
            first, last = at[0].as_py(), at[-1].as_py()
            if first < 0 or last >= hi - lo:
                mask = pc.and_(pc.greater_equal(at, 0), pc.less(at, hi - lo))
                at, table = at.filter(mask), table.filter(mask)
            if len(at):
                places.append(at)
                tables.append(table)
        return places, tables

    def _adopted(self, lo: int, hi: int) -> list[tuple[Outcomes, list[Pointer]]]:
        """The results of [lo, hi) that lie in other runs, by run, ascending there as here."""
        found: dict[str, list[Pointer]] = {}
        for one in self._ancestry.adopted(lo, hi):
            if one.code == State.TERMINAL_SUCCESS:
                found.setdefault(one.run, []).append(one)
        return [(self._donor(run), pointers) for run, pointers in found.items()]

    def _donor(self, run_id: str) -> Outcomes:
        donor = self._donors.get(run_id)
        if donor is None:
            record = self.store.read(runs.get, run_id)
            if record is None:
                raise StoreCorrupt(what="run", run_id=run_id, why="outcomes of it are gone")
            donor = Outcomes(self.store, record, Input(self.store, record))
            self._donors[run_id] = donor
        return donor

    def _lend(
        self, pointers: list[Pointer], base: int, places: list[pa.Array], tables: list[pa.Table]
    ) -> None:
        """Add the results that pointers lead to; places are distances from `base`."""
        wanted = found = 0
        for lo, upto, group in self._groups(pointers):
            target = np.full(upto - lo, -1, dtype=np.int64)
            for one in group:
                first = one.from_lo - lo
                target[first : first + _rows(one)] = np.arange(one.lo - base, one.hi - base)
                wanted += _rows(one)
            for place, table in zip(*self._own(lo, upto), strict=True):
                there = target[place.to_numpy(zero_copy_only=False)]
                mask = there >= 0
                if mask.any():
                    places.append(pa.array(there[mask]))
                    tables.append(table if mask.all() else table.filter(pa.array(mask)))
                    found += int(mask.sum())
        if found != wanted:
            raise StoreCorrupt(
                what="outcomes", run_id=self.record.run_id, expected=wanted, found=found
            )

    def _groups(self, pointers: list[Pointer]) -> Iterator[tuple[int, int, list[Pointer]]]:
        """Pointers into about a page of this run at a time, and the rows from the first to the last."""
        at = 0
        while at < len(pointers):
            lo = pointers[at].from_lo
            # A pointer never leads beyond a page of the adopter, but may cross one here.
            hi = lo - lo % self._page_rows + 2 * self._page_rows
            group = [pointers[at]]
            at += 1
            while at < len(pointers) and pointers[at].from_lo + _rows(pointers[at]) <= hi:
                group.append(pointers[at])
                at += 1
            yield lo, group[-1].from_lo + _rows(group[-1]), group

    def _ordered(self, places: list[pa.Array], tables: list[pa.Table]) -> tuple[pa.Array, pa.Table]:
        if not tables:
            return pa.array([], pa.int64()), self.result_schema.empty_table()
        order = sorted(range(len(tables)), key=lambda i: places[i][0].as_py())
        places = [places[i] for i in order]
        table = pa.concat_tables([tables[i] for i in order])
        disjoint = all(one[-1].as_py() < two[0].as_py() for one, two in pairwise(places))
        at = pa.concat_arrays(places)
        if not disjoint:
            indices = pc.sort_indices(at)
            at, table = at.take(indices), _taken(table, indices)
        return at, table

    def _keys(self, lo: int, hi: int, seqs: pa.Array) -> pa.Table:
        keys = self.input.rows([(lo, hi)], self._columns)
        return keys if len(seqs) == hi - lo else keys.take(seqs)

    def row_width(self) -> int | None:
        """Bytes of every output row beside its key, if all columns have a fixed width."""
        fields = [self.input.schema.field(name) for name in self._carried]
        return row_width(pa.schema([*fields, *self.result_schema]))

    def row_bytes(self, lo: int, hi: int) -> Sizes:
        """Bytes of the output row of each seq in [lo, hi), 0 for a row that has none. The key does
        not count."""
        sizes = self._result_bytes(lo, hi)
        if self._carried and hi > lo:
            more = row_sizes(self.input.rows([(lo, hi)], self._carried))
            sizes += np.where(sizes > 0, more, 0)
        return sizes

    def _result_bytes(self, lo: int, hi: int) -> Sizes:
        sizes = np.zeros(hi - lo, np.int64)
        for chunk in self._chunks(lo, hi):
            if chunk.batch:
                batch = batch_of(chunk.batch, self.result_schema)
                at = places_of(chunk, batch.num_rows) - lo
                found = row_sizes(batch) + 1
                inside = (at >= 0) & (at < hi - lo)
                sizes[at[inside]] = found[inside]
        for donor, pointers in self._adopted(lo, hi):
            for first, upto, group in donor._groups(pointers):
                there = donor._result_bytes(first, upto)
                for one in group:
                    at_row = one.from_lo - first
                    sizes[one.lo - lo : one.hi - lo] = there[at_row : at_row + _rows(one)]
        return sizes

    def _chunks(self, lo: int, hi: int) -> Iterable[runs.Chunk]:
        return self._stored.overlapping(lo, hi)


def _rows(pointer: Pointer) -> int:
    return pointer.hi - pointer.lo


def _taken(table: pa.Table, indices: pa.Array) -> pa.Table:
    """Rows in another order. Arrow joins a column before it picks, and text has 31-bit offsets."""
    if table.nbytes < LARGE_BYTES:
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
    step = max(len(indices) * (LARGE_BYTES // 4) // table.nbytes, 1)
    return pa.concat_tables(
        wider.take(indices.slice(at, step)).cast(table.schema)
        for at in range(0, len(indices), step)
    )


def limber_up() -> None:
    """Arrow loads pandas, if it is there, at its first sum: let that be before the first commit."""
    _count_up(0, 1)


def _count_up(first: int, count: int) -> pa.Array:
    ones = pa.repeat(pa.scalar(1, pa.int64()), count)
    return pc.add(pc.cumulative_sum(ones), first - 1)


def places_of(chunk: runs.Chunk, rows: int) -> NDArray[np.int64]:
    """The seqs of the results of a chunk."""
    if not chunk.seqs:
        return np.arange(chunk.lo, chunk.lo + rows, dtype=np.int64)
    return np.frombuffer(chunk.seqs, np.uint32).astype(np.int64) + chunk.lo
