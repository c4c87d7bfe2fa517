"""`holdfast serve --store URL`: serves the HTTP API of a store, without any role.

- It prints `ready URL` when it accepts requests. SIGTERM and SIGINT stop it: running requests end, the exit code is 0.
- `--app` gives it the code of an application, for requests that need it. Without it they get 409 `needs_app`.
- It serves all universes of the store. A request names one with `?universe=`, unless there is only one.
"""

from __future__ import annotations

import argparse
import json
import signal

from holdfast.app.app import App
from holdfast.cli import EXIT_OK
from holdfast.cli.app_argument import app_errors_are_usage
from holdfast.cli.http import DEFAULT, add_http, build_guard, http_server, state_processes
from holdfast.cli.process_log import SpaceWatch, add_log, configure_log
from holdfast.cli.redaction import redactor_of, warn_unknown_types
from holdfast.cli.stop_signal import StopSignal
from holdfast.cli.store_option import add_options, check_store, open_existing
from holdfast.errors import Invalid
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.app_loader import load_app

WATCH_S = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--app",
        metavar="MODULE:APP",
        action="append",
        default=[],
        help="load this application, for requests that need its code; repeatable",
    )
    parser.add_argument(
        "--universe",
        metavar="U",
        help="the universe of requests that name none (default: that of the only --app, or the only one "
        "of the store)",
    )
    add_http(parser)
    add_log(parser)
    parser.set_defaults(http=DEFAULT)
    add_options(parser)


@app_errors_are_usage
def run(args: argparse.Namespace) -> int:
    configure_log(args)
    guard = build_guard(args)
    redactor = redactor_of(args)
    apps, sources = _load_apps(args.app)
    warn_unknown_types(redactor, apps.values())
    if args.universe is None and len(apps) == 1:
        args.universe = next(iter(apps))
    stop_signal = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_signal.set())
    with open_existing(args) as store:
        states = state_processes(store, sources)
        universes = UniverseChoice(
            store, apps, default=args.universe or "", states=states, redactor=redactor
        )
        with http_server(args, store, universes, guard) as http:
            assert http is not None
            space = SpaceWatch(store)
            _print_ready(args, http.url)
            while not stop_signal.wait(WATCH_S):
                if http.failure is not None:
                    raise http.failure
                check_store(store)
                space.check()
    return EXIT_OK


def _load_apps(names: list[str]) -> tuple[dict[str, App], dict[str, str]]:
    """Return the applications and their import paths, by universe."""
    apps: dict[str, App] = {}
    sources: dict[str, str] = {}
    for name in names:
        app = load_app(name)
        if app.universe in apps:
            raise Invalid(
                what="--app", universe=app.universe, why="two applications of one universe"
            )
        apps[app.universe], sources[app.universe] = app, name
    return apps, sources


def _print_ready(args: argparse.Namespace, url: str) -> None:
    print(json.dumps({"ready": True, "http": url}) if args.json else f"ready {url}", flush=True)
