"""The application argument `module:app`. An application that cannot be loaded is a usage error: exit code 2."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from holdfast.cli import EXIT_USAGE
from holdfast.ops.app_loader import NoApp

CommandFunction = Callable[[argparse.Namespace], int]


def add_app_option(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--app", metavar="MODULE:APP", help=help)


def app_errors_are_usage(run: CommandFunction) -> CommandFunction:
    """Decorate a command so that NoApp becomes a usage error."""

    @functools.wraps(run)
    def refusing(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except NoApp as error:
            print("holdfast: " + " ".join(str(error).split()), file=sys.stderr)
            return EXIT_USAGE

    return refusing
