"""The step list: pages of the recorded and open steps of a run, in the order of their positions.

A page reads the records of the run once and keeps at most `limit` steps, so its memory does not grow with the run. The
values of the kept steps are read at the end. Steps of one position, such as the attempts of a redriven step, are never
on two pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.flows.model import (
    EFFECT,
    FLOW,
    KIND_NAMES,
    RECEIVE_NAME,
    TASK,
    FlowId,
    FlowKeys,
    OpenStep,
    decode_body,
    decode_open,
    get_head,
    keys_of,
    pack_int,
)
from holdfast.flows.queries import event_fields
from holdfast.flows.records import RecordRow, StepCompleted, StepFailure, decode_record
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks.ids import TaskId
from holdfast.tasks.model import get_body as get_task_body
from holdfast.tasks.model import keys_of as task_keys_of

# Steps of one page.
PAGE_STEPS_MAX = 10_000


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
    # Of an open step: the end of its sleep or of its timeout, the event types that it waits for, and the id of its child.
    due_ns: int = 0
    types: tuple[str, ...] = ()
    child: str = ""


class StepPage(NamedTuple):
    steps: list[FlowStep]
    # The position after which the next page starts. 0 on the last page.
    next_after: int


class _OpenRow(NamedTuple):
    name: str
    occurrence: int
    step: OpenStep


def list_steps(
    txn: Txn, universe: str, seq: int, run: int | None = None, after: int = 0, limit: int = 0
) -> StepPage:
    """Return the steps with a position above `after`. With a limit, the page ends with the position that reaches it."""
    if not 0 <= limit <= PAGE_STEPS_MAX:
        raise Invalid(what="limit", found=limit, min=1, max=PAGE_STEPS_MAX)
    if not 0 <= after < 1 << 63:
        raise Invalid(what="after", found=after, why="a position is 0 or more")
    keys, head = keys_of(universe), get_head(txn, keys_of(universe), seq)
    kept: dict[int, list[RecordRow | _OpenRow]] = {}
    # The kept positions, the largest first.
    largest: list[int] = []
    count, has_more = 0, False
    for position, row in _iter_steps(txn, keys, seq, head.run, head.run if run is None else run):
        if position <= after or (has_more and largest and position > -largest[0]):
            continue
        if position not in kept:
            kept[position] = []
            heapq.heappush(largest, -position)
        kept[position].append(row)
        count += 1
        # The steps of the largest position leave the page when the other steps fill it.
        while limit and count - len(kept[-largest[0]]) >= limit:
            count -= len(kept.pop(-heapq.heappop(largest)))
            has_more = True
    steps = [
        _to_step(txn, universe, position, row)
        for position in sorted(kept)
        for row in kept[position]
    ]
    return StepPage(steps, -largest[0] if has_more else 0)


def _iter_steps(
    txn: Txn, keys: FlowKeys, seq: int, last_run: int, run: int
) -> Iterator[tuple[int, RecordRow | _OpenRow]]:
    for _, row in iter_rows(txn, keys.records_of(seq, run)):
        stored = decode_record(row)
        if isinstance(stored.record, StepCompleted | StepFailure):
            yield stored.record.position, stored
    if run == last_run:
        prefix = keys.open_steps + pack_int(seq)
        for key, row in iter_rows(txn, prefix):
            name, occurrence = tuples.unpack(key[len(prefix) :])
            step = decode_open(row)
            yield step.position, _OpenRow(str(name), int(occurrence), step)


def _to_step(txn: Txn, universe: str, position: int, row: RecordRow | _OpenRow) -> FlowStep:
    if isinstance(row, _OpenRow):
        name, occurrence, step = row
        return FlowStep(
            name,
            occurrence,
            position,
            "open",
            began_ns=step.began_ns,
            kind=KIND_NAMES[step.kind],
            due_ns=step.due_ns,
            types=step.types,
            child=_child_id(txn, universe, step),
        )
    record = row.record
    assert isinstance(record, StepCompleted | StepFailure)
    step_fields: dict[str, Any] = {"state": "completed"}
    if isinstance(record, StepCompleted):
        packed = blobs.get(txn, record.blob) if record.blob else record.value
        step_fields["value"] = _step_value(record.name, packed)
    else:
        step_fields = {
            "state": "failed",
            "code": record.code,
            "error_type": record.error_type,
            "error": record.error,
        }
    return FlowStep(
        record.name,
        record.occurrence,
        position,
        attempts=record.attempts,
        began_ns=record.began_ns,
        ended_ns=row.decided_ns,
        **step_fields,
    )


def _child_id(txn: Txn, universe: str, step: OpenStep) -> str:
    """The id of a child task or flow, or the intent of an effect. Empty if the child was removed."""
    if step.kind == TASK:
        task = get_task_body(txn, task_keys_of(universe), pack_int(step.child))
        return "" if task is None else str(TaskId(task.generation, step.child))
    if step.kind == FLOW:
        flow = txn.get(keys_of(universe).bodies + pack_int(step.child))
        return "" if flow is None else str(FlowId(decode_body(flow).generation, step.child))
    return step.intent.hex() if step.kind == EFFECT else ""


def _step_value(name: str, packed: bytes) -> Any:
    """The recorded value. A receive has the type of its event and the event's fields."""
    value = codec.unpack(packed) if packed else None
    if name == RECEIVE_NAME and isinstance(value, list):
        type, event = value
        return [type, event_fields(event)]
    return value
