"""The command line: `holdfast COMMAND …`.

- Commands that use a store take `--store URL` (default `HOLDFAST_STORE`, then `./data`). With `--json`,
  stdout has exactly one JSON document.
- An error is one line on stderr, `holdfast: <code>: … (<hint>)`, with exit code 1. Wrong usage exits with
  2, Ctrl-C with 130. A traceback is printed only if `HOLDFAST_DEBUG` is set.
- A command is a module with `configure(parser)` and `run(args) -> int`. Only the selected command is
  imported, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from holdfast import __version__
from holdfast.cli.redaction import hide_quotes
from holdfast.errors import HoldfastError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "up": Command("holdfast.cli.up", "run an application until SIGTERM or Ctrl-C"),
    "dev": Command(
        "holdfast.cli.dev",
        "run an application; restart it when its files change",
    ),
    "serve": Command("holdfast.cli.serve", "serve the HTTP API of a store, without any role"),
    "worlds": Command(
        "holdfast.cli.worlds", "worlds: list, show, state, send, fork, pause, purge, …"
    ),
    "workers": Command("holdfast.cli.workers", "workers: list, drain, undrain"),
    "authority": Command(
        "holdfast.cli.authority", "the leader lease: show, force-release, mark-stale"
    ),
    "tokens": Command("holdfast.cli.tokens", "tokens of HTTP clients: hash"),
    "audit": Command("holdfast.cli.audit", "actions of operators, newest first"),
    "ready": Command("holdfast.cli.ready", "check readiness and list the blockers"),
    "limits": Command("holdfast.cli.limits", "limits of waiting work: show, set"),
    "why": Command("holdfast.cli.why", "show why a subject does not move, and what to do about it"),
    "doctor": Command(
        "holdfast.cli.doctor", "print a report for a bug tracker, without secrets and payloads"
    ),
    "verify": Command("holdfast.cli.verify", "verify stored data; with --app also replay it"),
    "demo": Command("holdfast.cli.demo", "run a demo that kills workers and the store's writer"),
    "store": Command("holdfast.cli.store", "a store: info, usage, copy, restored, rebuild"),
    "tasks": Command("holdfast.cli.tasks", "tasks: list, show, cancel, redrive, limit"),
    "queues": Command("holdfast.cli.queues", "queues of tasks: list, pause, resume, drain"),
    "flows": Command("holdfast.cli.flows", "flows: list, show, steps, why, send, fork, cancel, …"),
    "effects": Command("holdfast.cli.effects", "effects: list, show, redrive"),
    "budgets": Command("holdfast.cli.budgets", "budgets: list, days, limit"),
    "schedules": Command(
        "holdfast.cli.schedules", "schedules: list, show, pause, resume, run-now, backfill, delete"
    ),
    "timers": Command("holdfast.cli.timers", "timers: list, show, redrive"),
    "dispatch": Command(
        "holdfast.cli.dispatch", "tmux prompts: list, show, deliver, fail, leader, rewind"
    ),
    "runs": Command("holdfast.cli.runs", "stage runs: list, show, failed, retry, cancel, prune"),
    "dead": Command("holdfast.cli.dead", "dead letters: list, show, redrive, drop"),
    "errors": Command("holdfast.cli.errors", "groups of errors: list, show, redrive, drop"),
    "jobs": Command("holdfast.cli.jobs", "jobs on many subjects: list, start, pace, cancel"),
    "backup": Command("holdfast.cli.backup", "back up a store while it is in use"),
    "restore": Command(
        "holdfast.cli.restore", "restore a store from a backup, as a new generation"
    ),
    "replay": Command("holdfast.cli.replay", "replay recorded attempts through a handler"),
    "sim": Command("holdfast.cli.sim", "run the fault simulator, one seed after another"),
}


class _HelpFormatter(argparse.HelpFormatter):
    """A help formatter with a wider command column: argparse would wrap the line of the longest command."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = max(map(len, COMMANDS)) + 4


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            code = _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()
        return code
    except HoldfastError as error:
        return _print_error(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. Redirect stdout, so that the flush at exit does not fail.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _print_error(
            f"io: {error.strerror or error}{where} (check the path and its permissions)"
        )
    except Exception as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        hint = "this is a bug; HOLDFAST_DEBUG=1 shows where"
        return _print_error(f"internal: {type(error).__name__}: {error} ({hint})")


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description="A durable runtime for work that must happen once.",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        child = commands.add_parser(name, description=command.help, help=command.help)
        if name == chosen:
            importlib.import_module(command.module).configure(child)
    try:
        args = parser.parse_args(argv)
    except SystemExit as ended:
        # argparse has printed help or version (0) or a usage error (2).
        return ended.code if isinstance(ended.code, int) else EXIT_USAGE
    try:
        code: int = importlib.import_module(COMMANDS[args.command].module).run(args)
    except HoldfastError as error:
        hide_quotes(args, error)
        raise
    return code


def _print_error(text: str) -> int:
    print("holdfast: " + " ".join(text.split()), file=sys.stderr)
    return EXIT_FAILED
