"""JSON documents of flows and their steps, shared by the HTTP API and the command line."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from holdfast import codec, traces
from holdfast.blockers.answer import Blocker
from holdfast.blockers.flows import list_blockers
from holdfast.effects import budget
from holdfast.errors import NotFound
from holdfast.flows import flow_list, queries
from holdfast.flows.flow_list import FlowRow, NameCounts
from holdfast.flows.model import FlowId, keys_of, pack_int, parse_flow_id
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.step_list import FlowStep
from holdfast.messages import FLOW_WORLD_PREFIX
from holdfast.ops.http.json_values import arguments_to_json, to_json
from holdfast.store import blobs
from holdfast.store.api import Txn
from holdfast.tasks import queries as task_queries
from holdfast.tasks.ids import TaskId
from holdfast.tasks.model import get_body as get_task_body
from holdfast.tasks.model import keys_of as task_keys_of
from holdfast.tasks.queries import TaskDetails

# The most child flows in the document of a flow.
CHILDREN_MAX = 1_000


class NoFlow(NotFound):
    hint = (
        "a flow is named by its id, such as f1-17, or by NAME/KEY; `holdfast flows list` lists them"
    )


class SpentDocument(msgspec.Struct, frozen=True):
    """What the effects of a flow or a world spent in a unit: money in millionths of the currency, or tokens."""

    unit: str
    spent: int
    reserved: int


class FlowReport(NamedTuple):
    """All that is shown of one flow, read in one transaction."""

    row: FlowRow
    args: bytes
    result: bytes
    blockers: list[Blocker]
    published: dict[str, Any]
    events: list[tuple[str, Any]]
    # The related flows that still exist, by seq.
    related: dict[int, FlowId]
    # The task under whose lease a worker runs the flow. None while the flow waits, and after its end.
    activation: TaskDetails | None = None
    children: tuple[FlowRow, ...] = ()
    # What its effects spent, with the reserved amount, by unit.
    cost: tuple[SpentDocument, ...] = ()


def read_report(txn: Txn, universe: str, row: FlowRow) -> FlowReport:
    body, head = row.body, row.head
    args, blob = (body.args, body.blob) if head.args is None else (head.args, head.args_blob)
    related: dict[int, FlowId] = {}
    parent_seq = body.parent.flow if body.parent else 0
    for seq in (body.fork_of, body.redrive_of, head.redriven_by, parent_seq):
        other = flow_list.get_flow(txn, keys_of(universe), seq) if seq else None
        if other is not None:
            related[seq] = other.id
    return FlowReport(
        row,
        blobs.get(txn, blob) if blob else args,
        blobs.get(txn, head.blob) if head.blob else head.result,
        list_blockers(txn, universe, row.seq),
        queries.published_values(txn, universe, row.seq),
        queries.list_mail(txn, universe, row.seq),
        related=related,
        activation=_activation(txn, universe, head.task),
        children=tuple(flow_list.list_children(txn, universe, row.seq, CHILDREN_MAX)),
        cost=spent_by(txn, universe, f"{FLOW_WORLD_PREFIX}{row.seq}"),
    )


def spent_by(txn: Txn, universe: str, scope: str) -> tuple[SpentDocument, ...]:
    """Return the account of a world or a flow by unit, without units that it never used."""
    accounts = [(unit, budget.account(txn, universe, scope, unit)) for unit in budget.UNITS]
    return tuple(
        SpentDocument(unit, account.spent, account.reserved)
        for unit, account in accounts
        if account.spent or account.reserved
    )


def _activation(txn: Txn, universe: str, seq: int) -> TaskDetails | None:
    body = get_task_body(txn, task_keys_of(universe), pack_int(seq)) if seq else None
    if body is None:
        return None
    return task_queries.get_details(txn, universe, TaskId(body.generation, seq))


def find_flow(txn: Txn, universe: str, text: str) -> FlowRow:
    """Return the flow with this id or `NAME/KEY`. A name or a key may contain slashes."""
    for at, char in enumerate(text):
        if char == "/" and 0 < at < len(text) - 1:
            found = queries.find_by_key(txn, universe, text[:at], text[at + 1 :])
            if found is not None:
                return existing_flow(txn, universe, text, found)
    if "/" in text:
        raise NoFlow(what="flow", flow=text[:64])
    return existing_flow(txn, universe, text, parse_flow_id(text))


def existing_flow(txn: Txn, universe: str, text: str, id: FlowId) -> FlowRow:
    row = flow_list.get_flow(txn, keys_of(universe), id.seq)
    if row is None or row.id != id:
        raise NoFlow(what="flow", flow=text[:64])
    return row


def counts_summary(row: NameCounts) -> dict[str, Any]:
    return {"name": row.name, **msgspec.structs.asdict(row.counts)}


def flow_summary(row: FlowRow) -> dict[str, Any]:
    """Return a flow as it appears in a list."""
    spec, head = row.body.spec, row.head
    return {
        "id": str(row.id),
        "name": spec.name,
        "key": row.body.key or None,
        "tag": row.body.tag or None,
        "state": row.state.name,
        "queue": spec.queue,
        "priority": spec.priority,
        "run": head.run,
        "failures": head.failures,
        "attempts": spec.attempts,
        "started_ns": row.body.created_ns,
        "run_started_ns": head.run_started_ns,
        "ended_ns": head.ended_ns or None,
        "cancelled": head.cancelled,
        "code": head.code or None,
        "step": head.step or None,
        "error_type": head.error_type or None,
        "error": head.error or None,
    }


def flow_details(report: FlowReport) -> dict[str, Any]:
    """Return a flow with all details."""
    row = report.row
    body, head, spec = row.body, row.head, row.body.spec
    args, kwargs = arguments_to_json(report.args)
    timeout_ns = head.run_started_ns + spec.timeout_ns if spec.timeout_ns else None
    document = flow_summary(row)
    document["blockers"] = report.blockers
    document["timeout_ns"] = timeout_ns if head.state not in ENDED else None
    document["fork_of"] = _id_text(report, body.fork_of)
    document["fork_at"] = body.fork_at or None
    document["redrive_of"] = _id_text(report, body.redrive_of)
    document["redriven_by"] = _id_text(report, head.redriven_by)
    document["trace_id"] = traces.trace_id(body.trace) or None
    document["activation"] = _activation_document(report.activation)
    document["children"] = [
        {"id": str(child.id), "name": child.body.spec.name, "state": child.state.name}
        for child in report.children
    ]
    document["cost"] = msgspec.to_builtins(report.cost)
    document["parent"] = _id_text(report, body.parent.flow if body.parent else 0)
    document["args"] = args
    document["kwargs"] = kwargs
    document["published"] = json_value(report.published)
    document["events"] = [
        {"type": type, "event": json_value(event)} for type, event in report.events
    ]
    if head.state == FlowState.COMPLETED:
        document["result"] = to_json(report.result) if report.result else None
    return document


def _activation_document(details: TaskDetails | None) -> dict[str, Any] | None:
    if details is None:
        return None
    status = details.row.status
    return {
        "task": str(details.row.id),
        "state": details.row.where,
        "attempt": status.attempt,
        "expiries": status.expiries,
        "worker": status.worker or None,
        "lease": str(details.lease) if details.lease else None,
        "created_ns": details.row.body.created_ns,
        "granted_ns": status.granted_ns or None,
        "expires_ns": status.expires_ns or None,
    }


def step_document(step: FlowStep) -> dict[str, Any]:
    return {
        "position": step.position,
        "name": step.name,
        "occurrence": step.occurrence,
        "kind": step.kind,
        "state": step.state,
        "attempts": step.attempts,
        "began_ns": step.began_ns or None,
        "ended_ns": step.ended_ns or None,
        "due_ns": step.due_ns or None,
        "types": list(step.types),
        "child": step.child or None,
        "value": json_value(step.value),
        "code": step.code or None,
        "error_type": step.error_type or None,
        "error": step.error or None,
    }


def json_value(value: Any) -> Any:
    """Return a stored value as JSON can represent it."""
    return to_json(codec.pack(value))


def _id_text(report: FlowReport, seq: int) -> str | None:
    return str(report.related[seq]) if seq in report.related else None
