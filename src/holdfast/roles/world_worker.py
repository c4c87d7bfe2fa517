"""The world worker: hosts many worlds in one process (document 004, role 2).

One tick: take hints, acquire leases, run one cycle of each world, commit all cycles together, renew
and release leases. A world that is fenced is dropped at once; one that diverges is parked, or given back
where other code made the entry (`_block`). No error
leaves a tick with a state in memory that is not in the journal (see `host`), so a tick that failed
is simply followed by another.

A tick takes a bounded time, or leases would run out in it: worlds that it does not reach are the
next tick's first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.authority import authority, declarations, workers
from holdfast.clock import MS, SYSTEM, Clock, S
from holdfast.config import BATCH_MAX, CYCLES_BYTES_MAX, CYCLES_MAX, UNKNOWN_EVENT_S
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
from holdfast.roles import carrying
from holdfast.roles.carrying import Carriage
from holdfast.roles.role import Role
from holdfast.runner.bell import Bell
from holdfast.runner.parcel import Parcel
from holdfast.store.api import Future, Pending, Store, Txn, glance
from holdfast.world import catalog, redrive, tenure
from holdfast.world.catalog import Blocker, WorldRecord
from holdfast.world.context import Vocabulary
from holdfast.world.cycle import Carried, Cycle, commit, leave, stop
from holdfast.world.host import Budgets, Host, SnapshotPolicy
from holdfast.world.kernel import World
from holdfast.world.need import CODE, REPEAT, WORLD, Need
from holdfast.world.program import Program

T = TypeVar("T")
# Cycles that were sent to be committed, the offers that went with them, and the answer to both.
Sent = tuple[list[tuple[str, Cycle]], list[Parcel], Future[Any]]
# A world that is given back: what it needs, the seq before which it stops and since when that waits, a
# last snapshot; or the entry that other code made, and how this code differs there.
Stopping = tuple[str, Need, int, int, leases.Lease, Cycle | None, int, str]

# How often a busy worker looks after leases and idle worlds, and how many of these it then releases.
UPKEEP_S = 0.05
RELEASED_BUSY = 8
RELEASED_IDLE = 256
# While cycles are under way, hints are looked for this often.
LOOK_NS = 4 * MS
# What a world cannot get over by being tried again.
_BLOCKING = (ReplayDiverged, Invalid, StoreCorrupt, NotFound)


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    lease_ttl_s: float = 10.0
    # Renew when this much of the time to live is left.
    renewal_margin: float = 0.6
    # A world without work for this long is released and forgotten.
    idle_s: float = 15.0
    worlds_per_tick: int = 512
    # After this long no further world is begun: what is done is committed, and leases are renewed.
    tick_s: float = 1.0
    stuck_max: int = 5
    heartbeat_s: float = 1.0
    compacted_per_tick: int = 4
    # A world that another still holds is asked for again after this long.
    retry_s: float = 0.1
    # An item that no live worker knows is a dead letter after this long, in store time.
    unknown_event_s: float = UNKNOWN_EVENT_S
    budgets: Budgets = field(default_factory=Budgets)
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)


@dataclass(slots=True)
class Hosted:
    host: Host
    renew_at_ns: int
    active_ns: int
    # Messages that it still handles by itself and one by one, so that the loss of its lease is held
    # against the right one (see `tenure`): the culprit is among those of one batch.
    suspect: int


class WorldWorker(Role):
    name = "world"

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        programs: dict[str, Program],
        vocabulary: Vocabulary,
        worker: str,
        incarnation: str,
        policy: WorkerPolicy | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(store, clock)
        self.universe = universe
        self.worker = worker
        self.incarnation = incarnation
        self.policy = policy or WorkerPolicy()
        self._programs = programs
        self._declaration = declaration_of(programs)
        self._code = declarations.digest(self._declaration)
        # Whether that is written down, as far as the last heartbeat could tell.
        self._declared = False
        self._vocabulary = vocabulary
        self._hosted: dict[str, Hosted] = {}
        # Worlds that another holds for now: not asked for again before this time.
        self._later: dict[str, int] = {}
        # Where the next tick goes on among the hints; empty: at the first.
        self._turn = b""
        self._upkeep_at_ns = 0
        self._beat_at_ns = 0
        self._beat_epoch = -1
        self.carriage = Carriage(self)
        self._bell: Bell | None = None
        self._look_at_ns = 0

    @property
    def topics(self) -> Sequence[str]:
        return (catalog.topic(self.universe, self.worker),)

    @property
    def hosted(self) -> list[str]:
        return list(self._hosted)

    @property
    def working_on(self) -> tuple[str, int] | None:
        """The world, and the seq of its inbox, that a reducer is at right now."""
        for hosted in list(self._hosted.values()):
            if hosted.host.working_on:
                world = hosted.host.world
                return f"{world.program.type}/{world.name}", hosted.host.working_on
        return None

    def tick(self) -> bool:
        """Drain, step, append, publish, snapshot, renew: once for every world with work."""
        stop_ns = self.clock.mono_ns() + int(self.policy.tick_s * S)
        carried = self.carriage.turn(stop_ns)
        if self.carriage.busy and self.clock.mono_ns() < self._look_at_ns:
            return self.carriage.waiting
        self._look_at_ns = self.clock.mono_ns() + LOOK_NS
        self._heartbeat()
        self._redeliver()
        wanted = {w: at for w, at in self._runnable().items() if not self.carriage.has(w)}
        self._acquire([world_id for world_id in wanted if world_id not in self._hosted])
        worked = self._work(wanted)
        more = self._upkeep(worked or carried) or worked or bool(self._turn)
        return more or self.carriage.waiting

    def next_s(self) -> float:
        if self.carriage.busy:
            return LOOK_NS / S
        now_ns = self.store.now_ns()
        times = [hosted.renew_at_ns for hosted in self._hosted.values()]
        times += [*self._later.values(), self._beat_at_ns]
        soonest_ns = min(times, default=now_ns + int(self.idle_s * S))
        return min(max(soonest_ns - now_ns, 0) / S, self.idle_s)

    def run(self) -> None:
        bell = self._bell = Bell(self.store, self.topics, name=self.worker)
        self.carriage.open(bell)
        try:
            super().run()
        finally:
            self.carriage.close()
            bell.close()

    def _wait(self, since: int, timeout_s: float) -> int:
        if timeout_s <= 0 or self._bell is None:
            return super()._wait(since, timeout_s)
        if self.carriage.busy:
            self._bell.rest(timeout_s)
        else:
            self._bell.wait(timeout_s, since)
        return since

    def finish(self) -> None:
        """Give every world back, so that the next worker need not wait for leases to expire."""
        self.carriage.finish()
        self._release(list(self._hosted))
        self.store.transact(workers.forget, self.universe, self.worker, self.incarnation)

    # -- for the carriage ----------------------------------------------------------------------

    def carriable(self, world_id: str) -> bool:
        hosted = self._hosted.get(world_id)
        return hosted is not None and not hosted.suspect

    def host_of(self, world_id: str) -> Host:
        return self._hosted[world_id].host

    def drain_all(self, world_ids: Sequence[str]) -> dict[str, list[inbox.Ingress]]:
        found: dict[str, list[inbox.Ingress]] = glance(self.store, self._drain, world_ids)
        return found

    def prepared(
        self, world_id: str, waiting: list[inbox.Ingress], carried: list[Carried]
    ) -> Cycle | None:
        try:
            return self._hosted[world_id].host.prepare(self.store, waiting=waiting, carried=carried)
        except _BLOCKING as error:
            self._block(world_id, error)
            return None

    # -- the parts of a tick -------------------------------------------------------------------

    def _heartbeat(self) -> None:
        """Say that we live, now and then, and at once when another leads."""
        now_ns = self.store.now_ns()
        epoch: int = glance(self.store, authority.epoch, self.universe)
        if now_ns < self._beat_at_ns and epoch == self._beat_epoch:
            return
        answer: workers.WorkerRecord = self.store.transact(self._beat)
        self._declared = answer.code == self._code
        self._beat_at_ns = now_ns + int(self.policy.heartbeat_s * S)
        self._beat_epoch = answer.authority_epoch

    def _beat(self, txn: Txn) -> Pending[workers.WorkerRecord]:
        if not self._declared:
            declarations.write(txn, self.universe, self._declaration)
        hosted = len(self._hosted)
        beat: Pending[workers.WorkerRecord] = workers.heartbeat(
            txn, self.universe, self.worker, self.incarnation, (self.name,), hosted, 0, self._code
        )
        return beat

    def _redeliver(self) -> None:
        """Failed events that an operator has redriven go back to their inboxes."""
        if glance(self.store, redrive.waiting, self.universe):
            self.store.transact(redrive.redeliver, self.universe, self.worker)

    def _runnable(self) -> dict[str, bytes]:
        """Hinted worlds that are ours, and where their hints lie. It is by a hint, too, that we hear
        of a world that is ours no more."""
        hinted: list[tuple[bytes, str, bool]] = glance(self.store, self._hinted)
        now_ns = self.store.now_ns()
        self._later = {w: at_ns for w, at_ns in self._later.items() if at_ns > now_ns}
        full = len(hinted) == self.policy.worlds_per_tick
        self._turn = hinted[-1][0] + b"\x00" if full else b""
        not_ours = [world_id for _, world_id, ours in hinted if not ours]
        self._release([world_id for world_id in not_ours if world_id in self._hosted])
        self._settle_hints(not_ours)
        return {w: at for at, w, ours in hinted if ours and w not in self._later}

    def _hinted(self, txn: Txn) -> list[tuple[bytes, str, bool]]:
        limit = self.policy.worlds_per_tick
        found = catalog.hints_from(txn, self.universe, self.worker, self._turn, limit)
        if not found and self._turn:
            found = catalog.hints_from(txn, self.universe, self.worker, b"", limit)
        return [(at, world_id, self._is_ours(txn, world_id)) for at, world_id in found]

    def _is_ours(self, txn: Txn, world_id: str) -> bool:
        found = catalog.assignment(txn, self.universe, world_id)
        return found is not None and found.desired_worker_id == self.worker

    def _acquire(self, world_ids: list[str]) -> None:
        if not world_ids:
            return
        ttl_ns = int(self.policy.lease_ttl_s * S)
        answers: list[tenure.Granted] = self.store.transact(
            tenure.acquire,
            self.universe,
            world_ids,
            self.worker,
            self.incarnation,
            ttl_ns,
            self.policy.stuck_max,
        )
        now_ns = self.store.now_ns()
        strange: list[Stopping] = []
        refused: list[str] = []
        for answer in answers:
            if answer.lease is None or answer.record is None:
                if answer.refusal == tenure.HELD:
                    # A holder that lets go does so at once; one that died is waited for.
                    self._later[answer.world_id] = now_ns + int(self.policy.retry_s * S)
                else:
                    refused.append(answer.world_id)
                continue
            program = self._programs.get(answer.record.type)
            if program is None:
                need = Need(answer.record.type, WORLD, answer.record.type)
                strange.append((answer.world_id, need, 0, 0, answer.lease, None, 0, ""))
                continue
            self._hosted[answer.world_id] = Hosted(
                self._host(answer.record, answer.lease, program),
                self._renew_at(answer.lease),
                now_ns,
                self.policy.budgets.max_inbox_batch * tenure.suspect(answer.record),
            )
        self._settle_hints(refused)
        self._stop(strange)

    def _host(self, record: WorldRecord, lease: leases.Lease, program: Program) -> Host:
        return Host(
            World(self.universe, record.world_id, record.name, program, self._vocabulary),
            lease,
            clock=self.clock,
            budgets=self.policy.budgets,
            policy=self.policy.snapshots,
            unknown=record.unknown,
        )

    def _work(self, wanted: dict[str, bytes]) -> bool:
        """Run a cycle of each world. Suspects come last and alone: what they do, they do to
        nobody else's commit."""
        stop_ns = self.clock.mono_ns() + int(self.policy.tick_s * S)
        ours = [(w, at) for w, at in wanted.items() if w in self._hosted]
        sound = [(w, at) for w, at in ours if not self._hosted[w].suspect]
        worked = self._commit(sound, stop_ns)
        for world_id, at in ours:
            hosted = self._hosted.get(world_id)
            if hosted is None or not hosted.suspect:
                continue
            if self.clock.mono_ns() >= stop_ns:
                self._turn = min(self._turn or at, at)
                break
            try:
                self.store.transact(tenure.try_alone, self.universe, world_id, hosted.host.lease)
            except Fenced:
                del self._hosted[world_id]
                continue
            worked |= self._commit([(world_id, at)], stop_ns, alone=True)
        return worked

    def _commit(
        self, wanted: list[tuple[str, bytes]], stop_ns: int, *, alone: bool = False
    ) -> bool:
        """Run a cycle of each and commit them, some to a call: while the writer commits some, the
        next are run, and adapters begin with what the first ones want. Each fails alone."""
        under_way: list[Sent] = []
        try:
            for start in range(0, len(wanted), CYCLES_MAX):
                some = wanted[start : start + CYCLES_MAX]
                if under_way and self.clock.mono_ns() >= stop_ns:
                    self._turn = some[0][1]
                    break
                under_way += self._send(self._prepare(some, stop_ns))
        finally:
            if self._bell is None or alone:
                self._settle(under_way)
            else:
                # Their answers ring, and meanwhile others go on.
                for sent in under_way:
                    self.carriage.follow(*sent)
        return bool(under_way)

    def _prepare(self, wanted: list[tuple[str, bytes]], stop_ns: int) -> list[tuple[str, Cycle]]:
        cycles: list[tuple[str, Cycle]] = []
        workless: list[str] = []
        stopped: list[str] = []
        strange: list[Stopping] = []
        drained = self.drain_all([world_id for world_id, _ in wanted])
        for world_id, at in wanted:
            if cycles and self.clock.mono_ns() >= stop_ns:
                self._turn = at
                break
            try:
                hosted = self._hosted[world_id]
                cycle = hosted.host.prepare(
                    self.store, singly=hosted.suspect > 0, waiting=drained.get(world_id)
                )
            except UnknownEvent as error:
                strange.append(self._strange(world_id, error))
                continue
            except _BLOCKING as error:
                self._block(world_id, error)
                continue
            if cycle is None and hosted.host.stops is not None:
                stopped.append(world_id)
            elif cycle is None:
                # A hint without work: the inbox was drained by an earlier cycle.
                workless.append(world_id)
            else:
                cycles.append((world_id, cycle))
        self._settle_hints(workless)
        self._stop_before(stopped)
        self._stop(strange)
        return cycles

    def _drain(self, txn: Txn, world_ids: Sequence[str]) -> dict[str, list[inbox.Ingress]]:
        """What waits for worlds whose state is in memory: one look at the store for all of them."""
        hosts = [self._hosted[world_id] for world_id in world_ids]
        return {
            hosted.host.world.world_id: hosted.host.drain(txn, hosted.host.limit)
            for hosted in hosts
            if hosted.host.loaded and not hosted.suspect
        }

    def _send(self, cycles: list[tuple[str, Cycle]]) -> list[Sent]:
        with self.store.together():
            return [self._submit(some) for some in _batches(cycles)]

    def _submit(self, some: list[tuple[str, Cycle]]) -> Sent:
        """Runners that wait for what these want have it claimed in the same commit."""
        cycles = [cycle for _, cycle in some]
        offers = self.carriage.offers(cycles)
        if offers:
            return some, offers, self.store.submit(carrying.bring, offers, cycles)
        # Alone it is one operation, and its answer the operation's.
        return some, offers, self.store.submit(commit, cycles)

    def _settle(self, under_way: list[Sent]) -> None:
        now_ns = self.store.now_ns()
        trouble: HoldfastError | None = None
        for some, offers, future in under_way:
            try:
                answers = carrying.answers(future, offers, ())
            except HoldfastError as error:
                answers = [error] * len(some)
            for (world_id, cycle), answer in zip(some, answers, strict=True):
                trouble = self.committed(world_id, cycle, answer, now_ns) or trouble
        if trouble is not None:
            raise trouble

    def committed(
        self, world_id: str, cycle: Cycle, error: HoldfastError | None, now_ns: int
    ) -> HoldfastError | None:
        """Take the outcome of a cycle; what is the store's trouble is given back."""
        hosted = self._hosted.get(world_id)
        if hosted is None or hosted.host.lease.epoch != cycle.lease.epoch:
            # It was let go while its cycle was under way.
            return None
        if error is None:
            hosted.host.settle(cycle)
            hosted.active_ns = now_ns
            hosted.suspect = max(hosted.suspect - len(cycle.bodies), 0)
        elif isinstance(error, Fenced):
            # Somebody else may act for this world now: not one more write.
            del self._hosted[world_id]
        elif isinstance(error, (HeadMoved, Conflict, CommitUnknown, Busy)):
            hosted.host.forget()
        elif isinstance(error, _BLOCKING):
            self._park(world_id, error)
        else:
            # The store's trouble (a full disk, say) is no fault of the world.
            hosted.host.forget()
            return error
        return None

    def _upkeep(self, worked: bool) -> bool:
        """What is due for all hosted worlds, now and then; whether there is more of it."""
        now_ns = self.store.now_ns()
        if worked and now_ns < self._upkeep_at_ns:
            return False
        self._upkeep_at_ns = now_ns + int(min(UPKEEP_S, self.policy.lease_ttl_s / 20) * S)
        self._renew()
        self._compact()
        return self._release_idle(RELEASED_BUSY if worked else RELEASED_IDLE)

    def _renew(self) -> None:
        now_ns = self.store.now_ns()
        ttl_ns = int(self.policy.lease_ttl_s * S)
        due = [hosted for hosted in self._hosted.values() if now_ns >= hosted.renew_at_ns]
        for batch in (due[at : at + BATCH_MAX] for at in range(0, len(due), BATCH_MAX)):
            answers: list[leases.Lease | None] = self.store.transact(
                leases.renew, [hosted.host.lease for hosted in batch], ttl_ns
            )
            for hosted, answer in zip(batch, answers, strict=True):
                if answer is None:
                    del self._hosted[hosted.host.world.world_id]
                else:
                    hosted.host.lease = answer
                    hosted.renew_at_ns = self._renew_at(answer)

    def _release_idle(self, limit: int) -> bool:
        """Some at a time: others wait for this worker meanwhile."""
        idle_ns = self.store.now_ns() - int(self.policy.idle_s * S)
        idle = [
            w
            for w, hosted in self._hosted.items()
            if hosted.active_ns < idle_ns and not self.carriage.has(w)
        ]
        self._release(idle[:limit])
        return len(idle) > limit

    def _compact(self) -> None:
        """Pack old entries of a few worlds, a segment each: upkeep that may stop anywhere."""
        due = [hosted.host for hosted in self._hosted.values() if hosted.host.compactable]
        for host in due[: self.policy.compacted_per_tick]:
            try:
                host.compactable = self.store.transact(host.compact) > 0
            except (Fenced, Conflict, CommitUnknown, Busy):
                host.compactable = False

    # -- letting go ----------------------------------------------------------------------------

    def _release(self, world_ids: list[str]) -> None:
        """Give worlds back, each with a last snapshot: whoever hosts it next, maybe with newer
        code, starts from there and repeats nothing."""
        hosts = [self._hosted.pop(world_id).host for world_id in world_ids]
        lasts = [(host.lease, host.last()) for host in hosts]
        plain = [lease for lease, last in lasts if last is None]
        with self.store.together():
            leaving = [
                self.store.submit(leave, [last for _, last in some], [lease for lease, _ in some])
                for some in _batches([(lease, last) for lease, last in lasts if last is not None])
            ]
            leaving += [
                self.store.submit(leave, [], plain[at : at + BATCH_MAX])
                for at in range(0, len(plain), BATCH_MAX)
            ]
        for future in leaving:
            # What cannot be given back runs out.
            with contextlib.suppress(HoldfastError):
                future.result()

    def _stop_before(self, world_ids: list[str]) -> None:
        """Give worlds back whose next item this code does not know (see `world.unknown`)."""
        stopping: list[Stopping] = []
        for world_id in world_ids:
            host = self._hosted[world_id].host
            assert host.stops is not None
            try:
                last = host.last()
            except _BLOCKING as error:
                self._park(world_id, error)
                continue
            del self._hosted[world_id]
            stopping.append((world_id, *host.stops, host.lease, last, 0, ""))
        self._stop(stopping)

    def _strange(self, world_id: str, error: UnknownEvent) -> Stopping:
        """Its journal holds what this code cannot repeat: only code that knows it may host it."""
        host = self._hosted.pop(world_id).host
        need = Need(host.world.program.type, error.side, error.type, error.version)
        return world_id, need, 0, 0, host.lease, None, 0, ""

    def _block(self, world_id: str, error: HoldfastError) -> None:
        """Let go of a world that this code must not go on with. It is parked, unless its journal differs
        at an entry of other code: then only that code may host it. If the state of that has other fields,
        it is waited for; if it has the same, a live worker must have it."""
        made_by = error.fields.get("made_by")
        if not isinstance(error, ReplayDiverged) or not isinstance(made_by, str):
            self._park(world_id, error)
            return
        program = self._hosted[world_id].host.world.program
        need = Need(program.type, REPEAT if program.has_shape_of(made_by) else CODE, made_by)
        if need.side == REPEAT and not self.store.read(self._hosted_elsewhere, need):
            self._park(world_id, error)
            return
        held = self._hosted.pop(world_id).host.lease
        self._stop([(world_id, need, 0, 0, held, None, error.height, str(error))])

    def _hosted_elsewhere(self, txn: Txn, need: Need) -> bool:
        """Whether a worker that spoke lately has the code that is needed."""
        for one in workers.known(txn, self.universe):
            if one.worker == self.worker or not one.takes(self.name) or not one.code:
                continue
            code = declarations.read(txn, self.universe, one.code)
            live = self.store.now_ns() < one.heartbeat_ns + workers.TTL_NS
            if live and code is not None and code.knows(need.world, need.cause, need.version):
                return True
        return False

    def _stop(self, some: list[Stopping]) -> None:
        with self.store.together():
            stopping = [
                self.store.submit(
                    stop, self.universe, world_id, lease, need, seq, last, since_ns, height, why
                )
                for world_id, need, seq, since_ns, lease, last, height, why in some
            ]
        for future in stopping:
            # What cannot be given back runs out.
            with contextlib.suppress(Fenced, Conflict, CommitUnknown, Busy):
                future.result()

    def _settle_hints(self, world_ids: list[str]) -> None:
        settling = [
            self.store.submit(catalog.settle, self.universe, world_id, self.worker)
            for world_id in world_ids
        ]
        for future in settling:
            future.result()

    def _park(self, world_id: str, error: HoldfastError) -> None:
        """Stop a world that must not go on, unless it is not ours to stop any more."""
        height = error.fields.get("height", 0)
        blocker = Blocker(error.code, str(error), height if isinstance(height, int) else 0)
        held = self._hosted.pop(world_id).host.lease
        with contextlib.suppress(Fenced):
            self.store.transact(tenure.park, self.universe, world_id, held, blocker)

    def _renew_at(self, lease: leases.Lease) -> int:
        return lease.expires_ns - int(self.policy.lease_ttl_s * self.policy.renewal_margin * S)


def declaration_of(programs: dict[str, Program]) -> declarations.Declaration:
    """What workers tell the orchestrator of their code: what each type knows, and which code it is."""
    return declarations.declaration(
        {
            type: {f"{side}:{name}": version for (side, name), version in program.known.items()}
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
