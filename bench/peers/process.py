"""A process in a separate process group. It prints `ready`, runs when it reads a line, and answers in JSON.

`close` ends it by its pid and group. Its error output is kept for the error message of a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench.place import ROOT

ERROR_CHARS = 2000
PR_SET_PDEATHSIG = 1
# Compile modules once, as an installation does, not at each start.
COMPILED = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode")}


class ProcessFailed(RuntimeError):
    pass


class Process:
    """A process that runs until it is ended, for example a server."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        talks: bool = False,
        hears: bool | None = None,
    ) -> None:
        """With `talks`, `line` reads its output, and its input is a pipe. The last parameter overrides the pipe."""
        hears = talks if hears is None else hears
        # The name of the script or module, not of the interpreter.
        self.name = Path(next((part for part in argv[1:] if part != "-m"), argv[0])).name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.PIPE if hears else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else self._errors,
            stderr=self._errors,
            text=True,
            cwd=cwd,
            env={**os.environ, **COMPILED, **(env or {})},
            start_new_session=True,
            # A process with an input sees its end. Another one gets a signal when its parent dies.
            preexec_fn=None if hears else _end_with_parent,
        )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-ERROR_CHARS:]

    def kill(self) -> None:
        """Kill the process at once, like a power failure."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def close(self, grace_s: float = 10.0) -> None:
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        else:
            self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        # Kill the rest of its group: hypercorn's children outlive a killed parent.
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()

    def line(self) -> str:
        """The next line of its output."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ProcessFailed(f"{self.name} ended with code {code}: {self.errors()}")
        return line.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Load(Process):
    """A process that processes requests: one line in, one line out."""

    def __init__(self, argv: Sequence[str | Path], **options: Any) -> None:
        super().__init__(argv, talks=True, **options)
        try:
            if (line := self.line()) != "ready":
                raise ProcessFailed(f"{self.name} printed {line!r} instead of ready")
        except BaseException:
            self.close(0)
            raise

    def ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        self.begin(what, **parameters)
        return self.end()

    def begin(self, what: str, **parameters: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"what": what, **parameters}) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.line())
        if "error" in answer:
            raise ProcessFailed(f"{self.name}: {answer['error']}")
        return answer


class Up(Process):
    """Roles of an application, as users run them: `holdfast up MODULE:APP`. Waits for its `ready` line."""

    def __init__(
        self,
        app: str,
        store: Path,
        *roles: str,
        worker: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        chosen = [part for role in roles for part in ("--role", role)]
        argv = [sys.executable, "-m", "holdfast.cli", "up", app, "--store", str(store)]
        super().__init__([*argv, "--worker", worker, *chosen], talks=True, hears=False, env=env)
        self.name = f"holdfast up {' '.join(roles)}".strip()
        try:
            if not (line := self.line()).startswith("ready"):
                raise ProcessFailed(f"{self.name} printed {line!r} instead of ready")
        except BaseException:
            self.close(0)
            raise

    def require_running(self) -> None:
        """Raise if the process ended. Without this check a dead role would look like a slow one."""
        if not self.running:
            raise ProcessFailed(f"{self.name} ended: {self.errors()}")

    def close(self, grace_s: float = 0.0) -> None:
        """Kill the process without a drain: the release of thousands of worlds is not measured."""
        super().close(grace_s)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
