"""The replay check: replay the task log from the oldest checkpoint and compare the result with the
rows.

- Every record is legal at its position. `status_fold` checks its preconditions.
- The stored status of each task equals its replayed status. Only ended tasks may be missing.
- Bodies and results match the hashes in the log, if all rows of a hash still exist.
- The latest checkpoint equals the replayed state at the heights of its chunks.
- The hash chain of the log is intact.

`consistency` checks the rows derived from statuses and bodies (wait states, counts, keys, limits).
Both checks read one snapshot, so concurrent commits cause no difference. `find_differences` yields
each difference with the task, the height of its last record and the field.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal
from holdfast.durable.difference import Difference
from holdfast.errors import HoldfastError, StoreCorrupt
from holdfast.store import blobs
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks import checkpoint, events, status_fold
from holdfast.tasks.checkpoint import CheckpointChunk
from holdfast.tasks.model import (
    NEW_STATUS,
    TaskBodyRow,
    TaskKeys,
    TaskStatusRow,
    decode_body,
    decode_status,
    get_body,
    keys_of,
    pack_int,
    unpack_seq,
)
from holdfast.tasks.row_ranges import SEQ_END, range_lease_statuses
from holdfast.tasks.states import TASK_TRANSITIONS, TaskState

# Status fields that the log determines. `consistency` checks the remaining fields.
LOGGED_FIELDS = (
    "state", "attempt", "failures", "expiries", "lease", "worker", "expires_ns", "granted_ns",
    "progress_ns", "not_before_ns", "ended_ns", "reason", "error",
)  # fmt: skip


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    keys = keys_of(universe)
    try:
        journal.verify(txn, keys.subject)
    except StoreCorrupt as error:
        height = error.fields.get("height", 0)
        yield task_difference(
            txn, keys, 0, int(height), "log", error.fields.get("why"), "an unbroken chain"
        )
        return
    replay = LogReplay(txn, universe)
    yield from replay.run()
    if replay.is_broken:
        return
    yield from _compare_rows(txn, keys, replay)


class LogReplay:
    """The replay of the log from the oldest checkpoint."""

    def __init__(self, txn: Txn, universe: str) -> None:
        self._txn = txn
        self._universe = universe
        self._keys = keys_of(universe)
        # The replayed status of each task, and the height of its last record.
        self.tasks: dict[int, TaskStatusRow] = {}
        self.heights: dict[int, int] = {}
        self.is_broken = False
        self._base_chunks: list[CheckpointChunk] = []
        self._base_height = 0

    def run(self, upto: int | None = None) -> Iterator[Difference]:
        """Replay the log up to a height, by default to the head."""
        txn, checkpoints = self._txn, checkpoint.read_index(self._txn, self._universe)
        head = journal.head(txn, self._keys.subject)
        base = (
            checkpoints.before
            if head.floor > 1 or checkpoints.before.number
            else checkpoint.TaskCheckpoint()
        )
        yield from self._load_base(base)
        due = list(checkpoint.read_chunks(txn, self._universe, checkpoints.latest))
        if len(due) != checkpoints.latest.chunks:
            yield self._difference(
                0, checkpoints.latest.height, "chunks", len(due), checkpoints.latest.chunks
            )
        due.sort(key=lambda chunk: -chunk.height)
        top = head.height if upto is None else upto
        lo = base.height + 1
        while lo <= top:
            for log_row in journal.read(txn, self._keys.subject, lo, top + 1, SCAN_PAGE):
                yield from self._check_chunks_at(due, log_row.height - 1)
                entry = events.decode_entry(log_row.body)
                for difference in self._apply_entry(log_row.height, entry):
                    self.is_broken = True
                    yield difference
                    return
                for stored in entry.records:
                    yield from self._check_digests(log_row.height, entry, stored)
                lo = log_row.height + 1
        yield from self._check_chunks_at(due, top)

    def _difference(
        self, task: int, height: int, what: str, found: object, expected: object
    ) -> Difference:
        return task_difference(self._txn, self._keys, task, height, what, found, expected)

    def _load_base(self, base: checkpoint.TaskCheckpoint) -> Iterator[Difference]:
        self._base_height, end = base.height, 0
        for chunk in checkpoint.read_chunks(self._txn, self._universe, base):
            if chunk.lo != end:
                yield self._difference(0, chunk.height, "chunk", chunk.lo, end)
            end = chunk.hi
            self._base_chunks.append(chunk)
            for task in chunk.fresh:
                self._set(task, NEW_STATUS, chunk.height)
            for task, status in chunk.tasks:
                self._set(task, status, chunk.height)
            yield from _check_bodies(self._txn, self._keys, chunk)

    def _set(self, task: int, status: TaskStatusRow, height: int) -> None:
        self.tasks[task] = status
        self.heights[task] = height

    def _height_covered(self, task: int) -> int:
        """Return the height up to which the base checkpoint covers a task."""
        if not self._base_chunks or task >= self._base_chunks[-1].hi:
            return self._base_height
        lo, hi = 0, len(self._base_chunks) - 1
        while lo < hi:
            middle = (lo + hi) // 2
            if self._base_chunks[middle].hi <= task:
                lo = middle + 1
            else:
                hi = middle
        return self._base_chunks[lo].height

    def _apply_entry(self, height: int, entry: events.TaskLogEntry) -> Iterator[Difference]:
        for record in events.iter_records(entry, lambda task: None):
            task = record.task_id
            if height <= self._height_covered(task):
                continue
            prior = self.tasks.get(task)
            if isinstance(record, events.TaskCreated):
                if prior is not None:
                    yield self._difference(task, height, "created", "twice", "once")
                    return
                self._set(task, NEW_STATUS, height)
            elif prior is None:
                # A report on a removed task is answered CANCELLED, and that answer is logged.
                if not isinstance(record, events.TaskCancelled):
                    yield self._difference(
                        task, height, type(record).__name__, "no such task", "a task"
                    )
                    return
            else:
                try:
                    self._set(task, status_fold.apply_record(prior, record), height)
                except HoldfastError as error:
                    yield self._difference(
                        task, height, type(record).__name__, str(error), "a legal one"
                    )
                    return

    def _check_digests(
        self, height: int, entry: events.TaskLogEntry, stored: events.StoredRecord
    ) -> Iterator[Difference]:
        txn, keys = self._txn, self._keys
        if isinstance(stored, events.TasksCreated):
            bodies = [txn.get(keys.bodies + pack_int(task)) for task in stored.tasks]
            kept = [row for row in bodies if row is not None]
            if len(kept) == len(bodies) and events.digest_rows(kept) != stored.digest:
                yield self._difference(
                    stored.tasks[0], height, "bodies", "another hash", "the log's"
                )
            for task, row in zip(stored.tasks, bodies, strict=True):
                body = None if row is None else decode_body(row)
                made = (entry.decided_ns, entry.generation)
                if body is not None and (body.created_ns, body.generation) != made:
                    found = (body.created_ns, body.generation)
                    yield self._difference(task, height, "created", found, made)
        elif isinstance(stored, events.TasksCompleted):
            rows = [txn.get(keys.statuses + pack_int(task)) for task in stored.tasks]
            results = [_load_result(txn, decode_status(row)) for row in rows if row is not None]
            whole = len(results) == len(rows)
            if whole and events.digest_rows(results) != stored.digest:
                yield self._difference(
                    stored.tasks[0], height, "results", "another hash", "the log's"
                )

    def _check_chunks_at(self, due: list[CheckpointChunk], height: int) -> Iterator[Difference]:
        """Check the chunks of the latest checkpoint that were read at or below this height."""
        while due and due[-1].height <= height:
            chunk = due.pop()
            expected = {**dict.fromkeys(chunk.fresh, NEW_STATUS), **dict(chunk.tasks)}
            # Sorted by seq, so that the first difference is deterministic.
            for task, status in sorted(expected.items()):
                replayed = self.tasks.get(task)
                if replayed is None or checkpoint.logged_part(replayed) != status:
                    yield self._difference(task, chunk.height, "checkpoint", status, replayed)
            for task in self.tasks:
                if chunk.lo <= task < chunk.hi and task not in expected:
                    if self.tasks[task].state not in TASK_TRANSITIONS.terminal:
                        yield self._difference(
                            task, chunk.height, "checkpoint", None, self.tasks[task]
                        )
            yield from _check_bodies(self._txn, self._keys, chunk)


def _check_bodies(txn: Txn, keys: TaskKeys, chunk: CheckpointChunk) -> Iterator[Difference]:
    tasks = sorted([*chunk.fresh, *(task for task, _ in chunk.tasks)])
    rows = [txn.get(keys.bodies + pack_int(task)) for task in tasks]
    kept = [row for row in rows if row is not None]
    if len(kept) == len(rows) and events.digest_rows(kept) != chunk.digest:
        yield task_difference(
            txn, keys, tasks[0], chunk.height, "bodies", "another hash", "the checkpoint's"
        )


def _load_result(txn: Txn, status: TaskStatusRow) -> bytes:
    return blobs.get(txn, status.blob) if status.blob else status.result


# -- rows ----------------------------------------------------------------------------------------


def _compare_rows(txn: Txn, keys: TaskKeys, replay: LogReplay) -> Iterator[Difference]:
    retained = retention_counts(txn, keys)
    leased_in_ranges = range_lease_statuses(txn, keys, 0, SEQ_END)
    unmatched = dict(replay.tasks)
    for key, row in iter_rows(txn, keys.bodies):
        seq = unpack_seq(key[len(keys.bodies) :])
        height = replay.heights.get(seq, 0)
        replayed = unmatched.pop(seq, None)
        if replayed is None:
            yield task_difference(
                txn, keys, seq, 0, "task", "a body", "nothing: the log has no such task"
            )
            continue
        body: TaskBodyRow = decode_body(row)
        if body.blob and not blobs.is_intact(txn, body.blob):
            yield task_difference(
                txn, keys, seq, height, "arguments", "differs from its stored hash", body.blob.hex()
            )
        kept = txn.get(keys.statuses + pack_int(seq))
        status = leased_in_ranges.get(seq, NEW_STATUS) if kept is None else decode_status(kept)
        for field in LOGGED_FIELDS:
            found, expected = getattr(status, field), getattr(replayed, field)
            if found != expected:
                yield task_difference(
                    txn,
                    keys,
                    seq,
                    height,
                    field,
                    _display_value(field, found),
                    _display_value(field, expected),
                )
        if status.blob and not blobs.is_intact(txn, status.blob):
            yield task_difference(
                txn, keys, seq, height, "result", "differs from its stored hash", status.blob.hex()
            )
        if retained.get(seq, 0) != (status.state in TASK_TRANSITIONS.terminal):
            times, right = retained.get(seq, 0), int(status.state in TASK_TRANSITIONS.terminal)
            yield task_difference(
                txn, keys, seq, height, "retention", f"listed {times} times", right
            )
    for seq, status in unmatched.items():
        height = replay.heights[seq]
        if status.state not in TASK_TRANSITIONS.terminal:
            yield task_difference(
                txn, keys, seq, height, "task", "nothing", TaskState(status.state).name
            )
        elif seq in retained:
            yield task_difference(
                txn, keys, seq, height, "task", "nothing", "kept until its retention is over"
            )
    for key, _ in iter_rows(txn, keys.statuses):
        seq = unpack_seq(key[len(keys.statuses) :])
        if seq not in replay.tasks:
            yield task_difference(
                txn, keys, seq, 0, "task", "a status", "nothing: the log has no such task"
            )
    seqs_assigned = txn.count(keys.seq_counter)
    top = max(replay.tasks, default=0)
    if top > seqs_assigned:
        yield task_difference(
            txn, keys, top, replay.heights[top], "seq", f"{seqs_assigned} given", f"{top} or more"
        )


def retention_counts(txn: Txn, keys: TaskKeys) -> dict[int, int]:
    """Count the entries of each task in the retention index."""
    counts: dict[int, int] = {}
    for _, row in iter_rows(txn, keys.retained):
        for seq in codec.unpack_as(list[int], row):
            counts[seq] = counts.get(seq, 0) + 1
    return counts


def task_difference(
    txn: Txn, keys: TaskKeys, task: int, height: int, what: str, found: object, expected: object
) -> Difference:
    """Return a difference of one task. Task 0 means the universe, height 0 means no log record."""
    location = keys.universe
    if task:
        body = get_body(txn, keys, pack_int(task))
        location += f"/{task}" if body is None else f"/{body.generation}-{task}"
    return Difference("task", location, what, found, expected, height)


def _display_value(field: str, value: object) -> object:
    return TaskState(value).name if field == "state" and isinstance(value, int) else value
