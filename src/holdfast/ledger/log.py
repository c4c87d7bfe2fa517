"""The log of a run on a store: a write-ahead log of the scheduler's decisions.

- `append` is one transaction. It writes the entries at the known head and their rows (outcome
  chunks, progress) under the run's lease. The data is durable when it returns. `Fenced` means that
  another process holds the run, and the caller must stop.
- A checkpoint is a dump of the scheduler at a height, in parts if it is large. Two checkpoints are
  kept, with the entries after the older one. `verify_run` rebuilds the newer from the older and
  compares them. The log stays short.
- `load_run` reads the last checkpoint and the entries after it.

The scheduler is ahead of the log during an append. After `CommitUnknown`, `HeadMoved` or `Fenced`
the state of the log is in doubt and the log accepts no further entries. Discard both objects and
open the run again. The in-doubt decision is then either in the log, and a repeated request gets its
first reply, or it is not. After any other error nothing was written, and the same entries may be
appended again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast import codec, failpoints
from holdfast.config import BATCH_MAX, SCAN_PAGE
from holdfast.durable import journal, lease, snapshot
from holdfast.durable.lease import Lease
from holdfast.errors import (
    CommitUnknown,
    Fenced,
    HeadMoved,
    IllegalTransition,
    Invalid,
    NotFound,
    StoreCorrupt,
)
from holdfast.ledger import events
from holdfast.ledger.events import LogEntry
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.run_state import RunCheckpoint
from holdfast.ledger.runs import get_latest, get_progress, get_record, lease_resource, subject_of
from holdfast.store.api import Store, Txn

CHECKPOINTS_KEPT = 2
# Maximum entries that one append removes below the checkpoint.
TRUNCATE_MAX = 4000

RowPut = tuple[bytes, bytes]


class RunLog:
    """The log of one run, written under a lease. `next_height` is the height of the next entry."""

    def __init__(self, store: Store, run_id: str, lease: Lease) -> None:
        self._store = store
        self.run_id = run_id
        self._subject = subject_of(run_id)
        self.lease = lease
        self._height: int = store.read(journal.head, self._subject).height
        self._is_broken = False
        # Whether entries below the checkpoint may remain to be removed.
        self._may_truncate = True

    @property
    def next_height(self) -> int:
        return self._height + 1

    def append(
        self,
        entries: Sequence[LogEntry],
        puts: Sequence[RowPut] = (),
        checkpoint: bytes | None = None,
    ) -> list[int]:
        """Write entries and rows durably in one transaction and return the height of each entry.

        `checkpoint` is the scheduler's dump after these entries.
        """
        if self._is_broken:
            raise HeadMoved(subject=self._subject, expected=self._height, found=None)
        bodies = [codec.pack(entry) for entry in entries]
        try:
            removed: int = self._store.transact(self._write, bodies, puts, checkpoint)
        except (CommitUnknown, HeadMoved, Fenced):
            self._is_broken = True
            raise
        self._may_truncate = checkpoint is not None or removed > 0
        first = self.next_height
        self._height += len(bodies)
        return list(range(first, self.next_height))

    def _write(
        self, txn: Txn, bodies: list[bytes], puts: Sequence[RowPut], checkpoint: bytes | None
    ) -> int:
        txn.require_live(self.lease)
        height = self._height
        for at in range(0, len(bodies), BATCH_MAX):
            page = bodies[at : at + BATCH_MAX]
            height = journal.append(txn, self._subject, page, expected_head=height).height
        for key, value in puts:
            txn.put(key, value)
        if checkpoint is not None:
            _save_checkpoint(txn, self._subject, height, checkpoint)
        return journal.truncate(txn, self._subject, TRUNCATE_MAX) if self._may_truncate else 0


def open_run(store: Store, run_id: str, lease: Lease) -> tuple[RunLog, RunScheduler]:
    """Open a run for writing under a lease. Its grants get a full lease period."""
    log = RunLog(store, run_id, lease)
    board, height = store.read(_load, run_id)
    if height != log.next_height - 1:
        raise HeadMoved(subject=subject_of(run_id), expected=log.next_height - 1, found=height)
    board.renew_all_grants(store.now_ns())
    return log, board


def load_run(store: Store, run_id: str) -> RunScheduler:
    """Load the scheduler of a run from its log, for reading."""
    if failpoints.armed:
        failpoints.hit("ledger.load_run", run_id)
    board, _ = store.read(_load, run_id)
    board.renew_all_grants(store.now_ns())
    return board


class RowCounts(NamedTuple):
    """Rows of a run by state code, 0 to 7, and by outcome: succeeded, skipped, failed, cancelled."""

    by_state: list[int]
    ended: list[int]


def count_rows(store: Store, run_id: str) -> RowCounts:
    """Return the row counts of a run. They come from the published progress if it matches the head
    of the log, or if a driver is active (it is then a few seconds old at most). Otherwise the
    ledger service was killed, and the function loads the scheduler, whose cost grows with the size
    of the run.
    """
    published = store.read(_published_counts, run_id)
    if published is not None:
        return published
    board = load_run(store, run_id)
    return RowCounts(board.ledger.counts(), board.ended)


def verify_run(store: Store, run_id: str) -> int:
    """Verify the hash chain, rebuild the state, compare it with the checkpoints; return the entries
    applied.
    """
    return store.read(_verify, run_id)


# -- internals -----------------------------------------------------------------------------------


def _published_counts(txn: Txn, run_id: str) -> RowCounts | None:
    published = get_progress(txn, run_id)
    if published is None:
        return None
    if published.height != journal.head(txn, subject_of(run_id)).height and not _is_served(
        txn, run_id
    ):
        return None
    return RowCounts(published.counts, published.ended)


def _is_served(txn: Txn, run_id: str) -> bool:
    """Return whether a ledger service holds the lease of the name and this run is the latest of it."""
    record = get_record(txn, run_id)
    newest = None if record is None else get_latest(txn, record.name)
    if newest is None or newest.run_id != run_id:
        return False
    run_lease = lease.current_status(txn, lease_resource(newest.name))
    return run_lease is not None and run_lease.is_live(txn.now_ns, txn.generation)


def _save_checkpoint(txn: Txn, subject: str, height: int, checkpoint: bytes) -> None:
    previous = snapshot.baseline(txn, subject)
    if previous is not None and previous.height == height:
        return
    snapshot.save(txn, subject, height, checkpoint)
    snapshot.set_baseline(txn, subject, height)
    if previous is not None:
        # Keep the entries after the older checkpoint: verification rebuilds the newer one from it.
        journal.checkpoint(txn, subject, previous.height)
    snapshot.prune(txn, subject, CHECKPOINTS_KEPT)


def _load(txn: Txn, run_id: str) -> tuple[RunScheduler, int]:
    subject = subject_of(run_id)
    head = journal.head(txn, subject).height
    base = snapshot.baseline(txn, subject)
    start = None if base is None else base.height
    board, _ = _rebuild(txn, subject, start, head)
    return board, head


def _rebuild(txn: Txn, subject: str, start: int | None, head: int) -> tuple[RunScheduler, int]:
    """Rebuild the scheduler at a height from a checkpoint or from the start; also return the
    entries applied.
    """
    if not head:
        raise NotFound(what="run log", subject=subject)
    board = None if start is None else RunScheduler.load(snapshot.load(txn, subject, start))
    return _replay_on(txn, subject, board, start or 0, head)


def _replay_on(
    txn: Txn, subject: str, board: RunScheduler | None, after: int, to: int
) -> tuple[RunScheduler, int]:
    """Replay entries from one height to another on a scheduler; also return the entries applied."""
    entries = [events.decode_entry(entry.body) for entry in _entries(txn, subject, after, to)]
    try:
        return RunScheduler.replay(entries, board), len(entries)
    except (IllegalTransition, Invalid, KeyError) as error:
        raise StoreCorrupt(
            subject=subject, after=after, why=f"cannot be replayed: {error}"
        ) from error


def _verify(txn: Txn, run_id: str) -> int:
    subject = subject_of(run_id)
    journal.verify(txn, subject)
    head = journal.head(txn, subject)
    kept = sorted(snapshot.heights(txn, subject, SCAN_PAGE))
    start = None if head.floor == 1 else next((h for h in kept if h >= head.floor - 1), None)
    if start is None and head.floor > 1:
        raise StoreCorrupt(subject=subject, height=head.floor, why="no checkpoint to start from")
    board, applied = None, 0
    for height in [h for h in kept if start is None or h > start] + [head.height]:
        at = (start or 0) + applied
        if board is None:
            board, count = _rebuild(txn, subject, start, height)
        else:
            board, count = _replay_on(txn, subject, board, at, height)
        applied += count
        if height in kept and not _is_same_checkpoint(
            snapshot.load(txn, subject, height), board.dump()
        ):
            raise StoreCorrupt(subject=subject, height=height, why="the checkpoint differs")
    return applied


def _is_same_checkpoint(checkpoint: bytes, dump: bytes) -> bool:
    """Compare a checkpoint with a dump. An older version may have written fewer fields."""
    return checkpoint == dump or codec.pack(codec.unpack_as(RunCheckpoint, checkpoint)) == dump


def _entries(txn: Txn, subject: str, after: int, to: int) -> Iterator[journal.ChainedEntry]:
    """Yield all entries above a height up to another."""
    while after < to:
        page = journal.read(txn, subject, after + 1, to + 1, SCAN_PAGE)
        if not page:
            raise StoreCorrupt(subject=subject, height=after + 1, why="the entry is missing")
        yield from page
        after = page[-1].height
