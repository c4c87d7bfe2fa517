"""The scheduler runs one thread at a time, chosen by the tape. Killed threads never run again, no OS thread leaks."""

import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.clock import S, SimClock
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.scheduler import ProcessKilled, Scheduler, SimThreadPool


@pytest.fixture
def threads() -> Iterator[SimThreadPool]:
    before = threading.active_count()
    with SimThreadPool() as pool:
        yield pool
    assert threading.active_count() == before


def run_all(scheduler: Scheduler, *bodies: Callable[[], None]) -> None:
    for n, body in enumerate(bodies):
        scheduler.spawn(f"t{n}", body)
    scheduler.run(lambda: False)
    scheduler.close()


def run_order(seed: int, threads: SimThreadPool) -> list[int]:
    scheduler = Scheduler(ChoiceTape(seed), SimClock(), threads)
    order: list[int] = []

    def body(index: int) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(20):
                order.append(index)
                scheduler.yield_()

        return steps

    run_all(scheduler, body(0), body(1), body(2))
    return order


def test_scheduler_order_is_determined_by_the_tape(threads: SimThreadPool) -> None:
    assert run_order(1, threads) == run_order(1, threads)
    assert run_order(1, threads) != run_order(2, threads)


def test_scheduler_with_an_exhausted_tape_is_round_robin(threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape.replay([]), SimClock(), threads)
    order: list[str] = []

    def steps() -> None:
        for _ in range(3):
            assert scheduler.current is not None
            order.append(scheduler.current.name)
            scheduler.yield_()

    run_all(scheduler, steps, steps, steps)
    assert order == ["t0", "t1", "t2"] * 3


def test_clock_jumps_to_the_first_wakeup_when_all_threads_sleep(threads: SimThreadPool) -> None:
    clock = SimClock()
    scheduler = Scheduler(ChoiceTape(0), clock, threads)
    began = clock.boot_ns()
    woke: list[int] = []

    def sleeper(seconds: int) -> Callable[[], None]:
        def body() -> None:
            scheduler.sleep(seconds * S)
            woke.append((clock.boot_ns() - began) // S)

        return body

    run_all(scheduler, sleeper(3600), sleeper(60))
    assert woke == [60, 3600]


def test_killed_thread_unwinds_and_cannot_yield(threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape(0), SimClock(), threads)
    steps_seen: list[str] = []

    def victim() -> None:
        try:
            while True:
                scheduler.yield_()
        finally:
            steps_seen.append("unwinding")
            with pytest.raises(ProcessKilled):
                scheduler.yield_()
            steps_seen.append("refused")

    task = scheduler.spawn("victim", victim)

    def killer() -> None:
        for _ in range(5):
            scheduler.yield_()
        scheduler.kill(task)

    scheduler.spawn("killer", killer)
    scheduler.run(lambda: False)
    scheduler.close()
    assert steps_seen == ["unwinding", "refused"]
    assert task.has_ended


def test_thread_may_kill_itself(threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape(0), SimClock(), threads)
    after: list[str] = []

    def body() -> None:
        assert scheduler.current is not None
        scheduler.kill(scheduler.current)
        after.append("alive")

    run_all(scheduler, body)
    assert after == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", ["killed", "returned", "raised"])
def test_threads_of_a_process_end_together(how: str, first: int, threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape(0), SimClock(), threads)
    steps = [0, 0, 0]

    def body(index: int) -> Callable[[], None]:
        def live() -> None:
            for _ in range(20):
                steps[index] += 1
                scheduler.yield_()
                if how != "killed" and index == first and steps[index] == 5:
                    if how == "raised":
                        raise ZeroDivisionError
                    return

        return live

    def killer() -> None:
        while steps[first] < 5:
            scheduler.yield_()
        scheduler.kill(tasks[first])
        tasks.append(scheduler.spawn("other", body(2)))

    tasks = [scheduler.spawn("one", body(0))]
    tasks.append(scheduler.spawn("two", body(1), same_process_as=tasks[0]))
    scheduler.spawn("killer", killer if how == "killed" else body(2))
    scheduler.run(lambda: False)
    scheduler.close()
    assert all(task.has_ended for task in tasks[:2])
    assert steps[1 - first] < 20
    assert steps[2] == 20  # another process


def test_killed_thread_ends_its_process_before_another_thread_runs(threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape(0), SimClock(), threads)
    after: list[str] = []

    def sleeper() -> None:
        scheduler.sleep(S)
        after.append("awake")

    def dies() -> None:
        assert scheduler.current is not None
        scheduler.kill(scheduler.current)

    main = scheduler.spawn("main", sleeper)
    scheduler.spawn("beside", dies, same_process_as=main)
    scheduler.run(lambda: False)
    scheduler.close()
    assert after == []


def test_on_exit_may_spawn_the_next_incarnation(threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape(0), SimClock(), threads)
    thread_ids: list[int] = []

    def body() -> None:
        thread_ids.append(threading.get_ident())
        scheduler.yield_()

    def respawn(task: object) -> None:
        if len(thread_ids) < 50:
            scheduler.spawn("again", body)

    scheduler.on_exit = respawn
    run_all(scheduler, body)
    assert len(thread_ids) == 50
    assert len(set(thread_ids)) <= 2  # pool threads are reused


def test_close_unwinds_live_threads(threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape(0), SimClock(), threads)
    unwound: list[int] = []

    def body() -> None:
        try:
            while True:
                scheduler.sleep(S)
        finally:
            unwound.append(1)

    for n in range(5):
        scheduler.spawn(f"t{n}", body)
    scheduler.run(lambda: scheduler.steps >= 20)
    scheduler.close()
    assert len(unwound) == 5


def test_error_of_a_thread_is_stored_in_it(threads: SimThreadPool) -> None:
    scheduler = Scheduler(ChoiceTape(0), SimClock(), threads)

    def body() -> None:
        raise ZeroDivisionError

    task = scheduler.spawn("t", body)
    scheduler.run(lambda: False)
    scheduler.close()
    assert isinstance(task.error, ZeroDivisionError)
