"""Dead letters of failed compensations, in the queue `<universe>/undo-failed` of each universe.

The commit that records the failure writes the letter. Its payload is JSON, so that the commands for dead letters show
it. `compensation_redrive` runs the compensation again. The letter outlives its flow, but cannot be redriven then.
"""

from __future__ import annotations

import msgspec

from holdfast import codec
from holdfast.durable import dead_letters
from holdfast.flows.model import UNDO_FAILED, UNDO_PREFIX, FlowBodyRow, FlowId, parse_flow_id
from holdfast.flows.records import AnyRecord, StepFailure
from holdfast.store.api import Txn

_QUEUE = "undo-failed"


class FailedCompensation(msgspec.Struct, frozen=True):
    """The payload of a letter."""

    flow: str
    name: str
    key: str
    run: int
    step: str
    occurrence: int

    @property
    def id(self) -> FlowId:
        return parse_flow_id(self.flow)


decode_payload = codec.new_json_decoder(FailedCompensation).decode


def queue_of(universe: str) -> str:
    return f"{universe}/{_QUEUE}"


def universe_of(queue: str) -> str | None:
    """Return the universe of a queue of failed compensations; None for any other queue."""
    universe = queue.rpartition("/")[0]
    return universe if universe and queue_of(universe) == queue else None


def add_if_compensation_failed(
    txn: Txn, universe: str, seq: int, body: FlowBodyRow, run: int, record: AnyRecord
) -> None:
    """Write the dead letter of a compensation that failed finally."""
    if not isinstance(record, StepFailure) or not record.name.startswith(UNDO_PREFIX):
        return
    flow = str(FlowId(body.generation, seq))
    payload = FailedCompensation(
        flow, body.spec.name, body.key, run, record.name, record.occurrence
    )
    error = f"{record.error_type}: {record.error}"
    dead_letters.add_dead_letter.fn(
        txn, queue_of(universe), msgspec.json.encode(payload), UNDO_FAILED, error
    )
