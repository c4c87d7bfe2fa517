"""`holdfast dead`: what a queue gave up on, why, and another try for it."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli import effects
from holdfast.cli.output import (
    emit,
    fields,
    payload_document,
    payload_text,
    printable,
    table,
    time_text,
)
from holdfast.cli.target import add_options, existing
from holdfast.config import BATCH_MAX
from holdfast.durable import queue
from holdfast.durable.queue import Dead
from holdfast.errors import NotFound
from holdfast.ops.pending import effect_queue
from holdfast.store.api import Store, Txn

LIST_MAX = 100
ERROR_CHARS_MAX = 60
PAYLOAD_CHARS_MAX = 40
PAYLOAD_SHOWN_CHARS_MAX = 4000


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="by seq, oldest first")
    listed.add_argument("queue", metavar="QUEUE")
    listed.add_argument("--after", metavar="SEQ", type=int, default=0, help="begin after this one")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    add_options(listed)

    shown = actions.add_parser("show", help="everything that was kept of one")
    shown.add_argument("queue", metavar="QUEUE")
    shown.add_argument("seq", metavar="SEQ", type=int)
    add_options(shown)

    redriven = actions.add_parser("redrive", help="put them back as new items with fresh counts")
    redriven.add_argument("queue", metavar="QUEUE")
    effects.add_selection(redriven)
    add_options(redriven)


def run(args: argparse.Namespace) -> int:
    with existing(args) as store:
        {"list": _list, "show": _show, "redrive": _redrive}[args.action](store, args)
    return 0


def _list(store: Store, args: argparse.Namespace) -> None:
    letters = store.read(queue.dead, args.queue, args.after, args.limit)
    counts = store.read(queue.counts, args.queue)
    rows = [
        (
            str(letter.seq),
            letter.code,
            letter.failures,
            letter.expiries,
            time_text(letter.died_ns),
            payload_text(letter.payload, PAYLOAD_CHARS_MAX) if not letter.blob else "(large)",
            payload_text(_first_line(letter.error), ERROR_CHARS_MAX),
        )
        for letter in letters
    ]
    header = ("seq", "code", "failures", "expiries", "died", "payload", "error")
    text = f"no dead letters in {args.queue}" if not rows else table(header, rows)
    if rows and counts.dead > len(rows):
        text += f"\n{len(rows)} of {counts.dead:,}; more with --after {letters[-1].seq}"
    emit(
        args,
        {"queue": args.queue, "dead": counts.dead, "letters": [_document(it) for it in letters]},
        text,
    )


def _show(store: Store, args: argparse.Namespace) -> None:
    letter, payload = store.read(_letter, args.queue, args.seq)
    document = _document(letter) | {"payload": payload_document(payload)}
    pairs: list[tuple[str, object]] = [
        ("queue", letter.queue),
        ("seq", str(letter.seq)),
        ("code", letter.code),
        ("failures", f"{letter.failures}, and {letter.expiries} expired of {letter.claims} claims"),
        ("enqueued", time_text(letter.enqueued_ns)),
        ("died", time_text(letter.died_ns)),
        ("last owner", letter.owner or None),
        ("redrive of", letter.redrive_of),
        ("payload", payload_text(payload, PAYLOAD_SHOWN_CHARS_MAX)),
    ]
    error = "\n".join(f"    {printable(line)}" for line in letter.error.splitlines())
    store_option = f" --store {args.store}" if args.store else ""
    again = f"another try: holdfast dead redrive {letter.queue} {letter.seq}{store_option}"
    emit(args, document, f"{fields(pairs)}\nerror\n{error}\n{again}")


def _redrive(store: Store, args: argparse.Namespace) -> None:
    found = effect_queue(args.queue)
    if found is not None:
        # The same item again would end without a receipt: its world has had one.
        made = effects.redrive(store, *found, args)
        text = "\n".join(f"{old} → {new.hex()}" for old, new in made)
        documents = [{"dead": old, "intent": new.hex()} for old, new in made]
        text = text or f"no dead letters in {args.queue}"
        emit(args, {"queue": args.queue, "redriven": documents}, text)
        return
    pairs: list[tuple[int, int]] = []
    if not args.seqs:
        # Only what is dead now: what dies again meanwhile has a higher seq and is left alone.
        last = 0
        waiting = store.read(queue.counts, args.queue).dead
        while waiting > 0 and (
            letters := store.read(queue.dead, args.queue, last, min(waiting, BATCH_MAX))
        ):
            seqs = [letter.seq for letter in letters if args.code in (None, letter.code)]
            pairs += zip(seqs, store.transact(queue.redrive, args.queue, seqs), strict=True)
            last, waiting = letters[-1].seq, waiting - len(letters)
    else:
        pairs += zip(args.seqs, store.transact(queue.redrive, args.queue, args.seqs), strict=True)
    text = "\n".join(f"{old} → {new}" for old, new in pairs) or f"no dead letters in {args.queue}"
    emit(args, {"queue": args.queue, "redriven": [{"dead": a, "item": b} for a, b in pairs]}, text)


def _letter(txn: Txn, name: str, seq: int) -> tuple[Dead, bytes]:
    found = queue.dead(txn, name, seq - 1, 1) if seq > 0 else []
    if not found or found[0].seq != seq:
        raise NotFound(what="dead letter", queue=name, seq=seq)
    return found[0], queue.payload_of(txn, found[0])


def _first_line(text: str) -> bytes:
    return (text.splitlines() or [""])[0].encode()


def _document(letter: Dead) -> dict[str, Any]:
    return {
        "queue": letter.queue,
        "seq": letter.seq,
        "code": letter.code,
        "error": letter.error,
        "failures": letter.failures,
        "expiries": letter.expiries,
        "claims": letter.claims,
        "priority": letter.priority,
        "enqueued_ns": letter.enqueued_ns,
        "died_ns": letter.died_ns,
        "owner": letter.owner,
        "redrive_of": letter.redrive_of,
        "payload": payload_document(letter.payload) if not letter.blob else None,
        "blob": letter.blob.hex() or None,
    }
