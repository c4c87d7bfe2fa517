"""Part 5 of the demo: thousands of tasks, a killed worker, and a task that kills its workers.

Workers are processes (`holdfast up`), restarted when they die, as by a supervisor. The task that
kills them exhausts its two leases and becomes DEAD, and all other tasks complete. At the end the
log is folded again, and every task is in the state that the log implies.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from examples.demo.print_app import BOOK, app, bind, jam, print_page
from examples.demo.up_process import UpProcess
from holdfast.app.runtime import Runtime
from holdfast.app.task_handle import TaskFailedError
from holdfast.clock import SYSTEM, S
from holdfast.errors import Timeout
from holdfast.store.api import Txn
from holdfast.tasks import replay_check
from holdfast.tasks.model import get_counts, keys_of

APP = "examples.demo.print_app:app"
PAGES = 3_000
KILL_AT = 800
PHASE_S_MAX = 60.0
POLL_S = 0.02

PrintStep = Callable[[str], None]
CheckClaim = Callable[[str, object, object], None]


def run_part(path: Path, print_step: PrintStep, check_claim: CheckClaim) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-press-") as directory,
        app.open(str(path), roles=()) as rt,
        SupervisedWorker(path, {BOOK: str(Path(directory) / "book.txt")}) as worker,
    ):
        _run_part(rt, worker, Path(directory) / "book.txt", print_step, check_claim)


def _run_part(
    rt: Runtime,
    worker: SupervisedWorker,
    book: Path,
    print_step: PrintStep,
    check_claim: CheckClaim,
) -> None:
    began_ns = SYSTEM.mono_ns()
    pages = rt.submit_many(print_page, [(page,) for page in range(PAGES)])
    book_task = rt.submit(bind.options(after=[pages[-1]]), PAGES)
    taken_s = (SYSTEM.mono_ns() - began_ns) / S
    print_step(
        f"Part 5: {PAGES:,} pages are submitted as tasks in {taken_s:.2f} s, durably. Another task "
        "binds a book after the last page."
    )
    worker.wait_until(lambda: _completed_pages(rt) >= KILL_AT)
    worker.kill()
    print_step(
        f"SIGKILL the worker after {_completed_pages(rt):,} pages, with a leased batch. Another worker starts."
    )
    poison_task = rt.submit(jam.options(priority=9))
    worker.wait_until(
        lambda: (
            all(page.done() for page in (pages[-1], poison_task)) and _completed_pages(rt) >= PAGES
        )
    )
    printed = book.read_text().split()
    check_claim("pages printed", len(set(printed)), PAGES)
    check_claim(
        "page tasks completed, each once",
        sum(page.result(0) == n for n, page in enumerate(pages)),
        PAGES,
    )
    check_claim(
        "result of the dependent task", book_task.result(PHASE_S_MAX), f"a book of {PAGES} pages"
    )
    try:
        poison_task.result(0)
    except TaskFailedError as error:
        check_claim(
            "end of the task that kills its workers",
            f"{error.state}: {error.reason}",
            "DEAD: expiries_exhausted",
        )
    print_step(
        f"The task that kills its worker was leased twice, the second time in isolation, and is DEAD. "
        f"{worker.started} workers were started. {len(printed) - PAGES} pages were printed twice: "
        "their worker died between the work and the report."
    )
    found = rt.store.read(lambda txn: list(replay_check.find_differences(txn, rt.universe)))
    check_claim("tasks whose state differs from the log", len(found), 0)


def _completed_pages(rt: Runtime) -> int:
    def count(txn: Txn) -> int:
        return get_counts(txn, keys_of(rt.universe), print_page.spec.queue).completed

    found: int = rt.store.read(count)
    return found


class SupervisedWorker:
    """A worker process that is restarted when it dies."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self._path = path
        self._env = env
        self.started = 0

    def __enter__(self) -> SupervisedWorker:
        self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._process.stop()

    def _start(self) -> None:
        self.started += 1
        self._process = UpProcess(self._path, f"press-{self.started}", APP, self._env)

    def kill(self) -> None:
        self._process.kill()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
        while not condition():
            if self._process.has_exited:
                self._start()
            if SYSTEM.mono_ns() > end_ns:
                raise Timeout(what="demo", why="the tasks make no progress", waited_s=PHASE_S_MAX)
            SYSTEM.sleep(POLL_S)
