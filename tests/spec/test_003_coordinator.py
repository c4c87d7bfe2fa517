"""Document 003, rule by rule, in document order.

Where the design differs from the document, the test checks the design and its rule text names the difference. After
every operation the rig verifies the rows against the log and recounts the counters.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.durable import journal
from holdfast.errors import HoldfastError, IllegalTransition, Invalid, NotFound, StoreFull
from holdfast.leadership import worker_registry
from holdfast.store.api import Operation, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.memory_backend import MemoryBackend, MemoryTxn
from holdfast.tasks import consistency, events, replay_check, status_fold
from holdfast.tasks import leases as leases
from holdfast.tasks import operations as tasks
from holdfast.tasks.events import (
    LeaseExpired,
    LeaseExtended,
    LeaseGranted,
    TaskCancelled,
    TaskCompleted,
    TaskCreated,
    TaskDead,
    TaskFailed,
    TaskRecord,
)
from holdfast.tasks.model import NEW_STATUS, TaskSpec, TaskStatusRow, get_body, pack_int
from holdfast.tasks.operations import (
    AttemptOutcome,
    HeldLease,
    ReportAnswer,
    TaskGrant,
    TaskReport,
    TaskToSubmit,
)
from holdfast.tasks.states import TASK_TRANSITIONS, TaskEvent, TaskState
from holdfast.tasks.status_fold import TaskFold, apply_record
from tests.durable.conftest import SIMULATED
from tests.tasks.random_history import RandomTaskHistory
from tests.tasks.rig import (
    KEYS,
    LEASE_NS,
    UNIVERSE,
    TaskOperationsRig,
    entry_records,
    logged_fields,
)
from tests.tidy_rules import ROOT, Module, package_modules

MODULES = ("holdfast.tasks.operations", "holdfast.tasks.status_fold", "holdfast.tasks.unit_of_work")

PRINCIPLE = "1. Design Principle"
TASK = "2.1 Task Record"
LEASE = "2.2 Lease Record"
INDEXES = "3.1 Task Indexes"
REGISTRY = "3.2 Worker Registry"
CREATED = "4.1 TaskCreated"
GRANTED = "4.2 LeaseGranted"
EXTENDED = "4.3 LeaseExtended"
EXPIRED = "4.4 LeaseExpired"
COMPLETED = "4.5 TaskCompleted"
CANCELLED = "4.6 TaskCancelled"
FAILED = "4.7 TaskFailed"
ATOMIC = "5. Atomicity Rules"
RECOVERY = "6. Crash Recovery"
INVARIANTS = "7. Invariants"
MODEL = "8. Mental Model"


@pytest.fixture(params=list(SIMULATED))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TaskOperationsRig]:
    clock = SimClock()
    for store in SIMULATED[request.param](tmp_path, clock):
        yield TaskOperationsRig(store, clock)


class RefusingClock(SimClock):
    """A simulated clock that refuses every read while `refuses` is set."""

    refuses = False

    def wall_ns(self) -> int:
        assert not self.refuses, "a replay read a clock"
        return super().wall_ns()

    def boot_ns(self) -> int:
        assert not self.refuses, "a replay read a clock"
        return super().boot_ns()

    def mono_ns(self) -> int:
        assert not self.refuses, "a replay read a clock"
        return super().mono_ns()


def memory_rig(
    seed: int, steps: int, wall: Random | None = None, clock: SimClock | None = None
) -> TaskOperationsRig:
    """A rig after a random history. With `wall` its wall clock is stepped by hours, both ways."""
    clock = clock or SimClock()
    rig = TaskOperationsRig(InProcessStore("memory:", MemoryBackend(), clock), clock)
    for _ in RandomTaskHistory(rig, seed).run(steps):
        if wall is not None:
            clock.step_wall(wall.choice((-5, -1, 1, 30)) * 3600 * S)
    return rig


# -- 1. design principle -------------------------------------------------------------------------


@pytest.mark.spec("003", PRINCIPLE, "each change of the owner or state of a task has a log record")
@pytest.mark.parametrize("seed", range(4))
def test_task_status_changes_only_with_a_log_record(rig: TaskOperationsRig, seed: int) -> None:
    before: dict[int, TaskStatusRow] = {}
    height = 0
    for _ in RandomTaskHistory(rig, seed).run(80):
        rows = rig.rows()
        entries = rig.entries()
        named = {record.task_id for entry in entries[height:] for record in entry_records(entry)}
        logged_before, logged_now = logged_fields(before), logged_fields(rows)
        changed = {seq for seq in rows if logged_before.get(seq) != logged_now[seq]}
        assert changed <= named
        before, height = rows, len(entries)


@pytest.mark.spec("003", PRINCIPLE, "only the operations of the coordinator write task rows")
def test_task_log_has_eight_kinds_of_records() -> None:
    assert {kind.__name__ for kind in TaskRecord.__subclasses__()} == {
        "TaskCreated", "LeaseGranted", "LeaseExtended", "LeaseExpired",
        "TaskCompleted", "TaskFailed", "TaskCancelled", "TaskDead",
    }  # fmt: skip
    # The operations of this package belong to the coordinator, its checkpoints or its retention.
    operations = {
        member
        for module in package_modules()
        if module.name.startswith("holdfast.tasks.")
        for member in vars(importlib.import_module(module.name)).values()
        if isinstance(member, Operation)
    }
    coordinators = {
        operation for operation in vars(tasks).values() if isinstance(operation, Operation)
    }
    beside = {operation.fn.__module__ for operation in operations - coordinators}
    assert beside <= {"holdfast.tasks.checkpoint"} | RETENTION_MODULES
    assert {
        f"tasks.{name}"
        for name in ("submit", "lease", "extend", "apply_reports", "cancel", "redrive")
    } <= {operation.name for operation in coordinators}


# Modules of this package whose operations delete rows of ended tasks.
RETENTION_MODULES = {"holdfast.tasks.retention"}
# Has exclusive access to the store and writes rows derived from the log. It never writes the log.
REBUILD_MODULE = "holdfast.ops.rebuild"
WRITE_METHODS = {"put", "delete", "add", "append", "set_all"}


@pytest.mark.spec("003", PRINCIPLE, "only the operations of the coordinator write task rows")
def test_only_the_coordinator_writes_task_rows() -> None:
    writers = []
    for module in package_modules():
        if module.name.startswith(("holdfast.tasks.", "holdfast.sim.")):
            continue
        if module.name == REBUILD_MODULE:
            assert "raw_access.open_source(" in module.source
            assert "journal.append" not in module.source
            continue
        if not imports_tasks(module):
            continue
        for call in ast.walk(module.tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                if call.func.attr not in WRITE_METHODS:
                    continue
                call_text = ast.unparse(call)
                if "Space.TASK" in call_text or TASK_KEYS_PATTERN.search(call_text):
                    writers.append(f"{module.name}:{call.lineno}: {call_text}")
    assert writers == []
    planted = Module(
        "x", "from holdfast.tasks.model import keys_of\ntxn.put(keys.statuses + s, b'')"
    )
    [call] = [node for node in ast.walk(planted.tree) if isinstance(node, ast.Call)]
    assert TASK_KEYS_PATTERN.search(ast.unparse(call)), "a writer would be seen"
    assert imports_tasks(planted)


TASK_KEYS_PATTERN = re.compile(r"\b_?[Kk](EYS|eys)\w*(\(.*\))?\.(" + "|".join(vars(KEYS)) + r")\b")


def imports_tasks(module: Module) -> bool:
    if "Space.TASK" in module.source:
        return True
    # Parsing all modules takes seconds.
    return "tasks.model" in module.source and any(
        imported.target == "holdfast.tasks.model" and {"TaskKeys", "keys_of"} & set(imported.names)
        for imported in module.imports
    )


@pytest.mark.spec("003", PRINCIPLE, "the task log is one hash chain with a total order")
def test_task_log_is_one_hash_chain(rig: TaskOperationsRig) -> None:
    for _ in RandomTaskHistory(rig, 5).run(60):
        pass
    rig.store.read(journal.verify, KEYS.subject)
    assert len(rig.entries()) == rig.store.read(journal.head, KEYS.subject).height


# -- 2. authoritative state ----------------------------------------------------------------------


@pytest.mark.spec(
    "003", TASK, "a task has an id, a payload, a state, an attempt and at most one lease"
)
def test_task_has_payload_state_attempt_and_lease(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(b"payload")
    body = rig.store.read(get_body, KEYS, pack_int(seq))
    assert body is not None
    assert body.args == b"payload"
    assert (rig.state(seq), rig.status(seq).attempt) == (TaskState.WAITING, 0)
    assert rig.status(seq).lease == 0


@pytest.mark.spec(
    "003", TASK, "a task has five states: WAITING, LEASED, COMPLETED, FAILED and DEAD"
)
def test_task_has_five_states() -> None:
    assert [state.name for state in TaskState] == [
        "WAITING",
        "LEASED",
        "COMPLETED",
        "FAILED",
        "DEAD",
    ]


@pytest.mark.spec(
    "003",
    TASK,
    "a replay of the log matches the rows at every height",
    module=("holdfast.tasks.replay_check",),
)
@pytest.mark.parametrize("seed", range(6))
def test_task_log_replay_matches_the_rows_at_every_height(seed: int) -> None:
    rig = memory_rig(seed, 100)
    replayed = TaskFold()
    for height, entry in enumerate(rig.entries(), 1):
        replayed.replay(entry_records(entry))
        if height in rig.rows_by_height:
            expected = rig.rows_by_height[height]
            mine = {seq: status for seq, status in replayed.tasks.items() if seq in expected}
            assert logged_fields(mine) == logged_fields(expected)
    assert len(rig.rows_by_height) > 30


@pytest.mark.spec(
    "003", TASK, "repeated replays of the same records give the same state, also in another process"
)
def test_task_log_replay_is_deterministic(tmp_path: Path) -> None:
    rig = memory_rig(7, 100)
    expected = rig.fold_log().tasks
    assert rig.fold_log().tasks == expected
    assert logged_fields(rig.rows()) == logged_fields({seq: expected[seq] for seq in rig.rows()})
    # The same in other processes, with another hash seed, clock and random generator.
    log = tmp_path / "log"
    log.write_bytes(codec.pack(rig.store.read(entry_bodies)))
    for hash_seed in ("0", "1", "77"):
        completed = subprocess.run(
            [sys.executable, "-c", REPLAY_AGAIN, str(log), hash_seed],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert completed.stdout.strip() == digest_of(expected)


def entry_bodies(txn: Txn) -> list[bytes]:
    head = journal.head(txn, KEYS.subject)
    return [e.body for e in journal.read(txn, KEYS.subject, head.floor, head.height + 1, 10_000)]


def digest_of(statuses: dict[int, TaskStatusRow]) -> str:
    return codec.digest(codec.pack([[seq, statuses[seq]] for seq in sorted(statuses)])).hex()


REPLAY_AGAIN = """
import pathlib, random, sys, time
now = int(sys.argv[2]) * 86_400
time.time, time.time_ns, time.monotonic_ns = lambda: now, lambda: now * 10**9, lambda: now
random.seed(now)
from holdfast import codec
from holdfast.tasks import events
from holdfast.tasks.status_fold import TaskFold
from tests.spec.test_003_coordinator import digest_of
from tests.tasks.rig import entry_records
bodies = codec.unpack(pathlib.Path(sys.argv[1]).read_bytes())
log = [record for body in bodies for record in entry_records(events.decode_entry(body))]
print(digest_of(TaskFold().replay(log).tasks))
"""


@pytest.mark.spec("003", LEASE, "a lease has an id, a task, a worker and an expiry")
def test_task_lease_has_id_worker_and_expiry(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    [grant] = rig.lease(worker="v")
    status = rig.status(seq)
    assert (status.lease, status.worker, status.expires_ns) == (grant.lease, "v", grant.expires_ns)


@pytest.mark.spec("003", LEASE, "a lease is valid only if it is the current lease of its task")
def test_lease_that_is_not_current_is_invalid(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    old = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.lease_one(seq, alone=True)
    assert rig.extend(HeldLease(seq, old.lease)) == [0]
    assert rig.complete(old) is ReportAnswer.CANCELLED


@pytest.mark.spec("003", LEASE, "a completed task leaves no lease row")
def test_completed_task_leaves_no_lease_row(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(retain_ns=0)
    rig.complete(rig.lease_one(seq))
    rig.advance(LEASE_NS)
    while rig.maintain():
        pass
    rows = rig.store.read(lambda txn: txn.scan(KEYS.expiries, KEYS.expiries + b"\xff"))
    assert rows == []


# -- 3. derived state ----------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    INDEXES,
    "the task indexes are derived data and always equal a recount",
    module=("holdfast.tasks.consistency",),
)
@pytest.mark.parametrize("seed", range(4))
def test_task_indexes_equal_a_recount(seed: int) -> None:
    rig = memory_rig(seed + 40, 100)
    assert not rig.store.read(lambda txn: list(consistency.find_differences(txn, UNIVERSE)))


@pytest.mark.spec(
    "003", INDEXES, "a waiting task is in exactly one wait index, and other tasks are in none"
)
def test_waiting_task_is_in_one_wait_index(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", TaskToSubmit(b"b", delay_ns=S), TaskToSubmit(b"c", after=(-1,)))
    rig.lease(1)
    counts = rig.counts()
    assert (counts.ready, counts.delayed, counts.blocked, counts.leased) == (0, 1, 1, 1)


@pytest.mark.spec(
    "003",
    REGISTRY,
    "the worker registry is advisory: an unregistered worker can lease and complete tasks",
)
def test_unregistered_worker_may_lease_and_complete(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    [grant] = rig.lease(worker="nobody-knows-me")
    assert rig.store.read(worker_registry.list_registered, UNIVERSE) == []
    report = TaskReport(seq, grant.lease)
    assert rig.report(report, worker="nobody-knows-me") == [ReportAnswer.COMMITTED]


@pytest.mark.spec("003", REGISTRY, "a silent worker loses its lease only by expiry")
def test_silent_worker_loses_its_lease_only_by_expiry(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance_to(grant.expires_ns - 1)
    rig.maintain()
    assert rig.states(seq) == ["LEASED"]
    rig.advance_to(grant.expires_ns)
    rig.maintain()
    assert rig.states(seq) == ["WAITING"]


@pytest.mark.spec("003", REGISTRY, "the loss of progress rows changes no task")
def test_losing_progress_rows_does_no_harm(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.transact(tasks.report_progress, [(seq, grant.lease, b"half")])

    def lose(txn: Txn) -> None:
        for key, _ in txn.scan(KEYS.progress, KEYS.progress + b"\xff"):
            txn.delete(key)

    rig.store.transact(lose)
    rig.check_consistency()
    assert rig.complete(grant) is ReportAnswer.COMMITTED


# -- 4. the transition table ---------------------------------------------------------------------

DECIDED_AT = 100
STATUSES = {
    TaskState.WAITING: TaskStatusRow(TaskState.WAITING, 1),
    TaskState.LEASED: TaskStatusRow(TaskState.LEASED, 1, lease=7, worker="w", expires_ns=200),
    TaskState.COMPLETED: TaskStatusRow(TaskState.COMPLETED, 1, lease=7, worker="w", ended_ns=50),
    TaskState.FAILED: TaskStatusRow(TaskState.FAILED, 1, 1, lease=7, worker="w", ended_ns=50),
    TaskState.DEAD: TaskStatusRow(TaskState.DEAD, 1, ended_ns=50),
}
RECORDS: dict[TaskEvent, TaskRecord] = {
    TaskEvent.GRANT: LeaseGranted(1, DECIDED_AT, 8, "v", 300),
    TaskEvent.EXTEND: LeaseExtended(1, DECIDED_AT, 7, 400, True),
    TaskEvent.EXPIRE: LeaseExpired(1, 200, 7),
    TaskEvent.COMPLETE: TaskCompleted(1, DECIDED_AT, 7),
    TaskEvent.RETRY: TaskFailed(
        1, DECIDED_AT, 7, "failed", "e", counts="failure", final=False, not_before=150
    ),
    TaskEvent.FAIL: TaskFailed(
        1, DECIDED_AT, 7, "failed", "e", counts="failure", final=True, not_before=0
    ),
    TaskEvent.BURY: TaskDead(1, DECIDED_AT, "cancelled"),
}
PAIRS = [(state, event) for state in TaskState for event in TaskEvent]


@pytest.mark.spec(
    "003",
    "4. Log Records",
    "every pair of a state and a record follows the transition table or is rejected",
)
@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_state_and_record_pair_follows_the_transition_table(
    state: TaskState, event: TaskEvent
) -> None:
    status, record = STATUSES[state], RECORDS[event]
    if TASK_TRANSITIONS.allows(state, event):
        assert apply_record(status, record).state == TASK_TRANSITIONS.table[state, event]
        return
    folded = TaskFold()
    folded.tasks[1] = status
    with pytest.raises(IllegalTransition) as refused:
        folded.apply(record)
    assert (refused.value.prior, refused.value.attempted) == (state.name, event.name)
    assert folded.tasks[1] is status


@pytest.mark.spec(
    "003",
    "4. Log Records",
    "the transition table reaches every state, and completed, failed and dead are final",
)
def test_task_transition_table_reaches_every_state() -> None:
    assert TASK_TRANSITIONS.unreachable() == frozenset()
    assert TASK_TRANSITIONS.terminal == {TaskState.COMPLETED, TaskState.FAILED, TaskState.DEAD}


@pytest.mark.spec("003", "4. Log Records", "the fold refuses a record of an unknown task")
@pytest.mark.parametrize("record", [*RECORDS.values(), TaskCancelled(1, DECIDED_AT, 7, "w")])
def test_record_of_an_unknown_task_is_refused(record: TaskRecord) -> None:
    with pytest.raises(Invalid):
        TaskFold().apply(record)


@pytest.mark.spec(
    "003",
    "4. Log Records",
    "one operation writes one log entry with its records in the order of its decisions",
)
def test_log_entry_holds_the_records_of_one_operation(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", b"b")
    entry = rig.entries()[-1]
    assert [type(record).__name__ for record in entry_records(entry)] == ["TaskCreated"] * 2


# -- 4.1 TaskCreated -----------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    CREATED,
    "a TaskCreated record makes a waiting task with attempt 0 and the time of the record",
)
def test_task_created_record_makes_a_waiting_task(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    [record] = rig.log()
    assert isinstance(record, TaskCreated)
    assert (record.task_id, record.created_at) == (seq, rig.store.now_ns())
    assert rig.fold_log().tasks == {seq: NEW_STATUS}
    assert (NEW_STATUS.state, NEW_STATUS.attempt) == (TaskState.WAITING, 0)


@pytest.mark.spec(
    "003", CREATED, "a TaskCreated record has the digest of the payload, which one row stores"
)
def test_task_created_record_has_the_payload_digest(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(b"payload")
    [stored] = rig.entries()[0].records
    assert isinstance(stored, events.TasksCreated)
    row = rig.store.read(lambda txn: txn.get(KEYS.bodies + pack_int(seq)))
    assert row is not None
    assert stored.digest == events.digest_rows([row])


@pytest.mark.spec("003", CREATED, "the log refuses a second TaskCreated record of a task")
def test_repeated_task_created_record_is_refused() -> None:
    folded = TaskFold()
    folded.apply(TaskCreated(1, DECIDED_AT, None))
    with pytest.raises(Invalid):
        folded.apply(TaskCreated(1, DECIDED_AT, None))


# -- 4.2 LeaseGranted ----------------------------------------------------------------------------


@pytest.mark.spec(
    "003", GRANTED, "a LeaseGranted record makes a waiting task leased and counts one attempt"
)
def test_lease_granted_record_makes_a_leased_task(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    [grant] = rig.lease(worker="v")
    record = rig.log()[-1]
    assert record == LeaseGranted(seq, rig.store.now_ns(), grant.lease, "v", grant.expires_ns)
    status = rig.fold_log().tasks[seq]
    assert (status.state, status.lease, status.attempt) == (TaskState.LEASED, grant.lease, 1)


@pytest.mark.spec("003", GRANTED, "a LeaseGranted record requires a waiting task")
@pytest.mark.parametrize("state", [state for state in TaskState if state is not TaskState.WAITING])
def test_lease_granted_record_requires_a_waiting_task(state: TaskState) -> None:
    with pytest.raises(IllegalTransition):
        apply_record(STATUSES[state], RECORDS[TaskEvent.GRANT])


@pytest.mark.spec("003", GRANTED, "only a grant makes a task leased")
def test_only_grant_events_lead_to_leased() -> None:
    events = {
        event for (_, event), state in TASK_TRANSITIONS.table.items() if state is TaskState.LEASED
    }
    assert events == {TaskEvent.GRANT, TaskEvent.EXTEND}
    assert [state for state, event in TASK_TRANSITIONS.table if event is TaskEvent.EXTEND] == [
        TaskState.LEASED
    ]


@pytest.mark.spec(
    "003",
    GRANTED,
    "the attempt number counts grants, and failures and expiries have separate budgets",
)
def test_attempts_count_grants_apart_from_failures_and_expiries(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(attempts=2, expiries_max=5)
    rig.fail(rig.lease_one(seq), AttemptOutcome.RELEASED)
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.fail(rig.lease_one(seq, alone=True))
    status = rig.status(seq)
    assert (status.attempt, status.failures, status.expiries) == (3, 1, 1)


# -- 4.3 LeaseExtended ---------------------------------------------------------------------------


@pytest.mark.spec(
    "003", EXTENDED, "a LeaseExtended record moves the expiry and changes nothing else"
)
def test_lease_extended_record_moves_the_expiry_only(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance(S)
    [until] = rig.extend(HeldLease(seq, grant.lease))
    record = rig.log()[-1]
    assert isinstance(record, LeaseExtended)
    assert (record.lease_id, record.new_expiry_timestamp) == (grant.lease, until)
    status = rig.status(seq)
    assert (status.state, status.attempt, status.expires_ns) == (TaskState.LEASED, 1, until)


@pytest.mark.spec("003", EXTENDED, "an extension of an unknown lease is refused and not logged")
def test_extend_of_an_unknown_lease_logs_nothing(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    assert rig.extend(HeldLease(seq, 1), HeldLease(9, 1)) == [0, 0]
    assert len(rig.log()) == 1


@pytest.mark.spec(
    "003", EXTENDED, "an expired lease cannot be extended, even if its expiry is not logged yet"
)
def test_extend_of_an_expired_lease_is_refused(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance_to(grant.expires_ns)
    assert rig.extend(HeldLease(seq, grant.lease, True)) == [0]
    assert rig.record_kinds(seq) == ["TaskCreated", "LeaseGranted"]


@pytest.mark.spec(
    "003", EXTENDED, "a replay refuses a LeaseExtended record after the expiry or for another lease"
)
@pytest.mark.parametrize("record", [LeaseExtended(1, 200, 7, 400, False), LeaseExtended(1, DECIDED_AT, 6, 400, False)])  # fmt: skip
def test_replay_refuses_a_lease_extended_record_after_expiry(record: TaskRecord) -> None:
    with pytest.raises(Invalid):
        apply_record(STATUSES[TaskState.LEASED], record)


# -- 4.4 LeaseExpired ----------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    EXPIRED,
    "maintenance logs a LeaseExpired record, and the task is waiting again without a lease",
)
def test_lease_expired_record_makes_the_task_wait(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.maintain()
    assert rig.log()[-1] == LeaseExpired(seq, rig.store.now_ns(), grant.lease)
    status = rig.status(seq)
    assert (status.state, status.lease, status.worker) == (TaskState.WAITING, 0, "")


@pytest.mark.spec(
    "003", EXPIRED, "the LeaseExpired record precedes the next grant in the same log entry"
)
def test_lease_expired_record_precedes_the_next_grant_in_its_entry(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.lease_one(seq, alone=True)
    last = [type(record).__name__ for record in entry_records(rig.entries()[-1])]
    assert last == ["LeaseExpired", "LeaseGranted"]


@pytest.mark.spec("003", EXPIRED, "a completion at the expiry of its lease is cancelled")
def test_complete_at_expiry_is_cancelled(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance_to(grant.expires_ns)
    assert rig.complete(grant) is ReportAnswer.CANCELLED
    assert rig.state(seq) is not TaskState.COMPLETED


@pytest.mark.spec(
    "003", EXPIRED, "a replay refuses a LeaseExpired record before the expiry or for another lease"
)
@pytest.mark.parametrize("record", [LeaseExpired(1, 199, 7), LeaseExpired(1, 300, 6)])
def test_replay_refuses_an_early_lease_expired_record(record: TaskRecord) -> None:
    with pytest.raises(Invalid):
        apply_record(STATUSES[TaskState.LEASED], record)


@pytest.mark.spec(
    "003", EXPIRED, "the expiry that exceeds expiries_max makes the task DEAD in the same log entry"
)
def test_expiries_max_makes_the_task_dead(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(expiries_max=1)
    rig.lease_one(seq, alone=True)
    rig.advance(LEASE_NS)
    rig.maintain()
    last = [type(record).__name__ for record in entry_records(rig.entries()[-1])]
    assert last == ["LeaseExpired", "TaskDead"]
    assert rig.states(seq) == ["DEAD"]


# -- 4.5 TaskCompleted ---------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    COMPLETED,
    "a TaskCompleted record completes a leased task and ends its lease",
)
def test_task_completed_record_ends_task_and_lease(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.complete(grant)
    assert rig.log()[-1] == TaskCompleted(seq, rig.store.now_ns(), grant.lease)
    assert rig.states(seq) == ["COMPLETED"]
    assert rig.extend(HeldLease(seq, grant.lease)) == [0]


@pytest.mark.spec("003", COMPLETED, "a completion of a task that is not leased is cancelled")
@pytest.mark.parametrize("state", ["WAITING", "FAILED", "DEAD"])
def test_complete_of_a_task_that_is_not_leased_is_cancelled(
    rig: TaskOperationsRig, state: str
) -> None:
    seq = rig.submit_one(attempts=2 if state == "WAITING" else 1)
    grant = rig.lease_one(seq)
    if state == "DEAD":
        rig.cancel(seq)
    else:
        rig.fail(grant)
    assert rig.complete(grant) is ReportAnswer.CANCELLED
    assert rig.states(seq) == [state]


@pytest.mark.spec("003", COMPLETED, "a completion with the lease of another task is cancelled")
def test_complete_with_the_lease_of_another_task_is_cancelled(rig: TaskOperationsRig) -> None:
    a, b = rig.submit_one(), rig.submit_one(lease_ns=LEASE_NS * 2)
    first, second = rig.lease()
    assert (
        rig.report(TaskReport(a, second.lease), TaskReport(b, first.lease))
        == [ReportAnswer.CANCELLED] * 2
    )
    assert rig.states(a, b) == ["LEASED", "LEASED"]


@pytest.mark.spec(
    "003", COMPLETED, "a completion at or after the expiry is cancelled, even by one nanosecond"
)
@pytest.mark.parametrize("late_ns", [0, 1, LEASE_NS])
def test_complete_at_or_after_expiry_is_cancelled(rig: TaskOperationsRig, late_ns: int) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance_to(grant.expires_ns + late_ns)
    assert rig.complete(grant) is ReportAnswer.CANCELLED
    assert rig.state(seq) is not TaskState.COMPLETED


@pytest.mark.spec(
    "003", COMPLETED, "a repeated completion gets the first answer and changes nothing"
)
def test_repeated_complete_gets_the_first_answer(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert [rig.complete(grant, b"1"), rig.complete(grant, b"2")] == [ReportAnswer.COMMITTED] * 2
    assert rig.status(seq).result == b"1"
    assert rig.record_kinds(seq) == ["TaskCreated", "LeaseGranted", "TaskCompleted"]


@pytest.mark.spec(
    "003",
    COMPLETED,
    "a replay refuses a TaskCompleted record after the expiry or for another lease",
)
@pytest.mark.parametrize("record", [TaskCompleted(1, 200, 7), TaskCompleted(1, DECIDED_AT, 6)])
def test_replay_refuses_a_task_completed_record_without_a_valid_lease(record: TaskRecord) -> None:
    with pytest.raises(Invalid):
        apply_record(STATUSES[TaskState.LEASED], record)


# -- 4.6 TaskCancelled ---------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    CANCELLED,
    "a report with a lost lease is logged as TaskCancelled, and the worker gets the answer CANCELLED",
)
@pytest.mark.parametrize("end", list(AttemptOutcome))
def test_report_with_a_lost_lease_is_logged_as_cancelled(
    rig: TaskOperationsRig, end: AttemptOutcome
) -> None:
    seq = rig.submit_one()
    old = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.lease_one(seq, alone=True)
    before = rig.status(seq)
    [answer] = rig.report(TaskReport(seq, old.lease, end), worker="v")
    assert answer is ReportAnswer.CANCELLED
    assert rig.status(seq) == before
    assert rig.log()[-1] == TaskCancelled(seq, rig.store.now_ns(), old.lease, "v")


@pytest.mark.spec("003", CANCELLED, "a cancelled report counts no failure")
def test_cancelled_report_counts_no_failure(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(attempts=1)
    old = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.lease_one(seq, alone=True)
    for _ in range(5):
        rig.fail(old)
    assert rig.status(seq).failures == 0
    assert rig.states(seq) == ["LEASED"]


@pytest.mark.spec(
    "003",
    CANCELLED,
    "a report of an unknown task or lease is rejected and not logged",
)
@pytest.mark.parametrize(
    "wrong", [TaskReport(9, 1), TaskReport(1, 55), TaskReport(1, 0), TaskReport(1, -3)]
)
def test_report_of_an_unknown_task_or_lease_is_rejected(
    rig: TaskOperationsRig, wrong: TaskReport
) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    height = len(rig.entries())
    assert rig.report(wrong) == [ReportAnswer.REJECTED]
    assert len(rig.entries()) == height


@pytest.mark.spec("003", CANCELLED, "a replay of TaskCancelled changes no task in any state")
@pytest.mark.parametrize("state", list(TaskState))
def test_replay_of_task_cancelled_changes_nothing(state: TaskState) -> None:
    assert apply_record(STATUSES[state], TaskCancelled(1, DECIDED_AT, 3, "v")) is STATUSES[state]


# -- 4.7 TaskFailed ------------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    FAILED,
    "a TaskFailed record with budget left makes the task wait until the time in the record",
)
def test_task_failed_record_with_budget_left_makes_the_task_wait(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(attempts=2)
    grant = rig.lease_one(seq)
    rig.fail(grant, reason="bad", error="because")
    record = rig.log()[-1]
    assert isinstance(record, TaskFailed)
    assert (record.lease_id, record.reason, record.final) == (grant.lease, "bad", False)
    status = rig.status(seq)
    assert (status.state, status.lease, status.failures) == (TaskState.WAITING, 0, 1)
    assert status.not_before_ns == record.not_before > rig.store.now_ns()


@pytest.mark.spec("003", FAILED, "a task whose failure budget is exhausted is FAILED")
@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_exhausted_attempts_make_the_task_failed(rig: TaskOperationsRig, attempts: int) -> None:
    seq = rig.submit_one(attempts=attempts, backoff_ns=0)
    for _ in range(attempts):
        rig.advance(S)
        assert rig.states(seq) == ["WAITING"]
        rig.fail(rig.lease_one(seq))
    assert rig.states(seq) == ["FAILED"]
    assert rig.status(seq).failures == attempts
    rig.advance(LEASE_NS)
    assert rig.lease(alone=True) == []


@pytest.mark.spec("003", FAILED, "a failure report ends the lease")
def test_fail_ends_the_lease(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.fail(grant)
    assert rig.extend(HeldLease(seq, grant.lease)) == [0]
    assert rig.fail(grant) is ReportAnswer.CANCELLED


@pytest.mark.spec(
    "003", FAILED, "a retried task keeps its position among the tasks of its priority"
)
def test_retried_task_keeps_its_queue_order(rig: TaskOperationsRig) -> None:
    first = rig.submit_one()
    rig.fail(rig.lease_one(first))
    rig.submit(b"younger", b"youngest")
    rig.advance_to(rig.status(first).not_before_ns)
    assert rig.lease_one(first).attempt == 2


@pytest.mark.spec(
    "003",
    FAILED,
    "an operator's cancellation makes the task DEAD, not FAILED, by the record TaskDead (our rule)",
)
def test_cancel_makes_the_task_dead_not_failed(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.cancel(seq, reason="operator")
    assert rig.log()[-1] == TaskDead(seq, rig.store.now_ns(), "operator")
    assert rig.states(seq) == ["DEAD"]


@pytest.mark.spec(
    "003",
    FAILED,
    "a redrive creates one new task that references the old one, and the old task keeps its state",
)
def test_redrive_creates_one_linked_task(rig: TaskOperationsRig) -> None:
    old = rig.submit_one(attempts=1)
    rig.fail(rig.lease_one(old))
    [new] = rig.redrive(old)
    body = rig.store.read(get_body, KEYS, pack_int(new))
    assert body is not None
    assert body.redrive_of == old
    assert isinstance(rig.log()[-1], TaskCreated)
    assert rig.states(old, new) == ["FAILED", "WAITING"]
    assert rig.redrive(old) == [new]


# -- 5. atomicity --------------------------------------------------------------------------------

DECISIONS: dict[str, Callable[[TaskOperationsRig, TaskGrant], object]] = {
    "submit": lambda rig, grant: rig.submit(b"x", b"y"),
    "lease": lambda rig, grant: rig.lease(),
    "extend": lambda rig, grant: rig.extend(HeldLease(grant.seq, grant.lease, True)),
    "complete": lambda rig, grant: rig.complete(grant),
    "fail": lambda rig, grant: rig.fail(grant),
    "cancel": lambda rig, grant: rig.cancel(grant.seq),
    "redrive": lambda rig, grant: rig.redrive(3),
    "expire": lambda rig, grant: (rig.advance(LEASE_NS), rig.maintain()),
}


class FullMemoryBackend(MemoryBackend):
    """A backend that raises StoreFull while `full` is set."""

    full = False

    def begin(self) -> object:  # type: ignore[override]
        if self.full:
            raise StoreFull()
        return super().begin()


@pytest.mark.spec("003", ATOMIC, "an operation whose log write fails has no effect")
@pytest.mark.parametrize("name", list(DECISIONS))
def test_operation_without_its_log_write_has_no_effect(name: str) -> None:
    clock = SimClock()
    disk = FullMemoryBackend()
    rig = TaskOperationsRig(InProcessStore("memory:", disk, clock), clock)
    rig.submit(b"a", b"b", b"c")
    [grant] = rig.lease(1)
    rig.cancel(3)
    before = rig.rows(), rig.entries(), rig.counts()
    disk.full = True
    with pytest.raises(StoreFull):
        DECISIONS[name](rig, grant)
    disk.full = False
    assert (rig.rows(), rig.entries(), rig.counts()) == before
    DECISIONS[name](rig, grant)
    assert rig.entries() != before[1]


@pytest.mark.spec("003", ATOMIC, "a refused batch has no effect")
def test_refused_batch_has_no_effect(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    before = rig.rows(), rig.entries(), rig.counts()
    with pytest.raises(NotFound):
        rig.cancel(a, 99)
    with pytest.raises(HoldfastError):
        rig.submit(TaskToSubmit(b"x", key="k"), TaskToSubmit(b"y", key="k"))
    assert (rig.rows(), rig.entries(), rig.counts()) == before


@pytest.mark.spec("003", ATOMIC, "an operation and its log entry are one commit")
@pytest.mark.parametrize("name", list(DECISIONS))
def test_operation_and_its_log_entry_are_one_commit(name: str) -> None:
    clock = SimClock()
    backend = CommitRecordingBackend()
    rig = TaskOperationsRig(InProcessStore("memory:", backend, clock), clock)
    rig.submit(b"a", b"b", b"c")
    [grant] = rig.lease(1)
    rig.cancel(3)
    height = len(rig.entries())
    backend.committed_rows.clear()
    DECISIONS[name](rig, grant)
    # The rig has already compared rows and log. Here: the operation wrote a single entry.
    assert len(rig.entries()) == height + 1
    # The rows after each commit contain the entry and all its effects.
    for rows in backend.committed_rows:
        recovered = TaskOperationsRig(
            InProcessStore("memory:", backend_with_rows(rows), clock), clock
        )
        assert recovered.entries() == rig.entries(), "a commit without the record"
        assert recovered.rows() == rig.rows(), "a commit without what follows"
        assert recovered.counts() == rig.counts()
        recovered.check_consistency()
    assert len(backend.committed_rows) == 1


class CommitRecordingBackend(MemoryBackend):
    """Records the rows after each commit, as another reader could see them."""

    def __init__(self) -> None:
        super().__init__()
        self.committed_rows: list[dict[bytes, bytes]] = []

    def begin(self) -> CommitRecordingTxn:
        return CommitRecordingTxn(self)


class CommitRecordingTxn(MemoryTxn):
    def commit(self) -> None:
        super().commit()
        backend = self._backend
        assert isinstance(backend, CommitRecordingBackend)
        backend.committed_rows.append(dict(backend.rows))


@pytest.mark.spec(
    "003",
    ATOMIC,
    "a grant is never partly visible: a leased task always has its lease, worker and expiry",
)
def test_grant_is_never_visible_half_done() -> None:
    clock = SimClock()
    backend = CommitRecordingBackend()
    rig = TaskOperationsRig(InProcessStore("memory:", backend, clock), clock)
    # A range of plain tasks, and tasks with individual rows.
    rig.submit(*[b"x"] * 25)
    rig.submit(*[TaskToSubmit(b"x", key=f"k{n}") for n in range(25)])
    for _ in range(10):
        rig.lease(5)
    assert rig.counts().leased == 50
    leased = set()
    for rows in backend.committed_rows:
        seen = InProcessStore("memory:", backend_with_rows(rows), clock)
        visible = TaskOperationsRig(seen, clock)
        visible.check_consistency()
        for seq, status in visible.rows().items():
            whole = (status.lease > 0, status.worker == "w", status.expires_ns > 0)
            assert whole == (status.state == TaskState.LEASED,) * 3, (seq, status)
        now = [seq for seq, status in visible.rows().items() if status.state == TaskState.LEASED]
        assert visible.counts().leased == len(now)
        leased.add(len(now))
    assert leased == set(range(0, 51, 5)), "a grant of five is seen whole or not at all"


def backend_with_rows(rows: dict[bytes, bytes]) -> MemoryBackend:
    backend = MemoryBackend()
    for key, value in rows.items():
        backend.set(key, value)
    return backend


# -- 6. crash recovery ---------------------------------------------------------------------------


@pytest.mark.spec("003", RECOVERY, "the rows after a restart match the log without a repair")
@pytest.mark.parametrize("seed", range(3))
def test_rows_after_a_restart_match_the_log(tmp_path: Path, seed: int) -> None:
    clock = SimClock()
    backend = LmdbBackend(tmp_path, readonly=False)
    rig = TaskOperationsRig(InProcessStore("lmdb:", backend, clock), clock)
    for _ in RandomTaskHistory(rig, seed).run(60):
        pass
    before = rig.rows()
    rig.store.close()
    backend.close()
    backend = LmdbBackend(tmp_path, readonly=False)
    with InProcessStore("lmdb:", backend, clock) as store:
        again = TaskOperationsRig(store, clock)
        again.check_consistency()
        assert again.rows() == before
        replayed = again.fold_log().tasks
        assert logged_fields({seq: replayed[seq] for seq in before}) == logged_fields(before)
    backend.close()


@pytest.mark.spec("003", RECOVERY, "a grant happens only after all overdue leases expired")
def test_all_overdue_leases_expire_before_a_grant(rig: TaskOperationsRig) -> None:
    """All overdue leases expire, even for a request of one task."""
    rig.submit(*[b"x"] * 600, expiries_max=9)
    old = [grant for _ in range(60) for grant in rig.lease(10)]
    rig.submit_one(b"y", priority=9)
    rig.advance(1000 * LEASE_NS)
    [granted] = rig.lease(1)
    last = [type(record).__name__ for record in entry_records(rig.entries()[-1])]
    assert last == ["LeaseExpired"] * 600 + ["LeaseGranted"]
    assert {rig.complete(grant_report) for grant_report in old[::100]} == {ReportAnswer.CANCELLED}
    assert rig.complete(granted) is ReportAnswer.COMMITTED


@pytest.mark.spec("003", RECOVERY, "a grant happens only after all overdue leases expired")
def test_lease_grants_nothing_while_overdue_leases_remain(
    rig: TaskOperationsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more overdue leases than one operation expires, the first operations grant nothing and set `overdue`."""
    monkeypatch.setattr(leases, "EXPIRED_MAX", 30)
    rig.submit(*[b"x"] * 100, expiries_max=9)
    for _ in range(10):
        rig.lease(10)
    rig.submit_one(b"y", priority=9)
    rig.advance(LEASE_NS)
    answers = [rig.lease_result(1)]
    while answers[-1].overdue:
        answers.append(rig.lease_result(1))
    assert [len(answer.grants) for answer in answers] == [0, 0, 0, 1]
    assert rig.counts().leased == 1


@pytest.mark.spec(
    "003", RECOVERY, "an overdue lease is invalid for every request, before maintenance expires it"
)
def test_overdue_lease_is_invalid_before_maintenance(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    assert rig.status(seq).state == TaskState.LEASED
    assert rig.complete(grant) is ReportAnswer.CANCELLED


@pytest.mark.spec("003", RECOVERY, "a replay reads no clock")
@pytest.mark.parametrize("seed", range(4))
def test_task_log_replay_reads_no_clock(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RefusingClock()
    rig = memory_rig(seed, 80, clock=clock)
    log, expected = rig.log(), rig.fold_log().tasks

    def refuse(*_: object) -> int:
        raise AssertionError("a replay read a clock")

    with monkeypatch.context() as patch:
        clock.refuses = True
        # The functions behind `SystemClock`.
        for name in ("time_ns", "clock_gettime_ns", "perf_counter_ns"):
            patch.setattr(time, name, refuse)
        assert TaskFold().replay(log).tasks == expected


@pytest.mark.spec("003", RECOVERY, "steps of the wall clock change no log record and no row")
@pytest.mark.parametrize("seed", range(4))
def test_wall_clock_steps_change_no_log_record(seed: int) -> None:
    calm, hostile = memory_rig(seed, 80), memory_rig(seed, 80, Random(seed))
    assert hostile.log() == calm.log()
    assert hostile.rows() == calm.rows()


@pytest.mark.spec(
    "003",
    RECOVERY,
    "a replay from the latest checkpoint gives the same rows as the whole log",
    module=("holdfast.tasks.checkpoint", "holdfast.tasks.replay_check"),
)
def test_replay_from_a_checkpoint_matches_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.tasks import checkpoint

    monkeypatch.setattr(checkpoint, "CHUNK_TASKS", 4)
    clock = SimClock()
    rig = TaskOperationsRig(InProcessStore("memory:", MemoryBackend(), clock), clock)
    for step, _ in enumerate(RandomTaskHistory(rig, 11).run(150)):
        if step % 40 == 39:
            assert checkpoint.create(rig.store, UNIVERSE)
            rig.check_consistency()
    assert rig.store.read(journal.head, KEYS.subject).floor > 1


# -- 7. invariants -------------------------------------------------------------------------------


def all_statuses(seed: int) -> Iterator[tuple[int, TaskStatusRow]]:
    """Yield every task status at every height of a history."""
    rig = memory_rig(seed + 70, 100)
    for rows in rig.rows_by_height.values():
        yield from rows.items()


@pytest.mark.spec(
    "003",
    INVARIANTS,
    "a leased task has exactly one lease, and any other task has none",
)
@pytest.mark.parametrize("seed", range(3))
def test_leased_tasks_have_one_lease_and_waiting_tasks_none(seed: int) -> None:
    seen = set()
    for _, status in all_statuses(seed):
        seen.add(status.state)
        if status.state == TaskState.LEASED:
            assert status.lease
            assert status.expires_ns
        else:
            assert not status.expires_ns
        if status.state == TaskState.WAITING:
            assert (status.lease, status.worker) == (0, "")
    assert {TaskState.WAITING, TaskState.LEASED, TaskState.COMPLETED} <= seen


@pytest.mark.spec(
    "003",
    INVARIANTS,
    "a lease id names one grant and is valid for one task",
)
@pytest.mark.parametrize("seed", range(3))
def test_lease_id_names_one_grant_of_a_task(seed: int) -> None:
    rig = memory_rig(seed + 80, 100)
    grants_by_lease: dict[int, set[tuple[str, int, int]]] = {}
    tasks_of: dict[int, list[int]] = {}
    for record in rig.log():
        if isinstance(record, LeaseGranted):
            grant = (record.worker_id, record.expiry_timestamp, record.decided_at)
            grants_by_lease.setdefault(record.lease_id, set()).add(grant)
            tasks_of.setdefault(record.lease_id, []).append(record.task_id)
    assert len(grants_by_lease) > 5
    # A lease number belongs to one grant: one worker, one decision time, one expiry. It names a task once.
    assert all(len(grants) == 1 for grants in grants_by_lease.values())
    assert all(len(tasks) == len(set(tasks)) for tasks in tasks_of.values())
    assert list(grants_by_lease) == sorted(grants_by_lease), "numbers rise, so none comes again"
    # The lease of one task is not valid for another task.
    a, b = rig.submit(b"a", b"b", name="of its own", queue="apart")
    [first] = rig.lease(1, queues=("apart",), worker="v")
    [second] = rig.lease(1, queues=("apart",), worker="v")
    assert (first.seq, second.seq) == (a, b)
    assert max(grants_by_lease) < first.lease < second.lease
    assert rig.extend(HeldLease(a, second.lease), HeldLease(b, first.lease)) == [0, 0]
    wrong = [
        TaskReport(a, second.lease, AttemptOutcome.OK),
        TaskReport(b, first.lease, AttemptOutcome.OK),
    ]
    assert ReportAnswer.COMMITTED not in rig.report(*wrong, worker="v")
    assert rig.states(a, b) == ["LEASED", "LEASED"]


@pytest.mark.spec("003", INVARIANTS, "a completed, failed or dead task never changes")
@pytest.mark.parametrize("seed", range(3))
def test_ended_task_never_changes(seed: int) -> None:
    ended: dict[int, TaskStatusRow] = {}
    for seq, status in all_statuses(seed):
        if seq in ended:
            assert logged_fields({seq: status}) == logged_fields({seq: ended[seq]})
        elif status.state in TASK_TRANSITIONS.terminal:
            ended[seq] = status
    assert len(ended) > 5


@pytest.mark.spec(
    "003", INVARIANTS, "a task never has more failures or expiries than its budgets allow"
)
@pytest.mark.parametrize("seed", range(3))
def test_failures_and_expiries_stay_within_their_budgets(seed: int) -> None:
    rig = memory_rig(seed + 90, 150)

    def budgets(txn: Txn) -> Iterator[tuple[TaskStatusRow, TaskSpec]]:
        for task in consistency.load_tasks(txn, KEYS).values():
            yield task.status, task.spec

    for status, spec in rig.store.read(lambda txn: list(budgets(txn))):
        assert status.failures <= spec.attempts
        assert status.expiries <= spec.expiries_max


@pytest.mark.spec(
    "003",
    INVARIANTS,
    "verification reports a broken task invariant",
    module=("holdfast.tasks.replay_check",),
)
def test_verify_finds_a_broken_task_invariant(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    wrong = status_fold.TaskStatusRow(TaskState.WAITING, 1, lease=1)
    rig.store.transact(lambda txn: txn.put(KEYS.statuses + pack_int(seq), events.codec.pack(wrong)))
    assert rig.store.read(lambda txn: list(replay_check.find_differences(txn, UNIVERSE)))


# -- 8. mental model -----------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    MODEL,
    "the result of a task counts only when its report commits, and the task is leased again otherwise",
)
def test_task_without_a_committed_report_is_leased_again(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    again = rig.lease_one(seq, alone=True)
    assert again.attempt == 2
    assert rig.complete(again) is ReportAnswer.COMMITTED


@pytest.mark.spec(
    "003",
    MODEL,
    "if two workers report the same task, only the report of the current lease commits",
)
def test_only_the_current_lease_commits_a_result(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    first = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    [second] = rig.lease(worker="v", alone=True)
    late = rig.report(TaskReport(seq, first.lease, AttemptOutcome.OK, b"of the first"), worker="w")
    good = rig.report(
        TaskReport(seq, second.lease, AttemptOutcome.OK, b"of the second"), worker="v"
    )
    assert (late, good) == ([ReportAnswer.CANCELLED], [ReportAnswer.COMMITTED])
    assert rig.status(seq).result == b"of the second"
