"""The definition of a comparison: parts, measures, goals, and the files of its outcome.

There are five: `worlds`, `effects`, `tasks`, `flows` and `postgres`. All run in the same turns and have the same
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.place import Place
from bench.record import Record


@dataclass(frozen=True)
class Goal:
    """A target for our measure divided by the measure of a peer: `at_least` or `below`.

    The peer is `of`, Restate by default. `best` takes the best peer of the run.
    """

    ours: str
    theirs: str
    at_least: float | None = None
    below: float | None = None
    best: bool = False
    of: str = "restate"

    @property
    def peer(self) -> str:
        return "best" if self.best else self.of

    @property
    def key(self) -> str:
        return self.ours if self.ours == self.theirs else f"{self.ours}/{self.theirs}"

    def met(self, ratio: float) -> bool:
        if self.at_least is not None:
            return ratio >= self.at_least
        assert self.below is not None
        return ratio < self.below

    def __str__(self) -> str:
        whose = "" if self.ours == self.theirs else f" of its {self.theirs}"
        whose += " of the best peer" if self.best else ""
        whose += f" of {self.of}" if self.of != "restate" else ""
        if self.at_least is not None:
            return f"≥ {self.at_least:g} ×{whose}"
        return f"< {self.below:g} ×{whose}"


class WorkAmount(Protocol):
    """The amount of work of a system."""

    def scaled(self, by: float) -> Any: ...


class System(Protocol):
    """A compared system. `turn` starts it with an empty state and runs the parts of the workload."""

    name: str
    amount: Any

    def settings(self) -> dict[str, str]: ...

    def turn(self, directory: Path) -> AbstractContextManager[Any]:
        """The result has a method for each part: `part(amount)` returns measures."""


@dataclass(frozen=True)
class Suite:
    name: str
    systems: Mapping[str, Callable[[], System]]
    # The measures of each part of a turn.
    parts: Mapping[str, tuple[str, ...]]
    measures: Mapping[str, str]
    # Measures that some systems lack, or that explain other measures.
    extra: Mapping[str, str]
    what: Mapping[str, str]
    goals: Sequence[Goal]
    # Metrics of Holdfast alone.
    alone: Mapping[str, Callable[[Place], Record]]
    # Duration of one run of every system with the usual amounts, on a quiet machine with two cores.
    usual_run_s: float
    history: Path
    page: Path
    introduction: str
    fairness: str
    # Commands of `python -m bench` whose last saved runs the page shows, too.
    commands: Sequence[str] = ()
    # The shared resource of all systems during their turns, created below the given directory.
    ground: Callable[[Path], AbstractContextManager[Any]] = nullcontext

    @property
    def units(self) -> dict[str, str]:
        return {**self.measures, **self.extra}

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.parts, *self.alone)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
