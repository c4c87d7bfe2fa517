"""Consistency check of the dispatch log: derived rows, recomputed from the records and compared.

It reads all records. Only `holdfast verify` and tests use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast import codec
from holdfast.dispatch import log, notifications
from holdfast.dispatch.log import index_key, keys_of
from holdfast.dispatch.request import DispatchBacklog, DispatchRecord, log_subject, mark_of
from holdfast.durable import journal
from holdfast.durable.difference import Difference
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows


def check_dispatches(txn: Txn, universe: str) -> Iterator[Difference]:
    """Yield the differences between derived rows and records."""
    keys = keys_of(universe)
    records = [codec.unpack_as(DispatchRecord, row) for _, row in iter_rows(txn, keys.records)]
    counted = Counter(record.status.value for record in records)
    expected = DispatchBacklog(**counted, deferred=sum(record.deferred for record in records))
    found = log.backlog(txn, universe)
    if found != expected:
        yield Difference("dispatch", universe, "counters", found, expected)
    places = {key for prefix in keys.states.values() for key, _ in iter_rows(txn, prefix)}
    if places != {index_key(universe, record.status, record) for record in records}:
        yield Difference("dispatch", universe, "requests by state", len(places), len(records))
    marks = {row.decode() for _, row in iter_rows(txn, keys.marks)}
    if marks != {record.request_id for record in records}:
        yield Difference("dispatch", universe, "marks", len(marks), len(records))
    wrong = [
        record.request_id for record in records if not _is_found_by_mark(txn, universe, record)
    ]
    if wrong:
        yield Difference("dispatch", universe, "a request by its mark", "another", wrong[0])
    state = notifications.read(txn, universe)
    height = journal.head(txn, log_subject(universe)).height
    if state is not None and not state.cursor <= state.top <= height:
        yield Difference(
            "dispatch", universe, "cursor of the leader", state.cursor, f"{height} at most"
        )


def _is_found_by_mark(txn: Txn, universe: str, record: DispatchRecord) -> bool:
    return log.find_by_mark(txn, universe, mark_of(record.request_id)) == record
