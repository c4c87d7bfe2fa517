"""The operations of document 004 by their names, for external controllers: `POST /v1/operations/{name}`.

The fields of a body are the parameters of the document. `world` is `Type/name` or an id. Each operation is one
transaction and idempotent: `ops/world_operations.py` has them.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, field

from holdfast import codec
from holdfast.clock import S
from holdfast.config import TTL_NS_MAX
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, Held, IllegalTransition, Invalid, KeyConflict, NotFound
from holdfast.messages import Ingress, IngressKind, IntentReceipt, ReceiptStatus
from holdfast.ops import catalog_queries, world_documents, world_operations
from holdfast.ops.api import worlds
from holdfast.ops.api.call import ApiCall, NeedsApp
from holdfast.ops.api.endpoint import (
    LIMIT_MAX,
    BodyScope,
    Endpoint,
    EndpointOptions,
    RequestModel,
    Scope,
)
from holdfast.ops.api.worlds import EventBody, SeedBody, SentEvent, subject_text
from holdfast.ops.world_documents import WorldWithLineage
from holdfast.ops.world_operations import LEASE_TTL_S, NotActive, NotAssigned
from holdfast.world.catalog import WorldRecord

# The incarnation of a holder that names none. A restarted worker then gets its own live lease again.
INCARNATION = "external"


class AssignWorldBody(RequestModel):
    world: str
    worker: str
    priority: int = 0
    reason: str = "operator"
    pinned: bool = False


class WorldOnlyBody(RequestModel):
    world: str


class AcquireLeaseBody(RequestModel):
    world: str
    worker: str
    incarnation: str = INCARNATION
    ttl_s: float = LEASE_TTL_S


class RenewLeaseBody(RequestModel):
    world: str
    worker: str
    epoch: int
    generation: int | None = None
    ttl_s: float = LEASE_TTL_S


class ReleaseLeaseBody(RequestModel):
    world: str
    worker: str
    epoch: int
    generation: int | None = None


class IngressItem(RequestModel):
    """One input of a world. `value` is JSON: the fields of an event, or the payload for an inbox. `value_base64` is
    the stored encoding instead, for any kind."""

    kind: str
    type: str
    value: Any = UNSET
    value_base64: str | None = None
    intent_hash: str | None = None
    correlation_id: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    from_world: str | None = None
    from_height: int | None = None


class EnqueueIngressBody(RequestModel):
    world: str
    item: IngressItem
    key: str | None = None


class ListWorkerWorldsBody(RequestModel):
    worker: str
    after: str = ""
    limit: int = 1_000


class ForkOperationBody(RequestModel):
    """`src_snapshot` is the height of the state to start with; null: the last entry."""

    src_world: str
    name: str
    src_snapshot: int | None = None
    effects: str = "drop"
    timers: str = "drop"


class CreateFromSeedBody(RequestModel):
    type: str
    name: str
    seed_snapshot: SeedBody


class EventSendBody(EventBody, kw_only=True):
    """`world` is `Type/name`, which is created if it does not exist, or an id."""

    world: str


class ReceiptBody(RequestModel):
    intent_hash: str
    effect_kind: str
    status: str
    value: Any | UnsetType = UNSET
    code: str = ""
    error: str = ""
    attempts: int = 1
    tag: str = ""
    cost: float = 0.0


class ReceiptInjectBody(RequestModel):
    world: str
    receipt: ReceiptBody


class AssignmentDocument(msgspec.Struct, frozen=True):
    world_id: str
    desired_worker_id: str | None
    priority: int
    reason: str
    pinned: bool


class UnassignDocument(msgspec.Struct, frozen=True):
    world_id: str
    unassigned: bool


class WorldLeaseDocument(msgspec.Struct, frozen=True):
    world_id: str
    lease_id: str
    holder_worker_id: str
    incarnation: str
    generation: int
    epoch: int
    expires_at_ns: int


class ReleaseDocument(msgspec.Struct, frozen=True):
    world_id: str
    released: bool


class WorkerWorlds(msgspec.Struct, frozen=True):
    """The ids of the worlds assigned to a worker. `next` is the value of `after` for the next page."""

    worker: str
    worlds: list[str]
    next: str | None


# -- assignment and leases -------------------------------------------------------------------------


def assign_world(call: ApiCall) -> AssignmentDocument:
    body: AssignWorldBody = call.body
    record = _world(call, body.world)
    assigned = world_operations.assign_world(
        call.recording_store(subject_text(record), body.worker),
        record.universe,
        record.world_id,
        body.worker,
        priority=body.priority,
        reason=body.reason,
        pinned=body.pinned,
    )
    return AssignmentDocument(
        record.world_id,
        assigned.desired_worker_id,
        assigned.priority,
        assigned.reason,
        assigned.pinned,
    )


def unassign_world(call: ApiCall) -> UnassignDocument:
    record = _world(call, call.body.world)
    done = world_operations.unassign_world(
        call.recording_store(subject_text(record)), record.universe, record.world_id
    )
    return UnassignDocument(record.world_id, done)


def acquire_lease(call: ApiCall) -> WorldLeaseDocument:
    body: AcquireLeaseBody = call.body
    _check_ttl(body.ttl_s)
    record = _world(call, body.world)
    lease = world_operations.acquire_lease(
        call.recording_store(),
        record.universe,
        record.world_id,
        body.worker,
        body.incarnation,
        ttl_s=body.ttl_s,
    )
    return _lease_document(record, lease)


def renew_lease(call: ApiCall) -> WorldLeaseDocument:
    body: RenewLeaseBody = call.body
    _check_ttl(body.ttl_s)
    record = _world(call, body.world)
    lease = world_operations.renew_lease(
        call.recording_store(),
        record.universe,
        record.world_id,
        body.worker,
        body.epoch,
        generation=body.generation,
        ttl_s=body.ttl_s,
    )
    return _lease_document(record, lease)


def release_lease(call: ApiCall) -> ReleaseDocument:
    body: ReleaseLeaseBody = call.body
    record = _world(call, body.world)
    released = world_operations.release_lease(
        call.recording_store(),
        record.universe,
        record.world_id,
        body.worker,
        body.epoch,
        generation=body.generation,
    )
    return ReleaseDocument(record.world_id, released)


def list_worker_worlds(call: ApiCall) -> WorkerWorlds:
    body: ListWorkerWorldsBody = call.body
    if not 1 <= body.limit <= LIMIT_MAX:
        raise Invalid(what="limit", found=body.limit, min=1, max=LIMIT_MAX)
    found = world_operations.list_worker_worlds(
        call.store, call.universe, body.worker, after=body.after, limit=body.limit
    )
    return WorkerWorlds(body.worker, found, found[-1] if len(found) == body.limit else None)


# -- input -----------------------------------------------------------------------------------------


def enqueue_ingress(call: ApiCall) -> SentEvent:
    body: EnqueueIngressBody = call.body
    record = _world(call, body.world)
    delivered = world_operations.enqueue_ingress(
        call.recording_store(subject_text(record), f"{body.item.kind} {body.item.type}"),
        record.universe,
        record.world_id,
        _ingress(call, body.item),
        key=body.key or call.key or None,
        app=call.app,
    )
    return worlds.sent_event(delivered)


def is_internal_ingress(body: EnqueueIngressBody) -> bool:
    """Whether only the runtime produces such an input: a receipt, a timer, mail of a world, or an answer to an intent."""
    item = body.item
    return item.kind != IngressKind.EVENT.value or any(
        value is not None for value in (item.intent_hash, item.from_world, item.from_height)
    )


def event_send(call: ApiCall) -> SentEvent:
    body: EventSendBody = call.body
    app = call.require_app()
    type, slash, name = body.world.partition("/")
    if not slash:
        record = _world(call, body.world)
        type, name = record.type, record.name
    world_operations.definition_of(app, type)
    return worlds.send_event(call, type, name, body)


def receipt_inject(call: ApiCall) -> SentEvent:
    sent: ReceiptBody = call.body.receipt
    record = _world(call, call.body.world)
    try:
        status = ReceiptStatus(sent.status)
    except ValueError:
        expected = [status.value for status in ReceiptStatus]
        raise Invalid(what="status", found=sent.status[:64], expected=expected) from None
    receipt = IntentReceipt(
        intent_hash=_hex("intent_hash", sent.intent_hash),
        effect_kind=sent.effect_kind,
        status=status,
        value=b"" if sent.value is UNSET else _pack("value", sent.value),
        code=sent.code,
        error=sent.error,
        attempts=sent.attempts,
        tag=sent.tag,
        cost=sent.cost,
    )
    delivered = world_operations.receipt_inject(
        call.recording_store(subject_text(record), sent.intent_hash),
        record.universe,
        record.world_id,
        receipt,
    )
    return worlds.sent_event(delivered)


# -- creation --------------------------------------------------------------------------------------


def world_fork(call: ApiCall) -> WorldWithLineage:
    body: ForkOperationBody = call.body
    fork = worlds.WorldForkBody(
        name=body.name, at=body.src_snapshot, effects=body.effects, timers=body.timers
    )
    return worlds.fork_from(call, _world(call, body.src_world), fork)


def world_create_from_seed(call: ApiCall) -> WorldWithLineage:
    body: CreateFromSeedBody = call.body
    record = world_operations.world_create_from_seed(
        call.recording_store(f"world/{body.type}/{body.name}", body.seed_snapshot.world_id),
        call.universe,
        body.type,
        body.name,
        worlds.seed_snapshot(body.seed_snapshot),
    )
    document: WorldWithLineage = call.read(world_documents.read_with_lineage, record)
    return document


# -- inside ----------------------------------------------------------------------------------------


def _world(call: ApiCall, text: str) -> WorldRecord:
    record: WorldRecord = call.read(catalog_queries.resolve, text, call.universe)
    return record


def _lease_document(record: WorldRecord, lease: Lease) -> WorldLeaseDocument:
    return WorldLeaseDocument(
        record.world_id,
        lease.lease_id,
        lease.worker,
        lease.incarnation,
        lease.generation,
        lease.epoch,
        lease.expires_ns,
    )


def _check_ttl(ttl_s: float) -> None:
    if not 0 < ttl_s <= TTL_NS_MAX / S:
        raise Invalid(what="ttl_s", found=ttl_s, min=0, max=TTL_NS_MAX / S)


def _ingress(call: ApiCall, item: IngressItem) -> Ingress:
    try:
        kind = IngressKind(item.kind)
    except ValueError:
        expected = [kind.value for kind in IngressKind]
        raise Invalid(what="kind", found=item.kind[:64], expected=expected) from None
    value = _stored_value(call, kind, item)
    return Ingress(
        kind,
        item.type,
        value,
        codec.digest(item.type.encode(), value),
        intent_hash=None if item.intent_hash is None else _hex("intent_hash", item.intent_hash),
        correlation_id=item.correlation_id,
        from_world=item.from_world,
        from_height=item.from_height,
        headers=item.headers,
    )


def _stored_value(call: ApiCall, kind: IngressKind, item: IngressItem) -> bytes:
    if (item.value is UNSET) == (item.value_base64 is None):
        raise Invalid(what="item", why="needs either value or value_base64")
    if item.value_base64 is not None:
        try:
            return base64.b64decode(item.value_base64, validate=True)
        except binascii.Error:
            raise Invalid(what="value_base64", why="not base64") from None
    if kind is IngressKind.INBOX:
        return _pack("value", item.value)
    if kind is IngressKind.RECEIPT:
        raise Invalid(what="item", why="use receipt_inject for a receipt")
    if call.app is None:
        raise NeedsApp(what="item", why="the value of an event is encoded by its class")
    if not isinstance(item.value, dict):
        raise Invalid(what="value", why="the fields of an event are a JSON object")
    _, value = call.app.encode_event(world_operations.event_of(call.app, item.type, item.value))
    return value


def _pack(what: str, value: Any) -> bytes:
    try:
        return codec.pack(value)
    except codec.ENCODE_ERRORS as error:
        raise Invalid(what=what, why=str(error)) from None


def _hex(what: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise Invalid(what=what, found=text[:64], expected="hexadecimal") from None


_PATH = "/v1/operations"
_LEASE_PROBLEMS = (Held, Fenced, NotFound, NotAssigned, NotActive)

ENDPOINTS = (
    Endpoint("POST", f"{_PATH}/assign_world", Scope.OPERATE, assign_world, AssignmentDocument,
             "Assign a world to a worker", EndpointOptions(body=AssignWorldBody)),
    Endpoint("POST", f"{_PATH}/unassign_world", Scope.OPERATE, unassign_world, UnassignDocument,
             "Remove the assignment of a world; the orchestrator then places it",
             EndpointOptions(body=WorldOnlyBody)),
    Endpoint("POST", f"{_PATH}/acquire_lease", Scope.WORK, acquire_lease, WorldLeaseDocument,
             "Acquire the lease of a world (protocol A)",
             EndpointOptions(body=AcquireLeaseBody, problems=_LEASE_PROBLEMS)),
    Endpoint("POST", f"{_PATH}/renew_lease", Scope.WORK, renew_lease, WorldLeaseDocument,
             "Renew the lease of a world (protocol B)",
             EndpointOptions(body=RenewLeaseBody, problems=_LEASE_PROBLEMS)),
    Endpoint("POST", f"{_PATH}/release_lease", Scope.WORK, release_lease, ReleaseDocument,
             "Release the lease of a world",
             EndpointOptions(body=ReleaseLeaseBody, problems=_LEASE_PROBLEMS)),
    Endpoint("POST", f"{_PATH}/enqueue_ingress", Scope.SUBMIT, enqueue_ingress, SentEvent,
             "Put an input into the inbox of a world, once per key",
             EndpointOptions(body=EnqueueIngressBody, finds_repeat=True,
                             problems=(KeyConflict, NeedsApp), body_scope=BodyScope(
                                 Scope.OPERATE, is_internal_ingress,
                                 "the item is not an event, or has intent_hash, from_world or "
                                 "from_height"))),
    Endpoint("POST", f"{_PATH}/list_worker_worlds", Scope.WORK, list_worker_worlds, WorkerWorlds,
             "List the worlds that are assigned to a worker",
             EndpointOptions(body=ListWorkerWorldsBody)),
    Endpoint("POST", f"{_PATH}/world_fork", Scope.OPERATE, world_fork, WorldWithLineage,
             "Create a world with the state of another world after one of its entries",
             EndpointOptions(body=ForkOperationBody, problems=(NeedsApp,))),
    Endpoint("POST", f"{_PATH}/world_create_from_seed", Scope.OPERATE, world_create_from_seed,
             WorldWithLineage, "Create a world from a snapshot of another world of the same type",
             EndpointOptions(body=CreateFromSeedBody)),
    Endpoint("POST", f"{_PATH}/event_send", Scope.SUBMIT, event_send, SentEvent,
             "Send an event to a world, once per key",
             EndpointOptions(body=EventSendBody, needs_app=True, finds_repeat=True,
                             problems=(KeyConflict,))),
    Endpoint("POST", f"{_PATH}/receipt_inject", Scope.OPERATE, receipt_inject, SentEvent,
             "Give a world the receipt of one of its intents; it is final",
             EndpointOptions(body=ReceiptInjectBody, problems=(KeyConflict, IllegalTransition))),
)  # fmt: skip
