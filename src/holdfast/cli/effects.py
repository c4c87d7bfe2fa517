"""`holdfast effects`: what worlds want from outside, where an intent is, another try for the dead."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from holdfast.cli.attempts import attempts_document, attempts_text, error_text
from holdfast.cli.output import emit, fields, table, time_text
from holdfast.cli.redrive import (
    Driven,
    Selection,
    add_selection,
    chosen,
    drive,
    misused,
    selection_of,
)
from holdfast.cli.target import add_options, existing
from holdfast.errors import Invalid, NotFound
from holdfast.ops import pending
from holdfast.ops.pending import EffectRow, IntentRow
from holdfast.roles import receipts
from holdfast.store.api import Store
from holdfast.world import publish

LIST_MAX = 100
# Of an error in a list: its first line, and so much of it.
WHY_CHARS_MAX = 200
_TIMES = {"ready": "wanted", "delayed": "not before", "claimed": "claim ends", "dead": "died"}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser(
        "list",
        help="how many wait, are being done, are dead, by kind; of a KIND, what waits and why",
    )
    listed.add_argument("kind", metavar="KIND", nargs="?", help="this kind only")
    listed.add_argument(
        "--state", choices=pending.STATES, help="the intents of KIND that are in this state"
    )
    listed.add_argument("--after", metavar="SEQ", type=int, default=0, help="dead ones after this")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    add_universe(listed)

    shown = actions.add_parser("show", help="where one intent is, and each attempt at it")
    shown.add_argument("intent", metavar="INTENT", help="its hash, in hexadecimal")
    add_universe(shown)

    again = actions.add_parser("redrive", help="want dead effects again, each as a new intent")
    again.add_argument("kind", metavar="KIND")
    add_selection(again)
    add_universe(again)


def add_universe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--universe", metavar="U", help="where the store holds several")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.action == "redrive" and misused(args):
        return EXIT_USAGE
    with existing(args) as store:
        return {"list": _list, "show": _show, "redrive": _redrive}[args.action](store, args)


def redrive(store: Store, universe: str, kind: str, args: argparse.Namespace) -> int:
    """Dead effects again, each as a new intent: its world has had a receipt for the old one."""
    name = publish.effects(universe, kind)
    selection = selection_of(store, args, universe)
    if args.dry_run:
        return would(store, name, args, selection)

    def again(seqs: list[int]) -> list[bytes]:
        made: list[bytes] = store.transact(receipts.redrive_effects, universe, kind, seqs)
        return made

    driven = drive(store, name, args, again, selection=selection)
    documents = [{"dead": old, "intent": new.hex()} for old, new in driven.made]
    lines = [f"{old} → {new.hex()}" for old, new in driven.made]
    return tell(args, name, driven, {"kind": kind, "redriven": documents}, lines)


def would(
    store: Store,
    name: str,
    args: argparse.Namespace,
    selection: Selection,
    *,
    key: str = "would_redrive",
    done: str = "redriven",
) -> int:
    """Say what a redrive would take, and take nothing."""
    seqs = list(args.seqs)
    if not seqs:
        pages = chosen(store, name, selection)
        seqs = [letter.seq for page in pages for letter in page][: args.limit]
    text = "\n".join([*map(str, seqs), f"{len(seqs):,} would be {done}, and nothing was"])
    emit(args, {"queue": name, key: seqs}, text)
    return EXIT_OK


def tell(
    args: argparse.Namespace,
    name: str,
    driven: Driven[Any],
    document: dict[str, Any],
    lines: list[str],
) -> int:
    """What was redriven, what was not, and whether somebody put an end to it."""
    lines += [f"{seq} stays dead: {why}" for seq, why in driven.refused]
    if driven.stopped:
        lines.append("stopped: what is not listed is still dead, and the same command goes on")
    document |= {
        "refused": [{"dead": seq, "why": why} for seq, why in driven.refused],
        "stopped": driven.stopped,
    }
    emit(args, document, "\n".join(lines) or f"no dead letters in {name}")
    return EXIT_INTERRUPTED if driven.stopped else EXIT_OK


# -- inside --------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> int:
    if args.state:
        return _intents(store, args)
    rows = store.read(pending.kinds, args.universe, args.kind, True)
    several = len({row.universe for row in rows}) > 1
    names = ("ready", "delayed", "claimed", "dead", "done")
    cells = [
        [row.universe] * several + [row.kind, *(getattr(row.counts, name) for name in names)]
        for row in rows
    ]
    documents = [
        {"universe": row.universe, "kind": row.kind}
        | {name: getattr(row.counts, name) for name in names}
        for row in rows
    ]
    text = table(["universe"] * several + ["kind", *names], cells) if rows else "no effects"
    document: dict[str, Any] = {"effects": documents}
    if args.kind:
        waiting = [
            one
            for row in rows
            if row.counts.delayed
            for one in store.read(pending.intents, row.universe, row.kind, "delayed", 0, args.limit)
        ][: args.limit]
        document["waiting"] = [_waiting(row) for row in waiting]
        text += _waiting_text(waiting)
    emit(args, document, text)
    return EXIT_OK


def _waiting(row: IntentRow) -> dict[str, Any]:
    return {
        "intent": row.intent.intent_hash.hex(),
        "world": row.world,
        "not_before_ns": row.time_ns,
        "attempts": row.attempts,
        "code": row.code or None,
        "error": row.error or None,
    }


def _waiting_text(rows: list[IntentRow]) -> str:
    """What is tried again later, the next one first, and why it was not done yet."""
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


def _intents(store: Store, args: argparse.Namespace) -> int:
    if not args.kind:
        raise Invalid(what="--state", why="say which kind: holdfast effects list KIND --state …")
    universe = _universe_of(store, args)
    rows: list[IntentRow] = store.read(
        pending.intents, universe, args.kind, args.state, args.after, args.limit
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
    documents = [
        {
            "seq": row.seq,
            "intent": row.intent.intent_hash.hex(),
            "world": row.world,
            "tag": row.intent.tag,
            "time_ns": row.time_ns,
            "attempts": row.attempts,
            "owner": row.owner or None,
            "code": row.code or None,
        }
        for row in rows
    ]
    text = table(header, cells) if rows else f"no {args.kind} is {args.state}"
    emit(args, {"kind": args.kind, "state": args.state, "intents": documents}, text)
    return EXIT_OK


def _show(store: Store, args: argparse.Namespace) -> int:
    row: EffectRow = store.read(pending.effect, args.intent, args.universe)
    known, item, letter, intent = row.wanted, row.item, row.letter, row.intent
    held = item or letter
    document: dict[str, Any] = {
        "universe": row.universe,
        "intent": row.intent_hash.hex(),
        "kind": known.effect_kind,
        "world": row.world,
        "state": row.state,
        "seq": known.seq,
        "tag": known.tag,
        "failures": held.failures if held else None,
        "expiries": held.expiries if held else None,
        "owner": (held.owner if held else "") or None,
        "not_before_ns": item.not_before_ns if item else None,
        "code": (held.code if held else "") or None,
        "error": (held.error if held else "") or None,
        "redrive_of": intent.redrive_of.hex() if intent and intent.redrive_of else None,
        "attempts": attempts_document(held),
    }
    shown = {**document, "seq": str(known.seq)}
    for name in ("not_before_ns", "attempts", "error"):
        del shown[name]
    if item and item.not_before_ns:
        shown["not before"] = time_text(item.not_before_ns)
    pairs = [(name, value) for name, value in shown.items() if value not in (None, "")]
    emit(args, document, fields(pairs) + error_text(document["error"]) + attempts_text(held))
    return EXIT_OK


def _redrive(store: Store, args: argparse.Namespace) -> int:
    return redrive(store, _universe_of(store, args), args.kind, args)


def _universe_of(store: Store, args: argparse.Namespace) -> str:
    """The one universe that has effects of this kind."""
    rows = store.read(pending.kinds, args.universe, args.kind)
    if not rows:
        raise NotFound(what="effect", kind=args.kind)
    if len(rows) > 1:
        where = [row.universe for row in rows]
        raise Invalid(what="effect", why="in several universes: say which", universes=where)
    return rows[0].universe
