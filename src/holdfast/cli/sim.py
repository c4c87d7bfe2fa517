"""`holdfast sim`: the fault simulator.

    holdfast sim --app MODULE:APP --seeds 100    random events to the worlds of an application
    holdfast sim --app MODULE:APP --seed 17      one seed; print its actions
    holdfast sim …                               Holdfast itself, by `tests/simulation` of the checkout

With `--app` the exit code is 0 if every seed holds, 1 if a seed fails, 2 if the application cannot be loaded or
an event of it cannot be generated. A wheel has no `tests/simulation`: it needs `--app`.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from holdfast.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from holdfast.cli.checkout import import_from_checkout

SEEDS_DEFAULT = 100
VIOLATION_CHARS_MAX = 300
NEEDS_CHECKOUT = (
    "no_checkout: the simulation of Holdfast itself is not in the wheel (simulate an application with "
    "--app MODULE:APP, or git clone the repository and run `holdfast sim` in it)"
)
# Options that apply with --app.
APP_OPTIONS = frozenset({"app", "seeds", "seed", "start"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--app",
        metavar="MODULE:APP",
        help=f"simulate this application (with --seeds N, default {SEEDS_DEFAULT}, --seed K, --start K)",
    )
    # With --app the package `tests` of the checkout must not hide that of the application.
    for_app = any(word.partition("=")[0] == "--app" for word in sys.argv)
    oracle = None if for_app else import_from_checkout("tests.simulation", "command")
    if oracle is not None:
        oracle.configure(parser)
    else:
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--seeds", type=int, metavar="N", help="number of seeds")
        which.add_argument(
            "--seed", type=int, metavar="K", help="run one seed and print its actions"
        )
        parser.add_argument(
            "--start", type=int, default=0, metavar="K", help="first seed (default 0)"
        )
    parser.set_defaults(option_defaults=vars(parser.parse_args([])))


def run(args: argparse.Namespace) -> int:
    if args.app is not None:
        return _run_app(args)
    oracle = import_from_checkout("tests.simulation", "command")
    if oracle is None:
        return _print_usage_error(NEEDS_CHECKOUT)
    code: int = oracle.run(args)
    return code


def _run_app(args: argparse.Namespace) -> int:
    from holdfast.ops.app_loader import NoApp, load_app
    from holdfast.sim import app_run
    from holdfast.sim.value_generator import Ungenerable

    for name, default in args.option_defaults.items():
        if name not in APP_OPTIONS and getattr(args, name) != default:
            return _print_usage_error(f"usage: --{name} does not apply with --app")
    try:
        app = load_app(args.app)
        app_run.check_generable(app)
        if args.seed is not None:
            result = app_run.run_app(app, args.seed, print)
            print(f"seed {args.seed}: {result.violation or 'no violation'}")
            return EXIT_FAILED if result.violation else EXIT_OK
        count = SEEDS_DEFAULT if args.seeds is None else args.seeds
        failed = events = crashes = 0
        for seed in range(args.start, args.start + count):
            _show_progress(f"{seed - args.start} of {count} seeds, {failed} failed")
            result = app_run.run_app(app, seed)
            events, crashes = events + result.events, crashes + result.crashes
            if result.violation:
                failed += 1
                _show_progress("")
                print(_failure_line(args.app, seed, result.violation), flush=True)
    except (NoApp, Ungenerable) as error:
        return _print_usage_error(str(error))
    _show_progress("")
    if failed:
        return EXIT_FAILED
    print(
        f"{count} seeds from {args.start} of {args.app}: {events} events, {crashes} faults, 0 failed"
    )
    return EXIT_OK


def _failure_line(app: str, seed: int, violation: str) -> str:
    text = " ".join(violation.split())
    if len(text) > VIOLATION_CHARS_MAX:
        text = text[: VIOLATION_CHARS_MAX - 1] + "…"
    return f"seed {seed}: {text}    again: holdfast sim --app {shlex.quote(app)} --seed {seed}"


def _print_usage_error(text: str) -> int:
    print("holdfast: " + " ".join(text.split()), file=sys.stderr)
    return EXIT_USAGE


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
