"""`holdfast authority`: which process leads a universe, and what an operator does about it.

`force-release` takes the authority lease from its holder, live or not; the next orchestrator that asks is
granted it, under a higher epoch, which fences the former one. `mark-stale` writes down that the lease ran out,
if it did. Both are decisions in the authority's log, as those of orchestrators are; `show` has the last ones.
"""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.authority import authority
from holdfast.authority.lease import AuthorityEvent, AuthorityLease
from holdfast.cli.output import emit, printable, table
from holdfast.cli.target import add_options, existing
from holdfast.clock import iso_time
from holdfast.durable import journal
from holdfast.errors import Invalid, NotFound
from holdfast.ops import inventory
from holdfast.store.api import Store, Txn

ACTIONS = ("show", "force-release", "mark-stale")
REASON = "forced by an operator"
EVENTS_SHOWN = 10


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help=", ".join(ACTIONS))
    parser.add_argument("--universe", metavar="U", required=True, help="whose authority it is")
    parser.add_argument("--reason", metavar="TEXT", help="for the log (force-release)")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.reason is not None and args.action != "force-release":
        raise Invalid(what="reason", why=f"{args.action} takes none")
    with existing(args) as store:
        store.read(_require, args.universe)
        changed: dict[str, Any] = {}
        said = ""
        if args.action == "force-release":
            was: AuthorityLease = store.read(authority.read, args.universe)
            reason = args.reason or REASON
            epoch: int = store.transact(authority.force_release, args.universe, reason)
            changed = {"released": was.owner or None, "epoch": epoch, "reason": reason}
            said = f"released, it was {was.owner or 'free'}\n"
        elif args.action == "mark-stale":
            marked: bool = store.transact(authority.mark_stale, args.universe)
            changed = {"marked": marked}
            said = "marked stale\n" if marked else "not overdue: nothing to mark\n"
        _show(store, args, changed, said)
    return 0


def _show(store: Store, args: argparse.Namespace, changed: dict[str, Any], said: str) -> None:
    lease, log = store.read(_look, args.universe)
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
    over = "" if live or not lease.owner else ", and is over"
    lines = [
        printable(f"{args.universe}: {lease.state.value}{holder}, epoch {lease.epoch}{until}{over}")
    ]
    cells = [
        (iso_time(one.decided_ns), one.kind.value, one.owner, one.epoch, one.reason) for one in log
    ]
    if cells:
        lines += ["", table(("decided", "what", "owner", "epoch", "reason"), cells)]
    emit(args, document, said + "\n".join(lines))


def _look(txn: Txn, universe: str) -> tuple[AuthorityLease, list[AuthorityEvent]]:
    height = journal.head(txn, authority.resource(universe)).height
    log = authority.events(txn, universe, max(height - EVENTS_SHOWN, 0), EVENTS_SHOWN)
    return authority.read(txn, universe), log


def _require(txn: Txn, universe: str) -> None:
    """A name that is mistyped is not given an authority."""
    known = universe in inventory.universes(txn) or authority.read(txn, universe).epoch
    if not known:
        raise NotFound(what="universe", found=universe)


def _document(event: AuthorityEvent) -> dict[str, Any]:
    return {
        "kind": event.kind.value,
        "owner": event.owner or None,
        "lease_id": event.lease_id or None,
        "epoch": event.epoch,
        "decided_ns": event.decided_ns,
        "leased_until_ns": event.leased_until_ns,
        "reason": event.reason,
    }
