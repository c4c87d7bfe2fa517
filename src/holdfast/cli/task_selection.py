"""The task selection of a command, and its processing in small commits.

Tasks are selected by id, or by conditions: state, queue, name, error text. All given conditions must hold.
Only tasks that existed at the start are selected. Ctrl-C stops between two commits and prints the result;
repeating the command continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.cli import EXIT_INTERRUPTED, EXIT_OK
from holdfast.cli.output import emit
from holdfast.cli.redrive import COMMITS_PER_S, InterruptHandler, RateLimiter
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Store
from holdfast.tasks import queries, task_list
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.model import WAIT_STATES, keys_of
from holdfast.tasks.queries import TaskRow

COMMIT_MAX = 100
PAGE = 500
OPEN_STATES = ("waiting", *WAIT_STATES, "leased")
ENDED_STATES = ("failed", "dead")


@dataclass
class SelectionResult:
    """The result for each task, and whether Ctrl-C stopped the command."""

    results: list[tuple[TaskId, Any]] = field(default_factory=list)
    stopped: bool = False


def add_conditions(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    parser.add_argument("--queue", metavar="Q", help="only tasks in this queue")
    parser.add_argument("--state", choices=states, help="only tasks in this state")
    parser.add_argument("--name", metavar="NAME", help="only tasks with this name")


def add_selection(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("ids", metavar="ID", nargs="*", default=[], help="task ids, such as 1-42")
    group.add_argument("--all", action="store_true", help="all tasks that this command applies to")
    add_conditions(parser, states)
    parser.add_argument(
        "--error", metavar="TEXT", help="only tasks whose error or reason contains TEXT"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="process at most N tasks")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the selected tasks and change nothing"
    )
    parser.set_defaults(usage=parser)


def usage_error(args: argparse.Namespace) -> bool:
    """Whether the selection is missing or ambiguous. Prints the usage error in argparse format."""
    conditions = any((args.queue, args.state, args.name, args.error))
    why = ""
    if args.ids and conditions:
        why = "ID and conditions exclude each other"
    elif not args.ids and not args.all and not conditions:
        why = "nothing selected: give ID, conditions, or --all"
    if why:
        args.usage.print_usage(sys.stderr)
        print(f"{args.usage.prog}: error: {why}", file=sys.stderr)
        return True
    if args.limit is not None and args.limit < 1:
        raise Invalid(what="--limit", found=args.limit, min=1)
    return False


def for_each(
    store: Store,
    universe: str,
    args: argparse.Namespace,
    states: tuple[str, ...],
    operation: Callable[[list[TaskId]], list[Any]],
    rate_per_s: float,
) -> SelectionResult:
    result = SelectionResult()
    size = max(1, min(COMMIT_MAX, int(rate_per_s) // COMMITS_PER_S))
    with InterruptHandler() as interrupt:
        limiter = RateLimiter(rate_per_s, SYSTEM, interrupt)
        for batch in _batches(_selected_tasks(store, universe, args, states), size):
            if not limiter.acquire(len(batch)):
                result.stopped = True
                break
            process_batch(operation, batch, result, explicit=bool(args.ids))
    return result


def process_batch(
    operation: Callable[[list[TaskId]], list[Any]],
    batch: list[TaskId],
    result: SelectionResult,
    *,
    explicit: bool,
) -> None:
    """Process a batch. With a selection by conditions, a task that was deleted meanwhile is skipped."""
    try:
        result.results += zip(batch, operation(batch), strict=True)
    except NotFound:
        if explicit:
            raise
        if len(batch) > 1:
            for task in batch:
                process_batch(operation, [task], result, explicit=False)


def dry_run(store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]) -> int:
    ids = [str(task) for task in _selected_tasks(store, universe, args, states)]
    text = "\n".join([*ids, f"{len(ids):,} tasks (dry run, nothing was changed)"])
    emit(args, {f"would_{args.action}": ids}, text)
    return EXIT_OK


def print_result(
    args: argparse.Namespace, result: SelectionResult, document: dict[str, Any], lines: list[str]
) -> int:
    if result.stopped:
        lines = [*lines, "stopped: tasks not listed are unchanged; repeat the command to continue"]
    emit(args, document | {"stopped": result.stopped}, "\n".join(lines) or "no such tasks")
    return EXIT_INTERRUPTED if result.stopped else EXIT_OK


def _selected_tasks(
    store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]
) -> Iterator[TaskId]:
    """Yield the selected tasks, without tasks that were submitted after the start."""
    remaining = args.limit if args.limit is not None else sys.maxsize
    if args.ids:
        # Explicit ids must all exist; an error aborts the command.
        tasks = [parse_task_id(text) for text in args.ids]
        for task in tasks:
            store.read(queries.get_task, universe, task)
        yield from tasks[:remaining]
        return
    last_seq = store.read(lambda txn: txn.count(keys_of(universe).seq_counter))
    for state in [args.state] if args.state else _distinct_states(states):
        cursor, more = "", True
        while more and remaining > 0:
            page = store.read(
                task_list.list_tasks,
                universe,
                state,
                args.queue or "",
                args.name or "",
                cursor,
                PAGE,
            )
            for row in page.rows:
                if row.seq <= last_seq and remaining > 0 and _matches_error(row, args.error):
                    remaining -= 1
                    yield row.id
            cursor = page.cursor
            more = bool(cursor)


def _distinct_states(states: tuple[str, ...]) -> tuple[str, ...]:
    """Return the states without `waiting`, which is the union of the wait states."""
    return tuple(state for state in states if state != "waiting")


def _matches_error(row: TaskRow, wanted_text: str | None) -> bool:
    if row.status.redriven_by:
        return False
    text = f"{row.status.reason}\n{row.status.error}".lower()
    return not wanted_text or wanted_text.lower() in text


def _batches(tasks: Iterator[TaskId], size: int) -> Iterator[list[TaskId]]:
    batch: list[TaskId] = []
    for task in tasks:
        batch.append(task)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
