"""History upkeep: the leader trims bounded histories and erases deleted worlds.

One step does a bounded amount of work: one trim commit and one erasure step. A new leader first
surveys all worlds, a page per step. The survey notes changed history bounds and worlds deleted by
older releases. Trimming starts after the survey, because a bound noted by older code may be
obsolete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.clock import S
from holdfast.config import ERASE_ROWS_PER_COMMIT, SCAN_PAGE
from holdfast.durable.lease import Lease
from holdfast.errors import Conflict
from holdfast.store.api import Deferred, Store, Txn, read_stale
from holdfast.world import catalog, history, purge
from holdfast.world.catalog import WorldRecord, WorldStatus
from holdfast.world.history import HistoryBound

# Deleted worlds erased in one pass. A pass scans their shared rows once.
ERASED_PER_PASS = 100
# The interval between checks for work.
CHECK_EVERY_NS = S


class HistoryUpkeep:
    def __init__(
        self,
        store: Store,
        universe: str,
        histories: Mapping[str, HistoryBound | None],
        deleted_kept_ns: int,
    ) -> None:
        self._store = store
        self._universe = universe
        self._histories = dict(histories)
        self._deleted_kept_ns = deleted_kept_ns
        # The cursor of the survey. None when it is complete.
        self._survey_cursor: str | None = None
        self._erasure: Iterator[int] | None = None
        self._check_at_ns = 0

    def start_term(self) -> None:
        """Start the survey of all worlds from the beginning, because this worker has become the leader."""
        self._survey_cursor = ""
        self._erasure = None
        self._check_at_ns = 0

    def run_step(self, lease: Lease) -> bool:
        """Do a bounded amount of work under the leader lease. Returns whether more remains."""
        surveying = self._survey(lease)
        now_ns = self._store.now_ns()
        if now_ns < self._check_at_ns:
            return surveying
        more = not surveying and self._trim(lease)
        more = self._erase(lease, now_ns) or more
        if not (more or surveying):
            self._check_at_ns = now_ns + CHECK_EVERY_NS
        return more or surveying

    # -- inside --------------------------------------------------------------------------------

    def _survey(self, lease: Lease) -> bool:
        """Survey one page of worlds and note the changes. Returns whether more pages remain."""
        if self._survey_cursor is None:
            return False
        page: list[tuple[WorldRecord, bool]] = self._store.read(
            self._read_page, self._survey_cursor
        )
        self._survey_cursor = page[-1][0].world_id if page else None
        changed = [record for record, is_new in page if is_new]
        if changed:
            self._store.transact(self._note, lease, [record.world_id for record in changed])
        return self._survey_cursor is not None

    def _read_page(self, txn: Txn, after: str) -> list[tuple[WorldRecord, bool]]:
        page = catalog.list_worlds(txn, self._universe, after, SCAN_PAGE)
        return [(record, self._needs_note(txn, record)) for record in page]

    def _needs_note(self, txn: Txn, record: WorldRecord) -> bool:
        if record.status is WorldStatus.DELETED:
            return not record.deleted_ns and not record.purged
        if record.type not in self._histories:
            return False  # this code does not define the type
        planned = history.find_plan(txn, self._universe, record.world_id)
        noted = None if planned is None else planned.bound
        return noted != self._histories[record.type]

    def _note(self, txn: Txn, lease: Lease, world_ids: list[str]) -> None:
        txn.require_live(lease)
        for world_id in world_ids:
            if catalog.is_deleted(txn, self._universe, world_id):
                purge.note_deleted(txn, self._universe, world_id)
            else:
                record = catalog.get_record(txn, self._universe, world_id)
                history.schedule_trim(txn, self._universe, world_id, self._histories[record.type])

    def _trim(self, lease: Lease) -> bool:
        if not read_stale(self._store, history.is_trim_due, self._universe):
            return False
        try:
            return bool(self._store.transact(self._cut, lease))
        except Conflict:
            return True

    def _cut(self, txn: Txn, lease: Lease) -> Deferred[bool]:
        txn.require_live(lease)
        return history.trim(txn, self._universe, ERASE_ROWS_PER_COMMIT)

    def _erase(self, lease: Lease, now_ns: int) -> bool:
        if self._erasure is None:
            until_ns = max(now_ns - self._deleted_kept_ns, 0)
            deleted: list[str] = read_stale(
                self._store, catalog.list_deleted, self._universe, until_ns, ERASED_PER_PASS
            )
            if not deleted:
                return False
            self._erasure = purge.erase_steps(self._store, self._universe, deleted, lease)
        if next(self._erasure, None) is None:
            self._erasure = None
        return True
