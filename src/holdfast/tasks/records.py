"""The log: what is written of every decision, before and together with its effect.

The eight records of document 003 are `TaskCreated` … `TaskDead`. Many decisions of one kind are made
together, so the log holds them in columns: one `Granted` is the `LeaseGranted` of many tasks. An
entry is what one operation decided, in order; `singles` gives its records one by one, as a replay
needs them. A record carries its outcome (the next state, the time of the next attempt), so a replay
asks no clock and knows no policy.

What a task is to do is not repeated in the log: its body, written in the same commit, never changes,
and `Created` holds the hash of the bodies it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import TypeAlias

import msgspec

from holdfast import codec
from holdfast.durable import journal
from holdfast.store.api import Txn
from holdfast.tasks.rows import Body, Keys


class _Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Created(_Column, frozen=True, tag=1):
    tasks: list[int]
    digest: bytes


class Granted(_Column, frozen=True, tag=2):
    lease: int
    worker: str
    expires_ns: int
    tasks: list[int]


class Extended(_Column, frozen=True, tag=3):
    tasks: list[int]
    leases: list[int]
    expires_ns: list[int]
    progressed: list[bool]


class Expired(_Column, frozen=True, tag=4):
    lease: int
    tasks: list[int]


class Completed(_Column, frozen=True, tag=5):
    tasks: list[int]
    leases: list[int]
    digest: bytes


class Failed(_Column, frozen=True, tag=6):
    """`counts` is what the failure counts as: "failure", "expiry" (its process died), or "" (given
    back unbegun). `final` says that the task is FAILED; else it waits until `not_before_ns`."""

    task: int
    lease: int
    reason: str
    error: str
    counts: str
    final: bool
    not_before_ns: int


class Cancelled(_Column, frozen=True, tag=7):
    """Somebody reported under a lease that is none: told so, and nothing changed."""

    task: int
    lease: int
    worker: str


class Dead(_Column, frozen=True, tag=8):
    tasks: list[int]
    reason: str


Stored: TypeAlias = Created | Granted | Extended | Expired | Completed | Failed | Cancelled | Dead


class Entry(codec.Record, frozen=True):
    decided_ns: int
    generation: int
    records: list[Stored]


# -- one by one ----------------------------------------------------------------------------------


class Single(msgspec.Struct, frozen=True):
    """One record about one task. All but `task_id` and `decided_at` depend on the kind."""

    task_id: int
    decided_at: int


class TaskCreated(Single, frozen=True):
    body: Body | None

    @property
    def created_at(self) -> int:
        return self.decided_at


class LeaseGranted(Single, frozen=True):
    lease_id: int
    worker_id: str
    expiry_timestamp: int


class LeaseExtended(Single, frozen=True):
    lease_id: int
    new_expiry_timestamp: int
    progressed: bool


class LeaseExpired(Single, frozen=True):
    lease_id: int


class TaskCompleted(Single, frozen=True):
    lease_id: int


class TaskFailed(Single, frozen=True):
    lease_id: int
    reason: str
    error: str
    counts: str
    final: bool
    not_before: int


class TaskCancelled(Single, frozen=True):
    lease_id: int
    worker_id: str


class TaskDead(Single, frozen=True):
    reason: str


def singles(entry: Entry, body: Callable[[int], Body | None]) -> Iterator[Single]:
    """The records of an entry, one for each task, in the order of their decision."""
    at = entry.decided_ns
    for record in entry.records:
        match record:
            case Created(tasks):
                for task in tasks:
                    yield TaskCreated(task, at, body(task))
            case Granted(lease, worker, expires_ns, tasks):
                for task in tasks:
                    yield LeaseGranted(task, at, lease, worker, expires_ns)
            case Extended():
                for row in zip(
                    record.tasks, record.leases, record.expires_ns, record.progressed, strict=True
                ):
                    yield LeaseExtended(row[0], at, *row[1:])
            case Expired(lease, tasks):
                for task in tasks:
                    yield LeaseExpired(task, at, lease)
            case Completed(tasks, leases):
                for task, lease in zip(tasks, leases, strict=True):
                    yield TaskCompleted(task, at, lease)
            case Failed():
                yield TaskFailed(
                    record.task,
                    at,
                    record.lease,
                    record.reason,
                    record.error,
                    record.counts,
                    record.final,
                    record.not_before_ns,
                )
            case Cancelled(task, lease, worker):
                yield TaskCancelled(task, at, lease, worker)
            case Dead(tasks, reason):
                for task in tasks:
                    yield TaskDead(task, at, reason)


# -- the log -------------------------------------------------------------------------------------


class Log:
    """What one operation decides, gathered, and written as one entry at its end."""

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records: list[Stored] = []

    def say(self, record: Stored) -> None:
        self.records.append(record)

    def save(self, txn: Txn, keys: Keys) -> None:
        if not self.records:
            return
        entry = Entry(txn.now_ns, txn.generation, self.records)
        body = codec.pack(entry)
        journal.append(txn, keys.subject, [body])
        # How long the log has grown: what `checkpoint` goes by.
        txn.add(keys.logged, len(body))
        self.records = []


def digest_of(rows: list[bytes]) -> bytes:
    """The hash of the rows a record stands for. Each is a record, so none runs into the next."""
    return sha256(b"".join(rows)).digest()[:16]


def decode(body: bytes) -> Entry:
    return codec.unpack_as(Entry, body)
