"""Task workers in real processes: killed at random together with the writer, crashed by their tasks, stopped for
longer than a lease, and restarted in order.

HOLDFAST_TEST_TASKS and HOLDFAST_TEST_KILLS set the size of the random test. The defaults are 50 tasks for each of
3 kills. The acceptance test uses 5,000 tasks and 100 kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal
from holdfast.store.api import Store, Txn
from holdfast.tasks import consistency, events, queries, replay_check
from holdfast.tasks.events import TaskCompleted, TaskCreated, TaskDead, TaskFailed
from holdfast.tasks.ids import parse_task_id
from holdfast.tasks.model import get_counts, keys_of
from holdfast.tasks.status_fold import TaskFold
from tests.process import task_app
from tests.process.conftest import LIMITS
from tests.process.watch import KILLS, os_process, processes_of, until, writer_of
from tests.processes import Proc

MODULES = (
    "holdfast.workers.tasks.worker",
    "holdfast.workers.tasks.process",
    "holdfast.tasks.leases",
    "holdfast.tasks.reports",
    "holdfast.cli.up",
)

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.task_app:app"]
TASKS = int(os.environ.get("HOLDFAST_TEST_TASKS") or 50 * KILLS)
WORKERS = 3
# One in 4 kills hits the writer. One in 6 rounds also stops a worker for longer than its leases.
WRITER_ONE_IN = 4
STOP_ONE_IN = 6
LONG_S = 60.0

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def rt(store: Store) -> Iterator[Runtime]:
    """The runtime that submits the tasks. Other processes run them."""
    runtime: Runtime = task_app.app.open(store, roles=())
    with runtime:
        yield runtime


@pytest.fixture
def up(home: Path, tmp_path: Path, store: Store) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(*options: str, ready: str | None = "ready") -> Proc:
            argv = [*UP, "--store", str(home), "--role", "task", *options]
            proc = Proc.spawn(argv, ready=ready, env={task_app.LOG: str(tmp_path / "runs")})
            return running.enter_context(proc)

        yield up


def runs_by_task(tmp_path: Path) -> dict[str, list[tuple[int, str]]]:
    """For each task: the attempt and the idempotency key of each logged run."""
    found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    path = tmp_path / "runs"
    for line in path.read_text().splitlines() if path.exists() else ():
        _, id, attempt, key = line.split()
        found[id].append((int(attempt), key))
    return found


def counts(store: Store) -> Counter[str]:
    """The number of tasks of all queues in each state."""
    found: Counter[str] = Counter()
    for queue in task_app.app.queues:
        row = store.read(get_counts, keys_of("tasking"), queue)
        found.update(msgspec.structs.asdict(row))
    return +found


def ended_count(store: Store) -> int:
    now = counts(store)
    return now["completed"] + now["failed"] + now["dead"]


def row(store: Store, handle: hf.TaskHandle[Any]) -> queries.TaskRow:
    return store.read(queries.get_task, "tasking", parse_task_id(handle.id))


def assert_log_and_rows_agree(store: Store) -> None:
    assert not store.read(lambda txn: list(replay_check.find_differences(txn, "tasking")))
    assert not store.read(lambda txn: list(consistency.find_differences(txn, "tasking")))


def _task_log(txn: Txn) -> list[events.TaskRecord]:
    """Every event of the task log, which has not been truncated yet."""
    subject = keys_of("tasking").subject
    head = journal.head(txn, subject)
    assert head.floor == 1
    found: list[events.TaskRecord] = []
    for lo in range(1, head.height + 1, SCAN_PAGE):
        for entry in journal.read(txn, subject, lo, lo + SCAN_PAGE, SCAN_PAGE):
            found += events.iter_records(events.decode_entry(entry.body), lambda task: None)
    return found


def ends_by_task(log: list[events.TaskRecord]) -> Counter[int]:
    """The number of ends of each task."""
    return Counter(
        record.task_id
        for record in log
        if isinstance(record, TaskCompleted | TaskDead)
        or (isinstance(record, TaskFailed) and record.final)
    )


# -- random kills ----------------------------------------------------------------------------------


class WorkerFaults:
    """Injects seeded faults: kills workers and the writer, and stops workers."""

    def __init__(self, up: Up, home: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self._up = up
        self._home = home
        self._stopped: list[tuple[float, Proc]] = []
        self.workers = [up(ready=None) for _ in range(WORKERS)]

    @property
    def kills(self) -> int:
        return self.done["worker"] + self.done["writer"]

    def kill_one(self) -> None:
        if self.random.randrange(WRITER_ONE_IN) == 0:
            writer_of(self._home).kill()
            self.done["writer"] += 1
            return
        index = self.random.randrange(WORKERS)
        victim = self.workers[index]
        if victim.running:
            victim.kill()
            self.done["worker"] += 1
        self._replace(index)

    def stop_one(self) -> None:
        """Stop one worker for longer than its leases."""
        running = [
            one for one in self.workers if one.running and one not in self._stopped_workers()
        ]
        if len(running) > 1:
            victim = self.random.choice(running)
            victim.stop()
            self._stopped.append((time.monotonic() + 1.5 * task_app.LEASE_S, victim))
            self.done["stopped"] += 1

    def resume_and_replace(self) -> None:
        """Resume stopped workers that are due, and replace workers that their own tasks have crashed."""
        for at, one in list(self._stopped):
            if time.monotonic() >= at or not one.running:
                self._stopped.remove((at, one))
                if one.running:
                    one.cont()
        for index, one in enumerate(self.workers):
            if not one.running:
                assert one.wait() == 9, f"ended by itself: {one.errors[-20:]}"
                self.done["poisoned"] += 1
                self._replace(index)

    def finish(self) -> None:
        for _, one in self._stopped:
            if one.running:
                one.cont()
        self._stopped.clear()

    def _stopped_workers(self) -> list[Proc]:
        return [one for _, one in self._stopped]

    def _replace(self, index: int) -> None:
        self._stopped = [(at, one) for at, one in self._stopped if one is not self.workers[index]]
        self.workers[index].close()
        self.workers[index] = self._up(ready=None)


def submit_one(rt: Runtime, faults: WorkerFaults, n: int) -> tuple[hf.TaskHandle[Any], str]:
    """Submit the n-th task. Returns its handle and its expected final state."""
    seconds = faults.random.choice([0.0, 0.002, 0.02, 0.1])
    if n % 400 == 13:
        return rt.submit(task_app.poison, n, "exit"), "DEAD"
    if n % 400 == 213:
        return rt.submit(task_app.poison_apart, n, "SIGKILL"), "DEAD"
    if n % 50 == 7:
        return rt.submit(task_app.work, n, seconds, 99), "FAILED"
    if n % 10 == 3:
        return rt.submit(task_app.work, n, seconds, 2), "COMPLETED"
    if n % 10 == 8:
        narrow = task_app.work.options(queue="narrow", limit_key=f"{n % 7}")
        return rt.submit(narrow, n, seconds / 4, 0), "COMPLETED"
    if n % 10 == 5:
        return rt.submit(task_app.doze, n, seconds), "COMPLETED"
    if n % 50 == 9:
        return rt.submit(task_app.apart, n, seconds), "COMPLETED"
    return rt.submit(task_app.work, n, seconds, 0), "COMPLETED"


@pytest.mark.slow
@pytest.mark.timeout(120 + 5 * KILLS + TASKS // 10)
@pytest.mark.spec(
    "003",
    "7. Invariants",
    "after random kills of workers and writers each task ends once and a replay of the log gives the rows",
)
def test_each_task_ends_once_when_workers_and_writers_are_killed_at_random(
    up: Up, rt: Runtime, store: Store, home: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    faults = WorkerFaults(up, home, seed)
    began_s = time.monotonic()
    submitted: dict[str, tuple[hf.TaskHandle[Any], str, int]] = {}
    sent = 0
    while faults.kills < KILLS or sent < TASKS:
        for _ in range(min(-(-TASKS // KILLS), TASKS - sent)):
            handle, state = submit_one(rt, faults, sent)
            submitted[handle.id] = (handle, state, sent)
            sent += 1
        # The next fault comes after a random share of the waiting tasks has ended.
        goal = ended_count(store) + int((sent - ended_count(store)) * faults.random.random() * 0.8)

        def reached(goal: int = goal) -> bool:
            faults.resume_and_replace()
            return ended_count(store) >= goal

        until(reached, f"{goal} ends: {faults.done}, {counts(store)}", LONG_S)
        if faults.kills < KILLS:
            faults.kill_one()
        if faults.random.randrange(STOP_ONE_IN) == 0:
            faults.stop_one()

    def all_ended() -> bool:
        faults.resume_and_replace()
        return ended_count(store) >= TASKS

    until(all_ended, f"all: {faults.done}, {counts(store)}", 2 * LONG_S)
    faults.finish()
    passed_s = time.monotonic() - began_s

    assert set(counts(store)) == {"completed", "failed", "dead"}
    assert len(submitted) == TASKS == ended_count(store)
    runs = runs_by_task(tmp_path)
    expiries = failures = 0
    for id, (handle, state, n) in submitted.items():
        found = row(store, handle)
        status, spec = found.status, found.spec
        assert found.state.name == state, (id, n, status)
        assert status.failures <= spec.attempts, (id, n, status)
        assert status.expiries <= spec.expiries_max, (id, n, status)
        assert (state == "DEAD") == (status.expiries == spec.expiries_max), (id, n, status)
        assert (state == "FAILED") == (status.failures == spec.attempts), (id, n, status)
        # A worker may be killed or stopped with a lease of a task that it has not started.
        least = 0 if state == "DEAD" else 1
        assert least <= len(runs[id]) <= status.attempt, (id, n, status)
        assert {key for _, key in runs[id]} <= {f"task-{id}"}
        if state == "COMPLETED":
            assert handle.result(0) == n
        expiries, failures = expiries + status.expiries, failures + status.failures
    log = store.read(_task_log)
    created = [record.task_id for record in log if isinstance(record, TaskCreated)]
    assert ends_by_task(log) == Counter(dict.fromkeys(created, 1)), "each ended once"
    assert len(created) == TASKS
    TaskFold().replay(log)
    assert_log_and_rows_agree(store)
    repeated = sum(len(one) - 1 for one in runs.values())
    print(
        f"{TASKS} tasks in {passed_s:.0f} s; killed: {faults.done['worker']} workers, "
        f"{faults.done['writer']} writers; {faults.done['poisoned']} ended by their own tasks, "
        f"{faults.done['stopped']} stopped beyond their leases; {dict(counts(store))}; "
        f"{expiries} leases expired, {failures} failures, {repeated} runs repeated; "
        f"{len(log)} records replayed"
    )


def test_tasks_leased_to_stopped_waiting_workers_go_to_another_worker(
    up: Up, rt: Runtime, store: Store
) -> None:
    stopped = [up() for _ in range(2)]
    # Both workers now wait for tasks.
    rt.submit(task_app.work, 0, 0.0, 0).result(LONG_S)
    for one in stopped:
        one.stop()
    handles = [rt.submit(task_app.work, n, 0.0, 0) for n in range(1, 6)]
    up()
    assert [handle.result(LONG_S) for handle in handles] == [1, 2, 3, 4, 5]
    for one in stopped:
        one.cont()
    until(lambda: set(counts(store)) == {"completed"}, "all completed", LONG_S)
    assert ends_by_task(store.read(_task_log)) == Counter(dict.fromkeys(range(1, 7), 1)), (
        "each ended once"
    )
    assert_log_and_rows_agree(store)


# -- tasks that crash their process ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit", "SIGSEGV"])
def test_task_that_crashes_its_worker_is_dead_and_other_tasks_complete(
    up: Up, rt: Runtime, store: Store, tmp_path: Path, how: str
) -> None:
    before = [rt.submit(task_app.work, n, 0.02, 0) for n in range(10)]
    deadly = rt.submit(task_app.poison, 10, how)
    after = [rt.submit(task_app.work, n, 0.02, 0) for n in range(11, 40)]
    worker = up(ready=None)
    exits: list[int] = []

    def all_ended() -> bool:
        nonlocal worker
        if not worker.running:
            exits.append(worker.wait())
            worker.close()
            worker = up(ready=None)
        return ended_count(store) == 40

    until(all_ended, "all", LONG_S)
    died = 9 if how == "exit" else -signal.Signals[how]
    assert exits == [died] * task_app.POISON_EXPIRIES_MAX, "as often as it may, and no more"
    status = deadly.status()
    assert (status.state, status.reason) == ("DEAD", "expiries_exhausted")
    assert status.expiries == task_app.POISON_EXPIRIES_MAX
    others = [handle.status() for handle in (*before, *after)]
    assert {one.state for one in others} == {"COMPLETED"}
    # The last run of the deadly task was in quarantine, without other tasks.
    assert max(one.expiries for one in others) < task_app.POISON_EXPIRIES_MAX
    assert len({key for _, key in runs_by_task(tmp_path)[deadly.id]}) == 1
    assert_log_and_rows_agree(store)


def test_isolated_task_that_crashes_its_process_does_not_affect_other_tasks(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    # Long leases, so that none expires on a busy machine. The worker detects the death of its children.
    apart = hf.task(name="apart", lease_s=LONG_S, isolation="process")(task_app.apart.fn)
    work = hf.task(name="work", lease_s=LONG_S)(task_app.work.fn)
    poison = hf.task(
        name="poison_apart",
        lease_s=LONG_S,
        isolation="process",
        expiries_max=task_app.POISON_EXPIRIES_MAX,
        backoff_s=0.01,
    )(task_app.poison_apart.fn)
    patient: Runtime = hf.App("tasking", tasks=[apart, work, poison]).open(store, roles=())
    worker = up()
    others = [patient.submit(apart, n, 0.05) for n in range(6)]
    deadly = patient.submit(poison, 6, "SIGKILL")
    plain = [patient.submit(work, n, 0.01, 0) for n in range(7, 20)]
    until(lambda: ended_count(store) == 20, "all", LONG_S)
    assert worker.running
    assert (deadly.status().state, deadly.status().expiries) == ("DEAD", 3)
    assert {handle.status().expiries for handle in (*others, *plain)} == {0}
    assert {len(runs_by_task(tmp_path)[handle.id]) for handle in (*others, *plain)} == {1}


# -- stopped, restarted ----------------------------------------------------------------------------


def test_worker_stopped_beyond_its_lease_reports_no_second_end(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    patient = hf.task(name="long", lease_s=2, attempts=1, expiries_max=3)(task_app.long.fn)
    runtime: Runtime = hf.App("tasking", tasks=[patient]).open(store, roles=())
    handle = runtime.submit(patient, str(go))
    stopped = up(ready=None)
    stopped.expect("began 1")
    stopped.stop()
    other = up(ready=None)
    other.expect("began 2")
    go.touch()
    assert handle.result(LONG_S) == "done"
    stopped.cont()
    stopped.terminate()
    assert stopped.wait() == 0
    log = store.read(_task_log)
    assert ends_by_task(log) == {1: 1}
    assert (handle.status().attempt, handle.status().expiries) == (2, 1)
    assert_log_and_rows_agree(store)


def test_worker_restarts_cost_a_long_task_no_failure_or_expiry(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    """The signal goes to the whole process group, as from a supervisor. The task has `expiries_max=1`."""
    go = tmp_path / "go"
    handle = rt.submit(task_app.long, str(go))
    for attempt in range(1, 4):
        worker = up("--grace-s", "0.2", ready=None)
        worker.expect(f"began {attempt}")
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait() == 0
        status = handle.status()
        assert (status.state, status.failures, status.expiries) == ("WAITING", 0, 0)
    go.touch()
    up()
    assert handle.result(LONG_S) == "done"


def test_sigterm_lets_the_worker_finish_its_task(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    handle = rt.submit(task_app.long, str(go))
    worker = up(ready=None)
    worker.expect("began 1")
    worker.terminate()
    go.touch()
    assert worker.wait() == 0
    assert handle.result(0) == "done"


def test_killed_worker_repeats_one_task_per_thread_with_report_each(
    up: Up, store: Store, rt: Runtime, tmp_path: Path
) -> None:
    """`report="each"` commits each outcome separately. A killed worker with batched reports repeats hundreds."""
    threads, tasks_total = 2, 300
    rt.submit_many(task_app.each, [(n,) for n in range(tasks_total)])
    for _ in range(3):
        worker = up("--concurrency", str(threads))
        begun = len(runs_by_task(tmp_path))
        until(
            lambda at=begun: len(runs_by_task(tmp_path)) >= min(at + 40, tasks_total),
            "some have run",
        )
        worker.kill()
        worker.wait()
    up("--concurrency", str(threads))
    until(lambda: ended_count(store) == tasks_total, "all have ended")
    runs = runs_by_task(tmp_path)
    repeated = sum(len(some) - 1 for some in runs.values())
    assert len(runs) == tasks_total
    assert repeated <= 3 * threads
    assert_log_and_rows_agree(store)


def test_process_of_an_isolated_task_dies_with_its_killed_worker(
    up: Up, rt: Runtime, store: Store, home: Path, tmp_path: Path
) -> None:
    worker = up()
    rt.submit(task_app.apart, 1, 30.0)
    until(lambda: runs_by_task(tmp_path), "its beginning", LONG_S)
    children = [os_process(pid) for pid in children_of(worker.pid)]
    assert children
    worker.kill()
    until(lambda: not any(child.alive for child in children), "the end of its children", LONG_S)
    assert worker.pid not in [process.pid for process in processes_of(home)]


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def test_writer_killed_during_submit_many_loses_and_repeats_no_task(
    up: Up, rt: Runtime, store: Store, home: Path
) -> None:
    up()
    ids: list[str] = []
    for round_ in range(5):
        writer = writer_of(home)
        handles = [rt.submit(task_app.first, key=f"{round_} {n}") for n in range(20)]
        writer.kill()
        handles += rt.submit_many(task_app.first, [()] * 50)
        ids += [handle.id for handle in handles]
    assert len(set(ids)) == 5 * 70
    until(lambda: counts(store)["completed"] == 5 * 70, "all", LONG_S)
    assert ended_count(store) == 5 * 70
    assert_log_and_rows_agree(store)
