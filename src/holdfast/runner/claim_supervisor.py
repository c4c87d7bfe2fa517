"""The claim supervisor: starts claimed items, extends their claims, enforces time limits, releases claims.

- A claimed item is in the executor or waits: a poison suspect for isolation (`isolation`), a rate-limited
  item for its token. `lease_supervision` has the rules of the extension and the loss of claims.
- A handler that exceeds its time limit ends as a timeout. A handler whose item was cancelled is
  abandoned.
- After a stop no item starts. Items in progress have a grace time (`drain`). Then they are released
  without counting a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.clock import MS, Clock
from holdfast.durable import queue as queues
from holdfast.durable.queue import Claim
from holdfast.errors import HoldfastError, Timeout
from holdfast.runner import claim_ops
from holdfast.runner.claimer import Claimer
from holdfast.runner.drain import Drain, DrainPhase
from holdfast.runner.executor import STALL_NS, Executor, ExecutorExhausted
from holdfast.runner.hooks import Hooks
from holdfast.runner.isolation import SUSPECT_EXPIRIES, IsolationLock, IsolationMember
from holdfast.runner.lease_supervision import LeaseSupervision
from holdfast.runner.policy import RunnerPolicy
from holdfast.runner.tick import TickStats
from holdfast.runner.unknown_outcome import can_repeat_claim
from holdfast.runner.work import WorkItem, WorkOutcome
from holdfast.store.api import Store, read_stale

# Interval of the checks of an executor whose claims are extended.
SUPERVISE_INTERVAL_NS = 50 * MS
# Maximum time for which a suspect blocks all other starts.
ISOLATION_MAX_NS = 2_000 * MS


class Throttle(Protocol):
    """A limit on the rate of starts."""

    def available(self, wanted: int) -> int:
        """Return how many of `wanted` items may start now or very soon. The runner claims this number."""

    def acquire(self, wanted: int) -> int:
        """Acquire up to `wanted` starts and return their number. The runner starts these items at once."""

    def wait_ns(self) -> int:
        """Return the time until the next start is allowed."""


class ClaimSupervisor:
    def __init__(
        self,
        store: Store,
        queue: str,
        claimer: Claimer,
        *,
        member: IsolationMember,
        hooks: Hooks,
        clock: Clock,
        make_executor: Callable[[RunnerPolicy], Executor],
        on_outcome: Callable[[WorkOutcome, RunnerPolicy, TickStats], None],
        has_executor: bool,
        isolation: IsolationLock | None,
        throttle: Throttle | None,
    ) -> None:
        """`make_executor` creates the executor on first use. `ended` is called with every outcome."""
        self._store = store
        self._queue = queue
        self._claimer = claimer
        self._member = member
        self._hooks = hooks
        self._clock = clock
        self._make_executor = make_executor
        self._on_outcome = on_outcome
        self._has_executor = has_executor
        self._isolation = isolation
        self._throttle = throttle
        self.executor: Executor | None = None
        # Claimed items outside the executor: poison suspects, and items that wait for the rate limit.
        self.suspects: deque[WorkItem] = deque()
        self.rate_limited: deque[WorkItem] = deque()
        self._isolated_since_ns = 0
        self._supervise_at_ns = 0
        self._ttl_ns = 0
        self._leases: LeaseSupervision[WorkItem] = LeaseSupervision(self)
        self._stop = Drain()

    # -- queries -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self.suspects or self.rate_limited or self.under_way)

    @property
    def under_way(self) -> int:
        """Number of items in the executor. Any thread may read it."""
        executor = self.executor
        return 0 if executor is None else executor.count

    @property
    def blocked(self) -> bool:
        """Whether no item may start because isolation is held or requested."""
        return bool(self.suspects) or (self._isolation is not None and self._isolation.is_requested)

    def next_check_s(self, policy: RunnerPolicy) -> float:
        """Return the time in seconds until the next check of the executor."""
        if self.executor is not None and self.executor.is_stalled:
            return STALL_NS / 1e9
        if self.rate_limited and self._throttle is not None:
            return max(min(self._throttle.wait_ns(), SUPERVISE_INTERVAL_NS), MS) / 1e9
        return SUPERVISE_INTERVAL_NS / 1e9 if policy.extend_claims else float("inf")

    def claim_limit(self, throttle: Throttle, limit: int, tick: TickStats) -> int:
        """Return how many of `limit` items may be claimed. Acquires no token if no item is due."""
        try:
            if not self._claimer.has_work():
                return 0
            waiting = len(self.rate_limited)
            startable = throttle.available(limit + waiting) - waiting
            return (
                startable if self._has_executor or startable <= 0 else throttle.acquire(startable)
            )
        except HoldfastError as error:
            _check_transient(error)
            tick.busy += 1
            return 0

    def supervise(self, policy: RunnerPolicy, tick: TickStats, *, running: bool) -> None:
        """Check the items in progress: end timed-out and cancelled handlers, extend the other claims."""
        executor = self.executor
        if executor is None:
            return
        now_ns = self._clock.mono_ns()
        if running and executor.exhausted:
            raise ExecutorExhausted(worker=self._hooks.worker, queue=self._queue)
        if not running:
            self._drain(executor, policy, tick, now_ns)
        if policy.extend_claims:
            executor.wake_one_more()
            if executor.busy or self.suspects or self.rate_limited:
                try:
                    self._check_in_progress(executor, policy, tick, now_ns)
                except HoldfastError as error:
                    _check_transient(error)
                    tick.busy += 1
                    for work in self._leases.expired(self._store.now_ns()):
                        self._abandon(executor, work, tick)
        if self._isolation is not None and self._isolation.is_requested:
            # A suspect that has run this long does not crash its worker immediately.
            since_ns = self._isolated_since_ns
            survived = since_ns and now_ns - since_ns >= ISOLATION_MAX_NS
            if survived or not (executor.busy or self.suspects):
                self._isolated_since_ns = 0
                self._isolation.release(self._member)

    def _drain(
        self, executor: Executor, policy: RunnerPolicy, tick: TickStats, now_ns: int
    ) -> None:
        """Drain after a stop: release unstarted items, and release items in progress after the grace period.
        Another worker runs them again."""
        unstarted = [
            *(executor.take_unstarted() if policy.extend_claims else ()),
            *self.suspects,
            *self.rate_limited,
        ]
        self.suspects.clear()
        self.rate_limited.clear()
        self._release(unstarted, tick)
        # Without extended claims a handler is never abandoned.
        grace_ns = policy.stop_grace_ms * MS if policy.extend_claims else None
        phase = self._stop.phase(now_ns, grace_ns=grace_ns, in_progress=executor.count)
        if phase is DrainPhase.OVERDUE:
            work_items = executor.in_progress
            for work in work_items:
                # Another worker may claim it from now on, so a late cost is booked separately.
                work.lost = True
                executor.abandon(work)
            self._release(work_items, tick)

    def _check_in_progress(
        self, executor: Executor, policy: RunnerPolicy, tick: TickStats, now_ns: int
    ) -> None:
        if now_ns >= self._supervise_at_ns:
            self._supervise_at_ns = now_ns + SUPERVISE_INTERVAL_NS
            for work in executor.in_progress:
                if work.began_ns and 0 < work.limit_ns <= now_ns - work.began_ns:
                    executor.abandon(work)
                    timeout = Timeout(what="handler", waited_s=work.limit_ns / 1e9)
                    self._on_outcome(
                        WorkOutcome(work, timeout, now_ns - work.began_ns), policy, tick
                    )
            # Items that waited too long for a worker are released to other workers.
            self._release(executor.take_overdue(), tick)
        self._ttl_ns = policy.lease_ttl_ns
        for work in self._leases.check(self._store.now_ns()):
            self._abandon(executor, work, tick)

    # -- called by the lease supervision -------------------------------------------------------

    def held(self) -> list[WorkItem]:
        in_progress = [] if self.executor is None else self.executor.in_progress
        return [*in_progress, *self.suspects, *self.rate_limited]

    def extend(self, due: list[WorkItem]) -> list[int | None]:
        # The claim of a started handler without a time limit is not extended.
        limited = [bool(work.limit_ns or not work.began_ns) for work in due]
        tokens = [
            work.claim.token for work, is_limited in zip(due, limited, strict=True) if is_limited
        ]
        if not tokens:
            return [work.expires_ns for work in due]
        expiries = iter(self._store.transact(queues.extend, tokens, self._ttl_ns))
        return [
            next(expiries) if is_limited else work.expires_ns
            for work, is_limited in zip(due, limited, strict=True)
        ]

    def count_revocations(self) -> int:
        return read_stale(self._store, queues.cancelled_count, self._queue)

    def find_revoked(self, held: list[WorkItem]) -> list[WorkItem]:
        flags = self._store.read(claim_ops.are_lost, [work.claim.token for work in held])
        return [work for work, lost in zip(held, flags, strict=True) if lost]

    # -- starts and ends -----------------------------------------------------------------------

    def _abandon(self, executor: Executor, work: WorkItem, tick: TickStats) -> None:
        # Set before `abandon`, so that a handler that sees `dropped` also sees the reason.
        work.lost = True
        for waiting in (self.suspects, self.rate_limited):
            if work in waiting:
                waiting.remove(work)
        executor.abandon(work)
        tick.lost += 1
        self._hooks.lost(work)

    def _release(self, work_items: Sequence[WorkItem], tick: TickStats) -> None:
        if work_items:
            self._claimer.release_unstarted(work_items, tick)

    def _try_suspect(self, executor: Executor) -> None:
        now_ns = self._clock.mono_ns()
        if self._isolation is None or not self._isolation.try_isolate(self._member, now_ns):
            return
        if self._throttle is None or self._throttle.acquire(1):
            self._isolated_since_ns = now_ns
            self._submit(executor, [self.suspects.popleft()])

    def _submit(self, executor: Executor, work_items: Sequence[WorkItem]) -> None:
        now_ns = self._clock.mono_ns()
        for work in work_items:
            work.taken_ns = now_ns
        executor.submit(work_items)

    def start_claimed(
        self, work_items: Sequence[WorkItem], policy: RunnerPolicy, tick: TickStats
    ) -> None:
        """Start claimed items, or queue them for isolation or the rate limit."""
        executor = self.executor
        if executor is None:
            if not work_items:
                return
            executor = self.executor = self._make_executor(policy)
        self._add_leases(work_items)
        if self._isolation is None:
            self._start_allowed(executor, list(work_items), tick)
            return
        self.suspects += [work for work in work_items if work.claim.expiries >= SUSPECT_EXPIRIES]
        unsuspected = [work for work in work_items if work.claim.expiries < SUSPECT_EXPIRIES]
        # Items with expired claims start first: if this process crashes, their claims expire again.
        unsuspected.sort(key=lambda work: -work.claim.expiries)
        self._start_allowed(executor, unsuspected, tick)
        if self.suspects:
            try:
                self._try_suspect(executor)
            except HoldfastError as error:
                _check_transient(error)
                tick.busy += 1

    def _add_leases(self, work_items: Sequence[WorkItem]) -> None:
        expires_ns = renew_ns = 0
        for work in work_items:
            # Items claimed together share the expiry.
            if work.expires_ns != expires_ns:
                expires_ns = work.expires_ns
                renew_ns = self._leases.add_lease(self._store.now_ns(), expires_ns)
            work.renew_ns = renew_ns

    def _start_allowed(
        self, executor: Executor, work_items: list[WorkItem], tick: TickStats
    ) -> None:
        """Submit items to the executor in order, as far as the rate limit allows."""
        if self._throttle is not None:
            self.rate_limited += work_items
            work_items = []
            wanted = min(len(self.rate_limited), executor.free_workers)
            if wanted:
                try:
                    started = self._throttle.acquire(wanted)
                except HoldfastError as error:
                    _check_transient(error)
                    tick.busy += 1
                    return
                work_items = [self.rate_limited.popleft() for _ in range(started)]
        if not work_items:
            return
        if self._isolation is None:
            self._submit(executor, work_items)
        elif not self._isolation.start_unless_requested(lambda: self._submit(executor, work_items)):
            self._release(work_items, tick)

    def has_claim(self, claim: Claim) -> bool:
        if self.executor is not None and self.executor.has(claim.token):
            return True
        waiting = (*self.suspects, *self.rate_limited)
        return any(work.claim.token == claim.token for work in waiting)

    def collect_finished(self, policy: RunnerPolicy, tick: TickStats, *, running: bool) -> None:
        """Process finished attempts, and start rate-limited items that have a token now."""
        if self.executor is None:
            return
        for outcome in self.executor.drain_finished():
            self._on_outcome(outcome, policy, tick)
        if self.rate_limited and running:
            self._start_allowed(self.executor, [], tick)

    def close(self) -> None:
        """Close the executor. The claims of items in progress are left to expire."""
        if self.executor is not None:
            self.executor.close()
            self.executor = None
        self.suspects.clear()
        self.rate_limited.clear()


def _check_transient(error: HoldfastError) -> None:
    if not can_repeat_claim(error):
        raise error
