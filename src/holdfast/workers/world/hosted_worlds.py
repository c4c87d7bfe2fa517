"""The worlds that a world worker hosts: how it starts and ends to host them. The worker renews their leases.

- `acquire` requests leases.
- `release` gives worlds to any worker, each with a final snapshot.
- `stop` releases worlds that need other code than this worker has.
- `park` ends the hosting of a world until an operator acts. `block` parks it, or stops it for other code.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from holdfast.clock import Clock, S
from holdfast.config import BATCH_MAX
from holdfast.durable import lease as leases
from holdfast.errors import (
    Busy,
    CommitUnknown,
    Conflict,
    Fenced,
    HoldfastError,
    Invalid,
    NotFound,
    ReplayDiverged,
    StoreCorrupt,
    UnknownEvent,
)
from holdfast.leadership import declarations, worker_registry
from holdfast.runner.lease_supervision import LeaseCounters
from holdfast.store.api import Store, Txn
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.world_stop import WorldStop
from holdfast.world import hosting_lease
from holdfast.world.catalog import WorldBlocker, WorldRecord
from holdfast.world.code_requirement import CODE, REPLAY, WORLD_TYPE, CodeRequirement
from holdfast.world.context import TypeRegistry
from holdfast.world.cycle import commit_and_release, commit_batches, stop_and_release
from holdfast.world.definition import WorldDefinition
from holdfast.world.host import WorldHost
from holdfast.world.reducer import WorldSpec

# The name of the service in the records of live workers.
WORLD_SERVICE = "world"
# Errors of a world that a retry cannot fix.
WORLD_ERRORS = (ReplayDiverged, Invalid, StoreCorrupt, NotFound)


@dataclass(slots=True)
class HostedWorld:
    host: WorldHost
    renew_at_ns: int
    active_ns: int
    # The number of events that the world still processes isolated and one at a time. A poison event
    # is in the first batch, so a lost lease then identifies it (see `hosting_lease`).
    isolated_left: int


class HostedWorlds(dict[str, HostedWorld]):
    """The hosted worlds by id."""

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        programs: dict[str, WorldDefinition],
        vocabulary: TypeRegistry,
        worker: str,
        incarnation: str,
        policy: WorldWorkerPolicy,
        clock: Clock,
    ) -> None:
        super().__init__()
        self._store = store
        self._universe = universe
        self._programs = programs
        self._vocabulary = vocabulary
        self._worker = worker
        self._incarnation = incarnation
        self._policy = policy
        self._clock = clock
        # Worlds held by another worker, and the time of the next lease request.
        self.retry_after_ns: dict[str, int] = {}
        self.leases = LeaseCounters()

    def acquire(self, world_ids: list[str]) -> list[str]:
        """Acquire the leases of worlds and host them. Returns the worlds whose lease is refused."""
        ttl_ns = int(self._policy.lease_ttl_s * S)
        answers: list[hosting_lease.HostingGrant] = self._store.transact(
            hosting_lease.acquire,
            self._universe,
            world_ids,
            self._worker,
            self._incarnation,
            ttl_ns,
            self._policy.stuck_max,
        )
        now_ns = self._store.now_ns()
        stops: list[WorldStop] = []
        refused: list[str] = []
        for answer in answers:
            if answer.lease is None or answer.record is None:
                if answer.refusal == hosting_lease.LEASE_HELD:
                    # A live holder releases at once. The lease of a dead one must expire.
                    self.retry_after_ns[answer.world_id] = now_ns + int(self._policy.retry_s * S)
                else:
                    refused.append(answer.world_id)
                continue
            program = self._programs.get(answer.record.type)
            if program is None:
                need = CodeRequirement(answer.record.type, WORLD_TYPE, answer.record.type)
                stops.append(WorldStop(answer.world_id, answer.lease, need))
                continue
            self[answer.world_id] = HostedWorld(
                self._new_host(answer.record, answer.lease, program),
                self.renewal_ns(answer.lease),
                now_ns,
                self._policy.budgets.max_inbox_batch
                * hosting_lease.is_poison_suspect(answer.record),
            )
        self.stop(stops)
        return refused

    def _new_host(
        self, record: WorldRecord, lease: leases.Lease, program: WorldDefinition
    ) -> WorldHost:
        return WorldHost(
            WorldSpec(self._universe, record.world_id, record.name, program, self._vocabulary),
            lease,
            clock=self._clock,
            budgets=self._policy.budgets,
            policy=self._policy.snapshots,
            unknown=record.unknown,
        )

    # -- releasing worlds --------------------------------------------------------------------------

    def release(self, world_ids: list[str]) -> None:
        """Release worlds, each with a final snapshot. The next host, possibly with newer code,
        starts from it and replays nothing.
        """
        hosts = [self.pop(world_id).host for world_id in world_ids]
        lasts = [(host.lease, host.final_cycle()) for host in hosts]
        without_snapshot = [lease for lease, last in lasts if last is None]
        with self._store.batched():
            releases = [
                self._store.submit(
                    commit_and_release, [last for _, last in some], [lease for lease, _ in some]
                )
                for some in commit_batches(
                    [(lease, last) for lease, last in lasts if last is not None]
                )
            ]
            releases += [
                self._store.submit(commit_and_release, [], without_snapshot[at : at + BATCH_MAX])
                for at in range(0, len(without_snapshot), BATCH_MAX)
            ]
        for future in releases:
            # A lease that cannot be released expires.
            with contextlib.suppress(HoldfastError):
                future.result()

    def stop_before_unknown(self, world_ids: list[str]) -> None:
        """Release worlds whose next item this code does not know (see `world.unknown`)."""
        stopping: list[WorldStop] = []
        for world_id in world_ids:
            host = self[world_id].host
            assert host.stop_request is not None
            try:
                last = host.final_cycle()
            except WORLD_ERRORS as error:
                self.park(world_id, error)
                continue
            del self[world_id]
            need, seq, since_ns = host.stop_request
            stopping.append(WorldStop(world_id, host.lease, need, seq, since_ns, last))
        self.stop(stopping)

    def stop_for_unknown_entry(self, world_id: str, error: UnknownEvent) -> WorldStop:
        """Stop a world whose journal this code cannot replay. Only code that knows the entry may
        host it.
        """
        host = self.pop(world_id).host
        need = CodeRequirement(host.world.definition.type, error.side, error.type, error.version)
        return WorldStop(world_id, host.lease, need)

    def block(self, world_id: str, error: HoldfastError) -> None:
        """Park a world after an error, or release it to other code.

        It is released if its replay diverges at an entry written by other code: then only that code
        may host it. If that code has other state fields, the world waits for such a worker. If the
        fields are the same, a live worker must have that code, otherwise the world is parked.
        """
        made_by = error.fields.get("made_by")
        if not isinstance(error, ReplayDiverged) or not isinstance(made_by, str):
            self.park(world_id, error)
            return
        program = self[world_id].host.world.definition
        need = CodeRequirement(
            program.type, REPLAY if program.has_shape_of(made_by) else CODE, made_by
        )
        if need.side == REPLAY and not self._store.read(self._has_capable_worker, need):
            self.park(world_id, error)
            return
        lease = self.pop(world_id).host.lease
        stop = WorldStop(world_id, lease, need, diverging_height=error.height, why=str(error))
        self.stop([stop])

    def _has_capable_worker(self, txn: Txn, need: CodeRequirement) -> bool:
        """Whether another live worker has the needed code."""
        for record in worker_registry.list_registered(txn, self._universe):
            if (
                record.worker == self._worker
                or not record.accepts(WORLD_SERVICE)
                or not record.code
            ):
                continue
            code = declarations.read(txn, self._universe, record.code)
            live = self._store.now_ns() < record.heartbeat_ns + worker_registry.TTL_NS
            if live and code is not None and code.declares(need.world, need.cause, need.version):
                return True
        return False

    def stop(self, stops: list[WorldStop]) -> None:
        with self._store.batched():
            stopping = [
                self._store.submit(
                    stop_and_release,
                    self._universe,
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

    def park(self, world_id: str, error: HoldfastError) -> None:
        """Park a world, unless its lease is lost."""
        height = error.fields.get("height", 0)
        blocker = WorldBlocker(error.code, str(error), height if isinstance(height, int) else 0)
        host = self.pop(world_id).host
        host.warn("world parked", code=error.code, error=str(error))
        with contextlib.suppress(Fenced):
            self._store.transact(hosting_lease.park, self._universe, world_id, host.lease, blocker)

    def renewal_ns(self, lease: leases.Lease) -> int:
        """Return the time at which a lease is renewed."""
        return lease.expires_ns - int(self._policy.lease_ttl_s * self._policy.renewal_margin * S)
