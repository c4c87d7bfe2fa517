"""Run the test suites one after another; print the time of each and one line for all of them.

    python tools/suites.py              every suite
    python tools/suites.py simulator    the named ones

A suite whose directory does not exist, or holds no tests, is left out and a line says so. The last
line is `N passed, N failed` over all suites; a suite that ends without a report counts as a failure.

A suite may take any time in all: a slow machine is no failure. It is ended when no test has been
collected or finished for `--stalled-s` seconds, more than any single test may take. On a machine so slow
that single tests run out of time, set HOLDFAST_TEST_SLOWNESS=4: their limits, and this one, are
multiplied by it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / ".reports"
PROGRESS = "HOLDFAST_SUITE_PROGRESS"

# Two files at a time, those with the most tests first; or in their order, where few tests take long.
SIDE_BY_SIDE = ["-n", "2", "--dist", "loadfile", "--max-worker-restart", "2"]
IN_ORDER = [*SIDE_BY_SIDE, "--no-loadscope-reorder"]

SUITES = {
    "unit+conformance": [
        "tests",
        "--ignore=tests/sim",
        "--ignore=tests/process",
        "--ignore=tests/spark",
        "-m",
        "not bench and not postgresql and not deep",
        *IN_ORDER,
    ],
    "simulator": ["tests/sim", "-m", "not deep and not postgresql", *SIDE_BY_SIDE],
    "chaos-short": ["tests/process", "-m", "not postgresql and not deep", *SIDE_BY_SIDE],
    # A Spark session of its own for each of the two. Its conftest orders the modules.
    "spark": ["tests/spark", "-m", "not postgresql and not deep", *IN_ORDER],
    "postgresql": [
        "tests",
        "--ignore=tests/process",
        "--ignore=tests/chaos",
        "--ignore=tests/spark",
        "-m",
        "postgresql and not deep",
        *IN_ORDER,
    ],
    # Each of these has a server and processes of its own.
    "postgresql-chaos": [
        "tests/process",
        "tests/chaos",
        "tests/spark",
        "-m",
        "postgresql and not deep",
        *SIDE_BY_SIDE,
    ],
}
# Longer than the longest limit of one test (tests/conftest.py ends a test that outlives its limit).
STALLED_S = 600.0
LOOK_S = 1.0
END_S = 20
SLOWEST = 15

PYTEST_OK = 0
PYTEST_NO_TESTS = 5


@dataclass
class Outcome:
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    tests: list[tuple[float, str]] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the test suites.")
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all unless named")
    parser.add_argument(
        "--stalled-s",
        type=float,
        default=STALLED_S * float(os.environ.get("HOLDFAST_TEST_SLOWNESS") or 1),
        metavar="N",
        help="end a suite when no test has finished for N seconds (%(default)g)",
    )
    told = parser.parse_args()
    names = told.suites or list(SUITES)
    if unknown := set(names) - SUITES.keys():
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")

    # Whoever ends this ends the suite that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    outcomes: dict[str, Outcome] = {}
    for name in names:
        if not (ROOT / SUITES[name][0]).is_dir():
            print(f"\n=== {name}: left out, there is no {SUITES[name][0]}/", flush=True)
            continue
        print(f"\n=== {name}", flush=True)
        outcome = run(name, SUITES[name], told.stalled_s)
        if outcome is None:
            print(f"=== {name}: left out, it holds no tests", flush=True)
        else:
            outcomes[name] = outcome
    report(outcomes)
    return 1 if not outcomes or any(o.failed for o in outcomes.values()) else 0


class Stall:
    """How long a suite has made no progress."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._progress = 0

    def seconds(self, progress: int, now_s: float) -> float:
        if progress != self._progress:
            self._progress, self._since_s = progress, now_s
        return now_s - self._since_s


def run(
    name: str,
    arguments: list[str],
    stalled_s: float,
    *,
    reports: Path = REPORTS,
    clock: Callable[[], float] = time.monotonic,
    look_s: float = LOOK_S,
) -> Outcome | None:
    reports.mkdir(exist_ok=True)
    xml, progress = reports / f"{name}.xml", reports / f"{name}.progress"
    xml.unlink(missing_ok=True)
    progress.write_bytes(b"")
    plugin = ["-p", "tools.suite_progress"]
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={xml}", *plugin, *arguments]
    environment = {**os.environ, PROGRESS: str(progress)}
    started = clock()
    # In a group of its own, so that all of it can be ended.
    suite = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0)
    stall = Stall(started)
    try:
        while (code := waited(suite, look_s)) is None:
            if stall.seconds(progress.stat().st_size, clock()) >= stalled_s:
                # Each process says where its threads are.
                end(suite, signal.SIGABRT)
                print(f"=== {name}: ended, no test has finished for {stalled_s:g} s", flush=True)
                return Outcome(clock() - started, failed=1)
    except BaseException:
        end(suite, signal.SIGINT)
        raise
    outcome = Outcome(clock() - started)
    if code == PYTEST_NO_TESTS:
        return None
    if xml.exists():
        count(xml, outcome)
    if code != PYTEST_OK and not outcome.failed:
        outcome.failed = 1  # it ended badly without saying which test did
    return outcome


def waited(suite: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return suite.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def end(suite: subprocess.Popen[bytes], how: signal.Signals) -> None:
    os.killpg(suite.pid, how)
    try:
        suite.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(suite.pid, signal.SIGKILL)
        suite.wait()


def count(xml: Path, outcome: Outcome) -> None:
    suites = ElementTree.parse(xml).getroot().iter("testsuite")
    for suite in suites:
        total, failures, errors, skipped = (
            int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")
        )
        outcome.failed += failures + errors
        outcome.skipped += skipped
        outcome.passed += total - failures - errors - skipped
        for case in suite.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            outcome.tests.append((float(case.get("time", "0")), name))


def report(outcomes: dict[str, Outcome]) -> None:
    total_s = sum(o.seconds for o in outcomes.values())
    slowest = sorted((t for o in outcomes.values() for t in o.tests), reverse=True)[:SLOWEST]
    print("\n=== slowest tests")
    for seconds, test in slowest:
        print(f"{seconds:8.2f} s  {test}")
    print("\n=== suites")
    for name, o in outcomes.items():
        share = 100 * o.seconds / total_s if total_s else 0
        counts = f"{o.passed} passed, {o.failed} failed, {o.skipped} skipped"
        print(f"{name:18} {o.seconds:8.1f} s {share:4.0f} %   {counts}")
    print(f"{'all':18} {total_s:8.1f} s\n")
    passed, failed = (sum(getattr(o, k) for o in outcomes.values()) for k in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
