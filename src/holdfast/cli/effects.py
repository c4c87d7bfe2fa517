"""`holdfast effects`: what worlds want from outside, where an intent is, another try for the dead."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.cli.output import emit, fields, table, time_text
from holdfast.cli.target import add_options, existing
from holdfast.clock import SYSTEM, Clock
from holdfast.config import BATCH_MAX
from holdfast.durable import queue
from holdfast.errors import Invalid, NotFound
from holdfast.ops import pending
from holdfast.ops.pending import EffectRow
from holdfast.roles import receipts
from holdfast.store.api import Store
from holdfast.world import publish

RATE_PER_S = 100.0


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="how many wait, are being done, are dead, by kind")
    listed.add_argument("kind", metavar="KIND", nargs="?", help="this kind only")
    add_universe(listed)

    shown = actions.add_parser("show", help="where one intent is")
    shown.add_argument("intent", metavar="INTENT", help="its hash, in hexadecimal")
    add_universe(shown)

    again = actions.add_parser("redrive", help="want dead effects again, each as a new intent")
    again.add_argument("kind", metavar="KIND")
    add_selection(again)
    add_universe(again)


def add_universe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--universe", metavar="U", help="where the store holds several")
    add_options(parser)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Which dead letters, and how fast."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("seqs", metavar="SEQ", type=int, nargs="*", default=[])
    which.add_argument("--all", action="store_true", help="all that are dead now")
    which.add_argument("--code", metavar="CODE", help="those that died of this, of all dead now")
    parser.add_argument(
        "--rate", metavar="N", type=float, default=RATE_PER_S, help=f"a second ({RATE_PER_S:g})"
    )


def run(args: argparse.Namespace) -> int:
    with existing(args) as store:
        {"list": _list, "show": _show, "redrive": _redrive}[args.action](store, args)
    return 0


def redrive(
    store: Store,
    universe: str,
    kind: str,
    args: argparse.Namespace,
    clock: Clock = SYSTEM,
) -> list[tuple[int, bytes]]:
    """Dead effects and the intents in their place. No more a second than `--rate`."""
    if not 0 < args.rate <= BATCH_MAX:
        raise Invalid(what="--rate", found=args.rate, min=0, max=BATCH_MAX)
    made: list[tuple[int, bytes]] = []
    # So many to a commit that a commit a second keeps the rate.
    batch = max(1, int(args.rate))
    for seqs in _batches(store, publish.effects(universe, kind), args, batch):
        if made:
            clock.sleep(len(seqs) / args.rate)
        new: list[bytes] = store.transact(receipts.redrive_effects, universe, kind, seqs)
        made += zip(seqs, new, strict=True)
    return made


# -- inside --------------------------------------------------------------------------------------


def _batches(store: Store, name: str, args: argparse.Namespace, batch: int) -> Iterator[list[int]]:
    """Numbers of the letters that are meant, of those that are dead now."""
    if args.seqs:
        for start in range(0, len(args.seqs), batch):
            yield args.seqs[start : start + batch]
        return
    # What dies again meanwhile has a higher number and is left alone.
    waiting, last = store.read(queue.counts, name).dead, 0
    while waiting > 0 and (letters := store.read(queue.dead, name, last, min(waiting, batch))):
        last, waiting = letters[-1].seq, waiting - len(letters)
        seqs = [letter.seq for letter in letters if args.code in (None, letter.code)]
        if seqs:
            yield seqs


def _list(store: Store, args: argparse.Namespace) -> None:
    rows = store.read(pending.kinds, args.universe, args.kind)
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
    emit(args, {"effects": documents}, text)


def _show(store: Store, args: argparse.Namespace) -> None:
    row: EffectRow = store.read(pending.effect, args.intent, args.universe)
    known, item, letter = row.dispatched, row.item, row.letter
    held = item or letter
    document = {
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
    }
    shown = {**document, "not_before_ns": None, "seq": str(known.seq)}
    if item and item.not_before_ns:
        shown["not before"] = time_text(item.not_before_ns)
    pairs = [(name, value) for name, value in shown.items() if value not in (None, "")]
    emit(args, document, fields(pairs))


def _redrive(store: Store, args: argparse.Namespace) -> None:
    rows = store.read(pending.kinds, args.universe, args.kind)
    if not rows:
        raise NotFound(what="effect", kind=args.kind)
    if len(rows) > 1:
        where = [row.universe for row in rows]
        raise Invalid(what="effect", why="in several universes: say which", universes=where)
    made = redrive(store, rows[0].universe, args.kind, args)
    text = "\n".join(f"{old} → {new.hex()}" for old, new in made) or f"no dead {args.kind}"
    documents = [{"dead": old, "intent": new.hex()} for old, new in made]
    emit(args, {"kind": args.kind, "redriven": documents}, text)
