"""`holdfast tokens hash NAME SCOPES`: prints the line of a token for `--http-token-file`. The token is on stdin."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli import EXIT_OK
from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.tokens import TOKEN_CHARS_MAX, parse_scopes, token_line


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    hashed = actions.add_parser(
        "hash", help="read a token from stdin and print its line for the token file"
    )
    hashed.add_argument("name", metavar="NAME", help="name of the client in the audit log")
    hashed.add_argument(
        "scopes",
        metavar="SCOPES",
        help=f"what the client may do: {', '.join(Scope)}; several with commas; operate implies read",
    )


def run(args: argparse.Namespace) -> int:
    text = sys.stdin.readline(TOKEN_CHARS_MAX + 2).strip()
    print(token_line(args.name, parse_scopes(args.scopes), text))
    return EXIT_OK
