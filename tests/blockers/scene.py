"""A scene of a blocker test: the subject in its store, and the registry of cases by code.

A case is a generator. It causes the condition of its code, yields the subject, then mends the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.blockers.answer import Blocker, WhyAnswer
from holdfast.blockers.explain import explain
from holdfast.clock import SimClock
from holdfast.errors import NotFound
from holdfast.store.api import Store


class Scene(NamedTuple):
    store: Store
    clock: SimClock
    universe: str
    kind: str
    id: str

    def why(self) -> WhyAnswer:
        args = (self.universe, self.kind, self.id, self.clock.wall_ns())
        answer: WhyAnswer = self.store.read(explain, *args)
        return answer

    def blockers(self) -> list[Blocker]:
        """The blockers of the subject; none if it is gone."""
        try:
            return self.why()["blockers"]
        except NotFound:
            return []


Case = Callable[[], Iterator[Scene]]
CASES: dict[str, list[Case]] = {}


def case(code: str) -> Callable[[Case], Case]:
    """Register a case of a blocker code."""

    def register(fn: Case) -> Case:
        CASES.setdefault(code, []).append(fn)
        return fn

    return register
