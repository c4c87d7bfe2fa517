"""Checkpoints of the log: where a replay may begin, so that what lies below can go.

A checkpoint is every task that is kept, with its status, in chunks by seq. Nothing stands still while
it is made: each chunk is read from a snapshot of its own and says at which height of the log that was.
A replay starts at the height where the checkpoint began, and skips for each task what its chunk knows
already. So no snapshot is old, no transaction large, and no worker waits.

    h "now"                 which checkpoints there are: the latest, and the one before
    h "building"            the one that is being made, and by which try
    h "c" <number> <n>      chunks

The log is kept from the one before the latest. So the latest can itself be verified: it must be what
a replay from the one before makes of the log (`verify`).

One is due when the log has grown by more than the last one took, so that making them costs no more
than a constant for each record. Two who make one at once do no harm: a try that was superseded is
refused, and what it left behind is swept.
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
from holdfast.tasks.records import digest_of
from holdfast.tasks.rows import FRESH, Keys, Status, decode_status, keys_of, pack, pack_int, seq_of
from holdfast.tasks.runs import held_between

# The log may always grow by this much.
LOG_BYTES_MIN = 4 * 1024 * 1024
CHUNK_TASKS = 1_000
# Chunks end early where bodies are large.
CHUNK_BYTES = 2 * 1024 * 1024
# Whoever has not come to the next chunk for so long is taken for dead.
STALLED_NS = 60 * S
SWEEP = 200


class Chunk(Record, frozen=True):
    """Tasks with lo <= seq < hi, as they were at a height: those that nobody has touched yet, and
    those with a status, which is kept without its result. `digest` is of all their bodies."""

    lo: int
    hi: int
    height: int
    fresh: list[int]
    tasks: list[tuple[int, Status]]
    digest: bytes


class Checkpoint(Record, frozen=True):
    number: int = 0
    # The log after this height is what a replay needs.
    height: int = 0
    # Tasks with a higher seq were created after this height.
    last: int = 0
    chunks: int = 0
    bytes: int = 0


class Now(Record, frozen=True):
    latest: Checkpoint = Checkpoint()
    before: Checkpoint = Checkpoint()
    # Numbers given, and how long the log was when the latest was begun.
    numbers: int = 0
    logged: int = 0


class Building(Record, frozen=True):
    checkpoint: Checkpoint
    moved_ns: int
    logged: int


def due(store: Store, universe: str) -> bool:
    return store.read(due_in, universe)


def make(store: Store, universe: str, going: Callable[[], bool] = lambda: True) -> bool:
    """Make one, and let go of the log below the one before; whether this was the one to do so.

    A maker that stops asks `going` between two steps: another one begins anew after `STALLED_NS`.
    """
    begun: Checkpoint | None = store.transact(begin, universe)
    if begun is None:
        return False
    at, n, size = 0, 0, 0
    while at <= begun.last:
        chunk = store.read(_read_chunk, universe, at, begun.last)
        packed = zlib.compress(pack(chunk), 1)
        if not going() or not store.transact(add, universe, begun.number, n, packed):
            return False
        at, n, size = chunk.hi, n + 1, size + len(packed)
    if not store.transact(install, universe, begun.number, n, size):
        return False
    while store.transact(sweep, universe, SWEEP) and going():
        pass
    return True


def current(txn: Txn, universe: str) -> Now:
    return _now(txn, keys_of(universe))


def chunks(txn: Txn, universe: str, checkpoint: Checkpoint) -> Iterator[Chunk]:
    """Those of a checkpoint, by seq. One of number 0 is the beginning of the log, and has none."""
    keys = keys_of(universe)
    for n in range(checkpoint.chunks):
        row = txn.get(_chunk_key(keys, checkpoint.number, n))
        if row is not None:
            yield codec.unpack_as(Chunk, zlib.decompress(row))


# -- steps of making one -------------------------------------------------------------------------


@operation
def begin(txn: Txn, universe: str) -> Checkpoint | None:
    """Begin one at the head of the log, unless somebody is at it."""
    keys = keys_of(universe)
    now, building = _now(txn, keys), _building(txn, keys)
    if building is not None and txn.now_ns < building.moved_ns + STALLED_NS:
        return None
    height = journal.head(txn, keys.subject).height
    if height <= now.latest.height:
        return None
    begun = Checkpoint(now.numbers + 1, height, txn.count(keys.seq))
    txn.put(_row(keys, "now"), pack(replace(now, numbers=begun.number)))
    logged = txn.count(keys.logged)
    txn.put(_row(keys, "building"), pack(Building(begun, txn.now_ns, logged)))
    return begun


@operation
def add(txn: Txn, universe: str, number: int, n: int, packed: bytes) -> bool:
    keys = keys_of(universe)
    building = _building(txn, keys)
    if building is None or building.checkpoint.number != number:
        return False
    txn.put(_chunk_key(keys, number, n), packed)
    txn.put(_row(keys, "building"), pack(replace(building, moved_ns=txn.now_ns)))
    return True


@operation
def install(txn: Txn, universe: str, number: int, chunks: int, size: int) -> bool:
    """From here on it is the latest. What the one before it stood for may go."""
    keys = keys_of(universe)
    now, building = _now(txn, keys), _building(txn, keys)
    if building is None or building.checkpoint.number != number:
        return False
    made = replace(building.checkpoint, chunks=chunks, bytes=size)
    after = Now(made, now.latest, now.numbers, building.logged)
    txn.put(_row(keys, "now"), pack(after))
    txn.delete(_row(keys, "building"))
    if now.latest.height:
        journal.checkpoint(txn, keys.subject, now.latest.height)
    return True


@operation
def sweep(txn: Txn, universe: str, limit: int) -> int:
    """Remove log entries and chunks that nothing refers to any more; how many."""
    keys = keys_of(universe)
    now, building = _now(txn, keys), _building(txn, keys)
    kept = {now.latest.number, now.before.number}
    if building is not None:
        kept.add(building.checkpoint.number)
    gone = 0
    prefix = _row(keys, "c")
    at = prefix
    for number in sorted(kept):
        end = prefix + pack_int(number)
        gone += _delete(txn, at, end, limit - gone)
        at = tuples.after(end)
    gone += _delete(txn, at, tuples.after(prefix), limit - gone)
    if gone < limit:
        gone += journal.truncate(txn, keys.subject, min(limit - gone, BATCH_MAX))
    return gone


# -- inside --------------------------------------------------------------------------------------


def due_in(txn: Txn, universe: str) -> bool:
    """`due`, for a reader that has a transaction."""
    keys = keys_of(universe)
    now, building = _now(txn, keys), _building(txn, keys)
    if building is not None and txn.now_ns < building.moved_ns + STALLED_NS:
        return False
    return txn.count(keys.logged) - now.logged > max(LOG_BYTES_MIN, now.latest.bytes)


def _read_chunk(txn: Txn, universe: str, lo: int, last: int) -> Chunk:
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
    hi = last + 1 if whole else seq_of(bodies[-1][0][len(keys.bodies) :]) + 1
    fresh: list[int] = []
    tasks: list[tuple[int, Status]] = []
    held = held_between(txn, keys, lo, hi)
    # One scan, and not a question for each task: a server is asked twice for a chunk.
    statuses = dict(txn.scan(keys.statuses + pack_int(lo), keys.statuses + pack_int(hi)))
    for key, _ in bodies:
        packed_seq = key[len(keys.bodies) :]
        seq = seq_of(packed_seq)
        row = statuses.get(keys.statuses + packed_seq)
        status = held.get(seq, FRESH) if row is None else logged(decode_status(row))
        if status == FRESH:
            fresh.append(seq)
        else:
            tasks.append((seq, status))
    return Chunk(lo, hi, height, fresh, tasks, digest_of([row for _, row in bodies]))


def logged(status: Status) -> Status:
    """The part of a status that the log alone decides."""
    return replace(status, waits=0, awaited=False, redriven_by=0, result=b"", blob=b"")


def _delete(txn: Txn, lo: bytes, hi: bytes, limit: int) -> int:
    rows = txn.scan(lo, hi, limit) if limit > 0 and lo < hi else []
    for key, _ in rows:
        txn.delete(key)
    return len(rows)


def _row(keys: Keys, name: str) -> bytes:
    return keys.checkpoints + tuples.pack((name,))


def _chunk_key(keys: Keys, number: int, n: int) -> bytes:
    return _row(keys, "c") + pack_int(number) + pack_int(n)


def _now(txn: Txn, keys: Keys) -> Now:
    row = txn.get(_row(keys, "now"))
    return Now() if row is None else codec.unpack_as(Now, row)


def _building(txn: Txn, keys: Keys) -> Building | None:
    row = txn.get(_row(keys, "building"))
    return None if row is None else codec.unpack_as(Building, row)
