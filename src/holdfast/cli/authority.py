"""`holdfast authority`: shows and releases the leader lease of a universe.

`force-release` revokes the lease, live or not. The next orchestrator that requests it gets a higher epoch,
which fences the former leader. `mark-stale` records the expiry of an expired lease. Both are written to the
leadership log, like the decisions of orchestrators. `show` prints the last entries of the log.
"""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli.output import emit, printable, table
from holdfast.cli.store_option import add_options, open_existing
from holdfast.clock import iso_time
from holdfast.durable import journal
from holdfast.errors import Invalid, NotFound
from holdfast.leadership import leader_lease
from holdfast.leadership.leader_lease_state import LeaderLease, LeaderLeaseEvent
from holdfast.ops import catalog_queries
from holdfast.store.api import Store, Txn

ACTIONS = ("show", "force-release", "mark-stale")
REASON = "forced by an operator"
EVENTS_SHOWN = 10


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", choices=ACTIONS, help=f"one of {', '.join(ACTIONS)}"
    )
    parser.add_argument("--universe", metavar="U", required=True, help="the universe of the lease")
    parser.add_argument(
        "--reason", metavar="TEXT", help="the reason to write to the log (force-release only)"
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.reason is not None and args.action != "force-release":
        raise Invalid(what="reason", why=f"{args.action} takes no reason")
    with open_existing(args) as store:
        store.read(_require_universe, args.universe)
        changed: dict[str, Any] = {}
        message = ""
        if args.action == "force-release":
            lease_before: LeaderLease = store.read(leader_lease.read, args.universe)
            reason = args.reason or REASON
            epoch: int = store.transact(leader_lease.force_release, args.universe, reason)
            changed = {"released": lease_before.owner or None, "epoch": epoch, "reason": reason}
            message = f"released; the owner was {lease_before.owner or 'none'}\n"
        elif args.action == "mark-stale":
            marked: bool = store.transact(leader_lease.mark_stale, args.universe)
            changed = {"marked": marked}
            message = "marked stale\n" if marked else "not expired: nothing to mark\n"
        _show(store, args, changed, message)
    return 0


def _show(store: Store, args: argparse.Namespace, changed: dict[str, Any], message: str) -> None:
    lease, log = store.read(_read_state, args.universe)
    live = lease.live(store.now_ns(), store.generation)
    document = {
        "universe": args.universe,
        "state": lease.state.value,
        "live": live,
        "owner": lease.owner or None,
        "incarnation": lease.incarnation or None,
        "lease_id": lease.lease_id or None,
        "epoch": lease.epoch,
        "leased_until_ns": lease.leased_until_ns,
        **changed,
        "events": [_document(event) for event in log],
    }
    holder = f" by {lease.owner} ({lease.lease_id})" if lease.owner else ""
    until = f", until {iso_time(lease.leased_until_ns)}" if lease.leased_until_ns else ""
    over = "" if live or not lease.owner else ", expired"
    lines = [
        printable(f"{args.universe}: {lease.state.value}{holder}, epoch {lease.epoch}{until}{over}")
    ]
    cells = [
        (iso_time(entry.decided_ns), entry.kind.value, entry.owner, entry.epoch, entry.reason)
        for entry in log
    ]
    if cells:
        lines += ["", table(("decided", "what", "owner", "epoch", "reason"), cells)]
    emit(args, document, message + "\n".join(lines))


def _read_state(txn: Txn, universe: str) -> tuple[LeaderLease, list[LeaderLeaseEvent]]:
    height = journal.head(txn, leader_lease.resource(universe)).height
    log = leader_lease.events(txn, universe, max(height - EVENTS_SHOWN, 0), EVENTS_SHOWN)
    return leader_lease.read(txn, universe), log


def _require_universe(txn: Txn, universe: str) -> None:
    """Raise NotFound for an unknown universe, so that a typing error does not create a lease."""
    exists = universe in catalog_queries.universes(txn) or leader_lease.read(txn, universe).epoch
    if not exists:
        raise NotFound(what="universe", found=universe)


def _document(event: LeaderLeaseEvent) -> dict[str, Any]:
    return {
        "kind": event.kind.value,
        "owner": event.owner or None,
        "lease_id": event.lease_id or None,
        "epoch": event.epoch,
        "decided_ns": event.decided_ns,
        "leased_until_ns": event.leased_until_ns,
        "reason": event.reason,
    }
