"""`make test` stops a suite without progress; the total time of a suite is not limited."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import suite_progress, suites
from tools.suites import Outcome, Stall

# The clock of a fake suite is a file: each of its tests adds the time that it takes.
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


def run_fake_suite(tmp_path: Path, seconds: list[int], stalled_s: float) -> Outcome:
    """Run a suite whose tests take the given seconds of the fake clock; a test of 1 s never ends."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    test = tmp_path / "test_slow.py"
    test.write_text(FAKE.format(clock=str(clock), seconds=seconds))
    outcome = suites.run(
        "fake",
        [str(test), "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"],
        stalled_s,
        reports=tmp_path / "reports",
        clock=file_clock(clock),
        look_s=0.01,
    )
    assert outcome is not None
    return outcome


def file_clock(clock: Path) -> Callable[[], float]:
    # The file is empty for a moment during a write.
    last = 0.0

    def now_s() -> float:
        nonlocal last
        last = max(last, float(clock.read_text() or 0))
        return last

    return now_s


def test_suite_with_progress_has_no_total_time_limit(tmp_path: Path) -> None:
    outcome = run_fake_suite(tmp_path, [200] * 10, stalled_s=600)
    assert (outcome.passed, outcome.failed) == (10, 0)
    assert outcome.seconds == 2000


@pytest.mark.timeout(100)
def test_suite_without_progress_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run_fake_suite(tmp_path, [200, 200, 1], stalled_s=600)
    assert (outcome.passed, outcome.failed) == (0, 1)
    output = capfd.readouterr()
    assert "=== fake: ended, no test has finished for 600 s" in output.out
    assert "test_takes_its_time" in output.err, "each process says where its threads are"


def test_stall_restarts_with_each_finished_test() -> None:
    stall = Stall(0.0)
    assert [stall.seconds(at // 500, float(at)) for at in range(0, 2000, 100)] == [
        0, 100, 200, 300, 400, 0, 100, 200, 300, 400, 0, 100, 200, 300, 400, 0, 100, 200, 300, 400,
    ]  # fmt: skip


def test_stall_limit_is_longer_than_the_timeout_of_a_test(
    request: pytest.FixtureRequest,
) -> None:
    from tests.conftest import HANG_GRACE_S

    assert float(request.config.getini("timeout")) + HANG_GRACE_S < suites.STALLED_S
    assert suites.PROGRESS == suite_progress.VARIABLE


def test_suite_is_timed_by_the_monotonic_clock() -> None:
    assert suites.run.__kwdefaults__["clock"] is time.monotonic
