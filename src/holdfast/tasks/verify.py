"""Is every status what the log says? A replay, from the oldest checkpoint there is, compared with the rows.

- every record is legal where it stands: its preconditions are checked by the board
- the status of each task is what its records make of it; a task that was forgotten had ended
- bodies and results have the hashes that the log holds of them, as long as all of them are kept
- the latest checkpoint is what the replay makes of the log at its heights
- the log's own chain holds

What follows from statuses and bodies (places, counts, keys, limits) is counted again in `recount`.
All of it sees one snapshot, so that what goes on meanwhile is no difference. `differences` yields what
it finds with the task, the height of its last record, and the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal
from holdfast.errors import HoldfastError, StoreCorrupt
from holdfast.store import blobs, tuples
from holdfast.store.api import Row, Txn
from holdfast.tasks import board, checkpoint, records
from holdfast.tasks.checkpoint import Chunk
from holdfast.tasks.rows import (
    FRESH,
    Body,
    Keys,
    Status,
    decode_body,
    decode_status,
    keys_of,
    pack_int,
    seq_of,
)
from holdfast.tasks.runs import SEQ_END, held_between
from holdfast.tasks.states import TABLE, State

# What the log decides of a status. The rest follows from other rows: see `recount`.
FIELDS = (
    "state", "attempt", "failures", "expiries", "lease", "worker", "expires_ns", "granted_ns",
    "progress_ns", "not_before_ns", "ended_ns", "reason", "error",
)  # fmt: skip


class Difference(NamedTuple):
    """Something that is not as it should be: 0 is no task, or no height, in particular."""

    task: int
    height: int
    field: str
    found: object
    expected: object


def differences(txn: Txn, universe: str) -> Iterator[Difference]:
    keys = keys_of(universe)
    try:
        journal.verify(txn, keys.subject)
    except StoreCorrupt as error:
        height = error.fields.get("height", 0)
        yield Difference(0, int(height), "log", error.fields.get("why"), "an unbroken chain")
        return
    replay = Replay(txn, universe)
    yield from replay.run()
    if replay.broken:
        return
    yield from _compare(txn, keys, replay)


class Replay:
    """The fold of the log, from the oldest checkpoint."""

    def __init__(self, txn: Txn, universe: str) -> None:
        self._txn = txn
        self._universe = universe
        self._keys = keys_of(universe)
        # Every task that the log knows, and the height of the last record about it.
        self.tasks: dict[int, Status] = {}
        self.heights: dict[int, int] = {}
        self.broken = False
        self._known: list[Chunk] = []
        self._start = 0

    def run(self, upto: int | None = None) -> Iterator[Difference]:
        """Fold the log up to a height, or all of it."""
        txn, now = self._txn, checkpoint.current(self._txn, self._universe)
        head = journal.head(txn, self._keys.subject)
        base = now.before if head.floor > 1 or now.before.number else checkpoint.Checkpoint()
        yield from self._begin(base)
        due = list(checkpoint.chunks(txn, self._universe, now.latest))
        if len(due) != now.latest.chunks:
            yield Difference(0, now.latest.height, "chunks", len(due), now.latest.chunks)
        due.sort(key=lambda chunk: -chunk.height)
        top = head.height if upto is None else upto
        lo = base.height + 1
        while lo <= top:
            for found in journal.read(txn, self._keys.subject, lo, top + 1, SCAN_PAGE):
                yield from self._reached(due, found.height - 1)
                entry = records.decode(found.body)
                for wrong in self._fold(found.height, entry):
                    self.broken = True
                    yield wrong
                    return
                for stored in entry.records:
                    yield from self._check_hash(found.height, entry, stored)
                lo = found.height + 1
        yield from self._reached(due, top)

    def _begin(self, base: checkpoint.Checkpoint) -> Iterator[Difference]:
        self._start, end = base.height, 0
        for chunk in checkpoint.chunks(self._txn, self._universe, base):
            if chunk.lo != end:
                yield Difference(0, chunk.height, "chunk", chunk.lo, end)
            end = chunk.hi
            self._known.append(chunk)
            for task in chunk.fresh:
                self._set(task, FRESH, chunk.height)
            for task, status in chunk.tasks:
                self._set(task, status, chunk.height)
            yield from _check_bodies(self._txn, self._keys, chunk)

    def _set(self, task: int, status: Status, height: int) -> None:
        self.tasks[task] = status
        self.heights[task] = height

    def _known_at(self, task: int) -> int:
        """The height up to which the checkpoint knows all about a task."""
        if not self._known or task >= self._known[-1].hi:
            return self._start
        lo, hi = 0, len(self._known) - 1
        while lo < hi:
            middle = (lo + hi) // 2
            if self._known[middle].hi <= task:
                lo = middle + 1
            else:
                hi = middle
        return self._known[lo].height

    def _fold(self, height: int, entry: records.Entry) -> Iterator[Difference]:
        for record in records.singles(entry, lambda task: None):
            task = record.task_id
            if height <= self._known_at(task):
                continue
            was = self.tasks.get(task)
            if isinstance(record, records.TaskCreated):
                if was is not None:
                    yield Difference(task, height, "created", "twice", "once")
                    return
                self._set(task, FRESH, height)
            elif was is None:
                # Whoever reports on a task that is forgotten is told so, and that is on record.
                if not isinstance(record, records.TaskCancelled):
                    yield Difference(task, height, type(record).__name__, "no such task", "a task")
                    return
            else:
                try:
                    self._set(task, board.after(was, record), height)
                except HoldfastError as error:
                    yield Difference(task, height, type(record).__name__, str(error), "a legal one")
                    return

    def _check_hash(
        self, height: int, entry: records.Entry, stored: records.Stored
    ) -> Iterator[Difference]:
        txn, keys = self._txn, self._keys
        if isinstance(stored, records.Created):
            bodies = [txn.get(keys.bodies + pack_int(task)) for task in stored.tasks]
            kept = [row for row in bodies if row is not None]
            if len(kept) == len(bodies) and records.digest_of(kept) != stored.digest:
                yield Difference(stored.tasks[0], height, "bodies", "another hash", "the log's")
            for task, row in zip(stored.tasks, bodies, strict=True):
                body = None if row is None else decode_body(row)
                made = (entry.decided_ns, entry.generation)
                if body is not None and (body.created_ns, body.generation) != made:
                    found = (body.created_ns, body.generation)
                    yield Difference(task, height, "created", found, made)
        elif isinstance(stored, records.Completed):
            rows = [txn.get(keys.statuses + pack_int(task)) for task in stored.tasks]
            results = [_result(txn, decode_status(row)) for row in rows if row is not None]
            whole = len(results) == len(rows)
            if whole and records.digest_of(results) != stored.digest:
                yield Difference(stored.tasks[0], height, "results", "another hash", "the log's")

    def _reached(self, due: list[Chunk], height: int) -> Iterator[Difference]:
        """Chunks of the latest checkpoint that were made at this height, or at none that is here."""
        while due and due[-1].height <= height:
            chunk = due.pop()
            said = {**dict.fromkeys(chunk.fresh, FRESH), **dict(chunk.tasks)}
            # In the order of seqs, so that the first difference is always the same.
            for task, status in sorted(said.items()):
                mine = self.tasks.get(task)
                if mine is None or checkpoint.logged(mine) != status:
                    yield Difference(task, chunk.height, "checkpoint", status, mine)
            for task in self.tasks:
                if chunk.lo <= task < chunk.hi and task not in said:
                    if self.tasks[task].state not in TABLE.terminal:
                        yield Difference(task, chunk.height, "checkpoint", None, self.tasks[task])
            yield from _check_bodies(self._txn, self._keys, chunk)


def _check_bodies(txn: Txn, keys: Keys, chunk: Chunk) -> Iterator[Difference]:
    tasks = sorted([*chunk.fresh, *(task for task, _ in chunk.tasks)])
    rows = [txn.get(keys.bodies + pack_int(task)) for task in tasks]
    kept = [row for row in rows if row is not None]
    if len(kept) == len(rows) and records.digest_of(kept) != chunk.digest:
        yield Difference(tasks[0], chunk.height, "bodies", "another hash", "the checkpoint's")


def _result(txn: Txn, status: Status) -> bytes:
    return blobs.get(txn, status.blob) if status.blob else status.result


# -- rows ----------------------------------------------------------------------------------------


def _compare(txn: Txn, keys: Keys, replay: Replay) -> Iterator[Difference]:
    retained = retained_tasks(txn, keys)
    held = held_between(txn, keys, 0, SEQ_END)
    rest = dict(replay.tasks)
    for key, row in rows_of(txn, keys.bodies):
        seq = seq_of(key[len(keys.bodies) :])
        height = replay.heights.get(seq, 0)
        wanted = rest.pop(seq, None)
        if wanted is None:
            yield Difference(seq, 0, "task", "a body", "nothing: the log has no such task")
            continue
        body: Body = decode_body(row)
        if body.blob and not blobs.sound(txn, body.blob):
            yield Difference(seq, height, "arguments", "not what they were", body.blob.hex())
        kept = txn.get(keys.statuses + pack_int(seq))
        status = held.get(seq, FRESH) if kept is None else decode_status(kept)
        for field in FIELDS:
            found, expected = getattr(status, field), getattr(wanted, field)
            if found != expected:
                yield Difference(seq, height, field, _shown(field, found), _shown(field, expected))
        if status.blob and not blobs.sound(txn, status.blob):
            yield Difference(seq, height, "result", "not what it was", status.blob.hex())
        if retained.get(seq, 0) != (status.state in TABLE.terminal):
            times, right = retained.get(seq, 0), int(status.state in TABLE.terminal)
            yield Difference(seq, height, "retention", f"listed {times} times", right)
    for seq, status in rest.items():
        height = replay.heights[seq]
        if status.state not in TABLE.terminal:
            yield Difference(seq, height, "task", "nothing", State(status.state).name)
        elif seq in retained:
            yield Difference(seq, height, "task", "nothing", "kept until its retention is over")
    for key, _ in rows_of(txn, keys.statuses):
        seq = seq_of(key[len(keys.statuses) :])
        if seq not in replay.tasks:
            yield Difference(seq, 0, "task", "a status", "nothing: the log has no such task")
    given = txn.count(keys.seq)
    top = max(replay.tasks, default=0)
    if top > given:
        yield Difference(top, replay.heights[top], "seq", f"{given} given", f"{top} or more")


def retained_tasks(txn: Txn, keys: Keys) -> dict[int, int]:
    """How often each task is listed among those that are kept for a time."""
    found: dict[int, int] = {}
    for _, row in rows_of(txn, keys.retained):
        for seq in codec.unpack_as(list[int], row):
            found[seq] = found.get(seq, 0) + 1
    return found


def rows_of(txn: Txn, prefix: bytes) -> Iterator[Row]:
    at, end = prefix, tuples.after(prefix)
    while page := txn.scan(at, end, SCAN_PAGE):
        yield from page
        at = page[-1][0] + b"\x00"


def _shown(field: str, value: object) -> object:
    return State(value).name if field == "state" and isinstance(value, int) else value
