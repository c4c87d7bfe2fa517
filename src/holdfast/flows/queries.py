"""Flow queries: one flow, its steps, its inbox, its published values, and its blockers."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast import codec
from holdfast.flows.model import (
    KIND_NAMES,
    RECEIVE_NAME,
    FlowBodyRow,
    FlowHeadRow,
    FlowId,
    decode_mail,
    decode_open,
    get_body,
    get_head,
    keys_of,
    pack_int,
)
from holdfast.flows.records import StepCompleted, StepFailure, decode_record
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn


class FlowDetails(NamedTuple):
    seq: int
    body: FlowBodyRow
    head: FlowHeadRow
    result: bytes


class FlowStep(NamedTuple):
    """A step of a flow. `state` is "completed", "failed" or "open"."""

    name: str
    occurrence: int
    position: int
    state: str
    value: Any = None
    code: str = ""
    error_type: str = ""
    error: str = ""
    attempts: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    kind: str = "step"


def get_details(txn: Txn, universe: str, seq: int) -> FlowDetails:
    keys = keys_of(universe)
    body, head = get_body(txn, keys, seq), get_head(txn, keys, seq)
    result = blobs.get(txn, head.blob) if head.blob else head.result
    return FlowDetails(seq, body, head, result)


def find_by_key(txn: Txn, universe: str, name: str, key: str) -> FlowId | None:
    keys = keys_of(universe)
    packed = txn.get(keys.keys + tuples.pack((name, key)))
    if packed is None:
        return None
    seq = tuples.unpack_last_int(packed, 0)
    return FlowId(get_body(txn, keys, seq).generation, seq)


def list_steps(txn: Txn, universe: str, seq: int, run: int | None = None) -> list[FlowStep]:
    keys = keys_of(universe)
    head = get_head(txn, keys, seq)
    prefix = keys.records_of(seq, head.run if run is None else run)
    steps: list[FlowStep] = []
    for _, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        stored = decode_record(row)
        record = stored.record
        if isinstance(record, StepCompleted):
            packed = blobs.get(txn, record.blob) if record.blob else record.value
            steps.append(
                FlowStep(
                    record.name,
                    record.occurrence,
                    record.position,
                    "completed",
                    _step_value(record.name, packed),
                    attempts=record.attempts,
                    began_ns=record.began_ns,
                    ended_ns=stored.decided_ns,
                )
            )
        elif isinstance(record, StepFailure):
            steps.append(
                FlowStep(
                    record.name,
                    record.occurrence,
                    record.position,
                    "failed",
                    code=record.code,
                    error_type=record.error_type,
                    error=record.error,
                    attempts=record.attempts,
                    began_ns=record.began_ns,
                    ended_ns=stored.decided_ns,
                )
            )
    if run is None or run == head.run:
        steps += _open_steps(txn, universe, seq)
    return sorted(steps, key=lambda step: step.position)


def _step_value(name: str, packed: bytes) -> Any:
    """The recorded value. A receive has the type of its event and the event's fields."""
    value = codec.unpack(packed) if packed else None
    if name == RECEIVE_NAME and isinstance(value, list):
        type, event = value
        return [type, event_fields(event)]
    return value


def _open_steps(txn: Txn, universe: str, seq: int) -> list[FlowStep]:
    prefix = keys_of(universe).open_steps + pack_int(seq)
    found: list[FlowStep] = []
    for key, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        *_, name, occurrence = tuples.unpack(key)
        step = decode_open(row)
        assert isinstance(name, str)
        assert isinstance(occurrence, int)
        found.append(
            FlowStep(
                name,
                occurrence,
                step.position,
                "open",
                began_ns=step.began_ns,
                kind=KIND_NAMES[step.kind],
            )
        )
    return found


def list_mail(txn: Txn, universe: str, seq: int) -> list[tuple[str, Any]]:
    prefix = keys_of(universe).mail + pack_int(seq)
    found: list[tuple[str, Any]] = []
    for _, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        mail = decode_mail(row)
        value = blobs.get(txn, mail.blob) if mail.blob else mail.value
        found.append((mail.type, event_fields(value)))
    return found


def event_fields(value: bytes) -> Any:
    """The fields of an encoded event, as stored. The byte before them is the version of its type."""
    return codec.unpack(value[1:])


def published_values(txn: Txn, universe: str, seq: int) -> dict[str, Any]:
    prefix = keys_of(universe).published + pack_int(seq)
    found: dict[str, Any] = {}
    for key, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        name = tuples.unpack(key)[-1]
        assert isinstance(name, str)
        found[name] = codec.unpack(row)
    return found
