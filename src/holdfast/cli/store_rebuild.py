"""`holdfast store rebuild`: derived rows of a universe again from their logs; nothing may run on the store."""

from __future__ import annotations

import argparse

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, printable, waiting
from holdfast.cli.target import add_options, url_of
from holdfast.ops.rebuild import rebuild

HELP = "build derived rows again from their logs; nothing may run on it"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--universe", metavar="U", required=True, help="whose rows")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    with waiting("waiting until nobody has the store open"):
        done = rebuild(url_of(args), args.universe, dry_run=args.dry_run)
    document = {
        "universe": args.universe,
        "dry_run": args.dry_run,
        "differences": [one._asdict() for one in done.differences],
        "rows": done.rows,
        "written": done.written,
    }
    lines = [
        printable(f"{one.kind} {one.where}: {one.what}: {one.found}, expected {one.expected}")
        for one in done.differences
    ]
    if not done.differences:
        lines.append("every row is what its log says; nothing was written")
    elif done.written:
        lines.append(f"{done.rows:,} rows were written; every row is what its log says")
    else:
        lines.append(f"{done.rows:,} rows would be written, and nothing was")
    emit(args, document, "\n".join(lines))
    return EXIT_OK
