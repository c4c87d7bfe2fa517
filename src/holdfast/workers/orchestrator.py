"""The orchestrator: assigns worlds to workers (document 004, role 1).

The holder of the universe's leader lease is the active orchestrator. Other orchestrators are on
standby and retry when the lease expires. The orchestrator runs no world logic. It writes desired assignments by
rendezvous hashing over live workers: for new worlds, and for worlds of dead or draining workers. It
honours pins. A worker counts as live only after a heartbeat under the current leader.

A world is assigned only to a worker whose code has its type. A world that stopped before an unknown
item is assigned only to a worker that declares the item (`leadership.declarations`). If no such
worker appears in time, any worker of the type gets the world and dead-letters the item
(`world.unknown`). A world whose replay diverged at an entry of other code is assigned only to a
worker with that code. It is parked if no such worker appears in time, or if that code has the same
state fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import (
    BLOB_GRACE_NS,
    DEDUPE_RETENTION_NS,
    DELETED_RETENTION_NS,
    LEASE_LOG_LINES_MAX,
    SWEEP_INTERVAL_NS,
    UNKNOWN_EVENT_TIMEOUT_S,
)
from holdfast.durable import dedupe, inbox
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, Held
from holdfast.leadership import declarations, leader_lease, placement, worker_registry
from holdfast.leadership.declarations import Declaration
from holdfast.store import blobs
from holdfast.store.api import Deferred, Store, Txn, operation, read_stale
from holdfast.workers.history_upkeep import HistoryUpkeep
from holdfast.workers.service import TickService
from holdfast.workers.tasks.upkeep import TaskUpkeep
from holdfast.workers.worker_room import WorkerRoom, read_room
from holdfast.world import catalog, intents, unknown_events
from holdfast.world.catalog import WorldRecord
from holdfast.world.code_requirement import REPLAY, WORLD_TYPE, CodeRequirement
from holdfast.world.history import HistoryBound

# Worlds that one tick places or moves.
PLACED_PER_TICK = 1000
# A stopped world: its position in the index of its need, the start of its wait, its id.
StoppedWorld = tuple[bytes, int, str]
# Consecutive garbage collection commits.
COLLECTIONS_MAX = 100


class CapableWorkers:
    """The live workers that may host worlds, with their code declarations. None means unknown code.

    A worker with unknown code may get worlds of any type, but no stopped world.
    """

    def __init__(self, workers: Mapping[str, Declaration | None]) -> None:
        self._workers = workers
        self._of_type: dict[str, list[str]] = {}
        self._of_need: dict[CodeRequirement, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._workers)

    def workers_for(self, need: CodeRequirement) -> list[str]:
        """Return the workers whose code meets a need."""
        capable = self._of_need.get(need)
        if capable is None:
            capable = self._of_need[need] = [
                worker
                for worker, code in self._workers.items()
                if code is not None
                and (
                    code.has_world_type(need.world)
                    if need.side == WORLD_TYPE
                    else code.declares(need.world, need.cause, need.version)
                )
            ]
        return capable

    def names(self) -> list[str]:
        return list(self._workers)

    def choose(self, record: WorldRecord, room: WorkerRoom | None = None) -> str | None:
        """Choose the worker for a world, or None if no worker has its type, or no room. Workers
        that know the item that stopped the world are preferred.
        """
        unknown_item = record.unknown
        if unknown_item is not None:
            capable = self.workers_for(
                CodeRequirement(
                    record.type, unknown_item.side, unknown_item.type, unknown_item.version
                )
            )
            if capable:
                return placement.choose_worker(record.world_id, capable)
        of_type = self.workers_of_type(record)
        if room is not None:
            return room.choose(record.world_id, of_type)
        return placement.choose_worker(record.world_id, of_type)

    def workers_of_type(self, record: WorldRecord) -> list[str]:
        """Return the workers whose code has the type of a world."""
        of_type = self._of_type.get(record.type)
        if of_type is None:
            of_type = self._of_type[record.type] = [
                worker
                for worker, code in self._workers.items()
                if code is None or code.has_world_type(record.type)
            ]
        return of_type

    def choose_for(
        self, record: WorldRecord, need: CodeRequirement, pinned: str | None
    ) -> str | None:
        """Choose the worker that can resume a stopped world. A pinned world stays with its worker."""
        capable = self.workers_for(need)
        if pinned is not None:
            return pinned if pinned in capable else None
        return placement.choose_worker(record.world_id, capable)


class Orchestrator(TickService):
    name = "orchestrator"

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        worker: str,
        incarnation: str,
        lease_ttl_s: float = 5.0,
        worker_ttl_s: float = 5.0,
        histories: Mapping[str, HistoryBound | None] | None = None,
        deleted_kept_s: float = DELETED_RETENTION_NS / S,
        unknown_event_s: float = UNKNOWN_EVENT_TIMEOUT_S,
        inline: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        """`histories` maps world types to their history bounds. None means unbounded. `inline` runs the task upkeep
        in the orchestrator's thread."""
        super().__init__(store, clock)
        self._history_upkeep = HistoryUpkeep(
            store, universe, histories or {}, int(deleted_kept_s * S)
        )
        self.universe = universe
        self.worker = worker
        self.incarnation = incarnation
        self._ttl_ns = int(lease_ttl_s * S)
        self._worker_ttl_ns = int(worker_ttl_s * S)
        self._unknown_event_ns = int(unknown_event_s * S)
        self._lease: Lease | None = None
        # The start of the leadership of this process.
        self._leader_since_ns = 0
        self._retry_at_ns = 0
        self._collected_ns = 0
        self._task_upkeep = TaskUpkeep(store, universe, with_blobs=False, inline=inline)

    @property
    def topics(self) -> Sequence[str]:
        return (
            catalog.runnable_topic(self.universe, catalog.UNASSIGNED),
            worker_registry.topic(self.universe),
            leader_lease.topic(self.universe),
        )

    @property
    def is_leader(self) -> bool:
        return self._lease is not None

    def tick(self) -> bool:
        """Keep the leader lease, place new worlds, move and resume worlds, run the upkeep."""
        if not self._acquire_or_renew():
            return False
        try:
            placed = self._place_worlds()
            moved = self._move_worlds()
            moved = self._resume_stopped() or moved
            self._collect_garbage()
            erased = self._history_upkeep.run_step(self._current_lease())
        except Fenced:
            # This process was suspended past its lease: another orchestrator leads.
            self._lease = None
            return False
        return placed or moved or erased

    def sleep_s(self) -> float:
        now_ns = self.store.now_ns()
        if self._lease is None:
            return min(max(self._retry_at_ns - now_ns, 0) / S, self.idle_s)
        return min(self._ttl_ns / 3 / S, self.idle_s)

    def shut_down(self) -> None:
        self._task_upkeep.close()
        if self._lease is not None:
            with contextlib.suppress(Fenced):
                self.store.transact(leader_lease.release, self.universe, self._lease)
            self._lease = None

    # -- the parts of a tick -------------------------------------------------------------------

    def _acquire_or_renew(self) -> bool:
        now_ns = self.store.now_ns()
        try:
            if self._lease is None:
                self._lease = self.store.transact(
                    leader_lease.acquire, self.universe, self.worker, self.incarnation, self._ttl_ns
                )
                self._leader_since_ns = self.store.now_ns()
                self._history_upkeep.start_term()
                # Workers count as live only after a heartbeat under this leader: request one.
                self.store.transact(self._request_heartbeats)
            elif now_ns > self._lease.expires_ns - self._ttl_ns // 2:
                self._lease = self.store.transact(
                    leader_lease.renew, self.universe, self._lease, self._ttl_ns
                )
        except Held as error:
            self._retry_at_ns = error.fields.get("until_ns", now_ns + self._ttl_ns)
            return False
        except Fenced:
            self._lease = None
            return False
        return True

    def _request_heartbeats(self, txn: Txn) -> None:
        for record in worker_registry.list_registered(txn, self.universe):
            txn.notify(catalog.runnable_topic(self.universe, record.worker))

    def _live_workers(self, txn: Txn) -> list[worker_registry.WorkerRecord]:
        return worker_registry.list_live(
            txn, self.universe, self.store.now_ns(), self._worker_ttl_ns, self._epoch
        )

    @property
    def _epoch(self) -> int:
        assert self._lease is not None
        return self._lease.epoch

    def _place_worlds(self) -> bool:
        """Assign runnable worlds without a worker."""
        waiting: list[str] = read_stale(
            self.store, catalog.list_runnable, self.universe, catalog.UNASSIGNED, PLACED_PER_TICK
        )
        if not waiting:
            return False
        capable = self._capable_workers()
        if not capable:
            return False

        def place(txn: Txn) -> int:
            txn.require_live(self._current_lease())
            room = read_room(txn, self.universe, capable.names())
            handled = 0
            for world_id in waiting:
                if catalog.is_deleted(txn, self.universe, world_id):
                    # A deleted world has no work. A stale entry must not block the scan.
                    catalog.clear_runnable.fn(txn, self.universe, world_id, catalog.UNASSIGNED)
                    handled += 1
                    continue
                record = catalog.get_record(txn, self.universe, world_id)
                chosen = capable.choose(record, room)
                if chosen is not None:
                    catalog.assign(txn, self.universe, world_id, chosen, 0, "placed")
                elif not capable.workers_of_type(record):
                    self._await_type(txn, record)
                else:
                    continue  # every worker of its type is at its limit
                handled += 1
            return handled

        handled: int = self.store.transact(place)
        return handled > 0 and len(waiting) == PLACED_PER_TICK

    def _move_worlds(self) -> bool:
        """Move worlds off dead and draining workers, a bounded number per tick."""
        capable = self._capable_workers()
        if not capable:
            return False
        remaining = PLACED_PER_TICK
        for departed in read_stale(self.store, self._read_departed):
            after: str | None = ""
            while after is not None:
                after, movable = self.store.read(self._read_movable_page, departed.worker, after)
                if movable:
                    self.store.transact(self._move_page, departed.worker, movable, capable)
                remaining -= len(movable)
                if remaining <= 0:
                    return True
            self._remove_if_dead(departed)
        return False

    def _read_movable_page(self, txn: Txn, worker: str, after: str) -> tuple[str | None, list[str]]:
        """Return the cursor of the next page and the unpinned worlds of a page of a worker's
        worlds.

        A pinned world waits for its worker. A move would lose the pin.
        """
        page = catalog.list_assigned(txn, self.universe, worker, after, PLACED_PER_TICK)
        assignments = [
            (world_id, catalog.find_assignment(txn, self.universe, world_id)) for world_id in page
        ]
        movable = [
            world_id
            for world_id, assignment in assignments
            if assignment is not None and not assignment.pinned
        ]
        return (page[-1] if page else None), movable

    def _move_page(self, txn: Txn, worker: str, page: list[str], capable: CapableWorkers) -> None:
        txn.require_live(self._current_lease())
        room = read_room(txn, self.universe, capable.names())
        for world_id in page:
            assignment = catalog.find_assignment(txn, self.universe, world_id)
            if assignment is None or assignment.pinned or assignment.desired_worker_id != worker:
                continue
            record = catalog.get_record(txn, self.universe, world_id)
            chosen = capable.choose(record, room)
            if chosen is None:
                if not capable.workers_of_type(record):
                    self._await_type(txn, record)
                continue
            reason = f"moved off {worker}"
            catalog.assign(txn, self.universe, world_id, chosen, assignment.priority, reason)

    def _await_type(self, txn: Txn, record: WorldRecord) -> None:
        """Let a world wait for a live worker with its type."""
        if record.stopped:
            catalog.unassign_without_mark(txn, self.universe, record.world_id)
            catalog.clear_runnable.fn(txn, self.universe, record.world_id, catalog.UNASSIGNED)
        else:
            unknown_events.mark_stopped(
                txn, record, CodeRequirement(record.type, WORLD_TYPE, record.type), seq=0
            )

    def _resume_stopped(self) -> bool:
        """Resume stopped worlds that a live worker can run, or whose wait has timed out."""
        needed: list[tuple[CodeRequirement, int]] = read_stale(
            self.store, unknown_events.list_requirements, self.universe, PLACED_PER_TICK
        )
        if not needed:
            return False
        capable = self._capable_workers()
        remaining = PLACED_PER_TICK
        for need, since_ns in needed:
            if not capable.workers_for(need) and not self._has_waited_enough(need, since_ns):
                continue
            after = b""
            while remaining > 0:
                page, ready = self.store.read(
                    self._read_stopped_page, need, after, remaining, capable
                )
                if not page:
                    break
                # A page of worlds that stay stopped, for example paused ones, needs no commit.
                if ready:
                    remaining -= self.store.transact(self._resume_page, need, ready, capable)
                after = page[-1][0]
        return remaining <= 0

    def _read_stopped_page(
        self, txn: Txn, need: CodeRequirement, after: bytes, limit: int, capable: CapableWorkers
    ) -> tuple[list[StoppedWorld], list[StoppedWorld]]:
        """Return a page of worlds that wait for a need, and the worlds among them to resume now."""
        page: list[StoppedWorld] = unknown_events.list_waiting(
            txn, self.universe, need, after, limit
        )
        return page, [
            stopped_world
            for stopped_world in page
            if self._next_host(txn, need, stopped_world, capable) is not None
        ]

    def _is_overdue(self, since_ns: int) -> bool:
        """Whether the wait for a capable worker has timed out. A new leader first waits one worker
        TTL, because the heartbeat of a capable worker may arrive last.
        """
        return (
            self._knows_live_workers() and self.store.now_ns() >= since_ns + self._unknown_event_ns
        )

    def _knows_live_workers(self) -> bool:
        return self.store.now_ns() >= self._leader_since_ns + self._worker_ttl_ns

    def _has_waited_enough(self, need: CodeRequirement, since_ns: int) -> bool:
        """Whether a world with this need stops waiting for a capable worker."""
        if need.side == WORLD_TYPE:
            return False
        return self._knows_live_workers() if need.side == REPLAY else self._is_overdue(since_ns)

    def _resume_page(
        self, txn: Txn, need: CodeRequirement, page: list[StoppedWorld], capable: CapableWorkers
    ) -> int:
        txn.require_live(self._current_lease())
        resumed = 0
        for stopped_world in page:
            next_host = self._next_host(txn, need, stopped_world, capable)
            if next_host is None:
                continue
            record, chosen, give_up = next_host
            if chosen == catalog.UNASSIGNED:
                unknown_events.park_stopped(txn, record)
                resumed += 1
                continue
            why = "its next item is given up" if give_up else f"it knows {need.cause}"
            unknown_events.resume(txn, record, chosen, why, give_up=give_up)
            resumed += 1
        return resumed

    def _next_host(
        self, txn: Txn, need: CodeRequirement, stopped_world: StoppedWorld, capable: CapableWorkers
    ) -> tuple[WorldRecord, str, bool] | None:
        """Return the world, its next worker, and whether its next item is dead-lettered. None: the
        world stays stopped.

        The worker is `UNASSIGNED` for a world whose wait for code has timed out: it is parked.
        """
        _, since_ns, world_id = stopped_world
        record = catalog.get_record(txn, self.universe, world_id)
        if record.status is not catalog.WorldStatus.ACTIVE or not record.stopped:
            return None
        assignment = catalog.find_assignment(txn, self.universe, world_id)
        pinned = (
            assignment.desired_worker_id if assignment is not None and assignment.pinned else None
        )
        chosen = capable.choose_for(record, need, pinned)
        if chosen is not None:
            return record, chosen, False
        if need.needs_code:
            return (
                (record, catalog.UNASSIGNED, False)
                if self._has_waited_enough(need, since_ns)
                else None
            )
        if record.unknown is not None and record.unknown.seq and self._is_overdue(since_ns):
            chosen = pinned or capable.choose(record)
            if chosen is not None:
                return record, chosen, True
        return None

    def _remove_if_dead(self, departed: worker_registry.WorkerRecord) -> None:
        """Remove a dead worker without worlds, together with its runnable entries."""
        silent = departed.heartbeat_ns < self.store.now_ns() - self._worker_ttl_ns
        if silent and not self.store.read(
            catalog.list_assigned, self.universe, departed.worker, "", 1
        ):
            self.store.transact(self._remove_worker, departed)

    def _remove_worker(self, txn: Txn, departed: worker_registry.WorkerRecord) -> None:
        txn.require_live(self._current_lease())
        catalog.drop_runnable(txn, self.universe, departed.worker, PLACED_PER_TICK)
        worker_registry.remove(txn, self.universe, departed.worker, departed.incarnation)

    def _collect_garbage(self) -> None:
        """Remove expired dedupe records, unreferenced blobs and old declarations, at intervals."""
        now_ns = self.store.now_ns()
        if now_ns - self._collected_ns < SWEEP_INTERVAL_NS:
            return
        self._collected_ns = now_ns
        self._task_upkeep.start_if_due(now_ns)
        for _ in range(COLLECTIONS_MAX):
            if not self.store.transact(self._collect_some):
                return

    def _collect_some(self, txn: Txn) -> Deferred[bool]:
        txn.require_live(self._current_lease())
        declared_codes = {
            record.code for record in worker_registry.list_registered(txn, self.universe)
        }
        declarations.remove_unreferenced(
            txn, self.universe, sorted(declared_codes), PLACED_PER_TICK
        )
        scopes = [inbox.DEDUPE_SCOPE, intents.dedupe_scope(self.universe)]
        requests = dedupe.request_scope(self.universe)
        if dedupe.has_records(txn, requests):
            scopes.append(requests)
        return collect_expired(txn, scopes, DEDUPE_RETENTION_NS, BLOB_GRACE_NS, PLACED_PER_TICK)

    def _capable_workers(self) -> CapableWorkers:
        capable: CapableWorkers = read_stale(self.store, self._read_capable)
        return capable

    def _read_capable(self, txn: Txn) -> CapableWorkers:
        return CapableWorkers(
            {
                record.worker: declarations.read(txn, self.universe, record.code)
                if record.code
                else None
                for record in self._live_workers(txn)
                if not record.draining and "world" in record.roles
            }
        )

    def _read_departed(self, txn: Txn) -> list[worker_registry.WorkerRecord]:
        """Return the workers that must not host worlds: dead, draining, or unregistered."""
        silent_ns = self.store.now_ns() - self._worker_ttl_ns
        known = {
            record.worker: record for record in worker_registry.list_registered(txn, self.universe)
        }
        unregistered = [
            worker_registry.WorkerRecord(worker, "", (), 0, 0)
            for worker in catalog.assigned_workers(txn, self.universe)
            if worker not in known
        ]
        return unregistered + [
            record
            for record in known.values()
            if record.draining or record.heartbeat_ns < silent_ns
        ]

    def _current_lease(self) -> Lease:
        assert self._lease is not None
        return self._lease


@operation("orchestrator.collect_expired")
def collect_expired(
    txn: Txn, scopes: list[str], retention_ns: int, grace_ns: int, limit: int
) -> bool:
    """Remove a batch of expired rows. Returns whether more may remain."""
    removed_counts = [dedupe.expire.fn(txn, scope, retention_ns, limit) for scope in scopes]
    removed_counts.append(blobs.collect.fn(txn, grace_ns, limit))
    removed_counts.append(leases.truncate_events.fn(txn, max(txn.now_ns - retention_ns, 0), limit))
    removed_counts.append(leases.truncate_excess.fn(txn, LEASE_LOG_LINES_MAX, limit))
    return max(removed_counts) >= limit
