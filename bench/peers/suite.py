"""What a comparison consists of: parts, measures, goals, and where its outcome is kept.

There are four, `worlds`, `effects`, `tasks` and `postgres`; all run by the same turns and come out as the same
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
    """Ours against a measure of a peer: at least so many times it, or below so many times.

    The peer is Restate or, with `best`, whichever did best in that run.
    """

    ours: str
    theirs: str
    at_least: float | None = None
    below: float | None = None
    best: bool = False

    @property
    def peer(self) -> str:
        return "best" if self.best else "restate"

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
        if self.at_least is not None:
            return f"≥ {self.at_least:g} ×{whose}"
        return f"< {self.below:g} ×{whose}"


class Amount(Protocol):
    """How much of the work a system gets."""

    def scaled(self, by: float) -> Any: ...


class System(Protocol):
    """One of those compared. `turn` starts it afresh; the parts of the workload run on that."""

    name: str
    amount: Any

    def settings(self) -> dict[str, str]: ...

    def turn(self, directory: Path) -> AbstractContextManager[Any]:
        """It has a method for each part: `part(amount)` gives measures."""


@dataclass(frozen=True)
class Suite:
    name: str
    systems: Mapping[str, Callable[[], System]]
    # Which measures come out of which part of a turn.
    parts: Mapping[str, tuple[str, ...]]
    measures: Mapping[str, str]
    # Measures that not every system has, or that explain the others.
    extra: Mapping[str, str]
    what: Mapping[str, str]
    goals: Sequence[Goal]
    # What ours alone has.
    alone: Mapping[str, Callable[[Place], Record]]
    # What the usual amounts need on a quiet machine with two cores, one run of every system.
    usual_run_s: float
    history: Path
    page: Path
    introduction: str
    fairness: str
    # What all systems stand on while they take their turns, made in a directory below the one given.
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
