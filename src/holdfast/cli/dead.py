"""`holdfast dead`: what a queue gave up on, why, another try for it, or the end of it."""

from __future__ import annotations

import argparse
from itertools import chain, islice
from typing import Any

from holdfast import codec
from holdfast.cli import EXIT_OK, EXIT_USAGE, effects
from holdfast.cli.attempts import attempts_document, attempts_text, error_text
from holdfast.cli.output import (
    emit,
    fields,
    payload_document,
    payload_text,
    table,
    time_text,
)
from holdfast.cli.redrive import (
    add_conditions,
    add_selection,
    chosen,
    drive,
    misused,
    selection_of,
)
from holdfast.cli.target import add_options, existing
from holdfast.durable import queue
from holdfast.durable.queue import Dead
from holdfast.errors import HoldfastError, NotFound
from holdfast.messages import Ingress
from holdfast.ops import pending
from holdfast.roles import receipts
from holdfast.store.api import Store, Txn
from holdfast.world import catalog, redrive
from holdfast.world.ingress import user_key

LIST_MAX = 100
ERROR_CHARS_MAX = 60
PAYLOAD_CHARS_MAX = 40
EVENT_CHARS_MAX = 80
PAYLOAD_SHOWN_CHARS_MAX = 4000


# Of a failed event: the name of a field on the screen, and in the document.
_SHOWN = (("event", "type"), ("key", "key"), ("world", "world"), ("inbox seq", "seq"))


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="by seq, oldest first; without QUEUE, which have any")
    listed.add_argument("queue", metavar="QUEUE", nargs="?")
    listed.add_argument("--after", metavar="SEQ", type=int, default=0, help="begin after this one")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    add_conditions(listed)
    add_options(listed, universe=True)

    shown = actions.add_parser("show", help="everything that was kept of one")
    shown.add_argument("queue", metavar="QUEUE")
    shown.add_argument("seq", metavar="SEQ", type=int)
    add_options(shown, universe=True)

    redriven = actions.add_parser("redrive", help="put them back as new items with fresh counts")
    redriven.add_argument("queue", metavar="QUEUE")
    add_selection(redriven)
    add_options(redriven, universe=True)

    dropped = actions.add_parser("drop", help="remove them for good")
    dropped.add_argument("queue", metavar="QUEUE")
    add_selection(dropped)
    add_options(dropped, universe=True)


def run(args: argparse.Namespace) -> int:
    if args.action in ("redrive", "drop") and misused(args):
        return EXIT_USAGE
    with existing(args) as store:
        if args.action == "redrive":
            return _redrive(store, args)
        if args.action == "drop":
            return _drop(store, args)
        if args.action == "show":
            _show(store, args)
        elif args.queue:
            _list(store, args)
        else:
            _queues(store, args)
    return EXIT_OK


def _queues(store: Store, args: argparse.Namespace) -> None:
    found = [(name, counts.dead) for name, counts in store.read(pending.queues) if counts.dead]
    documents = [{"queue": name, "dead": dead} for name, dead in found]
    text = table(("queue", "dead"), found) if found else "no dead letters"
    emit(args, {"queues": documents}, text)


def _list(store: Store, args: argparse.Namespace) -> None:
    counts = store.read(queue.counts, args.queue)
    selection = selection_of(store, args)
    if any(selection):
        pages = chosen(store, args.queue, selection, after=args.after)
        letters = list(islice(chain.from_iterable(pages), args.limit))
    else:
        letters = store.read(queue.dead, args.queue, args.after, args.limit)
    events = store.read(_events, letters)
    rows = [
        (
            str(letter.seq),
            letter.code,
            letter.failures,
            letter.expiries,
            time_text(letter.died_ns),
            _payload(letter, events.get(letter.seq)),
            payload_text(_first_line(letter.error), ERROR_CHARS_MAX),
        )
        for letter in letters
    ]
    header = ("seq", "code", "failures", "expiries", "died", "payload", "error")
    text = f"no dead letters in {args.queue}" if not rows else table(header, rows)
    if rows and (counts.dead > len(rows) if not any(selection) else len(rows) == args.limit):
        text += f"\n{len(rows)} of {counts.dead:,}; more with --after {letters[-1].seq}"
    emit(
        args,
        {
            "queue": args.queue,
            "dead": counts.dead,
            "letters": [_document(it, events.get(it.seq)) for it in letters],
        },
        text,
    )


def _show(store: Store, args: argparse.Namespace) -> None:
    letter, payload = store.read(_letter, args.queue, args.seq)
    event = store.read(_events, [letter]).get(letter.seq)
    document = _document(letter, event) | {
        "payload": payload_document(payload),
        "attempts": attempts_document(letter),
    }
    pairs: list[tuple[str, object]] = [
        ("queue", letter.queue),
        ("seq", str(letter.seq)),
        ("code", letter.code),
        ("failures", f"{letter.failures}, and {letter.expiries} expired of {letter.claims} claims"),
        ("enqueued", time_text(letter.enqueued_ns)),
        ("died", time_text(letter.died_ns)),
        ("last owner", letter.owner or None),
        ("redrive of", letter.redrive_of),
        *([] if event is None else [(what, event[name]) for what, name in _SHOWN]),
        ("payload", payload_text(payload, PAYLOAD_SHOWN_CHARS_MAX)),
    ]
    store_option = f" --store {args.store}" if args.store else ""
    again = f"another try: holdfast dead redrive {letter.queue} {letter.seq}{store_option}"
    again += f"\nfor good: holdfast dead drop {letter.queue} {letter.seq}{store_option}"
    text = fields(pairs) + error_text(letter.error) + attempts_text(letter)
    emit(args, document, f"{text}\n{again}")


def _redrive(store: Store, args: argparse.Namespace) -> int:
    found = pending.effect_queue(args.queue)
    if found is not None:
        # The same item again would end without a receipt: its world has had one.
        return effects.redrive(store, *found, args)
    selection = selection_of(store, args)
    if args.dry_run:
        return effects.would(store, args.queue, args, selection)

    def again(seqs: list[int]) -> list[int]:
        made: list[int] = store.transact(queue.redrive, args.queue, seqs)
        return made

    driven = drive(store, args.queue, args, again, selection=selection)
    documents = [{"dead": old, "item": new} for old, new in driven.made]
    lines = [f"{old} → {new}" for old, new in driven.made]
    document = {"queue": args.queue, "redriven": documents}
    return effects.tell(args, args.queue, driven, document, lines)


def _drop(store: Store, args: argparse.Namespace) -> int:
    selection = selection_of(store, args)
    if args.dry_run:
        return effects.would(store, args.queue, args, selection, key="would_drop", done="dropped")

    def drop(seqs: list[int]) -> list[int]:
        gone: list[int] = store.transact(receipts.drop_dead, args.queue, seqs)
        return gone

    driven = drive(store, args.queue, args, drop, selection=selection, done="dropped")
    gone = [seq for seq, _ in driven.made]
    lines = [f"{seq} is gone" for seq in gone]
    return effects.tell(args, args.queue, driven, {"queue": args.queue, "dropped": gone}, lines)


def _letter(txn: Txn, name: str, seq: int) -> tuple[Dead, bytes]:
    found = queue.dead(txn, name, seq - 1, 1) if seq > 0 else []
    if not found or found[0].seq != seq:
        raise NotFound(what="dead letter", queue=name, seq=seq)
    return found[0], queue.payload_of(txn, found[0])


def _first_line(text: str) -> bytes:
    return (text.splitlines() or [""])[0].encode()


def _events(txn: Txn, letters: list[Dead]) -> dict[int, dict[str, Any]]:
    """The failed events of worlds among dead letters, by seq, as an operator knows them."""
    found: dict[int, dict[str, Any]] = {}
    for letter in letters:
        universe = redrive.universe_of(letter.queue)
        if universe is None:
            return found
        try:
            event = codec.unpack_as(redrive.Letter, queue.payload_of(txn, letter))
            ingress = codec.unpack_as(Ingress, event.ingress)
        except HoldfastError:
            continue
        try:
            record = catalog.record(txn, universe, event.world_id)
            world = f"{record.type}/{record.name}"
        except NotFound:
            world = None
        found[letter.seq] = {
            "kind": ingress.kind.value,
            "type": ingress.type,
            "key": event.key.removeprefix(user_key("") or "") or None,
            "seq": event.seq,
            "world_id": event.world_id,
            "world": world,
        }
    return found


def _payload(letter: Dead, event: dict[str, Any] | None) -> str:
    if event is None:
        return payload_text(letter.payload, PAYLOAD_CHARS_MAX) if not letter.blob else "(large)"
    key = "" if event["key"] is None else f" key={event['key']}"
    text = f"{event['type']}{key} of {event['world'] or event['world_id']}"
    return payload_text(text.encode(), EVENT_CHARS_MAX)


def _document(letter: Dead, event: dict[str, Any] | None) -> dict[str, Any]:
    of_world = {} if event is None else {"event": event}
    return of_world | {
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
