"""`module:app` on the command line. One that cannot be found is wrong usage: exit code 2."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from holdfast.cli import EXIT_USAGE
from holdfast.ops.application import NoApp

Run = Callable[[argparse.Namespace], int]


def add_app_option(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--app", metavar="MODULE:APP", help=help)


def app_is_usage(run: Run) -> Run:
    """A command whose application may be named wrongly."""

    @functools.wraps(run)
    def refusing(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except NoApp as error:
            print("holdfast: " + " ".join(str(error).split()), file=sys.stderr)
            return EXIT_USAGE

    return refusing
