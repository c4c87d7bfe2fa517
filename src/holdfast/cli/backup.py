"""`holdfast backup DEST`: a consistent copy, taken while others go on."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.output import bytes_text, emit, waiting
from holdfast.cli.target import add_options, existing
from holdfast.clock import MS, SYSTEM


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dest", metavar="DEST", help="a directory that does not exist, or is empty")
    add_options(parser, universe=True)


def run(args: argparse.Namespace) -> int:
    target = Path(args.dest)
    with existing(args) as store:
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
            f"bring it back with: holdfast restore {target} --store URL",
        )
    return 0
