"""A load of short tasks over simulated minutes, with the size of the store after each minute.

The load moves the store time, a second for every `rate` completed tasks. Rows, files and the server are real.
`python -m bench retention` and the tests of task upkeep run it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import holdfast as hf
from holdfast.app.runtime import Runtime
from holdfast.clock import MS, S, SimClock
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.task_routes import TaskApi
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.tasks import checkpoint, operations, queries
from holdfast.tasks.model import TaskSpec, get_counts, keys_of
from holdfast.tasks.operations import TaskToSubmit

UNIVERSE = "retention"
NAME = "nothing"
# The reference minute.
FIRST = 10
HTTP_WORKERS = 2
POLL_S = 0.002
# Store time between two checks while tasks expire.
TICK_NS = 2 * MS
# Time limit of every wait.
LONG_S = 300.0
_PG_SIZE = """
    SELECT (SELECT count(*) FROM holdfast_row),
           pg_total_relation_size('holdfast_row') + pg_total_relation_size('holdfast_commit')
"""


@dataclass(frozen=True)
class RetentionAmount:
    rate: int = 1_000
    minutes: int = 60
    retain_s: float = 60.0
    batch: int = 100
    first: int = FIRST


@dataclass(frozen=True)
class Minute:
    number: int
    kept: int
    rows: int
    bytes: int
    seconds: float = 0.0


class Site(Protocol):
    """A store with a simulated clock, and its size."""

    store: Store
    clock: SimClock

    def size(self) -> tuple[int, int]:
        """Rows and bytes."""


class LmdbSite:
    """Rows in an LMDB file with its redo log, written by this process."""

    def __init__(self, path: Path) -> None:
        self.clock = SimClock()
        self._path = path
        self._backend = LmdbBackend(path, readonly=False, logged=True)
        self.store: Store = InProcessStore(f"lmdb:{path}", self._backend, self.clock)

    def size(self) -> tuple[int, int]:
        files = sum(file.stat().st_size for file in self._path.iterdir() if file.is_file())
        return int(self._backend.env.stat()["entries"]), files

    def close(self) -> None:
        self.store.close()
        self._backend.close()


class PgSite:
    """Tables on a PostgreSQL server, including its commit records.

    Autovacuum follows the wall clock, and simulated minutes pass much faster. One VACUUM per simulated minute
    replaces it. This matches the server's default `autovacuum_naptime` of a minute, since a minute leaves more
    dead rows than the threshold of the tables. Autovacuum stays on.
    """

    def __init__(self, url: str) -> None:
        from holdfast.store.postgres.store import PostgresStore

        self.clock = SimClock(time.time_ns())
        self._url = url
        self.store: Store = PostgresStore(url, clock=self.clock)

    def size(self) -> tuple[int, int]:
        import psycopg

        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("VACUUM holdfast_row, holdfast_commit")
            row = connection.execute(_PG_SIZE).fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    def close(self) -> None:
        self.store.close()


@hf.task(name=NAME)
def nothing() -> None:
    """Empty: the benchmark measures the cost around a task."""


@contextlib.contextmanager
def by_worker(store: Store) -> Iterator[Callable[[], None]]:
    with Runtime(hf.App(UNIVERSE, tasks=[nothing]), store, roles=("task",)) as running:
        yield running.check


@contextlib.contextmanager
def by_http(store: Store) -> Iterator[Callable[[], None]]:
    address = parse_address("127.0.0.1:0")
    over = threading.Event()
    failures: list[BaseException] = []

    def work(name: str) -> None:
        connection = http.client.HTTPConnection(*server.address, timeout=LONG_S)
        try:
            while not over.is_set():
                claim = {"worker": name, "limit": 1_000, "wait_s": 1}
                granted = _posted(connection, "lease", claim)["tasks"]
                if granted:
                    reports = [{"lease": grant["lease"], "result": None} for grant in granted]
                    _posted(connection, "complete", {"worker": name, "reports": reports})
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    def check() -> None:
        for failure in failures:
            raise failure

    with HttpServer(
        lambda server: TaskApi(server, store, UNIVERSE, {}),
        address=address,
        guard=RequestGuard(address, ""),
    ) as server:
        workers = [
            threading.Thread(target=work, args=(f"http-{n}",), daemon=True)
            for n in range(HTTP_WORKERS)
        ]
        for worker in workers:
            worker.start()
        try:
            yield check
        finally:
            over.set()
            for worker in workers:
                worker.join(LONG_S)


BY = {"worker": by_worker, "http": by_http}


def run(
    site: Site, by: str, amount: RetentionAmount, tell: Callable[[Minute], None]
) -> list[Minute]:
    """The simulated minutes, each with its size at the end."""
    store, keys = site.store, keys_of(UNIVERSE)
    spec = TaskSpec(NAME, retain_ns=int(amount.retain_s * S))
    new = [TaskToSubmit(_NO_ARGUMENTS)] * amount.batch
    batches = max(amount.rate // amount.batch, 1)
    minutes: list[Minute] = []
    with BY[by](store) as check:

        def until(holds: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + LONG_S
            while not holds():
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: not within {LONG_S:.0f} s")
                time.sleep(POLL_S)

        def done() -> bool:
            counts = store.read(get_counts, keys, spec.queue)
            return counts.waiting + counts.leased == 0

        for number in range(1, amount.minutes + 1):
            began = time.monotonic()
            for _ in range(60):
                for _ in range(batches):
                    store.transact(operations.submit, UNIVERSE, spec, new)
                until(done, "tasks are completed")
                site.clock.advance(S)
            over_ns = store.now_ns()

            def expired(over_ns: int = over_ns) -> bool:
                # Advance the store time, so that sleeping roles wake up.
                site.clock.advance(TICK_NS)
                first_ns = store.read(queries.next_retention_ns, UNIVERSE)
                removed = first_ns is None or first_ns > over_ns
                return removed and not store.read(checkpoint.is_due_in, UNIVERSE)

            until(expired, "tasks are removed, and the log has its checkpoint")
            kept = store.read(get_counts, keys, spec.queue).completed
            minutes.append(Minute(number, kept, *site.size(), time.monotonic() - began))
            tell(minutes[-1])
    return minutes


# The stored form of an empty argument list.
_NO_ARGUMENTS = b"\x92\x90\x80"


def _posted(connection: http.client.HTTPConnection, what: str, document: Any) -> Any:
    sent = {"Content-Type": "application/json"}
    connection.request("POST", f"/v1/tasks/{what}", json.dumps(document).encode(), sent)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{what}: {answer.status} {body[:200]!r}")
    return json.loads(body)
