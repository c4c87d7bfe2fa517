"""Rig for task operations with simulated time. After every transaction it replays the log, compares it with the
rows and recounts the counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.clock import S, SimClock
from holdfast.durable import journal
from holdfast.durable.difference import Difference
from holdfast.ops import ended_count_check, error_group_check
from holdfast.store.api import Store, Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks import consistency, events, replay_check
from holdfast.tasks import operations as tasks
from holdfast.tasks.events import TaskLogEntry, TaskRecord
from holdfast.tasks.model import (
    NEW_STATUS,
    QueueLimits,
    TaskCounts,
    TaskSpec,
    TaskStatusRow,
    decode_status,
    get_body,
    get_counts,
    keys_of,
    pack_int,
    unpack_seq,
)
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    HeldLease,
    LeaseResult,
    ReportAnswer,
    TaskGrant,
    TaskReport,
    TaskToSubmit,
)
from holdfast.tasks.row_ranges import SEQ_END, get_status, range_lease_statuses
from holdfast.tasks.states import TaskState
from holdfast.tasks.status_fold import TaskFold

UNIVERSE = "u"
LEASE_NS = 60 * S
KEYS = keys_of(UNIVERSE)


class TaskOperationsRig:
    def __init__(self, store: Store, clock: SimClock) -> None:
        self.store = store
        self.clock = clock
        # Status rows at each log height.
        self.rows_by_height: dict[int, dict[int, TaskStatusRow]] = {0: {}}

    def transact(self, operation: Any, *args: Any) -> Any:
        try:
            return self.store.transact(operation, UNIVERSE, *args)
        finally:
            self.check_consistency()

    # -- operations ----------------------------------------------------------------------------

    def submit(self, *new: TaskToSubmit | bytes, **spec: Any) -> list[int]:
        """Submit tasks of one spec. Bytes are the arguments of a task without options."""
        new_tasks = [item if isinstance(item, TaskToSubmit) else TaskToSubmit(item) for item in new]
        spec.setdefault("name", "work")
        spec.setdefault("lease_ns", LEASE_NS)
        # A task is quarantined after one expired lease.
        spec.setdefault("expiries_max", 2)
        seqs: list[int] = self.transact(tasks.submit, TaskSpec(**spec), new_tasks)
        return seqs

    def submit_one(self, args: bytes = b"x", **options: Any) -> int:
        new = {name: options.pop(name) for name in _TASK_OPTIONS if name in options}
        return self.submit(TaskToSubmit(args, **new), **options)[0]

    def lease_result(
        self,
        limit: int = 100,
        *,
        worker: str = "w",
        queues: Sequence[str] = ("default",),
        alone: bool = False,
        names: Sequence[str] = (),
    ) -> LeaseResult:
        request = GrantRequest(worker, list(queues), limit, alone, names=tuple(names))
        leased: LeaseResult = self.transact(tasks.lease, request)
        return leased

    def lease(self, limit: int = 100, **options: Any) -> list[TaskGrant]:
        return self.lease_result(limit, **options).grants

    def lease_one(self, seq: int, *, alone: bool = False) -> TaskGrant:
        """Lease one task, which must be `seq`, and return its grant."""
        [grant] = self.lease(1, alone=alone)
        assert grant.seq == seq
        return grant

    def report(
        self, *reports: TaskReport, worker: str = "w", generation: int | None = None
    ) -> list[ReportAnswer]:
        generation = self.store.generation if generation is None else generation
        return [
            ReportAnswer(a)
            for a in self.transact(tasks.apply_reports, worker, generation, list(reports))
        ]

    def complete(self, grant: TaskGrant, result: bytes = b"r") -> ReportAnswer:
        return self.report(TaskReport(grant.seq, grant.lease, AttemptOutcome.OK, result))[0]

    def fail(
        self, grant: TaskGrant, end: AttemptOutcome = AttemptOutcome.FAILED, **options: Any
    ) -> ReportAnswer:
        return self.report(TaskReport(grant.seq, grant.lease, end, **options))[0]

    def extend(self, *held_leases: HeldLease, generation: int | None = None) -> list[int]:
        generation = self.store.generation if generation is None else generation
        expiries: list[int] = self.transact(tasks.extend, generation, list(held_leases))
        return expiries

    def cancel(self, *seqs: int, reason: str = "cancelled") -> list[bool]:
        cancelled: list[bool] = self.transact(tasks.cancel, list(seqs), reason)
        return cancelled

    def redrive(self, *seqs: int) -> list[int]:
        new_seqs: list[int] = self.transact(tasks.redrive, list(seqs))
        return new_seqs

    def set_limits(self, queue: str = "default", **limits: int) -> None:
        self.transact(tasks.set_limits, queue, QueueLimits(**limits))

    def set_paused(self, paused: bool, queue: str = "default") -> bool:
        changed: bool = self.transact(tasks.set_queue_paused, queue, paused)
        return changed

    def maintain(self, limit: int = 1000) -> int:
        step_count: int = self.transact(tasks.maintain, limit)
        return step_count

    def advance(self, ns: int) -> None:
        """Advance the clock by `ns` plus a margin: each commit advances store time by at least 1 ns."""
        self.clock.advance(ns + 1000)

    def advance_to(self, at_ns: int) -> None:
        """Advance the clock so that the next commit has exactly this time."""
        while self.store.now_ns() < at_ns:
            self.clock.advance(at_ns - self.store.now_ns())
        assert self.store.now_ns() == at_ns

    # -- queries -------------------------------------------------------------------------------

    def status(self, seq: int) -> TaskStatusRow:
        return self.store.read(get_status, KEYS, pack_int(seq))

    def state(self, seq: int) -> TaskState:
        return TaskState(self.status(seq).state)

    def states(self, *seqs: int) -> list[str]:
        return [self.state(seq).name for seq in seqs]

    def exists(self, seq: int) -> bool:
        return self.store.read(get_body, KEYS, pack_int(seq)) is not None

    def counts(self, queue: str = "default") -> TaskCounts:
        return self.store.read(get_counts, KEYS, queue)

    def entries(self) -> list[TaskLogEntry]:
        return self.store.read(_read_entries)

    def log(self) -> list[TaskRecord]:
        return [record for entry in self.entries() for record in entry_records(entry)]

    def record_kinds(self, seq: int) -> list[str]:
        """Kinds of the log records of a task, in order."""
        return [type(record).__name__ for record in self.log() if record.task_id == seq]

    def fold_log(self) -> TaskFold:
        return TaskFold().replay(self.log())

    def rows(self) -> dict[int, TaskStatusRow]:
        return self.store.read(_read_statuses)

    # -- consistency ---------------------------------------------------------------------------

    def check_consistency(self) -> None:
        differences, height, rows = self.store.read(_read_and_check)
        assert not differences, differences
        self.rows_by_height.setdefault(height, rows)
        # Every change of a logged status field needs a log entry. Soft state is excluded.
        before = {seq: status for seq, status in self.rows_by_height[height].items() if seq in rows}
        assert logged_fields(before) == logged_fields(rows), "rows changed, and the log did not"


_TASK_OPTIONS = ("delay_ns", "key", "limit", "after", "tag")


def entry_records(entry: TaskLogEntry) -> Iterator[TaskRecord]:
    return events.iter_records(entry, lambda seq: None)


def logged_fields(rows: dict[int, TaskStatusRow]) -> dict[int, dict[str, Any]]:
    """The logged fields of status rows."""
    return {
        seq: {field: getattr(status, field) for field in replay_check.LOGGED_FIELDS}
        for seq, status in rows.items()
    }


def _read_entries(txn: Txn) -> list[TaskLogEntry]:
    head = journal.head(txn, KEYS.subject)
    entries = journal.read(txn, KEYS.subject, head.floor, head.height + 1, 10_000)
    return [events.decode_entry(entry.body) for entry in entries]


def _read_statuses(txn: Txn) -> dict[int, TaskStatusRow]:
    rows = {
        unpack_seq(key[len(KEYS.bodies) :]): NEW_STATUS for key, _ in iter_rows(txn, KEYS.bodies)
    }
    rows |= range_lease_statuses(txn, KEYS, 0, SEQ_END)
    for key, row in iter_rows(txn, KEYS.statuses):
        rows[unpack_seq(key[len(KEYS.statuses) :])] = decode_status(row)
    return rows


def _read_and_check(
    txn: Txn,
) -> tuple[list[Difference], int, dict[int, TaskStatusRow]]:
    differences = [
        *replay_check.find_differences(txn, UNIVERSE),
        *consistency.find_differences(txn, UNIVERSE),
        *error_group_check.find_differences(txn, UNIVERSE),
        *ended_count_check.find_differences(txn, UNIVERSE),
    ]
    return differences, journal.head(txn, KEYS.subject).height, _read_statuses(txn)
