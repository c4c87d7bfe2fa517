"""The decision tape: every random choice of a run, in order.

A run asks its tape for numbers and nothing else, so a tape *is* a run: recorded from a seed, saved
to a file, replayed, cut down. A tape that is read past its end answers 0, and 0 is always the
dullest choice (no fault, the actor that waited longest, the shortest time). That makes shrinking
sound: whatever is cut away is replaced by nothing happening.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

MILLE = 1000
FORMAT = 1


class Tape:
    """Numbers drawn from a seed, or read back."""

    def __init__(self, seed: int | None, recorded: Sequence[int] = ()) -> None:
        self.seed = seed
        self.drawn: list[int] = []
        self._recorded = recorded
        self._random = None if seed is None else Random(seed).randrange

    @classmethod
    def replay(cls, recorded: Sequence[int]) -> Tape:
        return cls(None, recorded)

    def draw(self, n: int) -> int:
        """A number in [0, n)."""
        at = len(self.drawn)
        if self._random is not None:
            value = self._random(n)
        elif at < len(self._recorded):
            value = self._recorded[at] % n
        else:
            value = 0
        self.drawn.append(value)
        return value

    def chance(self, per_mille: int) -> bool:
        """True this often. The zero of a worn-out tape is False."""
        return self.draw(MILLE) >= MILLE - per_mille

    def pick(self, options: Sequence[Any], turn: int = 0) -> Any:
        """One of these. With a turn, a worn-out tape picks each of them in its turn."""
        return options[(turn + self.draw(len(options))) % len(options)]


def save(path: Path, recorded: Sequence[int], **about: Any) -> None:
    text = json.dumps({"format": FORMAT, **about, "tape": list(recorded)}, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") != FORMAT or not isinstance(found.get("tape"), list):
        raise ValueError(f"{path} is not a decision tape of format {FORMAT}")
    return dict(found)


def shrink(
    recorded: Sequence[int], fails: Callable[[Sequence[int]], bool], *, runs_max: int = 150
) -> list[int]:
    """A shorter or calmer tape that still fails, by delta debugging; bounded by `runs_max` runs.

    First cut the tail, then drop chunks, then turn chunks into zeros, in halves of halves.
    """
    best = list(recorded)
    budget = [runs_max]

    def still(candidate: list[int]) -> bool:
        if budget[0] <= 0:
            return False
        budget[0] -= 1
        return fails(candidate)

    best = _cut_tail(best, still)
    for change in (_dropped, _zeroed):
        size = max(1, len(best) // 4)
        while size >= 1 and budget[0] > 0:
            at = 0
            while at < len(best) and budget[0] > 0:
                candidate = change(best, at, size)
                if candidate != best and still(candidate):
                    best = candidate
                    at += size if change is _zeroed else 0
                else:
                    at += size
            size //= 2
    while best and best[-1] == 0:
        best.pop()  # reads as 0 anyway
    return best


def _cut_tail(tape: list[int], still: Callable[[list[int]], bool]) -> list[int]:
    low, high = 0, len(tape)
    while low < high:
        middle = (low + high) // 2
        if still(tape[:middle]):
            high = middle
        else:
            low = middle + 1
    return tape[:high]


def _dropped(tape: list[int], at: int, size: int) -> list[int]:
    return tape[:at] + tape[at + size :]


def _zeroed(tape: list[int], at: int, size: int) -> list[int]:
    return tape[:at] + [0] * len(tape[at : at + size]) + tape[at + size :]
