"""Choice tape: every random choice of a run, in order.

A run reads no other source of randomness, so its tape determines it. A tape is recorded from a
seed, saved to a file, replayed, and shrunk. A tape read past its end returns 0, and 0 is always the
least eventful choice (no fault, the actor that waited longest, the shortest time). This makes
shrinking sound: removed choices become uneventful ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from random import Random
from typing import Any

PER_MILLE = 1000
FORMAT = 1


class ChoiceTape:
    """Numbers drawn from a seed, or read from a recording."""

    def __init__(self, seed: int | None, recorded: Sequence[int] = ()) -> None:
        self.seed = seed
        self.choices: list[int] = []
        # The positions of the faults that occurred, and of the faults that may occur (None: all).
        self.faults: list[int] = []
        self.allowed_faults: Container[int] | None = None
        self._recorded = recorded
        self._random = None if seed is None else Random(seed).randrange

    @classmethod
    def replay(cls, recorded: Sequence[int]) -> ChoiceTape:
        return cls(None, recorded)

    def draw(self, n: int) -> int:
        """Draw a number in [0, n)."""
        at = len(self.choices)
        if self._random is not None:
            value = self._random(n)
        elif at < len(self._recorded):
            value = self._recorded[at] % n
        else:
            value = 0
        self.choices.append(value)
        return value

    def draw_fault(self, n: int, is_fault: Callable[[int], bool]) -> int:
        """Draw a number that decides about a fault. The number of a fault that is not allowed is 0."""
        position = len(self.choices)
        value = self.draw(n)
        if not is_fault(value):
            return value
        if self.allowed_faults is not None and position not in self.allowed_faults:
            return 0
        self.faults.append(position)
        return value

    def chance(self, per_mille: int) -> bool:
        """True with this probability. The zero of an exhausted tape is False."""
        return self.draw(PER_MILLE) >= PER_MILLE - per_mille

    def pick(self, options: Sequence[Any], turn: int = 0) -> Any:
        """Pick an option. With `turn`, an exhausted tape cycles through the options."""
        return options[(turn + self.draw(len(options))) % len(options)]


def save_tape(path: Path, recorded: Sequence[int], **about: Any) -> None:
    text = json.dumps({"format": FORMAT, **about, "tape": list(recorded)}, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")


def load_tape(path: Path) -> dict[str, Any]:
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved.get("format") != FORMAT or not isinstance(saved.get("tape"), list):
        raise ValueError(f"{path} is not a decision tape of format {FORMAT}")
    return dict(saved)


def shrink_tape(
    recorded: Sequence[int], fails: Callable[[Sequence[int]], bool], *, runs_max: int = 150
) -> list[int]:
    """Find a shorter or less eventful tape that still fails, by delta debugging in at most
    `runs_max` runs.

    Cut the tail, then drop chunks, then replace chunks by zeros, with chunk sizes halved each
    round.
    """
    best = list(recorded)
    budget = [runs_max]

    def still(candidate: list[int]) -> bool:
        if budget[0] <= 0:
            return False
        budget[0] -= 1
        return fails(candidate)

    best = _cut_tail(best, still)
    for change in (_drop_chunk, _zero_chunk):
        size = max(1, len(best) // 4)
        while size >= 1 and budget[0] > 0:
            at = 0
            while at < len(best) and budget[0] > 0:
                candidate = change(best, at, size)
                if candidate != best and still(candidate):
                    best = candidate
                    at += size if change is _zero_chunk else 0
                else:
                    at += size
            size //= 2
    while best and best[-1] == 0:
        best.pop()  # an exhausted tape reads as 0
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


def _drop_chunk(tape: list[int], at: int, size: int) -> list[int]:
    return tape[:at] + tape[at + size :]


def _zero_chunk(tape: list[int], at: int, size: int) -> list[int]:
    return tape[:at] + [0] * len(tape[at : at + size]) + tape[at + size :]
