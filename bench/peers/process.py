"""A process in a group of its own, which says `ready`, runs when it reads a line, answers by JSON.

It is ended by its own pid and group, and what it printed as errors is kept for when it fails.
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
# As packages are that were installed: their modules are compiled once, not at each start.
COMPILED = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode")}


class ProcessFailed(RuntimeError):
    pass


class Process:
    """Anything that runs until it is ended, such as a server."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        talks: bool = False,
        hears: bool | None = None,
    ) -> None:
        """What `talks` is read from; it `hears`, too, unless said otherwise."""
        hears = talks if hears is None else hears
        # The script or the module that runs, rather than its interpreter.
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
            # What hears sees its input end; what does not is told when its parent dies.
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
        """At once, as a power cut would."""
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
        # Whatever is left of its group: hypercorn's children outlive a parent that is killed.
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()

    def line(self) -> str:
        """What it says next."""
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
    """A process that works off requests: one line in, one line out."""

    def __init__(self, argv: Sequence[str | Path], **options: Any) -> None:
        super().__init__(argv, talks=True, **options)
        try:
            if (line := self.line()) != "ready":
                raise ProcessFailed(f"{self.name} said {line!r} instead of ready")
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
    """Roles of an application, as users run them: `holdfast up MODULE:APP`, ready when it says so."""

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
                raise ProcessFailed(f"{self.name} said {line!r} instead of ready")
        except BaseException:
            self.close(0)
            raise

    def require_running(self) -> None:
        """A role that died would otherwise be seen as a slow one."""
        if not self.running:
            raise ProcessFailed(f"{self.name} ended: {self.errors()}")

    def close(self, grace_s: float = 0.0) -> None:
        """As it is: giving thousands of worlds back is not what is measured."""
        super().close(grace_s)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
