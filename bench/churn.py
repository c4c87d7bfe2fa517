"""`python -m bench churn`: whether a store gets slower with its history or with its backlog.

    python -m bench churn [--store postgresql://…] [--minutes 30] [--what queue|tasks]

The benchmark keeps a backlog constant: it puts as many items as are done. It runs a few minutes with a
short backlog, then with a long one in the same store. Each minute gives a line: the rate, dead rows, the
sizes of the tables and their indexes, the count of autovacuum runs, and the load of the machine, which
shows whether other processes used it. At the end come two ratios: the last minute to the first, and the
long backlog to the short one. Both should be close to one.

Without `--store` it starts a separate PostgreSQL server with the default autovacuum settings.
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
from bench.peers.pg_place import given_or_new_database
from bench.place import ROOT, new_directory

MINUTES = 30.0
SHORT_MINUTES = 3.0
BACKLOGS = (1_000, 1_000_000)
MINUTE_S = 60.0
# Not timed: caches fill, connections open, and the server finishes the work of filling the backlog.
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
    """Statistics of PostgreSQL about our tables. Row counts are its estimates."""

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
    with given_or_new_database(args.store, args.dir) as url, new_directory(args.dir) as directory:
        print(_line(HEADER), flush=True)
        with KINDS[args.what](url, directory) as churn:
            for backlog in args.backlogs:
                churn.fill(backlog)
                churn.run(backlog, WARM_S)
                # Whole minutes, and the rest of the last one. The rest has at least a second.
                last = backlog == max(args.backlogs)
                for minute in _minutes(url, churn, backlog, args.minutes if last else args.short):
                    minutes.append(minute)
                    print(_line(_cells(minute)), flush=True)
    ratios = ratios_of(minutes)
    print("\n" + "\n".join(f"{name}: {value:.2f}" for name, value in ratios.items()))
    if args.json:
        document = {"what": args.what, "minutes": [asdict(item) for item in minutes], **ratios}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


def ratios_of(minutes: Sequence[Minute]) -> dict[str, float]:
    """The last minute of each backlog to its first, and the long backlog to the short one."""
    by_backlog: dict[int, list[Minute]] = {}
    for minute in minutes:
        by_backlog.setdefault(minute.backlog, []).append(minute)
    ratios = {
        f"last minute / first, backlog {backlog:,}": of_backlog[-1].rate / of_backlog[0].rate
        for backlog, of_backlog in by_backlog.items()
    }
    if len(by_backlog) > 1:
        short, long = min(by_backlog), max(by_backlog)
        rates = {at: _mean([minute.rate for minute in by_backlog[at]]) for at in (short, long)}
        ratios[f"backlog {long:,} / {short:,}"] = rates[long] / rates[short]
    return ratios


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


def _cells(minute: Minute) -> tuple[str, ...]:
    tables = minute.tables
    return (
        f"{minute.backlog:,}",
        str(minute.number),
        f"{minute.rate:,.0f}",
        f"{tables.dead:,}",
        f"{tables.table_bytes / MB:,.1f}",
        f"{tables.index_bytes / MB:,.1f}",
        str(tables.vacuums),
        f"{minute.wal_bytes_per_item:,.0f}",
        f"{minute.load:.1f}",
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
        "--store", metavar="URL", help="an empty database for this run (default: start a server)"
    )
    parser.add_argument("--what", choices=KINDS, default="tasks", help="kind of load (tasks)")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="minutes with the longest backlog (30)"
    )
    parser.add_argument(
        "--short", type=float, default=SHORT_MINUTES, help="minutes with each shorter backlog (3)"
    )
    parser.add_argument(
        "--backlogs",
        type=_numbers,
        default=list(BACKLOGS),
        metavar="N,…",
        help="backlog lengths (1000,1000000)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all minutes to FILE")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    args = parser.parse_args(argv)
    if args.store and not args.store.startswith(("postgresql:", "postgres:")):
        parser.error("this command measures PostgreSQL: pass postgresql://…, or omit --store")
    return args


def _numbers(text: str) -> list[int]:
    return sorted(int(part.replace("_", "")) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
