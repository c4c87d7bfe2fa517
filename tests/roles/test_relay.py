"""Two threads in one loop: whoever leads may do something itself, and the other goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.roles.relay import Own, Relay

WITHIN_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Loop:
    """It passes the lead on as often as it can, and never has two leaders."""

    def __init__(self, rounds: int, own: Own) -> None:
        self.relay = Relay(self.lead, "relay")
        self.rounds = rounds
        self.own = own
        self.led_by: list[int] = []
        self.passed = 0
        self._leading = threading.Lock()

    def lead(self) -> Own | None:
        assert self._leading.acquire(blocking=False), "two lead at once"
        try:
            while self.rounds:
                self.rounds -= 1
                self.led_by.append(threading.get_ident())
                if self.relay.ready:
                    self.passed += 1
                    return self.own
            return None
        finally:
            self._leading.release()


def test_the_lead_goes_to_and_fro_and_ends_once() -> None:
    done: list[int] = []
    loop = Loop(0, lambda: done.append(threading.get_ident()))
    thread = threading.Thread(target=loop.relay.run, daemon=True)
    loop.rounds = 2_000
    thread.start()
    assert loop.relay.over.wait(WITHIN_S)
    thread.join(WITHIN_S)
    assert not thread.is_alive()
    assert len(loop.led_by) == 2_000
    # The other thread may still be at what it does itself.
    until(lambda: loop.passed == len(done))
    assert len(set(loop.led_by)) <= 2


def test_the_loop_goes_on_while_its_former_leader_is_at_something_long() -> None:
    release = threading.Event()
    loop = Loop(0, lambda: (release.wait(WITHIN_S), None)[1])
    # One that waits until the other is there, so that it is passed on for sure.
    lead = loop.lead

    def patient() -> Own | None:
        if not loop.passed:
            until(lambda: loop.relay.ready)
        return lead()

    loop.relay._lead = patient
    loop.rounds = 50
    thread = threading.Thread(target=loop.relay.run, daemon=True)
    thread.start()
    assert loop.relay.over.wait(WITHIN_S)
    assert (loop.rounds, loop.passed) == (0, 1)
    # It returns once what it does itself has ended.
    assert thread.is_alive()
    release.set()
    thread.join(WITHIN_S)
    assert not thread.is_alive()
