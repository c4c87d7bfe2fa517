"""Output succession: the output of a run over a grown input builds on the output of the previous
run.

The sink names the run that wrote its rows (`owner`) and receives the row ranges that are equal in both
runs. Rows are equal when their outcomes are stored at the same place: in one of the two runs, or in a third
run from which both adopted them. Carried input columns must be equal, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.ledger.lineage import RunLineage
from holdfast.ledger.states import RowState
from holdfast.spark.carried_columns import with_equal_values
from holdfast.spark.sinks.api import Base, Begun, Same, Sink, SuccessorSink
from holdfast.store.api import Store

_GOOD_STATES = (int(RowState.TERMINAL_SUCCESS), int(RowState.TERMINAL_SKIP))

# (lo, hi, from_lo), ascending in both.
PointerRanges = list[tuple[int, int, int]]


def begin_sink(sink: Sink, store: Store, record: runs.RunRecord, schema: Any) -> Begun:
    """Begin a sink for a run, on top of the output of an earlier run of its name."""
    if record.base_run and isinstance(sink, SuccessorSink):
        owner = previous_owner(sink, store, record)
        if owner not in ("", record.run_id):
            base = Base(owner, same_rows(store, record, owner))
            return sink.begin_after(base, record.run_id, record.name, schema)
    return Begun(sink.begin(record.run_id, record.name, schema), ())


def previous_owner(sink: SuccessorSink, store: Store, record: runs.RunRecord) -> str:
    """Return the run that this one follows in the sink. In a table that stages share, it is the
    newest run of the name.
    """
    if not getattr(sink, "is_shared", False):
        return sink.owner()
    for run_id in getattr(sink, "owners")():  # noqa: B009
        candidate = store.read(runs.get_record, run_id)
        if candidate is not None and candidate.name == record.name:
            return str(run_id)
    return ""


def same_rows(store: Store, record: runs.RunRecord, owner: str) -> list[Same]:
    """Return the rows of a run that have the same outcome in another run of its name."""
    previous = store.read(runs.get_record, owner)
    if previous is None or previous.name != record.name:
        raise NotFound(
            what="run",
            run_id=owner,
            why="the output holds the rows of this run, but the store has no such run of the stage",
        )
    mine = adopted_by_run(store, record)
    theirs = adopted_by_run(store, previous)
    equal_ranges = [Same(lo, hi, from_lo) for lo, hi, from_lo in mine.pop(owner, [])]
    for run_id, ranges in mine.items():
        equal_ranges += _common_ranges(ranges, theirs.get(run_id, []))
    return with_equal_values(store, record, previous, list(_join_adjacent(sorted(equal_ranges))))


def adopted_by_run(store: Store, record: runs.RunRecord) -> dict[str, PointerRanges]:
    """Return the rows with a good outcome adopted from other runs, by run."""
    ancestry = RunLineage(store, record)
    ranges_by_run: dict[str, PointerRanges] = {}
    if not record.base_run:
        return ranges_by_run
    for lo in range(0, record.size, record.policy.page_rows):
        for one in ancestry.adopted(lo, min(lo + record.policy.page_rows, record.size)):
            if one.code in _GOOD_STATES:
                ranges_by_run.setdefault(one.run, []).append((one.lo, one.hi, one.from_lo))
    return ranges_by_run


def _common_ranges(mine: PointerRanges, theirs: PointerRanges) -> Iterator[Same]:
    """Yield the rows that both runs adopted from the same rows of a third run."""
    at = 0
    for lo, hi, first in mine:
        last = first + hi - lo
        while at < len(theirs) and theirs[at][2] + theirs[at][1] - theirs[at][0] <= first:
            at += 1
        k = at
        while k < len(theirs) and theirs[k][2] < last:
            their_lo, their_hi, their_first = theirs[k]
            a, b = max(first, their_first), min(last, their_first + their_hi - their_lo)
            if a < b:
                yield Same(lo + a - first, lo + b - first, their_lo + a - their_first)
            k += 1


def _join_adjacent(ranges: list[Same]) -> Iterator[Same]:
    pending: Same | None = None
    for one in ranges:
        if pending is not None and (pending.hi, pending.base_lo + pending.hi - pending.lo) == (
            one.lo,
            one.base_lo,
        ):
            pending = pending._replace(hi=one.hi)
            continue
        if pending is not None:
            yield pending
        pending = one
    if pending is not None:
        yield pending
