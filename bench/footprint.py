"""`python -m bench footprint`: the space and the commits that a message, an effect and a task take in PostgreSQL.

    python -m bench footprint [--store postgresql://…] [--items 10000]

For each kind it prints the items per commit, the bytes of write-ahead log per item, the rows and bytes that
remain, the bytes on disk after the table is packed, and the maximum of connections per process. The store
must be empty and used by this command alone: it rewrites the table (VACUUM FULL), so that free space does
not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.peers import effect_turns
from bench.peers.holdfast_turn import spawn as spawn_worlds
from bench.peers.pg_place import UrlPlace, given_or_new_database
from bench.peers.task_holdfast import running
from bench.peers.task_turn import TaskTurn
from bench.peers.task_workload import TaskAmount
from bench.place import ROOT, new_directory

ITEMS = 10_000
CHAINS_S = 5.0
WORLDS = 100
BATCH = 1_000
WATCH_S = 0.05
HEADER = ("", "items", "a commit", "WAL B", "rows", "bytes", "on disk B", "connections")

_SEEN = """
    SELECT (SELECT coalesce(max(no), 0) FROM holdfast_commit),
           pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint
"""
_KEPT = """
    SELECT count(*), coalesce(sum(octet_length(key) + octet_length(value)), 0),
           pg_table_size('holdfast_row') + pg_indexes_size('holdfast_row') FROM holdfast_row
"""
_CONNECTIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'holdfast%'
"""


@dataclass(frozen=True)
class Footprint:
    """Figures per item, except `items` and `connections`."""

    name: str
    items: int
    in_a_commit: float
    wal_bytes: float
    rows: float
    bytes: float
    disk_bytes: float
    connections: int


@dataclass(frozen=True)
class Work:
    """The number of items, and the number of our processes."""

    items: int
    processes: int


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    footprints = []
    with given_or_new_database(args.store, args.dir) as url:
        print(_line(HEADER), flush=True)
        for name, body in BODIES.items():
            with new_directory(args.dir) as directory:
                footprints.append(measure(name, url, partial(body, url, directory, args.items)))
            print(_line(_cells(footprints[-1])), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps([asdict(footprint) for footprint in footprints], indent=1) + "\n", "utf-8"
        )
    return 0


def measure(name: str, url: str, body: Callable[[], Work]) -> Footprint:
    import psycopg

    # Create the tables before anything is counted.
    _create_tables(url)
    with psycopg.connect(url, autocommit=True) as connection:

        def query(statement: str) -> tuple[int, ...]:
            row = connection.execute(statement).fetchone()
            assert row is not None
            return tuple(int(value) for value in row)

        connection.execute("VACUUM FULL holdfast_row")
        kept, before_counts = query(_KEPT), query(_SEEN)
        with _sample_connections(url) as most:
            work = body()
        commit_no, wal = (
            after - before for after, before in zip(query(_SEEN), before_counts, strict=True)
        )
        connection.execute("VACUUM FULL holdfast_row")
        rows, size, disk = (
            after - before for after, before in zip(query(_KEPT), kept, strict=True)
        )
    n = work.items
    per_process = -(-most[0] // work.processes)
    return Footprint(
        name=name,
        items=n,
        in_a_commit=n / commit_no,
        wal_bytes=wal / n,
        rows=rows / n,
        bytes=size / n,
        disk_bytes=disk / n,
        connections=per_process,
    )


def _messages(url: str, _directory: Path, items: int) -> Work:
    with (
        spawn_worlds("client", path=url) as client,
        spawn_worlds("worker", path=url, name="worker-1", policy={}),
    ):
        names = client.ask("worlds", count=WORLDS)["names"]
        client.ask("batch", names=names, per_key=items // WORLDS, size=BATCH)
    return Work(items, processes=2)


def _effects(url: str, directory: Path, _items: int) -> Work:
    """Each effect with its request entry and its receipt entry."""
    with effect_turns.running(UrlPlace(directory, url=url), "one") as (client, _, _):
        names = client.ask("worlds", count=WORLDS)["names"]
        steps: int = client.ask("chains", names=names, seconds=CHAINS_S)["steps"]
    return Work(WORLDS + steps, processes=2)


def _tasks(url: str, directory: Path, items: int) -> Work:
    with running(UrlPlace(directory, url=url)) as tasks:
        turn = TaskTurn(tasks)
        turn.drain(TaskAmount(small=items))
    return Work(items, processes=2)


BODIES: dict[str, Callable[[str, Path, int], Work]] = {
    "message": _messages,
    "effect": _effects,
    "task": _tasks,
}


def _create_tables(url: str) -> None:
    from holdfast import store as stores

    stores.open(url).close()


@contextlib.contextmanager
def _sample_connections(url: str) -> Iterator[list[int]]:
    """The maximum of concurrent connections, sampled every WATCH_S seconds."""
    import psycopg

    most, ended = [0], threading.Event()

    def watch() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not ended.wait(WATCH_S):
                row = connection.execute(_CONNECTIONS).fetchone()
                assert row is not None
                most[0] = max(most[0], row[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def _cells(footprint: Footprint) -> tuple[str, ...]:
    return (
        footprint.name,
        f"{footprint.items:,}",
        f"{footprint.in_a_commit:,.1f}",
        f"{footprint.wal_bytes:,.0f}",
        f"{footprint.rows:.2f}",
        f"{footprint.bytes:,.0f}",
        f"{footprint.disk_bytes:,.0f}",
        str(footprint.connections),
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(11) for cell in cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench footprint",
        description="Bytes and commits per message, effect and task.",
    )
    parser.add_argument(
        "--store", metavar="URL", help="an empty database for this run (default: start a server)"
    )
    parser.add_argument(
        "--items", type=int, default=ITEMS, help="number of messages and of tasks (10000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    args = parser.parse_args(argv)
    if args.store and not args.store.startswith(("postgresql:", "postgres:")):
        parser.error("this command measures PostgreSQL: pass postgresql://…, or omit --store")
    return args


if __name__ == "__main__":
    sys.exit(main())
