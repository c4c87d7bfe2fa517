"""Rows that failed for their form, mapped from the values that were kept of them: no call is made.

A remap is a run over the same input that takes over what ended well or, for a sink that cannot follow
another run, a retry run (`again`), whose input are the rows that failed. It moves its rows by the same
reports. Where a retry calls the stage's function in Spark's tasks, a remap gives the
decoded `_raw` of each row to the user's mapping, in the driver. A row whose value the mapping makes
fit succeeds. Any other row fails as it did: without a kept value with its class and its text, with one
as `schema`, and the original value stays with it for another mapping.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from holdfast.ledger import runs
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.states import State
from holdfast.spark import raw_values
from holdfast.spark.call_slots import Watch
from holdfast.spark.caller import Caller, Ended, Origin
from holdfast.spark.client import Client
from holdfast.spark.engine import Duty, Engine
from holdfast.spark.rows import Encoder
from holdfast.spark.spool import spool_of, with_raws
from holdfast.store.api import Store


class FailedRows:
    """The rows that failed in a run, by their rank among them (`ranked`) or by their seq. Reads a page
    at a time."""

    def __init__(self, store: Store, record: runs.RunRecord, *, ranked: bool = True) -> None:
        self._store = store
        self._record = record
        self._ranked = ranked
        self._spool = spool_of(record)
        # The rank of the first failed row of each page that has one.
        self._pages: list[int] = []
        self._firsts: list[int] = []
        self.count = self.kept = 0
        self._at = -1
        self._rows: list[runs.Other] = []
        for page in range(-(-record.size // record.policy.page_rows)):
            rows = self._read(page)
            if rows:
                self._pages.append(page)
                self._firsts.append(self.count)
            self.count += len(rows)
            self.kept += sum(1 for row in rows if row.raw)

    def row(self, number: int) -> runs.Other:
        if self._ranked:
            return self._by_rank(number)
        at = bisect_right(self._pages, number // self._record.policy.page_rows) - 1
        rows = self._held(at)
        return rows[bisect_left(rows, number, key=lambda row: row.seq)]

    def _by_rank(self, rank: int) -> runs.Other:
        at = bisect_right(self._firsts, rank) - 1
        return self._held(at)[rank - self._firsts[at]]

    def _held(self, at: int) -> list[runs.Other]:
        if at != self._at:
            self._at, self._rows = at, self._read(self._pages[at])
        return self._rows

    def _read(self, page: int) -> list[runs.Other]:
        found = {
            other.seq: other
            for _, chunk in self._store.read(runs.chunks, self._record.run_id, page)
            for other in with_raws(self._spool, chunk)
            if other.state == State.TERMINAL_FAIL
        }
        return [found[seq] for seq in sorted(found)]


class Mapper(Caller):
    """Ends each row by the mapping of its kept value."""

    calls_each = 0

    def __init__(
        self, mapping: Callable[[Any], Any], failed: FailedRows, encoder: Encoder, duty: Duty
    ) -> None:
        super().__init__(lambda row: None, (), encoder, duty.run_id, duty.timeout_s)
        self._mapping = mapping
        self._failed = failed

    def one(
        self,
        seq: int,
        row: Any,
        attempt: int,
        origin: Origin | None = None,
        watch: Watch | None = None,
    ) -> Ended:
        was = self._failed.row(seq)
        if not was.raw:
            return Ended(seq, was.state, None, was.error_class, was.error, 0, 0.0, 0)
        self.fn = lambda row: self._mapping(raw_values.decode(was.raw))
        ended = super().one(seq, row, attempt, origin, watch)
        if ended.state != State.TERMINAL_FAIL:
            return ended
        return ended._replace(error_class=ErrorClass.SCHEMA, raw=was.raw, delay_ns=0)

    def wrong_schema(self, ended: Ended, why: str) -> Ended:
        failed = super().wrong_schema(ended, why)
        return failed._replace(raw=self._failed.row(ended.seq).raw)


def remap(
    duty: Duty, mapping: Callable[[Any], Any], failed: FailedRows, encoder: Encoder
) -> Callable[[], str]:
    """The work of a remap run, for a thread of the driver."""

    def work() -> str:
        with Client(duty.address, "child") as client:
            return Engine(duty, Mapper(mapping, failed, encoder, duty), client).run()

    return work
