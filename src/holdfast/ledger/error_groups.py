"""Errors of a run, counted by class and normalised text, with examples. Pure and bounded in memory.

Two figures of each group: `count` is attempts that failed so, retried ones included; `rows` is rows that
ended so for good. The rows of all groups add up to the failed rows of the run: groups beyond
`GROUPS_KEPT` are joined into one of their class, and never dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import field

from holdfast.codec import Record
from holdfast.ledger.error_text import normalise

GROUPS_KEPT = 500
EXAMPLES_MAX = 3
EXAMPLE_CHARS_MAX = 300
OTHERS = "(other errors)"


class ErrorGroup(Record, frozen=True):
    error_class: int
    text: str
    count: int
    # Rows that ended with it for good. Records of older versions do not say.
    rows: int = 0
    examples: list[str] = field(default_factory=list)


class _Group:
    __slots__ = ("count", "examples", "rows")

    def __init__(self) -> None:
        self.count = 0
        self.rows = 0
        self.examples: list[str] = []


class ErrorGroups:
    def __init__(self, known: Iterable[ErrorGroup] = ()) -> None:
        self._groups: dict[tuple[int, str], _Group] = {}
        for one in known:
            group = self._groups.setdefault((one.error_class, one.text), _Group())
            group.count += one.count
            group.rows += one.rows
            group.examples = list(one.examples)

    def add(self, error_class: int, text: str, *, count: int = 1, rows: int = 0) -> None:
        """So many attempts failed with this text, of which `rows` ended their rows."""
        group = self._groups.get(key := (error_class, normalise(text)))
        if group is None:
            group = self._groups[key] = _Group()
            if len(self._groups) > GROUPS_KEPT:
                self._join_rare()
        group.count += count
        group.rows += rows
        if len(group.examples) < EXAMPLES_MAX:
            example = " ".join(text.split())[:EXAMPLE_CHARS_MAX]
            if example not in group.examples:
                group.examples.append(example)

    def top(self, most: int) -> list[ErrorGroup]:
        """The most frequent, the most frequent first; the last of each class holds all others."""
        ordered = self._ordered()
        shown, rest = ordered[:most], ordered[most:]
        others = _joined(
            [*(one for one in shown if one.text == OTHERS), *rest],
        )
        return [one for one in shown if one.text != OTHERS] + others

    def _ordered(self) -> list[ErrorGroup]:
        found = [
            ErrorGroup(error_class, text, group.count, group.rows, list(group.examples))
            for (error_class, text), group in self._groups.items()
        ]
        found.sort(key=lambda one: (-one.count, one.error_class, one.text))
        return found

    def _join_rare(self) -> None:
        """Join the rarer half, so that there is room for texts that come more often."""
        newest = next(reversed(self._groups))
        ordered = [one for one in self._ordered() if (one.error_class, one.text) != newest]
        half = GROUPS_KEPT // 2
        kept = [one for one in ordered[:half] if one.text != OTHERS]
        rare = [*ordered[half:], *(one for one in ordered[:half] if one.text == OTHERS)]
        group = self._groups[newest]
        self._groups = ErrorGroups([*kept, *_joined(rare)])._groups
        self._groups[newest] = group


def _joined(groups: Sequence[ErrorGroup]) -> list[ErrorGroup]:
    """One group for each class, with the sums."""
    classes = sorted({one.error_class for one in groups})
    found = []
    for error_class in classes:
        alike = [one for one in groups if one.error_class == error_class]
        examples = [example for one in alike for example in one.examples][:EXAMPLES_MAX]
        count, rows = sum(one.count for one in alike), sum(one.rows for one in alike)
        found.append(ErrorGroup(error_class, OTHERS, count, rows, examples))
    return found
