"""The endpoints of worlds.

A world is `{type}/{name}` in a path. With `by-id` as the type, the name is the id of the world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import field

from holdfast import codec
from holdfast.app import store_calls
from holdfast.app.world_handle import WorldHandle
from holdfast.durable import journal
from holdfast.errors import (
    IllegalTransition,
    Invalid,
    NoReply,
    NotFound,
    ReducerDied,
    ReducerMemory,
    ReducerTimeout,
    StatesBusy,
    UnknownEvent,
)
from holdfast.ops import catalog_queries, erasure, world_documents, world_operations
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall, NeedsApp
from holdfast.ops.api.client import client_runtime
from holdfast.ops.api.endpoint import (
    ApiAnswer,
    BodyScope,
    EmptyBody,
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    RequestModel,
    Scope,
)
from holdfast.ops.api.exception_text import exception_text
from holdfast.ops.world_documents import (
    AncestorDocument,
    EntryDocument,
    PurgeDocument,
    StateDocument,
    WorldDocument,
    WorldWithLineage,
)
from holdfast.ops.world_operations import SeedSnapshot
from holdfast.store.api import Txn
from holdfast.world import catalog
from holdfast.world.catalog import WorldEvent, WorldRecord, subject_of
from holdfast.world.ingress import IngressResult, WorldAddress
from holdfast.world.purge import WorldInUse

if TYPE_CHECKING:
    from holdfast.app.app import App

BY_ID = "by-id"
ASK_TIMEOUT_S_MAX = 60.0


class WorldListQuery(PageQuery):
    type: str = ""


class SeedBody(RequestModel):
    """The snapshot of another world of the same type. `hash` is hexadecimal."""

    world_id: str
    height: int
    hash: str | None = None


class WorldBody(RequestModel):
    type: str
    name: str
    seed: SeedBody | None = None


class EventBody(RequestModel):
    """An event: its type, its fields, and an optional key that makes its delivery idempotent."""

    type: str
    event: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    correlation_id: str | None = None


class AskBody(RequestModel):
    type: str
    event: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    timeout_s: float = 30.0


class StateQuery(RequestModel):
    at: int | None = None


class JournalQuery(PageQuery):
    """`from` is the first height; without it, the oldest kept entry."""

    first: int | None = field(default=None, name="from")


class WorldForkBody(RequestModel):
    name: str
    at: int | None = None
    effects: str = "drop"
    timers: str = "drop"


class PurgeBody(RequestModel):
    """`force` purges a world in use: it fences the worker and drops open effects."""

    force: bool = False


class PinBody(RequestModel):
    worker: str


class SentEvent(msgspec.Struct, frozen=True):
    """An accepted event. `waits_for` is the event type that blocks the world because no live worker handles it."""

    world_id: str
    seq: int
    status: str
    waits_for: str | None


class ReplyDocument(msgspec.Struct, frozen=True):
    reply: Any


class PinDocument(msgspec.Struct, frozen=True):
    world_id: str
    worker: str | None
    pinned: bool
    changed: bool


# -- lookup ----------------------------------------------------------------------------------------


def find_world(txn: Txn, universe: str, type: str, name: str) -> WorldRecord:
    """Return the world of a path."""
    if type == BY_ID:
        return catalog.get_record(txn, universe, name)
    world_id = catalog.find_id(txn, universe, type, name)
    if world_id is None:
        raise NotFound(what="world", universe=universe, type=type, name=name)
    return catalog.get_record(txn, universe, world_id)


def world_of(call: ApiCall) -> WorldRecord:
    record: WorldRecord = call.read(find_world, call.universe, call.path["type"], call.path["name"])
    return record


def subject_text(record: WorldRecord) -> str:
    return f"world/{record.type}/{record.name}"


# -- queries ---------------------------------------------------------------------------------------


def list_worlds(call: ApiCall) -> Page[WorldDocument]:
    query: WorldListQuery = call.query
    limit = cursors.page_limit(query)
    start = cursors.decode(query.cursor, tuple[str, str])

    def read(txn: Txn) -> list[catalog_queries.WorldRow]:
        rows: list[catalog_queries.WorldRow] = []
        types = [query.type] if query.type else catalog_queries.types(txn, call.universe)
        for type in types:
            if start is not None and type < start[0]:
                continue
            after = start[1] if start is not None and type == start[0] else ""
            rows += catalog_queries.worlds(txn, call.universe, type, after, limit + 1 - len(rows))
            if len(rows) > limit:
                break
        return rows

    rows = call.read(read)
    items = [world_documents.world_document(row) for row in rows[:limit]]
    last = (items[-1].type, items[-1].name) if len(rows) > limit else None
    return Page(items=items, next=cursors.encode(last) if last else None)


def show_world(call: ApiCall) -> WorldWithLineage:
    def read(txn: Txn) -> WorldWithLineage:
        record = find_world(txn, call.universe, call.path["type"], call.path["name"])
        return world_documents.read_with_lineage(txn, record)

    document: WorldWithLineage = call.read(read)
    return document


def show_world_state(call: ApiCall) -> StateDocument | ApiAnswer:
    app, at, states = call.app, call.query.at, call.states
    if app is None:
        return _raw_state(call)
    record = world_of(call)
    world, subject = f"{record.type}/{record.name}", subject_of(record.universe, record.world_id)
    height = call.read(journal.head, subject).height if at is None else at
    etag = _etag(record, height, app)
    if call.etag == etag and at is None:
        return ApiAnswer(None, 304, etag)
    if states is None:
        fields = call.read(world_documents.read_state, record, app, height)
    else:
        fields = states.read(record.universe, record.world_id, height)
    return ApiAnswer(StateDocument(world, at, fields), 200, etag)


def _etag(record: WorldRecord, height: int, app: App) -> str:
    """Other code may read the same entries as another state."""
    program = app.programs.get(record.type)
    code = b"" if program is None else program.version.encode()
    return f'"{record.world_id}-{height}-{codec.digest(code).hex()[:12]}"'


def _raw_state(call: ApiCall) -> StateDocument:
    record, at = world_of(call), call.query.at
    raw: world_documents.RawState | None = call.read(world_documents.read_raw_state, record, at)
    if raw is None:
        why = "the world has no snapshot that shows raw values"
        raise NeedsApp(what="show_world_state", why=why)
    return StateDocument(f"{record.type}/{record.name}", at, raw.fields, raw.height)


def list_world_journal(call: ApiCall) -> Page[EntryDocument]:
    query: JournalQuery = call.query
    limit = cursors.page_limit(query)
    start = cursors.decode(query.cursor, int)

    def read(txn: Txn) -> world_documents.JournalRows:
        record = find_world(txn, call.universe, call.path["type"], call.path["name"])
        return world_documents.read_journal(
            txn, record, query.first if start is None else start, limit
        )

    record, entries, head = call.read(read)
    items = [world_documents.entry_document(record, entry, call.app) for entry in entries]
    more = bool(entries) and entries[-1].height < head
    return Page(items=items, next=cursors.encode(entries[-1].height + 1) if more else None)


def list_world_lineage(call: ApiCall) -> Page[AncestorDocument]:
    def read(txn: Txn) -> list[AncestorDocument]:
        record = find_world(txn, call.universe, call.path["type"], call.path["name"])
        return world_documents.ancestor_documents(record, catalog_queries.lineage(txn, record))

    return Page(items=call.read(read))


# -- creation and input ----------------------------------------------------------------------------


def create_world(call: ApiCall) -> ApiAnswer:
    body: WorldBody = call.body
    if call.app is not None and body.type not in call.app.programs:
        raise Invalid(what="world", type=body.type[:64], why="unknown to the app",
                      known=sorted(call.app.programs))  # fmt: skip
    if body.type == BY_ID:
        raise Invalid(
            what="world type", found=BY_ID, why="a path with this type names a world by its id"
        )
    catalog.check_address(call.universe, body.type, body.name)
    known = call.read(catalog.find_id, call.universe, body.type, body.name)
    seeded_from = "" if body.seed is None else body.seed.world_id
    store = call.recording_store(f"world/{body.type}/{body.name}", seeded_from)
    if body.seed is None:
        record = world_operations.world_create(store, call.universe, body.type, body.name)
    else:
        record = world_operations.world_create_from_seed(
            store, call.universe, body.type, body.name, seed_snapshot(body.seed)
        )
    document = call.read(world_documents.read_with_lineage, record)
    return ApiAnswer(document, 200 if known == record.world_id else 201)


def seed_snapshot(seed: SeedBody) -> SeedSnapshot:
    try:
        hash = None if seed.hash is None else bytes.fromhex(seed.hash)
    except ValueError:
        raise Invalid(what="hash", found=seed.hash, expected="hexadecimal") from None
    return SeedSnapshot(seed.world_id, seed.height, hash)


def send_world_event(call: ApiCall) -> SentEvent:
    body: EventBody = call.body
    type, name = _address(call)
    for what, text in (("key", body.key), ("correlation_id", body.correlation_id)):
        if text is not None:
            catalog.check_text(what, text)
    return send_event(call, type, name, body)


def send_event(call: ApiCall, type: str, name: str, body: EventBody) -> SentEvent:
    """Send an event to a world. The key of the request is also the key of the event, unless the event has its own."""
    app = call.require_app()
    event = world_operations.event_of(app, body.type, body.event)
    catalog.check_address(call.universe, type, name)
    delivered = world_operations.send_event(
        call.recording_store(),
        app,
        WorldAddress(call.universe, type, name, world_operations.new_world_id()),
        event,
        key=body.key or call.key or None,
        correlation_id=body.correlation_id,
    )
    return sent_event(delivered)


def sent_event(delivered: IngressResult) -> SentEvent:
    item = delivered.item
    if item is None:
        return SentEvent(delivered.world_id, delivered.seq, "accepted", None)
    if item.state == "dead":
        raise UnknownEvent(
            what="event",
            type=item.type,
            world_id=delivered.world_id,
            seq=item.seq,
            letter=item.letter,
        )
    return SentEvent(delivered.world_id, delivered.seq, item.state, item.type or None)


def ask_world(call: ApiCall) -> ReplyDocument:
    body: AskBody = call.body
    if not 0 < body.timeout_s <= ASK_TIMEOUT_S_MAX:
        raise Invalid(what="timeout_s", found=body.timeout_s, min=0, max=ASK_TIMEOUT_S_MAX)
    runtime = client_runtime(call)
    type, name = _address(call)
    kind = runtime.app.world_class(type)
    event = world_operations.event_of(runtime.app, body.type, body.event)
    handle: WorldHandle[Any] = WorldHandle(runtime, kind, name)
    asking = handle.ask_call(event, body.timeout_s, body.key or call.key or None)
    try:
        reply = store_calls.run(call.recording_store(), asking, call.cancellation)
    except NoReply as error:
        # The dead letter and the journal have the traceback. A client that may only submit must not see source paths.
        fields = {**error.fields, "error": exception_text(error.fields["error"])}
        raise NoReply(**fields) from None
    return ReplyDocument(world_documents.json_types(reply))


def _address(call: ApiCall) -> tuple[str, str]:
    """Return type and name of the world, which need not exist if the path has them."""
    if call.path["type"] != BY_ID:
        return call.path["type"], call.path["name"]
    record = world_of(call)
    return record.type, record.name


# -- changes ---------------------------------------------------------------------------------------


def fork_world(call: ApiCall) -> WorldWithLineage:
    return fork_from(call, world_of(call), call.body)


def fork_from(call: ApiCall, parent: WorldRecord, body: WorldForkBody) -> WorldWithLineage:
    if call.app is None and (body.effects, body.timers) != ("drop", "drop"):
        raise NeedsApp(what="fork", why="a fork finds pending work by replay")
    try:
        child = world_operations.world_fork(
            call.recording_store(subject_text(parent), body.name),
            parent.universe,
            parent.world_id,
            body.name,
            at=body.at,
            effects=body.effects,
            timers=body.timers,
            app=call.app,
        )
    except NotFound as error:
        if call.app is None and error.fields.get("what") == "snapshot":
            raise NeedsApp(what="fork", why="no snapshot exists at this height") from None
        raise
    document: WorldWithLineage = call.read(world_documents.read_with_lineage, child)
    return document


def pause_world(call: ApiCall) -> WorldDocument:
    return _change_status(call, WorldEvent.PAUSE)


def resume_world(call: ApiCall) -> WorldDocument:
    return _change_status(call, WorldEvent.RESUME)


def delete_world(call: ApiCall) -> WorldDocument:
    return _change_status(call, WorldEvent.DELETE)


def _change_status(call: ApiCall, event: WorldEvent) -> WorldDocument:
    record = world_of(call)
    now: WorldRecord = call.transact(
        catalog.change_status,
        record.universe,
        record.world_id,
        event,
        subject=subject_text(record),
        detail=record.world_id,
    )
    return world_documents.world_document(call.read(catalog_queries.world, now))


def purge_world(call: ApiCall) -> PurgeDocument:
    type, name = call.path["type"], call.path["name"]
    text = name if type == BY_ID else f"{type}/{name}"
    universe, world_id = call.read(erasure.find_purgeable, text, call.universe)
    # By its id: the name of a purged world is erased.
    store = call.recording_store(f"world/by-id/{world_id}", world_id)
    tombstone, forks = erasure.world_purge(store, universe, world_id, force=call.body.force)
    return world_documents.purge_document(
        universe, tombstone, forks, erasure.backups_text(tombstone)
    )


def pin_world(call: ApiCall) -> PinDocument:
    record = world_of(call)
    was = call.read(catalog.find_assignment, record.universe, record.world_id)
    pinned = world_operations.pin_world(
        call.recording_store(subject_text(record), call.body.worker),
        record.universe,
        record.world_id,
        call.body.worker,
    )
    return PinDocument(record.world_id, pinned.desired_worker_id, True, pinned != was)


def unpin_world(call: ApiCall) -> PinDocument:
    record = world_of(call)
    changed = world_operations.unpin_world(
        call.recording_store(subject_text(record)), record.universe, record.world_id
    )
    now = call.read(catalog.find_assignment, record.universe, record.world_id)
    return PinDocument(
        record.world_id, None if now is None else now.desired_worker_id, False, changed
    )


_WORLD = "/v1/worlds/{type}/{name}"
_CHANGE = EndpointOptions(body=EmptyBody, problems=(IllegalTransition,))

ENDPOINTS = (
    Endpoint("GET", "/v1/worlds", Scope.READ, list_worlds, Page[WorldDocument],
             "List worlds by type and name", EndpointOptions(query=WorldListQuery)),
    Endpoint("POST", "/v1/worlds", Scope.SUBMIT, create_world, WorldWithLineage,
             "Create a world, optionally from a snapshot of another world",
             EndpointOptions(body=WorldBody, status=201, body_scope=BodyScope(
                 Scope.OPERATE, lambda body: body.seed is not None, "the body has a seed"))),
    Endpoint("GET", _WORLD, Scope.READ, show_world, WorldWithLineage,
             "Show status, blocker, height, lease and lineage of a world"),
    Endpoint("GET", f"{_WORLD}/state", Scope.READ, show_world_state, StateDocument,
             "Show the state of a world after its last journal entry, or after any other",
             EndpointOptions(query=StateQuery, waits=True, problems=(
                 NeedsApp, ReducerTimeout, ReducerDied, ReducerMemory, StatesBusy))),
    Endpoint("GET", f"{_WORLD}/journal", Scope.READ, list_world_journal, Page[EntryDocument],
             "List the journal entries of a world, oldest first", EndpointOptions(query=JournalQuery)),
    Endpoint("GET", f"{_WORLD}/lineage", Scope.READ, list_world_lineage, Page[AncestorDocument],
             "List the worlds from which a world was forked, the direct parent first"),
    Endpoint("POST", f"{_WORLD}/send", Scope.SUBMIT, send_world_event, SentEvent,
             "Send an event to a world, which is created if it does not exist",
             EndpointOptions(body=EventBody, needs_app=True, finds_repeat=True,
                             problems=(UnknownEvent,))),
    Endpoint("POST", f"{_WORLD}/ask", Scope.SUBMIT, ask_world, ReplyDocument,
             "Send an event to a world and wait for the reply of its handler",
             EndpointOptions(body=AskBody, needs_app=True, waits=True, finds_repeat=True,
                             problems=(UnknownEvent,))),
    Endpoint("POST", f"{_WORLD}/fork", Scope.OPERATE, fork_world, WorldWithLineage,
             "Create a world with the state of another world after one of its entries",
             EndpointOptions(body=WorldForkBody, status=201)),
    Endpoint("POST", f"{_WORLD}/pause", Scope.OPERATE, pause_world, WorldDocument,
             "Stop handling the messages of a world; the world still accepts them", _CHANGE),
    Endpoint("POST", f"{_WORLD}/resume", Scope.OPERATE, resume_world, WorldDocument,
             "Continue a paused or parked world", _CHANGE),
    Endpoint("POST", f"{_WORLD}/delete", Scope.OPERATE, delete_world, WorldDocument,
             "Delete a world permanently; its rows are removed after 7 days", _CHANGE),
    Endpoint("POST", f"{_WORLD}/purge", Scope.OPERATE, purge_world, PurgeDocument,
             "Erase a world now; only its id, a hash and the date remain",
             EndpointOptions(body=PurgeBody, problems=(WorldInUse,))),
    Endpoint("POST", f"{_WORLD}/pin", Scope.OPERATE, pin_world, PinDocument,
             "Keep a world on a worker", EndpointOptions(body=PinBody)),
    Endpoint("POST", f"{_WORLD}/unpin", Scope.OPERATE, unpin_world, PinDocument,
             "Let the orchestrator place a pinned world again", EndpointOptions(body=EmptyBody)),
)  # fmt: skip
