"""Submitted tasks: results, errors, status, cancel, dependencies, limits, retention and redrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.app.runtime import Runtime
from holdfast.clock import S, SimClock
from holdfast.errors import Invalid, NotFound, TaskForgotten, Timeout
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.tasks import consistency, operations, replay_check
from holdfast.tasks.ids import BadTaskId, parse_task_id
from tests.case_ids import stable_repr
from tests.process.conftest import LIMITS
from tests.process.watch import until
from tests.processes import python_proc
from tests.tasks_api.conftest import OpenApp

MODULES = ("holdfast.app.task_handle", "holdfast.app.runtime", "holdfast.app.tasks")


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.task(attempts=1)
def fail(text: str) -> None:
    raise ValueError(text)


class BlockingTasks:
    def __init__(self) -> None:
        self.release = threading.Event()
        self.running: list[str] = []
        self.running_max = 0
        self._lock = threading.Lock()

    def task(self, **options: Any) -> hf.Task[[str], str]:
        @hf.task(name="wait", **options)
        def wait(name: str) -> str:
            with self._lock:
                self.running.append(name)
                self.running_max = max(self.running_max, len(self.running))
            assert self.release.wait(30)
            with self._lock:
                self.running.remove(name)
            return name

        return wait


@pytest.fixture
def blocking_tasks() -> Iterator[BlockingTasks]:
    tasks = BlockingTasks()
    yield tasks
    tasks.release.set()


def wait_state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().where


# -- results -------------------------------------------------------------------------------------


def test_result_can_be_read_repeatedly_and_by_id(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    handle = rt.submit(add, 1)
    assert [handle.result(30), handle.result(0), rt.task(handle.id).result()] == [2, 2, 2]


def test_result_raises_task_failed_error_with_the_error_text(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(fail)
    handle = rt.submit(fail, "no ink")
    with pytest.raises(hf.TaskFailedError) as caught:
        handle.result(30)
    error = caught.value
    assert (error.task, error.name, error.state) == (handle.id, "fail", "FAILED")
    assert (error.error, error.reason, error.attempts) == ("ValueError: no ink", "handler_error", 1)
    assert "no ink" in str(error)


@pytest.mark.parametrize("timeout", [0, 0.05, -1])
def test_result_raises_timeout_after_its_timeout(
    open_without_worker: OpenApp, timeout: float
) -> None:
    handle = open_without_worker(add).submit(add, 1)
    with pytest.raises(Timeout) as caught:
        handle.result(timeout)
    assert caught.value.task == handle.id
    assert wait_state(handle) == "ready"


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "5", 1e12, []])
def test_result_rejects_an_invalid_timeout(open_without_worker: OpenApp, timeout: Any) -> None:
    handle = open_without_worker(add).submit(add, 1)
    with pytest.raises(Invalid) as caught:
        handle.result(timeout)
    assert caught.value.what == "timeout"


def test_many_threads_may_wait_for_one_result(
    open_with_worker: OpenApp, blocking_tasks: BlockingTasks
) -> None:
    task = blocking_tasks.task()
    handle = open_with_worker(task).submit(task, "a")
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(handle.result(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    blocking_tasks.release.set()
    for thread in threads:
        thread.join(30)
    assert results == ["a"] * 8


def test_result_raises_the_failure_of_the_task_worker(open_with_worker: OpenApp) -> None:
    """The failed worker was the only one of this process."""
    app = hf.App("jobs", tasks=[add])
    rt = app.open("memory:", roles=("task",))
    rt.roles[0].request_stop()
    rt.roles[0].join(30)
    rt.roles[0].failure = MemoryError("gone")  # type: ignore[misc]
    handle = rt.submit(add, 1)
    with pytest.raises(MemoryError):
        handle.result(30)
    rt.close()


class Page(msgspec.Struct):
    book: str
    number: int


@hf.task
def turn(page: Page, *, by: int = 1) -> Page:
    return Page(page.book, page.number + by)


def test_arguments_and_result_are_converted_by_annotations(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(turn)
    assert rt.submit(turn, Page("atlas", 3), by=2).result(30) == Page("atlas", 5)
    assert rt.submit(turn, {"book": "atlas", "number": 3}).result(30) == Page("atlas", 4)
    with pytest.raises(Invalid):
        rt.submit(turn, {"book": "atlas"})
    with pytest.raises(Invalid):
        rt.submit(turn, Page("atlas", 3), by="two")


def test_task_may_submit_tasks_and_wait_for_their_results(open_with_worker: OpenApp) -> None:
    @hf.task
    def outer(n: int) -> int:
        return sum(rt.map(add, range(n)))

    rt = open_with_worker(add, outer)
    assert rt.submit(outer, 10).result(30) == sum(range(1, 11))


# -- task lookup and status ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "id",
    ["", "x", "1-", "-1", "1-1-1", "1 -1", "1-1\n", "1-01", "0-1", "1-0", "1-" + "9" * 40, "١-١", None, 5, b"1-1"],
    ids=stable_repr,
)  # fmt: skip
def test_task_lookup_rejects_an_invalid_id(open_without_worker: OpenApp, id: Any) -> None:
    rt = open_without_worker(add)
    rt.submit(add, 1)
    with pytest.raises(BadTaskId):
        rt.task(id)


@pytest.mark.parametrize("id", ["1-2", "2-1", "1-9223372036854775807"])
def test_task_lookup_of_an_unknown_id_is_not_found(open_without_worker: OpenApp, id: str) -> None:
    rt = open_without_worker(add)
    rt.submit(add, 1)
    with pytest.raises(NotFound):
        rt.task(id)


def test_task_lookup_in_another_universe_is_not_found(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    handle = rt.submit(add, 1)
    other: Runtime = hf.App("other", tasks=[add]).open(rt.store, roles=())
    with pytest.raises(NotFound):
        other.task(handle.id)


def test_result_can_be_read_without_the_task_definition(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    handle = rt.submit(add, 1)
    handle.result(30)
    other_runtime: Runtime = hf.App("jobs").open(rt.store, roles=())
    assert other_runtime.task(handle.id).result(0) == 2


def test_handle_status_shows_state_queue_and_attempt(
    open_with_worker: OpenApp, blocking_tasks: BlockingTasks
) -> None:
    task = blocking_tasks.task(queue="slow")
    rt = open_with_worker(task)
    handle = rt.submit(task, "a")
    until(lambda: blocking_tasks.running, "its beginning")
    status = handle.status()
    assert (status.id, status.name, status.queue) == (handle.id, "wait", "slow")
    assert (status.state, status.where, status.attempt) == ("LEASED", "leased", 1)
    assert not handle.done()
    blocking_tasks.release.set()
    handle.result(30)
    assert handle.done()
    assert repr(handle) == f"<task {handle.id}>"


# -- cancel --------------------------------------------------------------------------------------


def test_cancel_ends_a_ready_delayed_or_blocked_task(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    ready = rt.submit(add, 1)
    delayed = rt.submit(add.options(delay_s=3600), 1)
    blocked = rt.submit(add.options(after=[delayed]), 1)
    assert [wait_state(waiting_handle) for waiting_handle in (ready, delayed, blocked)] == [
        "ready",
        "delayed",
        "blocked",
    ]
    for handle in (blocked, ready, delayed):
        assert handle.cancel()
        assert not handle.cancel(), "it has ended already"
        with pytest.raises(hf.TaskFailedError) as caught:
            handle.result(0)
        assert (caught.value.state, caught.value.reason) == ("DEAD", "cancelled")
    assert not list(rt.store.read(lambda txn: list(consistency.find_differences(txn, "jobs"))))


def test_cancel_of_a_running_task_sets_current_task_cancelled(open_with_worker: OpenApp) -> None:
    started, cancel_seen = threading.Event(), threading.Event()

    @hf.task
    def endless() -> None:
        started.set()
        while not hf.current_task().cancelled:
            cancel_seen.wait(0.001)
        cancel_seen.set()

    rt = open_with_worker(endless)
    handle = rt.submit(endless)
    assert started.wait(30), "leased is not begun"
    assert handle.cancel()
    assert cancel_seen.wait(30)
    assert wait_state(handle) == "dead"


def test_cancel_of_an_ended_task_returns_false(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    handle = rt.submit(add, 1)
    handle.result(30)
    assert not handle.cancel()
    assert handle.result(0) == 2


# -- dependencies --------------------------------------------------------------------------------


def test_task_runs_after_all_its_dependencies(
    open_with_worker: OpenApp, blocking_tasks: BlockingTasks
) -> None:
    task = blocking_tasks.task()
    rt = open_with_worker(task, add)
    first, second = rt.submit(task, "a"), rt.submit(task, "b")
    after = rt.submit(add.options(after=[first, second.id]), 1)
    until(lambda: len(blocking_tasks.running) == 2, "both")
    assert wait_state(after) == "blocked"
    blocking_tasks.release.set()
    assert after.result(30) == 2


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_dependents_of_a_failed_or_cancelled_task_are_dead(
    open_with_worker: OpenApp, how: str
) -> None:
    rt = open_with_worker(fail, add)
    first = rt.submit(fail.options(delay_s=0 if how == "failed" else 3600), "no")
    second = rt.submit(add.options(after=[first]), 1)
    third = rt.submit(add.options(after=[second]), 1)
    if how == "cancelled":
        first.cancel()
    for handle in (second, third):
        with pytest.raises(hf.TaskFailedError) as caught:
            handle.result(30)
        assert (caught.value.state, caught.value.reason) == ("DEAD", "dependency_failed")
    assert rt.submit(add.options(after=[third]), 1).status().reason == "dependency_failed"


def test_completed_dependency_does_not_block(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    first = rt.submit(add, 1)
    first.result(30)
    assert rt.submit(add.options(after=[first, first]), 2).result(30) == 3


# -- limits --------------------------------------------------------------------------------------


def test_queue_concurrency_holds_across_workers(
    open_with_worker: OpenApp, blocking_tasks: BlockingTasks
) -> None:
    task = blocking_tasks.task(queue="mail")
    rt = open_with_worker(task, limits=[hf.Queue("mail", concurrency=2)])
    open_with_worker(task, limits=[hf.Queue("mail", concurrency=2)], url=rt.store)
    handles = [rt.submit(task, str(n)) for n in range(8)]
    until(lambda: len(blocking_tasks.running) == 2, "two at a time")
    blocking_tasks.release.set()
    assert [handle.result(30) for handle in handles] == [str(n) for n in range(8)]
    assert blocking_tasks.running_max == 2


def test_limit_key_concurrency_does_not_block_other_keys(
    open_with_worker: OpenApp, blocking_tasks: BlockingTasks
) -> None:
    task = blocking_tasks.task()
    rt = open_with_worker(task, add, limits=[hf.Queue("default", per_key=1)])
    handles = [rt.submit(task.options(limit_key="x"), str(n)) for n in range(4)]
    until(lambda: blocking_tasks.running, "the first")
    assert rt.submit(add.options(limit_key="y"), 1).result(30) == 2
    assert rt.submit(add, 1).result(30) == 2
    assert len(blocking_tasks.running) == 1
    assert wait_state(handles[3]) == "parked"
    assert handles[3].cancel()
    blocking_tasks.release.set()
    assert [handle.result(30) for handle in handles[:3]] == ["0", "1", "2"]
    assert blocking_tasks.running_max == 1


def test_undeclared_queue_limit_is_removed(
    open_with_worker: OpenApp, blocking_tasks: BlockingTasks
) -> None:
    task = blocking_tasks.task()
    rt = open_with_worker(task, limits=[hf.Queue("default", concurrency=1)])
    handles = [rt.submit(task, str(n)) for n in range(3)]
    until(lambda: blocking_tasks.running, "the first")
    open_with_worker(task, limits=[hf.Queue("default")], url=rt.store)
    until(lambda: len(blocking_tasks.running) == 3, "all of them")
    blocking_tasks.release.set()
    assert [handle.result(30) for handle in handles] == ["0", "1", "2"]


# -- retention -----------------------------------------------------------------------------------


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def runtime(clock: SimClock) -> Iterator[Runtime]:
    """A runtime with simulated time and without a worker."""
    with InProcessStore("memory:", MemoryBackend(), clock) as store:
        app = hf.App("jobs", tasks=[hf.task(retain_s=100)(add.fn)])
        yield app.open(store, roles=(), clock=clock)


def submit_cancelled(rt: Runtime, key: str) -> hf.TaskHandle[Any]:
    """Submit a task and cancel it."""
    handle = rt.submit(rt.app.tasks["add"], 1, key=key)
    handle.cancel()
    return handle


def maintain(rt: Runtime) -> int:
    step_count: int = rt.store.transact(operations.maintain, "jobs", 100)
    return step_count


def test_ended_task_is_removed_after_its_retention(runtime: Runtime, clock: SimClock) -> None:
    handle = submit_cancelled(runtime, "k")
    clock.advance(99 * S)
    maintain(runtime)
    assert handle.status().state == "DEAD"
    assert runtime.submit(runtime.app.tasks["add"], 1, key="k").id == handle.id
    clock.advance(2 * S)
    maintain(runtime)
    with pytest.raises(NotFound):
        handle.status()
    with pytest.raises(TaskForgotten) as raised:
        handle.result(0)
    assert (raised.value.code, raised.value.fields["task"]) == ("task_forgotten", handle.id)
    assert isinstance(raised.value, NotFound)
    with pytest.raises(NotFound):
        handle.cancel()
    assert runtime.submit(runtime.app.tasks["add"], 2, key="k").id != handle.id, "the key is free"


def test_open_task_is_never_removed_by_retention(runtime: Runtime, clock: SimClock) -> None:
    handle = runtime.submit(runtime.app.tasks["add"], 1)
    clock.advance(10_000 * S)
    maintain(runtime)
    assert handle.status().state == "WAITING"


# -- redrive -------------------------------------------------------------------------------------


def test_redrive_runs_a_failed_task_as_a_new_task(open_with_worker: OpenApp) -> None:
    ink = threading.Event()

    @hf.task(attempts=1)
    def print_page(n: int) -> int:
        if not ink.is_set():
            raise ValueError("no ink")
        return n

    rt = open_with_worker(print_page)
    old = rt.submit(print_page, 7, key="p7")
    with pytest.raises(hf.TaskFailedError):
        old.result(30)
    ink.set()
    seqs = rt.store.transact(operations.redrive, "jobs", [parse_task_id(old.id).seq])
    repeated = rt.store.transact(operations.redrive, "jobs", [parse_task_id(old.id).seq])
    assert seqs == repeated, "once, whoever asks how often"
    new = rt.task(f"1-{seqs[0]}")
    assert new.result(30) == 7
    assert old.status().state == "FAILED"
    assert rt.submit(print_page, 7, key="p7").id == new.id, "the key goes with it"


def test_redrive_of_an_open_or_unknown_task_is_rejected(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    handle = rt.submit(add, 1)
    with pytest.raises(Invalid):
        rt.store.transact(operations.redrive, "jobs", [parse_task_id(handle.id).seq])
    with pytest.raises(NotFound):
        rt.store.transact(operations.redrive, "jobs", [99])


# -- other processes -----------------------------------------------------------------------------

SUBMITTER = """
import sys
import holdfast as hf
from tests.tasks_api.test_results import add

rt = hf.App("jobs", tasks=[add]).open(sys.argv[1], roles=())
print("ready", flush=True)
sys.stdin.readline()
for n in range(20):
    print("id", rt.submit(add, n, key=f"k{n}").id, flush=True)
print("end", flush=True)
rt.close()
"""


def test_same_key_in_several_processes_is_one_task(tmp_path: Path) -> None:
    home = tmp_path / "store"
    with python_proc(SUBMITTER, str(home)) as first, python_proc(SUBMITTER, str(home)) as second:
        for process in (first, second):
            process.send("go")
        for process in (first, second):
            process.expect("end")
        ids = [
            [line for line in process.lines if line.startswith("id")] for process in (first, second)
        ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 20
    from holdfast import store as stores

    with stores.open(home, limits=LIMITS) as store:
        with hf.App("jobs", tasks=[add]).open(store, roles=("task",)) as rt:
            handles = [rt.task(line.split()[1]) for line in ids[0]]
            assert [handle.result(30) for handle in handles] == list(range(1, 21))
        assert not store.read(lambda txn: list(replay_check.find_differences(txn, "jobs")))
