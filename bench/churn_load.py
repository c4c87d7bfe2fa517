"""The two loads of `churn`: queue items that are put, claimed and acknowledged, or tasks that are submitted and run.

Both keep a backlog of constant length: they put as many items as are done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.peers import tally
from bench.peers.pg_place import UrlPlace
from bench.peers.task_holdfast import Running, running
from bench.workers import WorkerGroup

QUEUE = "churn"
CALLERS = 4
BATCH = 100
LOAD_BATCH = 1_000
POLL_S = 0.01
WITHIN_S = 120.0


@dataclass(frozen=True)
class Rated:
    count: int
    seconds: float


class Churn(Protocol):
    def fill(self, backlog: int) -> None:
        """Put items until the backlog has this length."""

    def run(self, backlog: int, seconds: float) -> Rated:
        """Count the items that are done while the backlog keeps this length."""

    def __enter__(self) -> Churn: ...

    def __exit__(self, *exc: object) -> None: ...


class QueueChurn:
    """Callers in one process put a batch, claim a batch and acknowledge it."""

    def __init__(self, url: str, _directory: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._url: Any = url
        self._filled = 0

    def __enter__(self) -> QueueChurn:
        with contextlib.ExitStack() as stack:
            loaders = stack.enter_context(WorkerGroup("loader", 1, self._url))
            self._churners = stack.enter_context(
                WorkerGroup("churn", 1, self._url, callers=CALLERS, batch=BATCH)
            )
            [self._loader] = loaders.members
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def fill(self, backlog: int) -> None:
        self._loader.go(queue=QUEUE, items=backlog - self._filled)
        self._loader.answer()
        self._filled = backlog

    def run(self, backlog: int, seconds: float) -> Rated:
        [answer] = self._churners.go(queue=QUEUE, seconds=seconds)
        return Rated(answer["count"], answer["count"] / answer["rate"])


class TaskChurn:
    """A producer and a worker as users run them. The producer replaces each completed task."""

    def __init__(self, url: str, directory: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._place = UrlPlace(directory, url=url)
        self._works = False
        self._put = 0

    def __enter__(self) -> TaskChurn:
        with contextlib.ExitStack() as stack:
            self._tasks: Running = stack.enter_context(running(self._place))
            self._worker = stack.enter_context(contextlib.ExitStack())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def fill(self, backlog: int) -> None:
        self._worker.close()
        self._works = False
        self._submit(backlog - (self._put - self._done()))

    def run(self, backlog: int, seconds: float) -> Rated:
        if not self._works:
            before = self._done()
            self._worker.enter_context(self._tasks.worker())
            self._wait_for_more_than(before)
            self._works = True
        first, began = self._done(), time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            missing = backlog - (self._put - self._done())
            if missing >= min(LOAD_BATCH, backlog // 2):
                self._submit(missing)
            else:
                time.sleep(POLL_S)
        return Rated(self._done() - first, passed)

    def _submit(self, count: int) -> None:
        if count > 0:
            self._tasks.producer.ask("batched", count=count, size=LOAD_BATCH)
            self._put += count

    def _done(self) -> int:
        return tally.count(self._tasks.tally)

    def _wait_for_more_than(self, done: int) -> None:
        """Wait until the worker has completed a task."""
        until = time.monotonic() + WITHIN_S
        while self._done() <= done:
            if time.monotonic() > until:
                raise TimeoutError(f"no task completed within {WITHIN_S:g} s")
            time.sleep(POLL_S)


KINDS: Mapping[str, Callable[[str, Path], Churn]] = {"tasks": TaskChurn, "queue": QueueChurn}
