"""The selection of flows for a command: by id or `NAME/KEY`, or by state, name, tag, error text.

Only flows that existed at the start are selected.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeVar

from holdfast.cli import EXIT_OK, selection
from holdfast.cli.output import emit
from holdfast.cli.selection import SelectionResult
from holdfast.flows import flow_list
from holdfast.flows.flow_list import FlowRow
from holdfast.flows.model import FlowId, keys_of
from holdfast.ops.flow_documents import find_flow
from holdfast.store.api import Store

PAGE = 500
# Running flows first: a cancelled flow that waits becomes a running one.
OPEN_STATES = ("running", "waiting", "parked")
ENDED_STATES = ("failed", "dead")
PARKED_STATES = ("parked",)

T = TypeVar("T")


def add_flow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("flow", metavar="ID", help="flow id, such as f1-17, or NAME/KEY")


def add_selection(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    selection.add_explicit_items(
        parser,
        "flows",
        metavar="ID",
        type=str,
        help="flow ids, such as f1-17, or NAME/KEY",
        all_help="all flows that this command applies to",
    )
    parser.add_argument("--state", type=str.lower, choices=states, help="only flows in this state")
    parser.add_argument("--name", metavar="NAME", help="only flows with this name")
    parser.add_argument("--tag", metavar="TAG", help="only flows with this tag")
    parser.add_argument(
        "--error",
        metavar="TEXT",
        help="only flows whose error code, failed step or error text contains TEXT",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="process at most N flows")
    selection.add_dry_run(parser, "flows")
    selection.add_rate(parser, "flows")


def usage_error(args: argparse.Namespace) -> bool:
    conditions = [args.state, args.name, args.tag, args.error]
    return selection.has_usage_error(args, args.flows, "ID", conditions)


def for_each(
    store: Store,
    universe: str,
    args: argparse.Namespace,
    states: tuple[str, ...],
    operation: Callable[[FlowRow], T],
) -> SelectionResult[FlowId, T | None]:
    """Apply an operation to each selected flow, one commit per flow.

    A flow that conditions selected may have changed meanwhile: its result is None.
    """

    def apply(some: list[FlowRow]) -> list[T | None]:
        return [operation(row) for row in some]

    def apply_unless_changed(some: list[FlowRow]) -> list[T | None]:
        found: list[T | None] = []
        for row in some:
            current = store.read(flow_list.get_flow, keys_of(universe), row.seq)
            is_same = current is not None and current.state.name.lower() in states
            found.append(operation(current) if current is not None and is_same else None)
        return found

    result = selection.process_selected(
        _selected_flows(store, universe, args, states),
        apply if args.flows else apply_unless_changed,
        rate_per_s=args.rate,
        explicit=bool(args.flows),
    )
    made = [(row.id, value) for row, value in result.made]
    return SelectionResult(made, [], result.stopped)


def dry_run(store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]) -> int:
    """Print the selected flows without processing them."""
    pages = _selected_flows(store, universe, args, states)
    ids = [str(row.id) for row in chain.from_iterable(pages)]
    text = "\n".join([*ids, f"{len(ids):,} flows (dry run, nothing was changed)"])
    emit(args, {f"would_{args.action}": ids}, text)
    return EXIT_OK


def print_result(
    args: argparse.Namespace,
    result: SelectionResult[FlowId, Any],
    document: dict[str, Any],
    lines: list[str],
) -> int:
    return selection.print_result(
        args,
        result,
        document,
        lines,
        stopped_text="flows not listed are unchanged",
        empty_text="no such flows",
    )


def _selected_flows(
    store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]
) -> Iterator[list[FlowRow]]:
    """Yield pages of at most `--limit` selected flows. Flows that are named must all exist."""
    pages: Iterator[list[FlowRow]]
    if args.flows:
        pages = iter([[store.read(find_flow, universe, text) for text in args.flows]])
    else:
        pages = _matching_flows(store, universe, args, states)
    return selection.limited(pages, args.limit)


def _matching_flows(
    store: Store, universe: str, args: argparse.Namespace, states: tuple[str, ...]
) -> Iterator[list[FlowRow]]:
    """Yield pages of the flows that match the conditions, each flow once. A page may be empty."""
    last_seq = store.read(lambda txn: txn.count(keys_of(universe).seq_counter))
    seen: set[int] = set()
    for state in [args.state] if args.state else states:
        cursor, more = "", True
        while more:
            page = store.read(
                flow_list.list_flows,
                universe,
                state,
                args.name or "",
                cursor,
                PAGE,
                args.tag or "",
            )
            yield [
                row
                for row in page.rows
                if row.seq <= last_seq and row.seq not in seen and _matches_error(row, args.error)
            ]
            seen.update(row.seq for row in page.rows)
            cursor = page.cursor
            more = bool(cursor)


def _matches_error(row: FlowRow, wanted_text: str | None) -> bool:
    head = row.head
    if head.redriven_by:
        return False
    text = f"{head.code}\n{head.step}\n{head.error_type}: {head.error}".lower()
    return not wanted_text or wanted_text.lower() in text
