"""The claimer of a runner: checks for due items, claims them, adopts orphaned claims, releases claims.

A claim or a release may fail after its commit, for example when the reply is lost. The claimer is then
*uncertain*. Before its next claim it reads its claims from the store and adopts the ones it does not
know. Otherwise they would expire unused and charge their items with an expiry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from holdfast import failpoints
from holdfast.durable.queue import Admission, Claim
from holdfast.errors import HoldfastError
from holdfast.runner import claim_ops
from holdfast.runner.claim_ops import ClaimRequest
from holdfast.runner.demand import ClaimDemand
from holdfast.runner.hooks import Hooks
from holdfast.runner.policy import RunnerPolicy
from holdfast.runner.tick import TickStats
from holdfast.runner.unknown_outcome import can_repeat_claim, orphaned_leases
from holdfast.runner.work import WorkItem
from holdfast.store.api import Store, read_stale


class Claimer:
    def __init__(
        self,
        store: Store,
        queue: str,
        timers: str | None,
        demand: ClaimDemand,
        *,
        owner: str,
        extend: Callable[[Claim, int | None], int | None],
        hooks: Hooks,
        admission: Callable[[], Admission | None] | None = None,
    ) -> None:
        self.owner = owner
        self._store = store
        self._queue, self._timers = queue, timers or ""
        self.names = [queue] if timers is None else [queue, timers]
        self._extend = extend
        self._hooks = hooks
        self._admission = admission
        self._demand = demand
        self._uncertain = False

    def next_due_ns(self) -> int | None:
        return read_stale(self._store, claim_ops.next_due_ns, self.names)

    def has_work(self) -> bool:
        """Whether there may be items to claim or claims to adopt."""
        return self._uncertain or self._is_due()

    def claim(
        self,
        limit: int,
        policy: RunnerPolicy,
        tick: TickStats,
        is_known: Callable[[Claim], bool],
        expired_before_max: int | None = None,
    ) -> deque[WorkItem]:
        """Claim up to `limit` due items, the queue's items before timers.

        At most `expired_before_max` of them have an expired claim.
        """
        if not limit:
            return deque()
        try:
            adopted = self._adopt_orphans(limit, is_known) if self._uncertain else []
            if adopted or not self._is_due():
                work_items = self._to_work_items(adopted)
            else:
                batch = self._claim_batch(limit, policy, expired_before_max)
                tick.not_admitted += batch.not_admitted
                work_items = self._to_work_items(batch.items + batch.timers)
        except HoldfastError as error:
            if not can_repeat_claim(error):
                raise
            tick.busy += 1
            return deque()
        # There may be more orphaned claims than `limit`.
        self._uncertain = bool(adopted)
        tick.claimed += len(work_items)
        return work_items

    def release_unstarted(self, work_items: Iterable[WorkItem], tick: TickStats) -> None:
        """Release claims without counting a failure. If the release fails, the claims are adopted later or
        expire."""
        work_items = list(work_items)
        for work in work_items:
            work.abandon(self._store)  # a started item: before another worker can claim it
        try:
            released_flags = self._store.transact(
                claim_ops.release_unstarted,
                [work.claim.token for work in work_items],
                [
                    work.claim.token
                    for work in work_items
                    if not (work.began_ns or work.claim_lost_operations)
                ],
                None if self._admission is None else self._admission(),
            )
        except HoldfastError as error:
            if not can_repeat_claim(error):
                raise
            tick.busy += 1
            self._uncertain = True
            return
        for work, released in zip(work_items, released_flags, strict=True):
            if released:
                tick.released += 1
                self._hooks.released()
            else:
                tick.lost += 1
                self._hooks.lost(work)

    def _is_due(self) -> bool:
        """Whether an item is due. Checked first, because a read is free and a claim is a commit."""
        due_ns = self.next_due_ns()
        return due_ns is not None and due_ns <= self._store.now_ns()

    def _adopt_orphans(self, limit: int, is_known: Callable[[Claim], bool]) -> list[Claim]:
        live = self._store.read(claim_ops.live_claims, self.names, self.owner)
        return orphaned_leases(live, is_known, limit)

    def _claim_batch(
        self, limit: int, policy: RunnerPolicy, expired_before_max: int | None
    ) -> claim_ops.ClaimedBatch:
        batch: claim_ops.ClaimedBatch = self._store.transact(
            claim_ops.claim_batch, self.new_request(limit, policy, expired_before_max)
        )
        return batch

    def new_request(
        self, limit: int, policy: RunnerPolicy, expired_before_max: int | None
    ) -> ClaimRequest:
        """Return a claim request and mark the claimer uncertain: the claims may exist even if the call
        fails."""
        self._uncertain = True
        return self.make_request(limit, policy, expired_before_max)

    def make_request(
        self, limit: int, policy: RunnerPolicy, expired_before_max: int | None
    ) -> ClaimRequest:
        """Return a claim request for a caller that marks uncertainty explicitly."""
        plan = self._demand.plan(limit, policy, expired_before_max)
        return ClaimRequest(
            queue=self._queue,
            timers=self._timers,
            owner=self.owner,
            limit=plan.limit,
            reserved=plan.reserved,
            ttl_ns=policy.lease_ttl_ns,
            budget=policy.budget,
            admission=None if self._admission is None else self._admission(),
            expired_before_max=plan.expired_before_max,
        )

    def accept_requested(self, batch: claim_ops.ClaimedBatch, tick: TickStats) -> deque[WorkItem]:
        """Accept the claims of a request by this claimer, which is certain again."""
        work_items = self.accept_claims(batch, tick)
        self._uncertain = False
        return work_items

    def accept_claims(self, batch: claim_ops.ClaimedBatch, tick: TickStats) -> deque[WorkItem]:
        """Accept claims that another component's commit made for this runner."""
        tick.not_admitted += batch.not_admitted
        work_items = self._to_work_items(batch.items + batch.timers)
        tick.claimed += len(work_items)
        return work_items

    def mark_uncertain(self) -> None:
        """Mark the claimer uncertain: the store may have claims that it does not know."""
        self._uncertain = True

    @property
    def is_certain(self) -> bool:
        """Whether the claimer knows all of its claims."""
        return not self._uncertain

    def _to_work_items(self, claimed: list[Claim]) -> deque[WorkItem]:
        if any(claim.blob for claim in claimed):
            if failpoints.armed:
                failpoints.hit("runner.read_payloads", claimed)
            payloads: list[bytes | None] = self._store.read(claim_ops.read_payloads, claimed)
        else:
            payloads = [claim.payload for claim in claimed]
        return deque(
            WorkItem(
                claim, payload, "timer" if claim.queue == self._timers else "queue", self._extend
            )
            for claim, payload in zip(claimed, payloads, strict=True)
            if payload is not None
        )
