"""Simulated panes: a tmux server that outlives every process, and agents in it that take what is typed.

Between any two keys the typist may be overtaken, and die: before the keys arrive, or right after. What
an agent was given is in the history (`pane.submit`), which is all that checkers know of it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from holdfast.adapters.tmux import PaneState, Tmux, View, target_of
from holdfast.sim.actor import Life

# Of so many keys, one is the last that its typist sends, and one is never sent.
FATES = 40
BEFORE, AFTER = 1, 2


@dataclass
class Pane:
    pane_id: str
    session: str
    draft: str = ""
    lines: list[str] = field(default_factory=list)


class Room:
    """The panes of a run, by session."""

    def __init__(self) -> None:
        self.panes: dict[str, Pane] = {}
        self.socket = "sim"
        # Locks on panes are files: those of a run are its own, and go away with it.
        self.locks = tempfile.TemporaryDirectory(prefix="holdfast-sim-panes-")
        self._numbers = count(1)

    def open(self, session: str) -> None:
        self.panes[session] = Pane(f"%{next(self._numbers)}", session)

    def close(self, session: str) -> None:
        self.panes.pop(session, None)

    def find(self, pane_id: str) -> Pane | None:
        return next((one for one in self.panes.values() if one.pane_id == pane_id), None)


class SimTmux(Tmux):
    """The server as one process reaches it."""

    def __init__(self, room: Room, life: Life) -> None:
        super().__init__(room.socket)
        self._room = room
        self._life = life

    def lock_path(self, pane: PaneState) -> Path:
        return Path(self._room.locks.name) / pane.pane_id

    def keeping(self, *files: int) -> SimTmux:
        return self

    def pane(self, target: str) -> PaneState | None:
        wanted = target_of(target)
        for one in self._room.panes.values():
            found = PaneState(
                pane_id=one.pane_id, dead=False, in_mode=False, input_off=False, pid=0,
                command="agent", session=one.session, windows=frozenset({"0"}),
                window_active=True, number="0", active=True,
            )  # fmt: skip
            if wanted.means(found):
                return found
        return None

    def look(self, pane_id: str, *, history: int = 0) -> View | None:
        found = self._room.find(pane_id)
        if found is None:
            return None
        lines = [*found.lines, f"> {found.draft}"]
        return View(lines, len(lines) - 1, len(lines[-1]))

    def type(self, pane_id: str, text: str) -> None:
        fate = self._fate()
        found = self._room.find(pane_id)
        if found is not None:
            found.draft += text
        self._after(fate)

    def press(self, pane_id: str, key: str) -> None:
        fate = self._fate()
        found = self._room.find(pane_id)
        if found is not None and key == "Enter":
            if found.draft:
                found.lines.append(found.draft)
                self._life.note("pane.submit", pane=pane_id, text=found.draft)
            found.draft = ""
        elif found is not None:
            if found.draft:
                # A terminal keeps what was drawn: a draft that was wiped is still among its lines.
                found.lines.append(f"> {found.draft}")
            found.draft = ""
        self._after(fate)

    def _fate(self) -> int:
        fate = 0 if self._life.calm else self._life.tape.draw(FATES)
        self._life.scheduler.yield_()
        if fate == BEFORE:
            self._die("before a key")
        return fate

    def _after(self, fate: int) -> None:
        if fate == AFTER:
            self._die("after a key")

    def _die(self, when: str) -> None:
        self._life.note("fault", kind=f"crash {when}")
        current = self._life.scheduler.current
        assert current is not None
        self._life.scheduler.kill(current)
