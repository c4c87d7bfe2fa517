"""What a signal says is heard, whatever the thread was at that it came upon."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.cli.stopping import Told

WITHIN_S = 30.0


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    before = signal.signal(signal.SIGUSR1, lambda *_: told.set())
    yield told
    signal.signal(signal.SIGUSR1, before)


def test_nothing_is_heard_before_it_is_said(told: Told) -> None:
    assert not told.wait(0.01)
    assert not told.is_set()


def test_whoever_waits_hears_it(told: Told) -> None:
    heard: list[bool] = []
    threads = [
        threading.Thread(target=lambda: heard.append(told.wait(WITHIN_S)), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    for thread in threads:
        thread.join(WITHIN_S)
    assert heard == [True] * 3
    assert told.wait(0)
    assert told.is_set()


def test_a_signal_in_the_middle_of_a_wait_ends_it(told: Told) -> None:
    """Over and over, at whatever place it comes: with an Event it would stand for ever now and then."""
    for _ in range(200):
        again = Told()
        signal.signal(signal.SIGUSR1, lambda *_, again=again: again.set())  # type: ignore[misc]
        timer = threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        while not again.wait(0.0005):
            pass
        timer.join(WITHIN_S)
        os.close(again._heard)
        os.close(again._say)


def test_a_handler_that_runs_while_it_is_being_said_is_no_harm(told: Told) -> None:
    for _ in range(100_000):
        told.set()  # the pipe is full long before
    assert told.wait(0)
