"""Checkers of tasks accept valid histories and report each violation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.durable import journal
from holdfast.sim.history import History, to_plain
from holdfast.sim.row_decoder import decode_rows
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.tasks import operations as tasks
from holdfast.tasks.events import (
    LeasesExpired,
    LeasesExtended,
    LeasesGranted,
    TaskLogEntry,
    TasksCompleted,
    TasksCreated,
    TasksDead,
)
from holdfast.tasks.model import (
    QueueLimits,
    TaskCounts,
    TaskSpec,
    TaskStatusRow,
    keys_of,
    pack,
    pack_int,
    pack_text,
)
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    HeldLease,
    TaskReport,
    TaskToSubmit,
)
from tests.simulation.check_tasks import SUBJECT, findings
from tests.simulation.checkers import CHECKERS, check_all

Plain = dict[str, Any]

KEYS = keys_of("u")
SPEC = TaskSpec("work", queue="a", lease_ns=10 * S, attempts=2, expiries_max=2, window_ns=20 * S)


class TaskHistory:
    """History of real task operations, recorded as the simulator does. `answer` changes the recorded result."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
        self.history = History()
        self.history.add(0, "config", {})
        self._commits = 0

    def run_operation(
        self, operation: Any, *args: Any, answer: Callable[[Any], Any] | None = None
    ) -> TaskHistory:
        value = to_plain(self.store.transact(operation, "u", *args))
        names = operation.fn.__code__.co_varnames[1 : operation.fn.__code__.co_argcount]
        defaults = operation.fn.__defaults__ or ()
        recorded_args = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        recorded_args |= dict(zip(names, ("u", *args), strict=False))
        self._commits += 1
        self.history.add(
            self.store.now_ns(), operation.name, to_plain(recorded_args), actor="a",
            incarnation="1", value=answer(value) if answer else value, commit_no=self._commits,
        )  # fmt: skip
        return self

    def record_only(self, op: str, value: Any, **args: Any) -> TaskHistory:
        """Record an operation without running it."""
        self._commits += 1
        self.history.add(
            self.store.now_ns(), f"tasks.{op}", to_plain(args), actor="a", incarnation="1",
            value=value, commit_no=self._commits,
        )  # fmt: skip
        return self

    def submit(self, *new: TaskToSubmit, spec: TaskSpec = SPEC, **how: Any) -> TaskHistory:
        return self.run_operation(tasks.submit, spec, list(new) or [TaskToSubmit(b"x")], **how)

    def lease(self, limit: int = 1, alone: bool = False, **how: Any) -> TaskHistory:
        return self.run_operation(tasks.lease, GrantRequest("w", ["a"], limit, alone), **how)

    def settle(self, *reports: TaskReport, generation: int = 1, **how: Any) -> TaskHistory:
        return self.run_operation(tasks.apply_reports, "w", generation, list(reports), **how)

    def extend(self, *holds: HeldLease, **how: Any) -> TaskHistory:
        return self.run_operation(tasks.extend, 1, list(holds), **how)

    def advance(self, seconds: float) -> TaskHistory:
        self.clock.advance(int(seconds * S))
        return self

    def change(self, change: Callable[[Txn], None]) -> TaskHistory:
        """Change rows directly, without a task operation."""
        self.store.transact(change)
        return self

    def append_log_entry(self, *records: Any) -> TaskHistory:
        """Append a log entry without a task operation."""

        def append(txn: Txn) -> None:
            head = journal.head(txn, SUBJECT)
            entry = TaskLogEntry(txn.now_ns, txn.generation, list(records))
            journal.append(txn, SUBJECT, [codec.pack(entry)], expected_head=head.height)

        return self.change(append)

    def audit(self) -> TaskHistory:
        rows = self.store.read(lambda txn: txn.scan(b"\x14", b"\xff"))
        self.history.add(self.store.now_ns(), "audit", {}, value=decode_rows(rows))
        return self


def change_status(**fields: Any) -> Callable[[Txn], None]:
    def change(txn: Txn) -> None:
        row = txn.get(KEYS.statuses + pack_int(1))
        assert row is not None
        values = {**to_plain(codec.unpack_as(TaskStatusRow, row)), **fields}
        txn.put(KEYS.statuses + pack_int(1), pack(TaskStatusRow(**values)))

    return change


def change_first_grant(**fields: Any) -> Callable[[Plain], Plain]:
    """Change fields of the first grant in the recorded result."""
    return lambda leased: {**leased, "grants": [{**leased["grants"][0], **fields}]}


def delete_first_row(prefix: bytes) -> Callable[[Txn], None]:
    return lambda txn: txn.delete(txn.scan(prefix, prefix + b"\xff", 1)[0][0])


def truncate_log(txn: Txn) -> None:
    journal.checkpoint(txn, SUBJECT, 3)
    journal.truncate(txn, SUBJECT, 10)


def copy_body(txn: Txn) -> None:
    row = txn.get(KEYS.bodies + pack_int(1))
    assert row is not None
    txn.put(KEYS.bodies + pack_int(2), row)


def throttle_task(txn: Txn) -> None:
    """Move the ready task back to the throttled rows."""
    [(key, row)] = txn.scan(KEYS.fair, KEYS.fair + b"\xff", 1)
    txn.delete(key)
    txn.delete(KEYS.fair_places + row)
    txn.delete(KEYS.fair_counts + tuples.pack(("a",)))
    txn.put(KEYS.throttled + tuples.pack(("a", "l", "a", 0, 0, 2)), row)


WriteHistory = Callable[[TaskHistory], TaskHistory]

RIGHT: dict[str, WriteHistory] = {
    "a run, in pieces": lambda s: (
        s.submit(*[TaskToSubmit(b"%d" % n) for n in range(6)]).lease(4).audit().run_operation(tasks.cancel, [2, 5]).audit()
        .extend(HeldLease(3, 2)).settle(TaskReport(1, 2), TaskReport(4, 2, AttemptOutcome.FAILED)).audit()
        .submit(TaskToSubmit(b"w", after=(3, 6))).audit().advance(11).lease(9).audit().advance(11).lease(9).audit()),
    "all ends well": lambda s: (
        s.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y", after=(-1,)), TaskToSubmit(b"z", delay_ns=S)).lease(3).audit()
        .settle(TaskReport(1, 1)).lease(3).advance(2).lease(3).audit()
        .settle(TaskReport(2, 3), TaskReport(3, 5, AttemptOutcome.FAILED)).audit()),
    "expired, late, redriven": lambda s: (
        s.submit().lease().advance(11).lease(alone=True).audit()
        .settle(TaskReport(1, 1)).extend(HeldLease(1, 3, True)).audit()
        .settle(TaskReport(1, 3, AttemptOutcome.REFUSED)).run_operation(tasks.redrive, [1]).audit()),
    "cancelled in its place and at work": lambda s: (
        s.submit(TaskToSubmit(b"x", limit="l"), TaskToSubmit(b"y", limit="l")).run_operation(tasks.set_limits, "a", QueueLimits(0, 1))
        .lease(2).audit().run_operation(tasks.cancel, [1]).audit().lease(2).run_operation(tasks.cancel, [2]).audit()),
    "forgotten": lambda s: (
        s.submit(TaskToSubmit(b"x", key="k"), spec=TaskSpec("work", queue="a", retain_ns=S)).lease()
        .settle(TaskReport(1, 1)).advance(2).run_operation(tasks.maintain, 100).audit()
        .submit(TaskToSubmit(b"y", key="k")).audit()),
}  # fmt: skip

WRONG: list[tuple[str, str, WriteHistory]] = [
    ("L1", "granted while another has it", lambda s: (
        s.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y")).lease().lease(answer=change_first_grant(seq=1)))),
    ("L1", "granted beside others, and suspect", lambda s: (
        s.submit().lease().advance(11).lease(alone=True, answer=change_first_grant(suspect=False)))),
    ("L2", "a lease given twice", lambda s: (
        s.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y")).lease().lease(answer=change_first_grant(lease=1)))),
    ("L4", "extended, and over", lambda s: (
        s.submit().lease().advance(11).extend(HeldLease(1, 1), answer=lambda _: [99]))),
    ("L4", "extended by the log, and over", lambda s: (
        s.submit().lease().advance(11).append_log_entry(LeasesExtended([1], [1], [99], [False])).audit())),
    ("L5", "granted, and the log has no expiry", lambda s: (
        s.submit().lease().advance(11).append_log_entry(LeasesGranted(2, "w", 99, [1])).audit())),
    ("L5", "expired before its time", lambda s: (
        s.submit().lease().append_log_entry(LeasesExpired(1, [1])).audit())),
    ("L9", "extended without progress beyond its window", lambda s: (
        s.submit().lease().advance(9).extend(HeldLease(1, 1), answer=lambda all_: [all_[0] + 60 * S]))),
    ("L9", "said to have gone on", lambda s: (
        s.submit().lease().change(change_status(progress_ns=5)).audit())),
    ("L10", "it waits, and has a lease", lambda s: (
        s.submit().lease().settle(TaskReport(1, 1, AttemptOutcome.FAILED)).change(change_status(lease=7)).audit())),
    ("L10", "it is leased, for ever", lambda s: (
        s.submit().lease().change(change_status(expires_ns=0)).audit())),
    ("S1", "granted, and it had ended", lambda s: (
        s.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y")).lease().settle(TaskReport(1, 1))
        .lease(answer=change_first_grant(seq=1, attempt=2)))),
    ("S1", "in a state that no record led to", lambda s: (
        s.submit().lease().change(change_status(state=3, expires_ns=0)).audit())),
    ("S1", "granted while it waits for another", lambda s: (
        s.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y", after=(-1,)), TaskToSubmit(b"z")).lease(1)
        .lease(answer=change_first_grant(seq=2)))),
    ("S1", "a record of no task", lambda s: s.submit().append_log_entry(TasksDead([9], "why")).audit()),
    ("S1", "created twice", lambda s: s.submit().append_log_entry(TasksCreated([1], b"")).audit()),
    ("S2", "dead after its end", lambda s: (
        s.submit().lease().settle(TaskReport(1, 1)).append_log_entry(TasksDead([1], "why")).audit())),
    ("S2", "another result", lambda s: (
        s.submit().lease().settle(TaskReport(1, 1, AttemptOutcome.OK, b"r")).change(change_status(result=b"q")).audit())),
    ("S2", "cancelled after its end", lambda s: (
        s.submit().lease().settle(TaskReport(1, 1)).run_operation(tasks.cancel, [1], answer=lambda _: [True]))),
    ("S2", "redriven twice", lambda s: (
        s.submit().run_operation(tasks.cancel, [1]).run_operation(tasks.redrive, [1])
        .run_operation(tasks.redrive, [1], answer=lambda _: [3]))),
    ("S3", "an attempt that was not counted", lambda s: (
        s.submit().lease().change(change_status(attempt=0)).audit())),
    ("S3", "failures without end", lambda s: (
        s.submit().lease().settle(TaskReport(1, 1, AttemptOutcome.FAILED)).change(change_status(failures=9)).audit())),
    ("S4", "a counter that is no recount", lambda s: (
        s.submit().change(lambda txn: txn.put(KEYS.counts + pack_text("a"), pack(TaskCounts(ready=7))))
        .audit())),
    ("S6", "a late report counted", lambda s: (
        s.submit().lease().advance(11).settle(TaskReport(1, 1), answer=lambda _: [0]))),
    ("S6", "lost, and not on record", lambda s: (
        s.submit().lease().advance(11)
        .record_only("apply_reports", [1], worker="w", generation=1, reports=[TaskReport(1, 1)]).audit())),
    ("S6", "completed by the log under another lease", lambda s: (
        s.submit().lease().append_log_entry(TasksCompleted([1], [8], b"")).audit())),
    ("J2", "a height that is missing", lambda s: (
        s.submit().lease().change(lambda txn: txn.delete(
            journal._keys(SUBJECT).entries + pack_int(1))).audit())),
    ("J4", "cut off, and nothing to begin from", lambda s: (
        s.submit().lease().submit().change(truncate_log).audit())),
    ("J5", "rows that the log does not say", lambda s: (
        s.submit().lease().change(change_status(reason="because")).audit())),
    ("J5", "a task that is not in the log", lambda s: s.submit().change(copy_body).audit()),
    ("D2", "in no place", lambda s: s.submit().change(delete_first_row(KEYS.ready)).audit()),
    ("D2", "in two places", lambda s: (
        s.submit().change(lambda txn: txn.put(KEYS.quarantined + b"\x02a\x00\x14\x14\x15\x01",
                                              pack_int(1))).audit())),
    ("D2", "leased, and nobody looks", lambda s: s.submit().lease().change(delete_first_row(KEYS.expiries)).audit()),
    ("D2", "gone before its time", lambda s: s.submit().change(delete_first_row(KEYS.bodies)).audit()),
    ("D2", "a number given twice", lambda s: s.submit().submit(answer=lambda _: [1])),
    ("D3", "a key that is forgotten", lambda s: (
        s.submit(TaskToSubmit(b"x", key="k")).change(delete_first_row(KEYS.idempotency_keys)).audit())),
    ("T1", "granted before its time", lambda s: (
        s.submit(TaskToSubmit(b"x", delay_ns=5 * S), TaskToSubmit(b"y")).lease(answer=change_first_grant(seq=1)))),
    ("I4", "a key that made two tasks", lambda s: (
        s.submit(TaskToSubmit(b"x", key="k")).submit(TaskToSubmit(b"x", key="k"), answer=lambda _: [2]))),
    ("I5", "a key with other arguments", lambda s: (
        s.submit(TaskToSubmit(b"x", key="k")).record_only("submit", [1], spec=SPEC, new=[TaskToSubmit(b"y", key="k")]))),
    ("R3", "parked for nobody", lambda s: (
        s.submit(TaskToSubmit(b"x", limit="l"), TaskToSubmit(b"y", limit="l")).run_operation(tasks.set_limits, "a", QueueLimits(0, 1))
        .lease(2).settle(TaskReport(1, 1)).change(throttle_task).audit())),
    ("A3", "more than the queue's limit", lambda s: (
        s.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y")).record_only("set_limits", None, queue="a", limits=QueueLimits(1, 0)).lease(2))),
    ("A3", "more than the limit of a key", lambda s: (
        s.submit(TaskToSubmit(b"x", limit="l"), TaskToSubmit(b"y", limit="l"))
        .record_only("set_limits", None, queue="a", limits=QueueLimits(0, 1)).lease(2))),
    ("A4", "the next was passed over", lambda s: (
        s.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y")).lease(1, answer=change_first_grant(seq=2, args=b"y")))),
]  # fmt: skip


@pytest.mark.parametrize("tell", RIGHT.values(), ids=RIGHT)
def test_task_checkers_accept_a_valid_history(tell: WriteHistory) -> None:
    story = TaskHistory()
    tell(story)
    assert check_all(story.history) == []


@pytest.mark.parametrize(
    ("number", "tell"),
    [(number, tell) for number, _, tell in WRONG],
    ids=[f"{number}-{what}" for number, what, _ in WRONG],
)
def test_task_checker_reports_a_violating_history(number: str, tell: WriteHistory) -> None:
    story = TaskHistory()
    tell(story)
    assert number in {reported.number for reported in findings(story.history)}
    assert CHECKERS[number](story.history)
    assert not any("unreadable" in violation.what for violation in check_all(story.history))
