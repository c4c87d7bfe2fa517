"""`holdfast dispatch`: lists and controls prompts to tmux panes, and sets the leader's pane.

An agent confirms a prompt with `deliver` or rejects it with `fail`. Both take the mark at the end of the
prompt (`[hf:…]`) or the request id.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import msgspec

from holdfast.adapters.dispatch_protocol import set_leader_pane
from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, field_lines, printable, table, time_text
from holdfast.cli.store_option import ONE_UNIVERSE, add_options, open_existing
from holdfast.dispatch import leader_pane, log, notifications
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import WorkerCli
from holdfast.dispatch.request import DispatchRecord, DispatchStatus, mark_of
from holdfast.errors import Invalid, NotFound
from holdfast.ops import catalog_queries, leadership_documents
from holdfast.ops.leadership_documents import find_dispatch
from holdfast.store.api import Store, Txn

LIST_MAX = 100


class NoPane(Invalid):
    hint = "give a pane, or run this command inside tmux"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser(
        "list", help="count requests by status, or list the requests with one status"
    )
    states = [status.value for status in DispatchStatus]
    listed.add_argument(
        "--status", choices=states, help="list the requests with this status, oldest first"
    )
    listed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N requests (default {LIST_MAX})",
    )
    add_options(listed, universe=ONE_UNIVERSE)

    for action, help_text in (
        ("show", "show one request"),
        ("deliver", "confirm that the agent received the prompt"),
        ("fail", "record that the agent rejected the prompt"),
    ):
        subparser = actions.add_parser(action, help=help_text)
        subparser.add_argument("request", metavar="REQUEST", help="mark or id of the request")
        if action == "fail":
            subparser.add_argument(
                "--reason", metavar="TEXT", required=True, help="reason of the rejection"
            )
        add_options(subparser, universe=ONE_UNIVERSE)

    leader = actions.add_parser(
        "leader", help="show, set or clear the tmux pane of the target `leader`"
    )
    leader.add_argument(
        "pane",
        metavar="PANE",
        nargs="?",
        help="pane to set: %%3, session:window.pane, or `here`; omit to show the current one",
    )
    leader.add_argument(
        "--cli", default=WorkerCli.CLAUDE.value, help="program in the pane (default claude)"
    )
    leader.add_argument(
        "--socket", metavar="S", default="", help="socket of the tmux server, if not the default"
    )
    leader.add_argument("--forget", action="store_true", help="clear the leader's pane")
    add_options(leader, universe=ONE_UNIVERSE)

    rewound = actions.add_parser(
        "rewind", help="re-read the log from a height; sent notifications are not repeated"
    )
    rewound.add_argument(
        "height", metavar="HEIGHT", type=int, help="start after this height of the log"
    )
    add_options(rewound, universe=ONE_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        args.universe = args.universe or store.read(_only_universe)
        _ACTIONS[args.action](store, args)
    return EXIT_OK


def _list(store: Store, args: argparse.Namespace) -> None:
    backlog = store.read(leadership_documents.read_backlog, args.universe)
    document: dict[str, Any] = {"universe": args.universe, "backlog": backlog}
    if args.status is None:
        emit(args, document, table(list(backlog), [list(backlog.values())]))
        return
    status = DispatchStatus(args.status)
    records = store.read(log.list_by_status, args.universe, status, None, args.limit)
    document["dispatches"] = [_document(record) for record in records]
    header = ("mark", "target", "since", "tries", "reason", "world")
    rows = [
        (
            mark_of(record.request_id),
            record.target,
            time_text(record.since_ns),
            record.tries,
            record.reason or None,
            record.metadata.get("world"),
        )
        for record in records
    ]
    emit(args, document, table(header, rows) if rows else f"none {args.status}")


def _show(store: Store, args: argparse.Namespace) -> None:
    _print_record(args, store.read(find_dispatch, args.universe, args.request))


def _deliver(store: Store, args: argparse.Namespace) -> None:
    record = store.read(find_dispatch, args.universe, args.request)
    _print_record(args, DispatchLog(store, args.universe).delivered(record.request_id))


def _fail(store: Store, args: argparse.Namespace) -> None:
    record = store.read(find_dispatch, args.universe, args.request)
    _print_record(args, DispatchLog(store, args.universe).failed(record.request_id, args.reason))


def _leader(store: Store, args: argparse.Namespace) -> None:
    if args.forget:
        if args.pane is not None:
            raise Invalid(what="leader", why="PANE and --forget exclude each other")
        store.transact(leader_pane.clear_leader, args.universe)
    elif args.pane is not None:
        pane = _current_pane() if args.pane == "here" else args.pane
        set_leader_pane(store, args.universe, pane=pane, cli=args.cli, socket=args.socket)
    state = store.read(_leader_state, args.universe)
    shown = [(name, value) for name, value in state.items() if value is not None]
    emit(args, state, field_lines(shown) if state["pane"] else "no leader's pane is set")


def _rewind(store: Store, args: argparse.Namespace) -> None:
    store.transact(notifications.rewind, args.universe, args.height)
    state = store.read(_leader_state, args.universe)
    emit(
        args,
        state,
        field_lines([(name, value) for name, value in state.items() if value is not None]),
    )


_ACTIONS = {
    "list": _list,
    "show": _show,
    "deliver": _deliver,
    "fail": _fail,
    "leader": _leader,
    "rewind": _rewind,
}


def _only_universe(txn: Txn) -> str:
    universes = catalog_queries.universes(txn)
    if not universes:
        raise NotFound(what="universe", why="no app has run on this store yet")
    if len(universes) > 1:
        raise Invalid(
            what="universe", why="several universes: give --universe", universes=universes
        )
    return universes[0]


def _current_pane() -> str:
    pane = os.environ.get("TMUX_PANE")
    if not pane:
        raise NoPane(what="pane", found="here", why="this command does not run inside tmux")
    return pane


def _leader_state(txn: Txn, universe: str) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(
        leadership_documents.read_leader_pane(txn, universe)
    )
    return document


def _print_record(args: argparse.Namespace, record: DispatchRecord) -> None:
    document = _document(record)
    pairs: list[tuple[str, object]] = []
    for name, value in document.items():
        if value in (None, "", {}, False):
            continue
        if name.endswith("_at"):
            pairs.append((name, time_text(value)))
        elif name == "metadata":
            pairs += [(printable(key), item) for key, item in value.items()]
        else:
            pairs.append((name, value))
    emit(args, document, field_lines(pairs))


def _document(record: DispatchRecord) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(leadership_documents.dispatch_document(record))
    return document
