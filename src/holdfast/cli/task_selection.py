"""Which tasks a command is for, and going through them a commit at a time.

Tasks are named by id, or chosen by where they are, their queue, their name, words of their error; every
condition that is given must hold. Chosen are those that were there when the command began. Ctrl-C ends it
between two commits, it says what it has done, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.cli import EXIT_INTERRUPTED, EXIT_OK
from holdfast.cli.output import emit
from holdfast.cli.redrive import COMMITS_PER_S, Interrupt, Pace
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Store
from holdfast.tasks import listing, look
from holdfast.tasks.ids import TaskId, parse_task
from holdfast.tasks.look import TaskRow
from holdfast.tasks.rows import PLACES, keys_of

COMMIT_MAX = 100
PAGE = 500
OPEN = ("waiting", *PLACES, "leased")
ENDED = ("failed", "dead")


@dataclass
class Done:
    """What became of each, and whether somebody put an end to it."""

    made: list[tuple[TaskId, Any]] = field(default_factory=list)
    stopped: bool = False


def add_conditions(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    parser.add_argument("--queue", metavar="Q", help="those of this queue")
    parser.add_argument("--state", choices=states, help="those that are there")
    parser.add_argument("--name", metavar="NAME", help="those of this name")


def add_selection(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("ids", metavar="ID", nargs="*", default=[])
    which.add_argument("--all", action="store_true", help="all that can be")
    add_conditions(parser, states)
    parser.add_argument("--error", metavar="TEXT", help="whose error or reason has this in it")
    parser.add_argument("--limit", metavar="N", type=int, help="stop after so many")
    parser.add_argument("--dry-run", action="store_true", help="only say which they are")
    parser.set_defaults(usage=parser)


def misused(args: argparse.Namespace) -> bool:
    """Whether it does not say which, or says so twice; then usage was told, as argparse tells it."""
    conditions = any((args.queue, args.state, args.name, args.error))
    why = ""
    if args.ids and conditions:
        why = "ids, or conditions"
    elif not args.ids and not args.all and not conditions:
        why = "say which: ids, conditions, or --all"
    if why:
        args.usage.print_usage(sys.stderr)
        print(f"{args.usage.prog}: error: {why}", file=sys.stderr)
        return True
    if args.limit is not None and args.limit < 1:
        raise Invalid(what="--limit", found=args.limit, min=1)
    return False


def each(
    store: Store,
    universe: str,
    args: argparse.Namespace,
    among: tuple[str, ...],
    act: Callable[[list[TaskId]], list[Any]],
    rate_per_s: float,
) -> Done:
    done = Done()
    size = max(1, min(COMMIT_MAX, int(rate_per_s) // COMMITS_PER_S))
    with Interrupt() as interrupt:
        pace = Pace(rate_per_s, SYSTEM, interrupt)
        for some in _batches(_chosen(store, universe, args, among), size):
            if not pace.admits(len(some)):
                done.stopped = True
                break
            take(act, some, done, named=bool(args.ids))
    return done


def take(
    act: Callable[[list[TaskId]], list[Any]], some: list[TaskId], done: Done, *, named: bool
) -> None:
    """Of tasks that were chosen by a condition, one that is forgotten meanwhile stops no other."""
    try:
        done.made += zip(some, act(some), strict=True)
    except NotFound:
        if named:
            raise
        if len(some) > 1:
            for task in some:
                take(act, [task], done, named=False)


def would(store: Store, universe: str, args: argparse.Namespace, among: tuple[str, ...]) -> int:
    ids = [str(task) for task in _chosen(store, universe, args, among)]
    text = "\n".join([*ids, f"{len(ids):,} tasks: --dry-run, so nothing was done"])
    emit(args, {f"would_{args.action}": ids}, text)
    return EXIT_OK


def tell(args: argparse.Namespace, done: Done, document: dict[str, Any], lines: list[str]) -> int:
    if done.stopped:
        lines = [*lines, "stopped: what is not listed was left alone, and the same command goes on"]
    emit(args, document | {"stopped": done.stopped}, "\n".join(lines) or "no such tasks")
    return EXIT_INTERRUPTED if done.stopped else EXIT_OK


def _chosen(
    store: Store, universe: str, args: argparse.Namespace, among: tuple[str, ...]
) -> Iterator[TaskId]:
    """Those that are meant, of those that were there when this began."""
    left = args.limit if args.limit is not None else sys.maxsize
    if args.ids:
        # Named one by one, they are all there or it is a mistake.
        wanted = [parse_task(text) for text in args.ids]
        for task in wanted:
            store.read(look.find, universe, task)
        yield from wanted[:left]
        return
    last = store.read(lambda txn: txn.count(keys_of(universe).seq))
    for where in [args.state] if args.state else _once(among):
        cursor, more = "", True
        while more and left > 0:
            found = store.read(
                listing.page, universe, where, args.queue or "", args.name or "", cursor, PAGE
            )
            for row in found.rows:
                if row.seq <= last and left > 0 and _has(row, args.error):
                    left -= 1
                    yield row.id
            cursor = found.cursor
            more = bool(cursor)


def _once(among: tuple[str, ...]) -> tuple[str, ...]:
    """All of them, but not what is the same under two names."""
    return tuple(where for where in among if where != "waiting")


def _has(row: TaskRow, words: str | None) -> bool:
    if row.status.redriven_by:
        return False
    said = f"{row.status.reason}\n{row.status.error}".lower()
    return not words or words.lower() in said


def _batches(tasks: Iterator[TaskId], size: int) -> Iterator[list[TaskId]]:
    batch: list[TaskId] = []
    for task in tasks:
        batch.append(task)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
