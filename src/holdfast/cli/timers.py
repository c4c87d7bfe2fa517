"""`holdfast timers`: what worlds wait for, the next one first; another try for those that died.

A timer dies only of what no waiting mends: it cannot be read, or its delivery fails for good. Put back,
it fires at once, if its key still holds it.
"""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli import EXIT_OK, EXIT_USAGE, effects
from holdfast.cli.effects import add_universe
from holdfast.cli.output import emit, fields, table, time_text
from holdfast.cli.redrive import add_selection, drive, misused, selection_of
from holdfast.cli.target import existing
from holdfast.durable import queue
from holdfast.errors import Invalid, NotFound
from holdfast.ops import pending
from holdfast.ops.pending import TimerRow
from holdfast.store.api import Store
from holdfast.world import timers

LIST_MAX = 100


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="by their time")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    add_universe(listed)

    shown = actions.add_parser("show", help="what a world's key holds")
    shown.add_argument("world", metavar="WORLD", help="Type/name, or an id")
    shown.add_argument("key", metavar="KEY")
    add_universe(shown)

    redriven = actions.add_parser("redrive", help="put dead ones back, to fire at once")
    redriven.add_argument(
        "--calendar", action="store_true", help="of `at` and `every`; else of `after`"
    )
    add_selection(redriven)
    add_universe(redriven)


def run(args: argparse.Namespace) -> int:
    if args.action == "redrive" and misused(args):
        return EXIT_USAGE
    with existing(args) as store:
        if args.action == "redrive":
            return _redrive(store, args)
        {"list": _list, "show": _show}[args.action](store, args)
    return EXIT_OK


def _list(store: Store, args: argparse.Namespace) -> None:
    rows = store.read(pending.timers, args.universe, args.limit)
    several = len({row.universe for row in rows}) > 1
    cells: list[list[Any]] = [
        [
            *[row.universe] * several,
            time_text(row.due_ns),
            row.clock,
            row.world,
            row.timer.key,
            row.timer.type,
            row.timer.cron or None,
        ]
        for row in rows
    ]
    header = ["universe"] * several + ["due", "clock", "world", "key", "event", "every"]
    text = table(header, cells) if rows else "no timers"
    emit(args, {"timers": [_document(row) for row in rows]}, text)


def _show(store: Store, args: argparse.Namespace) -> None:
    row: TimerRow = store.read(pending.timer, args.world, args.key, args.universe)
    document = _document(row)
    shown = {**document, "due": time_text(row.due_ns), "due_ns": None}
    pairs = [(name, value) for name, value in shown.items() if value not in (None, "")]
    emit(args, document, fields(pairs))


def _redrive(store: Store, args: argparse.Namespace) -> int:
    if args.world:
        raise Invalid(what="--world", why="dead timers go by number, code, error or time")
    name = _queue_of(store, args)
    if name is None:
        if args.seqs:
            raise NotFound(what="dead timer", seq=args.seqs[0])
        emit(args, {"queue": None, "redriven": []}, "no dead timers")
        return EXIT_OK
    selection = selection_of(store, args)
    if args.dry_run:
        return effects.would(store, name, args, selection)

    def again(seqs: list[int]) -> list[int]:
        made: list[int] = store.transact(queue.redrive, name, seqs)
        return made

    driven = drive(store, name, args, again, selection=selection)
    documents = [{"dead": old, "item": new} for old, new in driven.made]
    lines = [f"{old} → {new}" for old, new in driven.made]
    return effects.tell(args, name, driven, {"queue": name, "redriven": documents}, lines)


def _queue_of(store: Store, args: argparse.Namespace) -> str | None:
    """The one queue that has dead timers, of the clock that is meant."""
    name_in = timers.calendar if args.calendar else timers.delays
    if args.universe is not None:
        return name_in(args.universe)
    found = [
        name
        for name, counts in store.read(pending.queues)
        if counts.dead and name == name_in(name.partition("/")[0])
    ]
    if len(found) > 1:
        raise Invalid(what="timers", why="dead in several universes: say which", queues=found)
    return found[0] if found else None


def _document(row: TimerRow) -> dict[str, Any]:
    repeats = bool(row.timer.cron)
    return {
        "universe": row.universe,
        "world": row.world,
        "key": row.timer.key,
        "event": row.timer.type,
        "due_ns": row.due_ns,
        "clock": row.clock,
        "intent": row.intent.intent_hash.hex(),
        "cron": row.timer.cron or None,
        "zone": row.timer.zone if repeats else None,
        "missed": row.timer.missed if repeats else None,
    }
