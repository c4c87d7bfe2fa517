"""What a stage's function is given beside its row, and what it may answer instead of a result.

def classify(row, call):
    if not row.text:
        return Skip("empty")                  # ends the row, without a result
    if quota_used_up():
        return Retry("quota", after_s=30)     # try this row again, later
    if row.text.startswith("%PDF"):
        return Fail("not text")               # ends the row: no retry will help
    answer = llm(row.text, idempotency_key=call.idempotency_key)
    call.cost = answer.usd                    # shows in the progress bar and in the report
    call.tokens = answer.tokens               # what it used, for tokens_per_min
    call.progress()                           # it goes on: timeout_s counts from here
    return {"label": answer.label}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.spark.call_slots import Watch


@dataclass(frozen=True, slots=True)
class Skip:
    """Nothing is to be done for this row."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """Not now: try again, after the backoff or after `after_s`, while attempts are left."""

    reason: str = ""
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """Give this row up."""

    reason: str = ""


class Call:
    """One try at one row, or at the `rows` rows of a batch from `seq` to `last`.

    `idempotency_key` is the same for every try of it, in this run and in later runs over a grown
    input, while the row's key and content stay as they are. Of a batch it is that of these rows
    together: when a batch is tried again in parts, each of them has its own.
    """

    __slots__ = ("_watch", "attempt", "cost", "last", "origin", "rows", "run_id", "seq", "tokens")

    def __init__(
        self,
        run_id: str,
        seq: int,
        attempt: int,
        *,
        last: int | None = None,
        rows: int = 1,
        origin: tuple[str, int] | None = None,
    ) -> None:
        self.run_id = run_id
        self.seq = seq
        self.attempt = attempt
        self.last = last
        self.rows = rows
        # The run and seq that had this row first, if it was not this run.
        self.origin = origin
        self.cost = 0.0
        # What the call used, if it says so; else the estimate counts.
        self.tokens: int | None = None
        self._watch: Watch | None = None

    def progress(self) -> None:
        """It goes on: `timeout_s` counts from now. For calls that are long, from any thread of theirs."""
        if self._watch is not None:
            self._watch.progress(self.seq, self.attempt)

    @property
    def idempotency_key(self) -> str:
        run_id, seq = self.origin or (self.run_id, self.seq)
        if self.last is None:
            return f"{run_id}:{seq}"
        return f"{run_id}:{seq}-{seq + self.last - self.seq}:{self.rows}"
