"""A run's log on a store: what was decided is written here before anybody is told.

- One `append` is one transaction: the entries on top of the head that this log knows, and the rows
  that belong to them (outcome chunks, progress), under the run's lease. After it returns they are
  durable. `Fenced`: another process has the run; stop.
- A checkpoint is the board's dump, kept at a height, in parts when it is large. Two are kept, and the entries from the older one
  on: so `verify` can rebuild the newer from the older and compare, and the log stays short.
- `load` is the last checkpoint and the entries after it.

The board runs ahead of the log while an append is under way. After `CommitUnknown`, `HeadMoved` or
`Fenced` nobody here knows what the log holds: it takes no more entries. Throw both away, and open
again; what a caller was not told then either stands, and its repeat gets the first answer, or does
not. After any other error nothing was written, and the same entries may be appended again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast import codec
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
from holdfast.ledger import records
from holdfast.ledger.board import Board
from holdfast.ledger.position import Dump
from holdfast.ledger.records import LogEntry
from holdfast.ledger.runs import get, latest, lease_resource, progress, subject_of
from holdfast.store.api import Store, Txn

CHECKPOINTS_KEPT = 2
# Entries that one append removes below the checkpoint, at most.
TRUNCATE_MAX = 4000

Put = tuple[bytes, bytes]


class RunLog:
    """The log of one run, held under a lease. `next_height` is where the next entry will lie."""

    def __init__(self, store: Store, run_id: str, lease: Lease) -> None:
        self._store = store
        self.run_id = run_id
        self._subject = subject_of(run_id)
        self.lease = lease
        self._height: int = store.read(journal.head, self._subject).height
        self._lost = False
        # Whether there may be entries below the checkpoint to remove.
        self._long = True

    @property
    def next_height(self) -> int:
        return self._height + 1

    def append(
        self,
        entries: Sequence[LogEntry],
        puts: Sequence[Put] = (),
        checkpoint: bytes | None = None,
    ) -> list[int]:
        """Write entries and rows, durably and all together; the height of each entry.

        `checkpoint` is the board's dump right after these entries.
        """
        if self._lost:
            raise HeadMoved(subject=self._subject, expected=self._height, found=None)
        bodies = [codec.pack(entry) for entry in entries]
        try:
            removed: int = self._store.transact(self._write, bodies, puts, checkpoint)
        except (CommitUnknown, HeadMoved, Fenced):
            self._lost = True
            raise
        self._long = checkpoint is not None or removed > 0
        first = self.next_height
        self._height += len(bodies)
        return list(range(first, self.next_height))

    def _write(
        self, txn: Txn, bodies: list[bytes], puts: Sequence[Put], checkpoint: bytes | None
    ) -> int:
        txn.require_live(self.lease)
        height = self._height
        for at in range(0, len(bodies), BATCH_MAX):
            page = bodies[at : at + BATCH_MAX]
            height = journal.append(txn, self._subject, page, expected_head=height).height
        for key, value in puts:
            txn.put(key, value)
        if checkpoint is not None:
            _keep(txn, self._subject, height, checkpoint)
        return journal.truncate(txn, self._subject, TRUNCATE_MAX) if self._long else 0


def open_run(store: Store, run_id: str, lease: Lease) -> tuple[RunLog, Board]:
    """The run as its log has it, to go on with under a lease. Its grants live for a lease again."""
    log = RunLog(store, run_id, lease)
    board, height = store.read(_load, run_id)
    if height != log.next_height - 1:
        raise HeadMoved(subject=subject_of(run_id), expected=log.next_height - 1, found=height)
    board.renew(store.now_ns())
    return log, board


def load(store: Store, run_id: str) -> Board:
    """The board that the log comes to, to look at."""
    board, _ = store.read(_load, run_id)
    board.renew(store.now_ns())
    return board


class RowCounts(NamedTuple):
    """Rows of a run by state code, 0 to 7, and by how they ended: succeeded, skipped, failed, cancelled."""

    by_state: list[int]
    ended: list[int]


def counts(store: Store, run_id: str) -> RowCounts:
    """How the rows of a run stand: from its progress when that is of the head of the log. While a driver is at work
    the progress is some seconds old at most, and is answered as it is. Else the board is loaded, which takes memory and
    time by the size of the run: its service was killed."""
    found = store.read(_counts, run_id)
    if found is not None:
        return found
    board = load(store, run_id)
    return RowCounts(board.ledger.counts(), board.ended)


def verify(store: Store, run_id: str) -> int:
    """Check the chain, rebuild what is kept and compare it with the checkpoints; entries applied."""
    return store.read(_verify, run_id)


# -- inside --------------------------------------------------------------------------------------


def _counts(txn: Txn, run_id: str) -> RowCounts | None:
    told = progress(txn, run_id)
    if told is None:
        return None
    if told.height != journal.head(txn, subject_of(run_id)).height and not _at_work(txn, run_id):
        return None
    return RowCounts(told.counts, told.ended)


def _at_work(txn: Txn, run_id: str) -> bool:
    """Whether a ledger service holds the name of a run that the name leads to."""
    record = get(txn, run_id)
    newest = None if record is None else latest(txn, record.name)
    if newest is None or newest.run_id != run_id:
        return False
    held = lease.current(txn, lease_resource(newest.name))
    return held is not None and held.live(txn.now_ns, txn.generation)


def _keep(txn: Txn, subject: str, height: int, checkpoint: bytes) -> None:
    before = snapshot.baseline(txn, subject)
    if before is not None and before.height == height:
        return
    snapshot.save(txn, subject, height, checkpoint)
    snapshot.set_baseline(txn, subject, height)
    if before is not None:
        # Entries after the older one are kept: it is what the newer one is verified from.
        journal.checkpoint(txn, subject, before.height)
    snapshot.prune(txn, subject, CHECKPOINTS_KEPT)


def _load(txn: Txn, run_id: str) -> tuple[Board, int]:
    subject = subject_of(run_id)
    head = journal.head(txn, subject).height
    base = snapshot.baseline(txn, subject)
    start = None if base is None else base.height
    board, _ = _rebuild(txn, subject, start, head)
    return board, head


def _rebuild(txn: Txn, subject: str, start: int | None, head: int) -> tuple[Board, int]:
    """The board at a height, from a checkpoint or from the beginning; entries applied."""
    if not head:
        raise NotFound(what="run log", subject=subject)
    board = None if start is None else Board.load(snapshot.load(txn, subject, start))
    return _replayed(txn, subject, board, start or 0, head)


def _replayed(
    txn: Txn, subject: str, board: Board | None, after: int, to: int
) -> tuple[Board, int]:
    """A board that stands after one height, brought to another; entries applied."""
    entries = [records.decode(entry.body) for entry in _entries(txn, subject, after, to)]
    try:
        return Board.replay(entries, board), len(entries)
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
            board, count = _replayed(txn, subject, board, at, height)
        applied += count
        if height in kept and not _same(snapshot.load(txn, subject, height), board.dump()):
            raise StoreCorrupt(subject=subject, height=height, why="the checkpoint differs")
    return applied


def _same(checkpoint: bytes, dump: bytes) -> bool:
    """Whether a checkpoint tells of the same board; an older version may have written fewer fields."""
    return checkpoint == dump or codec.pack(codec.unpack_as(Dump, checkpoint)) == dump


def _entries(txn: Txn, subject: str, after: int, to: int) -> Iterator[journal.Entry]:
    """Entries above a height up to another, all of them."""
    while after < to:
        page = journal.read(txn, subject, after + 1, to + 1, SCAN_PAGE)
        if not page:
            raise StoreCorrupt(subject=subject, height=after + 1, why="the entry is missing")
        yield from page
        after = page[-1].height
