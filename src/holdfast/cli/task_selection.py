"""The selection of tasks for a command: by id, or by state, queue, name, tag, error text.

Only tasks that existed at the start are selected. The activations of flows are selected by id or by name only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from holdfast.cli import EXIT_OK, selection
from holdfast.cli.output import emit
from holdfast.cli.selection import SelectionResult
from holdfast.flows.model import TASK_PREFIX
from holdfast.store.api import Store
from holdfast.tasks import queries, task_list
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.model import WAIT_STATES, keys_of
from holdfast.tasks.queries import TaskRow

PAGE = 500
OPEN_STATES = ("waiting", *WAIT_STATES, "leased")
ENDED_STATES = ("failed", "dead")

T = TypeVar("T")


def add_conditions(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    parser.add_argument("--queue", metavar="Q", help="only tasks in this queue")
    parser.add_argument("--state", type=str.lower, choices=states, help="only tasks in this state")
    parser.add_argument("--name", metavar="NAME", help="only tasks with this name")
    parser.add_argument("--tag", metavar="TAG", help="only tasks with this tag")


def add_selection(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    selection.add_explicit_items(
        parser,
        "ids",
        metavar="ID",
        type=str,
        help="task ids, such as 1-42",
        all_help="all tasks that this command applies to",
    )
    add_conditions(parser, states)
    parser.add_argument(
        "--error", metavar="TEXT", help="only tasks whose error or reason contains TEXT"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="process at most N tasks")
    selection.add_dry_run(parser, "tasks")


def usage_error(args: argparse.Namespace) -> bool:
    conditions = [args.queue, args.state, args.name, args.tag, args.error]
    return selection.has_usage_error(args, args.ids, "ID", conditions)


def for_each(
    store: Store,
    universe: str,
    args: argparse.Namespace,
    states: tuple[str, ...],
    operation: Callable[[list[TaskId]], list[T]],
    rate_per_s: float,
) -> SelectionResult[TaskId, T]:
    return selection.process_selected(
        _selected_tasks(store, universe, args, states),
        operation,
        rate_per_s=rate_per_s,
        explicit=bool(args.ids),
    )


def dry_run(store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]) -> int:
    """Print the selected tasks without processing them."""
    pages = _selected_tasks(store, universe, args, states)
    ids = [str(task) for task in chain.from_iterable(pages)]
    text = "\n".join([*ids, f"{len(ids):,} tasks (dry run, nothing was changed)"])
    emit(args, {f"would_{args.action}": ids}, text)
    return EXIT_OK


def print_result(
    args: argparse.Namespace,
    result: SelectionResult[TaskId, Any],
    document: dict[str, Any],
    lines: list[str],
) -> int:
    return selection.print_result(
        args,
        result,
        document,
        lines,
        stopped_text="tasks not listed are unchanged",
        empty_text="no such tasks",
    )


def _selected_tasks(
    store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]
) -> Iterator[list[TaskId]]:
    """Yield pages of at most `--limit` selected tasks."""
    pages = (
        _explicit_tasks(store, universe, args.ids)
        if args.ids
        else _matching_tasks(store, universe, args, states)
    )
    return selection.limited(pages, args.limit)


def _explicit_tasks(store: Store, universe: str, ids: list[str]) -> Iterator[list[TaskId]]:
    """Yield the tasks with these ids as one page. All of them must exist."""
    tasks = [parse_task_id(text) for text in ids]
    for task in tasks:
        store.read(queries.get_task, universe, task)
    yield tasks


def _matching_tasks(
    store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]
) -> Iterator[list[TaskId]]:
    """Yield pages of the tasks that match the conditions, without tasks that were submitted after the start.

    A page may be empty.
    """
    last_seq = store.read(lambda txn: txn.count(keys_of(universe).seq_counter))
    for state in [args.state] if args.state else _distinct_states(states):
        cursor, more = "", True
        while more:
            page = store.read(
                partial(
                    task_list.list_tasks, owned=names_activations(args.name), tag=args.tag or ""
                ),
                universe,
                state,
                args.queue or "",
                args.name or "",
                cursor,
                PAGE,
            )
            yield [
                row.id
                for row in page.rows
                if row.seq <= last_seq and _matches_error(row, args.error)
            ]
            cursor = page.cursor
            more = bool(cursor)


def names_activations(name: str | None) -> bool:
    """Whether a name is that of the activations of a flow."""
    return (name or "").startswith(TASK_PREFIX)


def _distinct_states(states: tuple[str, ...]) -> tuple[str, ...]:
    """Return the states without `waiting`, which is the union of the wait states."""
    return tuple(state for state in states if state != "waiting")


def _matches_error(row: TaskRow, wanted_text: str | None) -> bool:
    if row.status.redriven_by:
        return False
    text = f"{row.status.reason}\n{row.status.error}".lower()
    return not wanted_text or wanted_text.lower() in text
