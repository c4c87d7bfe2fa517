"""State machines as transition tables: the only way a state changes.

`next` returns the following state, or raises `IllegalTransition` with its context fields and changes
nothing. Code, tests, docs and diagrams read the same table.
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
        following = self.table.get((state, event))
        if following is None:
            raise IllegalTransition(
                machine=self.name, prior=state.name, attempted=event.name, **context
            )
        return following

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self.table

    def unreachable(self) -> frozenset[S]:
        """States that no path from the initial state reaches. A correct table has none."""
        reachable = {self.initial}
        frontier = [self.initial]
        while frontier:
            reached = frontier.pop()
            for (state, _), following in self.table.items():
                if state is reached and following not in reachable:
                    reachable.add(following)
                    frontier.append(following)
        return self.states - reachable

    def pairs(self) -> Iterator[tuple[S, E, S | None]]:
        """Yield every (state, event) with the following state, or None where the pair is illegal."""
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
