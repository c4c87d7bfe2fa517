"""Task workers as real processes: killed at random, and their writer with them; ended by their own tasks;
stopped for longer than a lease; restarted in good order.

HOLDFAST_TEST_TASKS and HOLDFAST_TEST_TASK_KILLS set the size of the first: 400 and 8 unless they say
otherwise, and 5,000 tasks and 100 kills is what is promised.
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
from holdfast.tasks import look, records, recount, verify
from holdfast.tasks.board import Board
from holdfast.tasks.ids import parse_task
from holdfast.tasks.records import TaskCompleted, TaskCreated, TaskDead, TaskFailed
from holdfast.tasks.rows import counts_of, keys_of
from tests.process import tasking
from tests.process.conftest import LIMITS
from tests.process.watch import processes_of, seen, until, writer_of
from tests.processes import Proc

MODULES = (
    "holdfast.roles.task_worker",
    "holdfast.roles.task_child",
    "holdfast.tasks.lease",
    "holdfast.tasks.settle",
    "holdfast.cli.up",
)

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.tasking:app"]
TASKS = int(os.environ.get("HOLDFAST_TEST_TASKS", "400"))
KILLS = int(os.environ.get("HOLDFAST_TEST_TASK_KILLS", "8"))
WORKERS = 3
# Of so many kills one is the writer's; and of so many deeds one is a stop that outlasts leases.
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
    """Tasks are submitted here, and run elsewhere."""
    runtime: Runtime = tasking.app.open(store, roles=())
    with runtime:
        yield runtime


@pytest.fixture
def up(home: Path, tmp_path: Path, store: Store) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(*options: str, ready: str | None = "ready") -> Proc:
            argv = [*UP, "--store", str(home), "--role", "task", *options]
            proc = Proc.spawn(argv, ready=ready, env={tasking.LOG: str(tmp_path / "runs")})
            return running.enter_context(proc)

        yield up


def runs_of(tmp_path: Path) -> dict[str, list[tuple[int, str]]]:
    """By task: the attempt and the key of each run, as the outside saw them."""
    found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    path = tmp_path / "runs"
    for line in path.read_text().splitlines() if path.exists() else ():
        _, id, attempt, key = line.split()
        found[id].append((int(attempt), key))
    return found


def counts(store: Store) -> Counter[str]:
    """How many tasks of all queues are in each place or state."""
    found: Counter[str] = Counter()
    for queue in tasking.app.queues:
        row = store.read(counts_of, keys_of("tasking"), queue)
        found.update(msgspec.structs.asdict(row))
    return +found


def ended(store: Store) -> int:
    now = counts(store)
    return now["completed"] + now["failed"] + now["dead"]


def row(store: Store, handle: hf.TaskHandle[Any]) -> look.TaskRow:
    return store.read(look.find, "tasking", parse_task(handle.id))


def assert_log_and_rows_agree(store: Store) -> None:
    assert not store.read(lambda txn: list(verify.differences(txn, "tasking")))
    assert not store.read(lambda txn: list(recount.differences(txn, "tasking")))


def _log(txn: Txn) -> list[records.Single]:
    """Every record; nothing was truncated yet."""
    subject = keys_of("tasking").subject
    head = journal.head(txn, subject)
    assert head.floor == 1
    found: list[records.Single] = []
    for lo in range(1, head.height + 1, SCAN_PAGE):
        for entry in journal.read(txn, subject, lo, lo + SCAN_PAGE, SCAN_PAGE):
            found += records.singles(records.decode(entry.body), lambda task: None)
    return found


def ends(log: list[records.Single]) -> Counter[int]:
    """How often each task ended."""
    return Counter(
        record.task_id
        for record in log
        if isinstance(record, TaskCompleted | TaskDead)
        or (isinstance(record, TaskFailed) and record.final)
    )


# -- at random -------------------------------------------------------------------------------------


class Deeds:
    """What is done to workers and their writer, by a seed."""

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
        place = self.random.randrange(WORKERS)
        victim = self.workers[place]
        if victim.running:
            victim.kill()
            self.done["worker"] += 1
        self._replace(place)

    def stop_one(self) -> None:
        """Let one stand still for longer than its leases."""
        running = [one for one in self.workers if one.running and one not in self._standing()]
        if len(running) > 1:
            victim = self.random.choice(running)
            victim.stop()
            self._stopped.append((time.monotonic() + 1.5 * tasking.LEASE_S, victim))
            self.done["stopped"] += 1

    def tend(self) -> None:
        """Continue those whose time has come, and replace those that their own tasks have ended."""
        for at, one in list(self._stopped):
            if time.monotonic() >= at or not one.running:
                self._stopped.remove((at, one))
                if one.running:
                    one.cont()
        for place, one in enumerate(self.workers):
            if not one.running:
                assert one.wait() == 9, f"ended by itself: {one.errors[-20:]}"
                self.done["poisoned"] += 1
                self._replace(place)

    def finish(self) -> None:
        for _, one in self._stopped:
            if one.running:
                one.cont()
        self._stopped.clear()

    def _standing(self) -> list[Proc]:
        return [one for _, one in self._stopped]

    def _replace(self, place: int) -> None:
        self._stopped = [(at, one) for at, one in self._stopped if one is not self.workers[place]]
        self.workers[place].close()
        self.workers[place] = self._up(ready=None)


def submit(rt: Runtime, deeds: Deeds, n: int) -> tuple[hf.TaskHandle[Any], str]:
    """One of them, and how it must end."""
    seconds = deeds.random.choice([0.0, 0.002, 0.02, 0.1])
    if n % 400 == 13:
        return rt.submit(tasking.poison, n, "exit"), "DEAD"
    if n % 400 == 213:
        return rt.submit(tasking.poison_apart, n, "SIGKILL"), "DEAD"
    if n % 50 == 7:
        return rt.submit(tasking.work, n, seconds, 99), "FAILED"
    if n % 10 == 3:
        return rt.submit(tasking.work, n, seconds, 2), "COMPLETED"
    if n % 10 == 8:
        narrow = tasking.work.options(queue="narrow", limit_key=f"{n % 7}")
        return rt.submit(narrow, n, seconds / 4, 0), "COMPLETED"
    if n % 10 == 5:
        return rt.submit(tasking.doze, n, seconds), "COMPLETED"
    if n % 50 == 9:
        return rt.submit(tasking.apart, n, seconds), "COMPLETED"
    return rt.submit(tasking.work, n, seconds, 0), "COMPLETED"


@pytest.mark.slow
@pytest.mark.timeout(120 + 5 * KILLS + TASKS // 10)
@pytest.mark.spec(
    "003",
    "7. Invariants",
    "whatever process dies, no task is lost, each ends once, and replaying the log gives the rows",
)
def test_workers_and_writers_killed_at_random_lose_no_task_and_end_each_once(
    up: Up, rt: Runtime, store: Store, home: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    deeds = Deeds(up, home, seed)
    began_s = time.monotonic()
    wanted: dict[str, tuple[hf.TaskHandle[Any], str, int]] = {}
    sent = 0
    while deeds.kills < KILLS or sent < TASKS:
        for _ in range(min(-(-TASKS // KILLS), TASKS - sent)):
            handle, state = submit(rt, deeds, sent)
            wanted[handle.id] = (handle, state, sent)
            sent += 1
        # Somewhere within the work that there is: at its beginning, or when most of it is done.
        goal = ended(store) + int((sent - ended(store)) * deeds.random.random() * 0.8)

        def reached(goal: int = goal) -> bool:
            deeds.tend()
            return ended(store) >= goal

        until(reached, f"{goal} ends: {deeds.done}, {counts(store)}", LONG_S)
        if deeds.kills < KILLS:
            deeds.kill_one()
        if deeds.random.randrange(STOP_ONE_IN) == 0:
            deeds.stop_one()

    def all_ended() -> bool:
        deeds.tend()
        return ended(store) >= TASKS

    until(all_ended, f"all: {deeds.done}, {counts(store)}", 2 * LONG_S)
    deeds.finish()
    passed_s = time.monotonic() - began_s

    assert set(counts(store)) == {"completed", "failed", "dead"}
    assert len(wanted) == TASKS == ended(store)
    runs = runs_of(tmp_path)
    expiries = failures = 0
    for id, (handle, state, n) in wanted.items():
        found = row(store, handle)
        status, spec = found.status, found.spec
        assert found.state.name == state, (id, n, status)
        assert status.failures <= spec.attempts, (id, n, status)
        assert status.expiries <= spec.expiries_max, (id, n, status)
        assert (state == "DEAD") == (status.expiries == spec.expiries_max), (id, n, status)
        assert (state == "FAILED") == (status.failures == spec.attempts), (id, n, status)
        # A worker may be killed, or stand still, with a lease of a task that it has not begun.
        least = 0 if state == "DEAD" else 1
        assert least <= len(runs[id]) <= status.attempt, (id, n, status)
        assert {key for _, key in runs[id]} <= {f"task-{id}"}
        if state == "COMPLETED":
            assert handle.result(0) == n
        expiries, failures = expiries + status.expiries, failures + status.failures
    log = store.read(_log)
    created = [record.task_id for record in log if isinstance(record, TaskCreated)]
    assert ends(log) == Counter(dict.fromkeys(created, 1)), "each ended once"
    assert len(created) == TASKS
    Board().replay(log)
    assert_log_and_rows_agree(store)
    repeated = sum(len(one) - 1 for one in runs.values())
    print(
        f"{TASKS} tasks in {passed_s:.0f} s; killed: {deeds.done['worker']} workers, "
        f"{deeds.done['writer']} writers; {deeds.done['poisoned']} ended by their own tasks, "
        f"{deeds.done['stopped']} stopped beyond their leases; {dict(counts(store))}; "
        f"{expiries} leases expired, {failures} failures, {repeated} runs repeated; "
        f"{len(log)} records replayed"
    )


def test_what_comes_to_workers_that_were_stopped_while_they_waited_goes_to_another(
    up: Up, rt: Runtime, store: Store
) -> None:
    stopped = [up() for _ in range(2)]
    # Each has had work, and waits for more.
    rt.submit(tasking.work, 0, 0.0, 0).result(LONG_S)
    for one in stopped:
        one.stop()
    handles = [rt.submit(tasking.work, n, 0.0, 0) for n in range(1, 6)]
    up()
    assert [handle.result(LONG_S) for handle in handles] == [1, 2, 3, 4, 5]
    for one in stopped:
        one.cont()
    until(lambda: set(counts(store)) == {"completed"}, "all completed", LONG_S)
    assert ends(store.read(_log)) == Counter(dict.fromkeys(range(1, 7), 1)), "each ended once"
    assert_log_and_rows_agree(store)


# -- ended by their own tasks ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit", "SIGSEGV"])
def test_a_task_that_ends_its_worker_is_dead_and_those_beside_it_complete(
    up: Up, rt: Runtime, store: Store, tmp_path: Path, how: str
) -> None:
    before = [rt.submit(tasking.work, n, 0.02, 0) for n in range(10)]
    deadly = rt.submit(tasking.poison, 10, how)
    after = [rt.submit(tasking.work, n, 0.02, 0) for n in range(11, 40)]
    worker = up(ready=None)
    exits: list[int] = []

    def all_ended() -> bool:
        nonlocal worker
        if not worker.running:
            exits.append(worker.wait())
            worker.close()
            worker = up(ready=None)
        return ended(store) == 40

    until(all_ended, "all", LONG_S)
    died = 9 if how == "exit" else -signal.Signals[how]
    assert exits == [died] * tasking.POISON_EXPIRIES_MAX, "as often as it may, and no more"
    status = deadly.status()
    assert (status.state, status.reason) == ("DEAD", "expiries_exhausted")
    assert status.expiries == tasking.POISON_EXPIRIES_MAX
    others = [handle.status() for handle in (*before, *after)]
    assert {one.state for one in others} == {"COMPLETED"}
    # The last time it was alone.
    assert max(one.expiries for one in others) < tasking.POISON_EXPIRIES_MAX
    assert len({key for _, key in runs_of(tmp_path)[deadly.id]}) == 1
    assert_log_and_rows_agree(store)


def test_an_isolated_task_that_ends_its_process_leaves_its_worker_and_the_others_alone(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    # No lease runs out on a busy machine: the worker itself sees its children die.
    apart = hf.task(name="apart", lease_s=LONG_S, isolation="process")(tasking.apart.fn)
    work = hf.task(name="work", lease_s=LONG_S)(tasking.work.fn)
    poison = hf.task(
        name="poison_apart",
        lease_s=LONG_S,
        isolation="process",
        expiries_max=tasking.POISON_EXPIRIES_MAX,
        backoff_s=0.01,
    )(tasking.poison_apart.fn)
    patient: Runtime = hf.App("tasking", tasks=[apart, work, poison]).open(store, roles=())
    worker = up()
    others = [patient.submit(apart, n, 0.05) for n in range(6)]
    deadly = patient.submit(poison, 6, "SIGKILL")
    plain = [patient.submit(work, n, 0.01, 0) for n in range(7, 20)]
    until(lambda: ended(store) == 20, "all", LONG_S)
    assert worker.running
    assert (deadly.status().state, deadly.status().expiries) == ("DEAD", 3)
    assert {handle.status().expiries for handle in (*others, *plain)} == {0}
    assert {len(runs_of(tmp_path)[handle.id]) for handle in (*others, *plain)} == {1}


# -- stopped, restarted ----------------------------------------------------------------------------


def test_a_worker_that_stood_still_beyond_its_lease_brings_no_second_end(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    patient = hf.task(name="long", lease_s=2, attempts=1, expiries_max=3)(tasking.long.fn)
    runtime: Runtime = hf.App("tasking", tasks=[patient]).open(store, roles=())
    handle = runtime.submit(patient, str(go))
    stands = up(ready=None)
    stands.expect("began 1")
    stands.stop()
    other = up(ready=None)
    other.expect("began 2")
    go.touch()
    assert handle.result(LONG_S) == "done"
    stands.cont()
    stands.terminate()
    assert stands.wait() == 0
    log = store.read(_log)
    assert ends(log) == {1: 1}
    assert (handle.status().attempt, handle.status().expiries) == (2, 1)
    assert_log_and_rows_agree(store)


def test_three_restarts_during_a_long_task_cost_it_nothing(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    """A signal to the whole group, as supervisors send it; and the task may outlive no lease at all."""
    go = tmp_path / "go"
    handle = rt.submit(tasking.long, str(go))
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


def test_a_worker_that_is_told_to_stop_ends_what_it_has_begun(
    up: Up, rt: Runtime, store: Store, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    handle = rt.submit(tasking.long, str(go))
    worker = up(ready=None)
    worker.expect("began 1")
    worker.terminate()
    go.touch()
    assert worker.wait() == 0
    assert handle.result(0) == "done"


def test_a_killed_worker_repeats_one_task_for_each_hand_if_each_is_reported(
    up: Up, store: Store, rt: Runtime, tmp_path: Path
) -> None:
    """Of quick tasks whose outcomes are committed one by one; a batch of them would repeat hundreds."""
    hands, tasks_in_all = 2, 300
    rt.submit_many(tasking.each, [(n,) for n in range(tasks_in_all)])
    for _ in range(3):
        worker = up("--concurrency", str(hands))
        begun = len(runs_of(tmp_path))
        until(
            lambda at=begun: len(runs_of(tmp_path)) >= min(at + 40, tasks_in_all), "some have run"
        )
        worker.kill()
        worker.wait()
    up("--concurrency", str(hands))
    until(lambda: ended(store) == tasks_in_all, "all have ended")
    runs = runs_of(tmp_path)
    repeated = sum(len(some) - 1 for some in runs.values())
    assert len(runs) == tasks_in_all
    assert repeated <= 3 * hands
    assert_log_and_rows_agree(store)


def test_no_process_of_an_isolated_task_outlives_a_worker_that_was_killed(
    up: Up, rt: Runtime, store: Store, home: Path, tmp_path: Path
) -> None:
    worker = up()
    rt.submit(tasking.apart, 1, 30.0)
    until(lambda: runs_of(tmp_path), "its beginning", LONG_S)
    children = [seen(pid) for pid in children_of(worker.pid)]
    assert children
    worker.kill()
    until(lambda: not any(child.alive for child in children), "the end of its children", LONG_S)
    assert worker.pid not in [process.pid for process in processes_of(home)]


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def test_the_writer_killed_under_a_batch_of_submissions_loses_and_doubles_none(
    up: Up, rt: Runtime, store: Store, home: Path
) -> None:
    up()
    ids: list[str] = []
    for round_ in range(5):
        writer = writer_of(home)
        handles = [rt.submit(tasking.first, key=f"{round_} {n}") for n in range(20)]
        writer.kill()
        handles += rt.submit_many(tasking.first, [()] * 50)
        ids += [handle.id for handle in handles]
    assert len(set(ids)) == 5 * 70
    until(lambda: counts(store)["completed"] == 5 * 70, "all", LONG_S)
    assert ended(store) == 5 * 70
    assert_log_and_rows_agree(store)
