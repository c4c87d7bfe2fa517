"""Error classes and the retry decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.ledger.run_policy import (
    RETRYABLE,
    ErrorClass,
    RetryVerdict,
    RunPolicy,
    backoff_ns,
    decide_retry,
)


@pytest.mark.parametrize("kind", ErrorClass)
def test_three_error_classes_are_retryable(kind: ErrorClass) -> None:
    verdict = decide_retry(kind, attempts=0, retries_used=0, policy=RunPolicy())
    assert (verdict is RetryVerdict.RETRY) == (kind in RETRYABLE)
    assert (kind in RETRYABLE) == (kind.name in {"TRANSIENT", "RESOURCE", "LEASE_EXPIRED"})


@pytest.mark.parametrize("attempts_max", [1, 2, 3])
def test_row_is_tried_attempts_max_times(attempts_max: int) -> None:
    policy = RunPolicy(attempts_max=attempts_max)
    tries = 1
    while decide_retry(
        ErrorClass.TRANSIENT, attempts=tries - 1, retries_used=0, policy=policy
    ) is RetryVerdict.RETRY:  # fmt: skip
        tries += 1
    assert tries == attempts_max


def test_retries_max_bounds_the_retries_of_a_run() -> None:
    policy = RunPolicy(retries_max=5)
    verdicts = [
        decide_retry(ErrorClass.RESOURCE, attempts=0, retries_used=used, policy=policy)
        for used in (4, 5, 6)
    ]
    assert verdicts == [RetryVerdict.RETRY, RetryVerdict.FAIL, RetryVerdict.FAIL]


@given(seq=st.integers(0, 1 << 40), attempts=st.integers(0, 254))
def test_backoff_depends_only_on_the_row_and_the_policy(seq: int, attempts: int) -> None:
    policy = RunPolicy()
    delay = backoff_ns(seq, attempts, policy)
    assert delay == backoff_ns(seq, attempts, codec.unpack_as(RunPolicy, codec.pack(policy)))
    assert 0 < delay <= policy.backoff_max_ns


def test_backoff_spreads_rows_that_failed_together() -> None:
    assert len({backoff_ns(seq, 0, RunPolicy()) for seq in range(100)}) > 90


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts_max": 0},
        {"attempts_max": 256},
        {"retries_max": -1},
        {"lease_ns": 0},
        {"grace_ns": -1},
        {"page_rows": 0},
        {"batch_rows": 3, "page_rows": 8},
        {"batch_rows": 16, "page_rows": 8},
        {"ahead_rows_max": -1},
        {"backoff_factor": 0.5},
    ],
)
def test_invalid_run_policy_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Invalid):
        RunPolicy(**wrong)  # type: ignore[arg-type]
