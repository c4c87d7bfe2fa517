"""Record prefixes: the records that a worker finds if the former worker of a flow died after one of them.

A replay with a prefix asks for the steps behind it. The record has outcomes for these steps, with the digests of their
arguments, so a prefix finds code whose steps depend on anything but the record. All prefixes of n records deliver n²/2
records, so a long flow is replayed at evenly spaced prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.flows.execution import VALUE_NAMES, StepCall
from holdfast.flows.records import AnyRecord, StepCompleted, StepFailure

# The records that the prefixes of one flow deliver together. Every prefix of 316 records needs 50,000.
DELIVERED_MAX = 50_000


def prefix_lengths(count: int, delivered_max: int = DELIVERED_MAX) -> list[int]:
    """The lengths of the prefixes to replay: all below `count`, or evenly spaced ones."""
    if count * (count - 1) // 2 <= delivered_max:
        return list(range(count))
    number = max(2 * delivered_max // count, 1)
    return [count * index // number for index in range(number)]


def prefix_of(records: Sequence[AnyRecord], length: int) -> list[AnyRecord]:
    """The first records, and the values of `hf.now`, `hf.uuid` and `hf.random` behind them: a new worker makes new
    values, and a replay with other values would ask for other steps."""
    values = [
        record
        for record in records[length:]
        if isinstance(record, StepCompleted) and record.name in VALUE_NAMES
    ]
    return [*records[:length], *values]


def find_other_arguments(
    calls: Iterable[StepCall], records: Sequence[AnyRecord], length: int
) -> StepCall | None:
    """Return the first step whose arguments differ from those of its outcome behind the prefix."""
    digests = {
        (record.name, record.occurrence): record.digest
        for record in records[length:]
        if isinstance(record, StepCompleted | StepFailure)
    }
    for call in calls:
        if not call.accepts(digests.get(call.identity, call.digest)):
            return call
    return None
