"""A fault for a runbook page: a store, real worker processes, and the commands of the page.

The commands `holdfast …` of a page run in this process, also with `| grep -q TEXT` behind them or with `!` before
them. `holdfast up … &` starts a process. A line `until COMMAND; do sleep 1; done` repeats the command until it succeeds.
Any other line runs in a shell.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import holdfast as hf
from holdfast.cli import main
from holdfast.clock import SYSTEM
from holdfast.errors import NotFound
from holdfast.ops.metrics.families import BY_NAME
from holdfast.ops.metrics.store_samples import read_samples
from tests.process.watch import until
from tests.processes import Proc
from tests.runbooks import drill_app, shelf_app

T = TypeVar("T")
COMMAND_S = 60.0
# A driver of Spark.
DRIVER_S = 400.0
POLL_S = 0.05
GREP = re.compile(r"""(?P<command>holdfast [^|]*) \| grep -q (?P<text>[\w.=-]+|"[^"]+")""")


class CommandFailed(AssertionError):
    """A command of a page failed."""


class FaultScene:
    def __init__(self, directory: Path, store: str) -> None:
        self.directory = directory
        self.store = store
        # The page that the test runs.
        self.page = ""
        self.env = {"PORT": str(free_port())}
        # Opens a connection of the database administrator, if the fault has a server.
        self.admin: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
        # Starts the database server again.
        self.start_server: Callable[[], None] | None = None
        self.workers: list[Proc] = []
        self._exit = contextlib.ExitStack()
        shutil.copy(shelf_app.__file__, directory / "shop.py")
        shutil.copy(drill_app.__file__, directory / "drill.py")

    def __enter__(self) -> FaultScene:
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()

    # -- the fault -------------------------------------------------------------------------------

    def client(self, app: hf.App = shelf_app.app) -> hf.Runtime:
        """A runtime without roles."""
        return self._exit.enter_context(app.open(self.store, roles=()))

    def up(self, *words: str, env: dict[str, str] | None = None) -> Proc:
        """Start `holdfast up` and return when its roles have completed their first round."""
        line = [sys.executable, "-m", "holdfast.cli", "up", *words]
        worker = Proc.spawn(line, cwd=self.directory, env=env, fresh=env is not None)
        self.workers.append(self._exit.enter_context(worker))
        self.env["PID"] = str(worker.pid)
        self.env["WORKER"] = worker.lines[0].split()[-1]
        return worker

    def stop(self, worker: Proc) -> None:
        worker.terminate()
        assert worker.wait() == 0

    def file(self, name: str) -> Path:
        path = self.directory / name
        path.touch()
        return path

    def enter(self, context: contextlib.AbstractContextManager[T]) -> T:
        """Enter a context that ends with the scene."""
        return self._exit.enter_context(context)

    def move_store(self, path: Path) -> None:
        self.use_store(str(path))

    def use_store(self, url: str) -> None:
        self.store = url
        os.environ["HOLDFAST_STORE"] = url

    def use_configuration(self, text: str) -> None:
        """Find the stores by `holdfast.toml`."""
        (self.directory / "holdfast.toml").write_text(text)
        del os.environ["HOLDFAST_STORE"]

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def metric(self, rt: hf.Runtime, name: str, **labels: str) -> float:
        """The sum of the samples of a metric with these labels."""
        names = BY_NAME[name].labels
        return sum(
            sample.value
            for sample in rt.store.read(read_samples, SYSTEM.wall_ns())
            if sample.family == name
            and labels.items() <= dict(zip(names, sample.labels, strict=True)).items()
        )

    def blocked(self, rt: hf.Runtime, code: str, kind: str, id: str) -> Callable[[], bool]:
        """A fault whose state is that `why` has the code for the subject, with the page of this scene."""
        self.env |= {"CODE": code, "KIND": kind, "ID": id}

        def is_blocked() -> bool:
            try:
                blockers = rt.why(kind, id)["blockers"]
            except NotFound:
                return False
            found = [one for one in blockers if one["code"] == code]
            assert all(one["runbook"] == f"docs/runbooks/{self.page}.md" for one in found)
            return bool(found)

        return is_blocked

    # -- the commands ----------------------------------------------------------------------------

    def run_block(self, text: str) -> str:
        lines = text.replace("\\\n", " ").splitlines()
        return "".join(self.run_line(line) for line in lines if line.strip())

    def run_sql(self, text: str) -> str:
        """Run a block of SQL as the administrator of the database."""
        assert self.admin is not None, "the fault has no database server"
        with self.admin() as connection:
            connection.execute(self._substituted(text))
        return ""

    def run_line(self, line: str) -> str:
        if line.startswith("until "):
            command = line.removeprefix("until ").removesuffix("; do sleep 1; done")
            return until(lambda: self._attempt(command), command, COMMAND_S, poll_s=POLL_S)
        if line.endswith(" &"):
            words = self._words(line.removesuffix(" &"))
            assert words[:2] == ["holdfast", "up"], line
            self.up(*words[2:])
            return ""
        may_fail = line.endswith(" || true")
        code, output = self._run(line.removesuffix(" || true"))
        if code and not may_fail:
            raise CommandFailed(f"{line}: exit code {code}: {output}")
        return output

    def _attempt(self, command: str) -> str:
        code, output = self._run(command)
        return "" if code else output or "\n"

    def _run(self, line: str) -> tuple[int, str]:
        if line.startswith("! "):
            code, output = self._run(line.removeprefix("! "))
            return int(not code), output
        if found := GREP.fullmatch(line):
            _, output = self._run(found["command"])
            return int(self._substituted(found["text"].strip('"')) not in output), output
        # A command with an app runs in its own process, because this process imports another module `shop`.
        if line.startswith("holdfast ") and not set(line) & set("|><;") and "--app" not in line:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                code = main(self._words(line)[1:])
            return code, out.getvalue()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, **self.env, "PATH": path}
        done = subprocess.run(
            ["bash", "-euc", line], env=env, cwd=self.directory,
            capture_output=True, text=True, timeout=DRIVER_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def _words(self, line: str) -> list[str]:
        return shlex.split(self._substituted(line))

    def _substituted(self, line: str) -> str:
        for name in sorted(self.env, key=len, reverse=True):
            line = line.replace(f"${name}", self.env[name])
        assert "$" not in line, f"no value: {line}"
        return line


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextlib.contextmanager
def small_disk(at: Path, megabytes: int) -> Iterator[Path]:
    assert os.geteuid() == 0, "this test mounts a small disk: run the tests as root"
    at.mkdir()
    options = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def kill(worker: Proc) -> None:
    assert worker.kill() == -signal.SIGKILL
