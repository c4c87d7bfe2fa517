"""Consistency check of the dispatch log: derived rows, recomputed from the records and compared.

It reads all records. Only `holdfast verify` and tests use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.dispatch import log, notifications
from holdfast.dispatch.log import index_key, keys_of
from holdfast.dispatch.request import DispatchBacklog, DispatchRecord, log_subject, mark_of
from holdfast.durable import journal
from holdfast.store import tuples
from holdfast.store.api import Row, Txn


class DispatchDifference(NamedTuple):
    """A derived value that differs from its recomputation."""

    what: str
    found: object
    expected: object


def differences(txn: Txn, universe: str) -> Iterator[DispatchDifference]:
    """Yield the differences between derived rows and records."""
    keys = keys_of(universe)
    records = [codec.unpack_as(DispatchRecord, row) for _, row in _rows(txn, keys.records)]
    counted = Counter(one.status.value for one in records)
    expected = DispatchBacklog(**counted, deferred=sum(one.deferred for one in records))
    found = log.backlog(txn, universe)
    if found != expected:
        yield DispatchDifference("counters", found, expected)
    places = {key for prefix in keys.states.values() for key, _ in _rows(txn, prefix)}
    if places != {index_key(universe, one.status, one) for one in records}:
        yield DispatchDifference("requests by state", len(places), len(records))
    marks = {row.decode() for _, row in _rows(txn, keys.marks)}
    if marks != {one.request_id for one in records}:
        yield DispatchDifference("marks", len(marks), len(records))
    wrong = [one.request_id for one in records if not _is_found_by_mark(txn, universe, one)]
    if wrong:
        yield DispatchDifference("a request by its mark", "another", wrong[0])
    state = notifications.read(txn, universe)
    height = journal.head(txn, log_subject(universe)).height
    if state is not None and not state.cursor <= state.top <= height:
        yield DispatchDifference("cursor of the leader", state.cursor, f"{height} at most")


def _is_found_by_mark(txn: Txn, universe: str, record: DispatchRecord) -> bool:
    return log.find_by_mark(txn, universe, mark_of(record.request_id)) == record


def _rows(txn: Txn, prefix: bytes) -> Iterator[Row]:
    at, end = prefix, tuples.prefix_end(prefix)
    while page := txn.scan(at, end, SCAN_PAGE):
        yield from page
        at = page[-1][0] + b"\x00"
