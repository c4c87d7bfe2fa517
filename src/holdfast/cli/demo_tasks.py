"""The demo's fifth act: thousands of tasks, a worker that is killed, and a task that kills its workers.

Workers are processes (`holdfast up`), started again whenever they are gone, as a supervisor would. The
task that kills them has two leases to outlive; then it is DEAD, and everybody else's work is done. At the
end the log is folded again, and every task is where the log says that it is.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from holdfast.app.runtime import Runtime
from holdfast.app.task_handle import TaskFailedError
from holdfast.cli.demo_press import BOOK, app, bind, jam, print_page
from holdfast.cli.demo_worlds import Up
from holdfast.clock import SYSTEM, S
from holdfast.errors import Timeout
from holdfast.store.api import Txn
from holdfast.tasks import verify
from holdfast.tasks.rows import counts_of, keys_of

APP = "holdfast.cli.demo_press:app"
PAGES = 3_000
KILL_AT = 800
PHASE_S_MAX = 60.0
LOOK_S = 0.02

Tell = Callable[[str], None]
Claim = Callable[[str, object, object], None]


def play(path: Path, tell: Tell, claim: Claim) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-press-") as room,
        app.open(str(path), roles=()) as rt,
        Supervised(path, {BOOK: str(Path(room) / "book.txt")}) as press,
    ):
        _play(rt, press, Path(room) / "book.txt", tell, claim)


def _play(rt: Runtime, press: Supervised, book: Path, tell: Tell, claim: Claim) -> None:
    began_ns = SYSTEM.mono_ns()
    pages = rt.submit_many(print_page, [(page,) for page in range(PAGES)])
    bound = rt.submit(bind.options(after=[pages[-1]]), PAGES)
    taken_s = (SYSTEM.mono_ns() - began_ns) / S
    tell(
        f"Fifth act: {PAGES:,} pages to print are submitted as tasks in {taken_s:.2f} s, durably; a book is "
        "to be bound after the last of them."
    )
    press.until(lambda: _done(rt) >= KILL_AT)
    press.kill()
    tell(
        f"After {_done(rt):,} pages the worker is SIGKILLed with a batch in its hands. Another starts."
    )
    jammed = rt.submit(jam.options(priority=9))
    press.until(lambda: all(page.done() for page in (pages[-1], jammed)) and _done(rt) >= PAGES)
    printed = book.read_text().split()
    claim("pages that were printed", len(set(printed)), PAGES)
    claim(
        "pages whose task completed, each once",
        sum(page.result(0) == n for n, page in enumerate(pages)),
        PAGES,
    )
    claim("what came of the book", bound.result(PHASE_S_MAX), f"a book of {PAGES} pages")
    try:
        jammed.result(0)
    except TaskFailedError as error:
        claim(
            "the task that kills its workers",
            f"{error.state}: {error.reason}",
            "DEAD: expiries_exhausted",
        )
    tell(
        f"A task that kills its worker was leased twice, the second time by itself, and is DEAD; "
        f"{press.started} workers were started in all, and {len(printed) - PAGES} pages printed twice: their worker "
        "died between the work and the report."
    )
    found = rt.store.read(lambda txn: list(verify.differences(txn, rt.universe)))
    claim("tasks that are not where the log says", len(found), 0)


def _done(rt: Runtime) -> int:
    def count(txn: Txn) -> int:
        return counts_of(txn, keys_of(rt.universe), print_page.spec.queue).completed

    found: int = rt.store.read(count)
    return found


class Supervised:
    """A worker that is started again when it is gone."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self._path = path
        self._env = env
        self.started = 0

    def __enter__(self) -> Supervised:
        self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._up.leave()

    def _start(self) -> None:
        self.started += 1
        self._up = Up(self._path, f"press-{self.started}", APP, self._env)

    def kill(self) -> None:
        self._up.kill()

    def until(self, condition: Callable[[], bool]) -> None:
        end_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
        while not condition():
            if self._up.gone:
                self._start()
            if SYSTEM.mono_ns() > end_ns:
                raise Timeout(what="demo", why="the tasks do not get on", waited_s=PHASE_S_MAX)
            SYSTEM.sleep(LOOK_S)
