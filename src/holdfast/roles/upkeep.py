"""What whoever leads a universe does about histories: cut those with a bound, erase deleted worlds.

One turn does a bounded amount: a commit that cuts, and a step of an erasure. After taking the lead it
looks once at every world, a page a turn: a bound that the application has declared, changed or taken back
since the last snapshot of a world, and a world that was deleted by an older release, are noted then. Nothing
is cut before that is over: what was noted by older code may be a bound that holds no longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.clock import S
from holdfast.config import ERASED_PER_COMMIT, SCAN_PAGE
from holdfast.durable.lease import Lease
from holdfast.errors import Conflict
from holdfast.store.api import Pending, Store, Txn, glance
from holdfast.world import catalog, history, purge
from holdfast.world.catalog import Status, WorldRecord
from holdfast.world.history import Bound

# Deleted worlds that are erased together: what they share is looked through once.
ERASED_TOGETHER = 100
# How often it is looked whether there is anything.
LOOK_NS = S


class Upkeep:
    def __init__(
        self,
        store: Store,
        universe: str,
        histories: Mapping[str, Bound | None],
        deleted_kept_ns: int,
    ) -> None:
        self._store = store
        self._universe = universe
        self._histories = dict(histories)
        self._deleted_kept_ns = deleted_kept_ns
        # Where the look at every world goes on; None: it is over.
        self._at: str | None = None
        self._erasing: Iterator[int] | None = None
        self._look_at_ns = 0

    def begin(self) -> None:
        """We lead, from now on: what another did is looked at anew."""
        self._at = ""
        self._erasing = None
        self._look_at_ns = 0

    def turn(self, lease: Lease) -> bool:
        """A bounded amount of it, under the lease; whether there is more."""
        surveying = self._survey(lease)
        now_ns = self._store.now_ns()
        if now_ns < self._look_at_ns:
            return surveying
        more = not surveying and self._trim(lease)
        more = self._erase(lease, now_ns) or more
        if not (more or surveying):
            self._look_at_ns = now_ns + LOOK_NS
        return more or surveying

    # -- inside --------------------------------------------------------------------------------

    def _survey(self, lease: Lease) -> bool:
        """Note what is not noted yet of a page of worlds; whether there are more pages."""
        if self._at is None:
            return False
        page: list[tuple[WorldRecord, bool]] = self._store.read(self._page, self._at)
        self._at = page[-1][0].world_id if page else None
        changed = [record for record, is_new in page if is_new]
        if changed:
            self._store.transact(self._note, lease, [record.world_id for record in changed])
        return self._at is not None

    def _page(self, txn: Txn, after: str) -> list[tuple[WorldRecord, bool]]:
        page = catalog.worlds(txn, self._universe, after, SCAN_PAGE)
        return [(record, self._is_new(txn, record)) for record in page]

    def _is_new(self, txn: Txn, record: WorldRecord) -> bool:
        if record.status is Status.DELETED:
            return not record.deleted_ns and not record.purged
        if record.type not in self._histories:
            return False  # code that is not ours bounds it, or does not
        planned = history.planned(txn, self._universe, record.world_id)
        noted = None if planned is None else planned.bound
        return noted != self._histories[record.type]

    def _note(self, txn: Txn, lease: Lease, world_ids: list[str]) -> None:
        txn.require_live(lease)
        for world_id in world_ids:
            if catalog.gone(txn, self._universe, world_id):
                purge.note_deleted(txn, self._universe, world_id)
            else:
                record = catalog.record(txn, self._universe, world_id)
                history.plan(txn, self._universe, world_id, self._histories[record.type])

    def _trim(self, lease: Lease) -> bool:
        if not glance(self._store, history.due, self._universe):
            return False
        try:
            return bool(self._store.transact(self._cut, lease))
        except Conflict:
            return True

    def _cut(self, txn: Txn, lease: Lease) -> Pending[bool]:
        txn.require_live(lease)
        return history.trim(txn, self._universe, ERASED_PER_COMMIT)

    def _erase(self, lease: Lease, now_ns: int) -> bool:
        if self._erasing is None:
            until_ns = max(now_ns - self._deleted_kept_ns, 0)
            found: list[str] = glance(
                self._store, catalog.deleted, self._universe, until_ns, ERASED_TOGETHER
            )
            if not found:
                return False
            self._erasing = purge.steps(self._store, self._universe, found, lease)
        if next(self._erasing, None) is None:
            self._erasing = None
        return True
