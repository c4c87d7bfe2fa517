"""The world worker: hosts many worlds in one process (document 004, role 2).

One tick reads the runnable worlds, acquires leases, runs one cycle of each world, commits all
cycles together, and renews and releases leases. A fenced world is dropped at once. A world whose
replay diverges is parked, or released if other code wrote the entry (`_block_world`). After any
error the state in memory equals the journal (see `host`), so a failed tick is simply followed by
another one.

A tick has a time limit, so that leases do not expire during it. The next tick starts with the
worlds that it did not reach.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast import failpoints
from holdfast.clock import MS, SYSTEM, Clock, S
from holdfast.config import BATCH_MAX, CYCLES_BYTES_MAX, CYCLES_MAX, UNKNOWN_EVENT_TIMEOUT_S
from holdfast.durable import inbox
from holdfast.durable import lease as leases
from holdfast.errors import (
    Busy,
    CommitUnknown,
    Conflict,
    Fenced,
    HeadMoved,
    HoldfastError,
    Invalid,
    NotFound,
    ReplayDiverged,
    StoreCorrupt,
    UnknownEvent,
)
from holdfast.leadership import declarations, leader_lease, worker_registry
from holdfast.runner.commit_handoff import Handoff
from holdfast.runner.wakeup import Wakeup
from holdfast.store.api import Deferred, Future, Store, Txn, read_stale
from holdfast.workers.service import TickService
from holdfast.workers.world import fused_commit
from holdfast.workers.world.fused_commit import FusedCommitter
from holdfast.workers.world.world_stop import WorldStop
from holdfast.world import catalog, hosting_lease, redrive
from holdfast.world.catalog import WorldBlocker, WorldRecord
from holdfast.world.code_requirement import CODE, REPLAY, WORLD_TYPE, CodeRequirement
from holdfast.world.context import TypeRegistry
from holdfast.world.cycle import AppliedInline, Cycle, commit, commit_and_release, stop_and_release
from holdfast.world.definition import WorldDefinition
from holdfast.world.host import Budgets, SnapshotPolicy, WorldHost
from holdfast.world.reducer import WorldSpec

T = TypeVar("T")
# A submitted commit: its cycles, the offers sent with them, and its future.
SentCycles = tuple[list[tuple[str, Cycle]], list[Handoff], Future[Any]]

# The upkeep interval of a busy worker, and the idle worlds released per upkeep.
UPKEEP_S = 0.05
RELEASED_BUSY = 8
RELEASED_IDLE = 256
# The interval between scans for runnable worlds while commits are in flight.
SCAN_EVERY_NS = 4 * MS
# Errors of a world that a retry cannot fix.
_WORLD_ERRORS = (ReplayDiverged, Invalid, StoreCorrupt, NotFound)


@dataclass(frozen=True, slots=True)
class WorldWorkerPolicy:
    lease_ttl_s: float = 10.0
    # The fraction of the TTL that is left when a lease is renewed.
    renewal_margin: float = 0.6
    # A world without work for this long is released.
    idle_s: float = 15.0
    worlds_per_tick: int = 512
    # The time limit of a tick. After it no further world is started.
    tick_s: float = 1.0
    stuck_max: int = 5
    heartbeat_s: float = 1.0
    compacted_per_tick: int = 4
    # The retry delay for a world whose lease another worker holds.
    retry_s: float = 0.1
    # An item unknown to all live workers becomes a dead letter after this much store time.
    unknown_event_s: float = UNKNOWN_EVENT_TIMEOUT_S
    budgets: Budgets = field(default_factory=Budgets)
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)


@dataclass(slots=True)
class HostedWorld:
    host: WorldHost
    renew_at_ns: int
    active_ns: int
    # The number of events that the world still processes isolated and one at a time. A poison event
    # is in the first batch, so a lost lease then identifies it (see `hosting_lease`).
    isolated_left: int


class WorldWorker(TickService):
    name = "world"

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        programs: dict[str, WorldDefinition],
        vocabulary: TypeRegistry,
        worker: str,
        incarnation: str,
        policy: WorldWorkerPolicy | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(store, clock)
        self.universe = universe
        self.worker = worker
        self.incarnation = incarnation
        self.policy = policy or WorldWorkerPolicy()
        self._programs = programs
        self._declaration = build_declaration(programs)
        self._code_digest = declarations.digest(self._declaration)
        # Whether the declaration is stored, by the last heartbeat.
        self._declared = False
        self._vocabulary = vocabulary
        self._hosted: dict[str, HostedWorld] = {}
        # Worlds held by another worker, and the time of the next lease request.
        self._retry_after_ns: dict[str, int] = {}
        # The scan cursor over runnable worlds. Empty: start at the first.
        self._scan_cursor = b""
        self._upkeep_at_ns = 0
        self._heartbeat_at_ns = 0
        self._heartbeat_epoch = -1
        self.committer = FusedCommitter(self)
        self._wakeup: Wakeup | None = None
        self._scan_at_ns = 0

    @property
    def topics(self) -> Sequence[str]:
        return (catalog.runnable_topic(self.universe, self.worker),)

    @property
    def hosted(self) -> list[str]:
        return list(self._hosted)

    @property
    def working_on(self) -> tuple[str, int] | None:
        """The world and the inbox seq that a reducer is processing now."""
        for hosted in list(self._hosted.values()):
            if hosted.host.current_seq:
                world = hosted.host.world
                return f"{world.definition.type}/{world.name}", hosted.host.current_seq
        return None

    def tick(self) -> bool:
        """Run one cycle of every runnable world: drain, step, append, publish, snapshot, renew."""
        stop_ns = self.clock.mono_ns() + int(self.policy.tick_s * S)
        committed = self.committer.process(stop_ns)
        if self.committer.has_in_flight and self.clock.mono_ns() < self._scan_at_ns:
            return self.committer.has_work
        self._scan_at_ns = self.clock.mono_ns() + SCAN_EVERY_NS
        self._heartbeat()
        self._redeliver_failed()
        runnable = {
            w: at for w, at in self._runnable().items() if not self.committer.is_in_flight(w)
        }
        self._acquire_leases([world_id for world_id in runnable if world_id not in self._hosted])
        worked = self._run_cycles(runnable)
        more = self._upkeep(worked or committed) or worked or bool(self._scan_cursor)
        return more or self.committer.has_work

    def sleep_s(self) -> float:
        if self.committer.has_in_flight:
            return SCAN_EVERY_NS / S
        now_ns = self.store.now_ns()
        times = [hosted.renew_at_ns for hosted in self._hosted.values()]
        times += [*self._retry_after_ns.values(), self._heartbeat_at_ns]
        soonest_ns = min(times, default=now_ns + int(self.idle_s * S))
        return min(max(soonest_ns - now_ns, 0) / S, self.idle_s)

    def run(self) -> None:
        wakeup = self._wakeup = Wakeup(self.store, self.topics)
        self.committer.open(wakeup)
        try:
            super().run()
        finally:
            self.committer.close()
            wakeup.close()

    def _wait(self, since: int, timeout_s: float) -> int:
        if timeout_s <= 0 or self._wakeup is None:
            return super()._wait(since, timeout_s)
        if self.committer.has_in_flight:
            self._wakeup.wait_local(timeout_s)
        else:
            self._wakeup.wait(timeout_s, since)
        return since

    def request_stop(self) -> None:
        super().request_stop()
        if self._wakeup is not None:
            self._wakeup.set()

    def shut_down(self) -> None:
        """Release all worlds, so that the next worker need not wait for lease expiry."""
        self.committer.drain()
        self._release_worlds(list(self._hosted))
        self.store.transact(worker_registry.remove, self.universe, self.worker, self.incarnation)

    # -- for the fused committer -------------------------------------------------------------------

    def can_fuse(self, world_id: str) -> bool:
        hosted = self._hosted.get(world_id)
        return hosted is not None and not hosted.isolated_left

    def host_of(self, world_id: str) -> WorldHost:
        return self._hosted[world_id].host

    def read_inboxes(self, world_ids: Sequence[str]) -> dict[str, list[inbox.InboxEntry]]:
        inboxes: dict[str, list[inbox.InboxEntry]] = read_stale(
            self.store, self._read_inboxes, world_ids
        )
        if failpoints.armed:
            failpoints.hit("world.inboxes_read", self)
        return inboxes

    def prepare_cycle(
        self, world_id: str, waiting: list[inbox.InboxEntry], applied_inline: list[AppliedInline]
    ) -> Cycle | None:
        try:
            return self._hosted[world_id].host.prepare(
                self.store, waiting=waiting, applied_inline=applied_inline
            )
        except _WORLD_ERRORS as error:
            self._block_world(world_id, error)
            return None

    # -- the parts of a tick -------------------------------------------------------------------

    def _heartbeat(self) -> None:
        """Write a heartbeat at intervals, and at once under a new leader."""
        now_ns = self.store.now_ns()
        epoch: int = read_stale(self.store, leader_lease.epoch, self.universe)
        if now_ns < self._heartbeat_at_ns and epoch == self._heartbeat_epoch:
            return
        answer: worker_registry.WorkerRecord = self.store.transact(self._write_heartbeat)
        self._declared = answer.code == self._code_digest
        self._heartbeat_at_ns = now_ns + int(self.policy.heartbeat_s * S)
        self._heartbeat_epoch = answer.authority_epoch

    def _write_heartbeat(self, txn: Txn) -> Deferred[worker_registry.WorkerRecord]:
        if not self._declared:
            declarations.store_declaration(txn, self.universe, self._declaration)
        hosted = len(self._hosted)
        beat: Deferred[worker_registry.WorkerRecord] = worker_registry.heartbeat(
            txn,
            self.universe,
            self.worker,
            self.incarnation,
            (self.name,),
            worlds=hosted,
            code=self._code_digest,
        )
        return beat

    def _redeliver_failed(self) -> None:
        """Return failed events that an operator redrove to their inboxes."""
        if read_stale(self.store, redrive.has_redriven, self.universe):
            self.store.transact(redrive.redeliver, self.universe, self.worker)

    def _runnable(self) -> dict[str, bytes]:
        """Return the runnable worlds assigned here, with their scan positions. Worlds reassigned to
        another worker are marked runnable here, too, and are released.
        """
        hinted: list[tuple[bytes, str, bool]] = read_stale(self.store, self._read_runnable)
        now_ns = self.store.now_ns()
        self._retry_after_ns = {
            w: at_ns for w, at_ns in self._retry_after_ns.items() if at_ns > now_ns
        }
        full = len(hinted) == self.policy.worlds_per_tick
        self._scan_cursor = hinted[-1][0] + b"\x00" if full else b""
        not_ours = [world_id for _, world_id, ours in hinted if not ours]
        self._release_worlds([world_id for world_id in not_ours if world_id in self._hosted])
        self._clear_runnable(not_ours)
        return {w: at for at, w, ours in hinted if ours and w not in self._retry_after_ns}

    def _read_runnable(self, txn: Txn) -> list[tuple[bytes, str, bool]]:
        limit = self.policy.worlds_per_tick
        found = catalog.runnable_from(txn, self.universe, self.worker, self._scan_cursor, limit)
        if not found and self._scan_cursor:
            found = catalog.runnable_from(txn, self.universe, self.worker, b"", limit)
        return [(at, world_id, self._is_assigned_here(txn, world_id)) for at, world_id in found]

    def _is_assigned_here(self, txn: Txn, world_id: str) -> bool:
        found = catalog.find_assignment(txn, self.universe, world_id)
        return found is not None and found.desired_worker_id == self.worker

    def _acquire_leases(self, world_ids: list[str]) -> None:
        if not world_ids:
            return
        ttl_ns = int(self.policy.lease_ttl_s * S)
        answers: list[hosting_lease.HostingGrant] = self.store.transact(
            hosting_lease.acquire,
            self.universe,
            world_ids,
            self.worker,
            self.incarnation,
            ttl_ns,
            self.policy.stuck_max,
        )
        now_ns = self.store.now_ns()
        stops: list[WorldStop] = []
        refused: list[str] = []
        for answer in answers:
            if answer.lease is None or answer.record is None:
                if answer.refusal == hosting_lease.LEASE_HELD:
                    # A live holder releases at once. The lease of a dead one must expire.
                    self._retry_after_ns[answer.world_id] = now_ns + int(self.policy.retry_s * S)
                else:
                    refused.append(answer.world_id)
                continue
            program = self._programs.get(answer.record.type)
            if program is None:
                need = CodeRequirement(answer.record.type, WORLD_TYPE, answer.record.type)
                stops.append(WorldStop(answer.world_id, answer.lease, need))
                continue
            self._hosted[answer.world_id] = HostedWorld(
                self._new_host(answer.record, answer.lease, program),
                self._renew_at_ns(answer.lease),
                now_ns,
                self.policy.budgets.max_inbox_batch
                * hosting_lease.is_poison_suspect(answer.record),
            )
        self._clear_runnable(refused)
        self._stop_worlds(stops)

    def _new_host(
        self, record: WorldRecord, lease: leases.Lease, program: WorldDefinition
    ) -> WorldHost:
        return WorldHost(
            WorldSpec(self.universe, record.world_id, record.name, program, self._vocabulary),
            lease,
            clock=self.clock,
            budgets=self.policy.budgets,
            policy=self.policy.snapshots,
            unknown=record.unknown,
        )

    def _run_cycles(self, runnable: dict[str, bytes]) -> bool:
        """Run a cycle of each world. Poison suspects run last and isolated, so that they cannot
        affect other commits.
        """
        stop_ns = self.clock.mono_ns() + int(self.policy.tick_s * S)
        ours = [(w, at) for w, at in runnable.items() if w in self._hosted]
        batchable = [(w, at) for w, at in ours if not self._hosted[w].isolated_left]
        worked = self._run_and_submit(batchable, stop_ns)
        for world_id, at in ours:
            hosted = self._hosted.get(world_id)
            if hosted is None or not hosted.isolated_left:
                continue
            if self.clock.mono_ns() >= stop_ns:
                self._scan_cursor = min(self._scan_cursor or at, at)
                break
            try:
                self.store.transact(
                    hosting_lease.mark_isolated, self.universe, world_id, hosted.host.lease
                )
            except Fenced:
                del self._hosted[world_id]
                continue
            worked |= self._run_and_submit([(world_id, at)], stop_ns, isolated=True)
        return worked

    def _run_and_submit(
        self, runnable: list[tuple[str, bytes]], stop_ns: int, *, isolated: bool = False
    ) -> bool:
        """Run cycles and submit them in batches. While the writer commits a batch, the next one
        runs and effect workers start the first intents. Each world fails separately.
        """
        in_flight: list[SentCycles] = []
        try:
            for start in range(0, len(runnable), CYCLES_MAX):
                some = runnable[start : start + CYCLES_MAX]
                if in_flight and self.clock.mono_ns() >= stop_ns:
                    self._scan_cursor = some[0][1]
                    break
                in_flight += self._submit_batches(self._prepare_cycles(some, stop_ns))
        finally:
            if self._wakeup is None or isolated:
                self._await_commits(in_flight)
            else:
                # The answers wake this worker, which continues with other worlds.
                for sent in in_flight:
                    self.committer.track(*sent)
        return bool(in_flight)

    def _prepare_cycles(
        self, runnable: list[tuple[str, bytes]], stop_ns: int
    ) -> list[tuple[str, Cycle]]:
        cycles: list[tuple[str, Cycle]] = []
        idle: list[str] = []
        stopped: list[str] = []
        stops: list[WorldStop] = []
        drained = self.read_inboxes([world_id for world_id, _ in runnable])
        for world_id, at in runnable:
            if cycles and self.clock.mono_ns() >= stop_ns:
                self._scan_cursor = at
                break
            try:
                hosted = self._hosted[world_id]
                cycle = hosted.host.prepare(
                    self.store,
                    one_at_a_time=hosted.isolated_left > 0,
                    waiting=drained.get(world_id),
                )
            except UnknownEvent as error:
                stops.append(self._stop_for_unknown_entry(world_id, error))
                continue
            except _WORLD_ERRORS as error:
                self._block_world(world_id, error)
                continue
            if cycle is None and hosted.host.stop_request is not None:
                stopped.append(world_id)
            elif cycle is None:
                # Marked runnable without work: an earlier cycle has drained the inbox.
                idle.append(world_id)
            else:
                cycles.append((world_id, cycle))
        self._clear_runnable(idle)
        self._stop_before_unknown(stopped)
        self._stop_worlds(stops)
        return cycles

    def _read_inboxes(
        self, txn: Txn, world_ids: Sequence[str]
    ) -> dict[str, list[inbox.InboxEntry]]:
        """Read the inboxes of all worlds whose state is in memory, in one read."""
        hosts = [self._hosted[world_id] for world_id in world_ids]
        return {
            hosted.host.world.world_id: hosted.host.drain(txn, hosted.host.limit)
            for hosted in hosts
            if hosted.host.loaded and not hosted.isolated_left
        }

    def _submit_batches(self, cycles: list[tuple[str, Cycle]]) -> list[SentCycles]:
        with self.store.batched():
            return [self._submit_cycles(some) for some in _batches(cycles)]

    def _submit_cycles(self, some: list[tuple[str, Cycle]]) -> SentCycles:
        """Submit cycles. The same commit claims their intents for idle runners that made offers."""
        cycles = [cycle for _, cycle in some]
        offers = self.committer.take_offers(cycles)
        if failpoints.armed:
            failpoints.hit("world.submit_cycles", self)
        if offers:
            return some, offers, self.store.submit(fused_commit.commit_fused, offers, cycles)
        # Without offers it is a single operation.
        return some, offers, self.store.submit(commit, cycles)

    def _await_commits(self, in_flight: list[SentCycles]) -> None:
        now_ns = self.store.now_ns()
        store_error: HoldfastError | None = None
        for some, offers, future in in_flight:
            try:
                answers = fused_commit.resolve_answers(future, offers, ())
            except HoldfastError as error:
                answers = [error] * len(some)
            for (world_id, cycle), answer in zip(some, answers, strict=True):
                store_error = self.on_committed(world_id, cycle, answer, now_ns) or store_error
        if store_error is not None:
            raise store_error

    def on_committed(
        self, world_id: str, cycle: Cycle, error: HoldfastError | None, now_ns: int
    ) -> HoldfastError | None:
        """Process the outcome of a cycle. Returns an error that is the store's and not the world's."""
        hosted = self._hosted.get(world_id)
        if hosted is None or hosted.host.lease.epoch != cycle.lease.epoch:
            # The world was released while its cycle was in flight.
            return None
        if error is None:
            hosted.host.on_committed(cycle)
            hosted.active_ns = now_ns
            hosted.isolated_left = max(hosted.isolated_left - len(cycle.bodies), 0)
            for failed in cycle.failed:
                hosted.host.warn("event failed", failed.seq, failed.code, failed.error)
        elif isinstance(error, Fenced):
            # Another worker may hold the lease now: no further writes.
            hosted.host.warn("write fenced")
            del self._hosted[world_id]
        elif isinstance(error, (HeadMoved, Conflict, CommitUnknown, Busy)):
            hosted.host.invalidate()
        elif isinstance(error, _WORLD_ERRORS):
            self._park_world(world_id, error)
        else:
            # A store error, such as a full disk, is not caused by the world.
            hosted.host.invalidate()
            return error
        return None

    def _upkeep(self, worked: bool) -> bool:
        """Renew leases, compact and release idle worlds at intervals. Returns whether more remains."""
        now_ns = self.store.now_ns()
        if worked and now_ns < self._upkeep_at_ns:
            return False
        self._upkeep_at_ns = now_ns + int(min(UPKEEP_S, self.policy.lease_ttl_s / 20) * S)
        self._renew_leases()
        self._compact()
        return self._release_idle(RELEASED_BUSY if worked else RELEASED_IDLE)

    def _renew_leases(self) -> None:
        now_ns = self.store.now_ns()
        ttl_ns = int(self.policy.lease_ttl_s * S)
        due = [hosted for hosted in self._hosted.values() if now_ns >= hosted.renew_at_ns]
        for batch in (due[at : at + BATCH_MAX] for at in range(0, len(due), BATCH_MAX)):
            answers: list[leases.Lease | None] = self.store.transact(
                leases.renew, [hosted.host.lease for hosted in batch], ttl_ns
            )
            for hosted, answer in zip(batch, answers, strict=True):
                if answer is None:
                    world_id = hosted.host.world.world_id
                    hosted.host.warn("lease lost")
                    del self._hosted[world_id]
                else:
                    hosted.host.lease = answer
                    hosted.renew_at_ns = self._renew_at_ns(answer)

    def _release_idle(self, limit: int) -> bool:
        """Release at most `limit` idle worlds, so that active worlds do not wait."""
        idle_ns = self.store.now_ns() - int(self.policy.idle_s * S)
        idle = [
            w
            for w, hosted in self._hosted.items()
            if hosted.active_ns < idle_ns and not self.committer.is_in_flight(w)
        ]
        self._release_worlds(idle[:limit])
        return len(idle) > limit

    def _compact(self) -> None:
        """Compact one journal segment of a few worlds. Safe to interrupt."""
        due = [hosted.host for hosted in self._hosted.values() if hosted.host.compactable]
        for host in due[: self.policy.compacted_per_tick]:
            try:
                host.compactable = self.store.transact(host.compact) > 0
            except (Fenced, Conflict, CommitUnknown, Busy):
                host.compactable = False

    # -- releasing worlds --------------------------------------------------------------------------

    def _release_worlds(self, world_ids: list[str]) -> None:
        """Release worlds, each with a final snapshot. The next host, possibly with newer code,
        starts from it and replays nothing.
        """
        hosts = [self._hosted.pop(world_id).host for world_id in world_ids]
        lasts = [(host.lease, host.final_cycle()) for host in hosts]
        without_snapshot = [lease for lease, last in lasts if last is None]
        with self.store.batched():
            releases = [
                self.store.submit(
                    commit_and_release, [last for _, last in some], [lease for lease, _ in some]
                )
                for some in _batches([(lease, last) for lease, last in lasts if last is not None])
            ]
            releases += [
                self.store.submit(commit_and_release, [], without_snapshot[at : at + BATCH_MAX])
                for at in range(0, len(without_snapshot), BATCH_MAX)
            ]
        for future in releases:
            # A lease that cannot be released expires.
            with contextlib.suppress(HoldfastError):
                future.result()

    def _stop_before_unknown(self, world_ids: list[str]) -> None:
        """Release worlds whose next item this code does not know (see `world.unknown`)."""
        stopping: list[WorldStop] = []
        for world_id in world_ids:
            host = self._hosted[world_id].host
            assert host.stop_request is not None
            try:
                last = host.final_cycle()
            except _WORLD_ERRORS as error:
                self._park_world(world_id, error)
                continue
            del self._hosted[world_id]
            need, seq, since_ns = host.stop_request
            stopping.append(WorldStop(world_id, host.lease, need, seq, since_ns, last))
        self._stop_worlds(stopping)

    def _stop_for_unknown_entry(self, world_id: str, error: UnknownEvent) -> WorldStop:
        """Stop a world whose journal this code cannot replay. Only code that knows the entry may
        host it.
        """
        host = self._hosted.pop(world_id).host
        need = CodeRequirement(host.world.definition.type, error.side, error.type, error.version)
        return WorldStop(world_id, host.lease, need)

    def _block_world(self, world_id: str, error: HoldfastError) -> None:
        """Park a world after an error, or release it to other code.

        It is released if its replay diverges at an entry written by other code: then only that code
        may host it. If that code has other state fields, the world waits for such a worker. If the
        fields are the same, a live worker must have that code, otherwise the world is parked.
        """
        made_by = error.fields.get("made_by")
        if not isinstance(error, ReplayDiverged) or not isinstance(made_by, str):
            self._park_world(world_id, error)
            return
        program = self._hosted[world_id].host.world.definition
        need = CodeRequirement(
            program.type, REPLAY if program.has_shape_of(made_by) else CODE, made_by
        )
        if need.side == REPLAY and not self.store.read(self._has_capable_worker, need):
            self._park_world(world_id, error)
            return
        lease = self._hosted.pop(world_id).host.lease
        stop = WorldStop(world_id, lease, need, diverging_height=error.height, why=str(error))
        self._stop_worlds([stop])

    def _has_capable_worker(self, txn: Txn, need: CodeRequirement) -> bool:
        """Whether another live worker has the needed code."""
        for record in worker_registry.list_registered(txn, self.universe):
            if record.worker == self.worker or not record.accepts(self.name) or not record.code:
                continue
            code = declarations.read(txn, self.universe, record.code)
            live = self.store.now_ns() < record.heartbeat_ns + worker_registry.TTL_NS
            if live and code is not None and code.declares(need.world, need.cause, need.version):
                return True
        return False

    def _stop_worlds(self, stops: list[WorldStop]) -> None:
        with self.store.batched():
            stopping = [
                self.store.submit(
                    stop_and_release,
                    self.universe,
                    stop.world_id,
                    stop.lease,
                    stop.need,
                    seq=stop.seq,
                    last=stop.last,
                    since_ns=stop.since_ns,
                    height=stop.diverging_height,
                    why=stop.why,
                )
                for stop in stops
            ]
        for future in stopping:
            # A lease that cannot be released expires.
            with contextlib.suppress(Fenced, Conflict, CommitUnknown, Busy):
                future.result()

    def _clear_runnable(self, world_ids: list[str]) -> None:
        futures = [
            self.store.submit(catalog.clear_runnable, self.universe, world_id, self.worker)
            for world_id in world_ids
        ]
        for future in futures:
            future.result()

    def _park_world(self, world_id: str, error: HoldfastError) -> None:
        """Park a world, unless its lease is lost."""
        height = error.fields.get("height", 0)
        blocker = WorldBlocker(error.code, str(error), height if isinstance(height, int) else 0)
        host = self._hosted.pop(world_id).host
        host.warn("world parked", code=error.code, error=str(error))
        with contextlib.suppress(Fenced):
            self.store.transact(hosting_lease.park, self.universe, world_id, host.lease, blocker)

    def _renew_at_ns(self, lease: leases.Lease) -> int:
        return lease.expires_ns - int(self.policy.lease_ttl_s * self.policy.renewal_margin * S)


def build_declaration(programs: dict[str, WorldDefinition]) -> declarations.Declaration:
    """Build the code declaration for the orchestrator: the known causes of each world type, and its
    code versions.
    """
    return declarations.make_declaration(
        {
            type: {
                f"{side}:{name}": version
                for (side, name), version in program.declared_versions.items()
            }
            | {f"{CODE}:{name}": 0 for name in (program.version, program.code)}
            for type, program in programs.items()
        }
    )


def _batches(cycles: list[tuple[T, Cycle]]) -> Iterator[list[tuple[T, Cycle]]]:
    some: list[tuple[T, Cycle]] = []
    size = 0
    for of, cycle in cycles:
        if some and (len(some) == CYCLES_MAX or size + cycle.size > CYCLES_BYTES_MAX):
            yield some
            some, size = [], 0
        some.append((of, cycle))
        size += cycle.size
    if some:
        yield some
