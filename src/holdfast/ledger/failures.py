"""The failed rows of a run, in the order of their seqs, each with its key and its last error.

Rows are read page by page and chunk by chunk, so memory is bounded by one page whatever the size of
the run; and in a run that is over, no further than until as many were found as it has. The key comes
from the input block that holds the row; reading that needs pyarrow, and without it the key is empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from holdfast.ledger import runs, summary
from holdfast.ledger.runs import Other, Progress, RunRecord
from holdfast.store.api import Store

CHUNKS_MAX = 64
KEY_CHARS_MAX = 200

_FAILED = 5

# A table with the key columns of a block, by its number; or None.
ReadBlock = Callable[[int], Any]


class FailedRow(NamedTuple):
    seq: int
    key: str
    attempts: int
    error_class: int
    error: str


def failed(
    store: Store,
    record: RunRecord,
    progress: Progress,
    *,
    limit: int,
    after: int = -1,
    error_class: int | None = None,
    read_block: ReadBlock | None = None,
) -> list[FailedRow]:
    """At most `limit` rows with a seq above `after`, of this class only if one is given. `read_block` gives the
    key columns of a block that is not in the store."""
    keys = _Keys(store, record, read_block)
    found: list[FailedRow] = []
    # While a run goes on its progress lags behind its outcomes.
    known = record.status not in runs.GOING and progress.ended
    for other in _others(store, record, summary.tally(progress).failed if known else None):
        if other.seq <= after or error_class not in (None, other.error_class):
            continue
        if len(found) == limit:
            break
        key = keys.of(other.seq)
        found.append(FailedRow(other.seq, key, other.attempts, other.error_class, other.error))
    return found


def _others(store: Store, record: RunRecord, expected: int | None) -> Iterator[Other]:
    seen = 0
    for page in range(-(-record.size // record.policy.page_rows)):
        if seen == expected:
            return
        found: list[Other] = []
        height = -1
        while chunks := store.read(runs.chunks, record.run_id, page, height, CHUNKS_MAX):
            for _, chunk in chunks:
                found += [other for other in chunk.others if other.state == _FAILED]
            height = chunks[-1][0]
        found.sort(key=lambda other: other.seq)
        seen += len(found)
        yield from found


class _Keys:
    """The key of a seq, as text. The block that was read last is kept: failures come in order."""

    def __init__(self, store: Store, record: RunRecord, read_block: ReadBlock | None) -> None:
        self._store = store
        self._record = record
        self._read_block = read_block
        self._ends = list(accumulate(rows for _, rows in record.blocks))
        self._at = -1
        self._columns: list[Any] = []

    def of(self, seq: int) -> str:
        at = bisect_right(self._ends, seq)
        if at >= len(self._ends):
            return ""
        if at != self._at:
            self._at, self._columns = at, self._read(self._record.blocks[at][0])
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
        data = self._store.read(runs.block, self._record.blocks_run, n)
        try:
            import pyarrow as pa
        except ImportError:
            return None
        if data is None:
            return None
        with pa.ipc.open_stream(data) as reader:
            return reader.read_all()
