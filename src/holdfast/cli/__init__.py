"""The command line: `holdfast COMMAND …`.

- Every command takes `--store URL` (or `HOLDFAST_STORE`, or `./data`) and `--json`, where that makes
  sense: with it, stdout holds one JSON document and nothing else.
- What goes wrong is one line on stderr, `holdfast: <code>: … (<what to do>)`, and exit code 1; wrong
  usage is 2, Ctrl-C is 130. There is never a traceback, unless `HOLDFAST_DEBUG` is set.
- A command is a module with `configure(parser)` and `run(args) -> int`. Only the one that was asked
  for is imported, so that `--help` answers at once.
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
from holdfast.errors import HoldfastError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    module: str
    help: str | None


COMMANDS = {
    "up": Command("holdfast.cli.up", "run an application until told to stop"),
    "worlds": Command("holdfast.cli.worlds", "worlds: list, show, journal, fork, pause, resume"),
    "workers": Command("holdfast.cli.workers", "workers: list, drain, undrain"),
    "authority": Command("holdfast.cli.authority", "the leader: show, force-release, mark-stale"),
    "ready": Command("holdfast.cli.ready", "whether a store can serve, or exactly why not"),
    "verify": Command("holdfast.cli.verify", "check what is stored, and replay it with --app"),
    "demo": Command("holdfast.cli.demo", "kill workers and the store's writer, and see it finish"),
    "store": Command("holdfast.cli.store", "what a store holds"),
    "tasks": Command("holdfast.cli.tasks", "tasks: list, show, cancel, redrive, limit"),
    "effects": Command("holdfast.cli.effects", "effects: list, show, redrive"),
    "timers": Command("holdfast.cli.timers", "timers: list, show"),
    "dispatch": Command(
        "holdfast.cli.dispatch", "prompts to panes: list, show, deliver, fail, leader, rewind"
    ),
    "runs": Command("holdfast.cli.runs", "runs of stages: list, show, failed, retry, cancel"),
    "dead": Command("holdfast.cli.dead", "dead letters: list, show, redrive"),
    "backup": Command("holdfast.cli.backup", "copy a store while it is in use"),
    "restore": Command("holdfast.cli.restore", "make a store from a backup, as a new generation"),
    "replay": Command("holdfast.cli.replay", "run the steps of a recording again"),
    "sim": Command("holdfast.sim.command", "simulate faults, seed by seed"),
    # Started by `demo`; not for people.
    "demo-worker": Command("holdfast.cli.demo_worker", None),
}


class _Help(argparse.HelpFormatter):
    """Commands are indented more than argparse reckons with: it would break the line of the longest."""

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
        return _tell(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Nothing may be flushed there at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _tell(f"io: {error.strerror or error}{where} (check the path and its permissions)")
    except Exception as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        hint = "this is a bug; HOLDFAST_DEBUG=1 shows where"
        return _tell(f"internal: {type(error).__name__}: {error} ({hint})")


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description="A durable runtime for work that must happen once.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        # Without a help text it is not listed, and works.
        child = (
            commands.add_parser(name, description=command.help, help=command.help)
            if command.help
            else commands.add_parser(name)
        )
        if name == chosen:
            importlib.import_module(command.module).configure(child)
    try:
        args = parser.parse_args(argv)
    except SystemExit as ended:
        # argparse has said what it has to say: help or version (0), or how to use it (2).
        return ended.code if isinstance(ended.code, int) else EXIT_USAGE
    code: int = importlib.import_module(COMMANDS[args.command].module).run(args)
    return code


def _tell(text: str) -> int:
    print("holdfast: " + " ".join(text.split()), file=sys.stderr)
    return EXIT_FAILED
