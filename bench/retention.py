"""`python -m bench retention`: are tasks forgotten as fast as they end?

    python -m bench retention [--by worker|http] [--store postgresql://…] [--minutes 60] [--rate 1000]
                              [--retain-s 60] [--batch 100]

Store time is moved by the command, a second for every `--rate` tasks that were done; rows, files and the
server are real. Each simulated minute gives a line: tasks that are kept, rows, bytes, and how many seconds the
minute took. At the end come the ratios of the last minute to the tenth: without a leak they are near one.

`worker` is a task worker in this process, `http` a server in this process whose only workers are HTTP clients.
Without `--store` the store is an LMDB file of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import holdfast as hf
from bench.place import ROOT, new_directory
from holdfast.app.runtime import Runtime
from holdfast.clock import MS, S, SimClock
from holdfast.ops.http.guard import Guard, address_of
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.tasks import TaskApi
from holdfast.store.api import Store
from holdfast.store.local import LocalStore
from holdfast.store.rows import LmdbBackend
from holdfast.tasks import checkpoint, coordinator, look
from holdfast.tasks.coordinator import New
from holdfast.tasks.rows import Spec, counts_of, keys_of

UNIVERSE = "retention"
NAME = "nothing"
# The minute that later ones are compared with, and what they may be at most.
FIRST = 10
BOUND = 1.1
HTTP_WORKERS = 2
POLL_S = 0.002
# How much store time passes between two looks while tasks are to be forgotten.
TICK_NS = 2 * MS
# Nothing that is waited for takes as long.
LONG_S = 300.0
MB = 1e6
_PG_SIZE = """
    SELECT (SELECT count(*) FROM holdfast_row),
           pg_total_relation_size('holdfast_row') + pg_total_relation_size('holdfast_commit')
"""
HEADER = ("minute", "tasks kept", "rows", "MB", "seconds")


@dataclass(frozen=True)
class Amount:
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
    """A store whose time is moved by hand, and its size."""

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
        self.store: Store = LocalStore(f"lmdb:{path}", self._backend, self.clock)

    def size(self) -> tuple[int, int]:
        files = sum(file.stat().st_size for file in self._path.iterdir() if file.is_file())
        return int(self._backend.env.stat()["entries"]), files

    def close(self) -> None:
        self.store.close()
        self._backend.close()


class PgSite:
    """Tables on a PostgreSQL server, its record of the last commits among them.

    Autovacuum goes by the clock on the wall, which a simulated minute is far ahead of. One VACUUM a simulated
    minute stands in for it: that is what the server's default `autovacuum_naptime` of a minute comes to, since
    a minute leaves more dead rows than the tables' threshold. Autovacuum itself stays on beside it."""

    def __init__(self, url: str) -> None:
        from holdfast.store.postgres import PostgresStore

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
    """What is measured is everything around it."""


@contextlib.contextmanager
def by_worker(store: Store) -> Iterator[Callable[[], None]]:
    with Runtime(hf.App(UNIVERSE, tasks=[nothing]), store, roles=("task",)) as running:
        yield running.check


@contextlib.contextmanager
def by_http(store: Store) -> Iterator[Callable[[], None]]:
    address = address_of("127.0.0.1:0")
    over = threading.Event()
    failures: list[BaseException] = []

    def work(name: str) -> None:
        connection = http.client.HTTPConnection(*server.address, timeout=LONG_S)
        try:
            while not over.is_set():
                asked = {"worker": name, "limit": 1_000, "wait_s": 1}
                granted = _posted(connection, "lease", asked)["tasks"]
                if granted:
                    reports = [{"lease": one["lease"], "result": None} for one in granted]
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
        guard=Guard(address, ""),
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


def run(site: Site, by: str, amount: Amount, tell: Callable[[Minute], None]) -> list[Minute]:
    """The simulated minutes, each with its size at the end."""
    store, keys = site.store, keys_of(UNIVERSE)
    spec = Spec(NAME, retain_ns=int(amount.retain_s * S))
    new = [New(_NO_ARGUMENTS)] * amount.batch
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
            counts = store.read(counts_of, keys, spec.queue)
            return counts.waiting + counts.leased == 0

        for number in range(1, amount.minutes + 1):
            began = time.monotonic()
            for _ in range(60):
                for _ in range(batches):
                    store.transact(coordinator.submit, UNIVERSE, spec, new)
                until(done, "tasks are done")
                site.clock.advance(S)
            over_ns = store.now_ns()

            def forgotten(over_ns: int = over_ns) -> bool:
                # Time goes on meanwhile: roles that sleep wake up by it.
                site.clock.advance(TICK_NS)
                first_ns = store.read(look.next_retention_ns, UNIVERSE)
                gone = first_ns is None or first_ns > over_ns
                return gone and not store.read(checkpoint.due_in, UNIVERSE)

            until(forgotten, "tasks are forgotten, and the log has its checkpoint")
            kept = store.read(counts_of, keys, spec.queue).completed
            minutes.append(Minute(number, kept, *site.size(), time.monotonic() - began))
            tell(minutes[-1])
    return minutes


def ratios_of(minutes: Sequence[Minute], first: int) -> dict[str, float]:
    """The last minute to the first that counts."""
    at, last = minutes[first - 1], minutes[-1]
    return {
        "kept": last.kept / at.kept,
        "rows": last.rows / at.rows,
        "bytes": last.bytes / at.bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    amount = Amount(args.rate, args.minutes, args.retain_s, args.batch)
    print(_line(HEADER), flush=True)
    with new_directory(args.dir) as directory:
        site = PgSite(args.store) if args.store else LmdbSite(directory)
        with contextlib.closing(site):
            minutes = run(site, args.by, amount, lambda one: print(_line(_cells(one)), flush=True))
    ratios = ratios_of(minutes, amount.first)
    met = all(ratio <= BOUND for ratio in ratios.values())
    print("\n" + "\n".join(f"{name}: {value:.3f}" for name, value in ratios.items()))
    print(
        f"minute {minutes[-1].number} to minute {amount.first}: {'met' if met else 'MISSED'} (≤ {BOUND})"
    )
    if args.json:
        document = {"by": args.by, "minutes": [asdict(one) for one in minutes], **ratios}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0 if met else 1


# The arguments of a call without any, as tasks store them.
_NO_ARGUMENTS = b"\x92\x90\x80"


def _posted(connection: http.client.HTTPConnection, what: str, document: Any) -> Any:
    sent = {"Content-Type": "application/json"}
    connection.request("POST", f"/v1/tasks/{what}", json.dumps(document).encode(), sent)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{what}: {answer.status} {body[:200]!r}")
    return json.loads(body)


def _cells(one: Minute) -> tuple[str, ...]:
    return (
        str(one.number),
        f"{one.kept:,}",
        f"{one.rows:,}",
        f"{one.bytes / MB:,.1f}",
        f"{one.seconds:,.1f}",
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(10) for cell in cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench retention", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--by", choices=BY, default="worker", help="the role that is there (worker)"
    )
    parser.add_argument("--store", metavar="URL", help="a PostgreSQL database for it alone")
    parser.add_argument("--minutes", type=int, default=60, help="simulated minutes (60)")
    parser.add_argument("--rate", type=int, default=1_000, help="tasks per simulated second (1000)")
    parser.add_argument("--retain-s", type=float, default=60.0, help="kept after their end (60)")
    parser.add_argument("--batch", type=int, default=100, help="tasks that are submitted together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all minutes there")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="where its LMDB file lives"
    )
    args = parser.parse_args(argv)
    if args.minutes < FIRST:
        parser.error(f"{FIRST} minutes at least: later ones are compared with that one")
    return args


if __name__ == "__main__":
    sys.exit(main())
