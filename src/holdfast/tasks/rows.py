"""What is stored of a task, and where.

A task is two rows. The body says what is to be done; it is written once, with the record that
created the task, and is that record's content. The status says how far it is. A task that nobody has
touched has none and is WAITING; and so has one that was leased in a run, as long as nothing else
happens to it (`runs`).

A task that waits is in one place exactly:

    ready     w <queue> <kind> <-priority> <seq>      the next to be granted, or the first of a run of them
    suspect   y <queue> <kind> <-priority> <seq>           one more expiry is its last: granted by itself
    parked    p <queue> <limit> …                     as many of its limit are leased as may be
    stray     u <queue> <name> …                      whoever asked knows no task of this name
    delayed   d <not_before> <seq>                    the value is the key that it will have
    blocked   (nowhere)                               others have to end first: `a <other> <seq>`
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from zlib import crc32

import msgspec

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.errors import StoreCorrupt
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks.states import State

pack = codec.pack
pack_int = tuples.pack_int

# How tasks that are not waiting for anything are told from each other in the counts.
PLACES = ("ready", "suspect", "parked", "stray", "delayed", "blocked")


TASK_TOPICS = 256
QUEUE_TOPICS = 512
# Kinds of hands: threads, an event loop, processes.
THREAD, LOOP, PROCESS = KINDS = range(3)


class Spec(Record, frozen=True):
    """What tasks submitted alike have in common; stored once, by its hash."""

    name: str
    queue: str = "default"
    priority: int = 0
    lease_ns: int = 60 * S
    # Failures after which it is FAILED, and expiries after which it is DEAD.
    attempts: int = 5
    expiries_max: int = 3
    # How long a lease is extended without a word of progress.
    window_ns: int = 300 * S
    # How long the task is kept once it has ended.
    retain_ns: int = 7 * 24 * 3600 * S
    # Pauses between attempts: the first, doubled each time, up to the longest.
    backoff_ns: int = S // 10
    backoff_ns_max: int = 60 * S
    # What kind of hands it takes: each has a lane of its own, so that none waits for another's.
    kind: int = 0


class Body(Record, frozen=True):
    """A task as it was created. It never changes."""

    spec: bytes
    args: bytes
    created_ns: int
    generation: int
    not_before_ns: int = 0
    key: str = ""
    # Tasks of one queue and limit are leased so many at a time (`Limits.per_key`).
    limit: str = ""
    after: tuple[int, ...] = ()
    redrive_of: int = 0
    # The blob that holds the arguments, if they are large.
    blob: bytes = b""


class Status(Record, frozen=True):
    """How far a task is: a fold of the records that name it (`board`), and its result."""

    state: int = State.WAITING
    # Grants, as document 003 counts them.
    attempt: int = 0
    failures: int = 0
    expiries: int = 0
    lease: int = 0
    worker: str = ""
    expires_ns: int = 0
    granted_ns: int = 0
    # When the attempt last showed that it goes on; its beginning counts.
    progress_ns: int = 0
    not_before_ns: int = 0
    # Others that have to end first, and whether others wait for this one.
    waits: int = 0
    awaited: bool = False
    ended_ns: int = 0
    reason: str = ""
    error: str = ""
    redriven_by: int = 0
    result: bytes = b""
    blob: bytes = b""


FRESH = Status()


def is_plain(body: Body) -> bool:
    """Whether it is like the others of its batch but for its arguments: only such are in runs."""
    return not (
        body.key or body.limit or body.after or body.not_before_ns or body.blob or body.redrive_of
    )


def is_suspect(spec: Spec, status: Status) -> bool:
    """Whether it has outlived a lease, and the next would be its last. If it kills its workers, nobody
    else shall be leased beside it then. One that has had no chance yet may be leased with others, and
    so may one in a process of its own, which hurts nobody else."""
    return 0 < status.expiries >= spec.expiries_max - 1 and spec.kind != PROCESS


class Limits(Record, frozen=True):
    """How many tasks of a queue, and of each limit in it, are leased at a time; 0 is any number."""

    concurrency: int = 0
    per_key: int = 0
    # What the app declared last: only another declaration overrules what an operator has set since.
    declared: tuple[int, int] | None = None


class Counts(Record, frozen=True):
    """How many tasks of a queue are in each place or state."""

    ready: int = 0
    suspect: int = 0
    parked: int = 0
    delayed: int = 0
    blocked: int = 0
    leased: int = 0
    completed: int = 0
    failed: int = 0
    dead: int = 0
    stray: int = 0

    @property
    def waiting(self) -> int:
        return sum(getattr(self, place) for place in PLACES)


NONE = Counts()


class Keys:
    """The key spaces of one universe's tasks."""

    def __init__(self, universe: str) -> None:
        def space(*path: tuples.Element) -> bytes:
            return schema.prefix(schema.Space.TASK, universe, *path)

        self.universe = universe
        self.seq = space("seq")
        self.lease = space("lease")
        self.bodies = space("b")
        self.statuses = space("t")
        self.specs = space("s")
        self.ready = space("w")
        self.suspects = space("y")
        self.parked = space("p")
        self.strays = space("u")
        self.delayed = space("d")
        self.dependents = space("a")
        self.ended = space("e")
        self.expiries = space("x")
        self.held = space("l")
        self.held_at = space("i")
        self.keys = space("k")
        self.retained = space("r")
        self.counts = space("n")
        self.limits = space("q")
        self.running = space("c")
        self.progress = space("g")
        self.checkpoints = space("h")
        self.logged = space("bytes")
        self.subject = f"tasks/{universe}"
        self.revocations = space("v")
        self._task_topics = [f"tasks/{universe}/task/{n}" for n in range(TASK_TOPICS)]
        self.revoked = f"tasks/{universe}/revoked"

    def worker_topic(self, worker: str) -> str:
        return f"tasks/{self.universe}/worker/{worker}"

    def queue_topic(self, queue: str) -> str:
        """Rings when one of some queues, this one among them, has work. Requests over HTTP name any queue,
        and each topic takes memory in the client and in the writer, so their number is bounded."""
        bucket = crc32(queue.encode(errors="surrogatepass")) % QUEUE_TOPICS
        return f"tasks/{self.universe}/queue/{bucket}"

    def task_topic(self, seq: int) -> str:
        """Rings when one of some tasks, this one among them, has ended: a bounded number of topics."""
        return self._task_topics[seq % len(self._task_topics)]


@lru_cache(1024)
def keys_of(universe: str) -> Keys:
    return Keys(universe)


@lru_cache(4096)
def packed_text(text: str) -> bytes:
    return tuples.pack((text,))


def order(spec: Spec, packed_seq: bytes) -> bytes:
    """The place of a task in its queue: queue, kind, priority, seq."""
    return lane(spec.queue, spec.kind, spec.priority) + packed_seq


@lru_cache(4096)
def lane(queue: str, kind: int, priority: int) -> bytes:
    return tuples.pack((queue, kind, -priority))


# Specs are named by their hash, so what is remembered of one is true for any store.
_specs: dict[bytes, Spec] = {}
_SPECS_MAX = 10_000

decode_body = codec.decoder(Body).decode
decode_status = codec.decoder(Status).decode


def name_of(spec: Spec) -> bytes:
    return codec.digest_of(spec)[:16]


def spec_of(txn: Txn, keys: Keys, name: bytes) -> Spec:
    found = _specs.get(name)
    if found is None:
        row = txn.get(keys.specs + tuples.pack((name,)))
        assert row is not None, "a body names a spec that is not there"
        if len(_specs) >= _SPECS_MAX:
            _specs.clear()
        found = _specs[name] = codec.unpack_as(Spec, row)
    return found


def body_of(txn: Txn, keys: Keys, packed_seq: bytes) -> Body | None:
    row = txn.get(keys.bodies + packed_seq)
    return None if row is None else decode_body(row)


def missing(packed_seq: bytes) -> StoreCorrupt:
    """A row names a task that is not there: nothing may go on as if it were."""
    why = "a row names it, and it is not there; `holdfast verify` says what else is wrong"
    return StoreCorrupt(what="task", seq=seq_of(packed_seq), why=why)


def seq_of(packed_seq: bytes) -> int:
    return tuples.unpack_last_int(packed_seq, 0)


def int_at(key: bytes, at: int) -> int:
    """The integer that stands here in a key; it is not negative."""
    return int.from_bytes(key[at + 1 : after_int(key, at)], "big")


def after_int(key: bytes, at: int) -> int:
    """Where the integer that stands here ends."""
    return at + 1 + abs(key[at] - tuples.pack_int(0)[0])


class Tally:
    """What an operation changes in the counts, by queue; saved once, at its end."""

    def __init__(self, txn: Txn, keys: Keys) -> None:
        self._txn = txn
        self._keys = keys
        self._counts: dict[str, Counts] = {}
        self._deltas: dict[str, dict[str, int]] = {}

    def add(self, queue: str, place: str, n: int = 1) -> None:
        deltas = self._deltas.get(queue)
        if deltas is None:
            deltas = self._deltas[queue] = {}
        deltas[place] = deltas.get(place, 0) + n

    def now(self, queue: str, place: str) -> int:
        """How many there are, with what was added so far."""
        count: int = getattr(self._before(queue), place)
        return count + self._deltas.get(queue, {}).get(place, 0)

    def save(self) -> None:
        for queue, deltas in self._deltas.items():
            counts = self._before(queue)
            after: Any = msgspec.structs.replace(
                counts, **{place: getattr(counts, place) + n for place, n in deltas.items()}
            )
            key = self._keys.counts + packed_text(queue)
            if after == NONE:
                # Queues may be made by the day, or for each customer: nothing is left of one.
                self._txn.delete(key)
            else:
                self._txn.put(key, pack(after))
            self._counts[queue] = after
        self._deltas = {}

    def _before(self, queue: str) -> Counts:
        found = self._counts.get(queue)
        if found is None:
            found = self._counts[queue] = counts_of(self._txn, self._keys, queue)
        return found


def counts_of(txn: Txn, keys: Keys, queue: str) -> Counts:
    row = txn.get(keys.counts + packed_text(queue))
    return Counts() if row is None else codec.unpack_as(Counts, row)


def limits_of(txn: Txn, keys: Keys, queue: str) -> Limits:
    row = txn.get(keys.limits + packed_text(queue))
    return Limits() if row is None else codec.unpack_as(Limits, row)
