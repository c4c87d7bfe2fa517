"""`holdfast dead`: lists, shows, redrives and drops the dead letters of a queue."""

from __future__ import annotations

import argparse
from itertools import chain, islice
from typing import Any

from holdfast import codec
from holdfast.cli import EXIT_OK, EXIT_USAGE, effects
from holdfast.cli.attempts import attempts_document, attempts_text, error_text
from holdfast.cli.dead_letter_selection import (
    add_conditions,
    add_selection,
    dry_run,
    print_result,
    redrive_selected,
    selected_letters,
    selection_of,
    usage_error,
)
from holdfast.cli.output import emit, field_lines, payload_document, payload_text, table, time_text
from holdfast.cli.store_option import add_options, open_existing
from holdfast.durable import queue
from holdfast.durable.queue import DeadLetter
from holdfast.errors import HoldfastError, NotFound
from holdfast.flows import compensation_dead_letters, compensation_redrive
from holdfast.messages import Ingress
from holdfast.ops import pending_work
from holdfast.store.api import Store, Txn
from holdfast.workers.effects import receipts
from holdfast.world import catalog, redrive
from holdfast.world.ingress import user_key

LIST_MAX = 100
ERROR_CHARS_MAX = 60
PAYLOAD_CHARS_MAX = 40
EVENT_CHARS_MAX = 80
PAYLOAD_SHOWN_CHARS_MAX = 4000


# The fields of a failed event: the name in the text output, and in the JSON document.
_EVENT_FIELDS = (("event", "type"), ("key", "key"), ("world", "world"), ("inbox seq", "seq"))


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser(
        "list", help="list the queues with dead letters, or the dead letters of one queue"
    )
    listed.add_argument(
        "queue",
        metavar="QUEUE",
        nargs="?",
        help="list the dead letters of this queue by seq; omit to list queues",
    )
    listed.add_argument(
        "--after", metavar="SEQ", type=int, default=0, help="list only dead letters after SEQ"
    )
    listed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N dead letters (default {LIST_MAX})",
    )
    add_conditions(listed)
    add_options(listed, universe=True)

    shown = actions.add_parser("show", help="show one dead letter with its payload and attempts")
    shown.add_argument("queue", metavar="QUEUE", help="name of the queue")
    shown.add_argument("seq", metavar="SEQ", type=int, help="seq of the dead letter")
    add_options(shown, universe=True)

    redriven = actions.add_parser(
        "redrive", help="retry dead letters as new items with reset attempt counts"
    )
    redriven.add_argument("queue", metavar="QUEUE", help="name of the queue")
    add_selection(redriven)
    add_options(redriven, universe=True)

    dropped = actions.add_parser("drop", help="delete dead letters permanently")
    dropped.add_argument("queue", metavar="QUEUE", help="name of the queue")
    add_selection(dropped)
    add_options(dropped, universe=True)


def run(args: argparse.Namespace) -> int:
    if args.action in ("redrive", "drop") and usage_error(args):
        return EXIT_USAGE
    with open_existing(args) as store:
        if args.action == "redrive":
            return _redrive(store, args)
        if args.action == "drop":
            return _drop(store, args)
        if args.action == "show":
            _show(store, args)
        elif args.queue:
            _list(store, args)
        else:
            _list_queues(store, args)
    return EXIT_OK


def _list_queues(store: Store, args: argparse.Namespace) -> None:
    dead_by_queue = [
        (name, counts.dead) for name, counts in store.read(pending_work.queues) if counts.dead
    ]
    documents = [{"queue": name, "dead": dead} for name, dead in dead_by_queue]
    text = table(("queue", "dead"), dead_by_queue) if dead_by_queue else "no dead letters"
    emit(args, {"queues": documents}, text)


def _list(store: Store, args: argparse.Namespace) -> None:
    counts = store.read(queue.counts, args.queue)
    selection = selection_of(store, args)
    if any(selection):
        pages = selected_letters(store, args.queue, selection, after=args.after)
        letters = list(islice(chain.from_iterable(pages), args.limit))
    else:
        letters = store.read(queue.list_dead, args.queue, args.after, args.limit)
    events = store.read(_failed_events, letters)
    rows = [
        (
            str(letter.seq),
            letter.code,
            letter.failures,
            letter.expiries,
            time_text(letter.died_ns),
            _payload_cell(letter, events.get(letter.seq)),
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
            "letters": [
                _document(dead_letter, events.get(dead_letter.seq)) for dead_letter in letters
            ],
        },
        text,
    )


def _show(store: Store, args: argparse.Namespace) -> None:
    letter, payload = store.read(_find_letter, args.queue, args.seq)
    event = store.read(_failed_events, [letter]).get(letter.seq)
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
        *([] if event is None else [(what, event[name]) for what, name in _EVENT_FIELDS]),
        ("payload", payload_text(payload, PAYLOAD_SHOWN_CHARS_MAX)),
    ]
    store_option = f" --store {args.store}" if args.store else ""
    commands = f"retry it: holdfast dead redrive {letter.queue} {letter.seq}{store_option}"
    commands += f"\ndelete it: holdfast dead drop {letter.queue} {letter.seq}{store_option}"
    text = field_lines(pairs) + error_text(letter.error) + attempts_text(letter)
    emit(args, document, f"{text}\n{commands}")


def _redrive(store: Store, args: argparse.Namespace) -> int:
    effect_queue = pending_work.effect_queue(args.queue)
    if effect_queue is not None:
        # Requeueing the same item would end without a receipt, because its world already has one.
        return effects.redrive(store, *effect_queue, args)
    selection = selection_of(store, args)
    if args.dry_run:
        return dry_run(store, args.queue, args, selection)
    universe = compensation_dead_letters.universe_of(args.queue)

    def again(seqs: list[int]) -> list[Any]:
        if universe is not None:
            flows: list[str] = store.transact(
                compensation_redrive.redrive_compensations, universe, seqs
            )
            return flows
        made: list[int] = store.transact(queue.redrive, args.queue, seqs)
        return made

    result = redrive_selected(store, args.queue, args, again, selection=selection)
    made = "item" if universe is None else "flow"
    documents = [{"dead": old, made: new} for old, new in result.made]
    lines = [f"{old} → {new}" for old, new in result.made]
    document = {"queue": args.queue, "redriven": documents}
    return print_result(args, args.queue, result, document, lines)


def _drop(store: Store, args: argparse.Namespace) -> int:
    selection = selection_of(store, args)
    if args.dry_run:
        return dry_run(store, args.queue, args, selection, key="would_drop", verb="dropped")

    def drop(seqs: list[int]) -> list[int]:
        dropped: list[int] = store.transact(receipts.delete_dead_letters, args.queue, seqs)
        return dropped

    result = redrive_selected(store, args.queue, args, drop, selection=selection, verb="dropped")
    dropped = [seq for seq, _ in result.made]
    lines = [f"{seq} dropped" for seq in dropped]
    return print_result(args, args.queue, result, {"queue": args.queue, "dropped": dropped}, lines)


def _find_letter(txn: Txn, name: str, seq: int) -> tuple[DeadLetter, bytes]:
    letters = queue.list_dead(txn, name, seq - 1, 1) if seq > 0 else []
    if not letters or letters[0].seq != seq:
        raise NotFound(what="dead letter", queue=name, seq=seq)
    return letters[0], queue.payload_of(txn, letters[0])


def _first_line(text: str) -> bytes:
    return (text.splitlines() or [""])[0].encode()


def _failed_events(txn: Txn, letters: list[DeadLetter]) -> dict[int, dict[str, Any]]:
    """Return the failed world events among dead letters, by seq, in readable form."""
    events: dict[int, dict[str, Any]] = {}
    for letter in letters:
        universe = redrive.universe_of(letter.queue)
        if universe is None:
            return events
        try:
            event = codec.unpack_as(redrive.FailedEventRow, queue.payload_of(txn, letter))
            ingress = codec.unpack_as(Ingress, event.ingress)
        except HoldfastError:
            continue
        try:
            record = catalog.get_record(txn, universe, event.world_id)
            world = f"{record.type}/{record.name}"
        except NotFound:
            world = None
        events[letter.seq] = {
            "kind": ingress.kind.value,
            "type": ingress.type,
            "key": event.key.removeprefix(user_key("") or "") or None,
            "seq": event.seq,
            "world_id": event.world_id,
            "world": world,
        }
    return events


def _payload_cell(letter: DeadLetter, event: dict[str, Any] | None) -> str:
    if event is None:
        return payload_text(letter.payload, PAYLOAD_CHARS_MAX) if not letter.blob else "(large)"
    key = "" if event["key"] is None else f" key={event['key']}"
    text = f"{event['type']}{key} of {event['world'] or event['world_id']}"
    return payload_text(text.encode(), EVENT_CHARS_MAX)


def _document(letter: DeadLetter, event: dict[str, Any] | None) -> dict[str, Any]:
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
