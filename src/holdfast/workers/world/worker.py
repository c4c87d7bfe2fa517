"""The world worker: hosts many worlds in one process (document 004, role 2).

One tick reads the runnable worlds, acquires leases, runs one cycle of each world, commits all
cycles together, and renews and releases leases. A fenced world is dropped at once. A world whose
replay diverges is parked, or released if other code wrote the entry (`HostedWorlds.block`). After any
error the state in memory equals the journal (see `host`), so a failed tick is simply followed by
another one.

A tick has a time limit, so that leases do not expire during it. The next tick starts with the
worlds that it did not reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast import __version__, failpoints
from holdfast.clock import MS, SYSTEM, Clock, S
from holdfast.config import BATCH_MAX, CYCLES_MAX
from holdfast.durable import inbox
from holdfast.durable import lease as leases
from holdfast.errors import (
    Busy,
    CommitUnknown,
    Conflict,
    Fenced,
    HeadMoved,
    HoldfastError,
    UnknownEvent,
)
from holdfast.leadership import declarations, leader_lease, worker_registry
from holdfast.runner.commit_handoff import Handoff
from holdfast.runner.lease_supervision import LeaseCounters
from holdfast.runner.wakeup import Wakeup
from holdfast.store.api import Deferred, Future, Store, Txn, read_stale
from holdfast.workers.service import TickService
from holdfast.workers.world import fused_commit
from holdfast.workers.world.fused_commit import FusedCommitter
from holdfast.workers.world.hosted_worlds import WORLD_ERRORS, WORLD_SERVICE, HostedWorlds
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.world_stop import WorldStop
from holdfast.world import catalog, hosting_lease, redrive
from holdfast.world.code_requirement import CODE
from holdfast.world.context import TypeRegistry
from holdfast.world.cycle import AppliedInline, Cycle, commit, commit_batches
from holdfast.world.definition import WorldDefinition
from holdfast.world.host import WorldHost

# A submitted commit: its cycles, the offers sent with them, and its future.
SentCycles = tuple[list[tuple[str, Cycle]], list[Handoff], Future[Any]]

# The upkeep interval of a busy worker, and the idle worlds released per upkeep.
UPKEEP_S = 0.05
RELEASED_BUSY = 8
RELEASED_IDLE = 256
# The interval between scans for runnable worlds while commits are in flight.
SCAN_EVERY_NS = 4 * MS


class WorldWorker(TickService):
    name = WORLD_SERVICE

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
        self._declaration = build_declaration(programs)
        self._code_digest = declarations.digest(self._declaration)
        # Whether the declaration is stored, by the last heartbeat.
        self._declared = False
        self._hosted = HostedWorlds(
            store,
            universe=universe,
            programs=programs,
            vocabulary=vocabulary,
            worker=worker,
            incarnation=incarnation,
            policy=self.policy,
            clock=clock,
        )
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
    def lease_counters(self) -> LeaseCounters:
        return self._hosted.leases

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
        times += [*self._hosted.retry_after_ns.values(), self._heartbeat_at_ns]
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
        self._hosted.release(list(self._hosted))
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
        except WORLD_ERRORS as error:
            self._hosted.block(world_id, error)
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
            version=__version__,
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
        self._hosted.retry_after_ns = {
            w: at_ns for w, at_ns in self._hosted.retry_after_ns.items() if at_ns > now_ns
        }
        full = len(hinted) == self.policy.worlds_per_tick
        self._scan_cursor = hinted[-1][0] + b"\x00" if full else b""
        not_ours = [world_id for _, world_id, ours in hinted if not ours]
        if moved := [world_id for world_id in not_ours if world_id in self._hosted]:
            self._hosted.release(moved)
        self._clear_runnable(not_ours)
        return {w: at for at, w, ours in hinted if ours and w not in self._hosted.retry_after_ns}

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
        if world_ids:
            self._clear_runnable(self._hosted.acquire(world_ids))

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
                self._hosted.leases.lost += 1
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
                stops.append(self._hosted.stop_for_unknown_entry(world_id, error))
                continue
            except WORLD_ERRORS as error:
                self._hosted.block(world_id, error)
                continue
            if cycle is None and hosted.host.stop_request is not None:
                stopped.append(world_id)
            elif cycle is None:
                # Marked runnable without work: an earlier cycle has drained the inbox.
                idle.append(world_id)
            else:
                cycles.append((world_id, cycle))
        self._clear_runnable(idle)
        if stopped:
            self._hosted.stop_before_unknown(stopped)
        if stops:
            self._hosted.stop(stops)
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
            return [self._submit_cycles(some) for some in commit_batches(cycles)]

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
                hosted.host.warn("event failed", failed)
        elif isinstance(error, Fenced):
            # Another worker may hold the lease now: no further writes.
            hosted.host.warn("write fenced")
            del self._hosted[world_id]
            self._hosted.leases.lost += 1
        elif isinstance(error, (HeadMoved, Conflict, CommitUnknown, Busy)):
            hosted.host.invalidate()
        elif isinstance(error, WORLD_ERRORS):
            self._hosted.park(world_id, error)
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
                    self._hosted.leases.lost += 1
                else:
                    hosted.host.lease = answer
                    hosted.renew_at_ns = self._hosted.renewal_ns(answer)
                    self._hosted.leases.renewed += 1

    def _release_idle(self, limit: int) -> bool:
        """Release at most `limit` idle worlds, so that active worlds do not wait."""
        idle_ns = self.store.now_ns() - int(self.policy.idle_s * S)
        idle = [
            w
            for w, hosted in self._hosted.items()
            if hosted.active_ns < idle_ns and not self.committer.is_in_flight(w)
        ]
        if idle:
            self._hosted.release(idle[:limit])
        return len(idle) > limit

    def _compact(self) -> None:
        """Compact one journal segment of a few worlds. Safe to interrupt."""
        due = [hosted.host for hosted in self._hosted.values() if hosted.host.compactable]
        for host in due[: self.policy.compacted_per_tick]:
            try:
                host.compactable = self.store.transact(host.compact) > 0
            except (Fenced, Conflict, CommitUnknown, Busy):
                host.compactable = False

    def _clear_runnable(self, world_ids: list[str]) -> None:
        futures = [
            self.store.submit(catalog.clear_runnable, self.universe, world_id, self.worker)
            for world_id in world_ids
        ]
        for future in futures:
            future.result()


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
