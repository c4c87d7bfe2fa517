"""`holdfast store rebuild`: rebuilds the derived rows of a universe from their logs. Needs exclusive access."""

from __future__ import annotations

import argparse

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, printable, waiting
from holdfast.cli.store_option import add_options, url_of
from holdfast.ops.rebuild import rebuild

HELP = "rebuild derived rows from their logs; no process may use the store"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the differences and write nothing"
    )
    add_options(parser, universe="the universe to rebuild", universe_required=True)


def run(args: argparse.Namespace) -> int:
    with waiting("waiting until no process has the store open"):
        done = rebuild(url_of(args), args.universe, dry_run=args.dry_run)
    document = {
        "universe": args.universe,
        "dry_run": args.dry_run,
        "differences": [difference.document() for difference in done.differences],
        "rows": done.rows,
        "written": done.written,
    }
    line = "{kind} {where}: {what}: {found}, expected {expected}"
    lines = [printable(line.format(**difference.document())) for difference in done.differences]
    if not done.rows:
        lines.append("all rows match their logs; nothing was written")
    elif done.written:
        lines.append(f"{done.rows:,} rows were written; all rows match their logs")
    else:
        lines.append(f"{done.rows:,} rows would be written (dry run)")
    emit(args, document, "\n".join(lines))
    return EXIT_OK
