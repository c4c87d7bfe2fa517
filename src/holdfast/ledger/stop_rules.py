"""Stop rules: bounds on failures and cost at which a run stops granting rows.

Pure. The counts cover rows that finished since the run was last started or resumed, and the cost of
all calls since then. A stop is a log entry (`StopRuleReached`), so a replay does not evaluate the
rules again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.codec import Record
from holdfast.durable.error_text import normalise
from holdfast.errors import Invalid

# Distinct errors kept for `same_error`. Above it, the rarer half is dropped.
ERRORS_KEPT = 4096
LOST_ROW_ERROR = "its process died, or its lease ran out"


class StopRules(Record, frozen=True):
    """Bounds; 0 means unlimited."""

    failures: int = 0
    # The share of finished rows that failed, once `of` rows finished.
    share: float = 0.0
    of: int = 0
    cost: float = 0.0
    same_error: int = 0

    def __post_init__(self) -> None:
        if (
            min(self.failures, self.share, self.of, self.cost, self.same_error) < 0
            or self.share > 1
        ):
            raise Invalid(what="stop rules", why="out of bounds", found=str(self))

    @property
    def has_bounds(self) -> bool:
        return bool(self.failures or self.share or self.cost or self.same_error)

    @property
    def needs_counts(self) -> bool:
        """Whether the log must record more than the outcomes of rows."""
        return bool(self.cost or self.same_error)


class StopTally(NamedTuple):
    """Inputs of the stop rules: failed rows, finished rows, cost of calls."""

    failed: int
    ended: int
    cost: float


class StopCounts:
    """Counts for the stop rules since the run started or resumed. A part of the run state."""

    __slots__ = ("base", "cost", "errors")

    def __init__(self) -> None:
        # Rows failed and finished when counting started.
        self.base = (0, 0)
        self.cost = 0.0
        # Failed rows by `error_id`.
        self.errors: dict[int, int] = {}

    def add(self, cost: float, errors: Iterable[tuple[int, int]]) -> None:
        self.cost += cost
        self.errors = add_errors(self.errors, errors)

    def restart(self, failed: int, ended: int) -> None:
        self.base = (failed, ended)
        self.cost, self.errors = 0.0, {}

    def exclude(self, failed: int, ended: int) -> None:
        """Exclude finished rows from the counts: adopted outcomes do not count towards stop rules."""
        self.base = (self.base[0] + failed, self.base[1] + ended)

    def tally(self, failed: int, ended: int) -> StopTally:
        """The current inputs of the stop rules, for these totals of the run."""
        return StopTally(failed - self.base[0], ended - self.base[1], self.cost)


def add_errors(counts: dict[int, int], errors: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Add error counts. The result is bounded and deterministic for the same sequence of errors."""
    for error, rows in errors:
        counts[error] = counts.get(error, 0) + rows
    if len(counts) > ERRORS_KEPT:
        kept = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        counts = dict(kept[: ERRORS_KEPT // 2])
    return counts


def error_id(error_class: int, text: str) -> int:
    """Return an id of an error class and normalised text. It fits into a signed 64-bit integer."""
    data = f"{error_class}:{normalise(text)}".encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def reached_rule(
    rules: StopRules, tally: StopTally, error_counts: Iterable[tuple[int, str]]
) -> str:
    """Return a description of the first rule that is reached, or "".

    `error_counts` has the errors just counted: rows that failed with the error so far, and its
    description.
    """
    if rules.failures and tally.failed >= rules.failures:
        return f"{tally.failed:,} rows failed (failures={rules.failures})"
    if rules.share and tally.ended >= max(rules.of, 1) and tally.failed:
        share = tally.failed / tally.ended
        if share >= rules.share:
            return (
                f"{tally.failed:,} of {tally.ended:,} rows failed, {share:.1%} "
                f"(share={rules.share:g}, of={rules.of})"
            )
    if rules.cost and tally.cost >= rules.cost:
        return f"the calls cost {tally.cost:g} (cost={rules.cost:g})"
    for rows, text in error_counts if rules.same_error else ():
        if rows >= rules.same_error:
            return (
                f"{rows:,} rows failed with the same error, {text} (same_error={rules.same_error})"
            )
    return ""
