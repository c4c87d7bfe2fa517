"""`holdfast limits`: shows and sets the load limits of a universe. A change applies at once, to running processes too."""

from __future__ import annotations

import argparse

import msgspec

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, table
from holdfast.cli.store_option import add_options, open_existing
from holdfast.cli.why import universe_of
from holdfast.errors import Invalid
from holdfast.ops import audit, limit_documents
from holdfast.store.api import Store, Txn
from holdfast.workers import limit_settings

# The actor of audit entries of this command.
ACTOR = "command line"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    shown = actions.add_parser("show", help="show the limits and their present figures")
    changed = actions.add_parser("set", help="set limits; 0 removes one")
    changed.add_argument(
        "limits", metavar="NAME=N", nargs="+",
        help=f"{', '.join(limit_settings.SINGLE)}, queue:NAME or effect_kind:NAME, and its limit",
    )  # fmt: skip
    for action in (shown, changed):
        action.add_argument("--universe", metavar="U", help="universe, if the store has several")
        add_options(action)


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        universe = universe_of(store, args, "limits")
        if args.action == "set":
            changes = dict(_parse(text) for text in args.limits)
            store.transact(_change, universe, changes, " ".join(args.limits))
        _show(store, universe, args)
    return EXIT_OK


def _parse(text: str) -> tuple[str, int]:
    name, _, value = text.rpartition("=")
    if not name or not value.isascii() or not value.isdigit():
        raise Invalid(what="limit", found=text[:64], expected="NAME=N, such as tasks=100000")
    return name, int(value)


def _change(txn: Txn, universe: str, changes: dict[str, int], detail: str) -> None:
    limit_settings.change_limits(txn, universe, changes)
    audit.record(txn, universe, ACTOR, "limits.set", f"universe/{universe}", detail)


def _show(store: Store, universe: str, args: argparse.Namespace) -> None:
    document = store.read(limit_documents.read_limits, universe)
    cells = [(one.limit, one.limit_max, one.now) for one in document.limits]
    text = table(("limit", "at most", "now"), cells) if cells else "no limits"
    emit(args, msgspec.to_builtins(document), text)
