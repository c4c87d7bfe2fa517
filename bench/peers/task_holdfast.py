"""Holdfast in the task workload: producer, worker and writer are separate processes."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb

from bench.peers.process import Load, Process, Up
from bench.peers.tally import VARIABLE
from bench.peers.task_turn import TaskTurn, tally_file
from bench.peers.task_workload import BATCH, CALLERS, TaskAmount
from bench.place import Place, end_writer, writer_pid
from holdfast import __version__

APP = "bench.peers.task_app:app"
# Time for the worker to finish running tasks, so that it leaves no lease.
STOP_S = 20.0


class HoldfastTasks:
    name = "holdfast"
    amount = TaskAmount()
    # Creates the store.
    place = Place

    def settings(self) -> dict[str, str]:
        engine = ".".join(str(part) for part in lmdb.version())
        return {
            "version": f"holdfast {__version__}, py-lmdb {lmdb.__version__}, LMDB {engine}",
            "durability": "embedded store, fsync on (a redo log, one fdatasync a group commit)",
            **self.ways(),
        }

    def ways(self) -> dict[str, str]:
        return {
            "single": f"{CALLERS} coroutines that await `rt.submit_async`; `single_threads`: as many "
            "threads that call `rt.submit`",
            "batched": f"`rt.submit_many` of {BATCH:,}",
            "worker": "`holdfast up --role task`, one process, a `def` task with every option as it "
            "is by default; results are kept",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[TaskTurn]:
        with running(self.place(directory)) as tasks:
            yield OurTurn(tasks)


class OurTurn(TaskTurn):
    def enqueue(self, amount: TaskAmount) -> dict[str, float]:
        threads = self._ask("threads", callers=CALLERS, seconds=amount.seconds)
        self._drained(threads["count"])
        return {**super().enqueue(amount), "single_threads": threads["rate"]}


class Running:
    starts = True

    def __init__(self, producer: Load, path: Path, tally: Path) -> None:
        self.producer = producer
        self.tally = tally
        self._path = path
        self._workers = 0

    @contextlib.contextmanager
    def worker(self) -> Iterator[Sequence[int]]:
        self._workers += 1
        env = {VARIABLE: str(self.tally)}
        worker = Up(APP, self._path, "task", worker=f"worker-{self._workers}", env=env)
        try:
            yield [worker.pid]
            worker.require_running()
        finally:
            worker.close(STOP_S)

    def server(self) -> Sequence[int]:
        return [writer_pid(self._path)]

    def load(self, count: int) -> None:
        self.producer.ask("batched", count=count, size=BATCH)

    def left(self) -> int:
        left_count: int = self.producer.ask("left")["left"]
        return left_count

    def embedded(self) -> Process:
        return Embedded(self._path.with_name("embedded"), self.tally)


class Embedded(Load):
    def __init__(self, path: Path, tally: Path) -> None:
        self._path = path
        super().__init__(_argv("embedded", path), env={VARIABLE: str(tally)})

    def close(self, grace_s: float = STOP_S) -> None:
        super().close(grace_s)
        end_writer(self._path)
        shutil.rmtree(self._path, ignore_errors=True)


@contextlib.contextmanager
def running(place: Place) -> Iterator[Running]:
    with (
        tally_file(place.directory) as tally,
        place.store("tasks") as path,
        Load(_argv("producer", path)) as producer,
    ):
        yield Running(producer, path, tally)


def _argv(role: str, path: Path) -> list[str]:
    return [sys.executable, "-m", "bench.peers.task_load", role, str(path)]
