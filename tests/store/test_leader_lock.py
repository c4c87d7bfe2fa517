"""LeaderLock: interrupts at every bytecode, takeover of an orphaned lock, and the lifetime of the owner's frame."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from holdfast.store.lmdb import leader_lock
from holdfast.store.lmdb.leader_lock import LeaderLock

MODULES = ("holdfast.store.lmdb.leader_lock",)
# More bytecodes than one acquisition and its release have.
BYTECODES_MAX = 400


class SignalRaised(BaseException):
    """Raised between two bytecodes, as a signal handler does."""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_lock, "RECHECK_S", 0.005)
    monkeypatch.setattr(leader_lock, "ORPHANED_AFTER_S", 0.002)


def acquire_in_one_function(lock: LeaderLock) -> None:
    if lock.try_acquire():
        try:
            len("the work of the leader")
        finally:
            lock.release()


def acquire_with_statement(lock: LeaderLock) -> None:
    with lock:
        len("the work of the leader")


def take_over(lock: LeaderLock) -> None:
    assert lock.try_acquire(check_orphaned=True)
    lock.release()


def frame_of_an_ended_function() -> FrameType:
    return sys._getframe()


def interrupt_after(bytecodes: int, act: Callable[[LeaderLock], None], lock: LeaderLock) -> bool:
    """Raise SignalRaised after this number of bytecodes of `act`. Return whether `act` had not ended by then."""
    left = bytecodes

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise SignalRaised
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        act(lock)
    except SignalRaised:
        return True
    finally:
        sys.settrace(former)
    return False


def interrupt_after_calls(calls: int, act: Callable[[LeaderLock], None], lock: LeaderLock) -> bool:
    """Like `interrupt_after`, where the interpreter runs signal handlers: at the begin of a Python function and
    after the call of a C function."""
    left = calls

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and arg is not sys.setprofile:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise SignalRaised

    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        act(lock)
    except SignalRaised:
        return True
    finally:
        sys.setprofile(former)
    return False


@pytest.mark.parametrize(
    "act", [acquire_in_one_function, acquire_with_statement], ids=lambda act: act.__name__
)
def test_an_interrupt_at_any_bytecode_leaves_a_lock_that_another_thread_gets(
    act: Callable[[LeaderLock], None],
) -> None:
    interrupted = 0
    for bytecodes in range(BYTECODES_MAX):
        lock = LeaderLock()
        if not interrupt_after(bytecodes, act, lock):
            break
        interrupted += 1
        other = threading.Thread(target=acquire_with_statement, args=(lock,), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive(), f"interrupted after {bytecodes} bytecodes"
        assert lock.try_acquire()
    assert 20 < interrupted < BYTECODES_MAX


def test_an_interrupt_after_any_call_of_a_takeover_leaves_a_lock_that_another_thread_gets() -> None:
    interrupted = 0
    for calls in range(BYTECODES_MAX):
        lock = LeaderLock()
        lock._lock.acquire()
        lock._owner = frame_of_an_ended_function()
        lock._suspected = (0, 1)
        if not interrupt_after_calls(calls, take_over, lock):
            break
        interrupted += 1
        other = threading.Thread(target=acquire_with_statement, args=(lock,), daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive(), f"interrupted after {calls} calls"
        assert lock.try_acquire()
    assert 5 < interrupted < BYTECODES_MAX


def test_a_lock_whose_owner_function_runs_is_not_taken_over() -> None:
    lock = LeaderLock()
    assert lock.try_acquire()
    for _ in range(20):
        assert not lock.try_acquire(check_orphaned=True)
        time.sleep(0.002)
    lock.release()


def test_a_lock_owned_by_a_suspended_generator_is_not_taken_over() -> None:
    lock = LeaderLock()

    @contextmanager
    def hold() -> Iterator[None]:
        with lock:
            yield

    with hold():
        for _ in range(20):
            assert not lock.try_acquire(check_orphaned=True)
            time.sleep(0.002)
    assert lock.try_acquire()


def test_owner_that_acquires_after_a_check_is_not_orphaned() -> None:
    """The first check finds the lock free. The second one finds an owner that has not recorded its frame yet."""
    lock = LeaderLock()
    assert not lock._is_orphaned()
    time.sleep(0.01)
    lock._lock.acquire()
    assert not lock._is_orphaned()


def test_checks_of_two_acquisitions_are_no_suspicion() -> None:
    lock = LeaderLock()
    lock._lock.acquire()
    assert not lock._is_orphaned()
    lock._lock.release()
    acquire_in_one_function(lock)
    time.sleep(0.01)
    lock._lock.acquire()
    assert not lock._is_orphaned()


class Local:
    """An object that only the frame of a function refers to."""


def test_release_drops_the_frame_of_the_owner() -> None:
    lock = LeaderLock()

    def work() -> weakref.ref[Local]:
        local = Local()
        with lock:
            pass
        assert lock.try_acquire()
        lock.release()
        return weakref.ref(local)

    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()
    assert lock._owner is None


def test_takeover_drops_the_local_variables_of_the_interrupted_owner() -> None:
    lock = LeaderLock()

    def leave_without_a_release() -> weakref.ref[Local]:
        local = Local()
        assert lock.try_acquire()
        return weakref.ref(local)

    gc.disable()
    try:
        local = leave_without_a_release()
        with lock:
            assert local() is None
    finally:
        gc.enable()
