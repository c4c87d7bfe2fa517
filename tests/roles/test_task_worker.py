"""The task worker: what runs where, how long a lease is kept, and how running code is reached."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import MS, S
from holdfast.errors import Invalid, StoreBusy
from holdfast.roles.task_worker import PAUSE_S, HandsLost
from holdfast.tasks import coordinator, lease
from holdfast.tasks.coordinator import Answer
from holdfast.tasks.rows import Limits
from tests.roles.task_rig import LONG_S, Gates, Shift, shift

MODULES = ("holdfast.roles.task_worker", "holdfast.roles.task_run")


def state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().state


def all_in(handles: list[hf.TaskHandle[Any]], wanted: str) -> bool:
    return all(state(handle) == wanted for handle in handles)


# -- what runs where ---------------------------------------------------------------------------


def test_plain_functions_run_in_as_many_threads_as_there_are_hands() -> None:
    gates = Gates()

    @hf.task
    def work(n: int) -> int:
        gates.pass_through(n)
        return n

    with shift(work) as rig:
        handles = rig.rt.submit_many(work, [(n,) for n in range(6)])
        worker = rig.worker(concurrency=4)
        rig.until(lambda: len(gates.inside) == 4, "four at a time", worker)
        gates.open(*range(6))
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        assert gates.most == 4
        assert [handle.result(0) for handle in handles] == list(range(6))


def test_coroutines_run_side_by_side_in_one_thread() -> None:
    met: set[int] = set()
    threads: set[int] = set()

    @hf.task
    async def meet(n: int) -> int:
        met.add(n)
        threads.add(threading.get_ident())
        while len(met) < 50:
            await asyncio.sleep(0)
        return n

    with shift(meet) as rig:
        handles = rig.rt.submit_many(meet, [(n,) for n in range(50)])
        worker = rig.worker(concurrency=1)
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        assert len(threads) == 1


def test_a_task_knows_its_id_its_attempt_and_one_key_for_all_attempts() -> None:
    seen: list[tuple[str, int, str]] = []

    @hf.task(backoff_s=0.001)
    def look() -> None:
        me = hf.current_task()
        seen.append((me.id, me.attempt, me.idempotency_key))
        if me.attempt < 3:
            raise ValueError("again")

    with shift(look) as rig:
        handle = rig.rt.submit(look)
        rig.until(lambda: state(handle) == "COMPLETED", "the end", rig.worker(), tick_ns=10 * MS)
        assert [attempt for _, attempt, _ in seen] == [1, 2, 3]
        assert {(id, key) for id, _, key in seen} == {(handle.id, f"task-{handle.id}")}


def test_each_coroutine_has_its_own_current_task() -> None:
    @hf.task
    async def who() -> str:
        before = hf.current_task().id
        await asyncio.sleep(0)
        assert hf.current_task().id == before
        return before

    with shift(who) as rig:
        handles = rig.rt.submit_many(who, [()] * 20)
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker())
        assert [handle.result(0) for handle in handles] == [handle.id for handle in handles]


def test_tasks_of_all_kinds_are_worked_off_together() -> None:
    @hf.task
    def plain(n: int) -> int:
        return n

    @hf.task
    async def other(n: int) -> int:
        return -n

    with shift(plain, other) as rig:
        handles = [rig.rt.submit((plain, other)[n % 2], n) for n in range(100)]
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(), tick_ns=MS)
        assert [handle.result(0) for handle in handles] == [n * (-1) ** n for n in range(100)]


def test_a_higher_priority_goes_first_and_equals_in_their_order() -> None:
    ran: list[int] = []

    @hf.task
    def work(n: int) -> None:
        ran.append(n)

    with shift(work) as rig:
        handles = [
            rig.rt.submit(work.options(priority=priority), n)
            for n, priority in enumerate([0, -5, 7, 0, 7])
        ]
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", rig.worker(concurrency=1))
        assert ran == [2, 4, 0, 3, 1]


def test_where_a_queue_is_narrow_priority_and_age_decide_between_kinds() -> None:
    ran: list[int] = []

    @hf.task
    def plain(n: int) -> None:
        ran.append(n)

    @hf.task
    async def other(n: int) -> None:
        ran.append(n)

    with shift(plain, other) as rig:
        rig.store.transact(coordinator.limit, "jobs", "default", Limits(concurrency=1))
        for n in range(10):
            rig.rt.submit((plain, other)[n % 2], n)
        rig.rt.submit(other.options(priority=1), 10)
        rig.rt.submit(plain.options(priority=2), 11)
        rig.until(lambda: len(ran) == 12, "all", rig.worker())
        assert ran == [11, 10, *range(10)]


def test_who_leases_a_few_gets_the_first_of_any_kind() -> None:
    @hf.task
    def plain(n: int) -> None: ...

    @hf.task
    async def other(n: int) -> None: ...

    with shift(plain, other) as rig:
        for n in range(10):
            rig.rt.submit((plain, other)[n % 2], n)
        leased = rig.store.transact(coordinator.lease, "jobs", "w", ["default"], 6)
        assert [grant.seq for grant in leased.grants] == [1, 2, 3, 4, 5, 6]
        rest = rig.store.transact(coordinator.lease, "jobs", "w", ["default"], 100)
        assert sorted(grant.seq for grant in rest.grants) == [7, 8, 9, 10]


def test_a_worker_serves_its_own_queues_only() -> None:
    @hf.task
    def work() -> None: ...

    with shift(work) as rig:
        here = rig.rt.submit(work.options(queue="a"))
        elsewhere = rig.rt.submit(work.options(queue="b"))
        worker = rig.worker(queues=("a",))
        rig.until(lambda: state(here) == "COMPLETED", "its own", worker)
        rig.pass_time(1, worker)
        assert state(elsewhere) == "WAITING"
        rig.until(lambda: state(elsewhere) == "COMPLETED", "the other", rig.worker(queues=("b",)))


def test_a_queue_that_is_always_full_starves_no_other() -> None:
    ran: list[str] = []

    @hf.task
    def work(queue: str) -> None:
        ran.append(queue)

    with shift(work) as rig:
        for queue in "abc":
            rig.rt.submit_many(work.options(queue=queue), [(queue,)] * 30)
        worker = rig.worker(queues=("a", "b", "c"), concurrency=1)
        rig.until(lambda: len(ran) >= 15, "some", worker)
        assert set(ran[:15]) == {"a", "b", "c"}
        rig.until(lambda: len(ran) == 90, "all", worker)


def test_tasks_of_one_kind_do_not_wait_for_the_hands_of_another() -> None:
    gates = Gates()

    @hf.task
    def plain(n: int) -> None:
        gates.pass_through(n)

    @hf.task
    async def other(n: int) -> int:
        return n

    with shift(plain, other) as rig:
        rig.rt.submit_many(plain, [(n,) for n in range(50)])
        worker = rig.worker(concurrency=2)
        rig.until(lambda: len(gates.inside) == 2, "that all threads are taken", worker)
        quick = rig.rt.submit_many(other, [(n,) for n in range(50)])
        rig.until(lambda: all_in(quick, "COMPLETED"), "the coroutines", worker)
        assert len(gates.inside) == 2
        gates.open(*range(50))
        rig.until(lambda: rig.counts().completed == 100, "all", worker)


def test_a_sleeping_worker_is_woken_by_every_task_that_comes() -> None:
    """Time stands still here: nothing else would wake it."""

    @hf.task
    def work(n: int) -> int:
        return n

    with shift(work) as rig:
        worker = rig.worker()
        worker.start()
        for n in range(100):
            handle = rig.rt.submit(work, n)
            rig.until(lambda handle=handle: state(handle) == "COMPLETED", "its end")
            before = worker.rounds
        rig.until(lambda before=before: worker.rounds >= before, "that it rests")


def test_what_comes_alone_is_run_by_the_thread_that_waited_and_holds_up_nobody() -> None:
    gates = Gates()
    threads: dict[int, str] = {}

    @hf.task
    def work(n: int) -> int:
        threads[n] = threading.current_thread().name
        gates.pass_through(n)
        return n

    with shift(work) as rig:
        worker = rig.worker()
        worker.start()
        rig.until(lambda: worker._standing is not None and worker._relay.ready, "that it waits")
        lone = [rig.rt.submit(work, 0)]
        rig.until(lambda: 0 in gates.inside, "its beginning")
        assert threads[0] == "holdfast-task"
        # The loop goes on in another thread, which has hands for the rest.
        gates.open(*range(1, 30))
        others = rig.rt.submit_many(work, [(n,) for n in range(1, 20)])
        rig.until(lambda: all_in(others, "COMPLETED"), "the others")
        assert state(lone[0]) == "LEASED"
        for n in range(20, 30):
            last = rig.rt.submit(work, n)
            rig.until(lambda last=last: state(last) == "COMPLETED", "one more")
        gates.open(0)
        rig.until(lambda: all_in(lone, "COMPLETED"), "the first of all")


def test_what_comes_alone_is_left_to_the_hands_of_its_kind() -> None:
    threads: dict[str, set[str]] = {"plain": set(), "looping": set()}

    def note(name: str) -> None:
        threads[name].add(threading.current_thread().name)

    @hf.task
    def plain() -> None:
        note("plain")

    @hf.task
    async def looping() -> None:
        note("looping")

    with shift(plain, looping) as rig:
        worker = rig.worker()
        worker.start()
        for _ in range(5):
            for task in (looping, plain):
                rig.until(
                    lambda: worker._standing is not None and worker._relay.ready, "that it waits"
                )
                handle = rig.rt.submit(task)
                rig.until(lambda handle=handle: state(handle) == "COMPLETED", "its end")
    assert threads == {"plain": {"holdfast-task"}, "looping": {"holdfast-task-loop"}}


def test_what_runs_in_the_thread_that_waited_can_be_cancelled() -> None:
    gates = Gates()
    seen: list[bool] = []

    @hf.task
    def work(n: int) -> None:
        gates.pass_through(n)
        seen.append(hf.current_task().cancelled)

    with shift(work) as rig:
        worker = rig.worker(concurrency=1)
        worker.start()
        rig.until(lambda: worker._standing is not None and worker._relay.ready, "that it waits")
        lone = rig.rt.submit(work, 0)
        rig.until(lambda: 0 in gates.inside, "its beginning")
        lone.cancel()
        # Its place is another's now, though it has not come back.
        gates.open(1)
        rig.rt.submit(work, 1)
        rig.until(lambda: rig.counts().completed == 1, "its end")
        gates.open(0)
        rig.until(lambda: len(seen) == 2, "that the first comes back")
        assert sorted(seen) == [False, True]
        assert (rig.counts().dead, rig.counts().completed) == (1, 1)


def test_a_worker_whose_hands_never_come_back_ends_and_says_so() -> None:
    from holdfast.runner.crew import WRITTEN_OFF_MAX

    gates = Gates()

    @hf.task
    def hang(n: int) -> None:
        gates.pass_through(n)

    with shift(hang) as rig:
        worker = rig.worker(concurrency=1)

        def hang_all() -> None:
            for n in range(WRITTEN_OFF_MAX + 10):
                handle = rig.rt.submit(hang, n)
                rig.until(lambda n=n: n in gates.inside, "its beginning", worker)
                handle.cancel()

        with pytest.raises(HandsLost):
            hang_all()
        assert len(gates.inside) >= WRITTEN_OFF_MAX
        gates.open(*range(WRITTEN_OFF_MAX + 10))


def test_a_delayed_task_begins_when_its_time_has_come_and_not_before() -> None:
    @hf.task
    def work() -> None: ...

    with shift(work) as rig:
        handle = rig.rt.submit(work.options(delay_s=10))
        worker = rig.worker()
        rig.pass_time(9.5, worker)
        assert handle.status().where == "delayed"
        rig.pass_time(1, worker)
        rig.until(lambda: state(handle) == "COMPLETED", "its end", worker)


@hf.task
def idle() -> None: ...


@pytest.mark.parametrize("wrong", [0, -1, 1_001, "4", True, 1.0])
def test_a_worker_without_hands_is_refused(wrong: Any) -> None:
    with pytest.raises(Invalid) as caught:
        Shift(idle).worker(concurrency=wrong)
    assert caught.value.what == "concurrency"


@pytest.mark.parametrize("wrong", [(), ("",), (5,), ("x" * 201,)])
def test_a_worker_without_a_queue_that_can_be_is_refused(wrong: Any) -> None:
    with pytest.raises(Invalid):
        Shift(idle).worker(queues=wrong)


def test_a_worker_forgets_what_is_over_by_itself() -> None:
    @hf.task(retain_s=5)
    def work() -> None: ...

    with shift(work) as rig:
        handles = rig.rt.submit_many(work, [()] * 20)
        worker = rig.worker()
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        rig.pass_time(4, worker)
        assert rig.counts().completed == 20
        rig.pass_time(20, worker)
        assert rig.counts().completed == 0


# -- leases ------------------------------------------------------------------------------------


def test_a_lease_is_extended_for_as_long_as_its_task_runs() -> None:
    gates = Gates()

    @hf.task(lease_s=1)
    def work() -> str:
        gates.pass_through("a")
        return "done"

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker, other = rig.worker("w"), rig.worker("other")
        rig.until(lambda: gates.inside, "its beginning", worker)
        rig.pass_time(60, worker, other)
        gates.open("a")
        rig.until(lambda: state(handle) == "COMPLETED", "its end", worker)
        assert (handle.status().attempt, handle.status().expiries) == (1, 0)
        assert gates.came == ["a"]


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_wall_clock_that_steps_by_days_ends_no_lease(hours: int) -> None:
    gates = Gates()

    @hf.task(lease_s=1)
    def work() -> None:
        gates.pass_through("a")

    with shift(work) as rig:
        handle, later = rig.rt.submit(work), rig.rt.submit(work.options(delay_s=30))
        worker = rig.worker()
        rig.until(lambda: gates.inside, "its beginning", worker)
        rig.clock.step_wall(hours * 3600 * S)
        rig.pass_time(5, worker)
        assert (state(handle), handle.status().attempt) == ("LEASED", 1)
        assert later.status().where == "delayed"
        gates.open("a")
        rig.until(lambda: state(later) == "COMPLETED", "both", worker, tick_ns=500 * MS)


def test_a_task_that_hangs_loses_its_lease_with_its_window_and_is_tried_again() -> None:
    gates = Gates()
    runs: list[hf.TaskRun] = []

    @hf.task(lease_s=1, execution_window_s=5)
    def work() -> int:
        runs.append(hf.current_task())
        if len(runs) == 1:
            gates.pass_through("hangs")
        return len(runs)

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker(concurrency=1)
        rig.until(lambda: gates.inside, "its beginning", worker)
        rig.pass_time(4.5, worker)
        assert state(handle) == "LEASED", "it is still within its window"
        assert not runs[0].cancelled
        # The hand is replaced: there is one only, and the first is still inside.
        rig.until(lambda: state(handle) == "COMPLETED", "its end", worker, tick_ns=50 * MS)
        assert gates.inside == ["hangs"]
        assert runs[0].cancelled
        assert (handle.result(0), handle.status().attempt, handle.status().expiries) == (2, 2, 1)
        gates.open("hangs")


def test_what_a_hung_task_returns_in_the_end_changes_nothing() -> None:
    gates = Gates()

    @hf.task(lease_s=1, execution_window_s=2)
    def work() -> str:
        first = hf.current_task().attempt == 1
        gates.pass_through("late" if first else "good")
        return "late" if first else "good"

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.until(lambda: "good" in gates.inside, "the second attempt", worker, tick_ns=50 * MS)
        gates.open("late")
        rig.until(lambda: gates.inside == ["good"], "the late one", worker)
        rig.pass_time(0.5, worker)
        assert state(handle) == "LEASED"
        gates.open("good")
        rig.until(lambda: state(handle) == "COMPLETED", "its end", worker)
        assert handle.result(0) == "good"


def test_signs_of_progress_keep_a_lease_beyond_its_window() -> None:
    gates = Gates()
    runs: list[hf.TaskRun] = []

    @hf.task(lease_s=1, execution_window_s=3)
    def work() -> None:
        runs.append(hf.current_task())
        gates.pass_through("a")

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.until(lambda: gates.inside, "its beginning", worker)
        for _ in range(20):
            runs[0].progress()
            rig.pass_time(1.5, worker)
        assert (state(handle), handle.status().attempt) == ("LEASED", 1)
        rig.until(lambda: runs[0].cancelled, "the end of its patience", worker, tick_ns=100 * MS)
        assert len(runs) == 1 or runs[1].attempt == 2
        gates.open("a")
        rig.until(lambda: state(handle) == "COMPLETED", "its end", worker, tick_ns=100 * MS)


def test_a_task_that_hangs_again_and_again_is_dead_after_as_many_leases_as_it_may_outlive() -> None:
    gates = Gates()

    @hf.task(lease_s=1, execution_window_s=1, expiries_max=3)
    def work() -> None:
        gates.pass_through(hf.current_task().attempt)

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker(concurrency=1)
        rig.until(lambda: state(handle) == "DEAD", "its death", worker, tick_ns=50 * MS)
        status = handle.status()
        assert (status.expiries, status.attempt, status.reason) == (3, 3, "expiries_exhausted")
        rig.pass_time(5, worker)
        assert gates.came == [1, 2, 3]
        gates.open(1, 2, 3)


def test_what_a_task_says_of_itself_is_shown_while_it_runs() -> None:
    gates = Gates()

    @hf.task
    def work() -> None:
        hf.current_task().progress({"page": 3})
        gates.pass_through("a")

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.until(lambda: handle.status().progress, "progress", worker, tick_ns=100 * MS)
        assert handle.status().progress == {"page": 3}
        gates.open("a")
        rig.until(lambda: state(handle) == "COMPLETED", "its end", worker)


@pytest.mark.parametrize("wrong", [object(), "x" * 5_000, "\ud800", 1 << 70])
def test_progress_that_cannot_be_stored_is_the_tasks_own_mistake(wrong: Any) -> None:
    @hf.task(attempts=1)
    def work() -> None:
        hf.current_task().progress(wrong)

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        rig.until(lambda: state(handle) == "FAILED", "its end", rig.worker())
        assert handle.status().reason == "invalid"


# -- cancelling --------------------------------------------------------------------------------


def test_a_cancelled_thread_sees_the_flag_and_its_hand_is_free_for_others() -> None:
    gates = Gates()
    runs: list[hf.TaskRun] = []

    @hf.task
    def work(name: str) -> None:
        runs.append(hf.current_task())
        if name == "first":
            gates.pass_through(name)

    with shift(work) as rig:
        first, second = rig.rt.submit(work, "first"), rig.rt.submit(work, "second")
        worker = rig.worker(concurrency=1)
        rig.until(lambda: gates.inside, "its beginning", worker)
        assert first.cancel()
        rig.until(lambda: runs[0].cancelled, "the flag", worker)
        rig.until(lambda: state(second) == "COMPLETED", "the other", worker)
        assert (state(first), first.status().reason) == ("DEAD", "cancelled")
        gates.open("first")
        rig.until(lambda: not gates.inside, "its return", worker)
        rig.pass_time(1, worker)
        assert state(first) == "DEAD"
        assert worker.counts[Answer.CANCELLED] == 0, "nobody reports what nobody waits for"


def test_a_cancelled_coroutine_is_cancelled_where_it_waits() -> None:
    told: list[str] = []

    @hf.task
    async def work() -> None:
        try:
            told.append("began")
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise
        finally:
            told.append("cleaned up")

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.until(lambda: told, "its beginning", worker)
        assert handle.cancel()
        rig.until(lambda: "cleaned up" in told, "the cancellation", worker)
        assert told == ["began", "cancelled", "cleaned up"]
        assert state(handle) == "DEAD"


def test_a_coroutine_that_takes_no_notice_of_its_cancellation_brings_no_result() -> None:
    told: list[str] = []

    @hf.task
    async def work(n: int) -> int:
        told.append("began")
        try:
            await asyncio.sleep(3600 if n else 0)
        except asyncio.CancelledError:
            told.append("went on")
        return n

    with shift(work) as rig:
        handle = rig.rt.submit(work, 1)
        worker = rig.worker()
        rig.until(lambda: told, "its beginning", worker)
        handle.cancel()
        rig.until(lambda: "went on" in told, "the cancellation", worker)
        after = rig.rt.submit(work, 0)
        rig.until(lambda: state(after) == "COMPLETED", "the next", worker)
        assert state(handle) == "DEAD"


def test_a_task_that_was_cancelled_before_its_worker_began_it_is_not_begun() -> None:
    gates = Gates()

    @hf.task
    def work(n: int) -> None:
        gates.pass_through(n)

    with shift(work) as rig:
        first, second = rig.rt.submit(work, 1), rig.rt.submit(work, 2)
        worker = rig.worker(concurrency=1)
        rig.until(lambda: gates.inside, "the first", worker)
        assert second.cancel()
        gates.open(1, 2)
        rig.until(lambda: state(first) == "COMPLETED", "the first", worker)
        rig.pass_time(1, worker)
        assert gates.came == [1]
        assert second.status().where == "dead"


# -- names that nobody knows -------------------------------------------------------------------


def test_a_task_that_its_worker_does_not_know_waits_uncounted_for_one_that_does() -> None:
    ran: list[str] = []

    @hf.task
    def old() -> None: ...

    @hf.task
    def new() -> None:
        ran.append("new")

    with shift(old, new) as rig:
        handle = rig.rt.submit(new)
        behind = rig.worker("behind", tasks=(old,))
        known = rig.rt.submit(old)
        rig.until(lambda: state(known) == "COMPLETED", "the one that it knows", behind)
        rig.pass_time(60, behind)
        status = handle.status()
        assert (status.state, status.where, status.attempt) == ("WAITING", "stray", 0)
        ahead = rig.worker("ahead", tasks=(old, new))
        rig.until(lambda: state(handle) == "COMPLETED", "its end", ahead, tick_ns=100 * MS)
        assert ran == ["new"]


def test_a_worker_without_any_task_is_refused() -> None:
    with pytest.raises(Invalid) as caught:
        Shift().worker(tasks=())
    assert caught.value.what == "tasks"


# -- what was leased ahead ---------------------------------------------------------------------


def test_what_no_hand_has_begun_goes_back_when_the_hands_are_stuck() -> None:
    gates = Gates()

    @hf.task
    def work(n: int) -> int:
        if n < 0:
            gates.pass_through(n)
        rig.clock.advance(10_000)
        return n

    with shift(work) as rig:
        worker = rig.worker(concurrency=2)
        # A crew that was quick so far leases ahead.
        quick = rig.rt.submit_many(work, [(n,) for n in range(50)])
        rig.until(lambda: all_in(quick, "COMPLETED"), "the quick ones", worker)
        stuck = rig.rt.submit_many(work, [(-1,), (-2,)])
        rest = rig.rt.submit_many(work, [(n,) for n in range(10)])
        rig.until(lambda: len(gates.inside) == 2, "that both hands are stuck", worker, tick_ns=MS)
        assert any(handle.status().where == "leased" for handle in rest), "some were leased ahead"
        rig.until(lambda: rig.counts().leased == 2, "that they go back", worker, tick_ns=50 * MS)
        other = rig.worker("other")
        rig.until(lambda: all_in(rest, "COMPLETED"), "the others", other)
        assert {handle.status().expiries for handle in rest} == {0}
        gates.open(-1, -2)
        rig.until(lambda: all_in(stuck, "COMPLETED"), "the stuck ones", worker)


# -- leaving -----------------------------------------------------------------------------------


def test_a_worker_that_is_told_to_stop_waits_for_what_it_has_begun() -> None:
    gates = Gates()

    @hf.task
    def work() -> str:
        gates.pass_through("a")
        return "done"

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker(stop_grace_s=10)
        worker.start()
        rig.until(lambda: gates.inside, "its beginning")
        worker.request_stop()
        gates.open("a")
        worker.join(20)
        assert (state(handle), handle.result(0)) == ("COMPLETED", "done")


def test_three_restarts_during_a_long_task_cost_it_nothing() -> None:
    gates = Gates()

    @hf.task(attempts=1, expiries_max=1)
    def work() -> str:
        attempt = hf.current_task().attempt
        gates.pass_through(attempt)
        return "done"

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        for n in range(1, 4):
            worker = rig.worker(f"w{n}")
            rig.until(lambda n=n: n in gates.inside, "its beginning", worker)
            rig.stop(worker)
            status = handle.status()
            assert (status.state, status.failures, status.expiries) == ("WAITING", 0, 0)
        gates.open(1, 2, 3, 4)
        rig.until(lambda: state(handle) == "COMPLETED", "its end", rig.worker("last"))
        assert handle.status().attempt == 4


def test_a_coroutine_that_does_not_end_is_cancelled_when_its_worker_leaves() -> None:
    told: list[str] = []

    @hf.task
    async def work() -> None:
        told.append("began")
        try:
            await asyncio.sleep(3600)
        finally:
            told.append("cleaned up")

    with shift(work) as rig:
        handle = rig.rt.submit(work)
        worker = rig.worker()
        rig.until(lambda: told, "its beginning", worker)
        rig.stop(worker)
        rig.until(lambda: told == ["began", "cleaned up"], "its cancellation")
        assert (state(handle), handle.status().failures) == ("WAITING", 0)


def test_a_worker_that_leaves_is_not_among_the_workers_any_more() -> None:
    from holdfast.authority import workers

    @hf.task
    def work() -> None: ...

    with shift(work) as rig:
        worker = rig.worker("w")
        worker.step()
        named = [one.worker for one in rig.store.read(workers.known, "jobs")]
        assert named == ["w:task"]
        rig.stop(worker)
        assert rig.store.read(workers.known, "jobs") == []


def test_a_worker_that_sleeps_begins_what_comes_due_and_nobody_has_to_wake_it() -> None:
    ran: list[int] = []

    @hf.task
    def work(n: int) -> None:
        ran.append(n)

    with shift(work) as rig:
        worker = rig.worker()
        worker.start()
        # Many times, and close together: some come due between its last look and its rest.
        for n in range(100):
            rig.rt.submit(work.options(delay_s=0.01 * n), n)
        rig.until(lambda: len(ran) == 100, "all of them", tick_ns=MS)
        assert sorted(ran) == list(range(100))


def test_a_worker_that_sweeps_what_is_due_does_not_stand_for_what_it_has_seen() -> None:
    """It would wait for what comes due before that, which is nothing, and begin the next delayed task late."""

    @hf.task
    def work(n: int) -> None: ...

    with shift(work) as rig:
        worker = rig.worker()
        rig.rt.submit(work.options(queue="nobody's", delay_s=1), 1)
        rig.pass_time(0.5, worker)
        rig.clock.advance(1 * S)
        rig.until(lambda: rig.counts("nobody's").ready, "the sweep", worker)
        assert worker._standing is None


def test_a_worker_goes_on_once_all_overdue_leases_have_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it asks for them itself, or its request stands at the store."""
    monkeypatch.setattr(lease, "EXPIRED_MAX", 3)

    @hf.task(lease_s=1, expiries_max=9)
    def work(n: int) -> int:
        return n

    with shift(work) as rig:
        worker = rig.worker()
        for _ in range(2):
            handles = rig.rt.submit_many(work, [(n,) for n in range(20)])
            for _ in range(10):
                rig.store.transact(coordinator.lease, "jobs", "dead", ["default"], 2)
            rig.clock.advance(2 * S)
            rig.until(lambda made=handles: all_in(made, "COMPLETED"), "all are done", worker)
            assert {handle.status().attempt for handle in handles} == {2}


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_each_outcome_is_committed_before_the_next_task_begins(kind: str) -> None:
    """With `report="each"`, whatever the other tasks of the batch do."""
    before: list[int] = []
    box: list[Shift] = []

    def look() -> None:
        before.append(box[0].counts().completed)

    @hf.task(report="each")
    def plain(n: int) -> None:
        look()

    @hf.task(report="each")
    async def coroutine(n: int) -> None:
        look()

    work: Any = plain if kind == "thread" else coroutine
    with shift(work) as rig:
        box.append(rig)
        worker = rig.worker(concurrency=1)
        handles = []
        for n in range(5):
            handles += rig.rt.submit_many(work, [(n,)])
            if kind == "loop":
                rig.until(lambda made=handles: all_in(made, "COMPLETED"), "one by one", worker)
        rig.until(lambda: all_in(handles, "COMPLETED"), "all", worker)
        rig.until(lambda: worker.held == 0, "all are collected", worker)
        assert before == [0, 1, 2, 3, 4]
        assert worker.counts[Answer.COMMITTED] == 5


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_no_task_of_the_worker_begins_while_an_outcome_is_committed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in another hand either: with `report="each"` it is the worker that waits."""
    began = {n: threading.Event() for n in (1, 2)}

    @hf.task(report="each")
    def plain(n: int) -> None:
        began[n].set()

    @hf.task(report="each")
    async def coroutine(n: int) -> None:
        began[n].set()

    work: Any = plain if kind == "thread" else coroutine
    with shift(work) as rig:
        worker = rig.worker(concurrency=4)
        transact = rig.store.transact
        reported, let_go = threading.Event(), threading.Event()
        early: list[bool] = []

        def slow(operation: Any, *args: Any, **kwargs: Any) -> Any:
            if operation is coordinator.settle and not reported.is_set():
                reported.set()
                let_go.wait(LONG_S)
                # Time enough for another hand to begin, if nothing held it back.
                early.append(began[2].wait(0.2))
            return transact(operation, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(rig.store, "transact", slow)
            handles = rig.rt.submit_many(work, [(1,)])
            rig.until(reported.is_set, "the first is reported", worker)
            handles += rig.rt.submit_many(work, [(2,)])
            rig.until(lambda: worker.held == 2, "the second is leased", worker)
            let_go.set()
            rig.until(lambda: all_in(handles, "COMPLETED"), "both", worker)
        assert early == [False]
        assert began[2].is_set()


def test_a_task_that_loses_its_lease_at_the_barrier_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[int, int]] = []

    @hf.task(report="each", lease_s=5)
    def work(n: int) -> None:
        ran.append((n, hf.current_task().attempt))

    with shift(work) as rig:
        worker = rig.worker(concurrency=4)
        transact = rig.store.transact
        reported, let_go = threading.Event(), threading.Event()

        def slow(operation: Any, *args: Any, **kwargs: Any) -> Any:
            if operation is coordinator.settle and not reported.is_set():
                reported.set()
                let_go.wait(LONG_S)
            return transact(operation, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(rig.store, "transact", slow)
            handles = rig.rt.submit_many(work, [(1,)])
            rig.until(reported.is_set, "the first is reported", worker)
            handles += rig.rt.submit_many(work, [(2,)])
            rig.until(lambda: worker.held == 2, "the second is leased", worker)
            # The worker stands still for longer than both leases.
            rig.clock.advance(60 * S)
            let_go.set()
            rig.until(lambda: all_in(handles, "COMPLETED"), "both", worker, tick_ns=S)
        assert (2, 1) not in ran


def test_a_report_waits_between_tries_while_its_worker_stops_and_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock: the flag of a stop does not end a pause that begins after it."""
    gates = Gates()

    @hf.task(report="each", lease_s=5)
    def work(n: int) -> None:
        gates.pass_through(n)

    with shift(work) as rig:
        worker = rig.worker()
        [handle] = rig.rt.submit_many(work, [(1,)])
        rig.until(lambda: gates.inside, "it runs", worker)
        tries: list[int] = []
        transact = rig.store.transact

        def away(*args: Any, **kwargs: Any) -> Any:
            tries.append(rig.clock.mono_ns())
            # A worker that does not pause is let go after that many.
            if len(tries) > 5_000:
                return transact(*args, **kwargs)
            raise StoreBusy(why="a test says so")

        worker._stopping.set()
        with monkeypatch.context() as patch:
            patch.setattr(rig.store, "transact", away)
            gates.open(1)
            rig.until(lambda: worker._hands.finished, "its lease is over")
        assert len(tries) <= 5 / PAUSE_S + 1
        assert all(b - a >= PAUSE_S * S for a, b in pairwise(tries))
        assert handle.status().state != "COMPLETED"


def test_an_unknown_way_to_report_is_refused() -> None:
    with pytest.raises(Invalid, match="report"):
        hf.task(report="never")(lambda: None)
