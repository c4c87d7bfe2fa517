"""A world while a worker hosts it: drain, step, append, publish, snapshot, one transaction a cycle.

The state in memory counts only while it is what the journal says. From `prepare` on it runs ahead,
until `settle`; whatever comes between (a commit that was refused, fenced or of unknown outcome, or
an error anywhere) leaves it to be restored from the store before the world goes on. So what a
reducer did counts exactly when its entry is durable.

A cycle has two halves, so that many worlds share one commit: `prepare` reads the inbox and runs
reducers, outside any transaction; `cycle.commit` is the transaction. `settle` takes the outcome.

A cycle ends before an item that the code does not know. When such an item is the first, `stops` names
it, and the worker gives the world back: only code that knows it, or the end of its time, goes on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from holdfast import codec
from holdfast.clock import Clock
from holdfast.config import CYCLE_BYTES_MAX
from holdfast.durable import inbox, journal
from holdfast.durable.lease import Lease
from holdfast.errors import StoreCorrupt
from holdfast.messages import Ingress, Intent
from holdfast.store.api import Store, Txn
from holdfast.world import entry, kernel
from holdfast.world.catalog import UNKNOWN_EVENT, Unknown, subject_of
from holdfast.world.cycle import Carried, Cycle, Failed, apply
from holdfast.world.kernel import Stepped, World
from holdfast.world.need import Need
from holdfast.world.program import BadState
from holdfast.world.recipients import Recipients
from holdfast.world.restore import restore
from holdfast.world.unknown import need_of


@dataclass(frozen=True, slots=True)
class Budgets:
    """How much one world does in one cycle before it is another's turn."""

    max_inbox_batch: int = 256
    max_tick_steps_per_cycle: int = 256
    max_effects_per_cycle: int = 1024
    # A guard rail for the operator; what is journaled never depends on it.
    max_cycle_wall_ms: int = 250


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """A snapshot is due after so many entries, or so many bytes of them."""

    entries: int = 1000
    bytes: int = 4 * 1024 * 1024
    keep: int = 2


class Host:
    """One world, hosted under a lease."""

    def __init__(
        self,
        world: World,
        lease: Lease,
        *,
        clock: Clock,
        budgets: Budgets,
        policy: SnapshotPolicy,
        unknown: Unknown | None = None,
    ) -> None:
        self.world = world
        self.lease = lease
        self.clock = clock
        self._budgets = budgets
        self._policy = policy
        self._subject = subject_of(world.universe, world.world_id)
        self._recipients = Recipients(world.universe, world.world_id, world.program.type)
        self.limit = min(budgets.max_inbox_batch, budgets.max_tick_steps_per_cycle)
        self._state: Any = None
        # The digest of the state after `height`, if its entry has one, and after the cycle under way.
        self._digest: bytes | None = None
        self._next_digest: bytes | None = None
        # Whether the state in memory is the one after `height`.
        self.loaded = False
        self.height = 0
        self.cursor = 0
        self._snapshot_height = 0
        self._tail_bytes = 0
        # The seq that a reducer works on right now, for the watchdog; 0 when none does.
        self.working_on = 0
        # Whether there may be entries below the baseline to pack.
        self.compactable = False
        # The item that an earlier host stopped before, and the one that this host must stop before, with
        # the time since which that is known to wait; 0: from now on.
        self._unknown = unknown
        self.stops: tuple[Need, int, int] | None = None
        # What this host has given up, and since when nobody knew that.
        self._given_up: tuple[Need, int] | None = None

    # -- the cycle -----------------------------------------------------------------------------

    def load(self, txn: Txn) -> None:
        """Take the state from the store."""
        found = restore(txn, self.world)
        self._state = found.state
        self.height = found.height
        self.cursor = found.cursor
        self._snapshot_height = found.snapshot_height
        self._tail_bytes = found.tail_bytes
        self._digest = found.digest
        self.loaded = True

    def drain(self, txn: Txn, limit: int) -> list[inbox.Ingress]:
        """What waits; the state with it, when it is not in memory."""
        if not self.loaded:
            self.load(txn)
        return inbox.read(txn, self._subject, limit)

    def prepare(
        self,
        store: Store,
        *,
        singly: bool = False,
        waiting: list[inbox.Ingress] | None = None,
        carried: Sequence[Carried] = (),
    ) -> Cycle | None:
        """Drain the inbox within the budgets and run the reducers; None when nothing is to be done.

        Reducers run outside any transaction: one that takes long holds nobody up but its world.
        `waiting` is what `drain` found, if that was asked already; the last of it are the
        receipts of those `carried`, which come with the cycle and not by the inbox.
        A state that cannot be stored is found at the end of a cycle. Then the cycle is run again
        and the state is tried after each step: the one that spoils it fails.
        """
        limit = 1 if singly else self.limit
        if waiting is None:
            waiting = store.read(self.drain, limit)
        if not waiting and not self.snapshot_due:
            return None
        tail_bytes = self._tail_bytes
        try:
            return self._prepare(store, waiting, carried, limit)
        except BadState:
            if not waiting:
                raise
        self._state = store.read(restore, self.world, at=self.height).state
        self._tail_bytes = tail_bytes
        return self._prepare(store, waiting, carried, limit, careful=True)

    def _prepare(
        self,
        store: Store,
        waiting: list[inbox.Ingress],
        carried: Sequence[Carried],
        limit: int,
        *,
        careful: bool = False,
    ) -> Cycle | None:
        bodies: list[bytes] = []
        intents: list[Intent] = []
        failed: list[Failed] = []
        self.loaded = False
        self.stops = None
        size = 0
        height, seq = self.height, self.cursor
        stop_ns = self.clock.mono_ns() + self._budgets.max_cycle_wall_ms * 1_000_000
        wall_ns = self.clock.wall_ns()
        wanted_ns = store.now_ns()
        safe = self._storable() if careful else None
        for item in waiting:
            ingress = _ingress_of(item)
            if not self.world.program.knows(ingress):
                given = self._unknown
                if given is None or not given.given_up or given.seq != item.seq:
                    need = need_of(self.world.program.type, ingress)
                    self.stops = need, item.seq, self._waits_since(need, item.at_ns)
                    break
                height, seq = height + 1, item.seq
                step = kernel.give_up(
                    self.world,
                    ingress,
                    seq=seq,
                    wall_ns=wall_ns,
                    generation=self.lease.generation,
                    base=self._snapshot_height,
                )
                bodies.append(entry.pack(step))
                given_up = Failed(
                    seq, item.body, step.error, UNKNOWN_EVENT, ingress.type, item.key or ""
                )
                failed.append(given_up)
                continue
            height, seq = height + 1, item.seq
            self.working_on = seq
            stepped = kernel.advance(
                self.world,
                self._state,
                ingress,
                seq=seq,
                height=height,
                wall_ns=wall_ns,
                entropy=self.clock.entropy(16),
                generation=self.lease.generation,
                base=self._snapshot_height,
            )
            if stepped.addressed:
                stepped = self._admitted(store, stepped)
            tried = safe
            if careful and not stepped.spoiled:
                stepped, tried = self._tried(stepped)
            body = entry.pack(stepped.step)
            bodies.append(body)
            size += len(body)
            if stepped.spoiled:
                failed.append(Failed(seq, item.body, stepped.step.error, key=item.key or ""))
                safe = self._unspoil(store, safe, bodies)
            else:
                intents += stepped.intents
                size += sum(len(intent.params) for intent in stepped.intents)
                if safe is not None:
                    safe = tried if careful else self.world.program.dump(self._state)
            if (
                len(intents) >= self._budgets.max_effects_per_cycle
                or size >= CYCLE_BYTES_MAX
                or self.clock.mono_ns() >= stop_ns
            ):
                break
        self.working_on = 0
        if not bodies and not self.snapshot_due:
            # It stops before the first: the state is as it was.
            self.loaded = True
            return None
        by_inbox = len(waiting) - len(carried)
        self._tail_bytes += sum(map(len, bodies))
        saved = self._freshen() if self._due(height) else None
        if bodies:
            # Of every cycle: what a replay makes of it is compared with this.
            found = saved or (safe if careful else None) or self._storable()
            self._next_digest = sha256(found).digest()
            bodies[-1] = entry.with_state(bodies[-1], self._next_digest)
        elif saved is not None:
            saved = self._journaled(saved)
            if saved is None:
                self.forget()
                return None
        return self._cycle(
            seq,
            bodies,
            intents,
            failed,
            saved,
            # What came by no inbox has left no hint.
            drained=len(bodies) == len(waiting) < limit and (by_inbox > 0 or not carried),
            wanted_ns=wanted_ns,
            carried=carried[: max(len(bodies) - by_inbox, 0)],
        )

    def commit(self, txn: Txn, cycle: Cycle) -> None:
        """The transaction of a cycle by itself (see `cycle.commit` for many)."""
        apply(txn, cycle)

    def settle(self, cycle: Cycle) -> None:
        """The cycle is durable: what is in memory is what the journal says."""
        self.height = cycle.expected_head + len(cycle.bodies)
        self.cursor = cycle.to_seq
        self.loaded = True
        if cycle.bodies:
            self._digest = self._next_digest
        if cycle.snapshot is not None:
            self._snapshot_height = self.height
            self._tail_bytes = 0
            self.compactable = True
        if cycle.clears and self._unknown is not None:
            if self._unknown.given_up:
                self._given_up = self._unknown.need(self.world.program.type), self._unknown.since_ns
            self._unknown = None

    def last(self) -> Cycle | None:
        """A last snapshot to leave with, if the journal went on since the one before."""
        if not self.loaded or self.height == self._snapshot_height:
            return None
        saved = self._journaled(self._freshen())
        if saved is None:
            return None
        return self._cycle(self.cursor, [], [], [], saved, drained=False)

    def compact(self, txn: Txn) -> int:
        """Pack some of what lies below the baseline; how many entries. Under the lease, as all."""
        txn.require_live(self.lease)
        return journal.compact(txn, self._subject)

    def forget(self) -> None:
        """What is in memory may not be what the journal says: read again before going on."""
        self._state = None
        self.loaded = False
        self.working_on = 0

    @property
    def snapshot_due(self) -> bool:
        return self._due(self.height)

    # -- inside --------------------------------------------------------------------------------

    def _cycle(
        self,
        to_seq: int,
        bodies: list[bytes],
        intents: list[Intent],
        failed: list[Failed],
        state: bytes | None,
        *,
        drained: bool,
        wanted_ns: int = 0,
        carried: Sequence[Carried] = (),
    ) -> Cycle:
        return Cycle(
            self.world.universe,
            self.world.world_id,
            self.lease,
            self.height,
            to_seq,
            bodies,
            intents,
            failed,
            state,
            self._policy.keep,
            drained,
            wanted_ns,
            tuple(carried),
            self.world.program.history,
            clears=self._unknown is not None and bool(bodies) and to_seq >= self._unknown.seq,
        )

    def _waits_since(self, need: Need, accepted_ns: int) -> int:
        """Since when an item waits for code that knows it. One that was in the inbox while the one before
        it, of the same need, ran out of time has waited with it: nobody who knew it came meanwhile."""
        if self._given_up is None or self._given_up[0] != need:
            return 0
        return max(self._given_up[1], accepted_ns)

    def _due(self, height: int) -> bool:
        since = height - self._snapshot_height
        return since >= self._policy.entries or (
            since > 0 and self._tail_bytes >= self._policy.bytes
        )

    def _freshen(self) -> bytes:
        """The state's bytes, and in memory what a restore from them would give."""
        self._state = self.world.program.fresh(self._state)
        return self.world.program.bounded(self.world.program.dump(self._state))

    def _storable(self) -> bytes:
        return self.world.program.storable(self._state)

    def _admitted(self, store: Store, stepped: Stepped) -> Stepped:
        """The step; it is failed if it sends what this code does not handle in the world of that id."""
        refusal = self._recipients.refusal(store, self.world.vocabulary, stepped.addressed)
        return stepped if refusal is None else kernel.spoil(stepped, refusal)

    def _tried(self, stepped: Stepped) -> tuple[Stepped, bytes | None]:
        """The step, and the state that it left; the step is failed if that cannot be stored."""
        try:
            return stepped, self._storable()
        except BadState as error:
            return kernel.spoil(stepped, error), None

    def _journaled(self, saved: bytes) -> bytes | None:
        """The bytes of the state that the journal tells of; None when something else than a step has
        changed it, such as a thread that a reducer started. Where the digest is that of older code, they
        are without the fields that are new since: a snapshot has the digest of its height."""
        if self._digest in (None, sha256(saved).digest()):
            return saved
        assert self._digest is not None
        return self.world.program.before_growth(self._state, saved, self._digest)

    def _unspoil(self, store: Store, safe: bytes | None, bodies: list[bytes]) -> bytes:
        """The state before a reducer that raised. From then on each step keeps a way back."""
        if safe is None:
            self._state = store.read(restore, self.world, at=self.height).state
            for height, body in enumerate(bodies[:-1], start=self.height + 1):
                self._state = kernel.repeat(
                    self.world, self._state, entry.decode(body), height=height
                )
            return self._freshen()
        self._state = self.world.program.load(safe)
        return safe


def _ingress_of(item: inbox.Ingress) -> Ingress:
    try:
        return _decode_ingress(item.body)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(what="ingress", seq=item.seq, why=str(error)) from None


_decode_ingress = codec.decoder(Ingress).decode
