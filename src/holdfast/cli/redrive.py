"""Another try for dead letters: which of them, and how fast.

- They are named by number, or chosen by what they died of (a code, words of the error), whose they
  are, and when they died. Every condition that is given must hold.
- No more than `--rate` a second. A commit redrives a handful, all of it or nothing.
- Ctrl-C ends it between two commits, and it says what it has done; what is left is still dead, so the
  same command goes on from there.

Chosen are letters that were dead when the command began: what dies again meanwhile is left alone.
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
from holdfast.durable.queue import Dead
from holdfast.errors import Invalid, NotFound
from holdfast.ops import inventory
from holdfast.store.api import Store, Txn

RATE_PER_S = 100.0
# So many commits a second keep the rate smooth without costing more than the work.
COMMITS_PER_S = 10
PAGE = 100

_AGO = re.compile(r"(\d{1,9})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

T = TypeVar("T")


class Selection(NamedTuple):
    """Conditions on a letter; empty ones hold for all."""

    code: str = ""
    words: str = ""
    group: str = ""
    since_ns: int = 0
    until_ns: int = 0

    def holds(self, letter: Dead) -> bool:
        return (
            self.code in ("", letter.code)
            and self.words.lower() in letter.error.lower()
            and self.group in ("", letter.group)
            and letter.died_ns >= self.since_ns
            and (not self.until_ns or letter.died_ns < self.until_ns)
        )


@dataclass
class Driven(Generic[T]):
    """What was redriven: the letter's number, and what is in its place."""

    made: list[tuple[int, T]] = field(default_factory=list)
    # Letters that could not be, and why.
    refused: list[tuple[int, str]] = field(default_factory=list)
    stopped: bool = False


def add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--code", metavar="CODE", help="those that died of this")
    parser.add_argument("--error", metavar="TEXT", help="those whose error has this in it")
    parser.add_argument("--world", metavar="WORLD", help="those of this world: Type/name, or an id")
    parser.add_argument("--since", metavar="TIME", help="died since: 2h, 30m, or a time in UTC")
    parser.add_argument("--until", metavar="TIME", help="died before: 2h, 30m, or a time in UTC")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Which dead letters, and how fast."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("seqs", metavar="SEQ", type=int, nargs="*", default=[])
    which.add_argument("--all", action="store_true", help="all that are dead now")
    add_conditions(parser)
    parser.add_argument(
        "--rate", metavar="N", type=float, default=RATE_PER_S, help=f"a second ({RATE_PER_S:g})"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="stop after so many")
    parser.add_argument("--dry-run", action="store_true", help="only say which they are")
    parser.set_defaults(usage=parser)


def misused(args: argparse.Namespace) -> bool:
    """Whether it does not say which, or says so twice; then usage was told, as argparse tells it."""
    conditions = [args.code, args.error, args.world, args.since, args.until]
    why = ""
    if args.seqs and any(conditions):
        why = "numbers, or conditions"
    elif not args.seqs and not args.all and not any(conditions):
        why = "say which: numbers, conditions, or --all"
    if why:
        args.usage.print_usage(sys.stderr)
        print(f"{args.usage.prog}: error: {why}", file=sys.stderr)
        return True
    if not 0 < args.rate <= BATCH_MAX:
        raise Invalid(what="--rate", found=args.rate, min=0, max=BATCH_MAX)
    if args.limit is not None and args.limit < 1:
        raise Invalid(what="--limit", found=args.limit, min=1)
    return False


def selection_of(store: Store, args: argparse.Namespace, universe: str | None = None) -> Selection:
    now_ns = store.now_ns()
    group = ""
    if args.world:
        group = store.read(inventory.resolve, args.world, universe).world_id
    return Selection(
        args.code or "",
        args.error or "",
        group,
        moment_ns("--since", args.since, now_ns) if args.since else 0,
        moment_ns("--until", args.until, now_ns) if args.until else 0,
    )


def moment_ns(what: str, text: str, now_ns: int) -> int:
    """`2h` is two hours ago; else a date, with or without a time, in UTC unless it says otherwise."""
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


def chosen(
    store: Store, name: str, selection: Selection, *, after: int = 0
) -> Iterator[list[Dead]]:
    """Letters that were dead at the first step and are now, by number, a page at a time."""
    began_ns, end = store.read(_now, name)
    last = after
    while letters := store.read(queue.dead, name, last, PAGE):
        last = letters[-1].seq
        found = [
            letter for letter in letters if letter.died_ns <= began_ns and selection.holds(letter)
        ]
        if found:
            yield found
        if last >= end:
            return


def drive(
    store: Store,
    name: str,
    args: argparse.Namespace,
    again: Callable[[list[int]], list[T]],
    *,
    selection: Selection,
    clock: Clock = SYSTEM,
    done: str = "redriven",
) -> Driven[T]:
    """Redrive what is meant, within the rate, a few to a commit, until done or interrupted.

    `done` is what becomes of them, as the terminal is told.
    """
    driven: Driven[T] = Driven()
    with Interrupt() as interrupt:
        pace = Pace(args.rate, clock, interrupt)
        size = max(1, min(PAGE, int(args.rate) // COMMITS_PER_S))
        for seqs in _batches(store, name, args, selection, size):
            if not pace.admits(len(seqs)):
                driven.stopped = True
                break
            if args.seqs:
                # Named one by one, they are all there or it is a mistake.
                driven.made += zip(seqs, again(seqs), strict=True)
            else:
                _willing(again, seqs, driven)
            _tell(driven, done)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return driven


# -- inside --------------------------------------------------------------------------------------


def _now(txn: Txn, name: str) -> tuple[int, int]:
    return txn.now_ns, txn.count(keys_of(name).last_seq)


def _batches(
    store: Store, name: str, args: argparse.Namespace, selection: Selection, size: int
) -> Iterator[list[int]]:
    left = args.limit if args.limit is not None else sys.maxsize
    pages: Any = [args.seqs]
    if not args.seqs:
        pages = ([letter.seq for letter in page] for page in chosen(store, name, selection))
    for page in pages:
        for start in range(0, len(page), size):
            batch = page[start : start + min(size, left)]
            if batch:
                left -= len(batch)
                yield batch
            if left <= 0:
                return


def _willing(again: Callable[[list[int]], list[T]], seqs: list[int], driven: Driven[T]) -> None:
    """Of letters that were chosen by a condition, one that cannot be redriven stops no other."""
    try:
        driven.made += zip(seqs, again(seqs), strict=True)
        return
    except (Invalid, NotFound) as error:
        if len(seqs) == 1:
            # Gone meanwhile: somebody else has redriven it.
            if not isinstance(error, NotFound):
                driven.refused.append((seqs[0], str(error)))
            return
    for seq in seqs:
        _willing(again, [seq], driven)


def _tell(driven: Driven[Any], done: str) -> None:
    if sys.stderr.isatty():
        refused = f", {len(driven.refused):,} refused" if driven.refused else ""
        said = f"\r{done} {len(driven.made):,}{refused}; Ctrl-C stops it"
        print(said, end="", file=sys.stderr, flush=True)


class Pace:
    """When the next may begin: the n-th not before n - 1 of them are due."""

    def __init__(self, rate_per_s: float, clock: Clock, interrupt: Interrupt) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._interrupt = interrupt
        self._due_ns: int | None = None

    def admits(self, n: int) -> bool:
        """Wait for the time of the next n; False when told to stop instead."""
        now_ns = self._clock.mono_ns()
        due_ns = now_ns if self._due_ns is None else max(self._due_ns, now_ns)
        if due_ns > now_ns and not self._interrupt.asked:
            self._interrupt.rest(lambda: self._clock.sleep((due_ns - now_ns) / S))
        self._due_ns = due_ns + int(n / self._rate_per_s * S)
        return not self._interrupt.asked


class Interrupt:
    """Ctrl-C ends a wait at once, and a commit not before it is done."""

    def __init__(self) -> None:
        self.asked = False
        self._resting = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def rest(self, wait: Callable[[], None]) -> None:
        self._resting = True
        try:
            wait()
        except KeyboardInterrupt:
            self.asked = True
        finally:
            self._resting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._resting:
            raise KeyboardInterrupt
