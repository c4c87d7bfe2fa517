"""`holdfast demo`: run `examples/demo` of the checkout. A wheel does not contain the demo."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli import EXIT_USAGE
from holdfast.cli.checkout import import_from_checkout

NEEDS_CHECKOUT = (
    "holdfast: no_checkout: the demo is not in the wheel "
    "(git clone the repository, then run `make demo` in it)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", metavar="DIR", help="directory without a store (default: a temporary directory)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the outcome as JSON on stdout and the log on stderr",
    )


def run(args: argparse.Namespace) -> int:
    command = import_from_checkout("examples.demo", "command")
    if command is None:
        print(NEEDS_CHECKOUT, file=sys.stderr)
        return EXIT_USAGE
    code: int = command.run(args)
    return code
