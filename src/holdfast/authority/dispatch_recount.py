"""What the dispatch log keeps beside its records, made again from them and compared.

It goes over all records, so it is for `holdfast verify` and for tests, and for no loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.authority import dispatch_log, replay
from holdfast.authority.dispatch import Backlog, DispatchRecord, journal_of, mark_of
from holdfast.authority.dispatch_log import keys_of, place_of
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal
from holdfast.store import tuples
from holdfast.store.api import Row, Txn


class Difference(NamedTuple):
    what: str
    found: object
    expected: object


def differences(txn: Txn, universe: str) -> Iterator[Difference]:
    keys = keys_of(universe)
    records = [codec.unpack_as(DispatchRecord, row) for _, row in _rows(txn, keys.records)]
    counted = Counter(one.status.value for one in records)
    expected = Backlog(**counted, deferred=sum(one.deferred for one in records))
    found = dispatch_log.backlog(txn, universe)
    if found != expected:
        yield Difference("counters", found, expected)
    places = {key for prefix in keys.states.values() for key, _ in _rows(txn, prefix)}
    if places != {place_of(universe, one.status, one) for one in records}:
        yield Difference("requests by state", len(places), len(records))
    marks = {row.decode() for _, row in _rows(txn, keys.marks)}
    if marks != {one.request_id for one in records}:
        yield Difference("marks", len(marks), len(records))
    wrong = [one.request_id for one in records if not _marked(txn, universe, one)]
    if wrong:
        yield Difference("a request by its mark", "another", wrong[0])
    state = replay.read(txn, universe)
    height = journal.head(txn, journal_of(universe)).height
    if state is not None and not state.cursor <= state.top <= height:
        yield Difference("cursor of the leader", state.cursor, f"{height} at most")


def _marked(txn: Txn, universe: str, record: DispatchRecord) -> bool:
    return dispatch_log.by_mark(txn, universe, mark_of(record.request_id)) == record


def _rows(txn: Txn, prefix: bytes) -> Iterator[Row]:
    at, end = prefix, tuples.after(prefix)
    while page := txn.scan(at, end, SCAN_PAGE):
        yield from page
        at = page[-1][0] + b"\x00"
