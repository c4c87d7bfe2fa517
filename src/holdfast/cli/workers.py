"""`holdfast workers`: who runs, and whether it shall go on.

A worker that drains gives up its worlds, one after another and with a last snapshot, and gets no
more; no message is lost. Its process goes on until it is stopped.
"""

from __future__ import annotations

import argparse

from holdfast.authority import workers
from holdfast.cli.output import emit, printable, table
from holdfast.cli.target import add_options, existing
from holdfast.clock import S
from holdfast.errors import Invalid, NotFound
from holdfast.ops import inventory
from holdfast.ops.inventory import WorkerRow
from holdfast.store.api import Store, Txn


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", nargs="?", default="list", choices=("list", "drain", "undrain"),
        help="list (unless given), drain ID, undrain ID",
    )  # fmt: skip
    parser.add_argument("worker", metavar="ID", nargs="?", help="of the worker")
    parser.add_argument("--universe", metavar="U", help="where the store holds several")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    if (args.action == "list") == (args.worker is not None):
        raise Invalid(what="worker", why=f"{args.action} takes {_takes(args.action)}")
    with existing(args) as store:
        if args.action == "list":
            _list(store, args)
        else:
            _drain(store, args)
    return 0


def _list(store: Store, args: argparse.Namespace) -> None:
    rows = [row for row in store.read(inventory.crew) if args.universe in (None, row.universe)]
    now_ns = store.now_ns()
    cells = [
        (
            row.record.worker,
            row.universe,
            " ".join(row.record.roles),
            _standing(row),
            row.assigned,
            row.record.worlds,
            f"{max(now_ns - row.record.heartbeat_ns, 0) / S:.1f} s ago",
        )
        for row in rows
    ]
    header = ("worker", "universe", "roles", "is", "assigned", "hosts", "heard")
    documents = [
        {
            "worker": row.record.worker,
            "universe": row.universe,
            "incarnation": row.record.incarnation,
            "roles": list(row.record.roles),
            "live": row.live,
            "draining": row.record.draining,
            "assigned": row.assigned,
            "hosts": row.record.worlds,
            "heartbeat_ns": row.record.heartbeat_ns,
        }
        for row in rows
    ]
    emit(args, {"workers": documents}, table(header, cells) if rows else "no workers")


def _drain(store: Store, args: argparse.Namespace) -> None:
    universe = store.read(_universe_of, args.worker, args.universe)
    draining = args.action == "drain"
    record: workers.WorkerRecord = store.transact(workers.drain, universe, args.worker, draining)
    says = "gives up its worlds and gets no more" if draining else "takes worlds again"
    document = {"worker": record.worker, "universe": universe, "draining": record.draining}
    emit(args, document, printable(f"{record.worker} {says}"))


def _universe_of(txn: Txn, worker: str, universe: str | None) -> str:
    wanted = inventory.universes(txn) if universe is None else [universe]
    found = [where for where in wanted if workers.find(txn, where, worker) is not None]
    if not found:
        raise NotFound(what="worker", found=worker)
    if len(found) > 1:
        raise Invalid(what="worker", why="in several universes: say which", universes=found)
    return found[0]


def _standing(row: WorkerRow) -> str:
    if not row.live:
        return "silent"
    return "draining" if row.record.draining else "live"


def _takes(action: str) -> str:
    return "no ID" if action == "list" else "the ID of a worker"
