"""Stored outcomes of a run, found by seq without reading a page of them whole.

A page holds its chunks in the order of their reports. The index of a page knows the seqs that each
chunk spans; a later look reads only what was added since. Recent chunks are kept up to a number of
bytes, so that small results are read once and large ones never all at once. The results of a run with a
spool are read from there, when they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pyarrow as pa

from holdfast.errors import StoreCorrupt
from holdfast.ledger import runs
from holdfast.spark import spool as spools
from holdfast.spark.rows import batch_of
from holdfast.store.api import Store

PAGES_INDEXED = 8
CHUNKS_READ = 8  # at once
# ... of a run with a spool: they are small, and an index is of all chunks of a page.
POINTERS_READ = 256
CACHE_BYTES = 32 * 1024 * 1024
# A whole batch of large results is one object.
SPOOL_CACHE_BYTES = 128 * 1024 * 1024


class Chunks:
    """The chunks of a run. Not for more than one thread at a time."""

    def __init__(self, store: Store, record: runs.RunRecord, schema: pa.Schema) -> None:
        self._store = store
        self._run_id = record.run_id
        self._schema = schema
        self._page_rows = record.policy.page_rows
        self._spool = spools.spool_of(record)
        self._cache_bytes = CACHE_BYTES if self._spool is None else SPOOL_CACHE_BYTES
        self._read_at_once = CHUNKS_READ if self._spool is None else POINTERS_READ
        # By page: (height, first seq, last seq) of each chunk.
        self._pages: OrderedDict[int, list[tuple[int, int, int]]] = OrderedDict()
        self._held: OrderedDict[tuple[int, int], runs.Chunk] = OrderedDict()
        self._held_bytes = 0

    def overlapping(self, lo: int, hi: int) -> Iterator[runs.Chunk]:
        """The chunks with an outcome in [lo, hi), by page and in the order of their reports."""
        for page, height in self._places(lo, hi):
            yield self._chunk(page, height)

    def records(self, lo: int, hi: int, *, raws: bool = False) -> Iterator[runs.Chunk]:
        """The same without results where these are in the spool; `raws`: with the texts of rows that failed
        for their form."""
        if self._spool is None:
            yield from self.overlapping(lo, hi)
            return
        for page, height in self._places(lo, hi):
            chunk = self._held.get((page, height)) or self._stored(page, height)
            needs = raws and chunk.at is not None and chunk.at.raws
            yield self._chunk(page, height) if needs else chunk

    def _places(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        if lo >= hi:
            return
        for page in range(lo // self._page_rows, (hi - 1) // self._page_rows + 1):
            for height, first, last in self._index(page):
                if first < hi and last >= lo:
                    yield page, height

    def _index(self, page: int) -> list[tuple[int, int, int]]:
        index = self._pages.setdefault(page, [])
        self._pages.move_to_end(page)
        if len(self._pages) > PAGES_INDEXED:
            self._pages.popitem(last=False)
        count = self._read_at_once
        while True:
            after = index[-1][0] if index else -1
            found = self._store.read(runs.chunks, self._run_id, page, after, count)
            for height, chunk in found:
                index.append((height, *self._extent(chunk)))
                if chunk.at is None:
                    self._keep((page, height), chunk)
            if len(found) < count:
                return list(index)

    def _chunk(self, page: int, height: int) -> runs.Chunk:
        held = self._held.get((page, height))
        if held is not None:
            self._held.move_to_end((page, height))
            return held
        chunk = self._stored(page, height)
        if self._spool is not None:
            chunk = spools.whole_chunk(self._spool, chunk)
        self._keep((page, height), chunk)
        return chunk

    def _stored(self, page: int, height: int) -> runs.Chunk:
        chunk = self._store.read(runs.chunk, self._run_id, page, height)
        if chunk is None:
            raise StoreCorrupt(what="outcome chunk", run_id=self._run_id, page=page, height=height)
        return chunk

    def _extent(self, chunk: runs.Chunk) -> tuple[int, int]:
        """The first and the last seq that a chunk says something of."""
        if chunk.at is not None:
            lo, hi = spools.extent(chunk)
            return lo, hi - 1
        seqs = [other.seq for other in chunk.others]
        if chunk.seqs:
            ends = (chunk.seqs[:4], chunk.seqs[-4:])
            seqs += [chunk.lo + int.from_bytes(at, "little") for at in ends]
        elif chunk.batch:
            seqs += [chunk.lo, chunk.lo + batch_of(chunk.batch, self._schema).num_rows - 1]
        return (min(seqs), max(seqs)) if seqs else (0, -1)

    def _keep(self, place: tuple[int, int], chunk: runs.Chunk) -> None:
        self._held[place] = chunk
        self._held_bytes += len(chunk.batch)
        while self._held_bytes > self._cache_bytes and self._held:
            _, gone = self._held.popitem(last=False)
            self._held_bytes -= len(gone.batch)
