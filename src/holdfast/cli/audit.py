"""`holdfast audit`: the actions of operators, newest first."""

from __future__ import annotations

import argparse

import msgspec

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, printable, table, time_text
from holdfast.cli.store_option import EVERY_UNIVERSE, add_options, open_existing
from holdfast.config import BATCH_MAX
from holdfast.errors import Invalid
from holdfast.ops import audit, catalog_queries

LIMIT = 100
LIMIT_MAX = BATCH_MAX


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIMIT,
        help=f"print at most N entries of each universe (default {LIMIT})",
    )
    add_options(parser, universe=EVERY_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.limit <= LIMIT_MAX:
        raise Invalid(what="--limit", found=args.limit, min=1, max=LIMIT_MAX)
    with open_existing(args) as store:
        names = [args.universe] if args.universe else store.read(catalog_queries.universes)
        found = [
            (name, *row)
            for name in names
            for row in store.read(audit.list_entries, name, None, args.limit)
        ]
    found.sort(key=lambda item: -item[2].at_ns)
    several = len({name for name, *_ in found}) > 1
    cells = [
        [
            time_text(entry.at_ns),
            *[name] * several,
            entry.actor,
            entry.action,
            printable(entry.subject),
            printable(entry.detail),
        ]
        for name, _, entry in found
    ]
    header = ["time", *["universe"] * several, "actor", "action", "subject", "detail"]
    documents = [
        {"universe": name, "number": number, **msgspec.structs.asdict(entry)}
        for name, number, entry in found
    ]
    emit(args, {"entries": documents}, table(header, cells) if found else "no entries")
    return EXIT_OK
