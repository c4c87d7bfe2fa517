"""The outcome of a metric: measures with their spread over the repeats, and their targets.

A target is met when the median meets it. Each repeat is divided by the raw loop around it (see `raw`), so
that a disk that slows down half-way slows both sides of the fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from bench.place import Place
from bench.raw import raw_per_s


@dataclass(frozen=True)
class Spread:
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def document(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "median": _short(self.median),
            "min": _short(min(self.values)),
            "max": _short(max(self.values)),
        }


@dataclass(frozen=True)
class Target:
    measure: str
    at_least: float | None = None
    below: float | None = None

    def met(self, found: float) -> bool:
        if self.at_least is not None:
            return found >= self.at_least
        assert self.below is not None
        return found < self.below

    def __str__(self) -> str:
        sign, bound = ("≥", self.at_least) if self.at_least is not None else ("<", self.below)
        return f"{self.measure} {sign} {bound:,g}"


@dataclass(frozen=True)
class Record:
    name: str
    what: str
    measures: dict[str, Spread]
    targets: tuple[Target, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """None when the metric has no target. Such a metric explains other metrics."""
        if not self.targets:
            return None
        return all(target.met(self.measures[target.measure].median) for target in self.targets)

    def document(self) -> dict[str, Any]:
        return {
            "metric": self.name,
            "what": self.what,
            "repeats": len(next(iter(self.measures.values())).values),
            "measures": {name: spread.document() for name, spread in self.measures.items()},
            "targets": [str(target) for target in self.targets],
            "met": self.met,
            "notes": self.notes,
        }


# One repeat: its measures by name. `rate` is compared with raw.
Sample = dict[str, float]


def against_raw(place: Place, run: Callable[[], Sample]) -> list[Sample]:
    """Repeat `run`, each time between two raw loops. Adds `raw` and `ratio` to its measures."""
    samples = []
    before = raw_per_s(place.directory, place.raw_s)
    for _ in range(place.repeats):
        sample = run()
        after = raw_per_s(place.directory, place.raw_s)
        raw = fmean((before, after))
        samples.append({**sample, "raw": raw, "ratio": sample["rate"] / raw})
        before = after
    return samples


def gather(samples: Iterable[Sample], units: dict[str, str]) -> dict[str, Spread]:
    """The spread of each measure, in the order of `units`."""
    samples = list(samples)
    return {name: Spread(unit, tuple(s[name] for s in samples)) for name, unit in units.items()}


def _short(value: float) -> float:
    """Four digits. More digits are noise, and would change the text of every saved run."""
    return float(f"{value:.4g}")
