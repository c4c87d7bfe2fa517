"""`make test` ends a suite that makes no progress, and no suite for the time that it takes in all."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import suite_progress, suites
from tools.suites import Outcome, Stall

# The clock of a fake suite is a file: each of its tests says how much time has passed.
FAKE = """
import pathlib, threading, pytest
CLOCK = pathlib.Path({clock!r})

@pytest.mark.parametrize("seconds", {seconds})
def test_takes_its_time(seconds):
    while True:
        CLOCK.write_text(str(float(CLOCK.read_text()) + seconds))
        if seconds > 1:
            return
        threading.Event().wait(0.001)
"""


def ran(tmp_path: Path, seconds: list[int], stalled_s: float) -> Outcome:
    """A suite whose tests take so many seconds, of the fake clock; the one of 1 s never ends."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    test = tmp_path / "test_slow.py"
    test.write_text(FAKE.format(clock=str(clock), seconds=seconds))
    outcome = suites.run(
        "fake",
        [str(test), "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"],
        stalled_s,
        reports=tmp_path / "reports",
        clock=reading(clock),
        look_s=0.01,
    )
    assert outcome is not None
    return outcome


def reading(clock: Path) -> Callable[[], float]:
    # A file that is being written is empty for a moment.
    last = 0.0

    def now_s() -> float:
        nonlocal last
        last = max(last, float(clock.read_text() or 0))
        return last

    return now_s


def test_a_suite_that_makes_progress_may_take_any_time_in_all(tmp_path: Path) -> None:
    outcome = ran(tmp_path, [200] * 10, stalled_s=600)
    assert (outcome.passed, outcome.failed) == (10, 0)
    assert outcome.seconds == 2000


@pytest.mark.timeout(100)
def test_a_suite_without_progress_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = ran(tmp_path, [200, 200, 1], stalled_s=600)
    assert (outcome.passed, outcome.failed) == (0, 1)
    told = capfd.readouterr()
    assert "=== fake: ended, no test has finished for 600 s" in told.out
    assert "test_takes_its_time" in told.err, "each process says where its threads are"


def test_a_stall_begins_anew_with_each_finished_test() -> None:
    stall = Stall(0.0)
    assert [stall.seconds(at // 500, float(at)) for at in range(0, 2000, 100)] == [
        0, 100, 200, 300, 400, 0, 100, 200, 300, 400, 0, 100, 200, 300, 400, 0, 100, 200, 300, 400,
    ]  # fmt: skip


def test_the_limit_of_a_stall_is_longer_than_that_of_any_test(
    request: pytest.FixtureRequest,
) -> None:
    from tests.conftest import HANGS_S

    assert float(request.config.getini("timeout")) + HANGS_S < suites.STALLED_S
    assert suites.PROGRESS == suite_progress.VARIABLE


def test_a_suite_is_timed_by_the_clock_of_the_machine() -> None:
    assert suites.run.__kwdefaults__["clock"] is time.monotonic
