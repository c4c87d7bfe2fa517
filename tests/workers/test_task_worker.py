"""The task worker: executors, leases, progress, cancellation, shutdown and reports."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest

import holdfast as hf
from holdfast import failpoints
from holdfast.clock import MS, S
from holdfast.errors import Invalid, StoreBusy
from holdfast.runner.executor import ExecutorExhausted
from holdfast.tasks import leases, operations
from holdfast.tasks.model import QueueLimits
from holdfast.tasks.operations import GrantRequest, ReportAnswer
from holdfast.workers.tasks.report_buffer import RETRY_PAUSE_S
from tests.workers.task_rig import TIMEOUT_S, TaskGates, TaskRig, open_task_rig

MODULES = ("holdfast.workers.tasks.worker", "holdfast.workers.tasks.attempt")


def state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().state


def all_in(handles: list[hf.TaskHandle[Any]], wanted: str) -> bool:
    return all(state(handle) == wanted for handle in handles)


# -- executors and queues ----------------------------------------------------------------------


def test_plain_functions_run_in_as_many_threads_as_concurrency_allows() -> None:
    gates = TaskGates()

    @hf.task
    def work(n: int) -> int:
        gates.wait_at_gate(n)
        return n

    with open_task_rig(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(6)])
        worker = rig.worker(concurrency=4)
        rig.step_until(lambda: len(gates.running) == 4, "four at a time", worker)
        gates.open(*range(6))
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        assert gates.running_max == 4
        assert [handle.result(0) for handle in handles] == list(range(6))


def test_coroutines_run_concurrently_in_one_thread() -> None:
    met: set[int] = set()
    threads: set[int] = set()

    @hf.task
    async def meet(n: int) -> int:
        met.add(n)
        threads.add(threading.get_ident())
        while len(met) < 50:
            await asyncio.sleep(0)
        return n

    with open_task_rig(meet) as rig:
        handles = rig.rt.submit_many(meet, [(n,) for n in range(50)])
        worker = rig.worker(concurrency=1)
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        assert len(threads) == 1


def test_current_task_has_id_attempt_and_a_stable_idempotency_key() -> None:
    seen: list[tuple[str, int, str]] = []

    @hf.task(backoff_s=0.001)
    def look() -> None:
        me = hf.current_task()
        seen.append((me.id, me.attempt, me.idempotency_key))
        if me.attempt < 3:
            raise ValueError("again")

    with open_task_rig(look) as rig:
        handle = rig.rt.submit(look)
        rig.step_until(
            lambda: state(handle) == "COMPLETED", "the end", rig.worker(), tick_ns=10 * MS
        )
        assert [attempt for _, attempt, _ in seen] == [1, 2, 3]
        assert {(id, key) for id, _, key in seen} == {(handle.id, f"task-{handle.id}")}


def test_each_coroutine_has_its_own_current_task() -> None:
    @hf.task
    async def who() -> str:
        before = hf.current_task().id
        await asyncio.sleep(0)
        assert hf.current_task().id == before
        return before

    with open_task_rig(who) as rig:
        handles = rig.rt.submit_many(who, [()] * 20)
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker())
        assert [handle.result(0) for handle in handles] == [handle.id for handle in handles]


def test_plain_and_async_tasks_complete_together() -> None:
    @hf.task
    def plain(n: int) -> int:
        return n

    @hf.task
    async def other(n: int) -> int:
        return -n

    with open_task_rig(plain, other) as rig:
        handles = [rig.rt.submit((plain, other)[n % 2], n) for n in range(100)]
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(), tick_ns=MS)
        assert [handle.result(0) for handle in handles] == [n * (-1) ** n for n in range(100)]


def test_tasks_run_by_priority_then_submission_order() -> None:
    ran: list[int] = []

    @hf.task
    def work(n: int) -> None:
        ran.append(n)

    with open_task_rig(work) as rig:
        handles = [
            rig.rt.submit(work.options(priority=priority), n)
            for n, priority in enumerate([0, -5, 7, 0, 7])
        ]
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(concurrency=1))
        assert ran == [2, 4, 0, 3, 1]


def test_queue_concurrency_one_runs_both_kinds_by_priority_and_age() -> None:
    ran: list[int] = []

    @hf.task
    def plain(n: int) -> None:
        ran.append(n)

    @hf.task
    async def other(n: int) -> None:
        ran.append(n)

    with open_task_rig(plain, other) as rig:
        rig.store.transact(operations.set_limits, "jobs", "default", QueueLimits(concurrency=1))
        for n in range(10):
            rig.rt.submit((plain, other)[n % 2], n)
        rig.rt.submit(other.options(priority=1), 10)
        rig.rt.submit(plain.options(priority=2), 11)
        rig.step_until(lambda: len(ran) == 12, "all", rig.worker())
        assert ran == [11, 10, *range(10)]


def test_bounded_lease_returns_the_oldest_tasks_of_any_kind() -> None:
    @hf.task
    def plain(n: int) -> None: ...

    @hf.task
    async def other(n: int) -> None: ...

    with open_task_rig(plain, other) as rig:
        for n in range(10):
            rig.rt.submit((plain, other)[n % 2], n)
        leased = rig.store.transact(operations.lease, "jobs", GrantRequest("w", ["default"], 6))
        assert [grant.seq for grant in leased.grants] == [1, 2, 3, 4, 5, 6]
        rest = rig.store.transact(operations.lease, "jobs", GrantRequest("w", ["default"], 100))
        assert sorted(grant.seq for grant in rest.grants) == [7, 8, 9, 10]


def test_worker_serves_only_its_queues() -> None:
    @hf.task
    def work() -> None: ...

    with open_task_rig(work) as rig:
        here = rig.rt.submit(work.options(queue="a"))
        elsewhere = rig.rt.submit(work.options(queue="b"))
        worker = rig.worker(queues=("a",))
        rig.step_until(lambda: state(here) == "COMPLETED", "its own", worker)
        rig.pass_time(1, worker)
        assert state(elsewhere) == "WAITING"
        rig.step_until(
            lambda: state(elsewhere) == "COMPLETED", "the other", rig.worker(queues=("b",))
        )


def test_full_queue_starves_no_other_queue() -> None:
    ran: list[str] = []

    @hf.task
    def work(queue: str) -> None:
        ran.append(queue)

    with open_task_rig(work) as rig:
        for queue in "abc":
            rig.rt.submit_many(work.options(queue=queue), [(queue,)] * 30)
        worker = rig.worker(queues=("a", "b", "c"), concurrency=1)
        rig.step_until(lambda: len(ran) >= 15, "some", worker)
        assert set(ran[:15]) == {"a", "b", "c"}
        rig.step_until(lambda: len(ran) == 90, "all", worker)


def test_async_tasks_do_not_wait_for_busy_threads() -> None:
    gates = TaskGates()

    @hf.task
    def plain(n: int) -> None:
        gates.wait_at_gate(n)

    @hf.task
    async def other(n: int) -> int:
        return n

    with open_task_rig(plain, other) as rig:
        rig.rt.submit_many(plain, [(n,) for n in range(50)])
        worker = rig.worker(concurrency=2)
        rig.step_until(lambda: len(gates.running) == 2, "that all threads are taken", worker)
        quick = rig.rt.submit_many(other, [(n,) for n in range(50)])
        rig.step_until(lambda: all_in(quick, "COMPLETED"), "the coroutines", worker)
        assert len(gates.running) == 2
        gates.open(*range(50))
        rig.step_until(lambda: rig.counts().completed == 100, "all", worker)


def test_submit_wakes_a_sleeping_worker() -> None:
    """The clock does not advance, so only the submit can wake the worker."""

    @hf.task
    def work(n: int) -> int:
        return n

    with open_task_rig(work) as rig:
        worker = rig.worker()
        worker.start()
        for n in range(100):
            handle = rig.rt.submit(work, n)
            rig.step_until(lambda handle=handle: state(handle) == "COMPLETED", "its end")
            before = worker.rounds
        rig.step_until(lambda before=before: worker.rounds >= before, "that it rests")


def test_single_task_runs_in_the_leader_thread_and_delays_no_other_task() -> None:
    gates = TaskGates()
    threads: dict[int, str] = {}

    @hf.task
    def work(n: int) -> int:
        threads[n] = threading.current_thread().name
        gates.wait_at_gate(n)
        return n

    with open_task_rig(work) as rig:
        worker = rig.worker()
        worker.start()
        rig.step_until(
            lambda: worker._parked.is_open and worker._handoff.has_standby, "that it waits"
        )
        lone = [rig.rt.submit(work, 0)]
        rig.step_until(lambda: 0 in gates.running, "its beginning")
        assert threads[0] == "holdfast-task"
        # The loop continues in the standby thread and uses the thread executor.
        gates.open(*range(1, 30))
        others = rig.rt.submit_many(work, [(n,) for n in range(1, 20)])
        rig.step_until(lambda: all_in(others, "COMPLETED"), "the others")
        assert state(lone[0]) == "LEASED"
        for n in range(20, 30):
            last = rig.rt.submit(work, n)
            rig.step_until(lambda last=last: state(last) == "COMPLETED", "one more")
        gates.open(0)
        rig.step_until(lambda: all_in(lone, "COMPLETED"), "the first of all")


def test_single_task_runs_in_the_executor_of_its_kind() -> None:
    threads: dict[str, set[str]] = {"plain": set(), "looping": set()}

    def note(name: str) -> None:
        threads[name].add(threading.current_thread().name)

    @hf.task
    def plain() -> None:
        note("plain")

    @hf.task
    async def looping() -> None:
        note("looping")

    with open_task_rig(plain, looping) as rig:
        worker = rig.worker()
        worker.start()
        for _ in range(5):
            for task in (looping, plain):
                rig.step_until(
                    lambda: worker._parked.is_open and worker._handoff.has_standby,
                    "that it waits",
                )
                handle = rig.rt.submit(task)
                rig.step_until(lambda handle=handle: state(handle) == "COMPLETED", "its end")
    assert threads == {"plain": {"holdfast-task"}, "looping": {"holdfast-task-loop"}}


def test_task_in_the_leader_thread_can_be_cancelled() -> None:
    gates = TaskGates()
    seen: list[bool] = []

    @hf.task
    def work(n: int) -> None:
        gates.wait_at_gate(n)
        seen.append(hf.current_task().cancelled)

    with open_task_rig(work) as rig:
        worker = rig.worker(concurrency=1)
        worker.start()
        rig.step_until(
            lambda: worker._parked.is_open and worker._handoff.has_standby, "that it waits"
        )
        lone = rig.rt.submit(work, 0)
        rig.step_until(lambda: 0 in gates.running, "its beginning")
        lone.cancel()
        # Its slot is free for another task, although it has not returned.
        gates.open(1)
        rig.rt.submit(work, 1)
        rig.step_until(lambda: rig.counts().completed == 1, "its end")
        gates.open(0)
        rig.step_until(lambda: len(seen) == 2, "that the first comes back")
        assert sorted(seen) == [False, True]
        assert (rig.counts().dead, rig.counts().completed) == (1, 1)


def test_worker_with_exhausted_threads_raises_executor_exhausted() -> None:
    from holdfast.runner.executor import ABANDONED_MAX

    gates = TaskGates()

    @hf.task
    def hang(n: int) -> None:
        gates.wait_at_gate(n)

    with open_task_rig(hang) as rig:
        worker = rig.worker(concurrency=1)

        def hang_all() -> None:
            for n in range(ABANDONED_MAX + 10):
                handle = rig.rt.submit(hang, n)
                rig.step_until(lambda n=n: n in gates.running, "its beginning", worker)
                handle.cancel()

        with pytest.raises(ExecutorExhausted):
            hang_all()
        assert len(gates.running) >= ABANDONED_MAX
        gates.open(*range(ABANDONED_MAX + 10))


def test_delayed_task_starts_after_its_delay() -> None:
    @hf.task
    def work() -> None: ...

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work.options(delay_s=10))
        worker = rig.worker()
        rig.pass_time(9.5, worker)
        assert handle.status().where == "delayed"
        rig.pass_time(1, worker)
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", worker)


@hf.task
def idle() -> None: ...


@pytest.mark.parametrize("wrong", [0, -1, 1_001, "4", True, 1.0])
def test_invalid_worker_concurrency_is_rejected(wrong: Any) -> None:
    with pytest.raises(Invalid) as caught:
        TaskRig(idle).worker(concurrency=wrong)
    assert caught.value.what == "concurrency"


@pytest.mark.parametrize("wrong", [(), ("",), (5,), ("x" * 201,)])
def test_invalid_worker_queues_are_rejected(wrong: Any) -> None:
    with pytest.raises(Invalid):
        TaskRig(idle).worker(queues=wrong)


def test_worker_deletes_ended_tasks_after_their_retention() -> None:
    @hf.task(retain_s=5)
    def work() -> None: ...

    with open_task_rig(work) as rig:
        handles = rig.rt.submit_many(work, [()] * 20)
        worker = rig.worker()
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        rig.pass_time(4, worker)
        assert rig.counts().completed == 20
        rig.pass_time(20, worker)
        assert rig.counts().completed == 0


# -- leases ------------------------------------------------------------------------------------


def test_lease_is_extended_while_its_task_runs() -> None:
    gates = TaskGates()

    @hf.task(lease_s=1)
    def work() -> str:
        gates.wait_at_gate("a")
        return "done"

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker, other = rig.worker("w"), rig.worker("other")
        rig.step_until(lambda: gates.running, "its beginning", worker)
        rig.pass_time(60, worker, other)
        gates.open("a")
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", worker)
        assert (handle.status().attempt, handle.status().expiries) == (1, 0)
        assert gates.started == ["a"]


@pytest.mark.parametrize("hours", [-48, 48])
def test_wall_clock_step_ends_no_lease(hours: int) -> None:
    gates = TaskGates()

    @hf.task(lease_s=1)
    def work() -> None:
        gates.wait_at_gate("a")

    with open_task_rig(work) as rig:
        handle, later = rig.rt.submit(work), rig.rt.submit(work.options(delay_s=30))
        worker = rig.worker()
        rig.step_until(lambda: gates.running, "its beginning", worker)
        rig.clock.step_wall(hours * 3600 * S)
        rig.pass_time(5, worker)
        assert (state(handle), handle.status().attempt) == ("LEASED", 1)
        assert later.status().where == "delayed"
        gates.open("a")
        rig.step_until(lambda: state(later) == "COMPLETED", "both", worker, tick_ns=500 * MS)


def test_hanging_task_loses_its_lease_after_its_window_and_is_retried() -> None:
    gates = TaskGates()
    runs: list[hf.TaskRun] = []

    @hf.task(lease_s=1, execution_window_s=5)
    def work() -> int:
        runs.append(hf.current_task())
        if len(runs) == 1:
            gates.wait_at_gate("hangs")
        return len(runs)

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker(concurrency=1)
        rig.step_until(lambda: gates.running, "its beginning", worker)
        rig.pass_time(4.5, worker)
        assert state(handle) == "LEASED", "it is still within its window"
        assert not runs[0].cancelled
        # The only thread is replaced. The first one still runs.
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", worker, tick_ns=50 * MS)
        assert gates.running == ["hangs"]
        assert runs[0].cancelled
        assert (handle.result(0), handle.status().attempt, handle.status().expiries) == (2, 2, 1)
        gates.open("hangs")


def test_late_result_of_a_hanging_task_is_ignored() -> None:
    gates = TaskGates()

    @hf.task(lease_s=1, execution_window_s=2)
    def work() -> str:
        first = hf.current_task().attempt == 1
        gates.wait_at_gate("late" if first else "good")
        return "late" if first else "good"

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.step_until(
            lambda: "good" in gates.running, "the second attempt", worker, tick_ns=50 * MS
        )
        gates.open("late")
        rig.step_until(lambda: gates.running == ["good"], "the late one", worker)
        rig.pass_time(0.5, worker)
        assert state(handle) == "LEASED"
        gates.open("good")
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", worker)
        assert handle.result(0) == "good"


def test_progress_extends_the_lease_beyond_its_window() -> None:
    gates = TaskGates()
    runs: list[hf.TaskRun] = []

    @hf.task(lease_s=1, execution_window_s=3)
    def work() -> None:
        runs.append(hf.current_task())
        gates.wait_at_gate("a")

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.step_until(lambda: gates.running, "its beginning", worker)
        for _ in range(20):
            runs[0].progress()
            rig.pass_time(1.5, worker)
        assert (state(handle), handle.status().attempt) == ("LEASED", 1)
        rig.step_until(
            lambda: runs[0].cancelled, "the end of its patience", worker, tick_ns=100 * MS
        )
        assert len(runs) == 1 or runs[1].attempt == 2
        gates.open("a")
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", worker, tick_ns=100 * MS)


def test_task_that_always_hangs_is_dead_after_expiries_max_leases() -> None:
    gates = TaskGates()

    @hf.task(lease_s=1, execution_window_s=1, expiries_max=3)
    def work() -> None:
        gates.wait_at_gate(hf.current_task().attempt)

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker(concurrency=1)
        rig.step_until(lambda: state(handle) == "DEAD", "its death", worker, tick_ns=50 * MS)
        status = handle.status()
        assert (status.expiries, status.attempt, status.reason) == (3, 3, "expiries_exhausted")
        rig.pass_time(5, worker)
        assert gates.started == [1, 2, 3]
        gates.open(1, 2, 3)


def test_progress_is_visible_while_the_task_runs() -> None:
    gates = TaskGates()

    @hf.task
    def work() -> None:
        hf.current_task().progress({"page": 3})
        gates.wait_at_gate("a")

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.step_until(lambda: handle.status().progress, "progress", worker, tick_ns=100 * MS)
        assert handle.status().progress == {"page": 3}
        gates.open("a")
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", worker)


@pytest.mark.parametrize("wrong", [object(), "x" * 5_000, "\ud800", 1 << 70])
def test_unstorable_progress_fails_the_task_as_invalid(wrong: Any) -> None:
    @hf.task(attempts=1)
    def work() -> None:
        hf.current_task().progress(wrong)

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        rig.step_until(lambda: state(handle) == "FAILED", "its end", rig.worker())
        assert handle.status().reason == "invalid"


# -- cancelling --------------------------------------------------------------------------------


def test_cancel_sets_the_flag_and_frees_the_thread_slot() -> None:
    gates = TaskGates()
    runs: list[hf.TaskRun] = []

    @hf.task
    def work(name: str) -> None:
        runs.append(hf.current_task())
        if name == "first":
            gates.wait_at_gate(name)

    with open_task_rig(work) as rig:
        first, second = rig.rt.submit(work, "first"), rig.rt.submit(work, "second")
        worker = rig.worker(concurrency=1)
        rig.step_until(lambda: gates.running, "its beginning", worker)
        assert first.cancel()
        rig.step_until(lambda: runs[0].cancelled, "the flag", worker)
        rig.step_until(lambda: state(second) == "COMPLETED", "the other", worker)
        assert (state(first), first.status().reason) == ("DEAD", "cancelled")
        gates.open("first")
        rig.step_until(lambda: not gates.running, "its return", worker)
        rig.pass_time(1, worker)
        assert state(first) == "DEAD"
        assert worker.counts[ReportAnswer.CANCELLED] == 0, "nobody reports what nobody waits for"


def test_cancel_interrupts_a_coroutine_at_its_await() -> None:
    log: list[str] = []

    @hf.task
    async def work() -> None:
        try:
            log.append("began")
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        finally:
            log.append("cleaned up")

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.step_until(lambda: log, "its beginning", worker)
        assert handle.cancel()
        rig.step_until(lambda: "cleaned up" in log, "the cancellation", worker)
        assert log == ["began", "cancelled", "cleaned up"]
        assert state(handle) == "DEAD"


def test_coroutine_that_ignores_cancel_has_no_result() -> None:
    log: list[str] = []

    @hf.task
    async def work(n: int) -> int:
        log.append("began")
        try:
            await asyncio.sleep(3600 if n else 0)
        except asyncio.CancelledError:
            log.append("went on")
        return n

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work, 1)
        worker = rig.worker()
        rig.step_until(lambda: log, "its beginning", worker)
        handle.cancel()
        rig.step_until(lambda: "went on" in log, "the cancellation", worker)
        after = rig.rt.submit(work, 0)
        rig.step_until(lambda: state(after) == "COMPLETED", "the next", worker)
        assert state(handle) == "DEAD"


def test_task_cancelled_before_it_starts_is_not_run() -> None:
    gates = TaskGates()

    @hf.task
    def work(n: int) -> None:
        gates.wait_at_gate(n)

    with open_task_rig(work) as rig:
        first, second = rig.rt.submit(work, 1), rig.rt.submit(work, 2)
        worker = rig.worker(concurrency=1)
        rig.step_until(lambda: gates.running, "the first", worker)
        assert second.cancel()
        gates.open(1, 2)
        rig.step_until(lambda: state(first) == "COMPLETED", "the first", worker)
        rig.pass_time(1, worker)
        assert gates.started == [1]
        assert second.status().where == "dead"


# -- unknown task names ------------------------------------------------------------------------


def test_task_of_unknown_name_waits_for_a_worker_that_knows_it() -> None:
    ran: list[str] = []

    @hf.task
    def old() -> None: ...

    @hf.task
    def new() -> None:
        ran.append("new")

    with open_task_rig(old, new) as rig:
        handle = rig.rt.submit(new)
        behind = rig.worker("behind", tasks=(old,))
        known = rig.rt.submit(old)
        rig.step_until(lambda: state(known) == "COMPLETED", "the one that it knows", behind)
        rig.pass_time(60, behind)
        status = handle.status()
        assert (status.state, status.where, status.attempt) == ("WAITING", "stray", 0)
        ahead = rig.worker("ahead", tasks=(old, new))
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", ahead, tick_ns=100 * MS)
        assert ran == ["new"]


def test_worker_without_tasks_is_rejected() -> None:
    with pytest.raises(Invalid) as caught:
        TaskRig().worker(tasks=())
    assert caught.value.what == "tasks"


# -- prefetched leases -------------------------------------------------------------------------


def test_prefetched_tasks_are_released_when_all_threads_are_stuck() -> None:
    gates = TaskGates()

    @hf.task
    def work(n: int) -> int:
        if n < 0:
            gates.wait_at_gate(n)
        rig.clock.advance(10_000)
        return n

    with open_task_rig(work) as rig:
        worker = rig.worker(concurrency=2)
        # A fast executor prefetches leases.
        quick = rig.rt.submit_many(work, [(n,) for n in range(50)])
        rig.step_until(lambda: all_in(quick, "COMPLETED"), "the quick ones", worker)
        stuck = rig.rt.submit_many(work, [(-1,), (-2,)])
        rest = rig.rt.submit_many(work, [(n,) for n in range(10)])
        rig.step_until(
            lambda: len(gates.running) == 2, "that both hands are stuck", worker, tick_ns=MS
        )
        assert any(handle.status().where == "leased" for handle in rest), "some were leased ahead"
        rig.step_until(
            lambda: rig.counts().leased == 2, "that they go back", worker, tick_ns=50 * MS
        )
        other = rig.worker("other")
        rig.step_until(lambda: all_in(rest, "COMPLETED"), "the others", other)
        assert {handle.status().expiries for handle in rest} == {0}
        gates.open(-1, -2)
        rig.step_until(lambda: all_in(stuck, "COMPLETED"), "the stuck ones", worker)


# -- shutdown and reports ----------------------------------------------------------------------


def test_stopping_worker_waits_for_running_tasks() -> None:
    gates = TaskGates()

    @hf.task
    def work() -> str:
        gates.wait_at_gate("a")
        return "done"

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker(stop_grace_s=10)
        worker.start()
        rig.step_until(lambda: gates.running, "its beginning")
        worker.request_stop()
        gates.open("a")
        worker.join(20)
        assert (state(handle), handle.result(0)) == ("COMPLETED", "done")


def test_worker_restarts_do_not_count_as_failures_or_expiries() -> None:
    gates = TaskGates()

    @hf.task(attempts=1, expiries_max=1)
    def work() -> str:
        attempt = hf.current_task().attempt
        gates.wait_at_gate(attempt)
        return "done"

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        for n in range(1, 4):
            worker = rig.worker(f"w{n}")
            rig.step_until(lambda n=n: n in gates.running, "its beginning", worker)
            rig.stop(worker)
            status = handle.status()
            assert (status.state, status.failures, status.expiries) == ("WAITING", 0, 0)
        gates.open(1, 2, 3, 4)
        rig.step_until(lambda: state(handle) == "COMPLETED", "its end", rig.worker("last"))
        assert handle.status().attempt == 4


def test_stopping_worker_cancels_a_running_coroutine() -> None:
    log: list[str] = []

    @hf.task
    async def work() -> None:
        log.append("began")
        try:
            await asyncio.sleep(3600)
        finally:
            log.append("cleaned up")

    with open_task_rig(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.step_until(lambda: log, "its beginning", worker)
        rig.stop(worker)
        rig.step_until(lambda: log == ["began", "cleaned up"], "its cancellation")
        assert (state(handle), handle.status().failures) == ("WAITING", 0)


def test_stopped_worker_is_removed_from_the_registry() -> None:
    from holdfast.leadership import worker_registry

    @hf.task
    def work() -> None: ...

    with open_task_rig(work) as rig:
        worker = rig.worker("w")
        worker.step()
        named = [one.worker for one in rig.store.read(worker_registry.list_registered, "jobs")]
        assert named == ["w:task"]
        rig.stop(worker)
        assert rig.store.read(worker_registry.list_registered, "jobs") == []


def test_sleeping_worker_starts_delayed_tasks_when_due() -> None:
    ran: list[int] = []

    @hf.task
    def work(n: int) -> None:
        ran.append(n)

    with open_task_rig(work) as rig:
        worker = rig.worker()
        worker.start()
        # Many close delays: some fall due between the last queue read and the sleep of the worker.
        for n in range(100):
            rig.rt.submit(work.options(delay_s=0.01 * n), n)
        rig.step_until(lambda: len(ran) == 100, "all of them", tick_ns=MS)
        assert sorted(ran) == list(range(100))


def test_worker_does_not_park_for_an_outdated_due_time() -> None:
    """A request parked until an outdated due time would start the next delayed task late."""

    @hf.task
    def work(n: int) -> None: ...

    with open_task_rig(work) as rig:
        worker = rig.worker()
        rig.rt.submit(work.options(queue="nobody's", delay_s=1), 1)
        rig.pass_time(0.5, worker)
        rig.clock.advance(1 * S)
        rig.step_until(lambda: rig.counts("nobody's").ready, "the sweep", worker)
        assert not worker._parked.is_open


def test_worker_leases_tasks_after_all_overdue_leases_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds for a direct lease request and for a parked one."""
    monkeypatch.setattr(leases, "EXPIRED_MAX", 3)

    @hf.task(lease_s=1, expiries_max=9)
    def work(n: int) -> int:
        return n

    with open_task_rig(work) as rig:
        worker = rig.worker()
        for _ in range(2):
            handles = rig.rt.submit_many(work, [(n,) for n in range(20)])
            for _ in range(10):
                rig.store.transact(operations.lease, "jobs", GrantRequest("dead", ["default"], 2))
            rig.clock.advance(2 * S)
            rig.step_until(lambda made=handles: all_in(made, "COMPLETED"), "all are done", worker)
            assert {handle.status().attempt for handle in handles} == {2}


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_report_each_commits_each_outcome_before_the_next_task_starts(kind: str) -> None:
    """With `report="each"` this holds for all tasks of a batch."""
    before: list[int] = []
    box: list[TaskRig] = []

    def look() -> None:
        before.append(box[0].counts().completed)

    @hf.task(report="each")
    def plain(n: int) -> None:
        look()

    @hf.task(report="each")
    async def coroutine(n: int) -> None:
        look()

    work: Any = plain if kind == "thread" else coroutine
    with open_task_rig(work) as rig:
        box.append(rig)
        worker = rig.worker(concurrency=1)
        handles = []
        for n in range(5):
            handles += rig.rt.submit_many(work, [(n,)])
            if kind == "loop":
                rig.step_until(lambda made=handles: all_in(made, "COMPLETED"), "one by one", worker)
        rig.step_until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        rig.step_until(lambda: worker.leased_count == 0, "all are collected", worker)
        assert before == [0, 1, 2, 3, 4]
        assert worker.counts[ReportAnswer.COMMITTED] == 5


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_report_each_starts_no_task_while_an_outcome_is_committed(kind: str) -> None:
    """This includes the other threads: with `report="each"` the whole worker waits."""
    began = {n: threading.Event() for n in (1, 2)}

    @hf.task(report="each")
    def plain(n: int) -> None:
        began[n].set()

    @hf.task(report="each")
    async def coroutine(n: int) -> None:
        began[n].set()

    work: Any = plain if kind == "thread" else coroutine
    with open_task_rig(work) as rig:
        worker = rig.worker(concurrency=4)
        reported, let_go = threading.Event(), threading.Event()
        early: list[bool] = []

        def pause(_: object) -> None:
            reported.set()
            let_go.wait(TIMEOUT_S)
            # Enough time for another thread to start the task if the barrier failed.
            early.append(began[2].wait(0.2))

        with failpoints.on("task_worker.report", calls=pause, times=1):
            handles = rig.rt.submit_many(work, [(1,)])
            rig.step_until(reported.is_set, "the first is reported", worker)
            handles += rig.rt.submit_many(work, [(2,)])
            rig.step_until(lambda: worker.leased_count == 2, "the second is leased", worker)
            let_go.set()
            rig.step_until(lambda: all_in(handles, "COMPLETED"), "both", worker)
        assert early == [False]
        assert began[2].is_set()


def test_task_that_loses_its_lease_at_the_report_barrier_does_not_start() -> None:
    ran: list[tuple[int, int]] = []

    @hf.task(report="each", lease_s=5)
    def work(n: int) -> None:
        ran.append((n, hf.current_task().attempt))

    with open_task_rig(work) as rig:
        worker = rig.worker(concurrency=4)
        reported, let_go = threading.Event(), threading.Event()

        def pause(_: object) -> None:
            reported.set()
            let_go.wait(TIMEOUT_S)

        with failpoints.on("task_worker.report", calls=pause, times=1):
            handles = rig.rt.submit_many(work, [(1,)])
            rig.step_until(reported.is_set, "the first is reported", worker)
            handles += rig.rt.submit_many(work, [(2,)])
            rig.step_until(lambda: worker.leased_count == 2, "the second is leased", worker)
            # The worker is blocked for longer than both leases.
            rig.clock.advance(60 * S)
            let_go.set()
            rig.step_until(lambda: all_in(handles, "COMPLETED"), "both", worker, tick_ns=S)
        assert (2, 1) not in ran


def test_report_retries_pause_while_stopping_during_a_store_outage() -> None:
    """The pause follows the clock: a stop flag set before the pause does not end it."""
    gates = TaskGates()

    @hf.task(report="each", lease_s=5)
    def work(n: int) -> None:
        gates.wait_at_gate(n)

    with open_task_rig(work) as rig:
        worker = rig.worker()
        [handle] = rig.rt.submit_many(work, [(1,)])
        rig.step_until(lambda: gates.running, "it runs", worker)
        tries: list[int] = []

        def refuse(_: object) -> None:
            tries.append(rig.clock.mono_ns())
            # A worker without a pause leaves the loop after this many tries.
            if len(tries) <= 5_000:
                raise StoreBusy(why="a test says so")

        worker._stopping.set()
        with failpoints.on("task_worker.report", calls=refuse):
            gates.open(1)
            rig.step_until(lambda: worker._executors.has_finished, "its lease is over")
        assert len(tries) <= 5 / RETRY_PAUSE_S + 1
        assert all(b - a >= RETRY_PAUSE_S * S for a, b in pairwise(tries))
        assert handle.status().state != "COMPLETED"


def test_unknown_report_mode_is_invalid() -> None:
    with pytest.raises(Invalid, match="report"):
        hf.task(report="never")(lambda: None)
