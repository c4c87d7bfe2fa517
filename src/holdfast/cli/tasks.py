"""`holdfast tasks`: lists, shows, cancels and redrives tasks, and sets queue limits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from holdfast.cli import EXIT_OK, EXIT_USAGE
from holdfast.cli.attempts import error_text
from holdfast.cli.output import emit, field_lines, table, time_text
from holdfast.cli.selection import add_rate, check_rate
from holdfast.cli.store_option import ONE_UNIVERSE, add_options, open_existing
from holdfast.cli.task_selection import (
    ENDED_STATES,
    OPEN_STATES,
    add_conditions,
    add_selection,
    dry_run,
    for_each,
    names_activations,
    print_result,
    usage_error,
)
from holdfast.config import BATCH_MAX
from holdfast.errors import Invalid, NotFound
from holdfast.ops.task_documents import (
    TaskReport,
    queue_summary,
    read_report,
    task_details,
    task_summary,
)
from holdfast.store.api import Store, Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.tasks import operations, queries, task_list
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.model import WAIT_STATES, QueueLimits, get_limits, keys_of
from holdfast.tasks.queries import QueueRow, TaskDetails, TaskRow
from holdfast.tasks.states import TaskState

LIST_MAX = 20
VALUE_CHARS_MAX = 4000
WHY_CHARS_MAX = 60


class NoTasks(NotFound):
    hint = "no task was submitted here yet; check --universe and --store"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser(
        "list",
        help="count tasks by queue, and list them: newest first; with --state by priority, start time or lease expiry",
    )
    add_conditions(listed, task_list.STATE_FILTERS)
    listed.add_argument(
        "--cursor", metavar="C", default="", help="continue a list from the cursor it printed"
    )
    listed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N tasks (default {LIST_MAX})",
    )
    _add_store(listed)

    shown = actions.add_parser(
        "show", help="show one task: its state with the reason, its arguments, its result or error"
    )
    shown.add_argument("id", metavar="ID", help="task id, such as 1-42")
    _add_store(shown)

    cancelled = actions.add_parser("cancel", help="cancel waiting and running tasks")
    add_selection(cancelled, OPEN_STATES)
    cancelled.add_argument(
        "--reason",
        metavar="TEXT",
        default="cancelled",
        help="reason to store with the tasks (default: cancelled)",
    )
    _add_store(cancelled)

    redriven = actions.add_parser(
        "redrive", help="submit failed and dead tasks again, as new tasks"
    )
    add_selection(redriven, ENDED_STATES)
    add_rate(redriven, "tasks")
    _add_store(redriven)

    limited = actions.add_parser(
        "limit", help="set the concurrency limits of a queue, or show them"
    )
    limited.add_argument("queue", metavar="QUEUE", help="name of the queue")
    limited.add_argument(
        "--concurrency", metavar="N", type=int, help="run at most N tasks at a time; 0: no limit"
    )
    limited.add_argument(
        "--per-key",
        metavar="N",
        type=int,
        help="run at most N tasks of each limit key at a time; 0: no limit",
    )
    _add_store(limited)


def run(args: argparse.Namespace) -> int:
    if args.action in ("cancel", "redrive") and usage_error(args):
        return EXIT_USAGE
    with open_existing(args) as store:
        act = {
            "list": _list, "show": _show, "cancel": _cancel, "redrive": _redrive, "limit": _limit,
        }  # fmt: skip
        return act[args.action](store, args)


# -- queries ---------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    queues: list[QueueRow] = store.read(queries.list_queues, universe)
    if args.queue:
        queues = [row for row in queues if row.queue == args.queue]
    page = store.read(
        partial(task_list.list_tasks, owned=names_activations(args.name), tag=args.tag or ""),
        universe,
        args.state or "",
        args.queue or "",
        args.name or "",
        args.cursor,
        args.limit,
    )
    document = {
        "universe": universe,
        "queues": [queue_summary(row) for row in queues],
        "tasks": [task_summary(row) for row in page.rows],
        "cursor": page.cursor or None,
    }
    emit(args, document, "\n\n".join(_list_text(args, queues, page)))
    return EXIT_OK


def _list_text(
    args: argparse.Namespace, queues: list[QueueRow], page: task_list.TaskPage
) -> Iterator[str]:
    columns = (*WAIT_STATES, "leased", "completed", "failed", "dead")
    if queues:
        yield table(
            ("queue", *columns),
            [(row.queue, *(getattr(row.counts, column) for column in columns)) for row in queues],
        )
    if page.rows:
        yield table(
            ("id", "name", "queue", "where", "attempt", "time", "by", "why"),
            [_table_row(row) for row in page.rows],
        )
    elif not page.cursor:
        yield "no such tasks"
    if page.cursor:
        yield f"there may be more: --cursor {page.cursor}"


def _table_row(row: TaskRow) -> tuple[object, ...]:
    """Format a task as a table row. The time depends on its state: end, earliest start, lease expiry or
    submission."""
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
    report: TaskReport = store.read(read_report, universe, parse_task_id(args.id))
    document = {"universe": universe} | task_details(report)
    emit(args, document, _show_text(args, report.details, document))
    return EXIT_OK


def _show_text(args: argparse.Namespace, details: TaskDetails, document: dict[str, Any]) -> str:
    row = details.row
    status, spec = row.status, row.spec
    times = {
        "submitted": row.body.created_ns,
        "not before": row.not_before_ns if row.where == "delayed" else 0,
        "lease began": status.granted_ns if details.lease else 0,
        "lease ends": status.expires_ns,
        "ended": status.ended_ns,
    }
    pairs: list[tuple[str, object]] = [
        ("task", f"{row.id} {spec.name}"),
        ("queue", spec.queue + (f", priority {spec.priority}" if spec.priority else "")),
        ("state", row.state.name + (f", {row.where}" if row.state is TaskState.WAITING else "")),
        ("why", document["why"]),
        *((name, time_text(time_ns)) for name, time_ns in times.items() if time_ns),
        ("attempt", str(status.attempt)),
        ("failures", f"{status.failures} of {spec.attempts}"),
        ("expiries", f"{status.expiries} of {spec.expiries_max}"),
        ("worker", status.worker),
        ("lease", document["lease"]),
        ("key", row.body.key),
        ("limit key", row.body.limit),
        ("tag", row.body.tag),
        ("after", ", ".join(document["after"])),
        ("redrive of", document["redrive_of"]),
        ("redriven by", document["redriven_by"]),
        ("reason", status.reason),
        ("arguments", _shorten(_call_text(document["args"], document["kwargs"]))),
    ]
    if document["progress"] is not None:
        pairs.append(("progress", _shorten(_json(document["progress"]))))
    if "result" in document:
        pairs.append(("result", _shorten(_json(document["result"]))))
    text = field_lines([pair for pair in pairs if pair[1] not in (None, "")]) + error_text(
        status.error
    )
    if row.where in ENDED_STATES and not details.redriven_by:
        store_option = f" --store {args.store}" if args.store else ""
        text += f"\nretry it: holdfast tasks redrive {row.id}{store_option}"
    return text


def _call_text(args: list[Any], kwargs: dict[str, Any]) -> str:
    """Format arguments in the syntax of a call."""
    positional = [_json(value) for value in args]
    return ", ".join([*positional, *(f"{name}={_json(value)}" for name, value in kwargs.items())])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shorten(text: str) -> str:
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


# -- changes ---------------------------------------------------------------------------------------


def _cancel(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    if args.dry_run:
        return dry_run(store, universe, args, OPEN_STATES)

    def cancel(some: list[TaskId]) -> list[bool]:
        seqs = [task.seq for task in some]
        found: list[bool] = store.transact(operations.cancel, universe, seqs, args.reason)
        return found

    result = for_each(store, universe, args, OPEN_STATES, cancel, BATCH_MAX)
    lines = [
        f"{task} {'cancelled' if cancelled else 'had ended'}" for task, cancelled in result.made
    ]
    document = {
        "cancelled": [{"id": str(task), "cancelled": cancelled} for task, cancelled in result.made]
    }
    return print_result(args, result, document, lines)


def _redrive(store: Store, args: argparse.Namespace) -> int:
    check_rate(args)
    universe = _universe_of(store, args)
    if args.dry_run:
        return dry_run(store, universe, args, ENDED_STATES)

    def redrive(some: list[TaskId]) -> list[TaskId]:
        seqs: list[int] = store.transact(operations.redrive, universe, [task.seq for task in some])
        return store.read(queries.task_ids, universe, seqs)

    result = for_each(store, universe, args, ENDED_STATES, redrive, args.rate)
    lines = [f"{task} → {new}" for task, new in result.made]
    document = {"redriven": [{"id": str(task), "task": str(new)} for task, new in result.made]}
    return print_result(args, result, document, lines)


def _limit(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    limits_before = store.read(lambda txn: get_limits(txn, keys_of(universe), args.queue))
    limits = QueueLimits(
        limits_before.concurrency if args.concurrency is None else args.concurrency,
        limits_before.per_key if args.per_key is None else args.per_key,
    )
    if limits != limits_before:
        store.transact(operations.set_limits, universe, args.queue, limits)
    document = {"queue": args.queue, "concurrency": limits.concurrency, "per_key": limits.per_key}
    pairs = [
        ("queue", args.queue),
        ("at a time", str(limits.concurrency or "any number")),
        ("of each limit key", str(limits.per_key or "any number")),
    ]
    emit(args, document, field_lines(pairs))
    return EXIT_OK


# -- inside ----------------------------------------------------------------------------------------


def _add_store(parser: argparse.ArgumentParser) -> None:
    add_options(parser, universe=ONE_UNIVERSE)


def _universe_of(store: Store, args: argparse.Namespace) -> str:
    """Return the given universe, or the only universe that has tasks."""

    def names(txn: Txn) -> list[str]:
        return list(iter_names(txn, (int(Space.TASK),)))

    universes: list[str] = store.read(names)
    if args.universe:
        if args.universe not in universes and args.action != "limit":
            raise NoTasks(what="universe", universe=args.universe)
        return str(args.universe)
    if not universes:
        raise NoTasks(what="tasks", url=store.url)
    if len(universes) > 1:
        raise Invalid(
            what="tasks", why="in several universes: give --universe", universes=universes
        )
    return universes[0]
