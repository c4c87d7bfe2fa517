"""Costs of stages by day: what the calls of a stage have spent on each day, in money and in tokens.

    "e" <day> <stage> <unit>    the amount of a day, since 1970 by store time
    "eb" <stage> <unit>         the amount that no day has: of an older version, or of expired days; less that of deleted runs

- The commit that publishes the progress of a run adds what its calls have spent since the last one.
- The sum of the days and the amount of "eb" is what the stored runs of the stage have spent. `verify` compares them.
- Money is in millionths of the unit in which the calls report their costs.
- A day is kept for `KEPT_DAYS`. A commit that writes a new row removes expired ones, so their number is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.clock import S
from holdfast.config import SCAN_PAGE
from holdfast.durable.difference import Difference
from holdfast.ledger import runs
from holdfast.ledger.runs import RunProgress
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows

DAY_NS = 86_400 * S
KEPT_DAYS = 100
MONEY, TOKENS = UNITS = ("money", "tokens")
# Expired rows that a commit removes when it writes a new one.
EXPIRED_MAX = 4

_DAYS = schema.key_prefix(schema.Space.RUN, "e")
_BASES = schema.key_prefix(schema.Space.RUN, "eb")
_MILLIONTHS = 1_000_000


class StageDay(NamedTuple):
    """What the calls of a stage have spent on a day."""

    day: int
    stage: str
    unit: str
    amount: int


def publish_progress(txn: Txn, run_id: str, progress: RunProgress) -> None:
    """Store the progress of a run, and add what its calls have spent since the last one to the day."""
    record = runs.get_record(txn, run_id)
    if record is not None:
        before = _spent(runs.get_progress(txn, run_id))
        for unit, amount in _spent(progress).items():
            if amount != before[unit]:
                _add(txn, record.name, unit, amount - before[unit])
    runs.put_progress(txn, run_id, progress)


def forget_run(txn: Txn, stage: str, progress: RunProgress) -> None:
    """Keep the days of a run whose progress is deleted."""
    for unit, amount in _spent(progress).items():
        key = _BASES + tuples.pack((stage, unit))
        if amount and txn.get(key) is not None:
            txn.add(key, -amount)


def list_days(txn: Txn, stage: str, first: int, last: int) -> list[StageDay]:
    """Return what a stage has spent on the days from `first` to `last`."""
    found: list[StageDay] = []
    for day in range(first, last + 1):
        prefix = _DAYS + tuples.pack((day, stage))
        rows = txn.scan(prefix, tuples.prefix_end(prefix), len(UNITS))
        found += [_decode(key, row) for key, row in rows]
    return found


def find_differences(txn: Txn) -> Iterator[Difference]:
    """Compare the days of each stage with the progress of its stored runs."""
    for (stage, unit), (found, spent) in _sums(txn).items():
        if found != spent:
            yield Difference("statistic", "stages", f"{unit} of the days of {stage}", found, spent)


def rebuild(txn: Txn, _universe: str) -> None:
    """Keep the days. The rest of what the stored runs have spent belongs to none. Stages belong to no universe."""
    for (stage, unit), (found, spent) in _sums(txn).items():
        if found != spent:
            base = _BASES + tuples.pack((stage, unit))
            txn.put(base, schema.encode_int(txn.count(base) + spent - found))


def _add(txn: Txn, stage: str, unit: str, amount: int) -> None:
    """Add to the day. The stored progress is that before the change."""
    day = txn.now_ns // DAY_NS
    key = _DAYS + tuples.pack((day, stage, unit))
    if txn.get(key) is None:
        _remove_expired(txn, day)
        base = _BASES + tuples.pack((stage, unit))
        if txn.get(base) is None:
            txn.put(base, schema.encode_int(_spent_by_stage(txn)[stage, unit]))
    txn.add(key, amount)


def _remove_expired(txn: Txn, day: int) -> None:
    for key, row in txn.scan(_DAYS, _DAYS + tuples.pack((day - KEPT_DAYS,)), EXPIRED_MAX):
        gone = _decode(key, row)
        txn.delete(key)
        txn.add(_BASES + tuples.pack((gone.stage, gone.unit)), gone.amount)


def _sums(txn: Txn) -> dict[tuple[str, str], tuple[int, int]]:
    """Return for each stage and unit with days the sum of days and base, and what its stored runs have spent."""
    sums: Counter[tuple[str, str]] = Counter()
    for key, row in iter_rows(txn, _BASES):
        stage, unit = (str(part) for part in tuples.unpack(key[len(_BASES) :]))
        sums[stage, unit] += schema.decode_int(row)
    for key, row in iter_rows(txn, _DAYS):
        one = _decode(key, row)
        sums[one.stage, one.unit] += one.amount
    spent = _spent_by_stage(txn)
    return {pair: (found, spent[pair]) for pair, found in sums.items()}


def _spent_by_stage(txn: Txn) -> Counter[tuple[str, str]]:
    spent: Counter[tuple[str, str]] = Counter()
    after = ""
    while page := runs.list_runs(txn, after, SCAN_PAGE):
        for record in page:
            for unit, amount in _spent(runs.get_progress(txn, record.run_id)).items():
                spent[record.name, unit] += amount
        after = page[-1].run_id
    return spent


def _spent(progress: RunProgress | None) -> dict[str, int]:
    if progress is None:
        return dict.fromkeys(UNITS, 0)
    return {MONEY: round(progress.cost * _MILLIONTHS), TOKENS: progress.tokens}


def _decode(key: bytes, row: bytes) -> StageDay:
    day, stage, unit = tuples.unpack(key[len(_DAYS) :])
    assert isinstance(day, int)
    return StageDay(day, str(stage), str(unit), schema.decode_int(row))
