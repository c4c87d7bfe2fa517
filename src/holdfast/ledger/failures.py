"""Failed rows of a run in seq order, each with its key and last error.

Rows are read page by page and chunk by chunk, so one page bounds the memory. For a finished run the
scan ends when all failed rows are found. The key comes from the input block of the row. Reading it
requires pyarrow; without it the key is empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from holdfast.ledger import runs, summary
from holdfast.ledger.runs import ResultlessRow, RunProgress, RunRecord
from holdfast.store.api import Store

CHUNKS_MAX = 64
KEY_CHARS_MAX = 200

_FAILED = 5

# Returns a table with the key columns of block number n, or None.
ReadBlock = Callable[[int], Any]


class FailedRow(NamedTuple):
    seq: int
    key: str
    attempts: int
    error_class: int
    error: str


def list_failed_rows(
    store: Store,
    record: RunRecord,
    progress: RunProgress,
    *,
    limit: int,
    after: int = -1,
    error_class: int | None = None,
    read_block: ReadBlock | None = None,
) -> list[FailedRow]:
    """Return at most `limit` failed rows with a seq above `after`, optionally of one error class.
    `read_block` reads the key columns of a block outside the store.
    """
    keys = _KeyReader(store, record, read_block)
    failed_rows: list[FailedRow] = []
    # The progress of an unfinished run lags behind its outcomes.
    known = record.status not in runs.UNFINISHED and progress.ended
    for row in _read_failed(store, record, summary.tally_rows(progress).failed if known else None):
        if row.seq <= after or error_class not in (None, row.error_class):
            continue
        if len(failed_rows) == limit:
            break
        key = keys.key_of(row.seq)
        failed_rows.append(FailedRow(row.seq, key, row.attempts, row.error_class, row.error))
    return failed_rows


def _read_failed(store: Store, record: RunRecord, expected: int | None) -> Iterator[ResultlessRow]:
    seen = 0
    for page in range(-(-record.size // record.policy.page_rows)):
        if seen == expected:
            return
        page_failed: list[ResultlessRow] = []
        height = -1
        while chunks := store.read(runs.list_chunks, record.run_id, page, height, CHUNKS_MAX):
            for _, chunk in chunks:
                page_failed += [other for other in chunk.resultless if other.state == _FAILED]
            height = chunks[-1][0]
        page_failed.sort(key=lambda other: other.seq)
        seen += len(page_failed)
        yield from page_failed


class _KeyReader:
    """Reads the key of a seq as text. Caches the last block, because failed rows arrive in order."""

    def __init__(self, store: Store, record: RunRecord, read_block: ReadBlock | None) -> None:
        self._store = store
        self._record = record
        self._read_block = read_block
        self._ends = list(accumulate(rows for _, rows in record.blocks))
        self._block_index = -1
        self._columns: list[Any] = []

    def key_of(self, seq: int) -> str:
        at = bisect_right(self._ends, seq)
        if at >= len(self._ends):
            return ""
        if at != self._block_index:
            self._block_index, self._columns = at, self._read(self._record.blocks[at][0])
        offset = seq - (self._ends[at - 1] if at else 0)
        text = ", ".join(str(column[offset].as_py()) for column in self._columns)
        return text if len(text) <= KEY_CHARS_MAX else text[: KEY_CHARS_MAX - 1] + "…"

    def _read(self, n: int) -> list[Any]:
        if self._read_block is not None:
            table = self._read_block(n)
        else:
            table = None if self._record.spool else self._stored(n)
        if table is None:
            return []
        return [table.column(name) for name in self._record.key if name in table.column_names]

    def _stored(self, n: int) -> Any:
        data = self._store.read(runs.get_block, self._record.blocks_run, n)
        try:
            import pyarrow as pa
        except ImportError:
            return None
        if data is None:
            return None
        with pa.ipc.open_stream(data) as reader:
            return reader.read_all()
