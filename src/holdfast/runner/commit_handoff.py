"""Commit handoff: another component of this process settles finished items in its own commit.

The result of a handler is often the next input of another component: a receipt is the next input of its
world. The component that commits this next step (the commit owner) can ack the item and claim new items
for the runner in the same commit: one commit instead of three. The runner settles the items that the
commit owner rejects or does not commit in time.

- The commit owner resolves a handoff once, from any thread. Until then the handoff belongs to it, unless
  the runner cancels it: at once if the owner has not started its commit, and after `COMMIT_TIMEOUT_NS` in
  any case. The runner then looks up the outcome before it settles, and ignores a late result. Claim
  tokens prevent a double settlement.
- Claims that a handoff requested are uncertain until its result arrives.
- An idle runner leaves an *offer* of capacity: a handoff without outcomes. The component that next puts
  an item into the runner's queue claims it for the runner in the same commit. The runner cancels the
  offer before it claims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from holdfast.clock import MS, Clock
from holdfast.errors import HoldfastError
from holdfast.runner.claim_ops import ClaimedBatch, ClaimRequest
from holdfast.runner.claimer import Claimer
from holdfast.runner.error_policy import is_transient
from holdfast.runner.policy import RunnerPolicy
from holdfast.runner.settlement import SettlementBuffer
from holdfast.runner.tick import TickStats
from holdfast.runner.work import WorkItem, WorkOutcome

# Outcomes per handoff: few enough that handlers and commits overlap. Above PARCELS_MAX handoffs in flight
# the runner settles without the commit owner.
HANDOFF_MIN = 16
HANDOFF_MAX = 64
HANDOFFS_MAX = 32
# Timeouts of a handoff: until the commit owner starts, and until it resolves the handoff.
START_TIMEOUT_NS = 250 * MS
COMMIT_TIMEOUT_NS = 2_000 * MS
# Backoff after a commit owner did not start a handoff in time.
BACKOFF_NS = 1_000 * MS


class Handoff:
    """One handoff. `claim_request` asks for `requested_claims` claims."""

    __slots__ = (
        "_on_resolved",
        "claim_request",
        "error",
        "outcomes",
        "requested_claims",
        "result",
        "sent_ns",
    )

    def __init__(
        self,
        outcomes: list[WorkOutcome],
        claim_request: ClaimRequest | None,
        requested_claims: int,
        sent_ns: int,
        on_resolved: Callable[[], None],
    ) -> None:
        self.outcomes = outcomes
        self.claim_request = claim_request
        self.requested_claims = requested_claims
        self.sent_ns = sent_ns
        self._on_resolved = on_resolved
        self.result: tuple[list[WorkOutcome], ClaimedBatch | None] | None = None
        self.error: HoldfastError | None = None

    @property
    def is_resolved(self) -> bool:
        return self.result is not None or self.error is not None

    def resolve_committed(self, remaining: list[WorkOutcome], batch: ClaimedBatch | None) -> None:
        """Resolve the handoff: all outcomes are committed except `remaining`."""
        self.result = remaining, batch
        self._on_resolved()

    def resolve_failed(self, error: HoldfastError) -> None:
        """Resolve the handoff with an error: it is not committed, or the outcome is unknown."""
        self.error = error
        self._on_resolved()


class CommitOwner(Protocol):
    """The component that commits handoffs. Threads of runners call it."""

    def accepts(self, outcome: WorkOutcome) -> bool:
        """Whether the owner has a step to commit with this outcome."""

    def submit(self, handoff: Handoff) -> bool:
        """Submit a handoff. Return False if the owner accepts no more."""

    def withdraw(self, handoff: Handoff) -> bool:
        """Cancel a handoff. Return False if its commit has started."""

    def offer_capacity(self, handoff: Handoff) -> bool:
        """Register an offer of capacity. Return False if the owner cannot use it."""

    def cancel_offer(self, handoff: Handoff) -> bool:
        """Cancel an offer. Return False if a commit already uses it."""


class HandoffQueue:
    """The handoffs of one runner. Only the runner's thread calls it."""

    def __init__(
        self,
        commit_owner: CommitOwner,
        settlement: SettlementBuffer,
        claimer: Claimer,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self._commit_owner = commit_owner
        self._settlement = settlement
        self._claimer = claimer
        self._clock = clock
        self._wake = wake
        self._in_flight: deque[Handoff] = deque()
        self._offer: Handoff | None = None
        self._backoff_until_ns = 0
        # When the runner first saw that a commit uses the offer.
        self._offer_used_ns = 0
        # Finished outcomes, too few for a handoff.
        self._buffered: list[WorkOutcome] = []
        # Timed-out handoffs that the commit owner may still resolve. Their claims are unknown.
        self._timed_out: list[Handoff] = []

    @property
    def busy(self) -> bool:
        return bool(self._in_flight or self._buffered)

    @property
    def requested_claims(self) -> int:
        """Number of claims requested by handoffs in flight."""
        return sum(handoff.requested_claims for handoff in self._in_flight)

    def offer_capacity(
        self, policy: RunnerPolicy, capacity: int, expired_before_max: int | None
    ) -> None:
        """Offer capacity: the commit owner may claim items for this runner when it puts them into the queue."""
        if self._offer is None and self._claimer.is_certain and not self.busy and capacity > 0:
            expired_max = None if expired_before_max is None else min(expired_before_max, 1)
            requested = min(policy.max_batch, capacity)
            claim_request = self._claimer.make_request(requested, policy, expired_max)
            handoff = Handoff([], claim_request, requested, self._clock.mono_ns(), self._wake)
            if self._commit_owner.offer_capacity(handoff):
                self._offer = handoff

    def cancel_offer(self) -> bool:
        """Cancel the offer. Return False if a commit uses it and will return its claims."""
        if self._offer is not None and not self._commit_owner.cancel_offer(self._offer):
            self._offer_used_ns = self._offer_used_ns or self._clock.mono_ns()
            return False
        self._offer, self._offer_used_ns = None, 0
        return True

    def send(self, policy: RunnerPolicy, capacity: int, expired_before_max: int | None) -> None:
        """Submit the outcomes that the commit owner accepts. The rest stays in the settlement buffer."""
        if not self.cancel_offer():
            capacity = 0
        if self._clock.mono_ns() < self._backoff_until_ns and not self._buffered:
            return
        settlement = self._settlement
        bound = HANDOFF_MIN * (HANDOFFS_MAX - len(self._in_flight))
        accepted, self._buffered = self._buffered, []
        remaining: list[WorkOutcome] = []
        for outcome in settlement.outcomes:
            can_offer = outcome.error is None and not outcome.handed_off and len(accepted) < bound
            (accepted if can_offer and self._commit_owner.accepts(outcome) else remaining).append(
                outcome
            )
        settlement.outcomes = remaining
        handoff_size = min(max(HANDOFF_MIN, len(accepted) // 4), HANDOFF_MAX)
        while accepted:
            if len(accepted) < HANDOFF_MIN and self._in_flight:
                # Too few: wait for more. The next result wakes the loop.
                self._buffered = accepted
                return
            handoff = self._make_handoff(
                accepted[:handoff_size], policy, capacity, expired_before_max
            )
            if not self._commit_owner.submit(handoff):
                settlement.outcomes = accepted + remaining
                return
            self._in_flight.append(handoff)
            accepted = accepted[handoff_size:]

    def _make_handoff(
        self,
        outcomes: list[WorkOutcome],
        policy: RunnerPolicy,
        capacity: int,
        expired_before_max: int | None,
    ) -> Handoff:
        for outcome in outcomes:
            outcome.handed_off = True
        requested = (
            min(capacity - self.requested_claims, 2 * len(outcomes))
            if self._claimer.is_certain
            else 0
        )
        claim_request = None
        if requested > 0:
            expired_max = None if expired_before_max is None else min(expired_before_max, 1)
            claim_request = self._claimer.make_request(requested, policy, expired_max)
        return Handoff(
            outcomes, claim_request, max(requested, 0), self._clock.mono_ns(), self._wake
        )

    def collect(self, policy: RunnerPolicy, tick: TickStats, *, running: bool) -> list[WorkItem]:
        """Process resolved handoffs, cancel or time out late ones, and return the newly claimed items."""
        work_items: list[WorkItem] = []
        offer = self._offer
        if offer is not None and offer.is_resolved:
            self._offer, self._offer_used_ns = None, 0
            work_items += self._apply_result(offer, policy, tick)
        elif (
            offer is not None
            and 0 < self._offer_used_ns <= self._clock.mono_ns() - COMMIT_TIMEOUT_NS
        ):
            self._offer, self._offer_used_ns = None, 0
            self._timed_out.append(offer)
            self._claimer.mark_uncertain()
        if not running:
            self.cancel_offer()
            self._settlement.outcomes += self._buffered
            self._buffered = []
        for handoff in list(self._timed_out):
            if handoff.is_resolved:
                self._timed_out.remove(handoff)
                self._claimer.mark_uncertain()
        now_ns = self._clock.mono_ns()
        for handoff in list(self._in_flight):
            if handoff.is_resolved:
                self._in_flight.remove(handoff)
                work_items += self._apply_result(handoff, policy, tick)
                continue
            waited_ns = now_ns - handoff.sent_ns
            if waited_ns >= START_TIMEOUT_NS or not running:
                # The commit owner is busy: outcomes from now on do not wait for it.
                self._backoff_until_ns = now_ns + BACKOFF_NS
                if self._commit_owner.withdraw(handoff):
                    self._in_flight.remove(handoff)
                    self._settlement.outcomes += handoff.outcomes
                elif waited_ns >= COMMIT_TIMEOUT_NS:
                    self._in_flight.remove(handoff)
                    self._timed_out.append(handoff)
                    self._settlement.requeue(handoff.outcomes, outcome_unknown=True)
        return work_items

    def _apply_result(
        self, handoff: Handoff, policy: RunnerPolicy, tick: TickStats
    ) -> list[WorkItem]:
        if handoff.result is not None:
            remaining, batch = handoff.result
            self._settlement.record_handed_off(handoff.outcomes, remaining, tick)
            return [] if batch is None else self._accept_claims(batch, tick)
        assert handoff.error is not None
        if handoff.claim_request is not None:
            self._claimer.mark_uncertain()
        self._settlement.requeue_rejected(handoff.outcomes, handoff.error, policy, tick)
        return []

    def _accept_claims(self, batch: ClaimedBatch, tick: TickStats) -> list[WorkItem]:
        try:
            return list(self._claimer.accept_claims(batch, tick))
        except HoldfastError as error:
            if not is_transient(error):
                raise
            tick.busy += 1
            self._claimer.mark_uncertain()
            return []
