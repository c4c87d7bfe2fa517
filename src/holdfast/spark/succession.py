"""Succession: how the output of a run over a grown input follows the output of the run before.

The sink says whose rows it holds (`owner`) and is told which rows of both runs are the same. Rows are
the same when their outcomes lie at the same place: in one of the two runs, or in a third one that
both took them over from. Carried input columns must be the same, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.ledger.lineage import Ancestry
from holdfast.ledger.states import State
from holdfast.spark.carry import unchanged
from holdfast.spark.sinks.api import Base, Begun, Same, Sink, SuccessorSink
from holdfast.store.api import Store

_GOOD = (int(State.TERMINAL_SUCCESS), int(State.TERMINAL_SKIP))

# (lo, hi, from_lo), ascending in both.
Ranges = list[tuple[int, int, int]]


def begin(sink: Sink, store: Store, record: runs.RunRecord, schema: Any) -> Begun:
    """Begin a sink for a run, on top of what an earlier run of its name left there."""
    if record.base_run and isinstance(sink, SuccessorSink):
        owner = owner_of(sink, store, record)
        if owner not in ("", record.run_id):
            base = Base(owner, same_rows(store, record, owner))
            return sink.begin_after(base, record.run_id, record.name, schema)
    return Begun(sink.begin(record.run_id, record.name, schema), ())


def owner_of(sink: SuccessorSink, store: Store, record: runs.RunRecord) -> str:
    """The run whose rows this one follows in the sink: in a table that stages share, the newest run of its name."""
    if not getattr(sink, "is_shared", False):
        return sink.owner()
    for run_id in getattr(sink, "owners")():  # noqa: B009
        found = store.read(runs.get, run_id)
        if found is not None and found.name == record.name:
            return str(run_id)
    return ""


def same_rows(store: Store, record: runs.RunRecord, owner: str) -> list[Same]:
    """The rows of a run that another run of its name has with the same outcome."""
    before = store.read(runs.get, owner)
    if before is None or before.name != record.name:
        raise NotFound(what="run", run_id=owner, why="the output holds its rows")
    mine = by_run(store, record)
    theirs = by_run(store, before)
    found = [Same(lo, hi, from_lo) for lo, hi, from_lo in mine.pop(owner, [])]
    for run_id, ranges in mine.items():
        found += _common(ranges, theirs.get(run_id, []))
    return unchanged(store, record, before, list(_joined(sorted(found))))


def by_run(store: Store, record: runs.RunRecord) -> dict[str, Ranges]:
    """The rows that ended well in other runs, by run."""
    ancestry = Ancestry(store, record)
    found: dict[str, Ranges] = {}
    if not record.base_run:
        return found
    for lo in range(0, record.size, record.policy.page_rows):
        for one in ancestry.adopted(lo, min(lo + record.policy.page_rows, record.size)):
            if one.code in _GOOD:
                found.setdefault(one.run, []).append((one.lo, one.hi, one.from_lo))
    return found


def _common(mine: Ranges, theirs: Ranges) -> Iterator[Same]:
    """Rows of both that come from the same rows of a third run."""
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


def _joined(ranges: list[Same]) -> Iterator[Same]:
    held: Same | None = None
    for one in ranges:
        if held is not None and (held.hi, held.base_lo + held.hi - held.lo) == (
            one.lo,
            one.base_lo,
        ):
            held = held._replace(hi=one.hi)
            continue
        if held is not None:
            yield held
        held = one
    if held is not None:
        yield held
