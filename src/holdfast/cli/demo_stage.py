"""The demo's third act: a Spark job that pays for every row, and whose driver is killed.

The driver and the model are processes of their own. The driver is SIGKILLed in the middle and run
again; two documents kill whatever process reads them. At the end the bill has a line for each
document that was labelled, and for no more repeats than the stage promises.
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

from holdfast.cli import demo_labels as labels
from holdfast.clock import SYSTEM, S
from holdfast.errors import Timeout

NAME = labels.NAME
KILL_AT = 300
TASKS = 2
PHASE_S_MAX = 180.0
LOOK_S = 0.05

Tell = Callable[[str], None]
Claim = Callable[[str, object, object], None]
Progress = Callable[[str], None]


def store_in(path: str) -> str:
    return str(Path(path) / "stage" / "ledger")


def play(path: Path, tell: Tell, claim: Claim, progress: Progress) -> None:
    if importlib.util.find_spec("pyspark") is None:
        tell("The third act is left out: it needs Spark. pip install 'holdfast[spark]'")
        return
    home = path / "stage"
    home.mkdir()
    with _process("model", home):
        _wait(lambda: (home / "model.url").exists(), "the model")
        tell(
            f"Third act, on Spark: {labels.DOCUMENTS} documents are labelled by a model that "
            f"charges ${labels.COST_A_CALL} a call. Some are empty, and {len(labels.DEADLY)} kill "
            "the process that reads them."
        )
        bill = home / "bill.txt"
        with _process("drive", home) as driver:
            _wait(lambda: _paid(bill, progress) >= KILL_AT, "paid calls", driver)
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
        before = len(_lines(bill))
        tell(f"SIGKILL the driver, with {before} calls paid for. Then the same job is run again.")
        with _process("drive", home) as driver:
            _wait(lambda: bool(_paid(bill, progress)) and driver.poll() is not None, "the job")
            status = driver.wait()
        progress("")
        claim("the job that was run again ended with status", status, 0)
        if status == 0:
            _audit(home, tell, claim)


def _audit(home: Path, tell: Tell, claim: Claim) -> None:
    found = json.loads((home / "found.json").read_text())
    paid = _lines(home / "bill.txt")
    good = [
        [f"doc-{n:04}", labels.KINDS[n % 3]]
        for n in range(labels.DOCUMENTS)
        if labels.text_of(n) and n not in labels.DEADLY
    ]
    claim(
        "labels, one for each document that has a text, in order",
        len(good),
        found["labels"] == good,
    )
    claim("documents that kill their reader, failed and named", found["failed"],
          [f"doc-{n:04}" for n in sorted(labels.DEADLY)])  # fmt: skip
    claim("documents skipped", found["counts"]["TERMINAL_SKIP"],
          -(-labels.DOCUMENTS // labels.EMPTY_EVERY))  # fmt: skip
    claim("documents paid for", len(set(paid)), len(good))
    repeats = len(paid) - len(set(paid))
    # The driver's death, and the deaths of the children: begun rows that were not reported.
    window = labels.FLUSH_ROWS + labels.CONCURRENCY
    bound = window * TASKS * (1 + len(labels.DEADLY))
    claim(f"calls paid twice, of at most {bound}", repeats, repeats <= bound)
    tell(
        f"The bill: {len(paid)} calls for {len(good)} labels, {repeats} of them paid twice because "
        "they were under way when something died; each with the idempotency key of its first try."
    )


@contextlib.contextmanager
def _process(role: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (home / f"{role}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.demo_labels", role, str(home)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _lines(bill: Path) -> list[str]:
    # A line that is being written while this looks is not counted.
    return bill.read_text().split("\n")[:-1]


def _paid(bill: Path, progress: Progress) -> int:
    count = len(_lines(bill))
    progress(f"{count:5} calls paid for")
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
        SYSTEM.sleep(LOOK_S)
