"""Tables of legal moves: the only way a state changes.

`next` answers the state that follows, or raises `IllegalTransition` with everything it was told
and changes nothing. Tests, docs and diagrams read the same table that the code runs on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

from holdfast.errors import IllegalTransition

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Transitions(Generic[S, E]):
    def __init__(self, name: str, initial: S, table: Mapping[tuple[S, E], S]) -> None:
        self.name = name
        self.initial = initial
        self.table = dict(table)
        self.states: frozenset[S] = frozenset(type(initial))
        self.terminal: frozenset[S] = self.states - {state for state, _ in self.table}

    def next(self, state: S, event: E, **context: Any) -> S:
        after = self.table.get((state, event))
        if after is None:
            raise IllegalTransition(
                machine=self.name, prior=state.name, attempted=event.name, **context
            )
        return after

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self.table

    def unreachable(self) -> frozenset[S]:
        """States that no path from the initial one arrives at. A sound table has none."""
        seen = {self.initial}
        frontier = [self.initial]
        while frontier:
            here = frontier.pop()
            for (state, _), after in self.table.items():
                if state is here and after not in seen:
                    seen.add(after)
                    frontier.append(after)
        return self.states - seen

    def pairs(self) -> Iterator[tuple[S, E, S | None]]:
        """Every (state, event), legal or not, with the state that follows or None."""
        events = type(next(iter(self.table))[1])
        for state in type(self.initial):
            for event in events:
                yield state, event, self.table.get((state, event))

    def mermaid(self) -> str:
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial.name}"]
        lines += [
            f"    {state.name} --> {after.name}: {event.name.lower()}"
            for (state, event), after in self.table.items()
        ]
        lines += [
            f"    {state.name} --> [*]" for state in type(self.initial) if state in self.terminal
        ]
        return "\n".join(lines)
