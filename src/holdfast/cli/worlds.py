"""`holdfast worlds`: which there are, how each one is, what it went through, and what to do with it.

A world is named `Type/name`, or by its id. What is stored can be shown without the code; with
`--app` states are known, events are shown as the code sees them, and a fork may start at any height.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from holdfast import codec
from holdfast.app.app import App
from holdfast.cli.application import add_app_option, app_is_usage
from holdfast.cli.output import emit, fields, printable, table, time_text
from holdfast.cli.target import add_options, existing
from holdfast.durable import journal
from holdfast.durable.journal import Entry
from holdfast.errors import HoldfastError, Invalid
from holdfast.messages import Kind, Receipt
from holdfast.ops import erasure, inventory, service
from holdfast.ops.application import load_app
from holdfast.ops.inventory import WorldRow
from holdfast.store.api import Store, Txn
from holdfast.world import catalog, entry, kernel, purge
from holdfast.world.catalog import Event, WorldRecord, subject_of
from holdfast.world.entry import Step
from holdfast.world.restore import restore

LIST_MAX = 100
ENTRIES_MAX = 100
EVENT_CHARS_MAX = 100

CHANGES = {
    "pause": (Event.PAUSE, "take messages, handle none"),
    "resume": (Event.RESUME, "go on after a pause, or after what parked it is mended"),
    "delete": (Event.DELETE, "for good: the name is free again, the rows go after seven days"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="by type and name")
    listed.add_argument("type", metavar="TYPE", nargs="?", help="of this type only")
    listed.add_argument("--after", metavar="NAME", default="", help="begin after it; needs TYPE")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    _add_options(listed)

    shown = actions.add_parser("show", help="status, blocker, height, lease, lineage")
    _add_world(shown)

    known = actions.add_parser("state", help="its fields, now or after any entry; needs the code")
    _add_world(known)
    known.add_argument("--at", metavar="HEIGHT", type=int, help="after this entry; else as it is")
    known.add_argument("--app", metavar="MODULE:APP", required=True, help="whose world it is")

    read = actions.add_parser("journal", help="what it went through, oldest first")
    _add_world(read)
    read.add_argument("--from", dest="lo", metavar="HEIGHT", type=int, help="begin with this entry")
    read.add_argument("--limit", metavar="N", type=int, default=ENTRIES_MAX, help=f"{ENTRIES_MAX}")
    add_app_option(read, "show events as this code sees them")

    forked = actions.add_parser("fork", help="a new world with the state of this one")
    _add_world(forked)
    forked.add_argument("name", metavar="NAME", help="of the new world")
    forked.add_argument("--at", metavar="HEIGHT", type=int, help="after this entry; else as it is")
    forked.add_argument("--effects", choices=("drop", "fail", "reissue"), default="drop")
    forked.add_argument("--timers", choices=("drop", "keep"), default="drop")
    add_app_option(forked, "needed where there is no snapshot")

    erased = actions.add_parser("purge", help="erase it now; leaves its id, a hash and a date")
    _add_world(erased)
    erased.add_argument(
        "--force", action="store_true", help="fence it first, and drop its open effects"
    )

    for action, (_, help) in CHANGES.items():
        _add_world(actions.add_parser(action, help=help))


@app_is_usage
def run(args: argparse.Namespace) -> int:
    with existing(args) as store:
        {
            "list": _list,
            "show": _show,
            "state": _state,
            "journal": _journal,
            "fork": _fork,
            "purge": _purge,
        }.get(args.action, _change)(store, args)
    return 0


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("world", metavar="WORLD", help="Type/name, or an id")
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--universe", metavar="U", help="where the store holds several")
    add_options(parser)


# -- list and show -------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> None:
    if args.after and not args.type:
        raise Invalid(what="--after", why="names go on within a type: give TYPE")
    rows = store.read(_page, args.universe, args.type, args.after, args.limit + 1)
    more, rows = len(rows) > args.limit, rows[: args.limit]
    several = len({row.record.universe for row in rows}) > 1
    header = ["universe"] * several + ["type", "name", "status", "height", "depth", "worker"]
    cells = [[row.record.universe] * several + _cells(row) for row in rows]
    text = table(header, cells) if rows else "no worlds"
    if more:
        last = rows[-1].record
        text += f"\n{len(rows)} shown; more with: {last.type} --after {last.name}"
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
    found: list[WorldRow] = []
    for where in inventory.universes(txn) if universe is None else [universe]:
        for one in inventory.types(txn, where) if type is None else [type]:
            found += inventory.worlds(txn, where, one, after, limit - len(found))
    return found


def _show(store: Store, args: argparse.Namespace) -> None:
    row, parents = store.read(_told, args.world, args.universe)
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
        pairs += [("", f"{one.type}/{one.name}") for one in parents[1:]]
    document = _document(row) | {"lineage": _lineage(record, parents)}
    emit(args, document, fields(pairs))


def _told(txn: Txn, name: str, universe: str | None) -> tuple[WorldRow, list[WorldRecord]]:
    record = inventory.resolve(txn, name, universe)
    return inventory.look(txn, record), inventory.lineage(txn, record)


# -- state ---------------------------------------------------------------------------------------


def _state(store: Store, args: argparse.Namespace) -> None:
    app = load_app(args.app)
    record = store.read(inventory.resolve, args.world, args.universe)
    if record.type not in app.programs:
        raise Invalid(what="world", type=record.type, why="the app has no such world")
    found = store.read(_fields_of, record, app, args.at)
    document = {"world": f"{record.type}/{record.name}", "at": args.at, "state": found}
    lines = [
        (name, printable(json.dumps(value, ensure_ascii=False))) for name, value in found.items()
    ]
    emit(args, document, fields(lines) if lines else "no fields")


def _fields_of(txn: Txn, record: WorldRecord, app: App, at: int | None) -> dict[str, Any]:
    program = app.programs[record.type]
    world = kernel.World(record.universe, record.world_id, record.name, program, app)
    # As JSON has it: bytes are base64, times are text.
    found: dict[str, Any] = json.loads(msgspec.json.encode(restore(txn, world, at=at).state))
    return found


# -- journal -------------------------------------------------------------------------------------


def _journal(store: Store, args: argparse.Namespace) -> None:
    app = None if args.app is None else load_app(args.app)
    record, entries, head = store.read(_entries, args.world, args.universe, args.lo, args.limit)
    lines = [_line(record, found, app) for found in entries]
    rows = [
        (
            line["height"],
            time_text(line["at_ns"]),
            line["kind"],
            _short(line["shown"]),
            line["outcome"],
            line["emitted"],
        )
        for line in lines
    ]
    text = table(("height", "time", "kind", "event", "outcome", "emitted"), rows)
    if entries and entries[-1].height < head:
        text += f"\n… up to {head}; more with --from {entries[-1].height + 1}"
    document = {"world": f"{record.type}/{record.name}", "head": head, "entries": lines}
    emit(args, document, text if entries else "no entries")


def _entries(
    txn: Txn, name: str, universe: str | None, lo: int | None, limit: int
) -> tuple[WorldRecord, list[Entry], int]:
    record = inventory.resolve(txn, name, universe)
    subject = subject_of(record.universe, record.world_id)
    head = journal.head(txn, subject)
    first = head.floor if lo is None else lo
    return record, journal.read(txn, subject, first, head.height + 1, limit), head.height


def _line(record: WorldRecord, found: Entry, app: App | None) -> dict[str, Any]:
    step = entry.decode(found.body)
    ingress = step.ingress
    return {
        "height": found.height,
        "seq": step.seq,
        "at_ns": found.at_ns,
        "kind": ingress.kind.value,
        "type": ingress.type,
        "shown": _event(record, step, app),
        "outcome": step.outcome.value,
        "error": step.error,
        "emitted": len(step.emitted),
        "code": step.code,
        "hash": found.hash.hex(),
        "correlation_id": ingress.correlation_id,
        "from_universe": ingress.from_universe,
        "from_world": ingress.from_world,
    }


def _event(record: WorldRecord, step: Step, app: App | None) -> str:
    """As the code sees it; else its type and the fields as they are stored."""
    ingress = step.ingress
    if ingress.kind is Kind.RECEIPT:
        receipt = codec.unpack_as(Receipt, ingress.value)
        return f"{receipt.effect_kind} {receipt.status.value} {receipt.code}".rstrip()
    try:
        if ingress.kind is Kind.INBOX:
            return f"{ingress.type} {codec.unpack(ingress.value)!r}"
        if app is not None and record.type in app.programs:
            return repr(app.programs[record.type].message(ingress))
        stored = codec.unpack(ingress.value[1:])
    except HoldfastError:
        return f"{ingress.type} 0x{ingress.value.hex()}"
    return f"{ingress.type} {stored}"


def _short(text: str) -> str:
    return text if len(text) <= EVENT_CHARS_MAX else text[: EVENT_CHARS_MAX - 1] + "…"


# -- fork and change -----------------------------------------------------------------------------


def _fork(store: Store, args: argparse.Namespace) -> None:
    app = None if args.app is None else load_app(args.app)
    parent = store.read(inventory.resolve, args.world, args.universe)
    made = service.world_fork(
        store,
        parent.universe,
        parent.world_id,
        args.name,
        at=args.at,
        effects=args.effects,
        timers=args.timers,
        app=app,
    )
    assert made.lineage is not None
    text = (
        f"{made.type}/{made.name} starts from {parent.type}/{parent.name} "
        f"after entry {made.lineage.forked_at_height}"
    )
    row, parents = store.read(_told, made.world_id, made.universe)
    emit(args, _document(row) | {"lineage": _lineage(made, parents)}, printable(text))


def _change(store: Store, args: argparse.Namespace) -> None:
    event, _ = CHANGES[args.action]
    record = store.read(inventory.resolve, args.world, args.universe)
    now: WorldRecord = store.transact(catalog.change, record.universe, record.world_id, event)
    text = printable(f"{now.type}/{now.name} is {now.status.value}")
    emit(args, _document(store.read(inventory.look, now)), text)


def _purge(store: Store, args: argparse.Namespace) -> None:
    universe, world_id = store.read(_purgeable, args.world, args.universe)
    left, forks = erasure.world_purge(store, universe, world_id, force=args.force)
    purged = time_text(left.purged_ns)
    backups = f"every backup made before {purged} holds a copy"
    document = {
        "universe": universe,
        "world_id": left.world_id,
        "hash": left.hash.hex(),
        "height": left.height,
        "purged_ns": left.purged_ns,
        "copies": {"forks": forks, "backups": backups},
    }
    pairs: list[tuple[str, object]] = [
        ("purged", left.world_id),
        ("hash", left.hash.hex()),
        ("date", purged),
        ("not erased", "mail that it sent is in the journals of those that got it"),
        ("", backups),
        *(("", f"a copy of its state is in the fork {fork}") for fork in forks),
    ]
    emit(args, document, fields(pairs))


def _purgeable(txn: Txn, name: str, universe: str | None) -> tuple[str, str]:
    """The universe and the id of a world, or of one that is purged already."""
    for where in inventory.universes(txn) if universe is None else [universe]:
        if purge.tombstone(txn, where, name) is not None:
            return where, name
    record = inventory.resolve(txn, name, universe)
    return record.universe, record.world_id


# -- inside --------------------------------------------------------------------------------------


def _document(row: WorldRow) -> dict[str, Any]:
    record, blocker = row.record, row.record.blocked_by
    return {
        "universe": record.universe,
        "world_id": record.world_id,
        "type": record.type,
        "name": record.name,
        "status": record.status.value,
        "height": row.height,
        "floor": row.floor,
        "depth": row.depth,
        "worker": row.worker or None,
        "holder": row.holder or None,
        "created_ns": record.created_ns,
        "blocker": None
        if blocker is None
        else {
            "code": blocker.code,
            "text": blocker.text,
            "height": blocker.height,
            "since_ns": blocker.since_ns,
        },
    }


def _lineage(record: WorldRecord, parents: list[WorldRecord]) -> list[dict[str, Any]]:
    found = []
    for parent in parents:
        assert record.lineage is not None
        found.append(
            {
                "parent_world_id": parent.world_id,
                "parent": f"{parent.type}/{parent.name}",
                "forked_at_height": record.lineage.forked_at_height,
                "parent_snapshot_hash": record.lineage.parent_snapshot_hash.hex(),
            }
        )
        record = parent
    return found
