"""A worker process of parts 2, 4 and 5 of the demo: `holdfast up`, started, killed and stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from examples.demo.child_process import environment

LEASE_S = 1.5
STOP_S_MAX = 15


class UpProcess:
    """One process. The constructor returns when it is ready."""

    def __init__(
        self, path: Path, name: str, app: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        options = ["--store", str(path), "--worker", name, "--lease-s", str(LEASE_S)]
        # The demo prints what happens itself.
        options += ["--log-level", "error"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "up", app, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment(env),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
