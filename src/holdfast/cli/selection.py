"""The skeleton of commands that process selected items: dead letters (`dead_letter_selection`) or tasks
(`task_selection`).

- Items are selected explicitly, by conditions, or with `--all`. All given conditions must hold.
- `--dry-run` prints the selected items. `--limit` bounds their number.
- The items are read in pages and processed within a rate, in small commits. Each commit is atomic and holds
  items of one page, so that rare items do not wait for each other.
- Ctrl-C stops between two commits or two pages and prints the result. The other items are unchanged, so repeating the
  command continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from holdfast.cli import EXIT_INTERRUPTED, EXIT_OK
from holdfast.cli.output import emit
from holdfast.cli.rate_limiter import InterruptHandler, RateLimiter
from holdfast.clock import SYSTEM, Clock
from holdfast.config import BATCH_MAX
from holdfast.errors import Invalid, NotFound

RATE_PER_S = 100.0
# Commits per second: enough for a smooth rate, few enough to be cheap.
COMMITS_PER_S = 10
COMMIT_MAX = 100

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass
class SelectionResult(Generic[Item, Made]):
    """The processed items, each with its result."""

    made: list[tuple[Item, Made]] = field(default_factory=list)
    # Items that were rejected, with the reason.
    refused: list[tuple[Item, str]] = field(default_factory=list)
    # Whether Ctrl-C stopped the command.
    stopped: bool = False


# -- arguments -------------------------------------------------------------------------------------


def add_explicit_items(
    parser: argparse.ArgumentParser,
    dest: str,
    *,
    metavar: str,
    type: Callable[[str], Any],
    help: str,
    all_help: str,
) -> None:
    """Add the explicit items and `--all`, which exclude each other."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(dest, metavar=metavar, type=type, nargs="*", default=[], help=help)
    group.add_argument("--all", action="store_true", help=all_help)
    parser.set_defaults(usage=parser)


def add_rate(parser: argparse.ArgumentParser, noun: str) -> None:
    parser.add_argument(
        "--rate",
        metavar="N",
        type=float,
        default=RATE_PER_S,
        help=f"process at most N {noun} per second (default {RATE_PER_S:g})",
    )


def add_dry_run(parser: argparse.ArgumentParser, noun: str) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help=f"print the selected {noun} and change nothing"
    )


def has_usage_error(
    args: argparse.Namespace, explicit: Sequence[object], metavar: str, conditions: Iterable[object]
) -> bool:
    """Return whether the selection is missing or ambiguous. Print the usage error in argparse format."""
    why = ""
    if explicit and any(conditions):
        why = f"{metavar} and conditions exclude each other"
    elif not explicit and not args.all and not any(conditions):
        why = f"nothing selected: give {metavar}, conditions, or --all"
    if why:
        args.usage.print_usage(sys.stderr)
        print(f"{args.usage.prog}: error: {why}", file=sys.stderr)
        return True
    if args.limit is not None and args.limit < 1:
        raise Invalid(what="--limit", found=args.limit, min=1)
    return False


def check_rate(args: argparse.Namespace) -> None:
    if not 0 < args.rate <= BATCH_MAX:
        raise Invalid(what="--rate", found=args.rate, min=0, max=BATCH_MAX)


def limited(pages: Iterable[list[Item]], limit: int | None) -> Iterator[list[Item]]:
    """Yield at most `limit` items in total. No page is read after the last item."""
    remaining = sys.maxsize if limit is None else limit
    for page in pages:
        yield page[:remaining]
        remaining -= len(page)
        if remaining <= 0:
            return


# -- processing ------------------------------------------------------------------------------------


def process_selected(
    pages: Iterable[list[Item]],
    operation: Callable[[list[Item]], list[Made]],
    *,
    rate_per_s: float,
    explicit: bool,
    collect_refused: bool = False,
    clock: Clock | None = None,
    progress_verb: str = "",
) -> SelectionResult[Item, Made]:
    """Process the items of the pages within the rate, in small commits, until done or interrupted.

    `explicit` and `collect_refused`: see `process_batch`. `progress_verb` is the verb in the progress line,
    such as `redriven`. Without it there is no progress line.
    """
    result: SelectionResult[Item, Made] = SelectionResult()
    size = max(1, min(COMMIT_MAX, int(rate_per_s) // COMMITS_PER_S))
    with InterruptHandler() as interrupt:
        limiter = RateLimiter(rate_per_s, clock or SYSTEM, interrupt)
        for batch in _batches(pages, size):
            if interrupt.requested or (batch and not limiter.acquire(len(batch))):
                result.stopped = True
                break
            if not batch:
                continue
            process_batch(
                operation, batch, result, explicit=explicit, collect_refused=collect_refused
            )
            if progress_verb:
                _show_progress(result, progress_verb)
    if progress_verb and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return result


def process_batch(
    operation: Callable[[list[Item]], list[Made]],
    batch: list[Item],
    result: SelectionResult[Item, Made],
    *,
    explicit: bool,
    collect_refused: bool = False,
) -> None:
    """Process one batch.

    Explicit items must all exist: an error aborts the command. Items that conditions selected are processed
    one by one after an error. An item that another command has processed meanwhile is skipped. With
    `collect_refused` an item that the operation rejects is added to `result.refused`, else it aborts.
    """
    try:
        result.made += zip(batch, operation(batch), strict=True)
        return
    except (Invalid, NotFound) as error:
        missing = isinstance(error, NotFound)
        if explicit or not (missing or collect_refused):
            raise
        if len(batch) == 1:
            if not missing:
                result.refused.append((batch[0], str(error)))
            return
    for item in batch:
        process_batch(operation, [item], result, explicit=False, collect_refused=collect_refused)


def _batches(pages: Iterable[list[Item]], size: int) -> Iterator[list[Item]]:
    """Split each page into batches. An empty page is one empty batch: the caller then checks for Ctrl-C."""
    for page in pages:
        for start in range(0, max(len(page), 1), size):
            yield page[start : start + size]


def _show_progress(result: SelectionResult[Any, Any], verb: str) -> None:
    if sys.stderr.isatty():
        refused = f", {len(result.refused):,} refused" if result.refused else ""
        line = f"\r{verb} {len(result.made):,}{refused}; Ctrl-C to stop"
        print(line, end="", file=sys.stderr, flush=True)


# -- output ----------------------------------------------------------------------------------------


def print_result(
    args: argparse.Namespace,
    result: SelectionResult[Any, Any],
    document: dict[str, Any],
    lines: list[str],
    *,
    stopped_text: str,
    empty_text: str,
) -> int:
    """Print the processed items and whether Ctrl-C stopped the command. Return the exit code."""
    if result.stopped:
        lines = [*lines, f"stopped: {stopped_text}; repeat the command to continue"]
    emit(args, document | {"stopped": result.stopped}, "\n".join(lines) or empty_text)
    return EXIT_INTERRUPTED if result.stopped else EXIT_OK
