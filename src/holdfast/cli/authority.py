"""`holdfast authority`: shows and releases the leader lease of a universe.

`force-release` revokes the lease, live or not. The next orchestrator that requests it gets a higher epoch,
which fences the former leader. `mark-stale` records the expiry of an expired lease. Both are written to the
leadership log, like the decisions of orchestrators. `show` prints the last entries of the log.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from holdfast.cli.output import emit, printable, table
from holdfast.cli.store_option import add_options, open_existing
from holdfast.clock import iso_time
from holdfast.errors import Invalid
from holdfast.leadership import leader_lease
from holdfast.leadership.leader_lease_state import LeaderLease
from holdfast.ops import leadership_documents
from holdfast.ops.leadership_documents import REASON, read_leadership, require_universe
from holdfast.store.api import Store

ACTIONS = ("show", "force-release", "mark-stale")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", choices=ACTIONS, help=f"one of {', '.join(ACTIONS)}"
    )
    parser.add_argument(
        "--reason", metavar="TEXT", help="the reason to write to the log (force-release only)"
    )
    add_options(parser, universe="the universe of the lease", universe_required=True)


def run(args: argparse.Namespace) -> int:
    if args.reason is not None and args.action != "force-release":
        raise Invalid(what="reason", why=f"{args.action} takes no reason")
    with open_existing(args) as store:
        store.read(require_universe, args.universe)
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
    lease, log = store.read(read_leadership, args.universe)
    live = lease.live(store.now_ns(), store.generation)
    events = [leadership_documents.event_document(event) for event in log]
    document = {
        **msgspec.to_builtins(leadership_documents.lease_document(store, args.universe, lease)),
        **changed,
        "events": msgspec.to_builtins(events),
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
