"""When a run stops handing out rows by itself: bounds on failures and on cost, and whether one is reached.

Pure. The counts are of rows that ended for good since the run was last started or resumed; the cost is that of
all calls since then. The decision is an entry of the run's log (`Stopped`), so a replay asks nothing again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.codec import Record
from holdfast.errors import Invalid
from holdfast.ledger.error_text import normalise

# Errors that are told apart for `same_error`. One more, and the rarer half is forgotten.
ERRORS_KEPT = 4096
GONE = "its process died, or its lease ran out"


class StopRules(Record, frozen=True):
    """Bounds; 0 is none."""

    failures: int = 0
    # Of the rows that ended, once `of` of them did.
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
    def armed(self) -> bool:
        return bool(self.failures or self.share or self.cost or self.same_error)

    @property
    def counted(self) -> bool:
        """Whether the log must tell more than how rows ended."""
        return bool(self.cost or self.same_error)


class Tally(NamedTuple):
    """What counts towards the rules: rows that failed and that ended, and what the calls cost."""

    failed: int
    ended: int
    cost: float


def add_errors(counts: dict[int, int], errors: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Add these to the rows by error; bounded, and the same for the same errors in the same order."""
    for error, rows in errors:
        counts[error] = counts.get(error, 0) + rows
    if len(counts) > ERRORS_KEPT:
        kept = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        counts = dict(kept[: ERRORS_KEPT // 2])
    return counts


def error_id(error_class: int, text: str) -> int:
    """A number for errors of one class and one normalised text; it fits into a signed 64-bit integer."""
    told = f"{error_class}:{normalise(text)}".encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "big")


def reached(rules: StopRules, tally: Tally, alike: Iterable[tuple[int, str]]) -> str:
    """The rule that is reached, in words with its figures; empty while none is.

    `alike` has the errors that were just counted: rows that ended with it so far, and the error in words.
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
    for rows, text in alike if rules.same_error else ():
        if rows >= rules.same_error:
            return (
                f"{rows:,} rows failed with the same error, {text} (same_error={rules.same_error})"
            )
    return ""
