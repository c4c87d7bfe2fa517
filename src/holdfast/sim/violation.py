"""A predicate that did not hold, and where in the history it shows."""

from __future__ import annotations

from holdfast.sim.history import Event


class Violation:
    def __init__(self, number: str, what: str, *events: Event) -> None:
        self.number = number
        self.what = what
        self.at = [event.i for event in events]

    def __repr__(self) -> str:
        return f"{self.number}: {self.what} (events {', '.join(map(str, self.at)) or 'none'})"
