"""`holdfast dead`: lists, shows, redrives and drops the dead letters of a queue."""

from __future__ import annotations

import argparse
from itertools import chain, islice
from typing import Any

import msgspec

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
from holdfast.cli.output import emit, field_lines, payload_text, table, time_text
from holdfast.cli.store_option import UNIVERSE_OF_STORE, add_options, open_existing
from holdfast.durable import queue
from holdfast.durable.queue import DeadLetter
from holdfast.ops import audit, dead_letter_documents, pending_work
from holdfast.ops.dead_letter_documents import FailedEventDocument
from holdfast.store.api import Deferred, Store, Txn
from holdfast.workers.effects import receipts

LIST_MAX = 100
# The actor of audit entries of this command.
ACTOR = "command line"
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
    add_options(listed, universe=UNIVERSE_OF_STORE)

    shown = actions.add_parser("show", help="show one dead letter with its payload and attempts")
    shown.add_argument("queue", metavar="QUEUE", help="name of the queue")
    shown.add_argument("seq", metavar="SEQ", type=int, help="seq of the dead letter")
    add_options(shown, universe=UNIVERSE_OF_STORE)

    redriven = actions.add_parser(
        "redrive", help="retry dead letters as new items with reset attempt counts"
    )
    redriven.add_argument("queue", metavar="QUEUE", help="name of the queue")
    add_selection(redriven)
    add_options(redriven, universe=UNIVERSE_OF_STORE)

    dropped = actions.add_parser("drop", help="delete dead letters permanently")
    dropped.add_argument("queue", metavar="QUEUE", help="name of the queue")
    add_selection(dropped)
    add_options(dropped, universe=UNIVERSE_OF_STORE)


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
    events = store.read(dead_letter_documents.failed_events, letters)
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
    letter, payload = store.read(dead_letter_documents.find_letter, args.queue, args.seq)
    event = store.read(dead_letter_documents.failed_events, [letter]).get(letter.seq)
    document = _document(letter, event) | {
        "payload": msgspec.to_builtins(dead_letter_documents.payload_document(payload)),
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
        *([] if event is None else [(what, getattr(event, name)) for what, name in _EVENT_FIELDS]),
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

    def again(seqs: list[int]) -> list[Any]:
        return dead_letter_documents.redrive_letters(store, args.queue, seqs)

    result = redrive_selected(store, args.queue, args, again, selection=selection)
    documents = [{"dead": old, new.what: new.made} for old, new in result.made]
    lines = [f"{old} → {new.made}" for old, new in result.made]
    document = {"queue": args.queue, "redriven": documents}
    return print_result(args, args.queue, result, document, lines)


def _drop(store: Store, args: argparse.Namespace) -> int:
    selection = selection_of(store, args)
    if args.dry_run:
        return dry_run(store, args.queue, args, selection, key="would_drop", verb="dropped")

    universe, slash, _ = args.queue.partition("/")

    def commit(txn: Txn, seqs: list[int]) -> Deferred[list[int]]:
        if slash:
            # A queue of the user's own belongs to no universe, and so to no audit.
            detail = f"{len(seqs)} dead letters from {min(seqs)} to {max(seqs)}"
            audit.record(txn, universe, ACTOR, "dead.drop", f"queue/{args.queue}", detail)
        return receipts.delete_dead_letters(txn, args.queue, seqs)

    def drop(seqs: list[int]) -> list[int]:
        dropped: list[int] = store.transact(commit, seqs)
        return dropped

    result = redrive_selected(store, args.queue, args, drop, selection=selection, verb="dropped")
    dropped = [seq for seq, _ in result.made]
    lines = [f"{seq} dropped" for seq in dropped]
    return print_result(args, args.queue, result, {"queue": args.queue, "dropped": dropped}, lines)


def _first_line(text: str) -> bytes:
    return (text.splitlines() or [""])[0].encode()


def _payload_cell(letter: DeadLetter, event: FailedEventDocument | None) -> str:
    if event is None:
        return payload_text(letter.payload, PAYLOAD_CHARS_MAX) if not letter.blob else "(large)"
    key = "" if event.key is None else f" key={event.key}"
    text = f"{event.type}{key} of {event.world or event.world_id}"
    return payload_text(text.encode(), EVENT_CHARS_MAX)


def _document(letter: DeadLetter, event: FailedEventDocument | None) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(
        dead_letter_documents.letter_document(letter, event)
    )
    return document
