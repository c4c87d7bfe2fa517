"""Result chunks: stored outcomes of a run, located by seq without reading whole pages.

A page holds its chunks in report order. The index of a page knows the seq range of each chunk, and later
lookups read only the chunks added since. A cache with a byte limit holds recent chunks: small results are
read once, and large results are never in memory all at once. Results of a run with a spool are read from
the spool on demand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pyarrow as pa

from holdfast.errors import StoreCorrupt
from holdfast.ledger import runs
from holdfast.spark import spool as spools
from holdfast.spark.arrow_rows import decode_batch
from holdfast.store.api import Store

PAGES_INDEXED = 8
CHUNKS_PER_READ = 8  # per read
# Per read of a run with a spool: the entries are small, and the index covers all chunks of a page.
SPOOL_CHUNKS_PER_READ = 256
CACHE_BYTES = 32 * 1024 * 1024
# A whole batch of large results is one object.
SPOOL_CACHE_BYTES = 128 * 1024 * 1024


class ChunkIndex:
    """The chunk index of a run. Not thread-safe."""

    def __init__(self, store: Store, record: runs.RunRecord, schema: pa.Schema) -> None:
        self._store = store
        self._run_id = record.run_id
        self._schema = schema
        self._page_rows = record.policy.page_rows
        self._spool = spools.open_spool(record)
        self._cache_bytes_max = CACHE_BYTES if self._spool is None else SPOOL_CACHE_BYTES
        self._read_at_once = CHUNKS_PER_READ if self._spool is None else SPOOL_CHUNKS_PER_READ
        # By page: (height, first seq, last seq) of each chunk.
        self._pages: OrderedDict[int, list[tuple[int, int, int]]] = OrderedDict()
        self._cache: OrderedDict[tuple[int, int], runs.OutcomeChunk] = OrderedDict()
        self._cached_bytes = 0

    def overlapping(self, lo: int, hi: int) -> Iterator[runs.OutcomeChunk]:
        """Yield the chunks with an outcome in [lo, hi), by page and in report order."""
        for page, height in self._locations(lo, hi):
            yield self._chunk(page, height)

    def without_results(
        self, lo: int, hi: int, *, raws: bool = False
    ) -> Iterator[runs.OutcomeChunk]:
        """Yield the chunks with an outcome in [lo, hi) without reading results from the spool. With `raws`, read
        the raw texts of schema failures.
        """
        if self._spool is None:
            yield from self.overlapping(lo, hi)
            return
        for page, height in self._locations(lo, hi):
            chunk = self._cache.get((page, height)) or self._read_chunk(page, height)
            needs = raws and chunk.at is not None and chunk.at.raws
            yield self._chunk(page, height) if needs else chunk

    def _locations(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
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
            found = self._store.read(runs.list_chunks, self._run_id, page, after, count)
            for height, chunk in found:
                index.append((height, *self._seq_range(chunk)))
                if chunk.at is None:
                    self._add_to_cache((page, height), chunk)
            if len(found) < count:
                return list(index)

    def _chunk(self, page: int, height: int) -> runs.OutcomeChunk:
        cached = self._cache.get((page, height))
        if cached is not None:
            self._cache.move_to_end((page, height))
            return cached
        chunk = self._read_chunk(page, height)
        if self._spool is not None:
            chunk = spools.read_chunk(self._spool, chunk)
        self._add_to_cache((page, height), chunk)
        return chunk

    def _read_chunk(self, page: int, height: int) -> runs.OutcomeChunk:
        chunk = self._store.read(runs.get_chunk, self._run_id, page, height)
        if chunk is None:
            raise StoreCorrupt(what="outcome chunk", run_id=self._run_id, page=page, height=height)
        return chunk

    def _seq_range(self, chunk: runs.OutcomeChunk) -> tuple[int, int]:
        """Return the first and the last seq of a chunk."""
        if chunk.at is not None:
            lo, hi = spools.chunk_range(chunk)
            return lo, hi - 1
        seqs = [other.seq for other in chunk.resultless]
        if chunk.seqs:
            ends = (chunk.seqs[:4], chunk.seqs[-4:])
            seqs += [chunk.lo + int.from_bytes(at, "little") for at in ends]
        elif chunk.batch:
            seqs += [chunk.lo, chunk.lo + decode_batch(chunk.batch, self._schema).num_rows - 1]
        return (min(seqs), max(seqs)) if seqs else (0, -1)

    def _add_to_cache(self, location: tuple[int, int], chunk: runs.OutcomeChunk) -> None:
        self._cache[location] = chunk
        self._cached_bytes += len(chunk.batch)
        while self._cached_bytes > self._cache_bytes_max and self._cache:
            _, evicted = self._cache.popitem(last=False)
            self._cached_bytes -= len(evicted.batch)
