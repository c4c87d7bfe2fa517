"""The paid call: 5 ms, and a line in a log outside of Spark and of the store.

The call writes the line at its start, in one `write` with O_APPEND, so that the line survives every later
crash. The log is the bill. A stage calls `PaidCall`. `Naive` is the same for `mapInArrow`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

SCHEMA = "answer string"
NAIVE_SCHEMA = "id long, answer string"
CALL_S = 0.005
SLOW_FACTOR = 20
# The Worker of an executor. `tests.spark.clusters` sets it.
NODE = "HOLDFAST_NODE"


def answer(key: int) -> str:
    return f"answer {key * 2_654_435_761 % 2**32:08x}"


@dataclass(frozen=True)
class PaidCall:
    """Rows of `poison` kill their interpreter, or raise when the poison is `mild`."""

    log: str
    slow_node: str = ""
    poison: frozenset[int] = frozenset()
    mild: bool = False

    def __call__(self, row: Any, call: Any) -> dict[str, str]:
        return {"answer": self.pay(row.id, call.attempt)}

    def pay(self, key: int, attempt: int) -> str:
        _append(self.log, f"{key} {attempt} {os.getpid()}\n")
        if key in self.poison:
            if self.mild:
                raise ValueError("poison")
            os.kill(os.getpid(), signal.SIGKILL)
        slow = self.slow_node and os.environ.get(NODE) == self.slow_node
        time.sleep(CALL_S * SLOW_FACTOR if slow else CALL_S)
        return answer(key)


@dataclass(frozen=True)
class Naive:
    paid: PaidCall
    concurrency: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = 1 + (context.attemptNumber() if context is not None else 0)
        with ThreadPoolExecutor(self.concurrency) as pool:
            for batch in batches:
                keys = batch.column(0).to_pylist()
                answers = list(pool.map(lambda key: self.paid.pay(key, attempt), keys))
                yield pa.RecordBatch.from_pydict({"id": keys, "answer": answers})


def _append(path: str, line: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(log, line.encode())
    finally:
        os.close(log)


@dataclass(frozen=True)
class Bill:
    """The calls in the log of the paid function."""

    calls: int
    by_key: Counter[int]
    pids: dict[int, set[int]]  # key → pids of its callers

    @classmethod
    def read(cls, path: Path) -> Bill:
        lines = path.read_text("ascii").splitlines() if path.exists() else []
        by_key: Counter[int] = Counter()
        pids: dict[int, set[int]] = {}
        for line in lines:
            key, _, pid = map(int, line.split())
            by_key[key] += 1
            pids.setdefault(key, set()).add(pid)
        return cls(len(lines), by_key, pids)

    @property
    def distinct(self) -> int:
        return len(self.by_key)

    @property
    def repeated(self) -> int:
        return self.calls - self.distinct

    @property
    def called_elsewhere(self) -> bool:
        """Whether two processes called the same key."""
        return any(len(pids) > 1 for pids in self.pids.values())


def calls(path: Path) -> int:
    """The number of calls so far. Cheap enough for frequent polling."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
