"""The leader/followers coalescer: every call is served once, and no thread waits for an interrupted one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import Invalid, StoreForked
from holdfast.store.coalescer import CoalescedCall, Coalescer
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)

WAIT_S = 30.0
THREADS = 16
CALLS_PER_THREAD = 300


class NumberedCall(CoalescedCall):
    __slots__ = ("answer", "number")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.answer = -1


class LeaderFailed(Exception):
    pass


class LeaderStopped(BaseException):
    pass


def to_error(error: BaseException) -> LeaderFailed:
    return LeaderFailed(repr(error))


@pytest.fixture
def fast_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_coalescer_serves_every_call_once_and_one_batch_at_a_time(fast_switches: None) -> None:
    serving = threading.Lock()
    served: list[int] = []
    batches: list[int] = []

    def serve(batch: Sequence[NumberedCall]) -> None:
        assert serving.acquire(blocking=False), "two batches at once"
        batches.append(len(batch))
        os.sched_yield()
        for call in batch:
            served.append(call.number)
            call.answer = call.number * 2
        serving.release()

    coalescer: Coalescer[NumberedCall] = Coalescer(serve, to_error)
    start = threading.Barrier(THREADS)

    def run_calls(thread: int) -> None:
        start.wait()
        for n in range(CALLS_PER_THREAD):
            call = NumberedCall(thread * CALLS_PER_THREAD + n)
            coalescer.run(call)
            assert call.answer == call.number * 2

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run_calls, range(THREADS)))
    assert sorted(served) == list(range(THREADS * CALLS_PER_THREAD))
    assert max(batches) > 1
    assert not coalescer._has_leader
    assert not coalescer._waiting


def test_coalescer_survives_leaders_that_fail_at_random(fast_switches: None) -> None:
    """Every fifth batch fails, every seventh is interrupted: each call ends with its answer or an error."""
    numbers = iter(range(10**9))
    ends: list[str] = []

    def serve(batch: Sequence[NumberedCall]) -> None:
        number = next(numbers)
        os.sched_yield()
        if number % 5 == 4:
            raise Invalid(what="batch")
        if number % 7 == 6:
            raise LeaderStopped
        for call in batch:
            call.answer = call.number

    coalescer: Coalescer[NumberedCall] = Coalescer(serve, to_error)
    start = threading.Barrier(THREADS)

    def run_calls(thread: int) -> None:
        start.wait()
        for n in range(CALLS_PER_THREAD):
            call = NumberedCall(n)
            try:
                coalescer.run(call)
            except (LeaderFailed, Invalid, LeaderStopped) as error:
                ends.append(type(error).__name__)
            else:
                assert call.answer == n
                ends.append("served")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run_calls, range(THREADS)))
    assert len(ends) == THREADS * CALLS_PER_THREAD
    assert {"served", "Invalid", "LeaderStopped"} <= set(ends)
    assert not coalescer._has_leader


def test_call_made_during_a_batch_is_served_by_the_next_batch() -> None:
    entered, proceed = threading.Event(), threading.Event()
    batches: list[list[int]] = []

    def serve(batch: Sequence[NumberedCall]) -> None:
        batches.append([call.number for call in batch])
        entered.set()
        assert proceed.wait(WAIT_S)

    coalescer: Coalescer[NumberedCall] = Coalescer(serve, to_error)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(coalescer.run, NumberedCall(0))]
        assert entered.wait(WAIT_S)
        for number in (1, 2, 3):
            calls.append(pool.submit(coalescer.run, NumberedCall(number)))
            until(lambda waiting=number: len(coalescer._waiting) == waiting, "the call waits")
        proceed.set()
        for call in calls:
            call.result(WAIT_S)
    assert batches == [[0], [1, 2, 3]]


def test_coalescer_bounds_a_batch_with_its_take_function() -> None:
    entered, proceed = threading.Event(), threading.Event()
    batches: list[int] = []

    def serve(batch: Sequence[NumberedCall]) -> None:
        batches.append(len(batch))
        entered.set()
        assert proceed.wait(WAIT_S)

    def take_two(waiting: list[NumberedCall]) -> list[NumberedCall]:
        batch = waiting[:2]
        del waiting[:2]
        return batch

    coalescer = Coalescer(serve, to_error, take_two)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(coalescer.run, NumberedCall(0))]
        assert entered.wait(WAIT_S)
        calls += [pool.submit(coalescer.run, NumberedCall(n)) for n in range(5)]
        until(lambda: len(coalescer._waiting) == 5, "all calls wait")
        proceed.set()
        for call in calls:
            call.result(WAIT_S)
    assert batches == [1, 2, 2, 1]


def _succeed(batch: Sequence[NumberedCall]) -> None:
    for call in batch:
        call.answer = call.number


def _fail_second(batch: Sequence[NumberedCall]) -> None:
    _succeed(batch)
    batch[1].error = Invalid(what="second")


def _raise(batch: Sequence[NumberedCall]) -> None:
    raise Invalid(what="batch")


def _be_interrupted(batch: Sequence[NumberedCall]) -> None:
    raise LeaderStopped


def _finish_second_then_be_interrupted(batch: Sequence[NumberedCall]) -> None:
    batch[1].answer, batch[1].done = batch[1].number, True
    raise LeaderStopped


# By the end of the batch: the end of the leader's call, of the second and of the third call.
ENDS: dict[Callable[[Sequence[NumberedCall]], None], tuple[str, str, str]] = {
    _succeed: ("served", "served", "served"),
    _fail_second: ("served", "Invalid", "served"),
    _raise: ("Invalid", "LeaderFailed", "LeaderFailed"),
    _be_interrupted: ("LeaderStopped", "LeaderFailed", "LeaderFailed"),
    _finish_second_then_be_interrupted: ("LeaderStopped", "served", "LeaderFailed"),
}


@pytest.mark.parametrize("end", list(ENDS), ids=lambda end: end.__name__.strip("_"))
def test_end_of_a_batch_determines_the_end_of_each_call(
    end: Callable[[Sequence[NumberedCall]], None],
) -> None:
    entered, proceed = threading.Event(), threading.Event()

    def serve(batch: Sequence[NumberedCall]) -> None:
        if len(batch) == 1:
            entered.set()
            assert proceed.wait(WAIT_S)
        else:
            end(batch)

    coalescer: Coalescer[NumberedCall] = Coalescer(serve, to_error)

    def run(number: int) -> str:
        call = NumberedCall(number)
        try:
            coalescer.run(call)
        except (Exception, LeaderStopped) as error:
            return type(error).__name__
        return "served" if call.answer == number else "unanswered"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(coalescer.run, NumberedCall(0))
        assert entered.wait(WAIT_S)
        calls = []
        for number in (1, 2, 3):
            calls.append(pool.submit(run, number))
            until(lambda waiting=number: len(coalescer._waiting) == waiting, "the call waits")
        proceed.set()
        first.result(WAIT_S)
        assert tuple(call.result(WAIT_S) for call in calls) == ENDS[end]
    assert not coalescer._has_leader


@pytest.mark.parametrize("leads", [True, False])
def test_interrupted_coalesced_call_does_not_block_other_threads(leads: bool) -> None:
    """A signal handler interrupts the main thread as the leader, or as a follower that waits."""
    entered, proceed = threading.Event(), threading.Event()
    batches: list[int] = []

    def serve(batch: Sequence[CoalescedCall]) -> None:
        batches.append(len(batch))
        if len(batches) == 1:
            entered.set()
            proceed.wait(WAIT_S)

    coalescer: Coalescer[CoalescedCall] = Coalescer(serve, to_error)
    ended: list[str] = []

    def run_in_thread() -> None:
        try:
            coalescer.run(CoalescedCall())
            ended.append("served")
        except LeaderFailed:
            ended.append("failed")

    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt_main_thread() -> None:
        entered.wait(WAIT_S)
        if leads:
            thread.start()
        while not coalescer._waiting:
            pass
        # A signal that arrives just before the wait begins does not interrupt it, so repeat it.
        while not interrupted.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            interrupted.wait(0.01)

    thread = threading.Thread(target=run_in_thread)
    before = signal.signal(signal.SIGUSR1, interrupt)
    watcher = threading.Thread(target=interrupt_main_thread)
    try:
        watcher.start()
        if not leads:
            thread.start()
            entered.wait(WAIT_S)
        with pytest.raises(KeyboardInterrupt):
            coalescer.run(CoalescedCall())
        watcher.join(WAIT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    proceed.set()
    thread.join(WAIT_S)
    assert ended == ["served"]
    coalescer.run(CoalescedCall())
    assert not coalescer._has_leader


def test_forked_child_of_a_coalescer_gets_store_forked() -> None:
    entered, proceed = threading.Event(), threading.Event()

    def serve(batch: Sequence[CoalescedCall]) -> None:
        entered.set()
        assert proceed.wait(WAIT_S)

    coalescer: Coalescer[CoalescedCall] = Coalescer(serve, to_error)
    leader = threading.Thread(target=lambda: coalescer.run(CoalescedCall()))
    leader.start()
    assert entered.wait(WAIT_S)
    # The leader exists only in the parent: a follower in the child would wait forever.
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(WAIT_S))
        try:
            coalescer.run(CoalescedCall())
        except StoreForked:
            os._exit(7)
        os._exit(1)
    proceed.set()
    leader.join(WAIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
