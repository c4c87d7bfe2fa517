"""Run the tests in one pytest session on four worker processes; print the time of each part and one line for all.

    python tools/suites.py                   every test of `make test`
    python tools/suites.py simulator spark   the tests of the named parts
    python tools/suites.py --record          also store the seconds of each file (tests/durations.json)
    python tools/suites.py --deep            the deep tests of `make chaos`, on two worker processes

A free worker takes the next file, and the files with the longest stored time come first (tools/file_order.py).
A file stays in one worker, so its module fixtures are set up once.

A failed test runs a second time, alone, when at most `RETRIED_MAX` tests failed and every collected test was reported:
a machine that is too busy for a limit of one test does not fail the run. A test that passes then is listed as
unstable, in the output and in .reports/unstable.txt. A test that fails twice or crashed its process fails the run.

The last line is `N passed, N failed`; a run that ends without a report counts as a failure. The run may take any
time in all: a slow machine is no failure. It is ended when no test has been collected or finished for `--stalled-s`
seconds, more than any single test may take. On a machine where single tests exceed their limits, set
HOLDFAST_TEST_SLOWNESS=4: their limits, and this one, are multiplied by it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / ".reports"
DURATIONS = ROOT / "tests" / "durations.json"
PROGRESS = "HOLDFAST_SUITE_PROGRESS"
FAILED = "HOLDFAST_SUITE_FAILED"
# The first word of a line in the file of failed tests (tools/suite_progress.py).
RETRIED = "retried "

SELECTED = ["-m", "not bench and not deep"]
# The deep tests of the simulator are part of `make sim`.
DEEP = ["-m", "deep", "--ignore=tests/sim"]
# Many tests wait, for a lease or for a process: four workers keep two cores busy. Deep tests kill processes for minutes
# and measure limits of time: two workers.
WORKERS, DEEP_WORKERS = 4, 2
# A worker that crashes is replaced, and its test fails.
DISTRIBUTED = ["--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "2"]
PLUGINS = ["-p", "tools.suite_progress", "-p", "tools.file_order", "-p", "tools.shared_imports"]

# The parts of the report: directories below tests/. The part "unit" has all other tests.
PARTS = {
    "simulator": ("sim",),
    "processes": ("process", "chaos"),
    "spark": ("spark",),
}
UNIT = "unit"
RETRIED_MAX = 5

# Longer than the longest limit of one test (tests/conftest.py ends a test that outlives its limit).
STALLED_S, DEEP_STALLED_S = 600.0, 7500.0
LOOK_S = 1.0
END_S = 20
SLOWEST = 15

PYTEST_OK = 0
PYTEST_TESTS_FAILED = 1
PYTEST_NO_TESTS = 5


@dataclass(frozen=True)
class TestTime:
    seconds: float
    module: str
    name: str

    @property
    def part(self) -> str:
        directory = self.module.split(".")[1:2]
        return next(
            (part for part, owned in PARTS.items() if directory and directory[0] in owned), UNIT
        )

    @property
    def file(self) -> str:
        return self.module.replace(".", "/") + ".py"


@dataclass
class Outcome:
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    tests: list[TestTime] = field(default_factory=list)
    exit_code: int = PYTEST_OK
    failed_ids: list[str] = field(default_factory=list)
    # The failed tests that may run again: without the tests of a crashed process.
    retried_ids: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests.")
    names = (UNIT, *PARTS)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(names)}; all unless named")
    parser.add_argument("--record", action="store_true", help="store the seconds of each test file")
    parser.add_argument("--deep", action="store_true", help="run the deep tests of `make chaos`")
    parser.add_argument(
        "--stalled-s",
        type=float,
        metavar="N",
        help=f"end the run when no test has finished for N seconds ({STALLED_S:g}, deep {DEEP_STALLED_S:g})",
    )
    args = parser.parse_args()
    if unknown := set(args.parts) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    if args.deep and args.record:
        parser.error("--record stores the seconds of `make test`, not of --deep")
    slowness = float(os.environ.get("HOLDFAST_TEST_SLOWNESS") or 1)
    stalled_s = args.stalled_s or slowness * (DEEP_STALLED_S if args.deep else STALLED_S)

    # The end of this process ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    name = "deep" if args.deep else "tests"
    outcome = run(name, pytest_arguments(args.parts, is_deep=args.deep), stalled_s)
    if outcome is None:
        print("no tests were found", flush=True)
        return 1
    unstable = retry_failed(outcome, stalled_s)
    report(outcome, unstable)
    if args.record:
        record_durations(outcome.tests)
    return 1 if outcome.failed else 0


def pytest_arguments(parts: Iterable[str], *, is_deep: bool = False) -> list[str]:
    """Return the arguments that select tests and distribute them to worker processes."""
    selected, workers = (DEEP, DEEP_WORKERS) if is_deep else (SELECTED, WORKERS)
    return [*selected_paths(parts), *selected, "-n", str(workers), *DISTRIBUTED]


def selected_paths(parts: Iterable[str]) -> list[str]:
    """Return the pytest arguments that select the named parts."""
    selected = set(parts)
    if not selected:
        return ["tests"]
    if UNIT in selected:
        excluded = [d for part, owned in PARTS.items() if part not in selected for d in owned]
        return ["tests", *(f"--ignore=tests/{directory}" for directory in excluded)]
    return [f"tests/{d}" for part, owned in PARTS.items() if part in selected for d in owned]


class Stall:
    """The time since the last progress of a run."""

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
    root: Path = ROOT,
    reports: Path = REPORTS,
    clock: Callable[[], float] = time.monotonic,
    look_s: float = LOOK_S,
) -> Outcome | None:
    """Run pytest and return its outcome, or None if it found no tests."""
    reports.mkdir(exist_ok=True)
    xml, progress = reports / f"{name}.xml", reports / f"{name}.progress"
    failed = reports / f"{name}.failed"
    xml.unlink(missing_ok=True)
    progress.write_bytes(b"")
    failed.write_text("")
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={xml}", *PLUGINS, *arguments]
    environment = {**os.environ, PROGRESS: str(progress), FAILED: str(failed)}
    started = clock()
    # In its own process group, so that the whole run can be ended.
    process = subprocess.Popen(command, cwd=root, env=environment, process_group=0)
    stall = Stall(started)
    try:
        while (code := waited(process, look_s)) is None:
            if stall.seconds(progress.stat().st_size, clock()) >= stalled_s:
                # Each process dumps the stacks of its threads.
                end(process, signal.SIGABRT)
                print(f"=== {name}: ended, no test has finished for {stalled_s:g} s", flush=True)
                return Outcome(clock() - started, failed=1, exit_code=-signal.SIGABRT)
    except BaseException:
        end(process, signal.SIGINT)
        raise
    outcome = Outcome(clock() - started, exit_code=code)
    if code == PYTEST_NO_TESTS:
        return None
    if xml.exists():
        count(xml, outcome)
    lines = sorted(set(failed.read_text().splitlines()))
    outcome.failed_ids = [line.partition(" ")[2] for line in lines]
    outcome.retried_ids = [line.partition(" ")[2] for line in lines if line.startswith(RETRIED)]
    if code != PYTEST_OK and not outcome.failed:
        outcome.failed = 1  # pytest failed without the report of a failed test
    return outcome


def retry_failed(
    outcome: Outcome, stalled_s: float, *, root: Path = ROOT, reports: Path = REPORTS
) -> list[str]:
    """Run the failed tests alone, and return the ones that pass now. They no longer count as failed."""
    ids = outcome.retried_ids
    unstable: list[str] = []
    # Another exit code: pytest was interrupted, or gave up after crashes, and some tests did not run.
    is_complete = outcome.exit_code == PYTEST_TESTS_FAILED and outcome.failed_ids == ids
    if ids and is_complete and len(ids) == outcome.failed <= RETRIED_MAX:
        print(f"\n=== second run of {len(ids)} failed tests, alone", flush=True)
        second = run("second-run", ids, stalled_s, root=root, reports=reports)
        if second is not None and second.exit_code in (PYTEST_OK, PYTEST_TESTS_FAILED):
            # A test counts as passed only with a report that it passed.
            passed = len(second.tests) - second.failed - second.skipped
            unstable = [test for test in ids if test not in second.failed_ids]
            if passed != len(unstable):
                unstable = []
    outcome.failed -= len(unstable)
    outcome.passed += len(unstable)
    (reports / "unstable.txt").write_text("".join(f"{test}\n" for test in unstable))
    return unstable


def waited(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    os.killpg(process.pid, how)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def count(xml: Path, outcome: Outcome) -> None:
    """Add the counts and the tests of a JUnit file."""
    for suite in ElementTree.parse(xml).getroot().iter("testsuite"):
        total, failures, errors, skipped = (
            int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")
        )
        outcome.failed += failures + errors
        outcome.skipped += skipped
        outcome.passed += total - failures - errors - skipped
        for case in suite.iter("testcase"):
            seconds = float(case.get("time", "0"))
            outcome.tests.append(TestTime(seconds, case.get("classname", ""), case.get("name", "")))


def report(outcome: Outcome, unstable: list[str]) -> None:
    slowest = sorted(outcome.tests, key=lambda test: test.seconds, reverse=True)[:SLOWEST]
    print("\n=== slowest tests")
    for test in slowest:
        print(f"{test.seconds:8.2f} s  {test.module}::{test.name}")
    print("\n=== parts: seconds of all workers together")
    total_s = sum(test.seconds for test in outcome.tests) or 1.0
    for part in (UNIT, *PARTS):
        tests = [test for test in outcome.tests if test.part == part]
        seconds = sum(test.seconds for test in tests)
        print(f"{part:12} {seconds:8.1f} s {100 * seconds / total_s:4.0f} %   {len(tests)} tests")
    print(f"{'wall time':12} {outcome.seconds:8.1f} s\n")
    for test_id in unstable:
        print(f"unstable, failed beside other tests and passed alone: {test_id}")
    print(f"{outcome.passed} passed, {outcome.failed} failed", flush=True)


def record_durations(tests: list[TestTime], path: Path = DURATIONS) -> None:
    """Store the seconds of each file, for the order of the next run."""
    seconds: dict[str, float] = defaultdict(float)
    for test in tests:
        seconds[test.file] += test.seconds
    longest_first = sorted(seconds.items(), key=lambda item: (-round(item[1]), item[0]))
    text = json.dumps({file: round(value) for file, value in longest_first}, indent=0)
    path.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
