"""Resuming of PARKED flows by a worker with other code."""

from __future__ import annotations

from holdfast.flows.model import pack_int
from holdfast.flows.records import FlowResumed
from holdfast.flows.states import FlowState
from holdfast.flows.unit_of_work import FlowUnit
from holdfast.store import tuples
from holdfast.store.api import Txn, operation

RESUMED_MAX = 500


@operation("flows.resume_parked")
def resume_parked(txn: Txn, universe: str, versions: dict[str, str], after: int = 0) -> int:
    """Run PARKED flows again that other code had parked. `versions` has the code version of each flow name. Returns
    the number of the last flow of this page, 0 after the last page."""
    unit = FlowUnit(txn, universe)
    parked = unit.keys.states + pack_int(FlowState.PARKED)
    rows = txn.scan(parked + pack_int(after + 1), tuples.prefix_end(parked), RESUMED_MAX)
    seq = 0
    for key, _ in rows:
        seq = tuples.unpack_last_int(key, len(parked))
        flow = unit.load(seq)
        version = versions.get(flow.body.spec.name)
        if version is not None and version != flow.head.code_version:
            unit.append(flow, FlowResumed())
            unit.activate(flow)
    unit.close()
    return seq if len(rows) == RESUMED_MAX else 0
