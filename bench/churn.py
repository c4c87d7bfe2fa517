"""`python -m bench churn`: does a store get slower by what has passed through it, or by what waits?

    python -m bench churn [--store postgresql://…] [--minutes 30] [--what queue|tasks]

A backlog is kept up while as much is put as is done: a short one for a few minutes, then a long one in
the same store. Each minute gives a line: the rate, dead rows, the sizes of the tables and their
indexes, how often autovacuum has run, and the machine's load, which tells whether others used it. At
the end come two ratios: the last minute to the first, and the long backlog to the short one. Neither
should be far from one.

Without `--store` it starts a PostgreSQL of its own, with autovacuum as it is by default.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.churn_load import KINDS, Churn
from bench.peers.pg_place import somewhere
from bench.place import ROOT, new_directory

MINUTES = 30.0
SHORT_MINUTES = 3.0
BACKLOGS = (1_000, 1_000_000)
MINUTE_S = 60.0
# Not timed: caches fill, connections open, and what filling the backlog left to do goes on.
WARM_S = 5.0
MB = 1e6
HEADER = (
    "backlog",
    "minute",
    "rate/s",
    "dead rows",
    "table MB",
    "index MB",
    "vacuums",
    "WAL B/item",
    "load",
)

_TABLES = """
    SELECT sum(n_dead_tup)::bigint, sum(n_live_tup)::bigint, sum(pg_table_size(relid))::bigint,
           sum(pg_indexes_size(relid))::bigint, sum(autovacuum_count)::bigint,
           pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint
    FROM pg_stat_user_tables WHERE relname LIKE 'holdfast%'
"""


@dataclass(frozen=True)
class Tables:
    """What PostgreSQL says of our tables. Counts of rows are its estimates."""

    dead: int
    live: int
    table_bytes: int
    index_bytes: int
    vacuums: int
    wal_bytes: int


@dataclass(frozen=True)
class Minute:
    backlog: int
    number: int
    rate: float
    wal_bytes_per_item: float
    tables: Tables
    load: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    minutes: list[Minute] = []
    with somewhere(args.store, args.dir) as url, new_directory(args.dir) as directory:
        print(_line(HEADER), flush=True)
        with KINDS[args.what](url, directory) as churn:
            for backlog in args.backlogs:
                churn.fill(backlog)
                churn.run(backlog, WARM_S)
                # Whole minutes, and what is left of the last; a second of it is the least.
                last = backlog == max(args.backlogs)
                for found in _minutes(url, churn, backlog, args.minutes if last else args.short):
                    minutes.append(found)
                    print(_line(_cells(found)), flush=True)
    ratios = ratios_of(minutes)
    print("\n" + "\n".join(f"{name}: {value:.2f}" for name, value in ratios.items()))
    if args.json:
        document = {"what": args.what, "minutes": [asdict(one) for one in minutes], **ratios}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


def ratios_of(minutes: Sequence[Minute]) -> dict[str, float]:
    """The last minute of each backlog to its first; and of the long backlog to the short one."""
    by_backlog: dict[int, list[Minute]] = {}
    for one in minutes:
        by_backlog.setdefault(one.backlog, []).append(one)
    found = {
        f"last minute / first, backlog {backlog:,}": some[-1].rate / some[0].rate
        for backlog, some in by_backlog.items()
    }
    if len(by_backlog) > 1:
        short, long = min(by_backlog), max(by_backlog)
        rates = {at: _mean([one.rate for one in by_backlog[at]]) for at in (short, long)}
        found[f"backlog {long:,} / {short:,}"] = rates[long] / rates[short]
    return found


def tables_of(url: str) -> Tables:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(_TABLES).fetchone()
    assert row is not None
    return Tables(*(int(value or 0) for value in row))


def _minutes(url: str, churn: Churn, backlog: int, minutes: float) -> Iterator[Minute]:
    ends = time.monotonic() + minutes * MINUTE_S
    number = 0
    while number == 0 or time.monotonic() < ends - 1.0:
        number += 1
        before = tables_of(url)
        rated = churn.run(backlog, min(MINUTE_S, max(ends - time.monotonic(), 1.0)))
        after = tables_of(url)
        per_item = (after.wal_bytes - before.wal_bytes) / max(rated.count, 1)
        rate = rated.count / rated.seconds
        yield Minute(backlog, number, rate, per_item, after, os.getloadavg()[0])


def _cells(one: Minute) -> tuple[str, ...]:
    tables = one.tables
    return (
        f"{one.backlog:,}",
        str(one.number),
        f"{one.rate:,.0f}",
        f"{tables.dead:,}",
        f"{tables.table_bytes / MB:,.1f}",
        f"{tables.index_bytes / MB:,.1f}",
        str(tables.vacuums),
        f"{one.wal_bytes_per_item:,.0f}",
        f"{one.load:.1f}",
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(10) for cell in cells)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench churn", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--store", metavar="URL", help="a database for it alone; else its own server"
    )
    parser.add_argument(
        "--what", choices=KINDS, default="tasks", help="what passes through (tasks)"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="with the longest backlog (30)"
    )
    parser.add_argument(
        "--short", type=float, default=SHORT_MINUTES, help="minutes with each of the others (3)"
    )
    parser.add_argument(
        "--backlogs", type=_numbers, default=list(BACKLOGS), metavar="N,…", help="1000,1000000"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all minutes there")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="where its own server lives"
    )
    args = parser.parse_args(argv)
    if args.store and not args.store.startswith(("postgresql:", "postgres:")):
        parser.error("it looks into PostgreSQL: give postgresql://…, or nothing")
    return args


def _numbers(text: str) -> list[int]:
    return sorted(int(part.replace("_", "")) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
