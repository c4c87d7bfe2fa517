"""The host of a world on a worker: drain, step, append, publish, snapshot, one transaction per
cycle.

The state in memory is valid only while it matches the journal. `prepare` moves it ahead of the
journal until `on_committed`. If the commit is refused or fenced, has an unknown outcome, or any
other error occurs in between, the host restores the state from the store before the next cycle. So
the effects of a reducer count exactly when its entry is durable.

A cycle has two halves, so that many worlds share one commit. `prepare` reads the inbox and runs
reducers, outside any transaction. `cycle.commit` is the transaction. `on_committed` applies its
outcome to the host.

A cycle ends before an item that the code does not declare. If such an item is the first,
`stop_request` names it and the worker releases the world. A worker that declares the item continues
there, or the item becomes a dead letter when its time has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast import codec, logs, traces
from holdfast.clock import SYSTEM, Clock
from holdfast.config import CYCLE_BYTES_MAX
from holdfast.durable import inbox, journal
from holdfast.durable.lease import Lease
from holdfast.errors import StoreCorrupt
from holdfast.messages import Ingress, Intent
from holdfast.store.api import Store, Txn
from holdfast.world import journal_entry, reducer
from holdfast.world.catalog import UNKNOWN_EVENT, StopReason, subject_of
from holdfast.world.code_requirement import CodeRequirement
from holdfast.world.cycle import AppliedInline, Cycle, FailedEvent, apply
from holdfast.world.definition import BadState
from holdfast.world.messaging.recipients import RecipientTypes
from holdfast.world.reducer import StepResult, WorldSpec
from holdfast.world.restore import restore
from holdfast.world.unknown_events import requirement_of


@dataclass(frozen=True, slots=True)
class Budgets:
    """The limits of one world's cycle, so that worlds share a worker fairly."""

    max_inbox_batch: int = 256
    max_tick_steps_per_cycle: int = 256
    max_effects_per_cycle: int = 1024
    # A soft limit for operators. The contents of the journal never depend on it.
    max_cycle_wall_ms: int = 250


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """A snapshot is due after this number of entries, or this number of bytes of entries."""

    entries: int = 1000
    bytes: int = 4 * 1024 * 1024
    keep: int = 2


class WorldHost:
    """One world, hosted under a lease."""

    def __init__(
        self,
        world: WorldSpec,
        lease: Lease,
        *,
        clock: Clock,
        budgets: Budgets,
        policy: SnapshotPolicy,
        unknown: StopReason | None = None,
    ) -> None:
        self.world = world
        self.lease = lease
        self.clock = clock
        self.budgets = budgets
        self._policy = policy
        self._subject = subject_of(world.universe, world.world_id)
        self.recipients = RecipientTypes(world.universe, world.world_id, world.definition.type)
        self._state = HostedState(world)
        # The state digest after `height`, if its entry has one, and the digest after the prepared
        # cycle.
        self._digest: bytes | None = None
        self._next_digest: bytes | None = None
        # Whether the state in memory is the state after `height`.
        self.loaded = False
        self.height = 0
        self.cursor = 0
        self._snapshot_height = 0
        self._tail_bytes = 0
        # The seq that a reducer is handling, for the watchdog; 0 if none is running.
        self.current_seq = 0
        # Whether the journal may have entries below the baseline to compact.
        self.compactable = False
        # The item that an earlier host stopped before. Then the item that this host must stop
        # before: its requirement, its seq, and the time since which it waits, or 0 for now.
        self._stop = unknown
        self.stop_request: tuple[CodeRequirement, int, int] | None = None
        # The requirement of the item that this host gave up, and the time since which it had
        # waited.
        self._given_up: tuple[CodeRequirement, int] | None = None

    # -- the cycle -----------------------------------------------------------------------------

    def load(self, txn: Txn) -> None:
        """Restore the state from the store."""
        restored = restore(txn, self.world)
        self._state.value = restored.state
        self.height = restored.height
        self.cursor = restored.cursor
        self._snapshot_height = restored.snapshot_height
        self._tail_bytes = restored.tail_bytes
        self._digest = restored.digest
        self.loaded = True

    def drain(self, txn: Txn, limit: int) -> list[inbox.InboxEntry]:
        """Read waiting inbox items, and restore the state if it is not in memory."""
        if not self.loaded:
            self.load(txn)
        return inbox.read(txn, self._subject, limit)

    def prepare(
        self,
        store: Store,
        *,
        one_at_a_time: bool = False,
        waiting: list[inbox.InboxEntry] | None = None,
        applied_inline: Sequence[AppliedInline] = (),
    ) -> Cycle | None:
        """Drain the inbox within the budgets and run the reducers. Return None if there is no work.

        Reducers run outside any transaction, so a slow reducer delays only its own world. `waiting`
        is the result of an earlier `drain`. Its last items are the receipts of `applied_inline`,
        which bypass the inbox. The host detects a state that cannot be stored at the end of the
        cycle. It then repeats the cycle and checks the state after each step: the step that makes
        the state unstorable fails.
        """
        limit = 1 if one_at_a_time else self.limit
        if waiting is None:
            waiting = store.read(self.drain, limit)
        if not waiting and not self.snapshot_due:
            return None
        tail_bytes = self._tail_bytes
        mark = logs.RUNNING.set(self._log_ids)
        try:
            try:
                return self._prepare(store, waiting, applied_inline, limit)
            except BadState:
                if not waiting:
                    raise
            self._state.restore(store, self.height)
            self._tail_bytes = tail_bytes
            return self._prepare(store, waiting, applied_inline, limit, check_each_step=True)
        finally:
            logs.RUNNING.reset(mark)

    def warn(self, message: str, failed: FailedEvent | None = None, *, code: str = "",
             error: str = "") -> None:  # fmt: skip
        """Log a line about this world, or about an event that failed here."""
        ids: dict[str, object] = {"code": code, "error": error}
        if failed is not None:
            ids = {"seq": failed.seq, "code": failed.code, "error": failed.error,
                   **traces.log_ids(failed.trace)}  # fmt: skip
        logs.warn("worlds", message, **self._log_ids(), height=self.height, epoch=self.lease.epoch,
                  **ids)  # fmt: skip

    def _log_ids(self) -> logs.Ids:
        world = self.world
        name = f"{world.definition.type}/{world.name}"
        return {"universe": world.universe, "world": name, "world_id": world.world_id}

    def _prepare(
        self,
        store: Store,
        waiting: list[inbox.InboxEntry],
        applied_inline: Sequence[AppliedInline],
        limit: int,
        *,
        check_each_step: bool = False,
    ) -> Cycle | None:
        self.loaded = False
        self.stop_request = None
        builder = CycleBuilder(self, self._state, store, check_each_step=check_each_step)
        builder.run(waiting)
        self.current_seq = 0
        self._state.open_spans = builder.spans
        bodies = builder.bodies
        if not bodies and not self.snapshot_due:
            # The cycle stops before the first item: the state is unchanged.
            self.loaded = True
            return None
        inbox_count = len(waiting) - len(applied_inline)
        self._tail_bytes += sum(map(len, bodies))
        snapshot_bytes = self._state.roundtrip() if self._is_snapshot_due(builder.height) else None
        if bodies:
            # The entry of every cycle has the digest. A replay compares its state with it.
            state_bytes = (
                snapshot_bytes
                or (builder.rollback_bytes if check_each_step else None)
                or self._state.storable_bytes()
            )
            self._next_digest = sha256(state_bytes).digest()
            bodies[-1] = journal_entry.with_state_digest(bodies[-1], self._next_digest)
        elif snapshot_bytes is not None:
            snapshot_bytes = self._bytes_matching_journal(snapshot_bytes)
            if snapshot_bytes is None:
                self.invalidate()
                return None
        # Items that bypass the inbox leave no runnable hint.
        from_inbox = inbox_count > 0 or not applied_inline
        return self._make_cycle(
            builder,
            snapshot_bytes,
            drained=len(bodies) == len(waiting) < limit and from_inbox,
            applied_inline=applied_inline[: max(len(bodies) - inbox_count, 0)],
        )

    def must_stop_before(self, item: inbox.InboxEntry, ingress: Ingress) -> bool:
        """Whether the cycle ends before an item that the code does not declare. Then
        `stop_request` names it. A given-up item becomes a dead letter."""
        stop = self._stop
        if stop is None or not stop.given_up or stop.seq != item.seq:
            need = requirement_of(self.world.definition.type, ingress)
            self.stop_request = need, item.seq, self._waits_since(need, item.at_ns)
            return True
        return False

    def commit(self, txn: Txn, cycle: Cycle) -> None:
        """Commit a single cycle (see `cycle.commit` for many)."""
        apply(txn, cycle)

    def on_committed(self, cycle: Cycle) -> None:
        """Advance the host after its cycle became durable: the state in memory matches the journal
        again."""
        self.height = cycle.expected_head + len(cycle.bodies)
        self.cursor = cycle.to_seq
        self.loaded = True
        self._state.end_spans()
        if cycle.bodies:
            self._digest = self._next_digest
        if cycle.snapshot is not None:
            self._snapshot_height = self.height
            self._tail_bytes = 0
            self.compactable = True
        if cycle.clears and self._stop is not None:
            if self._stop.given_up:
                self._given_up = (
                    self._stop.requirement(self.world.definition.type),
                    self._stop.since_ns,
                )
            self._stop = None

    def final_cycle(self) -> Cycle | None:
        """Make a final snapshot cycle before release, if the journal has entries after the last
        snapshot."""
        if not self.loaded or self.height == self._snapshot_height:
            return None
        state_bytes = self._bytes_matching_journal(self._state.roundtrip())
        if state_bytes is None:
            return None
        return self._make_cycle(None, state_bytes, drained=False)

    def compact(self, txn: Txn) -> int:
        """Compact some entries below the baseline, under the lease. Return the number of
        entries."""
        txn.require_live(self.lease)
        return journal.compact(txn, self._subject)

    def invalidate(self) -> None:
        """Invalidate the state in memory: the host restores it before the next cycle."""
        self._state.value = None
        self._state.open_spans = []
        self.loaded = False
        self.current_seq = 0

    @property
    def limit(self) -> int:
        """The number of inbox items that a cycle reads."""
        return min(self.budgets.max_inbox_batch, self.budgets.max_tick_steps_per_cycle)

    @property
    def snapshot_height(self) -> int:
        return self._snapshot_height

    @property
    def snapshot_due(self) -> bool:
        return self._is_snapshot_due(self.height)

    # -- inside --------------------------------------------------------------------------------

    def _make_cycle(
        self,
        built: CycleBuilder | None,
        snapshot: bytes | None,
        *,
        drained: bool,
        applied_inline: Sequence[AppliedInline] = (),
    ) -> Cycle:
        """Make the cycle of a builder, or one without steps."""
        bodies = [] if built is None else built.bodies
        to_seq = self.cursor if built is None else built.seq
        return Cycle(
            universe=self.world.universe,
            world_id=self.world.world_id,
            lease=self.lease,
            expected_head=self.height,
            to_seq=to_seq,
            bodies=bodies,
            intents=[] if built is None else built.intents,
            failed=[] if built is None else built.failed,
            snapshot=snapshot,
            snapshots_kept=self._policy.keep,
            drained=drained,
            wanted_ns=0 if built is None else built.emitted_ns,
            carried=tuple(applied_inline),
            history=self.world.definition.history,
            clears=self._stop is not None and bool(bodies) and to_seq >= self._stop.seq,
        )

    def _waits_since(self, need: CodeRequirement, accepted_ns: int) -> int:
        """Return the time since which an item waits for code that declares it. An item that was in
        the inbox while an earlier item with the same requirement timed out has waited as well,
        because no worker with that code appeared."""
        if self._given_up is None or self._given_up[0] != need:
            return 0
        return max(self._given_up[1], accepted_ns)

    def _is_snapshot_due(self, height: int) -> bool:
        since = height - self._snapshot_height
        return since >= self._policy.entries or (
            since > 0 and self._tail_bytes >= self._policy.bytes
        )

    def _bytes_matching_journal(self, saved: bytes) -> bytes | None:
        """Return the bytes of the state that matches the journal, or None if code outside of a step
        has changed the state, such as a thread that a reducer started. If older code made the
        digest, leave out the fields that are new since, because a snapshot must match the digest of
        its height."""
        if self._digest in (None, sha256(saved).digest()):
            return saved
        assert self._digest is not None
        return self.world.definition.bytes_without_new_fields(
            self._state.value, saved, self._digest
        )


class HostedState:
    """The state of a world in memory."""

    __slots__ = ("_world", "open_spans", "value")

    def __init__(self, world: WorldSpec) -> None:
        self._world = world
        self.value: Any = None
        # The spans of the reducers of a cycle, with their ends. They are emitted after the commit.
        self.open_spans: list[tuple[traces.TraceSpan, int]] = []

    def end_spans(self) -> None:
        for span, end_ns in self.open_spans:
            span.end(end_ns)
        self.open_spans = []

    def restore(self, store: Store, height: int) -> None:
        """Restore the state after a height."""
        self.value = store.read(restore, self._world, at=height).state

    def roundtrip(self) -> bytes:
        """Encode the state and reload it, so that memory holds exactly the state that a restore
        would give."""
        definition = self._world.definition
        self.value = definition.reload_state(self.value)
        return definition.check_state_size(definition.dump_state(self.value))

    def storable_bytes(self) -> bytes:
        return self._world.definition.storable_bytes(self.value)


class CycleBuilder:
    """Runs the reducers of one cycle and collects its entries, intents and failed events.

    `height` and `seq` are those of the last entry. `rollback_bytes` encodes the state before the
    next step, as soon as a step may have to be undone.
    """

    __slots__ = (
        "_check_each_step", "_host", "_size", "_state", "_stop_ns", "_store", "_wall_ns", "bodies",
        "emitted_ns", "failed", "height", "intents", "rollback_bytes", "seq", "spans",
    )  # fmt: skip

    def __init__(
        self, host: WorldHost, state: HostedState, store: Store, *, check_each_step: bool
    ) -> None:
        self._host = host
        self._state = state
        self._store = store
        self._check_each_step = check_each_step
        self.bodies: list[bytes] = []
        self.intents: list[Intent] = []
        self.failed: list[FailedEvent] = []
        self.spans: list[tuple[traces.TraceSpan, int]] = []
        self._size = 0
        self.height, self.seq = host.height, host.cursor
        self._stop_ns = host.clock.mono_ns() + host.budgets.max_cycle_wall_ms * 1_000_000
        self._wall_ns = host.clock.wall_ns()
        self.emitted_ns = store.now_ns()
        self.rollback_bytes = state.storable_bytes() if check_each_step else None

    def run(self, waiting: list[inbox.InboxEntry]) -> None:
        """Handle the items in order, until the budgets are used or the host must stop."""
        host = self._host
        for item in waiting:
            ingress = _ingress_of(item)
            if not host.world.definition.can_consume(ingress):
                if host.must_stop_before(item, ingress):
                    return
                self._add_given_up(item, ingress)
                continue
            self._add_step(item, ingress)
            if self._is_full():
                return

    def _is_full(self) -> bool:
        budgets, clock = self._host.budgets, self._host.clock
        return (
            len(self.intents) >= budgets.max_effects_per_cycle
            or self._size >= CYCLE_BYTES_MAX
            or clock.mono_ns() >= self._stop_ns
        )

    def _add_given_up(self, item: inbox.InboxEntry, ingress: Ingress) -> None:
        """Add the entry of an item that no worker declares."""
        host = self._host
        self.height, self.seq = self.height + 1, item.seq
        step = reducer.make_unknown_step(
            host.world,
            ingress,
            seq=item.seq,
            wall_ns=self._wall_ns,
            generation=host.lease.generation,
            base=host.snapshot_height,
        )
        self.bodies.append(journal_entry.pack(step))
        self.failed.append(
            FailedEvent(
                item.seq,
                item.body,
                step.error,
                UNKNOWN_EVENT,
                ingress.type,
                item.key or "",
                item.trace,
            )
        )

    def _add_step(self, item: inbox.InboxEntry, ingress: Ingress) -> None:
        host = self._host
        self.height, self.seq = self.height + 1, item.seq
        host.current_seq = item.seq
        traced = self._enter_trace(item, ingress)
        try:
            result = reducer.run_step(
                host.world,
                self._state.value,
                ingress,
                seq=item.seq,
                height=self.height,
                wall_ns=self._wall_ns,
                entropy=host.clock.entropy(16),
                generation=host.lease.generation,
                base=host.snapshot_height,
            )
        finally:
            trace = item.trace if traced is None else self._leave_trace(traced, item)
        if result.mail_by_id:
            result = self._check_recipients(result)
        next_rollback_bytes = self.rollback_bytes
        if self._check_each_step and not result.state_dirty:
            result, next_rollback_bytes = self._check_storable(result)
        body = journal_entry.pack(result.step)
        self.bodies.append(body)
        self._size += len(body)
        if result.state_dirty:
            failed = FailedEvent(
                item.seq, item.body, result.step.error, key=item.key or "", trace=item.trace
            )
            self.failed.append(failed)
            if self.spans and traced is not None and self.spans[-1][0] is traced.span:
                self.spans[-1][0].fail(failed.code, result.step.error.strip().rpartition("\n")[2])
            self._roll_back()
            return
        if trace:
            self.intents += [replace(intent, trace=trace) for intent in result.intents]
        else:
            self.intents += result.intents
        self._size += sum(len(intent.params) for intent in result.intents)
        if self._check_each_step:
            self.rollback_bytes = next_rollback_bytes
        elif self.rollback_bytes is not None:
            self.rollback_bytes = host.world.definition.dump_state(self._state.value)

    def _enter_trace(self, item: inbox.InboxEntry, ingress: Ingress) -> traces.TraceScope | None:
        """Start the span of a reducer, if its ingress has a trace context or the process has a tracer."""
        if not traces.makes_span(item.trace):
            return traces.pass_on(item.trace)
        world = self._host.world
        type = world.definition.type
        attributes = traces.message_attributes("reduce", "process", type)
        attributes |= {
            "messaging.message.id": str(item.seq),
            "holdfast.universe": world.universe,
            "holdfast.world": f"{type}/{world.name}",
            "holdfast.world_id": world.world_id,
            "holdfast.height": self.height,
            "holdfast.ingress": f"{ingress.kind.value} {ingress.type}",
        }
        return traces.enter(item.trace, f"reduce {type}", traces.CONSUMER, attributes)

    def _leave_trace(self, traced: traces.TraceScope, item: inbox.InboxEntry) -> bytes:
        """Return the context for the intents of the reducer. Its span ends when its cycle is committed."""
        traced.leave()
        if traced.span is None:
            return item.trace
        self.spans.append((traced.span, SYSTEM.wall_ns()))
        return traced.span.context

    def _check_recipients(self, stepped: StepResult) -> StepResult:
        """Fail the step if it sends mail by id that the recipient's type does not declare."""
        host = self._host
        mail = stepped.mail_by_id
        refusal = host.recipients.find_refusal(self._store, host.world.registry, mail)
        return stepped if refusal is None else reducer.fail_step(stepped, refusal)

    def _check_storable(self, stepped: StepResult) -> tuple[StepResult, bytes | None]:
        """Return the step and the encoded state after it. Fail the step if that state cannot be
        stored."""
        try:
            return stepped, self._state.storable_bytes()
        except BadState as error:
            return reducer.fail_step(stepped, error), None

    def _roll_back(self) -> None:
        """Restore the state before a reducer that raised. From then on each step keeps the bytes to
        roll back to."""
        state, world = self._state, self._host.world
        if self.rollback_bytes is not None:
            state.value = world.definition.load_state(self.rollback_bytes)
            return
        base = self._host.height
        state.restore(self._store, base)
        for height, body in enumerate(self.bodies[:-1], start=base + 1):
            entry = journal_entry.decode(body)
            state.value = reducer.replay_step(world, state.value, entry, height=height)
        self.rollback_bytes = state.roundtrip()


def _ingress_of(item: inbox.InboxEntry) -> Ingress:
    try:
        return _decode_ingress(item.body)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(what="ingress", seq=item.seq, why=str(error)) from None


_decode_ingress = codec.decoder(Ingress).decode
