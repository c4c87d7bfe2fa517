"""After submitting: results, errors, status, cancelling, dependencies, limits, retention, redrive."""

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
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from holdfast.tasks import coordinator, recount, verify
from holdfast.tasks.ids import BadTaskId, parse_task
from tests.naming import named
from tests.process.conftest import LIMITS
from tests.process.watch import until
from tests.processes import python_proc
from tests.tasks_api.conftest import Open

MODULES = ("holdfast.app.task_handle", "holdfast.app.runtime", "holdfast.app.tasks")


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.task(attempts=1)
def fail(text: str) -> None:
    raise ValueError(text)


class Gate:
    def __init__(self) -> None:
        self.open = threading.Event()
        self.inside: list[str] = []
        self.most = 0
        self._lock = threading.Lock()

    def task(self, **options: Any) -> hf.Task[[str], str]:
        @hf.task(name="wait", **options)
        def wait(name: str) -> str:
            with self._lock:
                self.inside.append(name)
                self.most = max(self.most, len(self.inside))
            assert self.open.wait(30)
            with self._lock:
                self.inside.remove(name)
            return name

        return wait


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def where(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().where


# -- results -------------------------------------------------------------------------------------


def test_a_result_is_there_for_everybody_and_again(running: Open) -> None:
    rt = running(add)
    handle = rt.submit(add, 1)
    assert [handle.result(30), handle.result(0), rt.task(handle.id).result()] == [2, 2, 2]


def test_a_failed_task_raises_its_own_words(running: Open) -> None:
    rt = running(fail)
    handle = rt.submit(fail, "no ink")
    with pytest.raises(hf.TaskFailedError) as caught:
        handle.result(30)
    told = caught.value
    assert (told.task, told.name, told.state) == (handle.id, "fail", "FAILED")
    assert (told.error, told.reason, told.attempts) == ("ValueError: no ink", "handler_error", 1)
    assert "no ink" in str(told)


@pytest.mark.parametrize("timeout", [0, 0.05, -1])
def test_who_does_not_want_to_wait_longer_is_told_so(resting: Open, timeout: float) -> None:
    handle = resting(add).submit(add, 1)
    with pytest.raises(Timeout) as caught:
        handle.result(timeout)
    assert caught.value.task == handle.id
    assert where(handle) == "ready"


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "5", 1e12, []])
def test_a_time_that_cannot_be_waited_is_refused(resting: Open, timeout: Any) -> None:
    handle = resting(add).submit(add, 1)
    with pytest.raises(Invalid) as caught:
        handle.result(timeout)
    assert caught.value.what == "timeout"


def test_many_threads_may_wait_for_one_result(running: Open, gate: Gate) -> None:
    task = gate.task()
    handle = running(task).submit(task, "a")
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(handle.result(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.open.set()
    for thread in threads:
        thread.join(30)
    assert found == ["a"] * 8


def test_who_waits_hears_of_a_worker_that_has_failed(running: Open) -> None:
    """Nobody would do the work any more, in this process."""
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


def test_arguments_and_results_are_of_the_types_that_the_function_says(running: Open) -> None:
    rt = running(turn)
    assert rt.submit(turn, Page("atlas", 3), by=2).result(30) == Page("atlas", 5)
    assert rt.submit(turn, {"book": "atlas", "number": 3}).result(30) == Page("atlas", 4)
    with pytest.raises(Invalid):
        rt.submit(turn, {"book": "atlas"})
    with pytest.raises(Invalid):
        rt.submit(turn, Page("atlas", 3), by="two")


def test_a_task_may_submit_tasks_and_wait_for_them(running: Open) -> None:
    @hf.task
    def outer(n: int) -> int:
        return sum(rt.map(add, range(n)))

    rt = running(add, outer)
    assert rt.submit(outer, 10).result(30) == sum(range(1, 11))


# -- finding a task ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id",
    ["", "x", "1-", "-1", "1-1-1", "1 -1", "1-1\n", "1-01", "0-1", "1-0", "1-" + "9" * 40, "١-١", None, 5, b"1-1"],
    ids=named,
)  # fmt: skip
def test_garbage_is_no_id(resting: Open, id: Any) -> None:
    rt = resting(add)
    rt.submit(add, 1)
    with pytest.raises(BadTaskId):
        rt.task(id)


@pytest.mark.parametrize("id", ["1-2", "2-1", "1-9223372036854775807"])
def test_an_id_of_no_task_is_not_found(resting: Open, id: str) -> None:
    rt = resting(add)
    rt.submit(add, 1)
    with pytest.raises(NotFound):
        rt.task(id)


def test_a_task_is_found_from_another_universe_only_if_it_is_there(resting: Open) -> None:
    rt = resting(add)
    handle = rt.submit(add, 1)
    other: Runtime = hf.App("other", tasks=[add]).open(rt.store, roles=())
    with pytest.raises(NotFound):
        other.task(handle.id)


def test_a_result_can_be_had_without_the_code_of_its_task(running: Open) -> None:
    rt = running(add)
    handle = rt.submit(add, 1)
    handle.result(30)
    stranger: Runtime = hf.App("jobs").open(rt.store, roles=())
    assert stranger.task(handle.id).result(0) == 2


def test_a_handle_says_how_far_its_task_is(running: Open, gate: Gate) -> None:
    task = gate.task(queue="slow")
    rt = running(task)
    handle = rt.submit(task, "a")
    until(lambda: gate.inside, "its beginning")
    status = handle.status()
    assert (status.id, status.name, status.queue) == (handle.id, "wait", "slow")
    assert (status.state, status.where, status.attempt) == ("LEASED", "leased", 1)
    assert not handle.done()
    gate.open.set()
    handle.result(30)
    assert handle.done()
    assert repr(handle) == f"<task {handle.id}>"


# -- cancelling ----------------------------------------------------------------------------------


def test_what_waits_anywhere_can_be_cancelled(resting: Open) -> None:
    rt = resting(add)
    ready = rt.submit(add, 1)
    delayed = rt.submit(add.options(delay_s=3600), 1)
    blocked = rt.submit(add.options(after=[delayed]), 1)
    assert [where(one) for one in (ready, delayed, blocked)] == ["ready", "delayed", "blocked"]
    for handle in (blocked, ready, delayed):
        assert handle.cancel()
        assert not handle.cancel(), "it has ended already"
        with pytest.raises(hf.TaskFailedError) as caught:
            handle.result(0)
        assert (caught.value.state, caught.value.reason) == ("DEAD", "cancelled")
    assert not list(rt.store.read(lambda txn: list(recount.differences(txn, "jobs"))))


def test_what_runs_can_be_cancelled_and_learns_of_it(running: Open) -> None:
    begun, told = threading.Event(), threading.Event()

    @hf.task
    def endless() -> None:
        begun.set()
        while not hf.current_task().cancelled:
            told.wait(0.001)
        told.set()

    rt = running(endless)
    handle = rt.submit(endless)
    assert begun.wait(30), "leased is not begun"
    assert handle.cancel()
    assert told.wait(30)
    assert where(handle) == "dead"


def test_what_has_ended_is_not_cancelled_any_more(running: Open) -> None:
    rt = running(add)
    handle = rt.submit(add, 1)
    handle.result(30)
    assert not handle.cancel()
    assert handle.result(0) == 2


# -- dependencies --------------------------------------------------------------------------------


def test_a_task_runs_after_all_that_it_names(running: Open, gate: Gate) -> None:
    task = gate.task()
    rt = running(task, add)
    first, second = rt.submit(task, "a"), rt.submit(task, "b")
    after = rt.submit(add.options(after=[first, second.id]), 1)
    until(lambda: len(gate.inside) == 2, "both")
    assert where(after) == "blocked"
    gate.open.set()
    assert after.result(30) == 2


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_what_waits_for_a_task_that_ends_badly_is_dead_down_the_line(
    running: Open, how: str
) -> None:
    rt = running(fail, add)
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


def test_what_waits_for_something_that_is_done_does_not_wait(running: Open) -> None:
    rt = running(add)
    first = rt.submit(add, 1)
    first.result(30)
    assert rt.submit(add.options(after=[first, first]), 2).result(30) == 3


# -- limits --------------------------------------------------------------------------------------


def test_a_queue_runs_as_many_at_a_time_as_it_may_over_all_workers(
    running: Open, gate: Gate
) -> None:
    task = gate.task(queue="mail")
    rt = running(task, limits=[hf.Queue("mail", concurrency=2)])
    running(task, limits=[hf.Queue("mail", concurrency=2)], url=rt.store)
    handles = [rt.submit(task, str(n)) for n in range(8)]
    until(lambda: len(gate.inside) == 2, "two at a time")
    gate.open.set()
    assert [handle.result(30) for handle in handles] == [str(n) for n in range(8)]
    assert gate.most == 2


def test_of_each_limit_key_as_many_run_as_may_and_others_pass_by(running: Open, gate: Gate) -> None:
    task = gate.task()
    rt = running(task, add, limits=[hf.Queue("default", per_key=1)])
    handles = [rt.submit(task.options(limit_key="x"), str(n)) for n in range(4)]
    until(lambda: gate.inside, "the first")
    assert rt.submit(add.options(limit_key="y"), 1).result(30) == 2
    assert rt.submit(add, 1).result(30) == 2
    assert len(gate.inside) == 1
    assert where(handles[3]) == "parked"
    assert handles[3].cancel()
    gate.open.set()
    assert [handle.result(30) for handle in handles[:3]] == ["0", "1", "2"]
    assert gate.most == 1


def test_limits_that_the_app_does_not_declare_any_more_are_gone(running: Open, gate: Gate) -> None:
    task = gate.task()
    rt = running(task, limits=[hf.Queue("default", concurrency=1)])
    handles = [rt.submit(task, str(n)) for n in range(3)]
    until(lambda: gate.inside, "the first")
    running(task, limits=[hf.Queue("default")], url=rt.store)
    until(lambda: len(gate.inside) == 3, "all of them")
    gate.open.set()
    assert [handle.result(30) for handle in handles] == ["0", "1", "2"]


# -- time ----------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def later(clock: SimClock) -> Iterator[Runtime]:
    """A runtime whose time is moved by hand, without a worker."""
    with LocalStore("memory:", MemoryBackend(), clock) as store:
        app = hf.App("jobs", tasks=[hf.task(retain_s=100)(add.fn)])
        yield app.open(store, roles=(), clock=clock)


def ended(rt: Runtime, key: str) -> hf.TaskHandle[Any]:
    """A task that was cancelled."""
    handle = rt.submit(rt.app.tasks["add"], 1, key=key)
    handle.cancel()
    return handle


def maintain(rt: Runtime) -> int:
    done: int = rt.store.transact(coordinator.maintain, "jobs", 100)
    return done


def test_what_has_ended_is_kept_for_its_time_and_then_forgotten(
    later: Runtime, clock: SimClock
) -> None:
    handle = ended(later, "k")
    clock.advance(99 * S)
    maintain(later)
    assert handle.status().state == "DEAD"
    assert later.submit(later.app.tasks["add"], 1, key="k").id == handle.id
    clock.advance(2 * S)
    maintain(later)
    with pytest.raises(NotFound):
        handle.status()
    with pytest.raises(TaskForgotten) as raised:
        handle.result(0)
    assert (raised.value.code, raised.value.fields["task"]) == ("task_forgotten", handle.id)
    assert isinstance(raised.value, NotFound)
    with pytest.raises(NotFound):
        handle.cancel()
    assert later.submit(later.app.tasks["add"], 2, key="k").id != handle.id, "the key is free"


def test_what_has_not_ended_is_never_forgotten(later: Runtime, clock: SimClock) -> None:
    handle = later.submit(later.app.tasks["add"], 1)
    clock.advance(10_000 * S)
    maintain(later)
    assert handle.status().state == "WAITING"


# -- redrive -------------------------------------------------------------------------------------


def test_what_ended_badly_is_tried_anew_as_a_new_task(running: Open) -> None:
    ink = threading.Event()

    @hf.task(attempts=1)
    def print_page(n: int) -> int:
        if not ink.is_set():
            raise ValueError("no ink")
        return n

    rt = running(print_page)
    old = rt.submit(print_page, 7, key="p7")
    with pytest.raises(hf.TaskFailedError):
        old.result(30)
    ink.set()
    seqs = rt.store.transact(coordinator.redrive, "jobs", [parse_task(old.id).seq])
    again = rt.store.transact(coordinator.redrive, "jobs", [parse_task(old.id).seq])
    assert seqs == again, "once, whoever asks how often"
    new = rt.task(f"1-{seqs[0]}")
    assert new.result(30) == 7
    assert old.status().state == "FAILED"
    assert rt.submit(print_page, 7, key="p7").id == new.id, "the key goes with it"


def test_what_ended_well_or_not_at_all_is_not_tried_anew(resting: Open) -> None:
    rt = resting(add)
    handle = rt.submit(add, 1)
    with pytest.raises(Invalid):
        rt.store.transact(coordinator.redrive, "jobs", [parse_task(handle.id).seq])
    with pytest.raises(NotFound):
        rt.store.transact(coordinator.redrive, "jobs", [99])


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


def test_a_key_means_one_task_for_many_processes(tmp_path: Path) -> None:
    home = tmp_path / "store"
    with python_proc(SUBMITTER, str(home)) as one, python_proc(SUBMITTER, str(home)) as two:
        for process in (one, two):
            process.send("go")
        for process in (one, two):
            process.expect("end")
        ids = [[line for line in process.lines if line.startswith("id")] for process in (one, two)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 20
    from holdfast import store as stores

    with stores.open(home, limits=LIMITS) as store:
        with hf.App("jobs", tasks=[add]).open(store, roles=("task",)) as rt:
            handles = [rt.task(line.split()[1]) for line in ids[0]]
            assert [handle.result(30) for handle in handles] == list(range(1, 21))
        assert not store.read(lambda txn: list(verify.differences(txn, "jobs")))
