"""`python -m bench retention`: whether tasks are removed as fast as they complete.

    python -m bench retention [--by worker|http] [--store postgresql://…] [--minutes 60] [--rate 1000]
                              [--retain-s 60] [--batch 100]

The command moves the store time, a second for every `--rate` completed tasks. Rows, files and the
server are real. Each simulated minute gives a line: retained tasks, rows, bytes, and the seconds that the
minute took. At the end come the ratios of the last minute to the tenth. Without a leak they are near one.

`worker` is a task worker in this process. `http` is a server in this process with HTTP clients as its only
workers. Without `--store` the store is a new LMDB file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.place import ROOT, new_directory
from tests.workers.retention_load import BY, FIRST, LmdbSite, Minute, PgSite, RetentionAmount, run

# The maximum ratio of the last minute to the reference minute.
BOUND = 1.1
MB = 1e6
HEADER = ("minute", "tasks kept", "rows", "MB", "seconds")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    amount = RetentionAmount(args.rate, args.minutes, args.retain_s, args.batch)
    print(_line(HEADER), flush=True)
    with new_directory(args.dir) as directory:
        site = PgSite(args.store) if args.store else LmdbSite(directory)
        with contextlib.closing(site):
            minutes = run(
                site, args.by, amount, lambda minute: print(_line(_cells(minute)), flush=True)
            )
    ratios = ratios_of(minutes, amount.first)
    met = all(ratio <= BOUND for ratio in ratios.values())
    print("\n" + "\n".join(f"{name}: {value:.3f}" for name, value in ratios.items()))
    print(
        f"minute {minutes[-1].number} to minute {amount.first}: {'met' if met else 'MISSED'} (≤ {BOUND})"
    )
    if args.json:
        document = {"by": args.by, "minutes": [asdict(minute) for minute in minutes], **ratios}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0 if met else 1


def ratios_of(minutes: Sequence[Minute], first: int) -> dict[str, float]:
    """The ratios of the last minute to the reference minute."""
    at, last = minutes[first - 1], minutes[-1]
    return {
        "kept": last.kept / at.kept,
        "rows": last.rows / at.rows,
        "bytes": last.bytes / at.bytes,
    }


def _cells(minute: Minute) -> tuple[str, ...]:
    return (
        str(minute.number),
        f"{minute.kept:,}",
        f"{minute.rows:,}",
        f"{minute.bytes / MB:,.1f}",
        f"{minute.seconds:,.1f}",
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(10) for cell in cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench retention", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--by", choices=BY, default="worker", help="the role that runs (worker)")
    parser.add_argument("--store", metavar="URL", help="an empty PostgreSQL database for this run")
    parser.add_argument("--minutes", type=int, default=60, help="simulated minutes (60)")
    parser.add_argument("--rate", type=int, default=1_000, help="tasks per simulated second (1000)")
    parser.add_argument(
        "--retain-s", type=float, default=60.0, help="retention of completed tasks in seconds (60)"
    )
    parser.add_argument("--batch", type=int, default=100, help="tasks per submission")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all minutes to FILE")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    args = parser.parse_args(argv)
    if args.minutes < FIRST:
        parser.error(f"at least {FIRST} minutes: minute {FIRST} is the reference")
    return args


if __name__ == "__main__":
    sys.exit(main())
