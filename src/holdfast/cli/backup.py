"""`holdfast backup DEST`: makes a consistent copy of a store while it is in use."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.output import bytes_text, emit, waiting
from holdfast.cli.store_option import UNIVERSE_OF_STORE, add_options, open_existing
from holdfast.clock import MS, SYSTEM


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dest", metavar="DEST", help="target directory; it must be empty or not exist"
    )
    add_options(parser, universe=UNIVERSE_OF_STORE)


def run(args: argparse.Namespace) -> int:
    target = Path(args.dest)
    with open_existing(args) as store:
        began_ns = SYSTEM.mono_ns()
        with waiting("copying"):
            store.backup(str(target))
        took_ms = (SYSTEM.mono_ns() - began_ns) // MS
        size = sum(file.stat().st_size for file in target.iterdir())
        document = {
            "store": store.url,
            "backup": str(target),
            "generation": store.generation,
            "bytes": size,
            "took_ms": took_ms,
        }
        emit(
            args,
            document,
            f"copied {store.url} (generation {store.generation}) to {target}: "
            f"{bytes_text(size)} in {took_ms} ms\n"
            f"restore it with: holdfast restore {target} --store URL",
        )
    return 0
