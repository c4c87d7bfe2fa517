"""Checkpoints of the task log: the start of a replay, so that older log entries can be truncated.

A checkpoint holds every stored task with its status, in chunks by seq. It is a fuzzy checkpoint:
commits continue while it is written. Each chunk is read from its own snapshot and records the log
height of that snapshot. A replay starts at the height where the checkpoint began and skips the
records that a chunk already covers. So no snapshot is held for long, no transaction is large, and
no worker waits.

    h "now"                 the index: the latest checkpoint and the one before
    h "building"            the checkpoint in progress, with its number
    h "c" <number> <n>      chunks

The log is kept from the checkpoint before the latest. The latest checkpoint can therefore be
verified: it must equal a replay from the one before (`replay_check`).

A checkpoint is due when the log has grown by more than the size of the last checkpoint, so the
amortized cost per record is constant. Concurrent writers are safe: a superseded checkpoint is
refused, and its chunks are removed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.config import BATCH_MAX
from holdfast.durable import journal
from holdfast.store import tuples
from holdfast.store.api import Store, Txn, operation
from holdfast.tasks.events import digest_rows
from holdfast.tasks.model import (
    NEW_STATUS,
    TaskKeys,
    TaskStatusRow,
    decode_status,
    keys_of,
    pack,
    pack_int,
    unpack_seq,
)
from holdfast.tasks.row_ranges import range_lease_statuses

# The minimum log growth between checkpoints.
LOG_BYTES_MIN = 4 * 1024 * 1024
CHUNK_TASKS = 1_000
# Chunks end early where bodies are large.
CHUNK_BYTES = 2 * 1024 * 1024
# A checkpoint writer without a new chunk for this long counts as dead.
STALLED_NS = 60 * S
REMOVED_PER_COMMIT = 200


class CheckpointChunk(Record, frozen=True):
    """The tasks with lo <= seq < hi at a log height: new tasks, and tasks with a status (without
    results). `digest` is the hash of all bodies.
    """

    lo: int
    hi: int
    height: int
    fresh: list[int]
    tasks: list[tuple[int, TaskStatusRow]]
    digest: bytes


class TaskCheckpoint(Record, frozen=True):
    number: int = 0
    # A replay needs the log after this height.
    height: int = 0
    # The last seq at this height.
    last: int = 0
    chunks: int = 0
    bytes: int = 0


class CheckpointIndex(Record, frozen=True):
    latest: TaskCheckpoint = TaskCheckpoint()
    before: TaskCheckpoint = TaskCheckpoint()
    # The last assigned number, and the log size when the latest checkpoint began.
    numbers: int = 0
    logged: int = 0


class CheckpointInProgress(Record, frozen=True):
    checkpoint: TaskCheckpoint
    moved_ns: int
    logged: int


def is_due(store: Store, universe: str) -> bool:
    return store.read(is_due_in, universe)


def create(store: Store, universe: str, should_continue: Callable[[], bool] = lambda: True) -> bool:
    """Write a checkpoint and truncate the log below the previous one. Returns whether this call
    installed it.

    `should_continue` is checked between steps. If the writer stops, another one starts over after
    `STALLED_NS`.
    """
    begun: TaskCheckpoint | None = store.transact(begin, universe)
    if begun is None:
        return False
    at, n, size = 0, 0, 0
    while at <= begun.last:
        chunk = store.read(_read_chunk, universe, at, begun.last)
        packed = zlib.compress(pack(chunk), 1)
        if not should_continue() or not store.transact(
            add_chunk, universe, begun.number, n, packed
        ):
            return False
        at, n, size = chunk.hi, n + 1, size + len(packed)
    if not store.transact(install, universe, begun.number, n, size):
        return False
    while store.transact(remove_unreferenced, universe, REMOVED_PER_COMMIT) and should_continue():
        pass
    return True


def read_index(txn: Txn, universe: str) -> CheckpointIndex:
    return _load_index(txn, keys_of(universe))


def read_chunks(txn: Txn, universe: str, checkpoint: TaskCheckpoint) -> Iterator[CheckpointChunk]:
    """Yield the chunks of a checkpoint by seq. Checkpoint 0 is the start of the log and has none."""
    keys = keys_of(universe)
    for n in range(checkpoint.chunks):
        row = txn.get(_chunk_key(keys, checkpoint.number, n))
        if row is not None:
            yield codec.unpack_as(CheckpointChunk, zlib.decompress(row))


# -- steps of writing a checkpoint -----------------------------------------------------------------


@operation("tasks_checkpoint.begin")
def begin(txn: Txn, universe: str) -> TaskCheckpoint | None:
    """Begin a checkpoint at the log head, unless another writer is active."""
    keys = keys_of(universe)
    index, building = _load_index(txn, keys), _load_in_progress(txn, keys)
    if building is not None and txn.now_ns < building.moved_ns + STALLED_NS:
        return None
    height = journal.head(txn, keys.subject).height
    if height <= index.latest.height:
        return None
    begun = TaskCheckpoint(index.numbers + 1, height, txn.count(keys.seq_counter))
    txn.put(_key(keys, "now"), pack(replace(index, numbers=begun.number)))
    logged = txn.count(keys.log_bytes)
    txn.put(_key(keys, "building"), pack(CheckpointInProgress(begun, txn.now_ns, logged)))
    return begun


@operation("tasks_checkpoint.add_chunk")
def add_chunk(txn: Txn, universe: str, number: int, n: int, packed: bytes) -> bool:
    keys = keys_of(universe)
    building = _load_in_progress(txn, keys)
    if building is None or building.checkpoint.number != number:
        return False
    txn.put(_chunk_key(keys, number, n), packed)
    txn.put(_key(keys, "building"), pack(replace(building, moved_ns=txn.now_ns)))
    return True


@operation("tasks_checkpoint.install")
def install(txn: Txn, universe: str, number: int, chunks: int, size: int) -> bool:
    """Make the checkpoint the latest one, and release the log below the previous one."""
    keys = keys_of(universe)
    index, building = _load_index(txn, keys), _load_in_progress(txn, keys)
    if building is None or building.checkpoint.number != number:
        return False
    made = replace(building.checkpoint, chunks=chunks, bytes=size)
    after = CheckpointIndex(made, index.latest, index.numbers, building.logged)
    txn.put(_key(keys, "now"), pack(after))
    txn.delete(_key(keys, "building"))
    if index.latest.height:
        journal.checkpoint(txn, keys.subject, index.latest.height)
    return True


@operation("tasks_checkpoint.remove_unreferenced")
def remove_unreferenced(txn: Txn, universe: str, limit: int) -> int:
    """Remove unreferenced log entries and chunks. Returns their number."""
    keys = keys_of(universe)
    index, building = _load_index(txn, keys), _load_in_progress(txn, keys)
    kept = {index.latest.number, index.before.number}
    if building is not None:
        kept.add(building.checkpoint.number)
    removed = 0
    prefix = _key(keys, "c")
    at = prefix
    for number in sorted(kept):
        end = prefix + pack_int(number)
        removed += _delete_range(txn, at, end, limit - removed)
        at = tuples.prefix_end(end)
    removed += _delete_range(txn, at, tuples.prefix_end(prefix), limit - removed)
    if removed < limit:
        removed += journal.truncate(txn, keys.subject, min(limit - removed, BATCH_MAX))
    return removed


# -- inside --------------------------------------------------------------------------------------


def is_due_in(txn: Txn, universe: str) -> bool:
    """`is_due` inside a transaction."""
    keys = keys_of(universe)
    index, building = _load_index(txn, keys), _load_in_progress(txn, keys)
    if building is not None and txn.now_ns < building.moved_ns + STALLED_NS:
        return False
    return txn.count(keys.log_bytes) - index.logged > max(LOG_BYTES_MIN, index.latest.bytes)


def _read_chunk(txn: Txn, universe: str, lo: int, last: int) -> CheckpointChunk:
    keys = keys_of(universe)
    height = journal.head(txn, keys.subject).height
    end = keys.bodies + pack_int(last + 1)
    bodies = txn.scan(keys.bodies + pack_int(lo), end, CHUNK_TASKS) if lo <= last else []
    size = 0
    for at, (_, body) in enumerate(bodies):
        size += len(body)
        if size > CHUNK_BYTES:
            bodies = bodies[: at + 1]
            break
    whole = len(bodies) < CHUNK_TASKS and size <= CHUNK_BYTES
    hi = last + 1 if whole else unpack_seq(bodies[-1][0][len(keys.bodies) :]) + 1
    fresh: list[int] = []
    tasks: list[tuple[int, TaskStatusRow]] = []
    leased_in_ranges = range_lease_statuses(txn, keys, lo, hi)
    # One scan instead of one read per task, so a chunk costs a server two queries.
    statuses = dict(txn.scan(keys.statuses + pack_int(lo), keys.statuses + pack_int(hi)))
    for key, _ in bodies:
        packed_seq = key[len(keys.bodies) :]
        seq = unpack_seq(packed_seq)
        row = statuses.get(keys.statuses + packed_seq)
        status = (
            leased_in_ranges.get(seq, NEW_STATUS)
            if row is None
            else logged_part(decode_status(row))
        )
        if status == NEW_STATUS:
            fresh.append(seq)
        else:
            tasks.append((seq, status))
    return CheckpointChunk(lo, hi, height, fresh, tasks, digest_rows([row for _, row in bodies]))


def logged_part(status: TaskStatusRow) -> TaskStatusRow:
    """Return the part of a status that the log determines."""
    return replace(status, waits=0, awaited=False, redriven_by=0, result=b"", blob=b"")


def _delete_range(txn: Txn, lo: bytes, hi: bytes, limit: int) -> int:
    rows = txn.scan(lo, hi, limit) if limit > 0 and lo < hi else []
    for key, _ in rows:
        txn.delete(key)
    return len(rows)


def _key(keys: TaskKeys, name: str) -> bytes:
    return keys.checkpoints + tuples.pack((name,))


def _chunk_key(keys: TaskKeys, number: int, n: int) -> bytes:
    return _key(keys, "c") + pack_int(number) + pack_int(n)


def _load_index(txn: Txn, keys: TaskKeys) -> CheckpointIndex:
    row = txn.get(_key(keys, "now"))
    return CheckpointIndex() if row is None else codec.unpack_as(CheckpointIndex, row)


def _load_in_progress(txn: Txn, keys: TaskKeys) -> CheckpointInProgress | None:
    row = txn.get(_key(keys, "building"))
    return None if row is None else codec.unpack_as(CheckpointInProgress, row)
