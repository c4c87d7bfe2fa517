"""`holdfast up --http`: where it listens, whom it answers."""

from __future__ import annotations

import argparse
import contextlib
import os

from holdfast.app.runtime import Runtime
from holdfast.errors import Invalid
from holdfast.ops.http.guard import HOST, PORT, TOKEN_VARIABLE, Guard, address_of, token_of
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.tasks import TaskApi

DEFAULT = f"{HOST}:{PORT}"


def add_http(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        nargs="?",
        const=DEFAULT,
        help=f"answer HTTP there ({DEFAULT}): tasks for workers in any language, health, readiness",
    )
    parser.add_argument(
        "--http-token-file",
        metavar="FILE",
        help=f"whoever asks must have this token; else ${TOKEN_VARIABLE}. Needed beyond loopback",
    )
    parser.add_argument(
        "--http-name",
        metavar="NAME",
        action="append",
        default=[],
        help="a name by which this server is known, besides its own; repeat for more",
    )


def guard_of(args: argparse.Namespace) -> Guard | None:
    """Checked before anything is opened: a server that may not start, starts nothing."""
    if args.http is None:
        if args.http_token_file or args.http_name:
            raise Invalid(what="--http", why="options of it were given, but not --http")
        return None
    token = token_of(os.environ.get(TOKEN_VARIABLE), args.http_token_file)
    return Guard(address_of(args.http), token, args.http_name)


def serving(
    args: argparse.Namespace, runtime: Runtime, guard: Guard | None
) -> contextlib.AbstractContextManager[HttpServer | None]:
    """A server for as long as the context lasts; none if none is wanted."""
    if guard is None:
        return contextlib.nullcontext()
    return HttpServer(
        lambda server: TaskApi(server, runtime.store, runtime.universe, runtime.app.tasks),
        address=address_of(args.http),
        guard=guard,
    )
