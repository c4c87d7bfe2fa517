"""`holdfast dev module:app`: runs an application with its HTTP API, and restarts it when its source files change.

- The application runs in a child process, as `holdfast up --http`. Its store stays.
- A change of a source file stops the child by SIGTERM, so its running tasks end, and starts the new code.
- Code that cannot be loaded prints its error. The next change starts it again.
- The child has its own session, so Ctrl-C in a terminal reaches it only through this process. A second signal kills it.
- If this process is killed, the child stops as at SIGTERM: it reads the end of a pipe (`parent_pipe`).
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from holdfast.app.runtime import ROLES
from holdfast.child_process import SpawnedChild
from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.http import DEFAULT
from holdfast.cli.parent_pipe import ParentPipe
from holdfast.cli.source_files import SourceFiles
from holdfast.cli.stop_signal import StopSignal
from holdfast.cli.store_option import add_options, directory_of, is_embedded, url_of
from holdfast.workers.tasks.worker import STOP_GRACE_S

# The interval of checks of the source files and of the child.
POLL_S = 0.3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "app",
        metavar="MODULE:APP",
        help="the hf.App to run; the current directory is on the module path, and its files are watched",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT,
        help=f"serve the HTTP API on this address (default {DEFAULT})",
    )
    parser.add_argument(
        "--role", action="append", choices=ROLES, default=[],
        help="run this role; repeatable (default: all roles that the app needs)",
    )  # fmt: skip
    parser.add_argument("--worker", metavar="ID", help="worker id")
    parser.add_argument(
        "--grace-s", metavar="S", type=float, default=STOP_GRACE_S,
        help="release tasks of the old code that still run S seconds after a change "
        f"(default {STOP_GRACE_S:g})",
    )  # fmt: skip
    add_options(parser, universe="the universe to run in (default: that of the app)")


def run(args: argparse.Namespace) -> int:
    url = url_of(args)
    ignored = directory_of(url) if is_embedded(url) else None
    files = SourceFiles(Path.cwd(), ignored)
    stop_signal = StopSignal()
    child = WorkerProcess(_command(args))

    def on_signal(*_: object) -> None:
        if stop_signal.is_set():
            child.kill()
        stop_signal.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    child.start()
    try:
        while not stop_signal.wait(POLL_S):
            changed = files.changes()
            if changed:
                # An editor or a checkout changes several files one after the other.
                while not stop_signal.wait(POLL_S) and (more := files.changes()):
                    changed += more
                _print(f"reload: {', '.join(sorted(set(changed)))[:200]} changed")
                child.stop()
                if not stop_signal.is_set():
                    child.start()
            elif child.has_ended():
                code = child.stop()
                _print(f"the application ended with code {code}; it starts at the next change")
    finally:
        code = child.stop()
    return EXIT_OK if code == 0 else EXIT_FAILED


class WorkerProcess:
    """The child process with the present code; none while the code cannot be loaded."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._pipe = ParentPipe()
        self._child: SpawnedChild | None = None

    def start(self) -> None:
        command = [*self._command, "--parent-fd", str(self._pipe.read_fd)]
        self._child = SpawnedChild(command, pass_fds=[self._pipe.read_fd], new_session=True)

    def has_ended(self) -> bool:
        return self._child is not None and not self._child.is_alive()

    def stop(self) -> int:
        """Stop the child by SIGTERM, and wait until it has ended. Return its exit code; 0 without a child."""
        if self._child is None:
            return EXIT_OK
        with contextlib.suppress(ProcessLookupError):
            self._child.process.send_signal(signal.SIGTERM)
        self._child.process.wait()
        code = self._child.end()
        self._child = None
        return code

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()


def _command(args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "holdfast.cli", "up", args.app, "--http", args.http]
    for name in ("store", "universe", "worker"):
        if getattr(args, name) is not None:
            command += [f"--{name}", getattr(args, name)]
    for paths in args.redact:
        command += ["--redact", paths]
    for role in args.role:
        command += ["--role", role]
    return [*command, "--grace-s", str(args.grace_s), *(["--json"] if args.json else [])]


def _print(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)
