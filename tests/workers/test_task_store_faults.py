"""Store faults of a task worker: busy, lost answers, crashes. No task is lost or duplicated."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast import failpoints
from holdfast.clock import MS
from holdfast.errors import HoldfastError, StoreBusy, StoreClosed, StoreCorrupt, WriterLost
from tests.workers.task_rig import TaskGates, TaskRig, open_task_rig
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, UNKNOWN_AFTER, UNKNOWN_BEFORE, Crash

MODULES = ("holdfast.workers.tasks.worker",)

TASKS = 5
# More commits than a worker needs for these tasks.
COMMITS = 8
BUSY = {"busy": StoreBusy(), "lost": WriterLost()}
TRANSIENT_FAULTS: list[str] = [UNKNOWN_BEFORE, UNKNOWN_AFTER, *BUSY]


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


def completed(rig: TaskRig, count: int = TASKS) -> bool:
    return rig.counts().completed == count


@pytest.mark.parametrize("kind", TRANSIENT_FAULTS)
@pytest.mark.parametrize("at", range(1, COMMITS + 1))
def test_transient_fault_in_any_commit_loses_and_repeats_no_task(at: int, kind: str) -> None:
    ran: list[int] = []
    work = counting(ran)
    with open_task_rig(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(TASKS)])
        worker = rig.worker(concurrency=2)
        rig.backend.arm({at: fault(kind)})
        rig.step_until(lambda: completed(rig), "all", worker, tick_ns=5 * MS)
        assert [handle.result(0) for handle in handles] == list(range(TASKS))
        assert sorted(ran) == sorted([*range(TASKS), 3])
        assert all(handle.status().expiries == 0 for handle in handles)
        assert worker.failure is None


@pytest.mark.parametrize("kind", TRANSIENT_FAULTS)
def test_transient_fault_in_every_second_commit_loses_no_task(kind: str) -> None:
    ran: list[int] = []
    work = counting(ran)
    with open_task_rig(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(TASKS)])
        worker = rig.worker(concurrency=2)
        rig.backend.arm({at: fault(kind) for at in range(1, 40, 2)})
        rig.step_until(lambda: completed(rig), "all", worker, tick_ns=5 * MS)
        assert [handle.result(0) for handle in handles] == list(range(TASKS))
        assert sorted(ran) == sorted([*range(TASKS), 3])


def test_worker_parks_its_lease_request_while_it_reports() -> None:
    ran: list[int] = []
    work = counting(ran)
    with open_task_rig(work) as rig:
        first = rig.rt.submit(work, 1)
        worker = rig.worker()
        rig.step_until(lambda: state(first) == "COMPLETED", "the first", worker)
        second = rig.rt.submit(work, 2)
        # The submit commit leased it: the worker has not been stepped since.
        assert state(second) == "LEASED"
        rig.step_until(lambda: state(second) == "COMPLETED", "the second", worker)
        assert ran == [1, 2]


@pytest.mark.parametrize("granted", [False, True])
def test_failed_worker_cancels_its_parked_lease_request(granted: bool) -> None:
    ran: list[int] = []
    work = counting(ran)
    with open_task_rig(work) as rig:
        worker = rig.worker()
        late: list[hf.TaskHandle[int]] = []

        def refuse(_: object) -> None:
            if not worker._parked.is_open:
                return
            if granted:
                late.append(rig.rt.submit(work, 2))
            raise StoreCorrupt(what="test")

        with failpoints.on("task_worker.report_and_lease", calls=refuse):
            worker.start()
            first = rig.rt.submit(work, 1)
            rig.step_until(lambda: not worker.running, "its end")
        assert isinstance(worker.failure, StoreCorrupt)
        late.append(rig.rt.submit(work, 3))
        assert {state(handle) for handle in late} == {"WAITING"}
        assert state(first) == "LEASED"
        rig.workers.remove(worker)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("kind", TRANSIENT_FAULTS)
def test_task_leased_while_a_report_is_in_doubt_runs_once(kind: str, more: bool) -> None:
    ran: list[int] = []
    work = counting(ran)
    with open_task_rig(work) as rig:
        handles = [rig.rt.submit(work, 1)]
        worker = rig.worker()
        rig.step_until(lambda: ran, "the first", worker)
        # From here every commit fails or has an unknown outcome, until the plan is reset.
        rig.backend.arm(dict.fromkeys(range(1, 1_000), fault(kind)))
        rig.step_until(lambda: worker._parked.is_open, "the report", worker)
        rig.backend.arm({})
        if more:
            handles.append(rig.rt.submit(work, 2))
        rig.step_until(lambda: completed(rig, len(handles)), "all", worker, tick_ns=5 * MS)
        assert ran == [1, 2][: len(handles)]
        assert {handle.status().attempt for handle in handles} == {1}


@pytest.mark.parametrize("kind", [CRASH_BEFORE, CRASH_AFTER])
@pytest.mark.parametrize("at", range(1, COMMITS + 1))
def test_crash_in_any_commit_leaves_all_tasks_to_the_next_worker(at: int, kind: str) -> None:
    ran: list[int] = []
    work = counting(ran)
    with open_task_rig(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(TASKS)])
        first = rig.worker("first", concurrency=2)
        rig.backend.arm({at: kind})
        try:
            rig.step_until(lambda: completed(rig), "all", first, tick_ns=5 * MS)
        except Crash:
            second = rig.worker("second", concurrency=2)
            rig.step_until(lambda: completed(rig), "all", second, tick_ns=50 * MS)
        assert [handle.result(0) for handle in handles] == list(range(TASKS))
        assert max(handle.status().expiries for handle in handles) <= 1
        assert max(ran.count(n) for n in range(TASKS)) <= 3


@pytest.mark.parametrize("kind", TRANSIENT_FAULTS)
@pytest.mark.parametrize("at", range(1, 5))
def test_transient_fault_during_shutdown_still_releases_leases(at: int, kind: str) -> None:
    gates = TaskGates()

    @hf.task
    def work(n: int) -> None:
        gates.wait_at_gate(n)

    with open_task_rig(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(3)])
        worker = rig.worker(concurrency=2)
        rig.step_until(lambda: len(gates.running) == 2, "two", worker)
        rig.backend.arm({at: fault(kind)})
        rig.stop(worker)
        assert worker.failure is None
        assert {handle.status().where for handle in handles} == {"ready"}
        assert {handle.status().failures for handle in handles} == {0}
        gates.open(0, 1, 2)


def test_worker_stops_although_the_store_stays_busy() -> None:
    @hf.task
    def work() -> None: ...

    with open_task_rig(work) as rig:
        worker = rig.worker()
        worker.step()
        worker.start()
        rig.backend.arm(dict.fromkeys(range(1, 10_000), StoreBusy()))
        worker.request_stop()
        rig.step_until(lambda: not worker.running, "its end", tick_ns=100 * MS)
        rig.backend.arm({})
        rig.workers.remove(worker)


def test_closed_store_stops_the_worker() -> None:
    @hf.task
    def work() -> None: ...

    rig = TaskRig(work)
    worker = rig.worker()
    worker.start()
    rig.step_until(lambda: worker.rounds, "its first round")
    rig.store.close()
    rig.step_until(lambda: not worker.running, "its end", tick_ns=100 * MS)
    assert worker.failure is None or isinstance(worker.failure, StoreClosed)


def test_permanent_store_error_stops_the_worker_and_is_its_failure() -> None:
    @hf.task
    def work() -> None: ...

    rig = TaskRig(work)
    worker = rig.worker()
    rig.backend.arm(dict.fromkeys(range(1, 100), StoreCorrupt()))
    worker.run()
    assert isinstance(worker.failure, StoreCorrupt)


def test_cancel_reaches_the_task_despite_lost_answers() -> None:
    gates = TaskGates()
    runs: list[hf.TaskRun] = []

    @hf.task
    def work() -> None:
        runs.append(hf.current_task())
        gates.wait_at_gate("a")

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.step_until(lambda: gates.running, "its beginning", worker)
        handle.cancel()
        rig.backend.arm({1: UNKNOWN_AFTER, 2: UNKNOWN_BEFORE, 3: StoreBusy()})
        rig.step_until(lambda: runs[0].cancelled, "the flag", worker, tick_ns=100 * MS)
        gates.open("a")
        assert state(handle) == "DEAD"


def test_stopped_worker_releases_the_leases_of_a_lost_reply() -> None:
    ran: list[int] = []
    work = counting(ran)
    with open_task_rig(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(TASKS)])
        worker = rig.worker(concurrency=2)
        # The second commit grants leases, after the heartbeat.
        rig.backend.arm({2: UNKNOWN_AFTER})
        worker.step()
        assert "LEASED" in {state(handle) for handle in handles}
        worker.request_stop()
        worker.run()
        rig.workers.remove(worker)
        assert {state(handle) for handle in handles} == {"WAITING"}
        assert {handle.status().expiries for handle in handles} == {0}
        assert (ran, worker.failure) == ([], None)
