"""JSON documents of workers, of the leader lease and of dispatches, shared by the HTTP API and the command line."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.dispatch import leader_pane, log, notifications
from holdfast.dispatch.request import DispatchRecord, mark_of
from holdfast.durable import journal
from holdfast.errors import NotFound
from holdfast.leadership import leader_lease
from holdfast.leadership.leader_lease_state import LeaderLease, LeaderLeaseEvent
from holdfast.ops import catalog_queries
from holdfast.ops.catalog_queries import WorkerRow
from holdfast.store.api import Store, Txn

# The reason of a forced release without one.
REASON = "forced by an operator"
EVENTS_SHOWN = 10


class WorkerDocument(msgspec.Struct, frozen=True):
    """A worker. `assigned` and `hosts` count worlds, `hosts` as the worker reports it. `leases` counts the tasks that it
    holds. `since_ns` is its first heartbeat, `version` its version of Holdfast: null for a worker that does not report it."""

    worker: str
    universe: str
    incarnation: str
    roles: list[str]
    live: bool
    draining: bool
    assigned: int
    hosts: int
    heartbeat_ns: int
    leases: int
    since_ns: int | None
    version: str | None


class LeaderEventDocument(msgspec.Struct, frozen=True):
    """A decision about the leader lease."""

    kind: str
    owner: str | None
    lease_id: str | None
    epoch: int
    decided_ns: int
    leased_until_ns: int
    reason: str


class LeaderLeaseDocument(msgspec.Struct, frozen=True):
    """The leader lease of a universe."""

    universe: str
    state: str
    live: bool
    owner: str | None
    incarnation: str | None
    lease_id: str | None
    epoch: int
    leased_until_ns: int


class DispatchDocument(msgspec.Struct, frozen=True):
    """A prompt to a tmux pane, and its outcome."""

    request_id: str
    mark: str
    target: str
    status: str
    created_at: int
    notified_at: int | None
    delivered_at: int | None
    failed_at: int | None
    reason: str
    tries: int
    deferred: bool
    metadata: dict[str, str]


class LeaderPaneDocument(msgspec.Struct, frozen=True):
    """The pane of the target `leader`, the position of its notifications, and why they are deferred."""

    universe: str
    pane: str | None
    cli: str | None
    socket: str | None
    cursor: int | None
    pending: int
    deferred: str | None


# -- workers ---------------------------------------------------------------------------------------


def worker_document(row: WorkerRow) -> WorkerDocument:
    record = row.record
    return WorkerDocument(
        worker=record.worker,
        universe=row.universe,
        incarnation=record.incarnation,
        roles=list(record.roles),
        live=row.live,
        draining=record.draining,
        assigned=row.assigned,
        hosts=record.worlds,
        heartbeat_ns=record.heartbeat_ns,
        leases=record.leases,
        since_ns=record.since_ns or None,
        version=record.version or None,
    )


# -- leader lease ----------------------------------------------------------------------------------


def require_universe(txn: Txn, universe: str) -> None:
    """Raise NotFound for an unknown universe, so that a typing error does not create a lease."""
    exists = universe in catalog_queries.universes(txn) or leader_lease.read(txn, universe).epoch
    if not exists:
        raise NotFound(what="universe", found=universe)


def read_leadership(txn: Txn, universe: str) -> tuple[LeaderLease, list[LeaderLeaseEvent]]:
    """Return the leader lease and the last events of its log."""
    height = journal.head(txn, leader_lease.resource(universe)).height
    events = leader_lease.events(txn, universe, max(height - EVENTS_SHOWN, 0), EVENTS_SHOWN)
    return leader_lease.read(txn, universe), events


def lease_document(store: Store, universe: str, lease: LeaderLease) -> LeaderLeaseDocument:
    return LeaderLeaseDocument(
        universe=universe,
        state=lease.state.value,
        live=lease.live(store.now_ns(), store.generation),
        owner=lease.owner or None,
        incarnation=lease.incarnation or None,
        lease_id=lease.lease_id or None,
        epoch=lease.epoch,
        leased_until_ns=lease.leased_until_ns,
    )


def event_document(event: LeaderLeaseEvent) -> LeaderEventDocument:
    return LeaderEventDocument(
        kind=event.kind.value,
        owner=event.owner or None,
        lease_id=event.lease_id or None,
        epoch=event.epoch,
        decided_ns=event.decided_ns,
        leased_until_ns=event.leased_until_ns,
        reason=event.reason,
    )


# -- dispatches ------------------------------------------------------------------------------------


def find_dispatch(txn: Txn, universe: str, ref: str) -> DispatchRecord:
    """Return a request by its id or by the mark in its prompt."""
    mark = ref.strip("[]").removeprefix("hf:")
    record = log.find(txn, universe, ref) or log.find_by_mark(txn, universe, mark)
    if record is None:
        raise NotFound(what="dispatch", universe=universe, found=ref)
    return record


def dispatch_document(record: DispatchRecord) -> DispatchDocument:
    return DispatchDocument(
        request_id=record.request_id,
        mark=mark_of(record.request_id),
        target=record.target,
        status=record.status.value,
        created_at=record.created_at,
        notified_at=record.notified_at,
        delivered_at=record.delivered_at,
        failed_at=record.failed_at,
        reason=record.reason,
        tries=record.tries,
        deferred=record.deferred,
        metadata=record.metadata,
    )


def read_backlog(txn: Txn, universe: str) -> dict[str, Any]:
    """Return the number of requests by status."""
    counts = log.backlog(txn, universe)
    return {name: getattr(counts, name) for name in counts.__struct_fields__}


def read_leader_pane(txn: Txn, universe: str) -> LeaderPaneDocument:
    pane = leader_pane.find_leader(txn, universe)
    state = notifications.read(txn, universe)
    why = None if state is None else state.deferred
    return LeaderPaneDocument(
        universe=universe,
        pane=None if pane is None else pane.target,
        cli=None if pane is None else pane.cli,
        socket=None if pane is None else pane.socket or None,
        cursor=None if state is None else state.cursor,
        pending=notifications.count_pending(txn, universe),
        deferred=None if why is None else f"{why.code}: {why.text}",
    )
