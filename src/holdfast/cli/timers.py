"""`holdfast timers`: lists and shows pending timers of worlds, and redrives dead ones.

A timer dies only of a permanent error: it cannot be decoded, or its delivery is rejected. A redriven timer
fires at once, if its key still refers to it.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from holdfast.cli import EXIT_OK, EXIT_USAGE
from holdfast.cli.dead_letter_selection import (
    add_selection,
    dry_run,
    print_result,
    redrive_selected,
    selection_of,
    usage_error,
)
from holdfast.cli.output import emit, field_lines, table, time_text
from holdfast.cli.store_option import EVERY_UNIVERSE, ONE_UNIVERSE, add_options, open_existing
from holdfast.durable import queue
from holdfast.errors import Invalid, NotFound
from holdfast.ops import pending_documents, pending_work
from holdfast.ops.pending_work import TimerRow
from holdfast.store.api import Store
from holdfast.world import timers

LIST_MAX = 100


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="list pending timers, the next due first")
    listed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N timers (default {LIST_MAX})",
    )
    add_options(listed, universe=EVERY_UNIVERSE)

    shown = actions.add_parser("show", help="show one timer, by its world and its key")
    shown.add_argument("world", metavar="WORLD", help="Type/name or id of the world")
    shown.add_argument("key", metavar="KEY", help="key of the timer")
    add_options(shown, universe=ONE_UNIVERSE)

    redriven = actions.add_parser("redrive", help="retry dead timers; they fire at once")
    redriven.add_argument(
        "--calendar",
        action="store_true",
        help="redrive timers set by `at` and `every` (default: those set by `after`)",
    )
    add_selection(redriven)
    add_options(redriven, universe=ONE_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    if args.action == "redrive" and usage_error(args):
        return EXIT_USAGE
    with open_existing(args) as store:
        if args.action == "redrive":
            return _redrive(store, args)
        {"list": _list, "show": _show}[args.action](store, args)
    return EXIT_OK


def _list(store: Store, args: argparse.Namespace) -> None:
    rows = store.read(pending_work.timers, args.universe, args.limit)
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
    row: TimerRow = store.read(pending_work.timer, args.world, args.key, args.universe)
    document = _document(row)
    shown = {**document, "due": time_text(row.due_ns), "due_ns": None}
    pairs = [(name, value) for name, value in shown.items() if value not in (None, "")]
    emit(args, document, field_lines(pairs))


def _redrive(store: Store, args: argparse.Namespace) -> int:
    if args.world:
        raise Invalid(
            what="--world", why="dead timers are selected by seq, code, error or time only"
        )
    name = _queue_of(store, args)
    if name is None:
        if args.seqs:
            raise NotFound(what="dead timer", seq=args.seqs[0])
        emit(args, {"queue": None, "redriven": []}, "no dead timers")
        return EXIT_OK
    selection = selection_of(store, args)
    if args.dry_run:
        return dry_run(store, name, args, selection)

    def again(seqs: list[int]) -> list[int]:
        made: list[int] = store.transact(queue.redrive, name, seqs)
        return made

    result = redrive_selected(store, name, args, again, selection=selection)
    documents = [{"dead": old, "item": new} for old, new in result.made]
    lines = [f"{old} → {new}" for old, new in result.made]
    return print_result(args, name, result, {"queue": name, "redriven": documents}, lines)


def _queue_of(store: Store, args: argparse.Namespace) -> str | None:
    """Return the timer queue of the universe, or the only one with dead timers, for the chosen clock."""
    queue_name = timers.calendar_queue if args.calendar else timers.delay_queue
    if args.universe is not None:
        return queue_name(args.universe)
    queues = [
        name
        for name, counts in store.read(pending_work.queues)
        if counts.dead and name == queue_name(name.partition("/")[0])
    ]
    if len(queues) > 1:
        raise Invalid(
            what="timers", why="dead in several universes: give --universe", queues=queues
        )
    return queues[0] if queues else None


def _document(row: TimerRow) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(pending_documents.timer_document(row))
    return document
