"""The HTTP options of `holdfast up`: listen address, token and host names."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import TYPE_CHECKING

from holdfast.adapters.errors import NotInstalled
from holdfast.app.runtime import Runtime
from holdfast.errors import Invalid
from holdfast.ops.http.auth import (
    HOST,
    PORT,
    TOKEN_VARIABLE,
    RequestGuard,
    parse_address,
    read_token,
)

if TYPE_CHECKING:
    from holdfast.ops.http.server import HttpServer

DEFAULT = f"{HOST}:{PORT}"


def add_http(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        nargs="?",
        const=DEFAULT,
        help="serve the HTTP API (tasks for workers in any language, health, readiness) on this "
        f"address (default {DEFAULT})",
    )
    parser.add_argument(
        "--http-token-file",
        metavar="FILE",
        help=f"file with the token that HTTP clients must send (default: ${TOKEN_VARIABLE}); a token "
        "is required unless the address is loopback",
    )
    parser.add_argument(
        "--http-name",
        metavar="NAME",
        action="append",
        default=[],
        help="accept this host name in the Host header, too; repeatable",
    )


def build_guard(args: argparse.Namespace) -> RequestGuard | None:
    """Validate the HTTP options before the store is opened and roles start; None without --http."""
    if args.http is None:
        if args.http_token_file or args.http_name:
            raise Invalid(what="--http", why="HTTP options need --http")
        return None
    _require_extra()
    token = read_token(os.environ.get(TOKEN_VARIABLE), args.http_token_file)
    return RequestGuard(parse_address(args.http), token, args.http_name)


def http_server(
    args: argparse.Namespace, runtime: Runtime, guard: RequestGuard | None
) -> contextlib.AbstractContextManager[HttpServer | None]:
    """Return a context that runs the HTTP server; without --http it does nothing."""
    if guard is None:
        return contextlib.nullcontext()
    from holdfast.ops.http.server import HttpServer
    from holdfast.ops.http.task_routes import TaskApi
    from holdfast.ops.metrics.exposition import MetricsPage
    from holdfast.ops.metrics.runner_metrics import runner_readings

    metrics = MetricsPage(
        runtime.store, worker=runtime.worker, runners=lambda: runner_readings(runtime.roles)
    )
    return HttpServer(
        lambda server: TaskApi(server, runtime.store, runtime.universe, runtime.app.tasks, metrics),
        address=parse_address(args.http),
        guard=guard,
    )


def _require_extra() -> None:
    try:
        import holdfast.ops.http.server  # noqa: F401
    except ImportError as error:
        raise NotInstalled(what="--http", why=str(error)) from None
