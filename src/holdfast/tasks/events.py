"""Log events: the records of the task log (write-ahead log) and their storage format.

Document 003 defines eight records, `TaskCreated` … `TaskDead`. Operations decide in batches, so the
log stores records in columns: one `LeasesGranted` holds the `LeaseGranted` of many tasks. A log
entry holds the records of one operation in order. `iter_records` expands an entry into one record
per task for a replay. A record carries its outcome (the next state, the time of the next attempt),
so a replay needs neither clock nor policy.

The log does not repeat task bodies. A body is immutable and written in the same commit.
`TasksCreated` holds the hash of its bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import TypeAlias

import msgspec

from holdfast import codec
from holdfast.durable import journal
from holdfast.store.api import Txn
from holdfast.tasks.model import TaskBodyRow, TaskKeys


class _ColumnarRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class TasksCreated(_ColumnarRecord, frozen=True, tag=1):
    tasks: list[int]
    digest: bytes


class LeasesGranted(_ColumnarRecord, frozen=True, tag=2):
    lease: int
    worker: str
    expires_ns: int
    tasks: list[int]


class LeasesExtended(_ColumnarRecord, frozen=True, tag=3):
    tasks: list[int]
    leases: list[int]
    expires_ns: list[int]
    progressed: list[bool]


class LeasesExpired(_ColumnarRecord, frozen=True, tag=4):
    lease: int
    tasks: list[int]


class TasksCompleted(_ColumnarRecord, frozen=True, tag=5):
    tasks: list[int]
    leases: list[int]
    digest: bytes


class AttemptFailed(_ColumnarRecord, frozen=True, tag=6):
    """A failed attempt. `counts` selects the counter: "failure", "expiry" (the process died), or ""
    (released unstarted). `final` means the task is FAILED. Otherwise it waits until
    `not_before_ns`.
    """

    task: int
    lease: int
    reason: str
    error: str
    counts: str
    final: bool
    not_before_ns: int


class StaleReport(_ColumnarRecord, frozen=True, tag=7):
    """A report under a lost lease. The worker gets CANCELLED and the task does not change."""

    task: int
    lease: int
    worker: str


class TasksDead(_ColumnarRecord, frozen=True, tag=8):
    tasks: list[int]
    reason: str


StoredRecord: TypeAlias = (
    TasksCreated
    | LeasesGranted
    | LeasesExtended
    | LeasesExpired
    | TasksCompleted
    | AttemptFailed
    | StaleReport
    | TasksDead
)


class TaskLogEntry(codec.Record, frozen=True):
    decided_ns: int
    generation: int
    records: list[StoredRecord]


# -- one record per task ---------------------------------------------------------------------------


class TaskRecord(msgspec.Struct, frozen=True):
    """A record about one task. Fields other than `task_id` and `decided_at` depend on the kind."""

    task_id: int
    decided_at: int


class TaskCreated(TaskRecord, frozen=True):
    body: TaskBodyRow | None

    @property
    def created_at(self) -> int:
        return self.decided_at


class LeaseGranted(TaskRecord, frozen=True):
    lease_id: int
    worker_id: str
    expiry_timestamp: int


class LeaseExtended(TaskRecord, frozen=True):
    lease_id: int
    new_expiry_timestamp: int
    progressed: bool


class LeaseExpired(TaskRecord, frozen=True):
    lease_id: int


class TaskCompleted(TaskRecord, frozen=True):
    lease_id: int


class TaskFailed(TaskRecord, frozen=True):
    lease_id: int
    reason: str
    error: str
    counts: str
    final: bool
    not_before: int


class TaskCancelled(TaskRecord, frozen=True):
    lease_id: int
    worker_id: str


class TaskDead(TaskRecord, frozen=True):
    reason: str


def iter_records(
    entry: TaskLogEntry, get_body: Callable[[int], TaskBodyRow | None]
) -> Iterator[TaskRecord]:
    """Expand a log entry into one record per task, in decision order."""
    decided_ns = entry.decided_ns
    for record in entry.records:
        match record:
            case TasksCreated(tasks):
                for task in tasks:
                    yield TaskCreated(task, decided_ns, get_body(task))
            case LeasesGranted(lease, worker, expires_ns, tasks):
                for task in tasks:
                    yield LeaseGranted(task, decided_ns, lease, worker, expires_ns)
            case LeasesExtended():
                for row in zip(
                    record.tasks, record.leases, record.expires_ns, record.progressed, strict=True
                ):
                    yield LeaseExtended(row[0], decided_ns, *row[1:])
            case LeasesExpired(lease, tasks):
                for task in tasks:
                    yield LeaseExpired(task, decided_ns, lease)
            case TasksCompleted(tasks, leases):
                for task, lease in zip(tasks, leases, strict=True):
                    yield TaskCompleted(task, decided_ns, lease)
            case AttemptFailed():
                yield TaskFailed(
                    task_id=record.task,
                    decided_at=decided_ns,
                    lease_id=record.lease,
                    reason=record.reason,
                    error=record.error,
                    counts=record.counts,
                    final=record.final,
                    not_before=record.not_before_ns,
                )
            case StaleReport(task, lease, worker):
                yield TaskCancelled(task, decided_ns, lease, worker)
            case TasksDead(tasks, reason):
                for task in tasks:
                    yield TaskDead(task, decided_ns, reason)


# -- the log -------------------------------------------------------------------------------------


class TaskLog:
    """The log buffer of one operation, written as one entry at the end."""

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records: list[StoredRecord] = []

    def append(self, record: StoredRecord) -> None:
        self.records.append(record)

    def save(self, txn: Txn, keys: TaskKeys) -> None:
        if not self.records:
            return
        entry = TaskLogEntry(txn.now_ns, txn.generation, self.records)
        body = codec.pack(entry)
        journal.append(txn, keys.subject, [body])
        # The total log size. `checkpoint` uses it to decide when a checkpoint is due.
        txn.add(keys.log_bytes, len(body))
        self.records = []


def digest_rows(rows: list[bytes]) -> bytes:
    """Hash concatenated rows. Encoded rows are self-delimiting, so the concatenation is
    unambiguous.
    """
    return sha256(b"".join(rows)).digest()[:16]


def decode_entry(body: bytes) -> TaskLogEntry:
    return codec.unpack_as(TaskLogEntry, body)
