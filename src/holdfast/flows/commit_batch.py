"""The batch commit: the commits of several flows of one worker in one operation.

The unit of work writes counters and rows that the flows share once for all of them.
"""

from __future__ import annotations

from holdfast.durable.validation import check_limit
from holdfast.flows.operations import FlowAnswer, FlowCommit, answer_of, commit_within
from holdfast.flows.unit_of_work import FlowUnit
from holdfast.store.api import Txn, operation


@operation("flows.commit_many")
def commit_many(
    txn: Txn, universe: str, generation: int, works: list[FlowCommit]
) -> list[FlowAnswer]:
    """Apply commits in order, all or none. If one is refused, the caller sends each alone."""
    check_limit(len(works), "commits")
    unit = FlowUnit(txn, universe)
    outcomes = [commit_within(unit, generation, work) for work in works]
    unit.close()
    return [answer_of(unit, work, outcome) for work, outcome in zip(works, outcomes, strict=True)]
