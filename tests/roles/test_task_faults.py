"""A task worker and a store that is busy, loses answers, or outlives it: nothing lost, nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import MS
from holdfast.errors import HoldfastError, StoreBusy, StoreClosed, StoreCorrupt, WriterLost
from holdfast.tasks import coordinator
from tests.roles.task_rig import Gates, Shift, shift
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, UNKNOWN_AFTER, UNKNOWN_BEFORE, Crash

MODULES = ("holdfast.roles.task_worker",)

TASKS = 5
# The commits that a worker needs for these, and some more.
COMMITS = 8
BUSY = {"busy": StoreBusy(), "lost": WriterLost()}
HICCUPS: list[str] = [UNKNOWN_BEFORE, UNKNOWN_AFTER, *BUSY]


def fault(name: str) -> str | HoldfastError:
    return BUSY.get(name, name)


def state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().state


def counting(ran: list[int]) -> hf.Task[[int], int]:
    @hf.task(lease_s=10, backoff_s=0.01)
    def work(n: int) -> int:
        ran.append(n)
        if n == 3 and ran.count(3) == 1:
            raise ValueError("once")
        return n

    return work


def completed(rig: Shift, count: int = TASKS) -> bool:
    return rig.counts().completed == count


@pytest.mark.parametrize("kind", HICCUPS)
@pytest.mark.parametrize("at", range(1, COMMITS + 1))
def test_a_hiccup_of_any_commit_loses_nothing_and_repeats_nothing(at: int, kind: str) -> None:
    ran: list[int] = []
    work = counting(ran)
    with shift(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(TASKS)])
        worker = rig.worker(concurrency=2)
        rig.backend.arm({at: fault(kind)})
        rig.until(lambda: completed(rig), "all", worker, tick_ns=5 * MS)
        assert [handle.result(0) for handle in handles] == list(range(TASKS))
        assert sorted(ran) == sorted([*range(TASKS), 3])
        assert all(handle.status().expiries == 0 for handle in handles)
        assert worker.failure is None


@pytest.mark.parametrize("kind", HICCUPS)
def test_a_hiccup_of_every_second_commit_loses_nothing(kind: str) -> None:
    ran: list[int] = []
    work = counting(ran)
    with shift(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(TASKS)])
        worker = rig.worker(concurrency=2)
        rig.backend.arm({at: fault(kind) for at in range(1, 40, 2)})
        rig.until(lambda: completed(rig), "all", worker, tick_ns=5 * MS)
        assert [handle.result(0) for handle in handles] == list(range(TASKS))
        assert sorted(ran) == sorted([*range(TASKS), 3])


def test_a_worker_stands_in_line_while_it_reports() -> None:
    ran: list[int] = []
    work = counting(ran)
    with shift(work) as rig:
        first = rig.rt.submit(work, 1)
        worker = rig.worker()
        rig.until(lambda: state(first) == "COMPLETED", "the first", worker)
        second = rig.rt.submit(work, 2)
        # In the commit that brought it: nobody has stepped since.
        assert state(second) == "LEASED"
        rig.until(lambda: state(second) == "COMPLETED", "the second", worker)
        assert ran == [1, 2]


@pytest.mark.parametrize("granted", [False, True])
def test_a_worker_that_fails_for_good_stands_in_line_no_more(
    granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    work = counting(ran)
    with shift(work) as rig:
        worker = rig.worker()
        late: list[hf.TaskHandle[int]] = []
        transact = rig.store.transact

        def refuse(fn: Any, *args: Any, **kwargs: Any) -> Any:
            if fn is not coordinator.turn or worker._standing is None:
                return transact(fn, *args, **kwargs)
            if granted:
                late.append(rig.rt.submit(work, 2))
            raise StoreCorrupt(what="test")

        monkeypatch.setattr(rig.store, "transact", refuse)
        worker.start()
        first = rig.rt.submit(work, 1)
        rig.until(lambda: not worker.running, "its end")
        assert isinstance(worker.failure, StoreCorrupt)
        late.append(rig.rt.submit(work, 3))
        assert {state(handle) for handle in late} == {"WAITING"}
        assert state(first) == "LEASED"
        rig.workers.remove(worker)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("kind", HICCUPS)
def test_what_is_granted_while_a_report_is_in_doubt_is_run_once(kind: str, more: bool) -> None:
    ran: list[int] = []
    work = counting(ran)
    with shift(work) as rig:
        handles = [rig.rt.submit(work, 1)]
        worker = rig.worker()
        rig.until(lambda: ran, "the first", worker)
        # Whatever is committed from now on has an outcome that nobody knows, until the next one has come.
        rig.backend.arm(dict.fromkeys(range(1, 1_000), fault(kind)))
        rig.until(lambda: worker._standing is not None, "the report", worker)
        rig.backend.arm({})
        if more:
            handles.append(rig.rt.submit(work, 2))
        rig.until(lambda: completed(rig, len(handles)), "all", worker, tick_ns=5 * MS)
        assert ran == [1, 2][: len(handles)]
        assert {handle.status().attempt for handle in handles} == {1}


@pytest.mark.parametrize("kind", [CRASH_BEFORE, CRASH_AFTER])
@pytest.mark.parametrize("at", range(1, COMMITS + 1))
def test_a_worker_that_dies_in_any_commit_leaves_all_to_the_next(at: int, kind: str) -> None:
    ran: list[int] = []
    work = counting(ran)
    with shift(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(TASKS)])
        first = rig.worker("first", concurrency=2)
        rig.backend.arm({at: kind})
        try:
            rig.until(lambda: completed(rig), "all", first, tick_ns=5 * MS)
        except Crash:
            second = rig.worker("second", concurrency=2)
            rig.until(lambda: completed(rig), "all", second, tick_ns=50 * MS)
        assert [handle.result(0) for handle in handles] == list(range(TASKS))
        assert max(handle.status().expiries for handle in handles) <= 1
        assert max(ran.count(n) for n in range(TASKS)) <= 3


@pytest.mark.parametrize("kind", HICCUPS)
@pytest.mark.parametrize("at", range(1, 5))
def test_a_hiccup_while_a_worker_leaves_does_not_keep_it_from_giving_back(
    at: int, kind: str
) -> None:
    gates = Gates()

    @hf.task
    def work(n: int) -> None:
        gates.pass_through(n)

    with shift(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(3)])
        worker = rig.worker(concurrency=2)
        rig.until(lambda: len(gates.inside) == 2, "two", worker)
        rig.backend.arm({at: fault(kind)})
        rig.stop(worker)
        assert worker.failure is None
        assert {handle.status().where for handle in handles} == {"ready"}
        assert {handle.status().failures for handle in handles} == {0}
        gates.open(0, 1, 2)


def test_a_store_that_stays_busy_does_not_keep_a_worker_from_leaving() -> None:
    @hf.task
    def work() -> None: ...

    with shift(work) as rig:
        worker = rig.worker()
        worker.step()
        worker.start()
        rig.backend.arm(dict.fromkeys(range(1, 10_000), StoreBusy()))
        worker.request_stop()
        rig.until(lambda: not worker.running, "its end", tick_ns=100 * MS)
        rig.backend.arm({})
        rig.workers.remove(worker)


def test_a_store_that_is_closed_ends_the_worker_without_ado() -> None:
    @hf.task
    def work() -> None: ...

    rig = Shift(work)
    worker = rig.worker()
    worker.start()
    rig.until(lambda: worker.rounds, "its first round")
    rig.store.close()
    rig.until(lambda: not worker.running, "its end", tick_ns=100 * MS)
    assert worker.failure is None or isinstance(worker.failure, StoreClosed)


def test_an_error_that_passes_by_nothing_ends_the_worker_and_is_told() -> None:
    @hf.task
    def work() -> None: ...

    rig = Shift(work)
    worker = rig.worker()
    rig.backend.arm(dict.fromkeys(range(1, 100), StoreCorrupt()))
    worker.run()
    assert isinstance(worker.failure, StoreCorrupt)


def test_cancelling_while_answers_get_lost_reaches_the_task() -> None:
    gates = Gates()
    runs: list[hf.TaskRun] = []

    @hf.task
    def work() -> None:
        runs.append(hf.current_task())
        gates.pass_through("a")

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.until(lambda: gates.inside, "its beginning", worker)
        handle.cancel()
        rig.backend.arm({1: UNKNOWN_AFTER, 2: UNKNOWN_BEFORE, 3: StoreBusy()})
        rig.until(lambda: runs[0].cancelled, "the flag", worker, tick_ns=100 * MS)
        gates.open("a")
        assert state(handle) == "DEAD"
