"""A violated invariant and the history events that show it."""

from __future__ import annotations

from holdfast.sim.history import HistoryEvent


class Violation:
    def __init__(self, number: str, what: str, *events: HistoryEvent) -> None:
        self.number = number
        self.what = what
        self.at = [event.i for event in events]

    def __repr__(self) -> str:
        return f"{self.number}: {self.what} (events {', '.join(map(str, self.at)) or 'none'})"
