from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import MS, S
from holdfast.errors import (
    Busy,
    ClaimLost,
    CommitUnknown,
    Conflict,
    Held,
    HoldfastError,
    Invalid,
    NotFound,
    StoreFull,
    Timeout,
)
from holdfast.retry import Backoff
from holdfast.runner import ErrorKind, ErrorPolicy, Refused, RunnerPolicy
from holdfast.runner.error_policy import code_of
from holdfast.runner.frame_handler import Misrouted

MODULES = ("holdfast.runner.policy", "holdfast.runner.error_policy")


def test_policy_default_equals_a_policy_without_arguments() -> None:
    faults = ErrorPolicy()
    assert replace(RunnerPolicy.default(), faults=faults) == RunnerPolicy(faults=faults)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_ttl_ms", 0),
        ("lease_ttl_ms", 10**15),
        ("lease_ttl_ms", 1.5),
        ("requeue_max_attempts", 0),
        ("retry_budget_max", -1),
        ("expiries_max", 0),
        ("max_batch", 0),
        ("max_batch", True),
        ("max_batch", 1_000_000),
        ("timer_share", 0),
        ("timer_share", 1),
        ("timer_share", "half"),
        ("idle_sleep_max_ms", 0),
        ("settle_after_ms", 0),
        ("settle_after_ms", 30_000),
        ("on_fatal", "panic"),
        ("backoff", None),
        ("backoff", Backoff(max_ns=400 * 24 * 3600 * S)),
        ("backoff", Backoff(factor=0.5)),
        ("faults", {}),
    ],
)
def test_policy_rejects_a_field_out_of_bounds_by_name(field: str, value: Any) -> None:
    with pytest.raises(Invalid) as caught:
        RunnerPolicy(**{field: value})
    assert caught.value.field == field
    assert caught.value.found == value


@given(
    limit=st.integers(1, 64),
    share=st.floats(0.01, 0.99),
    first=st.integers(0, 1_000_000),
)
def test_policy_reserves_the_timer_share_over_many_ticks(
    limit: int, share: float, first: int
) -> None:
    policy = RunnerPolicy(timer_share=share)
    ticks = 400
    reserved_counts = [
        policy.reserved_for_timers(tick, limit) for tick in range(first, first + ticks)
    ]
    assert all(0 <= reserved <= limit for reserved in reserved_counts)
    assert abs(sum(reserved_counts) - ticks * limit * share) <= 2
    assert 0 < sum(reserved_counts) < ticks * limit


@given(seq=st.integers(1, 2**62), failures=st.integers(1, 1_000_000))
def test_policy_retry_delay_depends_only_on_item_and_failures(seq: int, failures: int) -> None:
    policy = RunnerPolicy(backoff=Backoff(first_ns=10 * MS, factor=2.0, max_ns=S))
    delay_ns = policy.delay_ns(seq, failures)
    assert delay_ns == policy.delay_ns(seq, failures)
    ceiling_ns = min(10 * MS * 2 ** min(failures - 1, 20), S)
    assert ceiling_ns // 2 <= delay_ns <= ceiling_ns


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (None, ErrorKind.SUCCESS),
        (Conflict(), ErrorKind.CONFLICT),
        (Busy(), ErrorKind.BUSY),
        (Held(resource="r"), ErrorKind.BUSY),
        (Timeout(), ErrorKind.TRANSIENT),
        (StoreFull(), ErrorKind.TRANSIENT),
        (CommitUnknown(), ErrorKind.TRANSIENT),
        (Refused(), ErrorKind.REFUSED),
        (Misrouted(), ErrorKind.REFUSED),
        (Invalid(), ErrorKind.FATAL),
        (NotFound(), ErrorKind.FATAL),
        (ClaimLost(), ErrorKind.FATAL),
        (ValueError("x"), ErrorKind.FATAL),
        (TimeoutError(), ErrorKind.FATAL),
    ],
)
def test_error_policy_classifies_errors_by_default_table(
    error: Exception | None, fault: ErrorKind
) -> None:
    assert ErrorPolicy().classify(error) is fault


def test_error_policy_retries_a_registered_class_and_its_subclasses() -> None:
    faults = ErrorPolicy().with_retryable(OSError)
    assert faults.classify(ConnectionResetError()) is ErrorKind.TRANSIENT
    assert faults.classify(ValueError()) is ErrorKind.FATAL
    assert ErrorPolicy().classify(OSError()) is ErrorKind.FATAL


def test_error_policy_uses_the_most_specific_class() -> None:
    faults = ErrorPolicy().with_retryable(OSError).with_fatal(PermissionError, Held)
    assert faults.classify(PermissionError()) is ErrorKind.FATAL
    assert faults.classify(OSError()) is ErrorKind.TRANSIENT
    assert faults.classify(Held()) is ErrorKind.FATAL
    assert faults.classify(Busy()) is ErrorKind.BUSY


def test_error_policy_follows_the_retryable_attribute_of_a_subclass() -> None:
    class NonRetryableBusy(Busy):
        retryable = False

    class RetryableError(HoldfastError):
        retryable = True

    assert ErrorPolicy().classify(NonRetryableBusy()) is ErrorKind.FATAL
    assert ErrorPolicy().classify(RetryableError()) is ErrorKind.TRANSIENT


def test_error_policy_registers_only_exception_classes() -> None:
    for wrong in (KeyboardInterrupt, ValueError(), "ValueError"):
        with pytest.raises(Invalid):
            ErrorPolicy().with_retryable(wrong)  # type: ignore[arg-type]


def test_code_of_is_short_text_and_never_ok_for_a_failure() -> None:
    class OkCodeError(HoldfastError):
        code = "ok"

    class LongCodeError(HoldfastError):
        code = "x" * 1000

    class NumericCodeError(HoldfastError):
        code = 7  # type: ignore[assignment]

    assert code_of(None) == "ok"
    assert (
        code_of(OkCodeError())
        == code_of(NumericCodeError())
        == code_of(ValueError())
        == "handler_error"
    )
    assert code_of(LongCodeError()) == "x" * 100
