"""Children are spawned, pooled while idle, and killed only by pid and start time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.child_process import (
    ChildPool,
    DetachedChildren,
    SpawnedChild,
    is_stopped,
    kill_verified,
    process_state,
)
from tests.process.watch import until

WAITS = "import sys; sys.stdin.read()"


class WaitingChild(SpawnedChild):
    """A child that exits when its standard input is closed."""

    def __init__(self, code: str = WAITS) -> None:
        super().__init__(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def discard(self) -> None:
        self.end()


@pytest.fixture
def spawn() -> Iterator[Callable[..., WaitingChild]]:
    started: list[WaitingChild] = []

    def start(code: str = WAITS) -> WaitingChild:
        started.append(WaitingChild(code))
        return started[-1]

    yield start
    for child in started:
        child.end()


def test_end_waits_for_the_exit_before_it_kills(spawn: Callable[..., WaitingChild]) -> None:
    graceful = spawn()
    graceful.stdin.close()
    assert graceful.end(30) == 0
    assert graceful.stdout.closed
    assert spawn().end() == -signal.SIGKILL


def test_pool_reuses_an_idle_child(spawn: Callable[..., WaitingChild]) -> None:
    pool = ChildPool(spawn)
    first = pool.take()
    second = pool.take()
    assert first.pid != second.pid
    pool.put(first)
    assert pool.take() is first


@pytest.mark.parametrize("newest_first", [False, True])
def test_pool_takes_children_in_the_configured_order(
    spawn: Callable[..., WaitingChild], newest_first: bool
) -> None:
    pool = ChildPool(spawn, newest_first=newest_first)
    children = [pool.take() for _ in range(3)]
    for child in children:
        pool.put(child)
    order = list(reversed(children)) if newest_first else children
    assert [pool.take() for _ in range(3)] == order


def test_pool_prestarts_up_to_a_count(spawn: Callable[..., WaitingChild]) -> None:
    started: list[WaitingChild] = []

    def start() -> WaitingChild:
        started.append(spawn())
        return started[-1]

    pool = ChildPool(start)
    pool.prestart(2)
    pool.prestart(2)
    assert len(started) == 2
    assert pool.take() is started[0]
    pool.prestart()
    assert len(started) == 2


def test_pool_discards_a_dead_idle_child(spawn: Callable[..., WaitingChild]) -> None:
    pool = ChildPool(spawn)
    dead = pool.take()
    pool.put(dead)
    dead.kill()
    dead.process.wait()
    taken = pool.take()
    assert taken is not dead
    assert taken.is_alive()
    assert dead.stdout.closed


def test_pool_discards_a_child_beyond_its_idle_bound(spawn: Callable[..., WaitingChild]) -> None:
    pool = ChildPool(spawn, idle_max=1)
    first, second = pool.take(), pool.take()
    pool.put(first)
    pool.put(second)
    assert (first.is_alive(), second.is_alive()) == (True, False)
    assert pool.take() is first


def test_pool_discards_a_child_that_is_returned_dead(spawn: Callable[..., WaitingChild]) -> None:
    pool = ChildPool(spawn)
    child = pool.take()
    child.kill()
    child.process.wait()
    pool.put(child)
    assert child.stdout.closed
    assert pool.take() is not child


def test_closed_pool_kills_busy_children_and_discards_returned_ones(
    spawn: Callable[..., WaitingChild],
) -> None:
    pool = ChildPool(spawn)
    idle, busy = pool.take(), pool.take()
    pool.put(idle)
    pool.close()
    assert idle.process.returncode == -signal.SIGKILL
    assert busy.process.wait(30) == -signal.SIGKILL
    assert not busy.stdout.closed
    pool.put(busy)
    assert busy.stdout.closed


def test_discard_idle_keeps_busy_children_and_the_pool(spawn: Callable[..., WaitingChild]) -> None:
    pool = ChildPool(spawn)
    idle, busy = pool.take(), pool.take()
    pool.put(idle)
    pool.discard_idle()
    assert not idle.is_alive()
    assert busy.is_alive()
    pool.put(busy)
    assert pool.take() is busy


def test_forked_process_forgets_the_idle_children_of_its_parent(
    spawn: Callable[..., WaitingChild],
) -> None:
    pool = ChildPool(spawn)
    pool.prestart()
    # A thread of the parent holds the lock at the moment of the fork.
    with pool._lock:
        pid = os.fork()
        if not pid:
            free = pool._lock.acquire(blocking=False)
            os._exit(0 if free and not pool._idle else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.take().is_alive()


def test_detached_child_is_reaped_after_its_exit(spawn: Callable[..., WaitingChild]) -> None:
    detached = DetachedChildren()
    child = spawn()
    detached.add(child)
    child.stdin.close()
    until(lambda: process_state(child.pid)[0] == "Z", "the exit of the child")
    detached.reap()
    assert process_state(child.pid)[0] == ""


def test_status_line_is_the_first_line_of_a_child(spawn: Callable[..., WaitingChild]) -> None:
    assert spawn("print('ready', flush=True); input()").read_status_line(5) == "ready"
    assert spawn("pass").read_status_line(5) == ""


def test_child_that_is_stopped_before_its_status_line_is_killed(
    spawn: Callable[..., WaitingChild],
) -> None:
    child = spawn()
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: is_stopped(child.pid), "the stop of the child")
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.append(child.read_status_line(0.1)))
    thread.start()
    thread.join(30)
    assert lines == [""]
    assert child.process.wait() == -signal.SIGKILL


def test_kill_verified_spares_a_process_with_another_start_time(
    spawn: Callable[..., WaitingChild],
) -> None:
    child = spawn()
    state, start_time = process_state(child.pid)
    assert state
    kill_verified(child.pid, str(int(start_time) + 1))
    kill_verified(child.pid, "")
    assert child.is_alive()
    kill_verified(child.pid, start_time)
    assert child.process.wait(30) == -signal.SIGKILL
    kill_verified(child.pid, start_time)
