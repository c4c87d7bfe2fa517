"""The systems on PostgreSQL: turns of the other suites, each group on a new database of one server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.peers import install
from bench.peers.dbos_turn import Dbos
from bench.peers.effect_turns import DbosEffects, HoldfastEffects
from bench.peers.holdfast_turn import Holdfast
from bench.peers.pg_place import PgPlace, server
from bench.peers.pg_workload import AGAINST_RAW, RAW_CONNECTIONS, PgAmount
from bench.peers.process import Load
from bench.peers.task_holdfast import HoldfastTasks
from bench.peers.task_peers import Loaded, PgqueuerTasks
from bench.peers.task_turn import TaskTurn, tally_file
from bench.peers.task_workload import BATCH, CALLERS, TaskAmount
from bench.place import writer_pid
from holdfast import __version__

HERE = Path(__file__).parent
WORLDS, EFFECTS, TASKS = "worlds", "effects", "tasks"


class OnPostgres:
    """A system with its groups, one per workload that it supports. A group starts when it is needed."""

    name: str
    amount = PgAmount()

    def groups(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError

    def settings(self) -> dict[str, str]:
        shown_settings = dict(server().settings)
        version = f"{self.version()}, PostgreSQL {shown_settings.pop('server_version')}"
        ways = {
            f"{group}: {name}": how
            for group, system in self.groups().items()
            for name, how in system.ways().items()
        }
        shown = ", ".join(f"{name} {value}" for name, value in shown_settings.items())
        return {"version": version, "server": shown, **ways}

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[PgTurn]:
        openers = {
            group: lambda system=system: system.turn(directory)
            for group, system in self.groups().items()
        }
        with contextlib.ExitStack() as stack:
            yield PgTurn(openers, stack)


class PgTurn:
    """One group runs at a time. The processes of the previous group are ended before the next starts."""

    def __init__(
        self,
        openers: Mapping[str, Callable[[], AbstractContextManager[Any]]],
        stack: contextlib.ExitStack,
    ) -> None:
        self._openers = openers
        self._stack = stack
        self._group: str | None = None
        self._turn: Any = None
        # Rate of one connection, measured before each group, because the speed of a shared machine varies.
        self._inserts: list[float] = []

    def inserts(self, amount: PgAmount) -> dict[str, float]:
        return {f"insert_{count}": server().inserts_per_s(count) for count in RAW_CONNECTIONS}

    def messages(self, amount: PgAmount) -> dict[str, float]:
        return self._part(WORLDS, "batch", amount.worlds) | self._part(
            WORLDS, "senders", amount.worlds
        )

    def hot(self, amount: PgAmount) -> dict[str, float]:
        return self._part(WORLDS, "hot", amount.worlds)

    def message_latency(self, amount: PgAmount) -> dict[str, float]:
        return _of("message", self._part(WORLDS, "latency", amount.worlds))

    def chains(self, amount: PgAmount) -> dict[str, float]:
        return self._part(EFFECTS, "chains", amount.effects)

    def steps(self, amount: PgAmount) -> dict[str, float]:
        return self._part(EFFECTS, "steps", amount.effects)

    def timers(self, amount: PgAmount) -> dict[str, float]:
        return self._part(EFFECTS, "timers", amount.effects)

    def enqueue(self, amount: PgAmount) -> dict[str, float]:
        return self._part(TASKS, "enqueue", amount.tasks)

    def drain(self, amount: PgAmount) -> dict[str, float]:
        return self._part(TASKS, "drain", amount.tasks)

    def end_to_end(self, amount: PgAmount) -> dict[str, float]:
        return self._part(TASKS, "end_to_end", amount.tasks)

    def task_latency(self, amount: PgAmount) -> dict[str, float]:
        return _of("task", self._part(TASKS, "latency", amount.tasks))

    def idle(self, amount: PgAmount) -> dict[str, float]:
        return self._part(TASKS, "idle", amount.tasks)

    def backlog(self, amount: PgAmount) -> dict[str, float]:
        return self._part(TASKS, "backlog", amount.tasks)

    def _part(self, group: str, part: str, amount: Any) -> dict[str, float]:
        if group not in self._openers:
            return {}
        if group != self._group:
            self._stack.close()
            self._inserts.append(server().inserts_per_s(1))
            self._turn = self._stack.enter_context(self._openers[group]())
            self._group = group
        measures: dict[str, float] = getattr(self._turn, part)(amount)
        against = {name: measures[name] for name in AGAINST_RAW if name in measures}
        measures |= {f"{name}_raw": rate / self._inserts[-1] for name, rate in against.items()}
        return measures | {"insert_1": fmean(self._inserts)}


def _of(what: str, measures: dict[str, float]) -> dict[str, float]:
    """Rename p50 and p95, since worlds and tasks both use these names."""
    return {
        f"{what}_{name}" if name in ("p50", "p95") else name: ms for name, ms in measures.items()
    }


# -- ours --------------------------------------------------------------------------------------------


class _Worlds(Holdfast):
    place = PgPlace

    def ways(self) -> dict[str, str]:
        latency = "send, until the journal's head has moved, read when its topic is notified"
        return super().ways() | {"latency": latency}


class _Effects(HoldfastEffects):
    place = PgPlace

    def ways(self) -> dict[str, str]:
        steps = super().ways()["steps"].replace("every 0.2 ms", "when its topic is notified")
        return super().ways() | {"steps": steps}


class _Tasks(HoldfastTasks):
    place = PgPlace


class HoldfastOnPostgres(OnPostgres):
    name = "holdfast"

    def groups(self) -> Mapping[str, Any]:
        return {WORLDS: _Worlds(), EFFECTS: _Effects(), TASKS: _Tasks()}

    def version(self) -> str:
        import psycopg

        return f"holdfast {__version__}, psycopg {psycopg.__version__} ({psycopg.pq.__impl__})"


# -- the peers ---------------------------------------------------------------------------------------


class _Database:
    """Replaces the separate server of a peer."""

    @contextlib.contextmanager
    def database(self, directory: Path) -> Iterator[str]:
        with server().database("dbos") as url:
            yield url


class _DbosWorlds(_Database, Dbos):
    pass


class _DbosEffects(_Database, DbosEffects):
    pass


class _DbosTasks(_Database):
    def __init__(self) -> None:
        self._python = install.interpreter()

    def ways(self) -> dict[str, str]:
        return {
            "single": f"{CALLERS} threads that call `DBOSClient.enqueue` (its coroutines are threads, "
            "too)",
            "batched": f"{BATCH:,} workflows in one transaction, as its Kafka consumers enqueue",
            "worker": "one process, a queue polled every 20 ms (default 1 s), 200 workflows at a "
            "time in 16 threads; a workflow without steps",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[TaskTurn]:
        with tally_file(directory) as tally, self.database(directory) as url:
            argv = (url, str(tally))
            # The first worker that starts creates the tables.
            self._role("worker", *argv).close()
            with self._role("producer", *argv) as producer:
                start = lambda: self._role("worker", *argv)  # noqa: E731
                yield TaskTurn(Loaded(producer, tally, start, [writer_pid(url)]))

    def _role(self, role: str, *argv: str) -> Load:
        return Load([self._python, HERE / "dbos_tasks.py", role, *argv])


class DbosOnPostgres(OnPostgres):
    name = "dbos"
    # DBOS is slow, and its start of sleeping workflows takes long.
    amount = PgAmount(Dbos.amount, DbosEffects.amount, TaskAmount(batched=10_000))  # type: ignore[arg-type]

    def __init__(self) -> None:
        self._groups = {WORLDS: _DbosWorlds(), EFFECTS: _DbosEffects(), TASKS: _DbosTasks()}

    def groups(self) -> Mapping[str, Any]:
        return self._groups

    def version(self) -> str:
        return install.version(install.interpreter(), "dbos")


class _PgqueuerTasks(PgqueuerTasks):
    @contextlib.contextmanager
    def database(self, directory: Path) -> Iterator[tuple[str, int]]:
        with server().database("pgqueuer") as url:
            yield url, writer_pid(url)


class PgqueuerOnPostgres(OnPostgres):
    name = "pgqueuer"

    def __init__(self) -> None:
        self._tasks = _PgqueuerTasks()

    def groups(self) -> Mapping[str, Any]:
        return {TASKS: self._tasks}

    def version(self) -> str:
        python = install.interpreter()
        return ", ".join(install.version(python, name) for name in ("pgqueuer", "asyncpg"))


class _ProcrastinateTasks:
    def __init__(self) -> None:
        self._python = install.interpreter()

    def ways(self) -> dict[str, str]:
        return {
            "single": f"{CALLERS} coroutines and a pool of 8 connections: `defer_async`",
            "batched": f"`batch_defer_async` of {BATCH:,}",
            "worker": "one process with four workers of concurrency 8 and a pool of 12, an "
            "`async def`, notified; jobs are kept, as by default; uvloop",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[TaskTurn]:
        with tally_file(directory) as tally, server().database("procrastinate") as url:
            argv = (url, str(tally))
            with self._role("producer", *argv) as producer:
                producer.ask("install")
                start = lambda: self._role("worker", *argv)  # noqa: E731
                yield TaskTurn(Loaded(producer, tally, start, [writer_pid(url)]))

    def _role(self, role: str, *argv: str) -> Load:
        return Load([self._python, HERE / "procrastinate_tasks.py", role, *argv])


class ProcrastinateOnPostgres(OnPostgres):
    name = "procrastinate"
    amount = PgAmount(tasks=TaskAmount(batched=10_000))

    def __init__(self) -> None:
        self._tasks = _ProcrastinateTasks()

    def groups(self) -> Mapping[str, Any]:
        return {TASKS: self._tasks}

    def version(self) -> str:
        python = install.interpreter()
        return ", ".join(install.version(python, name) for name in ("procrastinate", "psycopg"))
