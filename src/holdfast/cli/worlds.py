"""`holdfast worlds`: lists, shows, forks, pins, pauses, resumes, deletes and purges worlds.

A world is identified by `Type/name` or its id. Stored data can be shown without the code. With `--app`,
states can be computed, events are decoded to their classes, and a fork can start at any height.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from holdfast.cli import world_input
from holdfast.cli.app_argument import add_app_option, app_errors_are_usage
from holdfast.cli.output import emit, field_lines, printable, table, time_text
from holdfast.cli.store_option import ONE_UNIVERSE, add_options, open_existing
from holdfast.errors import Invalid
from holdfast.ops import audit, catalog_queries, erasure, world_documents, world_operations
from holdfast.ops.app_loader import load_app
from holdfast.ops.catalog_queries import WorldRow
from holdfast.store.api import Store, Txn
from holdfast.world import catalog
from holdfast.world.catalog import WorldEvent, WorldRecord

# The actor of audit entries of this command.
ACTOR = "command line"
LIST_MAX = 100
ENTRIES_MAX = 100
EVENT_CHARS_MAX = 100

CHANGES = {
    "pause": (WorldEvent.PAUSE, "stop handling messages; the world still accepts them"),
    "resume": (
        WorldEvent.RESUME,
        "continue a paused world, or a parked one after its cause is fixed",
    ),
    "delete": (
        WorldEvent.DELETE,
        "delete a world permanently: its name is free at once, its rows are removed after 7 days",
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="list worlds by type and name")
    listed.add_argument("type", metavar="TYPE", nargs="?", help="only worlds of this type")
    listed.add_argument(
        "--after", metavar="NAME", default="", help="list only worlds after NAME; needs TYPE"
    )
    listed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N worlds (default {LIST_MAX})",
    )
    _add_options(listed)

    shown = actions.add_parser("show", help="show status, blocker, height, lease and lineage")
    _add_world(shown)

    state_parser = actions.add_parser(
        "state",
        help="show the fields of the state after the last journal entry, or after an earlier one",
    )
    _add_world(state_parser)
    state_parser.add_argument(
        "--at", metavar="HEIGHT", type=int, help="state after this entry (default: the last entry)"
    )
    state_parser.add_argument(
        "--app", metavar="MODULE:APP", required=True, help="application of the world"
    )

    read = actions.add_parser("journal", help="list the journal entries, oldest first")
    _add_world(read)
    read.add_argument("--from", dest="lo", metavar="HEIGHT", type=int, help="start with this entry")
    read.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=ENTRIES_MAX,
        help=f"list at most N entries (default {ENTRIES_MAX})",
    )
    add_app_option(read, "decode events with this application")

    forked = actions.add_parser("fork", help="create a world with the state of this one")
    _add_world(forked)
    forked.add_argument("name", metavar="NAME", help="name of the new world")
    forked.add_argument(
        "--at", metavar="HEIGHT", type=int, help="fork after this entry (default: the last entry)"
    )
    forked.add_argument(
        "--effects",
        choices=("drop", "fail", "reissue"),
        default="drop",
        help="what to do with effects that have no receipt yet (default drop)",
    )
    forked.add_argument(
        "--timers",
        choices=("drop", "keep"),
        default="drop",
        help="what to do with pending timers (default drop)",
    )
    add_app_option(forked, "application; needed if there is no snapshot at that entry")

    erased = actions.add_parser(
        "purge", help="erase a world now; only its id, a hash and the date remain"
    )
    _add_world(erased)
    erased.add_argument(
        "--force",
        action="store_true",
        help="purge a world in use: fence its worker and drop its open effects",
    )

    world_input.configure(actions)
    _add_pins(actions)
    for action, (_, help) in CHANGES.items():
        _add_world(actions.add_parser(action, help=help))


def _add_pins(actions: Any) -> None:
    pinned = actions.add_parser(
        "pin", help="keep a world on a worker; it waits while this worker is gone"
    )
    _add_world(pinned)
    pinned.add_argument("worker", metavar="WORKER", help="id of the worker")

    _add_world(actions.add_parser("unpin", help="let the orchestrator place a pinned world again"))


@app_errors_are_usage
def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        {
            "list": _list,
            "show": _show,
            "state": _state,
            "journal": _journal,
            "create": world_input.create_world,
            "send": world_input.send_event,
            "fork": _fork,
            "purge": _purge,
            "pin": _pin,
            "unpin": _unpin,
        }.get(args.action, _change)(store, args)
    return 0


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("world", metavar="WORLD", help="Type/name or id of the world")
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, universe=ONE_UNIVERSE)


# -- list and show -------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> None:
    if args.after and not args.type:
        raise Invalid(what="--after", why="names are ordered within a type: give TYPE")
    rows = store.read(_page, args.universe, args.type, args.after, args.limit + 1)
    more, rows = len(rows) > args.limit, rows[: args.limit]
    several = len({row.record.universe for row in rows}) > 1
    header = ["universe"] * several + ["type", "name", "status", "height", "depth", "worker"]
    cells = [[row.record.universe] * several + _cells(row) for row in rows]
    text = table(header, cells) if rows else "no worlds"
    if more:
        last_record = rows[-1].record
        text += f"\n{len(rows)} shown; more with: {last_record.type} --after {last_record.name}"
    emit(args, {"worlds": [_document(row) for row in rows], "more": more}, text)


def _cells(row: WorldRow) -> list[Any]:
    record = row.record
    status = record.status.value
    if record.stopped and record.unknown is not None:
        status += f" ({record.unknown.code})"
    return [record.type, record.name, status, row.height, row.depth, row.worker or None]


def _page(
    txn: Txn, universe: str | None, type: str | None, after: str, limit: int
) -> list[WorldRow]:
    rows: list[WorldRow] = []
    for universe_name in catalog_queries.universes(txn) if universe is None else [universe]:
        for type_name in catalog_queries.types(txn, universe_name) if type is None else [type]:
            rows += catalog_queries.worlds(txn, universe_name, type_name, after, limit - len(rows))
    return rows


def _show(store: Store, args: argparse.Namespace) -> None:
    row, parents = store.read(_world_and_parents, args.world, args.universe)
    record, blocker, lineage = row.record, row.record.blocked_by, row.record.lineage
    pairs: list[tuple[str, object]] = [
        ("world", f"{record.type}/{record.name}"),
        ("id", record.world_id),
        ("universe", record.universe),
        ("status", record.status.value),
        ("height", row.height),
        ("kept from", row.floor),
        ("unread", row.depth),
        ("assigned to", row.worker or None),
        ("held by", row.holder or None),
        ("created", time_text(record.created_ns)),
    ]
    if blocker is not None:
        pairs.append(("blocked by", f"{blocker.code} since {time_text(blocker.since_ns)}"))
        pairs.append(("", blocker.text))
    if lineage is not None:
        parent = f"{parents[0].type}/{parents[0].name}" if parents else lineage.parent_world_id
        pairs.append(("forked from", f"{parent} after {lineage.forked_at_height}"))
        pairs += [
            ("", f"{parent_record.type}/{parent_record.name}") for parent_record in parents[1:]
        ]
    emit(args, _document_with_lineage(row, parents), field_lines(pairs))


def _world_and_parents(
    txn: Txn, name: str, universe: str | None
) -> tuple[WorldRow, list[WorldRecord]]:
    record = catalog_queries.resolve(txn, name, universe)
    return catalog_queries.world(txn, record), catalog_queries.lineage(txn, record)


# -- state ---------------------------------------------------------------------------------------


def _state(store: Store, args: argparse.Namespace) -> None:
    app = load_app(args.app)
    record = store.read(catalog_queries.resolve, args.world, args.universe)
    field_values = store.read(world_documents.read_state, record, app, args.at)
    document = {"world": f"{record.type}/{record.name}", "at": args.at, "state": field_values}
    lines = [
        (name, printable(json.dumps(value, ensure_ascii=False)))
        for name, value in field_values.items()
    ]
    emit(args, document, field_lines(lines) if lines else "no fields")


# -- journal -------------------------------------------------------------------------------------


def _journal(store: Store, args: argparse.Namespace) -> None:
    app = None if args.app is None else load_app(args.app)
    record, entries, head = store.read(_entries, args.world, args.universe, args.lo, args.limit)
    documents = [
        world_documents.entry_document(record, stored_entry, app) for stored_entry in entries
    ]
    rows = [
        (
            entry.height,
            time_text(entry.at_ns),
            entry.kind,
            _short(entry.shown),
            entry.outcome,
            entry.emitted,
        )
        for entry in documents
    ]
    text = table(("height", "time", "kind", "event", "outcome", "emitted"), rows)
    if entries and entries[-1].height < head:
        text += f"\n… up to {head}; more with --from {entries[-1].height + 1}"
    document = {
        "world": f"{record.type}/{record.name}",
        "head": head,
        "entries": msgspec.to_builtins(documents),
    }
    emit(args, document, text if entries else "no entries")


def _entries(
    txn: Txn, name: str, universe: str | None, lo: int | None, limit: int
) -> world_documents.JournalRows:
    record = catalog_queries.resolve(txn, name, universe)
    return world_documents.read_journal(txn, record, lo, limit)


def _short(text: str) -> str:
    return text if len(text) <= EVENT_CHARS_MAX else text[: EVENT_CHARS_MAX - 1] + "…"


# -- fork and change -----------------------------------------------------------------------------


def _fork(store: Store, args: argparse.Namespace) -> None:
    app = None if args.app is None else load_app(args.app)
    parent = store.read(catalog_queries.resolve, args.world, args.universe)
    child = world_operations.world_fork(
        store,
        parent.universe,
        parent.world_id,
        args.name,
        at=args.at,
        effects=args.effects,
        timers=args.timers,
        app=app,
    )
    assert child.lineage is not None
    text = (
        f"{child.type}/{child.name} starts from {parent.type}/{parent.name} "
        f"after entry {child.lineage.forked_at_height}"
    )
    row, parents = store.read(_world_and_parents, child.world_id, child.universe)
    emit(args, _document_with_lineage(row, parents), printable(text))


def _change(store: Store, args: argparse.Namespace) -> None:
    event, _ = CHANGES[args.action]
    record = store.read(catalog_queries.resolve, args.world, args.universe)
    now: WorldRecord = store.transact(
        catalog.change_status, record.universe, record.world_id, event
    )
    text = printable(f"{now.type}/{now.name} is {now.status.value}")
    emit(args, _document(store.read(catalog_queries.world, now)), text)


def _pin(store: Store, args: argparse.Namespace) -> None:
    record = store.read(catalog_queries.resolve, args.world, args.universe)
    world_operations.pin_world(store, record.universe, record.world_id, args.worker)
    text = printable(f"{record.type}/{record.name} is pinned to {args.worker}")
    emit(args, _document(store.read(catalog_queries.world, record)) | {"pinned": True}, text)


def _unpin(store: Store, args: argparse.Namespace) -> None:
    record = store.read(catalog_queries.resolve, args.world, args.universe)
    was_pinned = world_operations.unpin_world(store, record.universe, record.world_id)
    text = printable(
        f"{record.type}/{record.name} {'is unpinned' if was_pinned else 'was not pinned'}"
    )
    emit(args, _document(store.read(catalog_queries.world, record)) | {"pinned": False}, text)


def _purge(store: Store, args: argparse.Namespace) -> None:
    universe, world_id = store.read(erasure.find_purgeable, args.world, args.universe)

    def record(txn: Txn) -> None:
        # By its id: the name of a purged world is erased.
        audit.record(txn, universe, ACTOR, "worlds.purge", f"world/by-id/{world_id}")

    tombstone, forks = erasure.world_purge(
        store, universe, world_id, force=args.force, record=record
    )
    purged, backups = time_text(tombstone.purged_ns), erasure.backups_text(tombstone)
    document = msgspec.to_builtins(
        world_documents.purge_document(universe, tombstone, forks, backups)
    )
    pairs: list[tuple[str, object]] = [
        ("purged", tombstone.world_id),
        ("hash", tombstone.hash.hex()),
        ("date", purged),
        ("not erased", "mail that it sent is in the journals of its recipients"),
        ("", backups),
        *(("", f"a copy of its state is in the fork {fork}") for fork in forks),
    ]
    emit(args, document, field_lines(pairs))


# -- inside --------------------------------------------------------------------------------------


def _document(row: WorldRow) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(world_documents.world_document(row))
    return document


def _document_with_lineage(row: WorldRow, parents: list[WorldRecord]) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(world_documents.with_lineage(row, parents))
    return document
