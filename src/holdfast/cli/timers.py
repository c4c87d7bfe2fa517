"""`holdfast timers`: what worlds wait for, the next one first."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli.effects import add_universe
from holdfast.cli.output import emit, fields, table, time_text
from holdfast.cli.target import existing
from holdfast.ops import pending
from holdfast.ops.pending import TimerRow
from holdfast.store.api import Store

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


def run(args: argparse.Namespace) -> int:
    with existing(args) as store:
        {"list": _list, "show": _show}[args.action](store, args)
    return 0


def _list(store: Store, args: argparse.Namespace) -> None:
    rows = store.read(pending.timers, args.universe, args.limit)
    several = len({row.universe for row in rows}) > 1
    cells: list[list[Any]] = [
        [
            *[row.universe] * several,
            time_text(row.due_ns),
            row.world,
            row.timer.key,
            row.timer.type,
            row.timer.cron or None,
        ]
        for row in rows
    ]
    header = ["universe"] * several + ["due", "world", "key", "event", "every"]
    text = table(header, cells) if rows else "no timers"
    emit(args, {"timers": [_document(row) for row in rows]}, text)


def _show(store: Store, args: argparse.Namespace) -> None:
    row: TimerRow = store.read(pending.timer, args.world, args.key, args.universe)
    document = _document(row)
    shown = {**document, "due": time_text(row.due_ns), "due_ns": None}
    pairs = [(name, value) for name, value in shown.items() if value not in (None, "")]
    emit(args, document, fields(pairs))


def _document(row: TimerRow) -> dict[str, Any]:
    repeats = bool(row.timer.cron)
    return {
        "universe": row.universe,
        "world": row.world,
        "key": row.timer.key,
        "event": row.timer.type,
        "due_ns": row.due_ns,
        "intent": row.intent.intent_hash.hex(),
        "cron": row.timer.cron or None,
        "zone": row.timer.zone if repeats else None,
        "missed": row.timer.missed if repeats else None,
    }
