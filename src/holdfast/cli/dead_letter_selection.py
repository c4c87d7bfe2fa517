"""The selection of dead letters for a command: by seq, or by error code, error text, world, time of death.

Only letters that were dead at the start are selected. A letter that dies again during the command is not.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from holdfast.cli import EXIT_OK
from holdfast.cli import selection as selections
from holdfast.cli.output import emit
from holdfast.cli.selection import SelectionResult
from holdfast.clock import Clock, S
from holdfast.durable import queue
from holdfast.durable.item import keys_of
from holdfast.durable.queue import DeadLetter
from holdfast.errors import Invalid
from holdfast.ops import catalog_queries
from holdfast.store.api import Store, Txn

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
        help="only dead letters since TIME, which is an age such as 2h or 30m, or a UTC time",
    )
    parser.add_argument(
        "--until",
        metavar="TIME",
        help="only dead letters before TIME, which is an age such as 2h, or a UTC time",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select dead letters and limit the rate."""
    selections.add_explicit_items(
        parser,
        "seqs",
        metavar="SEQ",
        type=int,
        help="seqs of dead letters",
        all_help="all current dead letters",
    )
    add_conditions(parser)
    selections.add_rate(parser, "dead letters")
    parser.add_argument(
        "--limit", metavar="N", type=int, help="process at most N dead letters in total"
    )
    selections.add_dry_run(parser, "dead letters")


def usage_error(args: argparse.Namespace) -> bool:
    conditions = [args.code, args.error, args.world, args.since, args.until]
    if selections.has_usage_error(args, args.seqs, "SEQ", conditions):
        return True
    selections.check_rate(args)
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
    store: Store, name: str, conditions: LetterSelection, *, after: int = 0
) -> Iterator[list[DeadLetter]]:
    """Yield pages of the selected letters by seq: letters that were dead at the start and still are.

    A page may be empty.
    """
    began_ns, end = store.read(_time_and_last_seq, name)
    last = after
    while letters := store.read(queue.list_dead, name, last, PAGE):
        last = letters[-1].seq
        yield [
            letter
            for letter in letters
            if letter.died_ns <= began_ns and conditions.matches(letter)
        ]
        if last >= end:
            return


def redrive_selected(
    store: Store,
    name: str,
    args: argparse.Namespace,
    operation: Callable[[list[int]], list[T]],
    *,
    selection: LetterSelection,
    clock: Clock | None = None,
    verb: str = "redriven",
) -> SelectionResult[int, T]:
    """Process the selected letters: redrive or drop them. `verb` names the operation in the progress line."""
    return selections.process_selected(
        _selected_seqs(store, name, args, selection),
        operation,
        rate_per_s=args.rate,
        explicit=bool(args.seqs),
        collect_refused=True,
        clock=clock,
        progress_verb=verb,
    )


def dry_run(
    store: Store,
    name: str,
    args: argparse.Namespace,
    conditions: LetterSelection,
    *,
    key: str = "would_redrive",
    verb: str = "redriven",
) -> int:
    """Print the selected dead letters without processing them."""
    seqs = list(chain.from_iterable(_selected_seqs(store, name, args, conditions)))
    text = "\n".join([*map(str, seqs), f"{len(seqs):,} would be {verb} (dry run)"])
    emit(args, {"queue": name, key: seqs}, text)
    return EXIT_OK


def print_result(
    args: argparse.Namespace,
    name: str,
    result: SelectionResult[int, Any],
    document: dict[str, Any],
    lines: list[str],
) -> int:
    """Print the processed and the rejected dead letters, and whether Ctrl-C stopped the command."""
    refused = [{"dead": seq, "why": why} for seq, why in result.refused]
    return selections.print_result(
        args,
        result,
        document | {"refused": refused},
        lines + [f"{seq} stays dead: {why}" for seq, why in result.refused],
        stopped_text="letters not listed are still dead",
        empty_text=f"no dead letters in {name}",
    )


def _selected_seqs(
    store: Store, name: str, args: argparse.Namespace, conditions: LetterSelection
) -> Iterator[list[int]]:
    """Yield pages of at most `--limit` selected seqs."""
    pages = (
        [args.seqs]
        if args.seqs
        else ([letter.seq for letter in page] for page in selected_letters(store, name, conditions))
    )
    return selections.limited(pages, args.limit)


def _time_and_last_seq(txn: Txn, name: str) -> tuple[int, int]:
    return txn.now_ns, txn.count(keys_of(name).last_seq)
