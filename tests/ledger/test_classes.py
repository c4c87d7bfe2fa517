"""Error classes and the retry decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.ledger.classes import RETRYABLE, ErrorClass, Policy, Verdict, decide, delay_ns


@pytest.mark.parametrize("kind", ErrorClass)
def test_only_three_classes_are_tried_again(kind: ErrorClass) -> None:
    verdict = decide(kind, attempts=0, retries_used=0, policy=Policy())
    assert (verdict is Verdict.RETRY) == (kind in RETRYABLE)
    assert (kind in RETRYABLE) == (kind.name in {"TRANSIENT", "RESOURCE", "LEASE_EXPIRED"})


@pytest.mark.parametrize("attempts_max", [1, 2, 3])
def test_a_row_is_tried_as_often_as_the_policy_says(attempts_max: int) -> None:
    policy = Policy(attempts_max=attempts_max)
    tries = 1
    while decide(
        ErrorClass.TRANSIENT, attempts=tries - 1, retries_used=0, policy=policy
    ) is Verdict.RETRY:  # fmt: skip
        tries += 1
    assert tries == attempts_max


def test_a_run_has_a_budget_of_its_own() -> None:
    policy = Policy(retries_max=5)
    told = [
        decide(ErrorClass.RESOURCE, attempts=0, retries_used=used, policy=policy)
        for used in (4, 5, 6)
    ]
    assert told == [Verdict.RETRY, Verdict.FAIL, Verdict.FAIL]


@given(seq=st.integers(0, 1 << 40), attempts=st.integers(0, 254))
def test_a_delay_depends_on_nothing_but_the_row_and_the_policy(seq: int, attempts: int) -> None:
    policy = Policy()
    delay = delay_ns(seq, attempts, policy)
    assert delay == delay_ns(seq, attempts, codec.unpack_as(Policy, codec.pack(policy)))
    assert 0 < delay <= policy.backoff_max_ns


def test_rows_that_failed_together_do_not_come_back_together() -> None:
    assert len({delay_ns(seq, 0, Policy()) for seq in range(100)}) > 90


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
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Invalid):
        Policy(**wrong)  # type: ignore[arg-type]
