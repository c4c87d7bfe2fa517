"""The flows that worlds start: an intent of a world is the parent of the flow.

`world.flow_callbacks` calls this module in the commit that publishes or cancels such an intent. The key of the flow is
the hash of the intent, so an intent starts one flow.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.errors import KeyConflict, NotFound
from holdfast.flows import children
from holdfast.flows.model import FlowSpec, Parent
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.operations import cancel_within, start_within
from holdfast.flows.states import ENDED
from holdfast.flows.unit_of_work import FlowUnit
from holdfast.messages import Intent
from holdfast.store.api import Txn


def start(txn: Txn, intent: Intent) -> int | None:
    """Start the flow of an intent and return its number. None if the key has a flow with other arguments."""
    spec = codec.unpack_as(FlowSpec, intent.flow_spec)
    parent = Parent(intent=codec.pack(intent))
    unit = FlowUnit(txn, intent.universe_id)
    try:
        key = intent.intent_hash.hex()
        new = NewFlow(spec, intent.params, key, parent, intent.tag, intent.trace)
        started = start_within(unit, new)
    except KeyConflict:
        return None
    unit.close()
    return started.seq


def answer_if_ended(txn: Txn, intent: Intent, seq: int) -> None:
    """Deliver the receipt if the key of the intent belongs to a flow that has ended."""
    unit = FlowUnit(txn, intent.universe_id)
    flow = unit.load(seq)
    if flow.head.state in ENDED:
        children.notify_parent(unit, flow)
    unit.close()


def cancel(txn: Txn, universe: str, seq: int) -> None:
    """Cancel a flow whose world has its receipt or is erased."""
    unit = FlowUnit(txn, universe)
    try:
        flow = unit.load(seq)
    except NotFound:
        return
    if flow.head.state not in ENDED:
        cancel_within(unit, flow)
    unit.close()


def idempotency_digest(txn: Txn, universe: str, seq: int) -> bytes | None:
    """The digest of the intent that started a flow. None if the flow was removed."""
    try:
        parent = FlowUnit(txn, universe).load(seq).body.parent
    except NotFound:
        return None
    if parent is None or not parent.intent:
        return None
    return codec.unpack_as(Intent, parent.intent).idempotency_digest()
