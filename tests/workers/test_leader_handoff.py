"""Leader handoff: the leading thread runs a task itself, and the standby thread continues the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.workers.tasks.leader_handoff import LeaderHandoff, LocalRun

TIMEOUT_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class HandoffLoop:
    """A loop that hands off the lead at every chance and checks that there is one leader."""

    def __init__(self, rounds: int, local_run: LocalRun) -> None:
        self.handoff = LeaderHandoff(self.run_as_leader, "relay")
        self.rounds = rounds
        self.local_run = local_run
        self.led_by: list[int] = []
        self.handoffs = 0
        self._leader_lock = threading.Lock()

    def run_as_leader(self) -> LocalRun | None:
        assert self._leader_lock.acquire(blocking=False), "two lead at once"
        try:
            while self.rounds:
                self.rounds -= 1
                self.led_by.append(threading.get_ident())
                if self.handoff.has_standby:
                    self.handoffs += 1
                    return self.local_run
            return None
        finally:
            self._leader_lock.release()


def test_handoff_alternates_two_threads_and_ends_once() -> None:
    done: list[int] = []
    loop = HandoffLoop(0, lambda: done.append(threading.get_ident()))
    thread = threading.Thread(target=loop.handoff.run, daemon=True)
    loop.rounds = 2_000
    thread.start()
    assert loop.handoff.finished.wait(TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert len(loop.led_by) == 2_000
    # The other thread may still execute its local run.
    until(lambda: loop.handoffs == len(done))
    assert len(set(loop.led_by)) <= 2


def test_handoff_loop_continues_while_the_former_leader_runs_a_long_task() -> None:
    release = threading.Event()
    loop = HandoffLoop(0, lambda: (release.wait(TIMEOUT_S), None)[1])
    # Waits for the standby thread, so that a handoff is certain.
    run_as_leader = loop.run_as_leader

    def wait_for_standby() -> LocalRun | None:
        if not loop.handoffs:
            until(lambda: loop.handoff.has_standby)
        return run_as_leader()

    loop.handoff._loop = wait_for_standby
    loop.rounds = 50
    thread = threading.Thread(target=loop.handoff.run, daemon=True)
    thread.start()
    assert loop.handoff.finished.wait(TIMEOUT_S)
    assert (loop.rounds, loop.handoffs) == (0, 1)
    # The former leader returns after its local run has ended.
    assert thread.is_alive()
    release.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
