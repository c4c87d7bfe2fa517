"""The peers of the task workload. Each starts with an empty state and runs the common turn."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.peers import install, rabbit_server
from bench.peers.process import Load, Process, ProcessFailed, free_port
from bench.peers.restate_turn import Restate
from bench.peers.task_turn import TaskTurn, tally_file
from bench.peers.task_workload import BATCH, CALLERS, TaskAmount

HERE = Path(__file__).parent


@dataclass
class Served:
    """A peer whose worker and producer are processes of one script. `argv` excludes the role."""

    producer: Load
    tally: Path
    start: Callable[[], Load]
    pids: Sequence[int] = ()
    embedded: Callable[[], Process] | None = None
    starts: bool = True

    @contextlib.contextmanager
    def worker(self) -> Iterator[Sequence[int]]:
        with self.start() as worker:
            yield [worker.pid]

    def server(self) -> Sequence[int]:
        return self.pids

    def load(self, count: int) -> None:
        self.producer.ask("batched", count=count, size=BATCH)

    def left(self) -> int:
        left_count: int = self.producer.ask("left")["left"]
        return left_count


class PgqueuerTasks:
    name = "pgqueuer"
    amount = TaskAmount()

    def __init__(self) -> None:
        self._python = install.interpreter()

    def settings(self) -> dict[str, str]:
        with (
            TemporaryDirectory(dir=install.HOME) as directory,
            self._role("postgres", str(Path(directory) / "pg")) as postgres,
        ):
            server_settings = postgres.ask("settings")
        version = server_settings.pop("server_version")
        packages = [
            install.version(self._python, name) for name in ("pgqueuer", "asyncpg", "uvloop")
        ]
        return {
            "version": f"{', '.join(packages)}, PostgreSQL {version}",
            "durability": "its tables are logged (durable), "
            + ", ".join(f"{name} {value}" for name, value in server_settings.items()),
            **self.ways(),
        }

    def ways(self) -> dict[str, str]:
        return {
            "single": f"{CALLERS} coroutines and a pool of 4 connections, which is the fastest: its "
            "trigger notifies, and commits that notify wait for each other. The pool's reset of a "
            "connection is left out",
            "batched": f"`enqueue` of lists of {BATCH:,}",
            "worker": "one `QueueManager` with an `async def`, a pool of 4, batches of 1,000 "
            "(default 10), no aggregation of its log; `pgq autovac`, and `analyze` after a backlog "
            "was made",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[TaskTurn]:
        with contextlib.ExitStack() as stack:
            tally = stack.enter_context(tally_file(directory))
            url, pid = stack.enter_context(self.database(directory))
            argv = (url, str(tally))
            producer = stack.enter_context(self._role("producer", *argv))
            producer.ask("install")
            yield TaskTurn(Loaded(producer, tally, lambda: self._role("worker", *argv), [pid]))

    @contextlib.contextmanager
    def database(self, directory: Path) -> Iterator[tuple[str, int]]:
        """Yields its URL and the server process."""
        with self._role("postgres", str(directory / "pg")) as postgres:
            where = postgres.ask("where")
            yield where["url"], where["pid"]

    def _role(self, role: str, *argv: str) -> Load:
        return Load([self._python, HERE / "pgqueuer_tasks.py", role, *argv])


class Loaded(Served):
    """A peer with a special way to build a backlog."""

    def load(self, count: int) -> None:
        self.producer.ask("load", count=count)


class HueyTasks:
    name = "huey"
    amount = TaskAmount(batched=0)

    def __init__(self) -> None:
        self._python = install.interpreter()

    def settings(self) -> dict[str, str]:
        code = "import sqlite3; print(sqlite3.sqlite_version)"
        result = subprocess.run(
            [self._python, "-c", code], capture_output=True, text=True, timeout=60
        )
        return {
            "version": f"{install.version(self._python, 'huey')}, SQLite {result.stdout.strip()}",
            "durability": "fsync=True (synchronous=FULL), write-ahead log. There is no "
            "acknowledgement: a task is gone once it was taken, and lost if its worker dies",
            "single": f"{CALLERS} threads; they share one connection",
            "batched": "there is none; a backlog is written into its table",
            "worker": "a consumer with one thread, which polls every 1 ms (default 100 ms and more); "
            "results are not kept",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[TaskTurn]:
        with (
            tally_file(directory) as tally,
            self._role("producer", directory / "huey.db", tally) as producer,
        ):
            yield TaskTurn(
                Loaded(
                    producer,
                    tally,
                    lambda: self._role("worker", directory / "huey.db", tally),
                    embedded=lambda: self._role("both", directory / "new.db", tally),
                )
            )

    def _role(self, role: str, file: Path, tally: Path) -> Load:
        return Load([self._python, HERE / "huey_tasks.py", role, file, tally])


class RabbitTasks:
    name = "rabbitmq"
    amount = TaskAmount()

    def __init__(self) -> None:
        self._python = install.interpreter()
        install.rabbit_server()

    def settings(self) -> dict[str, str]:
        return {
            "version": f"server {install.package_version(install.RABBIT_PACKAGE)}, "
            f"{install.version(self._python, 'pika')}, {install.version(self._python, 'uvloop')}",
            "durability": "durable classic queue, persistent messages, publisher confirms (seen with "
            "strace: it confirms after an fsync), acknowledgements after the task",
            "single": f"{CALLERS} coroutines on one channel (pika on asyncio, twice as fast as "
            "aio-pika here), each waits for its confirm",
            "batched": f"{BATCH:,} messages, then their confirms",
            "worker": "pika on asyncio, a prefetch of 1,000, one acknowledgement for all messages "
            "that came at once",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[TaskTurn]:
        with (
            tally_file(directory) as tally,
            rabbit_server.running(directory) as (port, server),
            self._role("producer", port, tally) as producer,
        ):
            start = lambda: self._role("worker", port, tally)  # noqa: E731
            yield TaskTurn(Served(producer, tally, start, [server.pid]))

    def _role(self, role: str, port: int, tally: Path) -> Load:
        return Load([self._python, HERE / "rabbit_tasks.py", role, str(port), tally])


class RestateTasks(Restate):
    # Restate has no queue for a worker: it calls the service. A stopped worker holds tasks back, but
    # not 200,000, because it also blocks the invocation that sends them.
    amount = TaskAmount(batched=10_000, large=0)  # type: ignore[assignment]

    def ways(self) -> dict[str, str]:
        return {
            "single": f"{CALLERS} connections (asyncio, uvloop), one-way sends to the HTTP ingress",
            "batched": f"one invocation forwards {BATCH:,} tasks",
            "worker": f"a service over HTTP/2, {self._services} hypercorn processes, stopped "
            "(SIGSTOP) while no task may run. A backlog of 200,000 cannot be built in this way",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            tally = stack.enter_context(tally_file(directory))
            server = stack.enter_context(self.server(directory))

            def serve(name: str, processes: int) -> Process:
                port, script = free_port(), HERE / "restate_tasks.py"
                process = Process([self._python, script, name, str(port), str(processes), tally])
                service = stack.enter_context(process)
                server.register(port)
                return service

            service, fan = serve("tasks", self._services), serve("fan", 1)
            script = HERE / "restate_task_load.py"
            producer = stack.enter_context(Load([self._python, script, str(server.ingress)]))
            yield TaskTurn(Pushed(producer, tally, service, [server.process.pid, fan.pid]))


class Pushed:
    """Tasks that a server pushes to a service. Its worker is stopped instead of ended."""

    embedded = None
    starts = False

    def __init__(self, producer: Load, tally: Path, service: Process, pids: Sequence[int]) -> None:
        self.producer = producer
        self.tally = tally
        self._service = service
        self._pids = pids
        os.killpg(service.pid, signal.SIGSTOP)

    @contextlib.contextmanager
    def worker(self) -> Iterator[Sequence[int]]:
        if not self._service.running:
            raise ProcessFailed(f"the service ended: {self._service.errors()}")
        os.killpg(self._service.pid, signal.SIGCONT)
        yield [self._service.pid]
        os.killpg(self._service.pid, signal.SIGSTOP)

    def server(self) -> Sequence[int]:
        return self._pids

    def load(self, count: int) -> None:
        self.producer.ask("batched", count=count, size=BATCH)

    def left(self) -> int:
        # A count would need a query over all partitions, which is too expensive here.
        return 0
