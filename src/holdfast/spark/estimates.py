"""Estimates of the tokens that a call will use: a number, or a function of its row (or batch)."""

from __future__ import annotations

from typing import Any

from holdfast.ledger.classes import ErrorClass
from holdfast.spark.code import Estimate
from holdfast.spark.pool import Held, Settled, settle_unfit


def set_prices(held: Held, estimate: Estimate, *, batch: bool) -> None:
    """The price of each call of a grant, by the first row of the call. A row whose tokens cannot be
    estimated fails with the reason, and is not called."""
    if batch:
        held.prices[held.seqs[0]] = _price(held, estimate, held.rows, range(len(held.seqs)))
        return
    rows = held.rows.ahead(len(held.seqs))
    settle_unfit(held)
    for at, seq in enumerate(held.seqs):
        held.prices[seq] = 0 if at in held.settled else _price(held, estimate, rows[at], [at])


def _price(held: Held, estimate: Estimate, subject: Any, places: Any) -> int:
    if not callable(estimate):
        return estimate
    try:
        return max(int(estimate(subject)), 0)
    except Exception as error:
        why = f"its tokens cannot be estimated: {type(error).__name__}: {error}"
        for at in places:
            held.settled[at] = Settled(int(ErrorClass.INPUT), why, -1)
        return 0
