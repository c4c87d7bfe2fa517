"""The orchestrator: decides which worker hosts which world (document 004, role 1).

Whoever holds the authority lease of the universe is the orchestrator; the others stand by and look
again when that lease runs out. It executes no world's logic. It writes desired assignments: new
worlds by rendezvous hashing over live workers, and anew those of workers that died or drain. Pins
are honoured. A worker counts as live only after a heartbeat under the present authority.

A world goes only to a worker whose code has its type. One that stopped before an item that its code
does not know goes only to a worker that declares it (`authority.declarations`). When no such worker came in
time, any worker of the type gets the world, and makes the item a dead letter (`world.unknown`). One whose
journal holds an entry of other code, which its host repeated otherwise, goes only to a worker with that
code. When no such worker came in time, or that code has a state of the same fields, it is parked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from holdfast.authority import authority, declarations, placement, workers
from holdfast.authority.declarations import Declaration
from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import (
    BLOB_GRACE_NS,
    DEDUPE_RETENTION_NS,
    DELETED_KEPT_NS,
    SWEEP_EVERY_NS,
    UNKNOWN_EVENT_S,
)
from holdfast.durable import dedupe, inbox
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, Held
from holdfast.roles.role import Role
from holdfast.roles.task_upkeep import TaskUpkeep
from holdfast.roles.upkeep import Upkeep
from holdfast.store import blobs
from holdfast.store.api import Pending, Store, Txn, glance, operation
from holdfast.world import catalog, publish, unknown
from holdfast.world.catalog import WorldRecord
from holdfast.world.history import Bound
from holdfast.world.need import REPEAT, WORLD, Need

# Worlds that one tick places or moves at most.
PLACED_PER_TICK = 1000
# A stopped world: its position among those of its need, since when it waits, its id.
Waiting = tuple[bytes, int, str]
# Sweeps in a row, while there is something to collect.
SWEEPS_MAX = 100


class Able:
    """Live workers that may host worlds, with what their code declares; None: that is not known.

    Such a worker may have any world type, but is given no world that stopped before an item.
    """

    def __init__(self, workers: Mapping[str, Declaration | None]) -> None:
        self._workers = workers
        self._of_type: dict[str, list[str]] = {}
        self._of_need: dict[Need, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._workers)

    def of(self, need: Need) -> list[str]:
        """Workers that can go on with a world that needs this."""
        found = self._of_need.get(need)
        if found is None:
            found = self._of_need[need] = [
                worker
                for worker, code in self._workers.items()
                if code is not None
                and (
                    code.has(need.world)
                    if need.side == WORLD
                    else code.knows(need.world, need.cause, need.version)
                )
            ]
        return found

    def choose(self, record: WorldRecord) -> str | None:
        """The worker for a world; None when none has its type. One that knows what the world stopped
        before is preferred."""
        stop = record.unknown
        if stop is not None:
            knowing = self.of(Need(record.type, stop.side, stop.type, stop.version))
            if knowing:
                return placement.choose(record.world_id, knowing)
        typed = self._of_type.get(record.type)
        if typed is None:
            typed = self._of_type[record.type] = [
                worker
                for worker, code in self._workers.items()
                if code is None or code.has(record.type)
            ]
        return placement.choose(record.world_id, typed)

    def choose_for(self, record: WorldRecord, need: Need, pinned: str | None) -> str | None:
        """The worker that can go on with a stopped world. A pin stands, whatever its worker knows."""
        found = self.of(need)
        if pinned is not None:
            return pinned if pinned in found else None
        return placement.choose(record.world_id, found)


class Orchestrator(Role):
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
        histories: Mapping[str, Bound | None] | None = None,
        deleted_kept_s: float = DELETED_KEPT_NS / S,
        unknown_event_s: float = UNKNOWN_EVENT_S,
        clock: Clock = SYSTEM,
    ) -> None:
        """`histories` bounds the history of worlds by their type; None for a type that keeps all of it."""
        super().__init__(store, clock)
        self._upkeep = Upkeep(store, universe, histories or {}, int(deleted_kept_s * S))
        self.universe = universe
        self.worker = worker
        self.incarnation = incarnation
        self._ttl_ns = int(lease_ttl_s * S)
        self._worker_ttl_ns = int(worker_ttl_s * S)
        self._unknown_event_ns = int(unknown_event_s * S)
        self._lease: Lease | None = None
        # Since when this one leads.
        self._led_ns = 0
        self._retry_at_ns = 0
        self._swept_ns = 0
        self._task_upkeep = TaskUpkeep(store, universe, with_blobs=False)

    @property
    def topics(self) -> Sequence[str]:
        return (
            catalog.topic(self.universe, catalog.NOBODY),
            workers.topic(self.universe),
            authority.topic(self.universe),
        )

    @property
    def leading(self) -> bool:
        return self._lease is not None

    def tick(self) -> bool:
        """Lead, place what is new, move what must move."""
        if not self._lead():
            return False
        try:
            placed = self._place()
            moved = self._move()
            moved = self._go_on() or moved
            self._sweep()
            erased = self._upkeep.turn(self._held())
        except Fenced:
            # We were paused for longer than our lease: another leads, and we stand by.
            self._lease = None
            return False
        return placed or moved or erased

    def next_s(self) -> float:
        now_ns = self.store.now_ns()
        if self._lease is None:
            return min(max(self._retry_at_ns - now_ns, 0) / S, self.idle_s)
        return min(self._ttl_ns / 3 / S, self.idle_s)

    def finish(self) -> None:
        self._task_upkeep.close()
        if self._lease is not None:
            with contextlib.suppress(Fenced):
                self.store.transact(authority.release, self.universe, self._lease)
            self._lease = None

    # -- the parts of a tick -------------------------------------------------------------------

    def _lead(self) -> bool:
        now_ns = self.store.now_ns()
        try:
            if self._lease is None:
                self._lease = self.store.transact(
                    authority.acquire, self.universe, self.worker, self.incarnation, self._ttl_ns
                )
                self._led_ns = self.store.now_ns()
                self._upkeep.begin()
                # Workers count as live only when they have spoken to this authority: ask them to.
                self.store.transact(self._call_workers)
            elif now_ns > self._lease.expires_ns - self._ttl_ns // 2:
                self._lease = self.store.transact(
                    authority.renew, self.universe, self._lease, self._ttl_ns
                )
        except Held as held:
            self._retry_at_ns = held.fields.get("until_ns", now_ns + self._ttl_ns)
            return False
        except Fenced:
            self._lease = None
            return False
        return True

    def _call_workers(self, txn: Txn) -> None:
        for one in workers.known(txn, self.universe):
            txn.notify(catalog.topic(self.universe, one.worker))

    def _live(self, txn: Txn) -> list[workers.WorkerRecord]:
        return workers.live(
            txn, self.universe, self.store.now_ns(), self._worker_ttl_ns, self._epoch
        )

    @property
    def _epoch(self) -> int:
        assert self._lease is not None
        return self._lease.epoch

    def _place(self) -> bool:
        """Assign worlds that have work and no worker."""
        waiting: list[str] = glance(
            self.store, catalog.hints, self.universe, catalog.NOBODY, PLACED_PER_TICK
        )
        if not waiting:
            return False
        able = self._able()
        if not able:
            return False

        def place(txn: Txn) -> None:
            txn.require_live(self._held())
            for world_id in waiting:
                if catalog.gone(txn, self.universe, world_id):
                    # It has no work any more; whoever left this must not hold up the others.
                    catalog.settle.fn(txn, self.universe, world_id, catalog.NOBODY)
                    continue
                record = catalog.record(txn, self.universe, world_id)
                chosen = able.choose(record)
                if chosen is None:
                    self._hold(txn, record)
                else:
                    catalog.assign(txn, self.universe, world_id, chosen, 0, "placed")

        self.store.transact(place)
        return len(waiting) == PLACED_PER_TICK

    def _move(self) -> bool:
        """Take worlds away from workers that are dead or draining, so many a tick."""
        able = self._able()
        if not able:
            return False
        left = PLACED_PER_TICK
        for gone in glance(self.store, self._unable):
            after: str | None = ""
            while after is not None:
                after, movable = self.store.read(self._movable, gone.worker, after)
                if movable:
                    self.store.transact(self._move_page, gone.worker, movable, able)
                left -= len(movable)
                if left <= 0:
                    return True
            self._forget_if_dead(gone)
        return False

    def _movable(self, txn: Txn, worker: str, after: str) -> tuple[str | None, list[str]]:
        """A page of a worker's worlds without the pinned ones, and where the next page begins.

        A pinned world waits for its worker: to move it would be to forget the pin.
        """
        page = catalog.worlds_of(txn, self.universe, worker, after, PLACED_PER_TICK)
        found = [(one, catalog.assignment(txn, self.universe, one)) for one in page]
        movable = [one for one, where in found if where is not None and not where.pinned]
        return (page[-1] if page else None), movable

    def _move_page(self, txn: Txn, worker: str, page: list[str], able: Able) -> None:
        txn.require_live(self._held())
        for world_id in page:
            found = catalog.assignment(txn, self.universe, world_id)
            if found is None or found.pinned or found.desired_worker_id != worker:
                continue
            record = catalog.record(txn, self.universe, world_id)
            chosen = able.choose(record)
            if chosen is None:
                self._hold(txn, record)
                continue
            reason = f"moved off {worker}"
            catalog.assign(txn, self.universe, world_id, chosen, found.priority, reason)

    def _hold(self, txn: Txn, record: WorldRecord) -> None:
        """No live worker has the type of this world: it waits for one."""
        if record.stopped:
            catalog.unplace(txn, self.universe, record.world_id)
            catalog.settle.fn(txn, self.universe, record.world_id, catalog.NOBODY)
        else:
            unknown.mark(txn, record, Need(record.type, WORLD, record.type), 0)

    def _go_on(self) -> bool:
        """Let stopped worlds go on that a live worker knows how to, or whose time is over."""
        needed: list[tuple[Need, int]] = glance(
            self.store, unknown.needs, self.universe, PLACED_PER_TICK
        )
        if not needed:
            return False
        able = self._able()
        left = PLACED_PER_TICK
        for need, since_ns in needed:
            if not able.of(need) and not self._over(need, since_ns):
                continue
            after = b""
            while left > 0:
                page, ready = self.store.read(self._look_at_page, need, after, left, able)
                if not page:
                    break
                # A page of worlds that stay stopped, such as paused ones, costs no commit.
                if ready:
                    left -= self.store.transact(self._go_on_page, need, ready, able)
                after = page[-1][0]
        return left <= 0

    def _look_at_page(
        self, txn: Txn, need: Need, after: bytes, limit: int, able: Able
    ) -> tuple[list[Waiting], list[Waiting]]:
        """A page of worlds that wait for this need, and those of them that go on now."""
        page: list[Waiting] = unknown.waiting(txn, self.universe, need, after, limit)
        return page, [one for one in page if self._next_host(txn, need, one, able) is not None]

    def _overdue(self, since_ns: int) -> bool:
        """Whether nobody came in time. A new leader first hears who is there: a worker that knows the item
        may be the last to speak."""
        return self._has_heard() and self.store.now_ns() >= since_ns + self._unknown_event_ns

    def _has_heard(self) -> bool:
        return self.store.now_ns() >= self._led_ns + self._worker_ttl_ns

    def _over(self, need: Need, since_ns: int) -> bool:
        """Whether a world that needs this, and that no live worker can go on with, waits no longer."""
        if need.side == WORLD:
            return False
        return self._has_heard() if need.side == REPEAT else self._overdue(since_ns)

    def _go_on_page(self, txn: Txn, need: Need, page: list[Waiting], able: Able) -> int:
        txn.require_live(self._held())
        gone = 0
        for one in page:
            found = self._next_host(txn, need, one, able)
            if found is None:
                continue
            record, chosen, give_up = found
            if chosen == catalog.NOBODY:
                unknown.park(txn, record)
                gone += 1
                continue
            why = "its next item is given up" if give_up else f"it knows {need.cause}"
            unknown.place(txn, record, chosen, why, give_up=give_up)
            gone += 1
        return gone

    def _next_host(
        self, txn: Txn, need: Need, waiting: Waiting, able: Able
    ) -> tuple[WorldRecord, str, bool] | None:
        """A stopped world that goes on, the worker that gets it, and whether its next item is given up.
        `NOBODY` gets one that waits for code, after its time: it is parked."""
        _, since_ns, world_id = waiting
        record = catalog.record(txn, self.universe, world_id)
        if record.status is not catalog.Status.ACTIVE or not record.stopped:
            return None
        found = catalog.assignment(txn, self.universe, world_id)
        pinned = found.desired_worker_id if found is not None and found.pinned else None
        chosen = able.choose_for(record, need, pinned)
        if chosen is not None:
            return record, chosen, False
        if need.by_code:
            return (record, catalog.NOBODY, False) if self._over(need, since_ns) else None
        if record.unknown is not None and record.unknown.seq and self._overdue(since_ns):
            chosen = pinned or able.choose(record)
            if chosen is not None:
                return record, chosen, True
        return None

    def _forget_if_dead(self, gone: workers.WorkerRecord) -> None:
        """A worker that is silent and has no worlds left is forgotten, with the hints it had."""
        silent = gone.heartbeat_ns < self.store.now_ns() - self._worker_ttl_ns
        if silent and not self.store.read(catalog.worlds_of, self.universe, gone.worker, "", 1):
            self.store.transact(self._forget, gone)

    def _forget(self, txn: Txn, gone: workers.WorkerRecord) -> None:
        txn.require_live(self._held())
        catalog.drop_hints(txn, self.universe, gone.worker, PLACED_PER_TICK)
        workers.forget(txn, self.universe, gone.worker, gone.incarnation)

    def _sweep(self) -> None:
        """Upkeep, now and then: what nobody repeats, refers to or asks about any more."""
        now_ns = self.store.now_ns()
        if now_ns - self._swept_ns < SWEEP_EVERY_NS:
            return
        self._swept_ns = now_ns
        self._task_upkeep.attend(now_ns)
        for _ in range(SWEEPS_MAX):
            if not self.store.transact(self._collect):
                return

    def _collect(self, txn: Txn) -> Pending[bool]:
        txn.require_live(self._held())
        named = {one.code for one in workers.known(txn, self.universe)}
        declarations.collect(txn, self.universe, sorted(named), PLACED_PER_TICK)
        scopes = [inbox.SCOPE, publish.scope(self.universe)]
        return collect(txn, scopes, DEDUPE_RETENTION_NS, BLOB_GRACE_NS, PLACED_PER_TICK)

    def _able(self) -> Able:
        able: Able = glance(self.store, self._find_able)
        return able

    def _find_able(self, txn: Txn) -> Able:
        return Able(
            {
                one.worker: declarations.read(txn, self.universe, one.code) if one.code else None
                for one in self._live(txn)
                if not one.draining and "world" in one.roles
            }
        )

    def _unable(self, txn: Txn) -> list[workers.WorkerRecord]:
        """Workers that may not host: silent for too long, draining, or gone in good order."""
        silent_ns = self.store.now_ns() - self._worker_ttl_ns
        known = {one.worker: one for one in workers.known(txn, self.universe)}
        left = [
            workers.WorkerRecord(worker, "", (), 0, 0)
            for worker in catalog.hosts(txn, self.universe)
            if worker not in known
        ]
        return left + [
            one for one in known.values() if one.draining or one.heartbeat_ns < silent_ns
        ]

    def _held(self) -> Lease:
        assert self._lease is not None
        return self._lease


@operation
def collect(txn: Txn, scopes: list[str], retention_ns: int, grace_ns: int, limit: int) -> bool:
    """Remove some of what is past its time; whether there may be more."""
    gone = [dedupe.collect.fn(txn, scope, retention_ns, limit) for scope in scopes]
    gone.append(blobs.collect.fn(txn, grace_ns, limit))
    gone.append(leases.truncate_events.fn(txn, max(txn.now_ns - retention_ns, 0), limit))
    return max(gone) >= limit
