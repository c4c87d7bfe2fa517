"""Error groups of a run: counts by error class and normalised text, with examples. Pure and bounded
in memory.

Each group has two figures. `count` is the number of failed attempts, including retried ones. `rows`
is the number of rows whose final state is this failure. The rows of all groups add up to the failed
rows of the run. Groups beyond `GROUPS_KEPT` are merged into one group per class. None is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import field

from holdfast.codec import Record
from holdfast.durable.error_text import normalise

GROUPS_KEPT = 500
EXAMPLES_MAX = 3
EXAMPLE_CHARS_MAX = 300
OTHER_ERRORS = "(other errors)"


class ErrorGroup(Record, frozen=True):
    error_class: int
    text: str
    count: int
    # Rows that finally failed with this error. 0 in records of older versions.
    rows: int = 0
    examples: list[str] = field(default_factory=list)


class _Group:
    __slots__ = ("count", "examples", "rows")

    def __init__(self) -> None:
        self.count = 0
        self.rows = 0
        self.examples: list[str] = []


class ErrorGroups:
    def __init__(self, previous: Iterable[ErrorGroup] = ()) -> None:
        self._groups: dict[tuple[int, str], _Group] = {}
        for error_group in previous:
            group = self._groups.setdefault((error_group.error_class, error_group.text), _Group())
            group.count += error_group.count
            group.rows += error_group.rows
            group.examples = list(error_group.examples)

    def add(self, error_class: int, text: str, *, count: int = 1, rows: int = 0) -> None:
        """Count attempts that failed with this text. `rows` of them made the row fail finally."""
        group = self._groups.get(key := (error_class, normalise(text)))
        if group is None:
            group = self._groups[key] = _Group()
            if len(self._groups) > GROUPS_KEPT:
                self._merge_rare()
        group.count += count
        group.rows += rows
        if len(group.examples) < EXAMPLES_MAX:
            example = " ".join(text.split())[:EXAMPLE_CHARS_MAX]
            if example not in group.examples:
                group.examples.append(example)

    def top(self, limit: int) -> list[ErrorGroup]:
        """Return the `limit` most frequent groups in descending order, then one merged group per
        class.
        """
        ordered = self._by_frequency()
        shown, rest = ordered[:limit], ordered[limit:]
        others = _merge_by_class(
            [*(one for one in shown if one.text == OTHER_ERRORS), *rest],
        )
        return [one for one in shown if one.text != OTHER_ERRORS] + others

    def _by_frequency(self) -> list[ErrorGroup]:
        ordered = [
            ErrorGroup(error_class, text, group.count, group.rows, list(group.examples))
            for (error_class, text), group in self._groups.items()
        ]
        ordered.sort(key=lambda one: (-one.count, one.error_class, one.text))
        return ordered

    def _merge_rare(self) -> None:
        """Merge the rarer half to make room for more frequent texts."""
        newest = next(reversed(self._groups))
        ordered = [one for one in self._by_frequency() if (one.error_class, one.text) != newest]
        half = GROUPS_KEPT // 2
        kept = [one for one in ordered[:half] if one.text != OTHER_ERRORS]
        rare = [*ordered[half:], *(one for one in ordered[:half] if one.text == OTHER_ERRORS)]
        group = self._groups[newest]
        self._groups = ErrorGroups([*kept, *_merge_by_class(rare)])._groups
        self._groups[newest] = group


def _merge_by_class(groups: Sequence[ErrorGroup]) -> list[ErrorGroup]:
    """Merge the groups of each class into one with their sums."""
    classes = sorted({one.error_class for one in groups})
    merged = []
    for error_class in classes:
        same_class = [one for one in groups if one.error_class == error_class]
        examples = [example for one in same_class for example in one.examples][:EXAMPLES_MAX]
        count, rows = sum(one.count for one in same_class), sum(one.rows for one in same_class)
        merged.append(ErrorGroup(error_class, OTHER_ERRORS, count, rows, examples))
    return merged
