"""Call admission of a child: the rate and token limits of the stage, as the ledger service grants them.

The child requests admission for its next calls (`AcquireTokens`). The service reserves calls that may start
at a later time. A begun call consumes one admission. With a token limit each call has an estimate, and each
exchange reports the used and the estimated tokens of the finished calls.
"""

from __future__ import annotations

import itertools

from holdfast.spark import ledger_protocol
from holdfast.spark.call_pool import GrantedRows
from holdfast.spark.child_job import ChildJob
from holdfast.spark.function_pickle import TokenEstimate
from holdfast.spark.token_estimates import set_token_estimates


class CallAdmission:
    def __init__(self, job: ChildJob, estimate: TokenEstimate) -> None:
        self._job = job
        self._estimate = estimate
        # Calls that may start now.
        self._calls = 0
        # Calls that may start from `start_ns` on.
        self._reserved_calls = 0
        self.start_ns = 0
        # Totals of the finished calls: tokens used, and tokens reserved.
        self._tokens_used = self._tokens_estimated = 0

    def estimate(self, granted: GrantedRows) -> None:
        """Set the token estimates of a new grant."""
        set_token_estimates(granted, self._estimate, batch=bool(self._job.batch_rows))

    def begin_reserved(self, now_ns: int) -> None:
        """Admit the reserved calls when their time has come."""
        if self._reserved_calls and now_ns >= self.start_ns:
            self._calls, self._reserved_calls = self._calls + self._reserved_calls, 0

    def is_short(self, grants: list[GrantedRows], now_ns: int) -> bool:
        """Whether to request admission for more calls of these grants."""
        return (
            not self._reserved_calls
            and self._calls < max(self._job.concurrency // 2, 1)
            and bool(grants)
            and self._calls_not_begun(grants) > (self._calls if self._job.token_limited else 0)
            and now_ns >= self.start_ns
        )

    def next_request(
        self, grants: list[GrantedRows], window_rows: int
    ) -> ledger_protocol.AcquireTokens:
        calls = window_rows // (self._job.batch_rows or 1)
        estimates = self._next_estimates(grants, calls) if self._job.token_limited else []
        return ledger_protocol.AcquireTokens(len(estimates) or calls, estimates)

    def reserve(self, granted: ledger_protocol.TokensGranted, now_ns: int) -> None:
        self._reserved_calls = granted.count
        self.start_ns = now_ns + granted.wait_ms * 1_000_000

    def limit(self, rows: int) -> int:
        """Return how many of these rows may begin now."""
        if not self._job.rate:
            return rows
        return min(rows, self._calls * (self._job.batch_rows or 1))

    def spend(self, begun: int) -> None:
        """Consume the admission of begun rows: one per call."""
        if self._job.rate and begun:
            self._calls -= 1 if self._job.batch_rows else begun

    def settle(self, granted: GrantedRows, seq: int, used: int | None, micros: int) -> None:
        """Count used against reserved tokens of a call. Without a reported usage the estimate
        counts.
        """
        estimate = granted.token_estimates.pop(seq, 0)
        self._tokens_estimated += estimate
        if micros >= 0:
            self._tokens_used += estimate if used is None else used

    def take_usage(self) -> tuple[int, int]:
        """Return used and estimated tokens since the previous call of this method."""
        usage = self._tokens_used, self._tokens_estimated
        self._tokens_used = self._tokens_estimated = 0
        return usage

    def _calls_not_begun(self, grants: list[GrantedRows]) -> int:
        """Return the number of granted calls that are not begun."""
        waiting = [len(held.seqs) - held.begun for held in grants]
        return sum(map(bool, waiting)) if self._job.batch_rows else sum(waiting)

    def _next_estimates(self, grants: list[GrantedRows], calls: int) -> list[int]:
        """Return the token estimates of the next calls without admission, up to the maximum under
        way.
        """
        estimates = (
            held.token_estimates.get(seq, 0)
            for held in grants
            if held.begun < len(held.seqs)
            for seq in (held.seqs[:1] if self._job.batch_rows else held.seqs[held.begun :])
        )
        return list(itertools.islice(estimates, self._calls, self._calls + calls))
