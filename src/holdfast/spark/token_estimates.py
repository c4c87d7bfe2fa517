"""Token estimates of calls: a number, or a function of the row (or batch)."""

from __future__ import annotations

from typing import Any

from holdfast.ledger.run_policy import ErrorClass
from holdfast.spark.call_pool import GrantedRows, PresetFailure, fail_unconvertible
from holdfast.spark.function_pickle import TokenEstimate


def set_token_estimates(granted: GrantedRows, estimate: TokenEstimate, *, batch: bool) -> None:
    """Set the token estimate of each call of a grant, by the first row of the call. A row without
    an estimate (the function raised) fails with the reason and is not called.
    """
    if batch:
        granted.token_estimates[granted.seqs[0]] = _estimate_call(
            granted, estimate, granted.rows, range(len(granted.seqs))
        )
        return
    rows = granted.rows.peek(len(granted.seqs))
    fail_unconvertible(granted)
    for at, seq in enumerate(granted.seqs):
        granted.token_estimates[seq] = (
            0
            if at in granted.preset_failures
            else _estimate_call(granted, estimate, rows[at], [at])
        )


def _estimate_call(
    granted: GrantedRows, estimate: TokenEstimate, subject: Any, positions: Any
) -> int:
    if not callable(estimate):
        return estimate
    try:
        return max(int(estimate(subject)), 0)
    except Exception as error:
        why = f"its tokens cannot be estimated: {type(error).__name__}: {error}"
        for at in positions:
            granted.preset_failures[at] = PresetFailure(int(ErrorClass.INPUT), why, -1)
        return 0
