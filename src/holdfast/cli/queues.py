"""`holdfast queues`: lists, pauses, resumes and drains queues of tasks, and counts their ended work.

A paused queue accepts tasks and grants none. Its running tasks continue. `drain` pauses a queue and waits until none of
its tasks runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.output import emit, printable, table, time_text
from holdfast.cli.store_option import ONE_UNIVERSE, add_options, open_existing
from holdfast.cli.why import universe_of
from holdfast.clock import SYSTEM, S
from holdfast.durable import ended_counts
from holdfast.durable.ended_counts import (
    KEPT_MINUTES,
    MINUTE_NS,
    OUTCOMES,
    QUEUES_MAX,
    TASK,
    EndedCount,
)
from holdfast.errors import Invalid
from holdfast.ops import audit
from holdfast.ops.task_documents import queue_summary
from holdfast.store.api import Store, Txn
from holdfast.tasks import operations, queries
from holdfast.tasks.queries import QueueRow

# The actor of audit entries of this command.
ACTOR = "command line"
DRAIN_S = 60.0
ENDED_MINUTES = 60
# Rows of the list of ended work: the queues of each minute of a day.
ROWS_MAX = 2 * KEPT_MINUTES * (QUEUES_MAX + 1)
POLL_S = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="list the queues with their counts and limits")
    paused = actions.add_parser("pause", help="grant no task of a queue; running tasks continue")
    resumed = actions.add_parser("resume", help="grant the tasks of a paused queue again")
    drained = actions.add_parser("drain", help="pause a queue and wait until no task of it runs")
    drained.add_argument(
        "--timeout", metavar="S", type=float, default=DRAIN_S,
        help=f"wait at most S seconds (default {DRAIN_S:.0f}); the queue stays paused",
    )  # fmt: skip
    for action in (paused, resumed, drained):
        action.add_argument("queue", metavar="QUEUE", help="name of the queue")
    ended = actions.add_parser("ended", help="count ended tasks and flows per minute, by outcome")
    ended.add_argument("--queue", metavar="Q", help="only tasks of this queue")
    ended.add_argument(
        "--minutes", metavar="N", type=int, default=ENDED_MINUTES,
        help=f"the last N minutes, at most {KEPT_MINUTES} (default {ENDED_MINUTES})",
    )  # fmt: skip
    for action in (listed, paused, resumed, drained, ended):
        add_options(action, universe=ONE_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    if args.action == "drain" and not args.timeout >= 0:
        raise Invalid(what="timeout", found=args.timeout, min=0)
    with open_existing(args) as store:
        universe = universe_of(store, args, "queues")
        if args.action == "list":
            return _list(store, universe, args)
        if args.action == "ended":
            return _ended(store, universe, args)
        changed = bool(store.transact(_set_paused, universe, args.queue, args.action))
        if args.action == "drain":
            return _drain(store, universe, args, changed)
        row = store.read(queries.read_queue, universe, args.queue)
        text = f"{args.queue} {_pause_text(row)}"
        emit(args, _document(row, changed=changed), printable(text))
    return EXIT_OK


def _list(store: Store, universe: str, args: argparse.Namespace) -> int:
    rows: list[QueueRow] = store.read(queries.list_queues, universe)
    cells = [
        (
            row.queue,
            row.counts.waiting,
            row.counts.leased,
            row.limits.concurrency or None,
            row.limits.per_key or None,
            time_text(row.limits.paused_ns) if row.limits.paused_ns else None,
        )
        for row in rows
    ]
    header = ("queue", "waiting", "leased", "concurrency", "per key", "paused")
    document = {"universe": universe, "queues": [queue_summary(row) for row in rows]}
    emit(args, document, table(header, cells) if cells else "no queues")
    return EXIT_OK


def _ended(store: Store, universe: str, args: argparse.Namespace) -> int:
    if not 1 <= args.minutes <= KEPT_MINUTES:
        raise Invalid(what="--minutes", found=args.minutes, min=1, max=KEPT_MINUTES)

    def read(txn: Txn) -> list[EndedCount]:
        last = txn.now_ns // MINUTE_NS
        first = last - args.minutes + 1
        if args.queue:
            return ended_counts.queue_counts(txn, universe, TASK, args.queue, first, last)
        rows = ended_counts.list_counts(txn, universe, first, last, b"", ROWS_MAX)
        return [count for _, count in rows]

    rows = store.read(read)
    cells = [
        (time_text(row.minute * MINUTE_NS), row.kind, row.queue or "other", *row.ended)
        for row in rows
    ]
    items = [
        {
            "minute_ns": row.minute * MINUTE_NS,
            "kind": row.kind,
            "queue": row.queue or None,
            **dict(zip(OUTCOMES, row.ended, strict=True)),
        }
        for row in rows
    ]
    text = table(("minute", "kind", "queue", *OUTCOMES), cells) if cells else "nothing ended"
    emit(args, {"universe": universe, "ended": items}, text)
    return EXIT_OK


def _set_paused(txn: Txn, universe: str, queue: str, action: str) -> Any:
    changed = operations.set_queue_paused(txn, universe, queue, action != "resume")
    audit.record(txn, universe, ACTOR, f"queues.{action}", f"queue/{queue}")
    return changed


def _drain(store: Store, universe: str, args: argparse.Namespace, changed: bool) -> int:
    until_ns = SYSTEM.mono_ns() + int(args.timeout * S)
    row: QueueRow = store.read(queries.read_queue, universe, args.queue)
    while row.counts.leased and SYSTEM.mono_ns() < until_ns:
        SYSTEM.sleep(POLL_S)
        row = store.read(queries.read_queue, universe, args.queue)
    drained = not row.counts.leased
    emit(
        args,
        _document(row, changed=changed, drained=drained),
        printable(f"{args.queue} {_pause_text(row)}"),
    )
    return EXIT_OK if drained else EXIT_FAILED


def _document(row: QueueRow, **more: bool) -> dict[str, Any]:
    return {**queue_summary(row), **more}


def _pause_text(row: QueueRow) -> str:
    counts = row.counts
    work = f"{counts.waiting:,} tasks wait, {counts.leased:,} run"
    return f"is paused: {work}" if row.limits.paused_ns else f"grants its tasks: {work}"
