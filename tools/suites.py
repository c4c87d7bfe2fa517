"""Run the test suites one after another; print the time of each and one line for all of them.

    python tools/suites.py              every suite
    python tools/suites.py simulator    the named ones

A suite whose directory does not exist, or holds no tests, is left out and a line says so. The last
line is `N passed, N failed` over all suites; a suite that ends without a report counts as a failure.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / ".reports"

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
    "spark": ["tests/spark", "-m", "not postgresql"],
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
SUITE_TIMEOUT_S = 900
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
    names = parser.parse_args().suites or list(SUITES)
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
        outcome = run(name)
        if outcome is None:
            print(f"=== {name}: left out, it holds no tests", flush=True)
        else:
            outcomes[name] = outcome
    report(outcomes)
    return 1 if not outcomes or any(o.failed for o in outcomes.values()) else 0


def run(name: str) -> Outcome | None:
    REPORTS.mkdir(exist_ok=True)
    xml = REPORTS / f"{name}.xml"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={xml}", *SUITES[name]]
    started = time.monotonic()
    # In a group of its own, so that all of it can be ended.
    suite = subprocess.Popen(command, cwd=ROOT, process_group=0)
    try:
        code = suite.wait(SUITE_TIMEOUT_S)
    except BaseException as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        # Of one that hangs, each process says where its threads are.
        end(suite, signal.SIGABRT if late else signal.SIGINT)
        if not late:
            raise
        print(f"=== {name}: stopped after {SUITE_TIMEOUT_S} s", flush=True)
        return Outcome(time.monotonic() - started, failed=1)
    outcome = Outcome(time.monotonic() - started)
    if code == PYTEST_NO_TESTS:
        return None
    if xml.exists():
        count(xml, outcome)
    if code != PYTEST_OK and not outcome.failed:
        outcome.failed = 1  # it ended badly without saying which test did
    return outcome


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
