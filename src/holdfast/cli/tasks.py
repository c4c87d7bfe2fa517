"""`holdfast tasks`: what is to be done, who does it, an end or another try for some of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from holdfast.cli import EXIT_OK, EXIT_USAGE
from holdfast.cli.attempts import error_text
from holdfast.cli.output import emit, fields, table, time_text
from holdfast.cli.redrive import RATE_PER_S
from holdfast.cli.target import add_options, existing
from holdfast.cli.task_selection import (
    ENDED,
    OPEN,
    add_conditions,
    add_selection,
    each,
    misused,
    tell,
    would,
)
from holdfast.config import BATCH_MAX
from holdfast.errors import Invalid, NotFound
from holdfast.ops import inventory
from holdfast.ops.task_document import queue_document, row_document, seen_document
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.tasks import coordinator, listing, look
from holdfast.tasks.ids import TaskId, parse_task
from holdfast.tasks.look import QueueRow, Seen, TaskRow
from holdfast.tasks.rows import PLACES, Limits, keys_of, limits_of
from holdfast.tasks.states import State

LIST_MAX = 20
VALUE_CHARS_MAX = 4000
WHY_CHARS_MAX = 60


class NoTasks(NotFound):
    hint = "nobody has submitted a task here yet; with --universe it may be one that has none"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser(
        "list", help="counts by queue, and tasks: newest first, or by place"
    )
    add_conditions(listed, listing.WHERE)
    listed.add_argument("--cursor", metavar="C", default="", help="go on from there")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    _add_store(listed)

    shown = actions.add_parser("show", help="one task: where it is and why, its arguments, its end")
    shown.add_argument("id", metavar="ID", help="such as 1-42")
    _add_store(shown)

    cancelled = actions.add_parser("cancel", help="end tasks that have not ended, running ones too")
    add_selection(cancelled, OPEN)
    cancelled.add_argument("--reason", metavar="TEXT", default="cancelled", help="kept with them")
    _add_store(cancelled)

    redriven = actions.add_parser("redrive", help="submit failed and dead tasks anew")
    add_selection(redriven, ENDED)
    redriven.add_argument(
        "--rate", metavar="N", type=float, default=RATE_PER_S, help=f"a second ({RATE_PER_S:g})"
    )
    _add_store(redriven)

    limited = actions.add_parser("limit", help="how many of a queue run at a time; else tell it")
    limited.add_argument("queue", metavar="QUEUE")
    limited.add_argument("--concurrency", metavar="N", type=int, help="in all; 0 is any number")
    limited.add_argument("--per-key", metavar="N", type=int, help="of each limit key; 0 is any")
    _add_store(limited)


def run(args: argparse.Namespace) -> int:
    if args.action in ("cancel", "redrive") and misused(args):
        return EXIT_USAGE
    with existing(args) as store:
        act = {
            "list": _list, "show": _show, "cancel": _cancel, "redrive": _redrive, "limit": _limit,
        }  # fmt: skip
        return act[args.action](store, args)


# -- looking ---------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    queues: list[QueueRow] = store.read(look.queues, universe)
    if args.queue:
        queues = [row for row in queues if row.queue == args.queue]
    found = store.read(
        listing.page,
        universe,
        args.state or "",
        args.queue or "",
        args.name or "",
        args.cursor,
        args.limit,
    )
    document = {
        "universe": universe,
        "queues": [queue_document(row) for row in queues],
        "tasks": [row_document(row) for row in found.rows],
        "cursor": found.cursor or None,
    }
    emit(args, document, "\n\n".join(_list_text(args, queues, found)))
    return EXIT_OK


def _list_text(
    args: argparse.Namespace, queues: list[QueueRow], found: listing.Page
) -> Iterator[str]:
    places = (*PLACES, "leased", "completed", "failed", "dead")
    if queues:
        yield table(
            ("queue", *places),
            [(row.queue, *(getattr(row.counts, place) for place in places)) for row in queues],
        )
    if found.rows:
        yield table(
            ("id", "name", "queue", "where", "attempt", "time", "by", "why"),
            [_line(row) for row in found.rows],
        )
    elif not found.cursor:
        yield "no such tasks"
    if found.cursor:
        yield f"there may be more: --cursor {found.cursor}"


def _line(row: TaskRow) -> tuple[object, ...]:
    """The time is the one that matters there: when it ended, may begin, runs out, was submitted."""
    status = row.status
    time_ns = status.ended_ns or status.expires_ns or row.body.created_ns
    if row.where == "delayed":
        time_ns = row.not_before_ns
    why = (status.error or status.reason).partition("\n")[0]
    return (
        str(row.id),
        row.spec.name,
        row.spec.queue,
        row.where,
        status.attempt,
        time_text(time_ns),
        status.worker or None,
        (why if len(why) <= WHY_CHARS_MAX else why[: WHY_CHARS_MAX - 1] + "…") or None,
    )


def _show(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    seen: Seen = store.read(look.see, universe, parse_task(args.id))
    document = {"universe": universe} | seen_document(seen)
    emit(args, document, _show_text(args, seen, document))
    return EXIT_OK


def _show_text(args: argparse.Namespace, seen: Seen, document: dict[str, Any]) -> str:
    row = seen.row
    status, spec = row.status, row.spec
    times = {
        "submitted": row.body.created_ns,
        "not before": row.not_before_ns if row.where == "delayed" else 0,
        "lease began": status.granted_ns if seen.lease else 0,
        "lease ends": status.expires_ns,
        "ended": status.ended_ns,
    }
    pairs: list[tuple[str, object]] = [
        ("task", f"{row.id} {spec.name}"),
        ("queue", spec.queue + (f", priority {spec.priority}" if spec.priority else "")),
        ("state", row.state.name + (f", {row.where}" if row.state is State.WAITING else "")),
        ("why", seen.why),
        *((name, time_text(time_ns)) for name, time_ns in times.items() if time_ns),
        ("attempt", str(status.attempt)),
        ("failures", f"{status.failures} of {spec.attempts}"),
        ("expiries", f"{status.expiries} of {spec.expiries_max}"),
        ("worker", status.worker),
        ("lease", document["lease"]),
        ("key", row.body.key),
        ("limit key", row.body.limit),
        ("after", ", ".join(document["after"])),
        ("redrive of", document["redrive_of"]),
        ("redriven by", document["redriven_by"]),
        ("reason", status.reason),
        ("arguments", _cut(_call(document["args"], document["kwargs"]))),
    ]
    if document["progress"] is not None:
        pairs.append(("progress", _cut(_json(document["progress"]))))
    if "result" in document:
        pairs.append(("result", _cut(_json(document["result"]))))
    text = fields([pair for pair in pairs if pair[1] not in (None, "")]) + error_text(status.error)
    if row.where in ENDED and not seen.redriven_by:
        store_option = f" --store {args.store}" if args.store else ""
        text += f"\nanother try: holdfast tasks redrive {row.id}{store_option}"
    return text


def _call(args: list[Any], kwargs: dict[str, Any]) -> str:
    """Arguments as they would stand in a call."""
    positional = [_json(value) for value in args]
    return ", ".join([*positional, *(f"{name}={_json(value)}" for name, value in kwargs.items())])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


# -- steering --------------------------------------------------------------------------------------


def _cancel(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    if args.dry_run:
        return would(store, universe, args, OPEN)

    def cancel(some: list[TaskId]) -> list[bool]:
        seqs = [task.seq for task in some]
        found: list[bool] = store.transact(coordinator.cancel, universe, seqs, args.reason)
        return found

    done = each(store, universe, args, OPEN, cancel, BATCH_MAX)
    lines = [f"{task} {'cancelled' if was else 'had ended'}" for task, was in done.made]
    document = {"cancelled": [{"id": str(task), "cancelled": was} for task, was in done.made]}
    return tell(args, done, document, lines)


def _redrive(store: Store, args: argparse.Namespace) -> int:
    if not 0 < args.rate <= BATCH_MAX:
        raise Invalid(what="--rate", found=args.rate, min=0, max=BATCH_MAX)
    universe = _universe_of(store, args)
    if args.dry_run:
        return would(store, universe, args, ENDED)

    def redrive(some: list[TaskId]) -> list[TaskId]:
        seqs: list[int] = store.transact(coordinator.redrive, universe, [task.seq for task in some])
        return store.read(look.ids_of, universe, seqs)

    done = each(store, universe, args, ENDED, redrive, args.rate)
    lines = [f"{task} → {new}" for task, new in done.made]
    document = {"redriven": [{"id": str(task), "task": str(new)} for task, new in done.made]}
    return tell(args, done, document, lines)


def _limit(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    was = store.read(lambda txn: limits_of(txn, keys_of(universe), args.queue))
    now = Limits(
        was.concurrency if args.concurrency is None else args.concurrency,
        was.per_key if args.per_key is None else args.per_key,
    )
    if now != was:
        store.transact(coordinator.limit, universe, args.queue, now)
    document = {"queue": args.queue, "concurrency": now.concurrency, "per_key": now.per_key}
    pairs = [
        ("queue", args.queue),
        ("at a time", str(now.concurrency or "any number")),
        ("of each limit key", str(now.per_key or "any number")),
    ]
    emit(args, document, fields(pairs))
    return EXIT_OK


# -- inside ----------------------------------------------------------------------------------------


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--universe", metavar="U", help="where the store holds several")
    add_options(parser)


def _universe_of(store: Store, args: argparse.Namespace) -> str:
    """The one universe that has tasks."""

    def names(txn: Txn) -> list[str]:
        return list(inventory.names_after(txn, (int(Space.TASK),)))

    found: list[str] = store.read(names)
    if args.universe:
        if args.universe not in found and args.action != "limit":
            raise NoTasks(what="universe", universe=args.universe)
        return str(args.universe)
    if not found:
        raise NoTasks(what="tasks", url=store.url)
    if len(found) > 1:
        raise Invalid(what="tasks", why="in several universes: say which", universes=found)
    return found[0]
