"""Spending by day and model: what the calls of an account have spent on each day, in each unit.

    "m" <day> <scope> <model> <unit>    the amount of a day, since 1970 by store time
    "mb" <scope> <unit>                 the amount that no day has: of an older version, or of expired days

- The settlement of a call adds its charges, in the commit that adds them to the account.
- The sum of the days and the amount of "mb" is the spent amount of the account. `verify` compares them.
- A day is kept for `KEPT_DAYS`. A commit that writes a new row removes expired ones, so their number is bounded.
- An account has at most `MODELS_MAX` models on a day. Further models are counted under `OTHER_MODELS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from holdfast.clock import S
from holdfast.durable.difference import Difference
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows

DAY_NS = 86_400 * S
KEPT_DAYS = 100
MODELS_MAX = 64
MODEL_BYTES_MAX = 64
OTHER_MODELS = "(other models)"
# Expired rows that a commit removes when it writes a new one.
EXPIRED_MAX = 4


class DaySpending(NamedTuple):
    """What the calls of an account to one model have spent on a day. `model` is "" for calls without a model."""

    day: int
    scope: str
    model: str
    unit: str
    amount: int


@lru_cache(maxsize=1024)
def day_prefix(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.APP_STATE, "budget", universe, "m")


@lru_cache(maxsize=1024)
def base_prefix(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.APP_STATE, "budget", universe, "mb")


def add(
    txn: Txn, universe: str, scope: str, unit: str, model: str, amount: int, spent: int
) -> None:
    """Add a charge to its day. `spent` is the spent amount of the account without it."""
    day = txn.now_ns // DAY_NS
    name = model.encode(errors="replace")[:MODEL_BYTES_MAX].decode(errors="ignore")
    key = _key(universe, day, scope, name, unit)
    if txn.get(key) is None:
        _remove_expired(txn, universe, day)
        base = base_prefix(universe) + tuples.pack((scope, unit))
        if txn.get(base) is None:
            txn.put(base, schema.encode_int(spent))
        of_scope = day_prefix(universe) + tuples.pack((day, scope))
        rows = txn.scan(of_scope, tuples.prefix_end(of_scope), 2 * MODELS_MAX)
        if len({tuples.unpack(row)[-2] for row, _ in rows} | {name}) > MODELS_MAX:
            key = _key(universe, day, scope, OTHER_MODELS, unit)
    txn.add(key, amount)


def list_days(txn: Txn, universe: str, scope: str, first: int, last: int) -> list[DaySpending]:
    """Return the spending of an account on the days from `first` to `last`, by day and model."""
    found: list[DaySpending] = []
    for day in range(first, last + 1):
        prefix = day_prefix(universe) + tuples.pack((day, scope))
        rows = txn.scan(prefix, tuples.prefix_end(prefix), 2 * (MODELS_MAX + 1))
        found += [_spending(universe, key, row) for key, row in rows]
    return found


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    """Compare the days of each account with its spent amount."""
    for (scope, unit), (found, spent) in _sums(txn, universe).items():
        if found != spent:
            what = f"{unit} of the days of {scope or 'the universe'}"
            yield Difference("statistic", universe, what, found, spent)


def rebuild(txn: Txn, universe: str) -> None:
    """Keep the days. The rest of the spent amount belongs to none."""
    for (scope, unit), (found, spent) in _sums(txn, universe).items():
        base = base_prefix(universe) + tuples.pack((scope, unit))
        if found != spent:
            txn.put(base, schema.encode_int(txn.count(base) + spent - found))


def _sums(txn: Txn, universe: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Return for each account that has days their sum with the base, and the spent amount."""
    sums: dict[tuple[str, str], int] = {}
    for key, row in iter_rows(txn, base_prefix(universe)):
        scope, unit = (str(part) for part in tuples.unpack(key)[-2:])
        sums[scope, unit] = schema.decode_int(row)
    for key, row in iter_rows(txn, day_prefix(universe)):
        day = _spending(universe, key, row)
        sums[day.scope, day.unit] = sums.get((day.scope, day.unit), 0) + day.amount
    spent = schema.key_prefix(schema.Space.APP_STATE, "budget", universe, "s")
    return {pair: (found, txn.count(spent + tuples.pack(pair))) for pair, found in sums.items()}


def _remove_expired(txn: Txn, universe: str, day: int) -> None:
    prefix = day_prefix(universe)
    end = prefix + tuples.pack((day - KEPT_DAYS,))
    for key, row in txn.scan(prefix, end, EXPIRED_MAX):
        gone = _spending(universe, key, row)
        txn.delete(key)
        txn.add(base_prefix(universe) + tuples.pack((gone.scope, gone.unit)), gone.amount)


def _spending(universe: str, key: bytes, row: bytes) -> DaySpending:
    day, scope, model, unit = tuples.unpack(key[len(day_prefix(universe)) :])
    assert isinstance(day, int)
    return DaySpending(day, str(scope), str(model), str(unit), schema.decode_int(row))


def _key(universe: str, day: int, scope: str, model: str, unit: str) -> bytes:
    return day_prefix(universe) + tuples.pack((day, scope, model, unit))
