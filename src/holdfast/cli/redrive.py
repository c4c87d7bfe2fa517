"""The redrive of dead letters: selection, rate limit and interruption.

- Dead letters are selected by seq, or by conditions: error code, error text, world, time of death. All
  given conditions must hold.
- At most `--rate` dead letters per second are redriven, in small atomic commits.
- Ctrl-C stops between two commits and prints the result. Remaining letters are still dead, so repeating the
  command continues.

Only letters that were dead at the start are selected. A letter that dies again during the command is not.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import BATCH_MAX
from holdfast.durable import queue
from holdfast.durable.item import keys_of
from holdfast.durable.queue import DeadLetter
from holdfast.errors import Invalid, NotFound
from holdfast.ops import catalog_queries
from holdfast.store.api import Store, Txn

RATE_PER_S = 100.0
# Commits per second: enough for a smooth rate, few enough to be cheap.
COMMITS_PER_S = 10
PAGE = 100

_AGO = re.compile(r"(\d{1,9})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

T = TypeVar("T")


class LetterSelection(NamedTuple):
    """Conditions on a dead letter; an empty condition matches all."""

    code: str = ""
    error_text: str = ""
    group: str = ""
    since_ns: int = 0
    until_ns: int = 0

    def matches(self, letter: DeadLetter) -> bool:
        return (
            self.code in ("", letter.code)
            and self.error_text.lower() in letter.error.lower()
            and self.group in ("", letter.group)
            and letter.died_ns >= self.since_ns
            and (not self.until_ns or letter.died_ns < self.until_ns)
        )


@dataclass
class RedriveResult(Generic[T]):
    """The result of a redrive: (seq of the dead letter, its replacement) pairs."""

    made: list[tuple[int, T]] = field(default_factory=list)
    # Letters that were rejected, with the reason.
    refused: list[tuple[int, str]] = field(default_factory=list)
    stopped: bool = False


def add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--code", metavar="CODE", help="only dead letters with this error code")
    parser.add_argument(
        "--error", metavar="TEXT", help="only dead letters whose error contains TEXT"
    )
    parser.add_argument(
        "--world", metavar="WORLD", help="only dead letters of this world (Type/name or id)"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="only letters that died at or after TIME: 2h or 30m ago, or a UTC time",
    )
    parser.add_argument(
        "--until", metavar="TIME", help="only letters that died before TIME: 2h ago, or a UTC time"
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select dead letters and limit the rate."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "seqs", metavar="SEQ", type=int, nargs="*", default=[], help="seqs of dead letters"
    )
    group.add_argument("--all", action="store_true", help="all current dead letters")
    add_conditions(parser)
    parser.add_argument(
        "--rate",
        metavar="N",
        type=float,
        default=RATE_PER_S,
        help=f"process at most N dead letters per second (default {RATE_PER_S:g})",
    )
    parser.add_argument(
        "--limit", metavar="N", type=int, help="process at most N dead letters in total"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the selected dead letters and change nothing"
    )
    parser.set_defaults(usage=parser)


def usage_error(args: argparse.Namespace) -> bool:
    """Whether the selection is missing or ambiguous. Prints the usage error in argparse format."""
    conditions = [args.code, args.error, args.world, args.since, args.until]
    why = ""
    if args.seqs and any(conditions):
        why = "SEQ and conditions exclude each other"
    elif not args.seqs and not args.all and not any(conditions):
        why = "nothing selected: give SEQ, conditions, or --all"
    if why:
        args.usage.print_usage(sys.stderr)
        print(f"{args.usage.prog}: error: {why}", file=sys.stderr)
        return True
    if not 0 < args.rate <= BATCH_MAX:
        raise Invalid(what="--rate", found=args.rate, min=0, max=BATCH_MAX)
    if args.limit is not None and args.limit < 1:
        raise Invalid(what="--limit", found=args.limit, min=1)
    return False


def selection_of(
    store: Store, args: argparse.Namespace, universe: str | None = None
) -> LetterSelection:
    now_ns = store.now_ns()
    group = ""
    if args.world:
        group = store.read(catalog_queries.resolve, args.world, universe).world_id
    return LetterSelection(
        args.code or "",
        args.error or "",
        group,
        parse_time_ns("--since", args.since, now_ns) if args.since else 0,
        parse_time_ns("--until", args.until, now_ns) if args.until else 0,
    )


def parse_time_ns(what: str, text: str, now_ns: int) -> int:
    """Parse a time: `2h` means two hours ago, else an ISO date with optional time, by default in UTC."""
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return max(now_ns - int(ago[1]) * _UNIT_S[ago[2]] * S, 0)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Invalid(
            what=what, found=text[:40], expected="2h, 30m, 7d or 2026-11-15 12:00"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * S)


def selected_letters(
    store: Store, name: str, selection: LetterSelection, *, after: int = 0
) -> Iterator[list[DeadLetter]]:
    """Yield pages of the selected letters by seq: letters that were dead at the start and still are."""
    began_ns, end = store.read(_time_and_last_seq, name)
    last = after
    while letters := store.read(queue.list_dead, name, last, PAGE):
        last = letters[-1].seq
        matching = [
            letter for letter in letters if letter.died_ns <= began_ns and selection.matches(letter)
        ]
        if matching:
            yield matching
        if last >= end:
            return


def redrive_selected(
    store: Store,
    name: str,
    args: argparse.Namespace,
    operation: Callable[[list[int]], list[T]],
    *,
    selection: LetterSelection,
    clock: Clock = SYSTEM,
    verb: str = "redriven",
) -> RedriveResult[T]:
    """Redrive the selected letters within the rate, in small commits, until done or interrupted.

    `done` is the verb in the progress line, such as `redriven` or `dropped`.
    """
    result: RedriveResult[T] = RedriveResult()
    with InterruptHandler() as interrupt:
        limiter = RateLimiter(args.rate, clock, interrupt)
        size = max(1, min(PAGE, int(args.rate) // COMMITS_PER_S))
        for seqs in _batches(store, name, args, selection, size):
            if not limiter.acquire(len(seqs)):
                result.stopped = True
                break
            if args.seqs:
                # Explicit seqs must all exist; an error aborts the command.
                result.made += zip(seqs, operation(seqs), strict=True)
            else:
                _redrive_tolerant(operation, seqs, result)
            _show_progress(result, verb)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return result


# -- inside --------------------------------------------------------------------------------------


def _time_and_last_seq(txn: Txn, name: str) -> tuple[int, int]:
    return txn.now_ns, txn.count(keys_of(name).last_seq)


def _batches(
    store: Store, name: str, args: argparse.Namespace, selection: LetterSelection, size: int
) -> Iterator[list[int]]:
    remaining = args.limit if args.limit is not None else sys.maxsize
    pages: Any = [args.seqs]
    if not args.seqs:
        pages = (
            [letter.seq for letter in page] for page in selected_letters(store, name, selection)
        )
    for page in pages:
        for start in range(0, len(page), size):
            batch = page[start : start + min(size, remaining)]
            if batch:
                remaining -= len(batch)
                yield batch
            if remaining <= 0:
                return


def _redrive_tolerant(
    operation: Callable[[list[int]], list[T]], seqs: list[int], result: RedriveResult[T]
) -> None:
    """Redrive letters that conditions selected. A letter that is rejected does not stop the rest."""
    try:
        result.made += zip(seqs, operation(seqs), strict=True)
        return
    except (Invalid, NotFound) as error:
        if len(seqs) == 1:
            # NotFound: another command redrove it in the meantime.
            if not isinstance(error, NotFound):
                result.refused.append((seqs[0], str(error)))
            return
    for seq in seqs:
        _redrive_tolerant(operation, [seq], result)


def _show_progress(result: RedriveResult[Any], verb: str) -> None:
    if sys.stderr.isatty():
        refused = f", {len(result.refused):,} refused" if result.refused else ""
        line = f"\r{verb} {len(result.made):,}{refused}; Ctrl-C to stop"
        print(line, end="", file=sys.stderr, flush=True)


class RateLimiter:
    """A rate limiter: n items are admitted when the items before them are due."""

    def __init__(self, rate_per_s: float, clock: Clock, interrupt: InterruptHandler) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._interrupt = interrupt
        self._next_due_ns: int | None = None

    def acquire(self, n: int) -> bool:
        """Wait until the next n items are due; return False after Ctrl-C."""
        now_ns = self._clock.mono_ns()
        due_ns = now_ns if self._next_due_ns is None else max(self._next_due_ns, now_ns)
        if due_ns > now_ns and not self._interrupt.requested:
            self._interrupt.wait(lambda: self._clock.sleep((due_ns - now_ns) / S))
        self._next_due_ns = due_ns + int(n / self._rate_per_s * S)
        return not self._interrupt.requested


class InterruptHandler:
    """A SIGINT handler: Ctrl-C ends a wait at once, but lets a running commit finish."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False
        self._previous_handler: Any = None

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)

    def wait(self, wait: Callable[[], None]) -> None:
        self._waiting = True
        try:
            wait()
        except KeyboardInterrupt:
            self.requested = True
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._waiting:
            raise KeyboardInterrupt
