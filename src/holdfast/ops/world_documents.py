"""JSON documents of worlds and their journals, shared by the HTTP API and the command line."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from holdfast import codec
from holdfast.app.app import App
from holdfast.config import SCAN_PAGE
from holdfast.durable import journal, snapshot
from holdfast.durable.journal import ChainedEntry
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import IngressKind, IntentReceipt
from holdfast.ops import catalog_queries
from holdfast.ops.catalog_queries import WorldRow
from holdfast.ops.http.json_values import to_json
from holdfast.store.api import Txn
from holdfast.world import journal_entry
from holdfast.world.catalog import WorldRecord, subject_of
from holdfast.world.journal_entry import JournalStep
from holdfast.world.purge import Tombstone
from holdfast.world.reducer import WorldSpec
from holdfast.world.restore import restore


class WorldBlockerDocument(msgspec.Struct, frozen=True):
    code: str
    text: str
    height: int
    since_ns: int


class WorldDocument(msgspec.Struct, frozen=True):
    """A world as it appears in a list."""

    universe: str
    world_id: str
    type: str
    name: str
    status: str
    height: int
    floor: int
    depth: int
    worker: str | None
    holder: str | None
    created_ns: int
    blocker: WorldBlockerDocument | None


class AncestorDocument(msgspec.Struct, frozen=True):
    """A world from which another one was forked."""

    parent_world_id: str
    parent: str
    forked_at_height: int
    parent_snapshot_hash: str


class ForkDocument(msgspec.Struct, frozen=True):
    """A world that was forked from another one."""

    world_id: str
    type: str
    name: str
    forked_at_height: int


class WorldWithLineage(WorldDocument, frozen=True):
    """A world with its fork ancestors, the direct parent first. `epoch` is the fencing epoch of its last lease, null
    without any, and `leased_until_ns` the end of a live lease."""

    epoch: int | None
    leased_until_ns: int | None
    lineage: list[AncestorDocument]


class EntryDocument(msgspec.Struct, frozen=True):
    """A journal entry. `value` has the fields of its event or its mail, and `shown` is it as text."""

    height: int
    seq: int
    at_ns: int
    kind: str
    type: str
    shown: str
    value: Any
    outcome: str
    error: str
    emitted: int
    code: str
    hash: str
    correlation_id: str | None
    from_universe: str | None
    from_world: str | None


class StateDocument(msgspec.Struct, frozen=True):
    """The fields of a state, after the last entry if `at` is null.

    `raw_height` is not null if the server has no code of this application: the fields are the stored values of the
    snapshot after this entry, the last one at or below `at`.
    """

    world: str
    at: int | None
    state: dict[str, Any]
    raw_height: int | None = None


class RawState(NamedTuple):
    """The stored values of a snapshot, which need no code of the application, and its height."""

    height: int
    fields: dict[str, Any]


class PurgeCopies(msgspec.Struct, frozen=True):
    """Copies of a purged world that remain."""

    forks: list[str]
    backups: str


class PurgeDocument(msgspec.Struct, frozen=True):
    universe: str
    world_id: str
    hash: str
    height: int
    purged_ns: int
    copies: PurgeCopies


class JournalRows(NamedTuple):
    """Entries of a world in order, with the height of its last one."""

    record: WorldRecord
    entries: list[ChainedEntry]
    head: int


def world_document(row: WorldRow) -> WorldDocument:
    record, blocker = row.record, row.record.blocked_by
    return WorldDocument(
        universe=record.universe,
        world_id=record.world_id,
        type=record.type,
        name=record.name,
        status=record.status.value,
        height=row.height,
        floor=row.floor,
        depth=row.depth,
        worker=row.worker or None,
        holder=row.holder or None,
        created_ns=record.created_ns,
        blocker=None
        if blocker is None
        else WorldBlockerDocument(blocker.code, blocker.text, blocker.height, blocker.since_ns),
    )


def with_lineage(row: WorldRow, parents: list[WorldRecord]) -> WorldWithLineage:
    document = msgspec.structs.asdict(world_document(row))
    return WorldWithLineage(
        **document,
        epoch=row.epoch or None,
        leased_until_ns=row.leased_until_ns or None,
        lineage=ancestor_documents(row.record, parents),
    )


def ancestor_documents(record: WorldRecord, parents: list[WorldRecord]) -> list[AncestorDocument]:
    documents = []
    for parent in parents:
        assert record.lineage is not None
        documents.append(
            AncestorDocument(
                parent.world_id,
                f"{parent.type}/{parent.name}",
                record.lineage.forked_at_height,
                record.lineage.parent_snapshot_hash.hex(),
            )
        )
        record = parent
    return documents


def read_with_lineage(txn: Txn, record: WorldRecord) -> WorldWithLineage:
    row = catalog_queries.world(txn, record)
    return with_lineage(row, catalog_queries.lineage(txn, record))


def read_state(txn: Txn, record: WorldRecord, app: App, at: int | None) -> dict[str, Any]:
    """Return the fields of a state as JSON types: bytes in base64, times as text."""
    program = app.programs.get(record.type)
    if program is None:
        raise Invalid(what="world", type=record.type, why="the app has no such world")
    world = WorldSpec(record.universe, record.world_id, record.name, program, app)
    state = restore(txn, world, at=at).state
    field_values: dict[str, Any] = json_types(state)
    return field_values


def read_raw_state(txn: Txn, record: WorldRecord, at: int | None) -> RawState | None:
    """Return the last snapshot at or below a height; None if there is none."""
    subject = subject_of(record.universe, record.world_id)
    head = journal.head(txn, subject)
    if at is not None and not 0 <= at <= head.height:
        raise NotFound(what="height", world=record.world_id, found=at, head=head.height)
    saved = snapshot.heights(txn, subject, SCAN_PAGE)
    height = next((found for found in saved if at is None or found <= at), None)
    if height is None:
        return None
    fields = to_json(snapshot.load(txn, subject, height))
    return RawState(height, fields if isinstance(fields, dict) else {"value": fields})


def json_types(value: Any) -> Any:
    """Return a typed value as JSON types."""
    return json.loads(msgspec.json.encode(value, enc_hook=codec.encode_other))


def read_journal(txn: Txn, record: WorldRecord, first: int | None, limit: int) -> JournalRows:
    """Return entries from a height on; without it, from the oldest kept entry."""
    subject = subject_of(record.universe, record.world_id)
    head = journal.head(txn, subject)
    first_height = head.floor if first is None else first
    entries = journal.read(txn, subject, first_height, head.height + 1, limit)
    return JournalRows(record, entries, head.height)


def entry_document(
    record: WorldRecord, stored_entry: ChainedEntry, app: App | None
) -> EntryDocument:
    step = journal_entry.decode(stored_entry.body)
    ingress = step.ingress
    return EntryDocument(
        height=stored_entry.height,
        seq=step.seq,
        at_ns=stored_entry.at_ns,
        kind=ingress.kind.value,
        type=ingress.type,
        shown=_event_text(record, step, app),
        value=_stored_value(step),
        outcome=step.outcome.value,
        error=step.error,
        emitted=len(step.emitted),
        code=step.code,
        hash=stored_entry.hash.hex(),
        correlation_id=ingress.correlation_id,
        from_universe=ingress.from_universe,
        from_world=ingress.from_world,
    )


def purge_document(
    universe: str, tombstone: Tombstone, forks: list[str], backups: str
) -> PurgeDocument:
    return PurgeDocument(
        universe,
        tombstone.world_id,
        tombstone.hash.hex(),
        tombstone.height,
        tombstone.purged_ns,
        PurgeCopies(forks, backups),
    )


def _stored_value(step: JournalStep) -> Any:
    """Return the fields of an event or of mail; None for a receipt, of which only the status is shown."""
    ingress = step.ingress
    if ingress.kind is IngressKind.RECEIPT:
        return None
    # The first byte of an event is its version.
    return to_json(ingress.value if ingress.kind is IngressKind.INBOX else ingress.value[1:])


def _event_text(record: WorldRecord, step: JournalStep, app: App | None) -> str:
    """Format an event, decoded by the app if it is given; else its type and stored fields."""
    ingress = step.ingress
    if ingress.kind is IngressKind.RECEIPT:
        receipt = codec.unpack_as(IntentReceipt, ingress.value)
        return f"{receipt.effect_kind} {receipt.status.value} {receipt.code}".rstrip()
    try:
        if ingress.kind is IngressKind.INBOX:
            return f"{ingress.type} {codec.unpack(ingress.value)!r}"
        if app is not None and record.type in app.programs:
            return repr(app.programs[record.type].handler_argument(ingress))
        stored = codec.unpack(ingress.value[1:])
    except HoldfastError:
        return f"{ingress.type} 0x{ingress.value.hex()}"
    return f"{ingress.type} {stored}"
