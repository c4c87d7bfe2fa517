"""Document 003, rule by rule, in its order.

Where the design settles a rule differently, the test guards what we built and its rule says so. After
every operation of every test here the rows are verified against the log and counted again (`Desk`).
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from holdfast import clock as clocks
from holdfast import codec
from holdfast.authority import workers
from holdfast.clock import S, SimClock
from holdfast.durable import journal
from holdfast.errors import HoldfastError, IllegalTransition, Invalid, NotFound, StoreFull
from holdfast.store.api import Operation, Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend, MemoryTxn
from holdfast.store.rows import LmdbBackend
from holdfast.tasks import board, records, recount, verify
from holdfast.tasks import coordinator as tasks
from holdfast.tasks import lease as leases
from holdfast.tasks.board import Board, after
from holdfast.tasks.coordinator import Answer, End, Grant, Hold, New, Report
from holdfast.tasks.records import (
    LeaseExpired,
    LeaseExtended,
    LeaseGranted,
    Single,
    TaskCancelled,
    TaskCompleted,
    TaskCreated,
    TaskDead,
    TaskFailed,
)
from holdfast.tasks.rows import FRESH, Spec, Status, body_of, pack_int
from holdfast.tasks.states import TABLE, Event, State
from tests.durable.conftest import SIMULATED
from tests.tasks.histories import History
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, Desk, logged, singles
from tests.tidy_rules import ROOT, Module, package_modules

MODULES = ("holdfast.tasks.coordinator", "holdfast.tasks.board", "holdfast.tasks.decision")

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
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    clock = SimClock()
    for store in SIMULATED[request.param](tmp_path, clock):
        yield Desk(store, clock)


def memory_desk(seed: int, steps: int, wall: Random | None = None) -> Desk:
    """A desk after a history; its wall clock is stepped by hours, both ways, if `wall` says so."""
    clock = SimClock()
    desk = Desk(LocalStore("memory:", MemoryBackend(), clock), clock)
    for _ in History(desk, seed).run(steps):
        if wall is not None:
            clock.step_wall(wall.choice((-5, -1, 1, 30)) * 3600 * S)
    return desk


# -- 1. design principle -------------------------------------------------------------------------


@pytest.mark.spec("003", PRINCIPLE, "whatever changes a task's owner or state is in the log")
@pytest.mark.parametrize("seed", range(4))
def test_no_status_changes_without_a_record(desk: Desk, seed: int) -> None:
    before: dict[int, Status] = {}
    height = 0
    for _ in History(desk, seed).run(80):
        rows = desk.rows()
        entries = desk.entries()
        named = {record.task_id for entry in entries[height:] for record in singles(entry)}
        was, now = logged(before), logged(rows)
        changed = {seq for seq in rows if was.get(seq) != now[seq]}
        assert changed <= named
        before, height = rows, len(entries)


@pytest.mark.spec("003", PRINCIPLE, "the coordinator's operations are the only writers of tasks")
def test_there_are_eight_kinds_of_records_and_no_other() -> None:
    assert {kind.__name__ for kind in Single.__subclasses__()} == {
        "TaskCreated", "LeaseGranted", "LeaseExtended", "LeaseExpired",
        "TaskCompleted", "TaskFailed", "TaskCancelled", "TaskDead",
    }  # fmt: skip
    # The operations of this package are the coordinator's, and those that write checkpoints of its log.
    found = {
        member
        for module in package_modules()
        if module.name.startswith("holdfast.tasks.")
        for member in vars(importlib.import_module(module.name)).values()
        if isinstance(member, Operation)
    }
    coordinators = {one for one in vars(tasks).values() if isinstance(one, Operation)}
    beside = {one.name.partition(":")[0] for one in found - coordinators}
    assert beside <= {"holdfast.tasks.checkpoint"} | RETENTION
    assert {"submit", "lease", "extend", "settle", "cancel", "redrive"} <= {
        one.name.partition(":")[2] for one in coordinators
    }


# Modules of this package whose operations remove rows of tasks that ended.
RETENTION = {"holdfast.tasks.retention"}
# Holds the place of the store alone, and writes rows that follow from the log. It never writes the log.
REBUILD = "holdfast.ops.rebuild"
WRITES = {"put", "delete", "add", "append", "set_all"}


@pytest.mark.spec("003", PRINCIPLE, "the coordinator's operations are the only writers of tasks")
def test_no_other_part_writes_into_the_space_of_tasks() -> None:
    writers = []
    for module in package_modules():
        if module.name.startswith(("holdfast.tasks.", "holdfast.sim.")):
            continue
        if module.name == REBUILD:
            assert "places.source(" in module.source
            assert "journal.append" not in module.source
            continue
        for call in ast.walk(module.tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                told = ast.unparse(call)
                names_tasks = "Space.TASK" in told or TASK_KEYS.search(told)
                if call.func.attr in WRITES and names_tasks and imports_tasks(module):
                    writers.append(f"{module.name}:{call.lineno}: {told}")
    assert writers == []
    planted = Module(
        "x", "from holdfast.tasks.rows import keys_of\ntxn.put(keys.statuses + s, b'')"
    )
    [call] = [one for one in ast.walk(planted.tree) if isinstance(one, ast.Call)]
    assert TASK_KEYS.search(ast.unparse(call)), "a writer would be seen"
    assert imports_tasks(planted)


TASK_KEYS = re.compile(r"\b_?[Kk](EYS|eys)\w*(\(.*\))?\.(" + "|".join(vars(KEYS)) + r")\b")


def imports_tasks(module: Module) -> bool:
    return (
        any(
            one.target == "holdfast.tasks.rows" and {"Keys", "keys_of"} & set(one.names)
            for one in module.imports
        )
        or "Space.TASK" in module.source
    )


@pytest.mark.spec("003", PRINCIPLE, "all of it goes through one log, in one order")
def test_the_log_is_one_chain(desk: Desk) -> None:
    for _ in History(desk, 5).run(60):
        pass
    desk.store.read(journal.verify, KEYS.subject)
    assert len(desk.entries()) == desk.store.read(journal.head, KEYS.subject).height


# -- 2. authoritative state ----------------------------------------------------------------------


@pytest.mark.spec(
    "003", TASK, "a task has an id, a payload, a state, an attempt and a lease or none"
)
def test_what_a_task_is(desk: Desk) -> None:
    seq = desk.one(b"payload")
    body = desk.store.read(body_of, KEYS, pack_int(seq))
    assert body is not None
    assert body.args == b"payload"
    assert (desk.state(seq), desk.status(seq).attempt) == (State.WAITING, 0)
    assert desk.status(seq).lease == 0


@pytest.mark.spec("003", TASK, "five states: waiting, leased, completed, failed, dead")
def test_the_five_states() -> None:
    assert [state.name for state in State] == ["WAITING", "LEASED", "COMPLETED", "FAILED", "DEAD"]


@pytest.mark.spec(
    "003", TASK, "a replay gives the same state, at every height", module=("holdfast.tasks.verify",)
)
@pytest.mark.parametrize("seed", range(6))
def test_a_replay_is_what_the_rows_were_at_every_height(seed: int) -> None:
    desk = memory_desk(seed, 100)
    replayed = Board()
    for height, entry in enumerate(desk.entries(), 1):
        replayed.replay(singles(entry))
        if height in desk.lived:
            was = desk.lived[height]
            mine = {seq: status for seq, status in replayed.tasks.items() if seq in was}
            assert logged(mine) == logged(was)
    assert len(desk.lived) > 30


@pytest.mark.spec(
    "003", TASK, "the same records give the same board, however often they are replayed"
)
def test_a_replay_is_deterministic(tmp_path: Path) -> None:
    desk = memory_desk(7, 100)
    expected = desk.board().tasks
    assert desk.board().tasks == expected
    assert logged(desk.rows()) == logged({seq: expected[seq] for seq in desk.rows()})
    # The same in other processes: other hashes, another time, another random generator.
    log = tmp_path / "log"
    log.write_bytes(codec.pack(desk.store.read(entry_bodies)))
    for hash_seed in ("0", "1", "77"):
        told = subprocess.run(
            [sys.executable, "-c", REPLAY_AGAIN, str(log), hash_seed],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == digest_of(expected)


def entry_bodies(txn: Txn) -> list[bytes]:
    head = journal.head(txn, KEYS.subject)
    return [e.body for e in journal.read(txn, KEYS.subject, head.floor, head.height + 1, 10_000)]


def digest_of(found: dict[int, Status]) -> str:
    return codec.digest(codec.pack([[seq, found[seq]] for seq in sorted(found)])).hex()


REPLAY_AGAIN = """
import pathlib, random, sys, time
now = int(sys.argv[2]) * 86_400
time.time, time.time_ns, time.monotonic_ns = lambda: now, lambda: now * 10**9, lambda: now
random.seed(now)
from holdfast import codec
from holdfast.tasks import records
from holdfast.tasks.board import Board
from tests.spec.test_003_coordinator import digest_of
from tests.tasks.rig import singles
bodies = codec.unpack(pathlib.Path(sys.argv[1]).read_bytes())
log = [record for body in bodies for record in singles(records.decode(body))]
print(digest_of(Board().replay(log).tasks))
"""


@pytest.mark.spec("003", LEASE, "a lease has an id, a task, a worker and a time when it ends")
def test_what_a_lease_is(desk: Desk) -> None:
    seq = desk.one()
    [grant] = desk.lease(worker="v")
    status = desk.status(seq)
    assert (status.lease, status.worker, status.expires_ns) == (grant.lease, "v", grant.expires_ns)


@pytest.mark.spec("003", LEASE, "a lease is valid only as the current one of its task")
def test_a_lease_that_is_not_the_current_one_is_none(desk: Desk) -> None:
    seq = desk.one()
    old = desk.leased(seq)
    desk.later(LEASE_NS)
    desk.leased(seq, alone=True)
    assert desk.extend(Hold(seq, old.lease)) == [0]
    assert desk.complete(old) is Answer.CANCELLED


@pytest.mark.spec("003", LEASE, "leases do not exist without a task")
def test_a_lease_ends_with_its_task(desk: Desk) -> None:
    seq = desk.one(retain_ns=0)
    desk.complete(desk.leased(seq))
    desk.later(LEASE_NS)
    while desk.maintain():
        pass
    rows = desk.store.read(lambda txn: txn.scan(KEYS.expiries, KEYS.expiries + b"\xff"))
    assert rows == []


# -- 3. derived state ----------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    INDEXES,
    "indexes are derived: never other than a recount makes them",
    module=("holdfast.tasks.recount",),
)
@pytest.mark.parametrize("seed", range(4))
def test_indexes_are_a_recount(seed: int) -> None:
    desk = memory_desk(seed + 40, 100)
    assert not desk.store.read(lambda txn: list(recount.differences(txn, UNIVERSE)))


@pytest.mark.spec("003", INDEXES, "waiting tasks are found in one place, others in none")
def test_a_task_that_waits_is_in_one_place(desk: Desk) -> None:
    desk.submit(b"a", New(b"b", delay_ns=S), New(b"c", after=(-1,)))
    desk.lease(1)
    counts = desk.counts()
    assert (counts.ready, counts.delayed, counts.blocked, counts.leased) == (0, 1, 1, 1)


@pytest.mark.spec(
    "003", REGISTRY, "who is alive is advice: a worker nobody knows may lease and complete"
)
def test_an_unregistered_worker_is_as_good_as_any(desk: Desk) -> None:
    seq = desk.one()
    [grant] = desk.lease(worker="nobody-knows-me")
    assert desk.store.read(workers.known, UNIVERSE) == []
    report = Report(seq, grant.lease)
    assert desk.settle(report, worker="nobody-knows-me") == [Answer.COMMITTED]


@pytest.mark.spec(
    "003", REGISTRY, "a worker that is silent loses its lease by time, and by nothing else"
)
def test_silence_alone_takes_no_lease(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.until(grant.expires_ns - 1)
    desk.maintain()
    assert desk.states(seq) == ["LEASED"]
    desk.until(grant.expires_ns)
    desk.maintain()
    assert desk.states(seq) == ["WAITING"]


@pytest.mark.spec("003", REGISTRY, "what workers say of their progress is lost without harm")
def test_progress_reports_are_soft(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.do(tasks.report_progress, [(seq, grant.lease, b"half")])

    def lose(txn: Txn) -> None:
        for key, _ in txn.scan(KEYS.progress, KEYS.progress + b"\xff"):
            txn.delete(key)

    desk.store.transact(lose)
    desk.check()
    assert desk.complete(grant) is Answer.COMMITTED


# -- 4. the table --------------------------------------------------------------------------------

AT = 100
STATUSES = {
    State.WAITING: Status(State.WAITING, 1),
    State.LEASED: Status(State.LEASED, 1, lease=7, worker="w", expires_ns=200),
    State.COMPLETED: Status(State.COMPLETED, 1, lease=7, worker="w", ended_ns=50),
    State.FAILED: Status(State.FAILED, 1, 1, lease=7, worker="w", ended_ns=50),
    State.DEAD: Status(State.DEAD, 1, ended_ns=50),
}
RECORDS: dict[Event, Single] = {
    Event.GRANT: LeaseGranted(1, AT, 8, "v", 300),
    Event.EXTEND: LeaseExtended(1, AT, 7, 400, True),
    Event.EXPIRE: LeaseExpired(1, 200, 7),
    Event.COMPLETE: TaskCompleted(1, AT, 7),
    Event.RETRY: TaskFailed(1, AT, 7, "failed", "e", "failure", False, 150),
    Event.FAIL: TaskFailed(1, AT, 7, "failed", "e", "failure", True, 0),
    Event.BURY: TaskDead(1, AT, "cancelled"),
}
PAIRS = [(state, event) for state in State for event in Event]


@pytest.mark.spec(
    "003",
    "4. Log Records",
    "every pair of a state and a record moves as the table says, or not at all",
)
@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_of_the_table(state: State, event: Event) -> None:
    was, record = STATUSES[state], RECORDS[event]
    if TABLE.allows(state, event):
        assert after(was, record).state == TABLE.table[state, event]
        return
    folded = Board()
    folded.tasks[1] = was
    with pytest.raises(IllegalTransition) as refused:
        folded.apply(record)
    assert (refused.value.prior, refused.value.attempted) == (state.name, event.name)
    assert folded.tasks[1] is was


@pytest.mark.spec(
    "003", "4. Log Records", "all states are reached, and the ended ones are left by nothing"
)
def test_the_table_is_sound() -> None:
    assert TABLE.unreachable() == frozenset()
    assert TABLE.terminal == {State.COMPLETED, State.FAILED, State.DEAD}


@pytest.mark.spec("003", "4. Log Records", "a record about a task that is none is refused")
@pytest.mark.parametrize("record", [*RECORDS.values(), TaskCancelled(1, AT, 7, "w")])
def test_a_record_of_no_task_is_refused(record: Single) -> None:
    with pytest.raises(Invalid):
        Board().apply(record)


@pytest.mark.spec(
    "003", "4. Log Records", "what was decided together is one entry, in the order of decision"
)
def test_an_entry_holds_what_one_operation_decided(desk: Desk) -> None:
    desk.submit(b"a", b"b")
    entry = desk.entries()[-1]
    assert [type(record).__name__ for record in singles(entry)] == ["TaskCreated"] * 2


# -- 4.1 TaskCreated -----------------------------------------------------------------------------


@pytest.mark.spec(
    "003", CREATED, "creates a task that waits, with no attempt made, at the time of the record"
)
def test_created(desk: Desk) -> None:
    seq = desk.one()
    [record] = desk.log()
    assert isinstance(record, TaskCreated)
    assert (record.task_id, record.created_at) == (seq, desk.store.now_ns())
    assert desk.board().tasks == {seq: FRESH}
    assert (FRESH.state, FRESH.attempt) == (State.WAITING, 0)


@pytest.mark.spec(
    "003", CREATED, "the log vouches for the payload by its hash, which stands in one place"
)
def test_the_payload_is_what_was_logged(desk: Desk) -> None:
    seq = desk.one(b"payload")
    [stored] = desk.entries()[0].records
    assert isinstance(stored, records.Created)
    row = desk.store.read(lambda txn: txn.get(KEYS.bodies + pack_int(seq)))
    assert row is not None
    assert stored.digest == records.digest_of([row])


@pytest.mark.spec("003", CREATED, "no task is created twice")
def test_a_task_is_created_once() -> None:
    folded = Board()
    folded.apply(TaskCreated(1, AT, None))
    with pytest.raises(Invalid):
        folded.apply(TaskCreated(1, AT, None))


# -- 4.2 LeaseGranted ----------------------------------------------------------------------------


@pytest.mark.spec(
    "003", GRANTED, "a waiting task becomes leased, by this lease, and one attempt more is counted"
)
def test_granted(desk: Desk) -> None:
    seq = desk.one()
    [grant] = desk.lease(worker="v")
    record = desk.log()[-1]
    assert record == LeaseGranted(seq, desk.store.now_ns(), grant.lease, "v", grant.expires_ns)
    status = desk.board().tasks[seq]
    assert (status.state, status.lease, status.attempt) == (State.LEASED, grant.lease, 1)


@pytest.mark.spec("003", GRANTED, "only a waiting task is granted")
@pytest.mark.parametrize("state", [state for state in State if state is not State.WAITING])
def test_what_does_not_wait_is_not_granted(state: State) -> None:
    with pytest.raises(IllegalTransition):
        after(STATUSES[state], RECORDS[Event.GRANT])


@pytest.mark.spec("003", GRANTED, "there is no other way for a task to become owned")
def test_only_a_grant_makes_an_owner() -> None:
    made = {event for (_, event), state in TABLE.table.items() if state is State.LEASED}
    assert made == {Event.GRANT, Event.EXTEND}
    assert [state for state, event in TABLE.table if event is Event.EXTEND] == [State.LEASED]


@pytest.mark.spec(
    "003", GRANTED, "attempts count grants; failures and expiries have budgets of their own"
)
def test_attempts_count_grants(desk: Desk) -> None:
    seq = desk.one(attempts=2, expiries_max=5)
    desk.fail(desk.leased(seq), End.RELEASED)
    desk.leased(seq)
    desk.later(LEASE_NS)
    desk.fail(desk.leased(seq, alone=True))
    status = desk.status(seq)
    assert (status.attempt, status.failures, status.expiries) == (3, 1, 1)


# -- 4.3 LeaseExtended ---------------------------------------------------------------------------


@pytest.mark.spec("003", EXTENDED, "the end of a live lease is moved, and the task stays as it is")
def test_extended(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.later(S)
    [until] = desk.extend(Hold(seq, grant.lease))
    record = desk.log()[-1]
    assert isinstance(record, LeaseExtended)
    assert (record.lease_id, record.new_expiry_timestamp) == (grant.lease, until)
    status = desk.status(seq)
    assert (status.state, status.attempt, status.expires_ns) == (State.LEASED, 1, until)


@pytest.mark.spec(
    "003", EXTENDED, "a lease that does not exist is not extended, and nothing is logged"
)
def test_no_lease_no_extension(desk: Desk) -> None:
    seq = desk.one()
    assert desk.extend(Hold(seq, 1), Hold(9, 1)) == [0, 0]
    assert len(desk.log()) == 1


@pytest.mark.spec(
    "003", EXTENDED, "an expired lease is not extended, though nobody has written so yet"
)
def test_an_expired_lease_is_not_extended(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.until(grant.expires_ns)
    assert desk.extend(Hold(seq, grant.lease, True)) == [0]
    assert desk.said(seq) == ["TaskCreated", "LeaseGranted"]


@pytest.mark.spec(
    "003", EXTENDED, "a replay refuses an extension of a lease that is over, or another's"
)
@pytest.mark.parametrize("record", [LeaseExtended(1, 200, 7, 400, False), LeaseExtended(1, AT, 6, 400, False)])  # fmt: skip
def test_a_replay_refuses_a_late_extension(record: Single) -> None:
    with pytest.raises(Invalid):
        after(STATUSES[State.LEASED], record)


# -- 4.4 LeaseExpired ----------------------------------------------------------------------------


@pytest.mark.spec(
    "003", EXPIRED, "is written, never guessed: the task waits again, without a lease"
)
def test_expired(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.later(LEASE_NS)
    desk.maintain()
    assert desk.log()[-1] == LeaseExpired(seq, desk.store.now_ns(), grant.lease)
    status = desk.status(seq)
    assert (status.state, status.lease, status.worker) == (State.WAITING, 0, "")


@pytest.mark.spec(
    "003", EXPIRED, "an expiry stands before the grant that follows it, in the same entry"
)
def test_an_expiry_is_written_before_the_next_grant(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    desk.later(LEASE_NS)
    desk.leased(seq, alone=True)
    last = [type(record).__name__ for record in singles(desk.entries()[-1])]
    assert last == ["LeaseExpired", "LeaseGranted"]


@pytest.mark.spec("003", EXPIRED, "time ends a lease, not the worker: no report undoes it")
def test_an_expiry_is_a_fact_of_time(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.until(grant.expires_ns)
    assert desk.complete(grant) is Answer.CANCELLED
    assert desk.state(seq) is not State.COMPLETED


@pytest.mark.spec(
    "003", EXPIRED, "a replay refuses an expiry before its time, and of a lease that is another"
)
@pytest.mark.parametrize("record", [LeaseExpired(1, 199, 7), LeaseExpired(1, 300, 6)])
def test_a_replay_refuses_an_early_expiry(record: Single) -> None:
    with pytest.raises(Invalid):
        after(STATUSES[State.LEASED], record)


@pytest.mark.spec(
    "003", EXPIRED, "expiries have a budget: the last one is the task's death, in the same entry"
)
def test_a_task_does_not_expire_for_ever(desk: Desk) -> None:
    seq = desk.one(expiries_max=1)
    desk.leased(seq, alone=True)
    desk.later(LEASE_NS)
    desk.maintain()
    last = [type(record).__name__ for record in singles(desk.entries()[-1])]
    assert last == ["LeaseExpired", "TaskDead"]
    assert desk.states(seq) == ["DEAD"]


# -- 4.5 TaskCompleted ---------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    COMPLETED,
    "a leased task, by its current lease, in time: it is completed, the lease is over",
)
def test_completed(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.complete(grant)
    assert desk.log()[-1] == TaskCompleted(seq, desk.store.now_ns(), grant.lease)
    assert desk.states(seq) == ["COMPLETED"]
    assert desk.extend(Hold(seq, grant.lease)) == [0]


@pytest.mark.spec("003", COMPLETED, "not in any other state")
@pytest.mark.parametrize("state", ["WAITING", "FAILED", "DEAD"])
def test_what_is_not_leased_is_not_completed(desk: Desk, state: str) -> None:
    seq = desk.one(attempts=2 if state == "WAITING" else 1)
    grant = desk.leased(seq)
    if state == "DEAD":
        desk.cancel(seq)
    else:
        desk.fail(grant)
    assert desk.complete(grant) is Answer.CANCELLED
    assert desk.states(seq) == [state]


@pytest.mark.spec("003", COMPLETED, "not under another lease, be it older or of another task")
def test_another_lease_completes_nothing(desk: Desk) -> None:
    a, b = desk.one(), desk.one(lease_ns=LEASE_NS * 2)
    first, second = desk.lease()
    assert desk.settle(Report(a, second.lease), Report(b, first.lease)) == [Answer.CANCELLED] * 2
    assert desk.states(a, b) == ["LEASED", "LEASED"]


@pytest.mark.spec("003", COMPLETED, "not at the nanosecond of its expiry, nor later")
@pytest.mark.parametrize("late_ns", [0, 1, LEASE_NS])
def test_a_late_completion_is_none(desk: Desk, late_ns: int) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.until(grant.expires_ns + late_ns)
    assert desk.complete(grant) is Answer.CANCELLED
    assert desk.state(seq) is not State.COMPLETED


@pytest.mark.spec(
    "003", COMPLETED, "the same again gets the first answer again, and changes nothing"
)
def test_completing_twice(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    assert [desk.complete(grant, b"1"), desk.complete(grant, b"2")] == [Answer.COMMITTED] * 2
    assert desk.status(seq).result == b"1"
    assert desk.said(seq) == ["TaskCreated", "LeaseGranted", "TaskCompleted"]


@pytest.mark.spec("003", COMPLETED, "a replay refuses one under a lease that is over, or another's")
@pytest.mark.parametrize("record", [TaskCompleted(1, 200, 7), TaskCompleted(1, AT, 6)])
def test_a_replay_refuses_a_completion_without_a_lease(record: Single) -> None:
    with pytest.raises(Invalid):
        after(STATUSES[State.LEASED], record)


# -- 4.6 TaskCancelled ---------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    CANCELLED,
    "a report under a lease that is none is on record, changes nothing, and its worker is told",
)
@pytest.mark.parametrize("end", list(End))
def test_cancelled(desk: Desk, end: End) -> None:
    seq = desk.one()
    old = desk.leased(seq)
    desk.later(LEASE_NS)
    desk.leased(seq, alone=True)
    before = desk.status(seq)
    [answer] = desk.settle(Report(seq, old.lease, end), worker="v")
    assert answer is Answer.CANCELLED
    assert desk.status(seq) == before
    assert desk.log()[-1] == TaskCancelled(seq, desk.store.now_ns(), old.lease, "v")


@pytest.mark.spec("003", CANCELLED, "it is no failure: no budget is touched")
def test_a_lost_lease_is_no_failure(desk: Desk) -> None:
    seq = desk.one(attempts=1)
    old = desk.leased(seq)
    desk.later(LEASE_NS)
    desk.leased(seq, alone=True)
    for _ in range(5):
        desk.fail(old)
    assert desk.status(seq).failures == 0
    assert desk.states(seq) == ["LEASED"]


@pytest.mark.spec(
    "003",
    CANCELLED,
    "a report that names no task, or a lease that was never given, is the worker's bug: rejected, and not on record",
)
@pytest.mark.parametrize("wrong", [Report(9, 1), Report(1, 55), Report(1, 0), Report(1, -3)])
def test_a_report_that_makes_no_sense_is_rejected(desk: Desk, wrong: Report) -> None:
    seq = desk.one()
    desk.leased(seq)
    height = len(desk.entries())
    assert desk.settle(wrong) == [Answer.REJECTED]
    assert len(desk.entries()) == height


@pytest.mark.spec("003", CANCELLED, "in any state a replay leaves the task as it is")
@pytest.mark.parametrize("state", list(State))
def test_a_replay_of_it_changes_nothing(state: State) -> None:
    assert after(STATUSES[state], TaskCancelled(1, AT, 3, "v")) is STATUSES[state]


# -- 4.7 TaskFailed ------------------------------------------------------------------------------


@pytest.mark.spec(
    "003", FAILED, "while the budget lasts the task waits again, for the time that the record names"
)
def test_failed_and_tried_again(desk: Desk) -> None:
    seq = desk.one(attempts=2)
    grant = desk.leased(seq)
    desk.fail(grant, reason="bad", error="because")
    record = desk.log()[-1]
    assert isinstance(record, TaskFailed)
    assert (record.lease_id, record.reason, record.final) == (grant.lease, "bad", False)
    status = desk.status(seq)
    assert (status.state, status.lease, status.failures) == (State.WAITING, 0, 1)
    assert status.not_before_ns == record.not_before > desk.store.now_ns()


@pytest.mark.spec("003", FAILED, "when the budget is used up the task is failed, once and for good")
@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_failed_for_good(desk: Desk, attempts: int) -> None:
    seq = desk.one(attempts=attempts, backoff_ns=0)
    for _ in range(attempts):
        desk.later(S)
        assert desk.states(seq) == ["WAITING"]
        desk.fail(desk.leased(seq))
    assert desk.states(seq) == ["FAILED"]
    assert desk.status(seq).failures == attempts
    desk.later(LEASE_NS)
    assert desk.lease(alone=True) == []


@pytest.mark.spec("003", FAILED, "its lease is over")
def test_a_failure_ends_the_lease(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.fail(grant)
    assert desk.extend(Hold(seq, grant.lease)) == [0]
    assert desk.fail(grant) is Answer.CANCELLED


@pytest.mark.spec("003", FAILED, "a retry keeps its place among those of its priority")
def test_a_retry_keeps_its_seq(desk: Desk) -> None:
    first = desk.one()
    desk.fail(desk.leased(first))
    desk.submit(b"younger", b"youngest")
    desk.until(desk.status(first).not_before_ns)
    assert desk.leased(first).attempt == 2


@pytest.mark.spec(
    "003",
    FAILED,
    "dead is for what was buried, cancelled, or outlived too many leases; the design's eighth record",
)
def test_dead_is_not_failed(desk: Desk) -> None:
    seq = desk.one()
    desk.cancel(seq, reason="operator")
    assert desk.log()[-1] == TaskDead(seq, desk.store.now_ns(), "operator")
    assert desk.states(seq) == ["DEAD"]


@pytest.mark.spec(
    "003", FAILED, "a redriven task is a new one that names the old; the old stays as it ended"
)
def test_a_redrive_is_a_new_task(desk: Desk) -> None:
    old = desk.one(attempts=1)
    desk.fail(desk.leased(old))
    [new] = desk.redrive(old)
    body = desk.store.read(body_of, KEYS, pack_int(new))
    assert body is not None
    assert body.redrive_of == old
    assert isinstance(desk.log()[-1], TaskCreated)
    assert desk.states(old, new) == ["FAILED", "WAITING"]
    assert desk.redrive(old) == [new]


# -- 5. atomicity --------------------------------------------------------------------------------

DECISIONS: dict[str, Callable[[Desk, Grant], object]] = {
    "submit": lambda desk, grant: desk.submit(b"x", b"y"),
    "lease": lambda desk, grant: desk.lease(),
    "extend": lambda desk, grant: desk.extend(Hold(grant.seq, grant.lease, True)),
    "complete": lambda desk, grant: desk.complete(grant),
    "fail": lambda desk, grant: desk.fail(grant),
    "cancel": lambda desk, grant: desk.cancel(grant.seq),
    "redrive": lambda desk, grant: desk.redrive(3),
    "expire": lambda desk, grant: (desk.later(LEASE_NS), desk.maintain()),
}


class FullBackend(MemoryBackend):
    """A disk that is full when it is told to be."""

    full = False

    def begin(self) -> object:  # type: ignore[override]
        if self.full:
            raise StoreFull()
        return super().begin()


@pytest.mark.spec("003", ATOMIC, "if the log cannot be written, it did not happen")
@pytest.mark.parametrize("name", list(DECISIONS))
def test_no_log_no_effect(name: str) -> None:
    clock = SimClock()
    disk = FullBackend()
    desk = Desk(LocalStore("memory:", disk, clock), clock)
    desk.submit(b"a", b"b", b"c")
    [grant] = desk.lease(1)
    desk.cancel(3)
    before = desk.rows(), desk.entries(), desk.counts()
    disk.full = True
    with pytest.raises(StoreFull):
        DECISIONS[name](desk, grant)
    disk.full = False
    assert (desk.rows(), desk.entries(), desk.counts()) == before
    DECISIONS[name](desk, grant)
    assert desk.entries() != before[1]


@pytest.mark.spec("003", ATOMIC, "an entry has all of its effects or none")
def test_a_refused_batch_has_no_effect(desk: Desk) -> None:
    a = desk.one()
    before = desk.rows(), desk.entries(), desk.counts()
    with pytest.raises(NotFound):
        desk.cancel(a, 99)
    with pytest.raises(HoldfastError):
        desk.submit(New(b"x", key="k"), New(b"y", key="k"))
    assert (desk.rows(), desk.entries(), desk.counts()) == before


@pytest.mark.spec("003", ATOMIC, "the record of a decision and what follows from it are one commit")
@pytest.mark.parametrize("name", list(DECISIONS))
def test_a_decision_is_one_commit(name: str) -> None:
    clock = SimClock()
    backend = WatchedBackend()
    desk = Desk(LocalStore("memory:", backend, clock), clock)
    desk.submit(b"a", b"b", b"c")
    [grant] = desk.lease(1)
    desk.cancel(3)
    height = len(desk.entries())
    backend.committed.clear()
    DECISIONS[name](desk, grant)
    # The desk has compared rows and log right after it; here: it was a single entry.
    assert len(desk.entries()) == height + 1
    # What a crash right after each commit leaves: the entry and all that follows from it.
    for rows in backend.committed:
        left = Desk(LocalStore("memory:", holding(rows), clock), clock)
        assert left.entries() == desk.entries(), "a commit without the record"
        assert left.rows() == desk.rows(), "a commit without what follows"
        assert left.counts() == desk.counts()
        left.check()
    assert len(backend.committed) == 1


class WatchedBackend(MemoryBackend):
    """Keeps the rows as each commit left them: what another reader could have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[dict[bytes, bytes]] = []

    def begin(self) -> WatchedTxn:
        return WatchedTxn(self)


class WatchedTxn(MemoryTxn):
    def commit(self) -> None:
        super().commit()
        backend = self._backend
        assert isinstance(backend, WatchedBackend)
        backend.committed.append(dict(backend.rows))


@pytest.mark.spec(
    "003", ATOMIC, "a grant is never seen half: leased with its lease, or waiting without"
)
def test_nothing_between_waiting_and_leased() -> None:
    clock = SimClock()
    backend = WatchedBackend()
    desk = Desk(LocalStore("memory:", backend, clock), clock)
    # A run of plain tasks, and tasks with a row of their own.
    desk.submit(*[b"x"] * 25)
    desk.submit(*[New(b"x", key=f"k{n}") for n in range(25)])
    for _ in range(10):
        desk.lease(5)
    assert desk.counts().leased == 50
    leased = set()
    for rows in backend.committed:
        seen = LocalStore("memory:", holding(rows), clock)
        found = Desk(seen, clock)
        found.check()
        for seq, status in found.rows().items():
            whole = (status.lease > 0, status.worker == "w", status.expires_ns > 0)
            assert whole == (status.state == State.LEASED,) * 3, (seq, status)
        now = [seq for seq, status in found.rows().items() if status.state == State.LEASED]
        assert found.counts().leased == len(now)
        leased.add(len(now))
    assert leased == set(range(0, 51, 5)), "a grant of five is seen whole or not at all"


def holding(rows: dict[bytes, bytes]) -> MemoryBackend:
    backend = MemoryBackend()
    for key, value in rows.items():
        backend.set(key, value)
    return backend


# -- 6. crash recovery ---------------------------------------------------------------------------


@pytest.mark.spec(
    "003", RECOVERY, "after a restart everything is as the log says, and nothing has to be repaired"
)
@pytest.mark.parametrize("seed", range(3))
def test_a_restart_finds_what_the_log_says(tmp_path: Path, seed: int) -> None:
    clock = SimClock()
    backend = LmdbBackend(tmp_path, readonly=False)
    desk = Desk(LocalStore("lmdb:", backend, clock), clock)
    for _ in History(desk, seed).run(60):
        pass
    before = desk.rows()
    desk.store.close()
    backend.close()
    backend = LmdbBackend(tmp_path, readonly=False)
    with LocalStore("lmdb:", backend, clock) as store:
        again = Desk(store, clock)
        again.check()
        assert again.rows() == before
        replayed = again.board().tasks
        assert logged({seq: replayed[seq] for seq in before}) == logged(before)
    backend.close()


@pytest.mark.spec(
    "003", RECOVERY, "leases that ran out meanwhile are expired before anything is granted"
)
def test_what_is_overdue_expires_before_anything_is_granted(desk: Desk) -> None:
    """All of it, however little is asked for."""
    desk.submit(*[b"x"] * 600, expiries_max=9)
    old = [grant for _ in range(60) for grant in desk.lease(10)]
    desk.one(b"y", priority=9)
    desk.later(1000 * LEASE_NS)
    [granted] = desk.lease(1)
    last = [type(record).__name__ for record in singles(desk.entries()[-1])]
    assert last == ["LeaseExpired"] * 600 + ["LeaseGranted"]
    assert {desk.complete(one) for one in old[::100]} == {Answer.CANCELLED}
    assert desk.complete(granted) is Answer.COMMITTED


@pytest.mark.spec(
    "003", RECOVERY, "leases that ran out meanwhile are expired before anything is granted"
)
def test_nothing_is_granted_while_a_lease_is_left_that_is_overdue(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than one decision ends, the first decisions grant nothing, and say so."""
    monkeypatch.setattr(leases, "EXPIRED_MAX", 30)
    desk.submit(*[b"x"] * 100, expiries_max=9)
    for _ in range(10):
        desk.lease(10)
    desk.one(b"y", priority=9)
    desk.later(LEASE_NS)
    answers = [desk.ask(1)]
    while answers[-1].overdue:
        answers.append(desk.ask(1))
    assert [len(one.grants) for one in answers] == [0, 0, 0, 1]
    assert desk.counts().leased == 1


@pytest.mark.spec(
    "003", RECOVERY, "expiry is judged before any request is served, though nothing has swept"
)
def test_an_overdue_lease_is_none_before_it_is_swept(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.later(LEASE_NS)
    assert desk.status(seq).state == State.LEASED
    assert desk.complete(grant) is Answer.CANCELLED


@pytest.mark.spec("003", RECOVERY, "a replay asks no clock: hostile ones change nothing")
@pytest.mark.parametrize("seed", range(4))
def test_a_replay_asks_no_clock(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = memory_desk(seed, 80)
    log, expected = desk.log(), desk.board().tasks

    def hostile(*_: object) -> int:
        raise AssertionError("a replay looked at a clock")

    for name in ("wall_ns", "boot_ns", "mono_ns"):
        monkeypatch.setattr(clocks.SystemClock, name, hostile)
        monkeypatch.setattr(SimClock, name, hostile)
    assert Board().replay(log).tasks == expected


@pytest.mark.spec(
    "003", RECOVERY, "wall clocks that step by hours change no decision, and so no replay"
)
@pytest.mark.parametrize("seed", range(4))
def test_a_wall_clock_that_jumps_changes_no_record(seed: int) -> None:
    calm, hostile = memory_desk(seed, 80), memory_desk(seed, 80, Random(seed))
    assert hostile.log() == calm.log()
    assert hostile.rows() == calm.rows()


@pytest.mark.spec(
    "003",
    RECOVERY,
    "read from the beginning, or from the checkpoint that stands for it",
    module=("holdfast.tasks.checkpoint", "holdfast.tasks.verify"),
)
def test_a_replay_from_a_checkpoint_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.tasks import checkpoint

    monkeypatch.setattr(checkpoint, "CHUNK_TASKS", 4)
    clock = SimClock()
    desk = Desk(LocalStore("memory:", MemoryBackend(), clock), clock)
    for step, _ in enumerate(History(desk, 11).run(150)):
        if step % 40 == 39:
            assert checkpoint.make(desk.store, UNIVERSE)
            desk.check()
    assert desk.store.read(journal.head, KEYS.subject).floor > 1


# -- 7. invariants -------------------------------------------------------------------------------


def all_statuses(seed: int) -> Iterator[tuple[int, Status]]:
    """Every task at every height of a history."""
    desk = memory_desk(seed + 70, 100)
    for rows in desk.lived.values():
        yield from rows.items()


@pytest.mark.spec(
    "003",
    INVARIANTS,
    "a task has at most one active lease; a waiting one has none, a leased one exactly one",
)
@pytest.mark.parametrize("seed", range(3))
def test_leased_or_not(seed: int) -> None:
    seen = set()
    for _, status in all_statuses(seed):
        seen.add(status.state)
        if status.state == State.LEASED:
            assert status.lease
            assert status.expires_ns
        else:
            assert not status.expires_ns
        if status.state == State.WAITING:
            assert (status.lease, status.worker) == (0, "")
    assert {State.WAITING, State.LEASED, State.COMPLETED} <= seen


@pytest.mark.spec(
    "003",
    INVARIANTS,
    "a lease refers to one task: its id is the number of its grant and the task's own",
)
@pytest.mark.parametrize("seed", range(3))
def test_no_lease_is_given_twice(seed: int) -> None:
    desk = memory_desk(seed + 80, 100)
    given: dict[int, set[tuple[str, int, int]]] = {}
    tasks_of: dict[int, list[int]] = {}
    for record in desk.log():
        if isinstance(record, LeaseGranted):
            told = (record.worker_id, record.expiry_timestamp, record.decided_at)
            given.setdefault(record.lease_id, set()).add(told)
            tasks_of.setdefault(record.lease_id, []).append(record.task_id)
    assert len(given) > 5
    # A number is of one grant: one worker, one time, one end. In it a task is named once.
    assert all(len(grants) == 1 for grants in given.values())
    assert all(len(tasks) == len(set(tasks)) for tasks in tasks_of.values())
    assert list(given) == sorted(given), "numbers rise, so none comes again"
    # The lease of one task is none of another.
    a, b = desk.submit(b"a", b"b", name="of its own", queue="apart")
    [first] = desk.lease(1, queues=("apart",), worker="v")
    [second] = desk.lease(1, queues=("apart",), worker="v")
    assert (first.seq, second.seq) == (a, b)
    assert max(given) < first.lease < second.lease
    assert desk.extend(Hold(a, second.lease), Hold(b, first.lease)) == [0, 0]
    wrong = [Report(a, second.lease, End.OK), Report(b, first.lease, End.OK)]
    assert Answer.COMMITTED not in desk.settle(*wrong, worker="v")
    assert desk.states(a, b) == ["LEASED", "LEASED"]


@pytest.mark.spec(
    "003", INVARIANTS, "what has completed never changes again, nor what failed or died"
)
@pytest.mark.parametrize("seed", range(3))
def test_the_end_is_the_end(seed: int) -> None:
    ended: dict[int, Status] = {}
    for seq, status in all_statuses(seed):
        if seq in ended:
            assert logged({seq: status}) == logged({seq: ended[seq]})
        elif status.state in TABLE.terminal:
            ended[seq] = status
    assert len(ended) > 5


@pytest.mark.spec(
    "003", INVARIANTS, "budgets hold: no more failures than attempts, no more expiries than allowed"
)
@pytest.mark.parametrize("seed", range(3))
def test_budgets_hold(seed: int) -> None:
    desk = memory_desk(seed + 90, 150)

    def budgets(txn: Txn) -> Iterator[tuple[Status, Spec]]:
        for task in recount.tasks_of(txn, KEYS).values():
            yield task.status, task.spec

    for status, spec in desk.store.read(lambda txn: list(budgets(txn))):
        assert status.failures <= spec.attempts
        assert status.expiries <= spec.expiries_max


@pytest.mark.spec(
    "003", INVARIANTS, "whoever breaks one is found", module=("holdfast.tasks.verify",)
)
def test_a_broken_invariant_is_found(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    wrong = board.Status(State.WAITING, 1, lease=1)
    desk.store.transact(
        lambda txn: txn.put(KEYS.statuses + pack_int(seq), records.codec.pack(wrong))
    )
    assert desk.store.read(lambda txn: list(verify.differences(txn, UNIVERSE)))


# -- 8. mental model -----------------------------------------------------------------------------


@pytest.mark.spec(
    "003",
    MODEL,
    "a lease is permission, not success: what a worker has done counts when it is committed",
)
def test_work_without_a_commit_is_done_again(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    desk.later(LEASE_NS)
    again = desk.leased(seq, alone=True)
    assert again.attempt == 2
    assert desk.complete(again) is Answer.COMMITTED


@pytest.mark.spec(
    "003",
    MODEL,
    "the coordinator never guesses: two workers that both claim success are told apart by their leases",
)
def test_two_narrators_one_truth(desk: Desk) -> None:
    seq = desk.one()
    first = desk.leased(seq)
    desk.later(LEASE_NS)
    [second] = desk.lease(worker="v", alone=True)
    late = desk.settle(Report(seq, first.lease, End.OK, b"of the first"), worker="w")
    good = desk.settle(Report(seq, second.lease, End.OK, b"of the second"), worker="v")
    assert (late, good) == ([Answer.CANCELLED], [Answer.COMMITTED])
    assert desk.status(seq).result == b"of the second"
