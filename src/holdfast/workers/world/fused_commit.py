"""Fused commits: one transaction acks an effect, applies its receipt to the world and claims the
next effects.

This works when a world and the pool that ran its effect share a process. The worker runs the
world's next cycle before the receipt is delivered. The transaction settles the effect, journals the
receipt with the next inbox number and claims the next effects for the pool: one commit per step of
a chain instead of three.

- The cycle lists the effects that it settles. If the pool has lost one of these claims, or an
  effect was cancelled, or the inbox of the world has received another event, the whole cycle is
  void. Its effects are then settled and delivered separately, and the world uses that path for a
  while.
- Runner threads submit hand-offs, and only the worker's thread processes them. Several commits are
  in flight at a time, so neither the writer nor the worker waits for the other.
- A world with a cycle in flight gets no other cycle until the commit is answered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.config import CYCLES_BYTES_MAX
from holdfast.durable.inbox import InboxEntry
from holdfast.errors import CommitUnknown, Conflict, HoldfastError, from_wire
from holdfast.messages import Intent, TimerSet, receipt_ingress
from holdfast.runner import claim_ops
from holdfast.runner.claim_ops import ClaimRequest
from holdfast.runner.commit_handoff import Handoff
from holdfast.runner.work import WorkOutcome
from holdfast.store.api import Deferred, Future, Store, Txn
from holdfast.workers.effects.receipts import deliver_receipt
from holdfast.workers.timers.delivery import timer_ingress
from holdfast.world import intents
from holdfast.world.cycle import AppliedInline, Cycle, commit
from holdfast.world.host import WorldHost
from holdfast.world.timers import DueTimerRef

# Transactions in flight, and outcomes per transaction.
IN_FLIGHT_MAX = 3
OUTCOMES_MIN = 16
OUTCOMES_MAX = 64
# How long a world is excluded from fusing after a conflict.
CONFLICT_BACKOFF_S = 1.0


class HostingWorker(Protocol):
    """The interface to the world worker. All commits run in its thread."""

    store: Store
    universe: str

    def can_fuse(self, world_id: str) -> bool:
        """Whether a world is hosted here and not isolated. Safe to call from any thread."""

    def read_inboxes(self, world_ids: Sequence[str]) -> dict[str, list[InboxEntry]]:
        """Read the inboxes of the worlds whose state is in memory."""

    def host_of(self, world_id: str) -> WorldHost: ...

    def prepare_cycle(
        self, world_id: str, waiting: list[InboxEntry], applied_inline: list[AppliedInline]
    ) -> Cycle | None:
        """Run a world's reducers. Returns None if the world had to be parked."""

    def on_committed(
        self, world_id: str, cycle: Cycle, error: HoldfastError | None, now_ns: int
    ) -> HoldfastError | None: ...


class WakeSignal(Protocol):
    """The wake-up signal of the worker."""

    def set(self) -> None: ...


class HostedTimer(NamedTuple):
    """A due timer of a world hosted in this process."""

    intent: Intent
    timer: TimerSet
    due_timer: DueTimerRef


class TimerBatch:
    """Due timers submitted by the timer worker, which waits for the answer. Undelivered timers then
    go through the inbox.
    """

    def __init__(self, timers: list[HostedTimer]) -> None:
        self.timers = timers
        self.answered = threading.Event()
        # The number of delivered timers.
        self.delivered = 0
        # Whether a commit conflicted, for example with another timer worker.
        self.conflicted = False


class InFlightCommit(NamedTuple):
    """A commit in flight: the hand-offs, their cycles and the future of the commit."""

    handoffs: list[Handoff]
    cycles: list[tuple[str, Cycle]]
    future: Future[Any]
    # Whether it settles outcomes of runners. False for cycles of inbox events and timers.
    has_outcomes: bool
    timers: TimerBatch | None = None


class FusedCommitter:
    """The commit owner of a process (`runner.commit_handoff.CommitOwner`). It accepts hand-offs
    while open.
    """

    def __init__(self, worker: HostingWorker) -> None:
        self._worker = worker
        self._handoffs: deque[Handoff] = deque()
        self._wakeup: WakeSignal | None = None
        self._in_flight: deque[InFlightCommit] = deque()
        self._worlds_in_flight: set[str] = set()
        self._conflicted_until_ns: dict[str, int] = {}
        # Offers of idle runners, by queue.
        self._offers: dict[str, Handoff] = {}
        self._offers_lock = threading.Lock()
        self._timer_batches: deque[TimerBatch] = deque()

    def open(self, wakeup: WakeSignal) -> None:
        """Start accepting hand-offs. Each hand-off and each answered commit sets the wake-up
        signal.
        """
        self._wakeup = wakeup

    def close(self) -> None:
        """Stop accepting hand-offs. The runners withdraw unstarted ones."""
        self._wakeup = None

    # -- for runners ---------------------------------------------------------------------------

    def accepts(self, outcome: WorkOutcome) -> bool:
        joined = outcome.work.ack_operations
        # A billed effect joins further operations and is settled separately.
        if len(joined) != 1 or joined[0][0] is not deliver_receipt:
            return False
        intent = intent_of(outcome)
        if intent.universe_id != self._worker.universe or intent.world_id in self._worlds_in_flight:
            return False
        return intent.world_id not in self._conflicted_until_ns and self._worker.can_fuse(
            intent.world_id
        )

    def submit(self, handoff: Handoff) -> bool:
        wakeup = self._wakeup
        if wakeup is None:
            return False
        self._handoffs.append(handoff)
        wakeup.set()
        return True

    def withdraw(self, handoff: Handoff) -> bool:
        try:
            self._handoffs.remove(handoff)
        except ValueError:
            return False
        return True

    def offer_capacity(self, handoff: Handoff) -> bool:
        assert handoff.claim_request is not None
        with self._offers_lock:
            if self._wakeup is None or handoff.claim_request.queue in self._offers:
                return False
            self._offers[handoff.claim_request.queue] = handoff
            return True

    def cancel_offer(self, handoff: Handoff) -> bool:
        assert handoff.claim_request is not None
        with self._offers_lock:
            if self._offers.get(handoff.claim_request.queue) is not handoff:
                return False
            del self._offers[handoff.claim_request.queue]
            return True

    # -- for the timer worker --------------------------------------------------------------------

    def can_deliver_timer(self, world_id: str) -> bool:
        """Whether a timer of this world can be delivered by a fused commit now."""
        return (
            self._wakeup is not None
            and world_id not in self._worlds_in_flight
            and world_id not in self._conflicted_until_ns
            and self._worker.can_fuse(world_id)
        )

    def submit_timers(self, batch: TimerBatch) -> None:
        wakeup = self._wakeup
        if wakeup is None:
            batch.answered.set()
            return
        self._timer_batches.append(batch)
        wakeup.set()

    def cancel_timers(self, batch: TimerBatch) -> bool:
        """Cancel an unstarted batch. Returns False if it was started."""
        try:
            self._timer_batches.remove(batch)
        except ValueError:
            return False
        return True

    # -- for the worker ------------------------------------------------------------------------

    @property
    def has_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether there is work, and capacity for another commit in flight."""
        if self._timer_batches:
            return True
        if not self._handoffs:
            return False
        return (
            len(self._in_flight) < IN_FLIGHT_MAX
            or sum(one.has_outcomes for one in self._in_flight) < IN_FLIGHT_MAX
        )

    def is_in_flight(self, world_id: str) -> bool:
        """Whether a cycle of this world is in flight."""
        return world_id in self._worlds_in_flight

    def take_offers(self, cycles: Iterable[Cycle]) -> list[Handoff]:
        """Take the offers of idle runners whose queues get intents from these cycles."""
        if not self._offers:
            return []
        wanted = {
            intents.effect_queue(intent.universe_id, intent.effect_kind)
            for cycle in cycles
            for intent in cycle.intents
        }
        with self._offers_lock:
            names = wanted & self._offers.keys()
            return [self._offers.pop(name) for name in names]

    def process(self, stop_ns: int) -> bool:
        """Process answered commits and submit waiting work. Returns whether anything was done."""
        if self._conflicted_until_ns:
            now_ns = self._worker.store.now_ns()
            self._conflicted_until_ns = {
                w: at_ns for w, at_ns in self._conflicted_until_ns.items() if at_ns > now_ns
            }
        done = False
        while True:
            if self._in_flight and self._in_flight[0].future.done():
                self._on_answered(self._in_flight.popleft())
            elif self._timer_batches:
                self._commit_timers(self._timer_batches.popleft(), stop_ns)
            elif self.has_work:
                self._commit_handoffs(self._next_handoffs(), stop_ns)
            else:
                return done
            done = True

    def track(
        self, cycles: list[tuple[str, Cycle]], offers: list[Handoff], future: Future[Any]
    ) -> None:
        """Track a commit of cycles that was sent with offers only."""
        self._track(InFlightCommit(offers, cycles, future, has_outcomes=False))

    def _track(self, sent: InFlightCommit) -> None:
        self._worlds_in_flight.update(world_id for world_id, _ in sent.cycles)
        self._in_flight.append(sent)
        if self._wakeup is not None:
            sent.future.notify_event(self._wakeup)

    def drain(self) -> None:
        """Stop accepting work and wait for the commits in flight."""
        self.close()
        while self._in_flight:
            self._on_answered(self._in_flight.popleft())
        while self._timer_batches:
            self._timer_batches.popleft().answered.set()

    def _commit_timers(self, batch: TimerBatch, stop_ns: int) -> None:
        """Run the cycles that apply due timers, and submit them."""
        try:
            cycles = self._timer_cycles(batch, stop_ns)
            if not cycles:
                batch.answered.set()
                return
            offers = self.take_offers(cycle for _, cycle in cycles)
            future = self._worker.store.submit(commit_fused, offers, [cycle for _, cycle in cycles])
        except BaseException:
            batch.answered.set()
            raise
        self._track(InFlightCommit(offers, cycles, future, has_outcomes=False, timers=batch))

    def _timer_cycles(self, batch: TimerBatch, stop_ns: int) -> list[tuple[str, Cycle]]:
        due: dict[str, list[HostedTimer]] = {}
        for hosted_timer in batch.timers:
            due.setdefault(hosted_timer.intent.world_id, []).append(hosted_timer)
        arriving = {
            world_id: [
                (
                    codec.pack(
                        timer_ingress(hosted_timer_of_world.intent, hosted_timer_of_world.timer)
                    ),
                    hosted_timer_of_world.intent.trace,
                    AppliedInline(
                        None,
                        hosted_timer_of_world.intent.intent_hash,
                        hosted_timer_of_world.due_timer,
                    ),
                )
                for hosted_timer_of_world in timers
            ]
            for world_id, timers in due.items()
        }
        return self._prepare_cycles(arriving, stop_ns)

    def _next_handoffs(self) -> list[Handoff]:
        """Take the next hand-offs, but not all of them, so that the commits in flight overlap."""
        waiting = sum(len(handoff.outcomes) for handoff in list(self._handoffs))
        most = min(max(waiting // IN_FLIGHT_MAX, OUTCOMES_MIN), OUTCOMES_MAX)
        handoffs: list[Handoff] = []
        size = 0
        while size < most:
            try:
                handoff = self._handoffs.popleft()
            except IndexError:
                break
            handoffs.append(handoff)
            size += len(handoff.outcomes)
        return handoffs

    def _commit_handoffs(self, handoffs: list[Handoff], stop_ns: int) -> None:
        """Run the cycles that apply the receipts of hand-offs, and submit the commit."""
        try:
            cycles = self._receipt_cycles(handoffs, stop_ns)
            if not cycles:
                for handoff in handoffs:
                    handoff.resolve_committed(handoff.outcomes, None)
                return
            handoffs += self.take_offers(cycle for _, cycle in cycles)
            future = self._worker.store.submit(
                commit_fused, handoffs, [cycle for _, cycle in cycles]
            )
        except BaseException:
            for handoff in handoffs:
                handoff.resolve_failed(CommitUnknown(txn_no=0, why="the worker failed"))
            raise
        self._track(InFlightCommit(handoffs, cycles, future, has_outcomes=True))

    def _receipt_cycles(self, handoffs: list[Handoff], stop_ns: int) -> list[tuple[str, Cycle]]:
        ended: dict[str, list[WorkOutcome]] = {}
        for handoff in handoffs:
            for outcome in handoff.outcomes:
                ended.setdefault(intent_of(outcome).world_id, []).append(outcome)
        arriving = {
            world_id: [
                (
                    receipt_body(one),
                    intent_of(one).trace,
                    AppliedInline(one.work.claim.token, intent_of(one).intent_hash),
                )
                for one in some
            ]
            for world_id, some in ended.items()
        }
        return self._prepare_cycles(arriving, stop_ns)

    def _prepare_cycles(
        self, arriving: dict[str, list[tuple[bytes, bytes, AppliedInline]]], stop_ns: int
    ) -> list[tuple[str, Cycle]]:
        """Prepare cycles of worlds with events that are not in their inboxes yet."""
        worker = self._worker
        ours = [w for w in arriving if w not in self._worlds_in_flight and worker.can_fuse(w)]
        cycles: list[tuple[str, Cycle]] = []
        size = 0
        for world_id, waiting in worker.read_inboxes(ours).items():
            host, some = worker.host_of(world_id), arriving[world_id]
            if len(waiting) + len(some) >= host.limit:
                continue
            if size > CYCLES_BYTES_MAX or host.clock.mono_ns() >= stop_ns:
                break
            last = waiting[-1].seq if waiting else host.cursor
            expected = [
                InboxEntry(seq, None, body, 0, trace)
                for seq, (body, trace, _) in enumerate(some, last + 1)
            ]
            applied_inline = [one for *_, one in some]
            cycle = worker.prepare_cycle(world_id, waiting + expected, applied_inline)
            if cycle is not None:
                cycles.append((world_id, cycle))
                size += cycle.size
        return cycles

    def _on_answered(self, sent: InFlightCommit) -> None:
        """Process the answer to a commit: resolve its hand-offs, cycles and timers."""
        handoffs, cycles, future, _, batch = sent
        errors: list[HoldfastError | None]
        try:
            errors = resolve_answers(future, handoffs, [cycle for _, cycle in cycles])
        except HoldfastError as error:
            errors = [error] * len(cycles)
        self._worlds_in_flight.difference_update(world_id for world_id, _ in cycles)
        store_error: HoldfastError | None = None
        now_ns = self._worker.store.now_ns()
        for (world_id, cycle), outcome in zip(cycles, errors, strict=True):
            if isinstance(outcome, Conflict):
                self._conflicted_until_ns[world_id] = now_ns + int(CONFLICT_BACKOFF_S * S)
            store_error = self._worker.on_committed(world_id, cycle, outcome, now_ns) or store_error
        if batch is not None:
            batch.conflicted = any(isinstance(outcome, Conflict) for outcome in errors)
            results = zip(cycles, errors, strict=True)
            batch.delivered = sum(
                len(cycle.carried) for (_, cycle), error in results if error is None
            )
            batch.answered.set()
        if store_error is not None:
            raise store_error


def commit_fused(
    txn: Txn, handoffs: list[Handoff], cycles: list[Cycle]
) -> tuple[Deferred[Any], dict[int, Deferred[Any]]]:
    """The fused transaction: commit the cycles, settle their effects, claim the next items."""
    committed = commit(txn, cycles)
    # Claim requests of one runner are merged. The last of its hand-offs returns the claims.
    claim_requests: dict[tuple[str, str], tuple[int, ClaimRequest]] = {}
    for index, handoff in enumerate(handoffs):
        if handoff.claim_request is not None:
            request = handoff.claim_request
            former = claim_requests.get((request.queue, request.owner))
            if former is not None:
                request = replace(request, limit=former[1].limit + request.limit)
            claim_requests[request.queue, request.owner] = index, request
    return committed, {
        index: claim_ops.claim_batch(txn, request) for index, request in claim_requests.values()
    }


def resolve_answers(
    future: Future[Any], handoffs: list[Handoff], cycles: Sequence[Cycle]
) -> list[HoldfastError | None]:
    """Return the error or None of each cycle of `commit_fused` or `commit`, and resolve the
    hand-offs. Each of `cycles` settles an effect.
    """
    try:
        result = future.result()
    except HoldfastError as error:
        for handoff in handoffs:
            handoff.resolve_failed(error)
        if not handoffs or error.retryable or isinstance(error, CommitUnknown):
            raise
        # The whole commit failed, which is not the fault of any world.
        raise Conflict(why=error.code) from error
    committed, claims_by_handoff = (
        result if isinstance(result, tuple) else (Deferred().resolve(result), {})
    )
    errors = [None if one is None else from_wire(one) for one in committed.value]
    done = {
        one.token
        for cycle, error in zip(cycles, errors, strict=False)
        if error is None
        for one in cycle.carried
    }
    for index, handoff in enumerate(handoffs):
        remaining = [one for one in handoff.outcomes if one.work.claim.token not in done]
        claimed = claims_by_handoff.get(index)
        handoff.resolve_committed(remaining, None if claimed is None else claimed.value)
    return errors


def receipt_body(outcome: WorkOutcome) -> bytes:
    """Encode the receipt of an outcome as an inbox event, byte-identical to inbox delivery."""
    [(_, (intent, receipt))] = outcome.work.ack_operations
    return codec.pack(receipt_ingress(receipt, correlation_id=intent.correlation_id))


def intent_of(outcome: WorkOutcome) -> Intent:
    """Return the intent whose receipt an outcome delivers."""
    [(_, (intent, _))] = outcome.work.ack_operations
    assert isinstance(intent, Intent)
    return intent
