"""Simulated panes: a tmux server that survives every process, with agents that read the typed text.

Between any two keys other actors may run, and the typing process may die before or right after a
key arrives. The history records each text that an agent received (`pane.submit`). Checkers see
nothing else of it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from holdfast.adapters.tmux import PaneState, PaneView, Tmux, parse_target
from holdfast.sim.actor import Incarnation

# In one of this many keys the process dies before the key, in one after it.
FAULT_ODDS = 40
BEFORE, AFTER = 1, 2


@dataclass
class SimPane:
    pane_id: str
    session: str
    draft: str = ""
    lines: list[str] = field(default_factory=list)


class SimTmuxServer:
    """The panes of a run, by session."""

    def __init__(self) -> None:
        self.panes: dict[str, SimPane] = {}
        self.socket = "sim"
        # Pane locks are files. Each run has its own directory, deleted at its end.
        self.lock_directory = tempfile.TemporaryDirectory(prefix="holdfast-sim-panes-")
        self._numbers = count(1)

    def open_pane(self, session: str) -> None:
        self.panes[session] = SimPane(f"%{next(self._numbers)}", session)

    def close_pane(self, session: str) -> None:
        self.panes.pop(session, None)

    def find_pane(self, pane_id: str) -> SimPane | None:
        return next((one for one in self.panes.values() if one.pane_id == pane_id), None)


class SimTmuxClient(Tmux):
    """The tmux server as one process reaches it."""

    def __init__(self, server: SimTmuxServer, incarnation: Incarnation) -> None:
        super().__init__(server.socket)
        self._server = server
        self._incarnation = incarnation

    def lock_path(self, pane: PaneState) -> Path:
        return Path(self._server.lock_directory.name) / pane.pane_id

    def with_open_files(self, *files: int) -> SimTmuxClient:
        return self

    def find_pane(self, target: str) -> PaneState | None:
        wanted = parse_target(target)
        for one in self._server.panes.values():
            found = PaneState(
                pane_id=one.pane_id, dead=False, in_mode=False, input_off=False, pid=0,
                command="agent", session=one.session, windows=frozenset({"0"}),
                window_active=True, number="0", active=True,
            )  # fmt: skip
            if wanted.matches(found):
                return found
        return None

    def capture(self, pane_id: str, *, history: int = 0) -> PaneView | None:
        found = self._server.find_pane(pane_id)
        if found is None:
            return None
        lines = [*found.lines, f"> {found.draft}"]
        return PaneView(lines, len(lines) - 1, len(lines[-1]))

    def type_text(self, pane_id: str, text: str) -> None:
        fate = self._draw_fault()
        found = self._server.find_pane(pane_id)
        if found is not None:
            found.draft += text
        self._crash_after(fate)

    def press_key(self, pane_id: str, key: str) -> None:
        fate = self._draw_fault()
        found = self._server.find_pane(pane_id)
        if found is not None and key == "Enter":
            if found.draft:
                found.lines.append(found.draft)
                self._incarnation.record("pane.submit", pane=pane_id, text=found.draft)
            found.draft = ""
        elif found is not None:
            if found.draft:
                # A terminal keeps drawn text: a wiped draft stays among its lines.
                found.lines.append(f"> {found.draft}")
            found.draft = ""
        self._crash_after(fate)

    def _draw_fault(self) -> int:
        fate = 0 if self._incarnation.faults_stopped else self._incarnation.tape.draw(FAULT_ODDS)
        self._incarnation.scheduler.yield_()
        if fate == BEFORE:
            self._crash("before a key")
        return fate

    def _crash_after(self, fault: int) -> None:
        if fault == AFTER:
            self._crash("after a key")

    def _crash(self, when: str) -> None:
        self._incarnation.record("fault", kind=f"crash {when}")
        current = self._incarnation.scheduler.current
        assert current is not None
        self._incarnation.scheduler.kill(current)
