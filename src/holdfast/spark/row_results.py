"""Call context and special results of a stage's function.

def classify(row, call):
    if not row.text:
        return Skip("empty")                  # ends the row, without a result
    if quota_used_up():
        return Retry("quota", after_s=30)     # retries this row later
    if row.text.startswith("%PDF"):
        return Fail("not text")               # fails the row: no retry will help
    answer = llm(row.text, idempotency_key=call.idempotency_key)
    call.cost = answer.usd                    # shown in the progress bar and in the report
    call.tokens = answer.tokens               # tokens used, for tokens_per_min
    call.progress()                           # still running: timeout_s restarts
    return {"label": answer.label}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.spark.call_slots import CallSlot


@dataclass(frozen=True, slots=True)
class Skip:
    """End this row without a result."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry this row after the backoff, or after `after_s`, while attempts are left."""

    reason: str = ""
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail this row without a retry."""

    reason: str = ""


class Call:
    """One attempt at one row, or at the `rows` rows of a batch from `seq` to `last`.

    `idempotency_key` is the same for every attempt, in this run and in later runs over a grown input,
    while the row's key and content do not change. The key of a batch covers its rows together: when a
    batch is retried in parts, each part has a different key.
    """

    __slots__ = ("_slot", "attempt", "cost", "last", "origin", "rows", "run_id", "seq", "tokens")

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
        # Run and seq under which this row first occurred, if that was an earlier run.
        self.origin = origin
        self.cost = 0.0
        # Tokens that the call used, if the function sets it; else the estimate counts.
        self.tokens: int | None = None
        self._slot: CallSlot | None = None

    def progress(self) -> None:
        """Report progress: `timeout_s` restarts. For long calls, from any thread."""
        if self._slot is not None:
            self._slot.progress(self.seq, self.attempt)

    @property
    def idempotency_key(self) -> str:
        run_id, seq = self.origin or (self.run_id, self.seq)
        if self.last is None:
            return f"{run_id}:{seq}"
        return f"{run_id}:{seq}-{seq + self.last - self.seq}:{self.rows}"
