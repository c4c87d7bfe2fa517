"""`holdfast dispatch`: prompts on their way to panes, what became of them, and where the leader sits.

An agent that was dispatched to says with `deliver` that it has the text, or with `fail` that it will
not: both take the mark behind the text (`[hf:…]`), or the request's id.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from holdfast.adapters.dispatching import name_leader
from holdfast.authority import dispatch_log, panes, replay
from holdfast.authority.dispatch import DispatchRecord, DispatchStatus, mark_of
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import WorkerCli
from holdfast.authority.panes import Pane
from holdfast.authority.replay import ReplayState
from holdfast.cli import EXIT_OK
from holdfast.cli.effects import add_universe
from holdfast.cli.output import emit, fields, printable, table, time_text
from holdfast.cli.target import existing
from holdfast.errors import Invalid, NotFound
from holdfast.ops import inventory
from holdfast.store.api import Store, Txn

LIST_MAX = 100


class NoPane(Invalid):
    hint = "name a pane, or run this inside tmux"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="how many are in each state; of one state, which")
    states = [status.value for status in DispatchStatus]
    listed.add_argument("--status", choices=states, help="those in this state, longest there first")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    add_universe(listed)

    for action, does in (
        ("show", "one request"),
        ("deliver", "the agent has it"),
        ("fail", "the agent does not do it"),
    ):
        one = actions.add_parser(action, help=does)
        one.add_argument("request", metavar="REQUEST", help="its mark, or its id")
        if action == "fail":
            one.add_argument("--reason", metavar="TEXT", required=True, help="why")
        add_universe(one)

    leader = actions.add_parser(
        "leader", help="the pane that `leader` means: show it, name it, or take the name back"
    )
    leader.add_argument("pane", metavar="PANE", nargs="?", help="%%3, session:window.pane, or here")
    leader.add_argument("--cli", default=WorkerCli.CLAUDE.value, help="what runs there (claude)")
    leader.add_argument("--socket", metavar="S", default="", help="of the tmux server, if another")
    leader.add_argument("--forget", action="store_true", help="nobody leads from a pane any more")
    add_universe(leader)

    rewound = actions.add_parser("rewind", help="go over the log again; nothing is told twice")
    rewound.add_argument("height", metavar="HEIGHT", type=int, help="after which to begin")
    add_universe(rewound)


def run(args: argparse.Namespace) -> int:
    with existing(args) as store:
        args.universe = args.universe or store.read(_only_universe)
        _ACTIONS[args.action](store, args)
    return EXIT_OK


def _list(store: Store, args: argparse.Namespace) -> None:
    counts = store.read(dispatch_log.backlog, args.universe)
    backlog = {name: getattr(counts, name) for name in counts.__struct_fields__}
    document: dict[str, Any] = {"universe": args.universe, "backlog": backlog}
    if args.status is None:
        emit(args, document, table(list(backlog), [list(backlog.values())]))
        return
    status = DispatchStatus(args.status)
    found = store.read(dispatch_log.listed, args.universe, status, None, args.limit)
    document["dispatches"] = [_document(one) for one in found]
    header = ("mark", "target", "since", "tries", "reason", "world")
    rows = [
        (
            mark_of(one.request_id),
            one.target,
            time_text(one.since_ns),
            one.tries,
            one.reason or None,
            one.metadata.get("world"),
        )
        for one in found
    ]
    emit(args, document, table(header, rows) if rows else f"none {args.status}")


def _show(store: Store, args: argparse.Namespace) -> None:
    _tell(args, store.read(_meant, args.universe, args.request))


def _deliver(store: Store, args: argparse.Namespace) -> None:
    found = store.read(_meant, args.universe, args.request)
    _tell(args, DispatchLog(store, args.universe).delivered(found.request_id))


def _fail(store: Store, args: argparse.Namespace) -> None:
    found = store.read(_meant, args.universe, args.request)
    _tell(args, DispatchLog(store, args.universe).failed(found.request_id, args.reason))


def _leader(store: Store, args: argparse.Namespace) -> None:
    if args.forget:
        if args.pane is not None:
            raise Invalid(what="leader", why="a pane, or --forget")
        store.transact(panes.clear_leader, args.universe)
    elif args.pane is not None:
        pane = _here() if args.pane == "here" else args.pane
        name_leader(store, args.universe, pane=pane, cli=args.cli, socket=args.socket)
    told = store.read(_standing, args.universe)
    shown = [(name, value) for name, value in told.items() if value is not None]
    emit(args, told, fields(shown) if told["pane"] else "no leader's pane was named")


def _rewind(store: Store, args: argparse.Namespace) -> None:
    store.transact(replay.rewind, args.universe, args.height)
    told = store.read(_standing, args.universe)
    emit(args, told, fields([(name, value) for name, value in told.items() if value is not None]))


_ACTIONS = {
    "list": _list,
    "show": _show,
    "deliver": _deliver,
    "fail": _fail,
    "leader": _leader,
    "rewind": _rewind,
}


def _only_universe(txn: Txn) -> str:
    found = inventory.universes(txn)
    if not found:
        raise NotFound(what="universe", why="nobody has run an app on this store yet")
    if len(found) > 1:
        raise Invalid(what="universe", why="several: say which", universes=found)
    return found[0]


def _meant(txn: Txn, universe: str, ref: str) -> DispatchRecord:
    mark = ref.strip("[]").removeprefix("hf:")
    found = dispatch_log.find(txn, universe, ref) or dispatch_log.by_mark(txn, universe, mark)
    if found is None:
        raise NotFound(what="dispatch", universe=universe, found=ref)
    return found


def _here() -> str:
    pane = os.environ.get("TMUX_PANE")
    if not pane:
        raise NoPane(what="pane", found="here", why="this is not inside tmux")
    return pane


def _standing(txn: Txn, universe: str) -> dict[str, Any]:
    """Where the leader sits, how far it has been told, and why no further."""
    pane: Pane | None = panes.leader(txn, universe)
    state: ReplayState | None = replay.read(txn, universe)
    why = None if state is None else state.deferred
    return {
        "universe": universe,
        "pane": None if pane is None else pane.target,
        "cli": None if pane is None else pane.cli,
        "socket": None if pane is None else pane.socket or None,
        "cursor": None if state is None else state.cursor,
        "pending": replay.pending(txn, universe),
        "deferred": None if why is None else f"{why.code}: {why.text}",
    }


def _tell(args: argparse.Namespace, record: DispatchRecord) -> None:
    document = _document(record)
    pairs: list[tuple[str, object]] = []
    for name, value in document.items():
        if value in (None, "", {}, False):
            continue
        if name.endswith("_at"):
            pairs.append((name, time_text(value)))
        elif name == "metadata":
            pairs += [(printable(key), told) for key, told in value.items()]
        else:
            pairs.append((name, value))
    emit(args, document, fields(pairs))


def _document(record: DispatchRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "mark": mark_of(record.request_id),
        "target": record.target,
        "status": record.status.value,
        "created_at": record.created_at,
        "notified_at": record.notified_at,
        "delivered_at": record.delivered_at,
        "failed_at": record.failed_at,
        "reason": record.reason,
        "tries": record.tries,
        "deferred": record.deferred,
        "metadata": record.metadata,
    }
