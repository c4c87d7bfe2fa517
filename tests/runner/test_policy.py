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
from holdfast.runner import Fault, Faults, Policy, Refused
from holdfast.runner.dispatch import Misrouted
from holdfast.runner.faults import code_of

MODULES = ("holdfast.runner.policy", "holdfast.runner.faults")


def test_the_default_policy_is_a_policy_without_arguments() -> None:
    faults = Faults()
    assert replace(Policy.default(), faults=faults) == Policy(faults=faults)


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
def test_a_knob_out_of_bounds_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Invalid) as refusal:
        Policy(**{field: value})
    assert refusal.value.field == field
    assert refusal.value.found == value


@given(
    limit=st.integers(1, 64),
    share=st.floats(0.01, 0.99),
    first=st.integers(0, 1_000_000),
)
def test_over_many_ticks_timers_and_queue_both_get_their_share(
    limit: int, share: float, first: int
) -> None:
    policy = Policy(timer_share=share)
    ticks = 400
    dealt = [policy.reserved(tick, limit) for tick in range(first, first + ticks)]
    assert all(0 <= reserved <= limit for reserved in dealt)
    assert abs(sum(dealt) - ticks * limit * share) <= 2
    assert 0 < sum(dealt) < ticks * limit


@given(seq=st.integers(1, 2**62), failures=st.integers(1, 1_000_000))
def test_a_delay_depends_on_the_item_and_its_failures_alone(seq: int, failures: int) -> None:
    policy = Policy(backoff=Backoff(first_ns=10 * MS, factor=2.0, max_ns=S))
    delay_ns = policy.delay_ns(seq, failures)
    assert delay_ns == policy.delay_ns(seq, failures)
    ceiling_ns = min(10 * MS * 2 ** min(failures - 1, 20), S)
    assert ceiling_ns // 2 <= delay_ns <= ceiling_ns


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (None, Fault.SUCCESS),
        (Conflict(), Fault.CONFLICT),
        (Busy(), Fault.BUSY),
        (Held(resource="r"), Fault.BUSY),
        (Timeout(), Fault.TRANSIENT),
        (StoreFull(), Fault.TRANSIENT),
        (CommitUnknown(), Fault.TRANSIENT),
        (Refused(), Fault.REFUSED),
        (Misrouted(), Fault.REFUSED),
        (Invalid(), Fault.FATAL),
        (NotFound(), Fault.FATAL),
        (ClaimLost(), Fault.FATAL),
        (ValueError("x"), Fault.FATAL),
        (TimeoutError(), Fault.FATAL),
    ],
)
def test_the_table_of_faults(error: Exception | None, fault: Fault) -> None:
    assert Faults().of(error) is fault


def test_a_registered_class_is_retried_with_its_subclasses() -> None:
    faults = Faults().retrying(OSError)
    assert faults.of(ConnectionResetError()) is Fault.TRANSIENT
    assert faults.of(ValueError()) is Fault.FATAL
    assert Faults().of(OSError()) is Fault.FATAL


def test_the_nearest_class_decides() -> None:
    faults = Faults().retrying(OSError).failing(PermissionError, Held)
    assert faults.of(PermissionError()) is Fault.FATAL
    assert faults.of(OSError()) is Fault.TRANSIENT
    assert faults.of(Held()) is Fault.FATAL
    assert faults.of(Busy()) is Fault.BUSY


def test_a_subclass_may_say_that_it_is_not_retryable() -> None:
    class Never(Busy):
        retryable = False

    class Ours(HoldfastError):
        retryable = True

    assert Faults().of(Never()) is Fault.FATAL
    assert Faults().of(Ours()) is Fault.TRANSIENT


def test_only_exception_classes_can_be_registered() -> None:
    for wrong in (KeyboardInterrupt, ValueError(), "ValueError"):
        with pytest.raises(Invalid):
            Faults().retrying(wrong)  # type: ignore[arg-type]


def test_a_code_is_always_short_text_and_a_failure_is_never_called_ok() -> None:
    class Odd(HoldfastError):
        code = "ok"

    class Long(HoldfastError):
        code = "x" * 1000

    class Number(HoldfastError):
        code = 7  # type: ignore[assignment]

    assert code_of(None) == "ok"
    assert code_of(Odd()) == code_of(Number()) == code_of(ValueError()) == "handler_error"
    assert code_of(Long()) == "x" * 100
