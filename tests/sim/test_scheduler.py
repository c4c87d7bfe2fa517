"""One actor at a time, chosen by the tape; the dead stay dead; no thread is left behind."""

import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.clock import S, SimClock
from holdfast.sim.scheduler import Killed, Scheduler, Threads
from holdfast.sim.tape import Tape


@pytest.fixture
def threads() -> Iterator[Threads]:
    before = threading.active_count()
    with Threads() as pool:
        yield pool
    assert threading.active_count() == before


def run_all(scheduler: Scheduler, *bodies: Callable[[], None]) -> None:
    for n, body in enumerate(bodies):
        scheduler.spawn(f"t{n}", body)
    scheduler.run(lambda: False)
    scheduler.close()


def order_of(seed: int, threads: Threads) -> list[int]:
    scheduler = Scheduler(Tape(seed), SimClock(), threads)
    order: list[int] = []

    def body(me: int) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(20):
                order.append(me)
                scheduler.yield_()

        return steps

    run_all(scheduler, body(0), body(1), body(2))
    return order


def test_the_tape_decides_who_runs(threads: Threads) -> None:
    assert order_of(1, threads) == order_of(1, threads)
    assert order_of(1, threads) != order_of(2, threads)


def test_a_worn_out_tape_is_a_round_robin(threads: Threads) -> None:
    scheduler = Scheduler(Tape.replay([]), SimClock(), threads)
    order: list[str] = []

    def steps() -> None:
        for _ in range(3):
            assert scheduler.current is not None
            order.append(scheduler.current.name)
            scheduler.yield_()

    run_all(scheduler, steps, steps, steps)
    assert order == ["t0", "t1", "t2"] * 3


def test_time_leaps_to_the_first_sleeper_when_all_sleep(threads: Threads) -> None:
    clock = SimClock()
    scheduler = Scheduler(Tape(0), clock, threads)
    began = clock.boot_ns()
    woke: list[int] = []

    def sleeper(seconds: int) -> Callable[[], None]:
        def body() -> None:
            scheduler.sleep(seconds * S)
            woke.append((clock.boot_ns() - began) // S)

        return body

    run_all(scheduler, sleeper(3600), sleeper(60))
    assert woke == [60, 3600]


def test_a_killed_task_unwinds_and_can_yield_no_more(threads: Threads) -> None:
    scheduler = Scheduler(Tape(0), SimClock(), threads)
    story: list[str] = []

    def victim() -> None:
        try:
            while True:
                scheduler.yield_()
        finally:
            story.append("unwinding")
            with pytest.raises(Killed):
                scheduler.yield_()
            story.append("refused")

    task = scheduler.spawn("victim", victim)

    def killer() -> None:
        for _ in range(5):
            scheduler.yield_()
        scheduler.kill(task)

    scheduler.spawn("killer", killer)
    scheduler.run(lambda: False)
    scheduler.close()
    assert story == ["unwinding", "refused"]
    assert task.dead


def test_a_task_may_kill_itself(threads: Threads) -> None:
    scheduler = Scheduler(Tape(0), SimClock(), threads)
    after: list[str] = []

    def body() -> None:
        assert scheduler.current is not None
        scheduler.kill(scheduler.current)
        after.append("alive")

    run_all(scheduler, body)
    assert after == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", ["killed", "returned", "raised"])
def test_the_threads_of_a_process_end_together(how: str, first: int, threads: Threads) -> None:
    scheduler = Scheduler(Tape(0), SimClock(), threads)
    steps = [0, 0, 0]

    def body(me: int) -> Callable[[], None]:
        def live() -> None:
            for _ in range(20):
                steps[me] += 1
                scheduler.yield_()
                if how != "killed" and me == first and steps[me] == 5:
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
    tasks.append(scheduler.spawn("two", body(1), beside=tasks[0]))
    scheduler.spawn("killer", killer if how == "killed" else body(2))
    scheduler.run(lambda: False)
    scheduler.close()
    assert all(task.dead for task in tasks[:2])
    assert steps[1 - first] < 20
    assert steps[2] == 20  # another process


def test_a_thread_that_dies_is_followed_before_it_does_anything(threads: Threads) -> None:
    scheduler = Scheduler(Tape(0), SimClock(), threads)
    after: list[str] = []

    def sleeper() -> None:
        scheduler.sleep(S)
        after.append("awake")

    def dies() -> None:
        assert scheduler.current is not None
        scheduler.kill(scheduler.current)

    main = scheduler.spawn("main", sleeper)
    scheduler.spawn("beside", dies, beside=main)
    scheduler.run(lambda: False)
    scheduler.close()
    assert after == []


def test_an_exit_may_start_the_next_incarnation(threads: Threads) -> None:
    scheduler = Scheduler(Tape(0), SimClock(), threads)
    lives: list[int] = []

    def body() -> None:
        lives.append(threading.get_ident())
        scheduler.yield_()

    def again(task: object) -> None:
        if len(lives) < 50:
            scheduler.spawn("again", body)

    scheduler.on_exit = again
    run_all(scheduler, body)
    assert len(lives) == 50
    assert len(set(lives)) <= 2  # threads are used again


def test_closing_unwinds_whoever_is_still_alive(threads: Threads) -> None:
    scheduler = Scheduler(Tape(0), SimClock(), threads)
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


def test_an_error_is_kept_with_its_task(threads: Threads) -> None:
    scheduler = Scheduler(Tape(0), SimClock(), threads)

    def body() -> None:
        raise ZeroDivisionError

    task = scheduler.spawn("t", body)
    scheduler.run(lambda: False)
    scheduler.close()
    assert isinstance(task.error, ZeroDivisionError)
