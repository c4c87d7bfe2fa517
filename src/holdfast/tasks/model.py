"""The data model of tasks: records, key spaces and counters.

A task has two rows. The body holds the work. It is written once, together with the `TaskCreated`
record. The status holds the progress. A new task has no status row and is WAITING. A task under a
range lease has none either (`row_ranges`).

A waiting task is in exactly one wait state. The left column is the stored name.

    ready     w <queue> <kind> <-priority> <seq>   can be granted; a row holds one task or a range
              f …                                  the same for a task with a limit key (`fair_turns`)
    suspect   y <queue> <kind> <-priority> <seq>   quarantined: one more expiry makes it DEAD; granted alone
    parked    p <queue> <limit> …                  throttled: its limit has no free slot
    stray     u <queue> <name> …                   unroutable: the requesting worker does not define this name
    delayed   d <not_before> <seq>                 the value is the index key after the delay
    blocked   (no row)                             open dependencies: `a <dependency> <seq>`
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import Any
from zlib import crc32

import msgspec

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.durable import load_limits
from holdfast.errors import StoreCorrupt
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks.states import TaskState

pack = codec.pack
pack_int = tuples.pack_int

# The wait states of a WAITING task. Each one is a counter in `TaskCounts`.
WAIT_STATES = ("ready", "suspect", "parked", "stray", "delayed", "blocked")


TASK_TOPICS = 256
QUEUE_TOPICS = 512
# Executor kinds: threads, an event loop, processes.
THREAD, LOOP, PROCESS = EXECUTOR_KINDS = range(3)


class TaskSpec(Record, frozen=True):
    """The properties that tasks of one kind share. Stored once, under its hash."""

    name: str
    queue: str = "default"
    priority: int = 0
    lease_ns: int = 60 * S
    # The task is FAILED after this many failures, and DEAD after this many lease expiries.
    attempts: int = 5
    expiries_max: int = 3
    # The execution window: the lease is extended this long without progress.
    window_ns: int = 300 * S
    # Retention of the task after its end.
    retain_ns: int = 7 * 24 * 3600 * S
    # Exponential backoff between attempts: the first delay and the maximum.
    backoff_ns: int = S // 10
    backoff_ns_max: int = 60 * S
    # The executor kind. Each kind has its own queue index, so kinds do not block each other.
    kind: int = 0
    # The component that gets a call when a task of this kind is DEAD (`owner_callbacks`).
    owner: str = ""


class TaskBodyRow(Record, frozen=True):
    """The immutable part of a task, as submitted."""

    spec: bytes
    args: bytes
    created_ns: int
    generation: int
    not_before_ns: int = 0
    key: str = ""
    # The limit key. `QueueLimits.per_key` bounds the leased tasks of each key of a queue.
    limit: str = ""
    after: tuple[int, ...] = ()
    redrive_of: int = 0
    # The blob of large arguments.
    blob: bytes = b""
    # The trace context of the submission (`traces`). No digest of arguments includes it.
    trace: bytes = b""
    tag: str = ""


class TaskStatusRow(Record, frozen=True):
    """The mutable part of a task: the fold of its log records (`status_fold`), and its result."""

    state: int = TaskState.WAITING
    # The number of grants (document 003).
    attempt: int = 0
    failures: int = 0
    expiries: int = 0
    lease: int = 0
    worker: str = ""
    expires_ns: int = 0
    granted_ns: int = 0
    # The time of the last progress report, or of the grant.
    progress_ns: int = 0
    not_before_ns: int = 0
    # The number of open dependencies, and whether this task has dependents.
    waits: int = 0
    awaited: bool = False
    ended_ns: int = 0
    reason: str = ""
    error: str = ""
    redriven_by: int = 0
    result: bytes = b""
    blob: bytes = b""


NEW_STATUS = TaskStatusRow()


def is_batchable(body: TaskBodyRow) -> bool:
    """Whether the task differs from its batch only in its arguments. Only such tasks form ranges."""
    return not (
        body.key
        or body.limit
        or body.after
        or body.not_before_ns
        or body.blob
        or body.redrive_of
        or body.tag
    )


def is_quarantined(spec: TaskSpec, status: TaskStatusRow) -> bool:
    """Whether the next lease expiry makes the task DEAD. It then runs alone in its worker, because
    it may be the task that kills workers. A task without any expiry runs with other tasks. A task
    in its own process does, too, because it cannot kill the worker.
    """
    return 0 < status.expiries >= spec.expiries_max - 1 and spec.kind != PROCESS


class QueueLimits(Record, frozen=True):
    """The maximum number of leased tasks of a queue and of each limit key. 0 means unlimited. Whether an operator
    paused the queue."""

    concurrency: int = 0
    per_key: int = 0
    # The last declared values. Only a changed declaration overrides later settings of an operator.
    declared: tuple[int, int] | None = None
    # The store time of the pause of the queue; 0: it is not paused. A paused queue grants no task.
    paused_ns: int = 0


class TaskCounts(Record, frozen=True):
    """The number of tasks of a queue in each wait state and state."""

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
        return sum(getattr(self, place) for place in WAIT_STATES)


NO_TASKS = TaskCounts()


class TaskKeys:
    """The key spaces of one universe's tasks."""

    def __init__(self, universe: str) -> None:
        def space(*path: tuples.Element) -> bytes:
            return schema.key_prefix(schema.Space.TASK, universe, *path)

        self.universe = universe
        self.load_limits = load_limits.limits_key(universe)
        self.seq_counter = space("seq")
        self.lease_counter = space("lease")
        self.bodies = space("b")
        self.statuses = space("t")
        self.specs = space("s")
        self.ready = space("w")
        self.fair = space("f")
        self.fair_places = space("fp")
        self.fair_groups = space("fg")
        self.fair_reached = space("ft")
        self.fair_counts = space("fn")
        self.quarantined = space("y")
        self.throttled = space("p")
        self.unroutable = space("u")
        self.delayed = space("d")
        self.dependents = space("a")
        self.pending_releases = space("e")
        self.expiries = space("x")
        self.range_leases = space("l")
        self.range_lease_starts = space("i")
        self.idempotency_keys = space("k")
        self.tags = space("tag")
        self.listed = space("li")
        self.listed_since = space("ls")
        self.retained = space("r")
        self.counts = space("n")
        self.limits = space("q")
        self.leased_per_limit = space("c")
        self.progress = space("g")
        self.checkpoints = space("h")
        self.log_bytes = space("bytes")
        self.subject = f"tasks/{universe}"
        self.revocations = space("v")
        self._task_topics = [f"tasks/{universe}/task/{n}" for n in range(TASK_TOPICS)]
        self.revoked_topic = f"tasks/{universe}/revoked"

    def worker_topic(self, worker: str) -> str:
        return f"tasks/{self.universe}/worker/{worker}"

    def queue_topic(self, queue: str) -> str:
        """Return the topic notified when this queue has work. Queues share a bounded number of
        topics, because HTTP clients choose queue names and each topic takes memory in the client
        and in the writer.
        """
        bucket = crc32(queue.encode(errors="surrogatepass")) % QUEUE_TOPICS
        return f"tasks/{self.universe}/queue/{bucket}"

    def task_topic(self, seq: int) -> str:
        """Return the topic notified when this task ends. Tasks share a bounded number of topics."""
        return self._task_topics[seq % len(self._task_topics)]


@lru_cache(1024)
def keys_of(universe: str) -> TaskKeys:
    return TaskKeys(universe)


@lru_cache(4096)
def pack_text(text: str) -> bytes:
    return tuples.pack((text,))


def index_key(spec: TaskSpec, packed_seq: bytes) -> bytes:
    """Return the index key of a task: queue, kind, priority, seq."""
    return queue_index(spec.queue, spec.kind, spec.priority) + packed_seq


@lru_cache(4096)
def queue_index(queue: str, kind: int, priority: int) -> bytes:
    return tuples.pack((queue, kind, -priority))


# A cache of specs by hash. It is valid for every store.
_specs: dict[bytes, TaskSpec] = {}
_SPECS_MAX = 10_000

decode_body = codec.decoder(TaskBodyRow).decode
decode_status = codec.decoder(TaskStatusRow).decode


def spec_hash(spec: TaskSpec) -> bytes:
    return hash_of_row(pack(spec))


def hash_of_row(row: bytes) -> bytes:
    """The hash under which the packed row of a spec is stored."""
    return sha256(row).digest()[:16]


def get_spec(txn: Txn, keys: TaskKeys, spec_hash: bytes) -> TaskSpec:
    spec = _specs.get(spec_hash)
    if spec is None:
        row = txn.get(keys.specs + tuples.pack((spec_hash,)))
        assert row is not None, "a body names a spec that is not there"
        if len(_specs) >= _SPECS_MAX:
            _specs.clear()
        spec = _specs[spec_hash] = codec.unpack_as(TaskSpec, row)
    return spec


def get_body(txn: Txn, keys: TaskKeys, packed_seq: bytes) -> TaskBodyRow | None:
    row = txn.get(keys.bodies + packed_seq)
    return None if row is None else decode_body(row)


def dangling_row(packed_seq: bytes) -> StoreCorrupt:
    """Build the error for a row that refers to a missing task."""
    why = "a row refers to a missing task; run `holdfast verify` for a full check"
    return StoreCorrupt(what="task", seq=unpack_seq(packed_seq), why=why)


def unpack_seq(packed_seq: bytes) -> int:
    return tuples.unpack_last_int(packed_seq, 0)


def decode_int_at(key: bytes, at: int) -> int:
    """Decode the non-negative integer at this offset of a key."""
    return int.from_bytes(key[at + 1 : int_end(key, at)], "big")


def int_end(key: bytes, at: int) -> int:
    """Return the end offset of the integer at this offset of a key."""
    return at + 1 + abs(key[at] - tuples.pack_int(0)[0])


class CountDeltas:
    """The counter changes of one operation, by queue. Written once, at the end."""

    def __init__(self, txn: Txn, keys: TaskKeys) -> None:
        self._txn = txn
        self._keys = keys
        self._counts: dict[str, TaskCounts] = {}
        self._deltas: dict[str, dict[str, int]] = {}

    def add(self, queue: str, counter: str, n: int = 1) -> None:
        deltas = self._deltas.get(queue)
        if deltas is None:
            deltas = self._deltas[queue] = {}
        deltas[counter] = deltas.get(counter, 0) + n

    def current(self, queue: str, counter: str) -> int:
        """Return the stored count plus the changes of this operation."""
        count: int = getattr(self._stored(queue), counter)
        return count + self._deltas.get(queue, {}).get(counter, 0)

    def waiting(self, queue: str) -> int:
        """Return the number of waiting tasks of a queue, with the changes of this operation."""
        return self._stored(queue).waiting + _waiting_change(self._deltas.get(queue, {}))

    def waiting_delta(self) -> int:
        """Return the change of the number of waiting tasks of all queues that `save` has not written."""
        return sum(map(_waiting_change, self._deltas.values()))

    def save(self) -> None:
        for queue, deltas in self._deltas.items():
            counts = self._stored(queue)
            after: Any = msgspec.structs.replace(
                counts, **{place: getattr(counts, place) + n for place, n in deltas.items()}
            )
            key = self._keys.counts + pack_text(queue)
            if after == NO_TASKS:
                # Applications may create a queue per day or customer: an empty queue leaves no row.
                self._txn.delete(key)
            else:
                self._txn.put(key, pack(after))
            self._counts[queue] = after
        self._deltas = {}

    def _stored(self, queue: str) -> TaskCounts:
        counts = self._counts.get(queue)
        if counts is None:
            counts = self._counts[queue] = get_counts(self._txn, self._keys, queue)
        return counts


def _waiting_change(deltas: dict[str, int]) -> int:
    return sum(n for place, n in deltas.items() if place in WAIT_STATES)


def get_counts(txn: Txn, keys: TaskKeys, queue: str) -> TaskCounts:
    row = txn.get(keys.counts + pack_text(queue))
    return TaskCounts() if row is None else codec.unpack_as(TaskCounts, row)


def get_limits(txn: Txn, keys: TaskKeys, queue: str) -> QueueLimits:
    row = txn.get(keys.limits + pack_text(queue))
    return QueueLimits() if row is None else codec.unpack_as(QueueLimits, row)
