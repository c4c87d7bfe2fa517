"""Part 3 of the demo: a Spark job that pays per row and whose driver is killed.

The driver and the model are separate processes. The driver is killed with SIGKILL while it works,
and run again. Two documents kill every process that reads them. At the end the bill has a line for
each labelled document, and no more repeated calls than the stage guarantees.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from examples.demo import labels
from examples.demo.child_process import environment
from holdfast.clock import SYSTEM, S
from holdfast.errors import Timeout

NAME = labels.NAME
KILL_AT = 300
TASKS = 2
PHASE_S_MAX = 180.0
POLL_S = 0.05

PrintStep = Callable[[str], None]
CheckClaim = Callable[[str, object, object], None]
ShowProgress = Callable[[str], None]


def ledger_path(path: str) -> str:
    return str(Path(path) / "stage" / "ledger")


def run_part(
    path: Path, print_step: PrintStep, check_claim: CheckClaim, progress: ShowProgress
) -> None:
    if importlib.util.find_spec("pyspark") is None:
        print_step("Part 3 is skipped: it needs Spark. pip install 'holdfast[spark]'")
        return
    home = path / "stage"
    home.mkdir()
    with _process("model", home):
        _wait(lambda: (home / "model.url").exists(), "the model")
        print_step(
            f"Part 3, on Spark: a model labels {labels.DOCUMENTS} documents and charges "
            f"${labels.COST_PER_CALL} per call. Some are empty, and {len(labels.DEADLY)} kill the "
            "process that reads them."
        )
        bill = home / "bill.txt"
        with _process("drive", home) as driver:
            _wait(lambda: _count_paid(bill, progress) >= KILL_AT, "paid calls", driver)
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
        before = len(_lines(bill))
        print_step(f"SIGKILL the driver, with {before} calls paid. The same job then runs again.")
        with _process("drive", home) as driver:
            _wait(
                lambda: bool(_count_paid(bill, progress)) and driver.poll() is not None, "the job"
            )
            status = driver.wait()
        progress("")
        check_claim("exit status of the second run of the job", status, 0)
        if status == 0:
            _check_labels(home, print_step, check_claim)


def _check_labels(home: Path, print_step: PrintStep, check_claim: CheckClaim) -> None:
    found = json.loads((home / "found.json").read_text())
    paid = _lines(home / "bill.txt")
    good = [
        [f"doc-{n:04}", labels.KINDS[n % 3]]
        for n in range(labels.DOCUMENTS)
        if labels.text_of(n) and n not in labels.DEADLY
    ]
    check_claim(
        "labels, one per document with a text, in order",
        len(good),
        found["labels"] == good,
    )
    check_claim("failed documents: those that kill their reader", found["failed"],
          [f"doc-{n:04}" for n in sorted(labels.DEADLY)])  # fmt: skip
    check_claim("documents skipped", found["counts"]["TERMINAL_SKIP"],
          -(-labels.DOCUMENTS // labels.EMPTY_EVERY))  # fmt: skip
    check_claim("documents paid", len(set(paid)), len(good))
    repeats = len(paid) - len(set(paid))
    # After the deaths of the driver and of the children: rows begun and not reported.
    window = labels.FLUSH_ROWS + labels.CONCURRENCY
    bound = window * TASKS * (1 + len(labels.DEADLY))
    check_claim(f"calls paid twice, of at most {bound}", repeats, repeats <= bound)
    print_step(
        f"The bill has {len(paid)} calls for {len(good)} labels. {repeats} calls were paid twice "
        "because they were in flight when a process died; each repeats its idempotency key."
    )


@contextlib.contextmanager
def _process(role: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (home / f"{role}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo.labels", role, str(home)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _lines(bill: Path) -> list[str]:
    # A partly written line is not counted.
    return bill.read_text().split("\n")[:-1]


def _count_paid(bill: Path, progress: ShowProgress) -> int:
    count = len(_lines(bill))
    progress(f"{count:5} calls paid")
    return count


def _wait(
    look: Callable[[], bool], what: str, driver: subprocess.Popen[bytes] | None = None
) -> None:
    deadline_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
    while not look():
        if driver is not None and driver.poll() is not None:
            raise Timeout(what=what, why=f"the driver ended with {driver.returncode}")
        if SYSTEM.mono_ns() > deadline_ns:
            raise Timeout(what=what, seconds=PHASE_S_MAX)
        SYSTEM.sleep(POLL_S)
