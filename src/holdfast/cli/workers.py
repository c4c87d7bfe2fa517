"""`holdfast workers`: lists, drains and undrains workers.

A draining worker releases its worlds one by one, each with a final snapshot, finishes its running tasks, and gets no
new ones. A task worker learns it by its next heartbeat, within three seconds. No message and no task is lost. Its
process runs until it is stopped.
"""

from __future__ import annotations

import argparse

import msgspec

from holdfast.cli.output import emit, printable, table
from holdfast.cli.store_option import ONE_UNIVERSE, add_options, open_existing
from holdfast.clock import S
from holdfast.errors import Invalid, NotFound
from holdfast.leadership import worker_registry
from holdfast.ops import catalog_queries, leadership_documents
from holdfast.ops.catalog_queries import WorkerRow
from holdfast.store.api import Store, Txn


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", nargs="?", default="list", choices=("list", "drain", "undrain"),
        help="list (the default), drain ID or undrain ID",
    )  # fmt: skip
    parser.add_argument(
        "worker", metavar="ID", nargs="?", help="id of the worker to drain or undrain"
    )
    add_options(parser, universe=ONE_UNIVERSE)


def run(args: argparse.Namespace) -> int:
    if (args.action == "list") == (args.worker is not None):
        raise Invalid(what="worker", why=f"{args.action} takes {_argument_text(args.action)}")
    with open_existing(args) as store:
        if args.action == "list":
            _list(store, args)
        else:
            _drain(store, args)
    return 0


def _list(store: Store, args: argparse.Namespace) -> None:
    rows = [
        row
        for row in store.read(catalog_queries.worker_rows)
        if args.universe in (None, row.universe)
    ]
    now_ns = store.now_ns()
    cells = [
        (
            row.record.worker,
            row.universe,
            " ".join(row.record.roles),
            _state_text(row),
            row.assigned,
            row.record.worlds,
            f"{max(now_ns - row.record.heartbeat_ns, 0) / S:.1f} s ago",
        )
        for row in rows
    ]
    header = ("worker", "universe", "roles", "is", "assigned", "hosts", "heard")
    documents = msgspec.to_builtins([leadership_documents.worker_document(row) for row in rows])
    emit(args, {"workers": documents}, table(header, cells) if rows else "no workers")


def _drain(store: Store, args: argparse.Namespace) -> None:
    universe = store.read(_universe_of, args.worker, args.universe)
    draining = args.action == "drain"
    record: worker_registry.WorkerRecord = store.transact(
        worker_registry.set_draining, universe, args.worker, draining
    )
    message = (
        "releases its worlds, finishes its tasks and gets no new ones"
        if draining
        else "accepts worlds and tasks again"
    )
    document = {"worker": record.worker, "universe": universe, "draining": record.draining}
    emit(args, document, printable(f"{record.worker} {message}"))


def _universe_of(txn: Txn, worker: str, universe: str | None) -> str:
    universes = catalog_queries.universes(txn) if universe is None else [universe]
    matches = [
        universe_name
        for universe_name in universes
        if worker_registry.find_services(txn, universe_name, worker)
    ]
    if not matches:
        raise NotFound(what="worker", found=worker)
    if len(matches) > 1:
        raise Invalid(what="worker", why="in several universes: give --universe", universes=matches)
    return matches[0]


def _state_text(row: WorkerRow) -> str:
    if not row.live:
        return "silent"
    return "draining" if row.record.draining else "live"


def _argument_text(action: str) -> str:
    return "no ID" if action == "list" else "the ID of a worker"
