"""Call metrics are equal, whether rows are added one by one or together."""

from __future__ import annotations

import pytest

from holdfast.ledger.states import RowState
from holdfast.spark.call_metrics import LATENCY_BUCKETS, UNKNOWN_MEAN_US, CallMetrics
from holdfast.spark.caller import CallOutcome

MICROS = [0, 1, 2, 3, 7, 8, 1000, 2**31, 2**40, 5, 20]


def call_outcome(micros: int, cost: float = 0.0) -> CallOutcome:
    return CallOutcome(
        seq=1,
        state=RowState.TERMINAL_SUCCESS,
        values=(1,),
        error_class=0,
        error="",
        delay_ns=0,
        cost=cost,
        micros=micros,
    )


def test_add_rows_counts_rows_like_single_calls() -> None:
    one_by_one, together = CallMetrics(), CallMetrics()
    for n, micros in enumerate(MICROS):
        one_by_one.add(1, n / 2, micros)
    together.add_rows([call_outcome(micros, n / 2) for n, micros in enumerate(MICROS)], 1)
    assert together.mean_us == one_by_one.mean_us
    assert (together.calls, together.cost) == (one_by_one.calls, one_by_one.cost) == (11, 27.5)
    assert together.take_delta() == one_by_one.take_delta()


def test_row_without_a_call_is_not_counted() -> None:
    metrics = CallMetrics()
    metrics.add_rows([call_outcome(-1)], 1)
    assert metrics.mean_us == UNKNOWN_MEAN_US
    assert metrics.take_delta() == (0, 0.0, [0] * LATENCY_BUCKETS)


def test_remapped_row_adds_latency_but_no_call() -> None:
    metrics = CallMetrics()
    metrics.add_rows([call_outcome(4)], 0)
    assert (metrics.calls, metrics.mean_us) == (0, 4)


def test_take_delta_returns_each_call_once() -> None:
    metrics = CallMetrics()
    metrics.add(2, 0.5, 3)
    calls, cost, latency = metrics.take_delta()
    assert (calls, cost, sum(latency)) == (2, 0.5, 2)
    metrics.add_rows([call_outcome(3, 0.25)], 1)
    calls, cost, latency = metrics.take_delta()
    assert (calls, cost, sum(latency)) == (1, 0.25, 1)
    assert (metrics.calls, metrics.cost) == (3, 0.75)


@pytest.mark.parametrize(("micros", "bucket"), [(0, 0), (1, 0), (2, 1), (1023, 9), (2**50, 31)])
def test_latency_is_counted_in_its_power_of_two_bucket(micros: int, bucket: int) -> None:
    metrics = CallMetrics()
    metrics.add_rows([call_outcome(micros)], 1)
    assert metrics.take_delta()[2][bucket] == 1
