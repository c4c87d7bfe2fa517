"""Flow queries: one flow, its steps, its inbox, its published values, and its blockers."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast import codec
from holdfast.flows import step_threads
from holdfast.flows.execution import Divergence
from holdfast.flows.model import (
    EFFECT,
    FLOW,
    KIND_NAMES,
    RECEIVE,
    SLEEP,
    TASK,
    FlowBodyRow,
    FlowHeadRow,
    FlowId,
    OpenStep,
    decode_mail,
    decode_open,
    get_body,
    get_head,
    keys_of,
    pack_int,
)
from holdfast.flows.records import StepCompleted, StepFailure, decode_record
from holdfast.flows.states import ENDED, FlowState
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.tasks.queries import where_is
from holdfast.value_versions import UnreadableValue


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
    if name == "hf.receive" and isinstance(value, list):
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


_PARKED_ACTIONS = {
    Divergence.code: "deploy code that asks for the recorded steps",
    UnreadableValue.code: "deploy an `hf.upcast` of the type in `App(upcasts=…)`, or the type that wrote the value",
}


def blockers(txn: Txn, universe: str, seq: int) -> list[dict[str, Any]]:
    """What the flow waits for, and the threads of its timed-out steps, in plain words."""
    return [*_waits(txn, universe, seq), *_thread_blockers(txn, universe, seq)]


def _thread_blockers(txn: Txn, universe: str, seq: int) -> list[dict[str, Any]]:
    return [
        _blocker(
            "thread_still_running",
            f"step {row.step}, attempt {thread.attempt}, timed out, but its thread still runs on worker "
            f"{row.worker}; its outcome is dropped, and it keeps one of the worker's threads",
            "let the function return, or restart the worker",
            row.timed_out_ns,
        )
        for thread, row in step_threads.list_running(txn, universe, seq)
    ]


def _waits(txn: Txn, universe: str, seq: int) -> list[dict[str, Any]]:
    details = get_details(txn, universe, seq)
    head = details.head
    if head.state in ENDED:
        return []
    if head.state == FlowState.PARKED:
        text = f"parked at step {head.step}: {head.error}"
        code = head.code if head.code in _PARKED_ACTIONS else Divergence.code
        return [_blocker(code, text, f"{_PARKED_ACTIONS[code]}, then `holdfast flows resume`")]
    if head.task:
        return _activation_blockers(txn, universe, details)
    prefix = keys_of(universe).open_steps + pack_int(seq)
    found: list[dict[str, Any]] = []
    for key, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        *_, name, occurrence = tuples.unpack(key)
        step = decode_open(row)
        label = f"{name!s}#{occurrence!s}"
        until = step.due_ns or None
        if step.kind == SLEEP:
            found.append(_blocker("sleeping", "sleeps", "", step.began_ns, until))
        elif step.kind == RECEIVE:
            types = ", ".join(step.types)
            found.append(
                _blocker(
                    "waits_for_event",
                    f"waits for an event: {types}",
                    "send it with `holdfast flows send`",
                    step.began_ns,
                    until,
                )
            )
        elif (unserved := _unserved_child(txn, universe, step, label)) is not None:
            found.append(unserved)
        else:
            kind = {TASK: "task", EFFECT: "effect", FLOW: "flow"}[step.kind]
            found.append(
                _blocker(
                    f"waits_for_{kind}",
                    f"waits for the {kind} of step {label}",
                    "",
                    step.began_ns,
                    until,
                )
            )
    if not found:
        found.append(
            _blocker(
                "waits_for_retry",
                f"its code raised {head.error_type}; it runs again after a delay",
                f"attempt {head.failures + 1} of {details.body.spec.attempts}",
            )
        )
    return found


def _unserved_child(txn: Txn, universe: str, step: OpenStep, label: str) -> dict[str, Any] | None:
    """The blocker of a child task or flow that no worker declares, if it is one."""
    kind, task = "task", step.child
    if step.kind == FLOW:
        kind, task = "flow", get_head(txn, keys_of(universe), step.child).task
    if step.kind not in (TASK, FLOW) or not task or where_is(txn, universe, task) != "stray":
        return None
    return _blocker(
        f"no_worker_for_{kind}",
        f"no worker of its queue declares the {kind} of step {label}",
        "start a worker whose app declares it",
        step.began_ns,
    )


def _activation_blockers(txn: Txn, universe: str, details: FlowDetails) -> list[dict[str, Any]]:
    where = where_is(txn, universe, details.head.task)
    name, queue = details.body.spec.name, details.body.spec.queue
    if where == "leased":
        return [_blocker("running", "a worker runs it now", "")]
    if where == "stray":
        return [
            _blocker(
                "no_worker_for_flow",
                f"no worker of queue {queue} declares the flow {name}",
                "start a worker whose app declares it",
            )
        ]
    return [_blocker("waits_for_worker", f"waits for a worker of queue {queue}", "start a worker")]


def _blocker(
    code: str, text: str, action: str, since: int | None = None, until: int | None = None
) -> dict[str, Any]:
    return {"code": code, "text": text, "action": action, "since": since, "until": until}
