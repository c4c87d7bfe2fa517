"""The stop signal of `holdfast up`: a signal handler may set it at any point of any thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.cli.stop_signal import StopSignal

WITHIN_S = 30.0


@pytest.fixture
def stop_signal() -> Iterator[StopSignal]:
    stop_signal = StopSignal()
    before = signal.signal(signal.SIGUSR1, lambda *_: stop_signal.set())
    yield stop_signal
    signal.signal(signal.SIGUSR1, before)


def test_wait_times_out_before_set(stop_signal: StopSignal) -> None:
    assert not stop_signal.wait(0.01)
    assert not stop_signal.is_set()


def test_set_wakes_every_waiting_thread(stop_signal: StopSignal) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(stop_signal.wait(WITHIN_S)), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    for thread in threads:
        thread.join(WITHIN_S)
    assert results == [True] * 3
    assert stop_signal.wait(0)
    assert stop_signal.is_set()


def test_signal_during_wait_ends_the_wait(stop_signal: StopSignal) -> None:
    """The signal arrives at a different point in each round.

    `StopSignal` takes no lock: a handler that sets a `threading.Event` can deadlock.
    """
    for _ in range(200):
        fresh_signal = StopSignal()
        signal.signal(signal.SIGUSR1, lambda *_, fresh_signal=fresh_signal: fresh_signal.set())  # type: ignore[misc]
        timer = threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        while not fresh_signal.wait(0.0005):
            pass
        timer.join(WITHIN_S)
        os.close(fresh_signal._read_fd)
        os.close(fresh_signal._write_fd)


def test_repeated_set_does_not_block_on_a_full_pipe(stop_signal: StopSignal) -> None:
    for _ in range(100_000):
        stop_signal.set()  # fills the pipe
    assert stop_signal.wait(0)
