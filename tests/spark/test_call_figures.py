"""Figures of calls are the same, whether rows are counted one by one or together."""

from __future__ import annotations

import pytest

from holdfast.ledger.states import State
from holdfast.spark.call_figures import LATENCY_BUCKETS, UNKNOWN_US, CallFigures
from holdfast.spark.caller import Ended

MICROS = [0, 1, 2, 3, 7, 8, 1000, 2**31, 2**40, 5, 20]


def ended(micros: int, cost: float = 0.0) -> Ended:
    return Ended(1, State.TERMINAL_SUCCESS, (1,), 0, "", 0, cost, micros)


def test_rows_count_as_calls_one_by_one() -> None:
    alone, together = CallFigures(), CallFigures()
    for n, micros in enumerate(MICROS):
        alone.add(1, n / 2, micros)
    together.add_rows([ended(micros, n / 2) for n, micros in enumerate(MICROS)], 1)
    assert together.mean_us == alone.mean_us
    assert (together.calls, together.cost) == (alone.calls, alone.cost) == (11, 27.5)
    assert together.taken() == alone.taken()


def test_a_row_that_was_not_called_is_not_counted() -> None:
    figures = CallFigures()
    figures.add_rows([ended(-1)], 1)
    assert figures.mean_us == UNKNOWN_US
    assert figures.taken() == (0, 0.0, [0] * LATENCY_BUCKETS)


def test_a_mapped_row_is_no_call_and_has_its_time() -> None:
    figures = CallFigures()
    figures.add_rows([ended(4)], 0)
    assert (figures.calls, figures.mean_us) == (0, 4)


def test_figures_are_told_once() -> None:
    figures = CallFigures()
    figures.add(2, 0.5, 3)
    calls, cost, latency = figures.taken()
    assert (calls, cost, sum(latency)) == (2, 0.5, 2)
    figures.add_rows([ended(3, 0.25)], 1)
    calls, cost, latency = figures.taken()
    assert (calls, cost, sum(latency)) == (1, 0.25, 1)
    assert (figures.calls, figures.cost) == (3, 0.75)


@pytest.mark.parametrize(("micros", "bucket"), [(0, 0), (1, 0), (2, 1), (1023, 9), (2**50, 31)])
def test_a_latency_is_counted_by_its_power_of_two(micros: int, bucket: int) -> None:
    figures = CallFigures()
    figures.add_rows([ended(micros)], 1)
    assert figures.taken()[2][bucket] == 1
