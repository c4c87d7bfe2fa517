"""A real tmux on a socket of its own, and agents in its panes that write down what is submitted.

    with serving() as tmux:
        agent = tmux.agent("worker", "line")
        ...
        assert agent.submitted == ["hello [hf:…]"]

A machine without tmux fails the tests that need it, and says which command installs it.
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

from holdfast.adapters import agent as agents
from holdfast.adapters.tmux import lock_path
from tests.process.watch import until
from tests.processes import ROOT

INSTALL = "apt-get install -y tmux"
AGENT = ROOT / "tests" / "pane_agent.py"
COLUMNS, ROWS = 80, 24
PANES_MAX = 50
PATIENCE_S = 20.0
_numbers = count(1)


@dataclass
class Agent:
    """A program in a pane."""

    tmux: TmuxServer
    pane_id: str
    log: Path

    @property
    def submitted(self) -> list[str]:
        """What it was given, by each press of Enter; an empty text for a press alone."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line != "ready"]

    @property
    def texts(self) -> list[str]:
        return [text for text in self.submitted if text]

    def expect(self, *submitted: str) -> None:
        """It was given these, by one press each, and nothing else."""
        until(lambda: len(self.submitted) >= len(submitted), f"{len(submitted)} presses of Enter")
        assert self.submitted == list(submitted)

    def expect_texts(self, *texts: str) -> None:
        """It was given these texts, whatever presses there were besides."""
        until(lambda: len(self.texts) >= len(texts), f"{len(texts)} texts")
        assert self.texts == list(texts)

    @property
    def shown(self) -> str:
        """What stands in the pane: letters and digits alone, for lines are wrapped and framed."""
        told = self.tmux.run("capture-pane", "-p", "-t", self.pane_id)
        return re.sub(r"[^0-9A-Za-z]", "", told)

    def shows(self, text: str) -> bool:
        return re.sub(r"[^0-9A-Za-z]", "", text) in self.shown

    def kill(self) -> None:
        self.tmux.run("kill-pane", "-t", self.pane_id)


class TmuxServer:
    def __init__(self, socket: str, home: Path) -> None:
        self.socket = socket
        self._home = home

    def run(self, *args: str) -> str:
        command = ["tmux", "-L", self.socket, "-f", "/dev/null", *args]
        env = {name: value for name, value in os.environ.items() if name != "TMUX"}
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            env={**env, "LC_ALL": "C.UTF-8"},
        )
        return done.stdout

    def agent(self, session: str, mode: str = "line", *, shell: str = "") -> Agent:
        """Start an agent in a session of its own, and wait until it reads. `shell` runs it in a shell."""
        log = self._home / f"{session}-{next(_numbers)}.log"
        command = [sys.executable, str(AGENT), str(log), mode]
        words = [shell, "-c", " ".join(command) + "; true"] if shell else command
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self.run("new-session", "-d", "-s", session, *size, "--", *words)
        pane_id = self.run("display-message", "-p", "-t", f"={session}:", "#{pane_id}").strip()
        until(lambda: log.exists() and "ready" in log.read_text(encoding="utf-8"), "the agent")
        return Agent(self, pane_id, log)

    def plain(self, session: str, *words: str) -> str:
        """Any program in a session of its own; its pane."""
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self.run("new-session", "-d", "-s", session, *size, "--", *words)
        return self.run("display-message", "-p", "-t", f"={session}:", "#{pane_id}").strip()

    def clean(self) -> None:
        """Remove what tmux and typists leave behind."""
        home = Path(os.environ.get("TMUX_TMPDIR", "/tmp"))
        (home / f"tmux-{os.getuid()}" / self.socket).unlink(missing_ok=True)
        for n in range(PANES_MAX):
            lock_path(str(home / f"tmux-{os.getuid()}" / self.socket), f"%{n}").unlink(
                missing_ok=True
            )


@contextlib.contextmanager
def serving() -> Iterator[TmuxServer]:
    if shutil.which("tmux") is None:
        pytest.fail(f"tmux is not installed: {INSTALL}", pytrace=False)
    with tempfile.TemporaryDirectory(prefix="holdfast-panes-") as home:
        server = TmuxServer(f"hf-{os.getpid()}-{next(_numbers)}", Path(home))
        # A session that stays, so that the server does not leave with the last agent.
        server.plain("idle", "cat")
        try:
            yield server
        finally:
            server.run("kill-server")
            server.clean()


@pytest.fixture
def tmux(monkeypatch: pytest.MonkeyPatch) -> Iterator[TmuxServer]:
    # On a busy machine an agent shows late what it was given: that is no reason to press again.
    monkeypatch.setattr(agents, "TAKEN_S", PATIENCE_S)
    monkeypatch.setattr(agents, "PRESS_AGAIN_S", PATIENCE_S / 2)
    with serving() as server:
        yield server
