"""`holdfast effects`: lists and shows the effects of worlds, and redrives dead ones."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from holdfast.cli import EXIT_OK, EXIT_USAGE
from holdfast.cli.attempts import attempts_text, error_text
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
from holdfast.errors import Invalid, NotFound
from holdfast.ops import pending_documents, pending_work
from holdfast.ops.api import cursors
from holdfast.ops.pending_work import EffectRow, IntentRow
from holdfast.store.api import Store
from holdfast.workers.effects import receipts
from holdfast.world import intents

LIST_MAX = 100
# A list shows at most this many characters of the first line of an error.
WHY_CHARS_MAX = 200
_TIMES = {"ready": "wanted", "delayed": "not before", "claimed": "claim ends", "dead": "died"}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser(
        "list",
        help="count effects by kind and state; with KIND, also list delayed intents and why they wait",
    )
    listed.add_argument("kind", metavar="KIND", nargs="?", help="only effects of this kind")
    listed.add_argument(
        "--state",
        type=str.lower,
        choices=pending_work.STATES,
        help="list the intents of KIND, or of --tag, in this state",
    )
    listed.add_argument("--tag", metavar="TAG", help="list the intents with this tag")
    listed.add_argument(
        "--cursor",
        metavar="C",
        default="",
        help="continue a list by tag from the cursor it printed",
    )
    listed.add_argument(
        "--after", metavar="SEQ", type=int, default=0, help="list only dead intents after SEQ"
    )
    listed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N intents (default {LIST_MAX})",
    )
    add_options(listed, universe=EVERY_UNIVERSE)

    shown = actions.add_parser("show", help="show the state of one intent and its attempts")
    shown.add_argument("intent", metavar="INTENT", help="intent hash in hexadecimal")
    add_options(shown, universe=ONE_UNIVERSE)

    again = actions.add_parser(
        "redrive", help="retry dead effects; each becomes a new intent linked to the old one"
    )
    again.add_argument("kind", metavar="KIND", help="effect kind")
    add_selection(again)
    add_options(again, universe=ONE_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    if args.action == "redrive" and usage_error(args):
        return EXIT_USAGE
    with open_existing(args) as store:
        return {"list": _list, "show": _show, "redrive": _redrive}[args.action](store, args)


def redrive(store: Store, universe: str, kind: str, args: argparse.Namespace) -> int:
    """Redrive dead effects. Each becomes a new intent, because its world already has a receipt for the old
    one."""
    name = intents.effect_queue(universe, kind)
    selection = selection_of(store, args, universe)
    if args.dry_run:
        return dry_run(store, name, args, selection)

    def again(seqs: list[int]) -> list[bytes]:
        made: list[bytes] = store.transact(receipts.redrive_effects, universe, kind, seqs)
        return made

    result = redrive_selected(store, name, args, again, selection=selection)
    documents = [{"dead": old, "intent": new.hex()} for old, new in result.made]
    lines = [f"{old} → {new.hex()}" for old, new in result.made]
    return print_result(args, name, result, {"kind": kind, "redriven": documents}, lines)


# -- inside --------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> int:
    if args.tag:
        return _list_tagged(store, args)
    if args.state:
        return _list_intents(store, args)
    rows = store.read(pending_work.kinds, args.universe, args.kind, True)
    several = len({row.universe for row in rows}) > 1
    names = ("ready", "delayed", "claimed", "dead", "done")
    cells = [
        [row.universe] * several + [row.kind, *(getattr(row.counts, name) for name in names)]
        for row in rows
    ]
    documents = msgspec.to_builtins([pending_documents.kind_document(row) for row in rows])
    text = table(["universe"] * several + ["kind", *names], cells) if rows else "no effects"
    document: dict[str, Any] = {"effects": documents}
    if args.kind:
        waiting = [
            intent_row
            for row in rows
            if row.counts.delayed
            for intent_row in store.read(
                pending_work.intents_in_state, row.universe, row.kind, "delayed", 0, args.limit
            )
        ][: args.limit]
        document["waiting"] = [_waiting_document(row) for row in waiting]
        text += _waiting_text(waiting)
    emit(args, document, text)
    return EXIT_OK


def _waiting_document(row: IntentRow) -> dict[str, Any]:
    return {
        "intent": row.intent.intent_hash.hex(),
        "world": row.world,
        "not_before_ns": row.time_ns,
        "attempts": row.attempts,
        "code": row.code or None,
        "error": row.error or None,
    }


def _waiting_text(rows: list[IntentRow]) -> str:
    """Format the delayed intents as a table, the next due first, with the reason of the delay."""
    if not rows:
        return ""
    cells = [
        (
            row.intent.intent_hash.hex(),
            row.world,
            time_text(row.time_ns),
            row.attempts,
            (row.error or row.code).partition("\n")[0][:WHY_CHARS_MAX] or None,
        )
        for row in rows
    ]
    return "\n\n" + table(("intent", "world", "not before", "attempts", "why"), cells)


def _list_intents(store: Store, args: argparse.Namespace) -> int:
    if not args.kind:
        raise Invalid(what="--state", why="needs a kind: holdfast effects list KIND --state …")
    universe = _universe_of(store, args)
    rows: list[IntentRow] = store.read(
        pending_work.intents_in_state, universe, args.kind, args.state, args.after, args.limit
    )
    cells = [
        (
            row.intent.intent_hash.hex(),
            row.world,
            row.intent.tag or None,
            time_text(row.time_ns),
            row.attempts,
            row.owner or None,
            row.code or None,
        )
        for row in rows
    ]
    header = ("intent", "world", "tag", _TIMES[args.state], "attempts", "by", "code")
    documents = msgspec.to_builtins([pending_documents.intent_document(row) for row in rows])
    text = table(header, cells) if rows else f"no {args.kind} is {args.state}"
    emit(args, {"kind": args.kind, "state": args.state, "intents": documents}, text)
    return EXIT_OK


def _list_tagged(store: Store, args: argparse.Namespace) -> int:
    if args.kind:
        raise Invalid(what="KIND", why="a list by tag holds all kinds: leave it out")
    universe = _universe_of(store, args)
    position = cursors.decode(args.cursor, bytes) or b""
    rows, last = store.read(
        pending_work.tagged_page, universe, args.tag, args.state or "", position, args.limit
    )
    cells = [
        (
            row.intent.intent_hash.hex(),
            row.intent.effect_kind,
            row.world,
            row.state,
            time_text(row.time_ns) if row.time_ns else None,
            row.attempts,
            row.code or None,
        )
        for row in rows
    ]
    header = ("intent", "kind", "world", "state", "time", "attempts", "code")
    cursor = cursors.encode(last) if last else None
    documents = msgspec.to_builtins([pending_documents.intent_document(row) for row in rows])
    text = table(header, cells) if rows else "no such effects"
    if cursor:
        text += f"\n\nthere may be more: --cursor {cursor}"
    emit(args, {"tag": args.tag, "intents": documents, "cursor": cursor}, text)
    return EXIT_OK


def _show(store: Store, args: argparse.Namespace) -> int:
    row: EffectRow = store.read(pending_work.effect, args.intent, args.universe)
    pending_effect, item = row.pending_effect, row.item
    item_or_letter = item or row.letter
    document: dict[str, Any] = msgspec.to_builtins(pending_documents.effect_document(row))
    shown = {**document, "seq": str(pending_effect.seq)}
    for name in ("not_before_ns", "attempts", "error"):
        del shown[name]
    if item and item.not_before_ns:
        shown["not before"] = time_text(item.not_before_ns)
    pairs = [(name, value) for name, value in shown.items() if value not in (None, "")]
    emit(
        args,
        document,
        field_lines(pairs) + error_text(document["error"]) + attempts_text(item_or_letter),
    )
    return EXIT_OK


def _redrive(store: Store, args: argparse.Namespace) -> int:
    return redrive(store, _universe_of(store, args), args.kind, args)


def _universe_of(store: Store, args: argparse.Namespace) -> str:
    """Return the only universe that has effects of this kind, or of any kind."""
    rows = store.read(pending_work.kinds, args.universe, args.kind)
    universes = sorted({row.universe for row in rows})
    if not universes:
        raise NotFound(what="effect", kind=args.kind or "of any kind")
    if len(universes) > 1:
        raise Invalid(
            what="effect", why="in several universes: give --universe", universes=universes
        )
    return universes[0]
