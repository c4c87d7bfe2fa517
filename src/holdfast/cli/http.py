"""The HTTP options of `holdfast up` and `holdfast serve`: listen address, tokens, certificate and host names."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.adapters.errors import NotInstalled
from holdfast.app.runtime import Runtime
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import (
    HOST,
    PORT,
    TOKEN_VARIABLE,
    RequestGuard,
    parse_address,
)
from holdfast.ops.http.request_rate import RequestRate
from holdfast.ops.http.tls import CertificateFiles
from holdfast.ops.http.tokens import TokenFile
from holdfast.ops.state_process import StateProcess
from holdfast.store.api import Store, connection_url

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
        help="file with a token, or with lines NAME SCOPES sha256:HEX of `holdfast tokens hash` "
        f"(default: ${TOKEN_VARIABLE}); a token is required unless the address is loopback; a changed "
        "file applies without a restart",
    )
    parser.add_argument(
        "--http-cert",
        metavar="FILE",
        help="serve TLS with this certificate chain (PEM); a renewed file applies without a restart",
    )
    parser.add_argument(
        "--http-key",
        metavar="FILE",
        help="private key of the certificate (PEM; default: in the file of the certificate)",
    )
    parser.add_argument(
        "--http-rate",
        metavar="N",
        type=float,
        default=0.0,
        help="answer 429 above N requests a second of one token (default: no limit)",
    )
    parser.add_argument(
        "--http-name",
        metavar="NAME",
        action="append",
        default=[],
        help="accept this host name in the Host header, too; repeatable",
    )
    parser.add_argument(
        "--http-trace-url",
        metavar="URL",
        default="",
        help="link tasks and flows in the console to their traces: a URL with {trace_id} in it",
    )


def build_tls(args: argparse.Namespace) -> CertificateFiles | None:
    if args.http_cert is None:
        if args.http_key is not None:
            raise Invalid(what="--http-key", why="it needs --http-cert")
        return None
    return CertificateFiles(args.http_cert, args.http_key)


def build_guard(args: argparse.Namespace) -> RequestGuard | None:
    """Validate the HTTP options before the store is opened and roles start; None without --http."""
    if args.http is None:
        if (
            args.http_token_file
            or args.http_name
            or args.http_cert
            or args.http_key
            or args.http_trace_url
        ):
            raise Invalid(what="--http", why="HTTP options need --http")
        return None
    _require_extra()
    _check_trace_url(args.http_trace_url)
    tokens = (
        TokenFile(args.http_token_file)
        if args.http_token_file is not None
        else os.environ.get(TOKEN_VARIABLE, "")
    )
    return RequestGuard(parse_address(args.http), tokens, args.http_name)


def http_server(
    args: argparse.Namespace,
    store: Store,
    universes: UniverseChoice,
    guard: RequestGuard | None,
    runtime: Runtime | None = None,
) -> contextlib.AbstractContextManager[HttpServer | None]:
    """Return a context that runs the HTTP server; without --http it does nothing. `/metrics` shows the roles of
    `runtime`. A server without roles has a random name there."""
    if guard is None:
        return contextlib.nullcontext()
    from holdfast.ops.http.served_api import ServedApi
    from holdfast.ops.http.server import HttpServer
    from holdfast.ops.metrics.exposition import MetricsPage
    from holdfast.ops.metrics.runner_metrics import runner_readings

    worker = f"server-{SYSTEM.entropy(4).hex()}" if runtime is None else runtime.worker
    roles = () if runtime is None else runtime.roles

    def serve_api(server: HttpServer) -> ServedApi:
        metrics = MetricsPage(
            store,
            worker=worker,
            runners=lambda: runner_readings(roles),
            roles=roles,
            responses=server.responses,
        )
        return ServedApi(server, store, universes, metrics=metrics, trace_url=args.http_trace_url)

    return HttpServer(
        serve_api,
        address=parse_address(args.http),
        guard=guard,
        tls=build_tls(args),
        rate=RequestRate(args.http_rate),
    )


def state_processes(store: Store, sources: Mapping[str, str]) -> dict[str, StateProcess]:
    """Return the process that computes states, of each universe. `sources` has the import paths of the applications."""
    url = connection_url(store)
    return {universe: StateProcess(url, source) for universe, source in sources.items()}


def _check_trace_url(url: str) -> None:
    if url and not (url.startswith(("https://", "http://")) and "{trace_id}" in url):
        expected = "a http or https URL with {trace_id}"
        raise Invalid(what="--http-trace-url", found=url[:64], expected=expected)


def _require_extra() -> None:
    try:
        import holdfast.ops.http.server  # noqa: F401
    except ImportError as error:
        raise NotInstalled(what="--http", why=str(error)) from None
