"""`holdfast why KIND ID`: prints why a subject does not move, and what to do about it.

It exits with 0 if the subject moves or has ended well, otherwise with 1.
"""

from __future__ import annotations

import argparse

from holdfast.blockers.answer import Blocker, WhyAnswer
from holdfast.blockers.explain import KINDS, explain
from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.output import emit, printable, time_text
from holdfast.cli.store_option import ONE_UNIVERSE, add_options, open_existing
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.ops import catalog_queries
from holdfast.store.api import Store


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=f"one of {', '.join(KINDS)}")
    parser.add_argument(
        "id", metavar="ID",
        help="Type/name of a world, id of a task or flow, intent hash of an effect, Type/name/KEY of a timer, "
        "or a name; a queue of effects is effects/KIND",
    )  # fmt: skip
    add_options(parser, universe=ONE_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        universe = args.id if args.kind == "universe" else universe_of(store, args, args.kind)
        answer: WhyAnswer = store.read(explain, universe, args.kind, args.id, SYSTEM.wall_ns())
    lines = [f"{answer['subject']} is {answer['state']}"]
    for blocker in answer["blockers"]:
        lines += blocker_lines(blocker)
    emit(args, {"universe": universe, **answer}, "\n".join(printable(line) for line in lines))
    return EXIT_OK if answer["moving"] or not answer["blockers"] else EXIT_FAILED


def blocker_lines(blocker: Blocker) -> list[str]:
    """Format a blocker, with its action and its runbook on further lines."""
    lines = [f"{blocker['code']}: {blocker_text(blocker)}"]
    if blocker["action"]:
        lines.append(f"    {blocker['action']}")
    return [*lines, f"    runbook: {blocker['runbook']}"]


def blocker_text(blocker: Blocker) -> str:
    since = f" since {time_text(blocker['since'])}" if blocker["since"] else ""
    if " since " in blocker["text"]:
        since = ""
    until = f" until {time_text(blocker['until'])}" if blocker["until"] else ""
    return f"{blocker['text']}{since}{until}"


def universe_of(store: Store, args: argparse.Namespace, what: str) -> str:
    """Return the given universe, or the only one of the store."""
    if args.universe:
        return str(args.universe)
    universes: list[str] = store.read(catalog_queries.universes)
    if len(universes) > 1:
        raise Invalid(what=what, why="in several universes: give --universe", universes=universes)
    if not universes and what != "run":
        raise NotFound(what="universe", url=store.url, why="no app has run on this store yet")
    return universes[0] if universes else ""
