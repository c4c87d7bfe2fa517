"""A real tmux server on a private socket, and fake agents in its panes that log each submitted text.

    with serving() as tmux:
        agent = tmux.agent("worker", "line")
        ...
        assert agent.submitted == ["hello [hf:…]"]

Without tmux the tests that need it fail with the installation command.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from holdfast.adapters import pane_prompter as agents
from holdfast.adapters.tmux import lock_path
from tests.process.watch import until
from tests.processes import ROOT

INSTALL = "apt-get install -y tmux"
AGENT_SCRIPT = ROOT / "tests" / "pane_agent.py"
COLUMNS, ROWS = 80, 24
PANES_MAX = 50
CONFIRM_WAIT_S = 20.0
_numbers = count(1)


@dataclass
class PaneAgent:
    """A fake agent in a pane."""

    tmux: TmuxServer
    pane_id: str
    log: Path

    @property
    def submitted(self) -> list[str]:
        """The text of each press of Enter; an empty string for a press without text."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line != "ready"]

    @property
    def texts(self) -> list[str]:
        return [text for text in self.submitted if text]

    def expect(self, *submitted: str) -> None:
        """Wait for exactly these submissions, one per press of Enter."""
        until(lambda: len(self.submitted) >= len(submitted), f"{len(submitted)} presses of Enter")
        assert self.submitted == list(submitted)

    def expect_texts(self, *texts: str) -> None:
        """Wait for exactly these texts; presses of Enter without text are ignored."""
        until(lambda: len(self.texts) >= len(texts), f"{len(texts)} texts")
        assert self.texts == list(texts)

    @property
    def screen_text(self) -> str:
        """The letters and digits on the screen of the pane; the rest is dropped because lines are wrapped and framed."""
        screen = self.tmux.run("capture-pane", "-p", "-t", self.pane_id)
        return re.sub(r"[^0-9A-Za-z]", "", screen)

    def shows(self, text: str) -> bool:
        return re.sub(r"[^0-9A-Za-z]", "", text) in self.screen_text

    def kill(self) -> None:
        self.tmux.run("kill-pane", "-t", self.pane_id)


class TmuxServer:
    def __init__(self, socket: str, home: Path) -> None:
        self.socket = socket
        self._home = home

    def run(self, *args: str) -> str:
        command = ["tmux", "-L", self.socket, "-f", "/dev/null", *args]
        env = {name: value for name, value in os.environ.items() if name != "TMUX"}
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            env={**env, "LC_ALL": "C.UTF-8"},
        )
        return completed.stdout

    def start_agent(self, session: str, mode: str = "line", *, shell: str = "") -> PaneAgent:
        """Start an agent in a new session and wait until it reads. `shell` runs it in a shell."""
        log = self._home / f"{session}-{next(_numbers)}.log"
        command = [sys.executable, str(AGENT_SCRIPT), str(log), mode]
        words = [shell, "-c", " ".join(command) + "; true"] if shell else command
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self.run("new-session", "-d", "-s", session, *size, "--", *words)
        pane_id = self.run("display-message", "-p", "-t", f"={session}:", "#{pane_id}").strip()
        until(lambda: log.exists() and "ready" in log.read_text(encoding="utf-8"), "the agent")
        return PaneAgent(self, pane_id, log)

    def start_program(self, session: str, *words: str) -> str:
        """Start any program in a new session and return its pane id."""
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self.run("new-session", "-d", "-s", session, *size, "--", *words)
        return self.run("display-message", "-p", "-t", f"={session}:", "#{pane_id}").strip()

    def remove_files(self) -> None:
        """Remove the socket of tmux and the lock files of pane prompters."""
        home = Path(os.environ.get("TMUX_TMPDIR", "/tmp"))
        (home / f"tmux-{os.getuid()}" / self.socket).unlink(missing_ok=True)
        for n in range(PANES_MAX):
            lock_path(str(home / f"tmux-{os.getuid()}" / self.socket), f"%{n}").unlink(
                missing_ok=True
            )


@contextlib.contextmanager
def running_tmux() -> Iterator[TmuxServer]:
    if shutil.which("tmux") is None:
        pytest.fail(f"tmux is not installed: {INSTALL}", pytrace=False)
    with tempfile.TemporaryDirectory(prefix="holdfast-panes-") as home:
        server = TmuxServer(f"hf-{os.getpid()}-{next(_numbers)}", Path(home))
        # A permanent session: the server would exit with its last session.
        server.start_program("idle", "cat")
        try:
            yield server
        finally:
            server.run("kill-server")
            server.remove_files()


@pytest.fixture
def tmux(monkeypatch: pytest.MonkeyPatch) -> Iterator[TmuxServer]:
    # On a busy machine an agent shows its input late: the prompter must not press Enter again.
    monkeypatch.setattr(agents, "CONFIRM_TIMEOUT_S", CONFIRM_WAIT_S)
    monkeypatch.setattr(agents, "PRESS_AGAIN_S", CONFIRM_WAIT_S / 2)
    with running_tmux() as server:
        yield server
