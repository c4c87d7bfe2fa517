"""The runner: a queue worker. It claims items, runs their handler and settles the outcomes.

    tick    settle finished items → claim from queue and timers → run handlers → settle
    loop    tick, then sleep until an item is put or due, a handler finishes, or a stop is requested

- A handler runs outside any transaction, under a claim. Its item is acked, requeued or dead-lettered
  under that claim's token, so no item is settled twice or after its claim expired.
- A tick settles all items in one commit. If handlers run long, finished items are committed earlier, and
  unstarted items are released before their claims expire.
- Transient store errors (busy, conflict, not found) make the tick busy. They never end the loop.
- A crash (a BaseException that is not an Exception) propagates and settles nothing.

The simulator, or a host with a scheduler, may call `tick` directly. Without an executor this starts no
thread. With `concurrency` above 1 handlers run in an executor, and a tick only submits work and drains
results.
"""

from __future__ import annotations

import asyncio
import typing
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.clock import MS, SYSTEM, Clock
from holdfast.config import CONCURRENCY_MAX
from holdfast.durable import queue as queues
from holdfast.durable.queue import Admission, Claim
from holdfast.errors import HoldfastError, Invalid
from holdfast.runner import boot, demand
from holdfast.runner.boot import NotRunning, RunnerLifecycle, RunnerState
from holdfast.runner.claim_supervisor import ClaimSupervisor, Throttle
from holdfast.runner.claimer import Claimer
from holdfast.runner.commit_handoff import CommitOwner, HandoffQueue
from holdfast.runner.counters import RunnerCounters
from holdfast.runner.error_policy import ErrorKind
from holdfast.runner.executor import AsyncExecutor, Executor, ThreadExecutor
from holdfast.runner.hooks import Hooks, LogSink, ReplayHook
from holdfast.runner.isolation import IsolationLock
from holdfast.runner.loop import RunnerLoop
from holdfast.runner.policy import RunnerPolicy
from holdfast.runner.settlement import SettlementBuffer
from holdfast.runner.tick import TickLock, TickStats
from holdfast.runner.unknown_outcome import can_repeat
from holdfast.runner.work import (
    AsyncWorkHandler,
    WorkHandler,
    WorkItem,
    WorkOutcome,
    run_handler,
    run_handler_async,
)
from holdfast.store import schema
from holdfast.store.api import Store


class RunnerSetup(NamedTuple):
    """The fixed options of a runner, from which each boot creates its parts."""

    timers: str | None
    handler: WorkHandler | AsyncWorkHandler
    sleep: Callable[[float], object] | None
    event_loop: Callable[[], asyncio.AbstractEventLoop] | None
    isolation: IsolationLock | None
    admission: Callable[[], Admission | None] | None
    bootstrap: bool


class Runner:
    def __init__(
        self,
        store: Store,
        queue: str,
        handler: WorkHandler | AsyncWorkHandler,
        *,
        worker: str,
        timers: str | None = None,
        policy: RunnerPolicy | None = None,
        clock: Clock = SYSTEM,
        sleep: Callable[[float], object] | None = None,
        tick_lock: TickLock | None = None,
        concurrency: int = 1,
        loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
        isolation: IsolationLock | None = None,
        throttle: Throttle | None = None,
        admission: Callable[[], Admission | None] | None = None,
        counters: RunnerCounters | None = None,
        log: LogSink | None = None,
        replay: ReplayHook | None = None,
        bootstrap: bool = False,
    ) -> None:
        """`timers` names a second queue, for items with a `not_before_ns`.

        `sleep` replaces waiting for store notifications. With a `loop` the handler is a coroutine function,
        and its calls are tasks of that event loop. Runners that share an `isolation` lock run poison
        suspects in isolation.
        """
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise Invalid(what="concurrency", found=concurrency, expected=f"1 to {CONCURRENCY_MAX}")
        if timers == queue:
            raise Invalid(what="timers", found=timers, expected="another name than the queue's")
        self.worker = worker
        self.hooks = Hooks(worker, counters or RunnerCounters(), log, replay)
        # The error of the last failed tick, which is already logged.
        self.logged_error: BaseException | None = None
        self.last_progress_ns = clock.mono_ns()
        self._store = store
        self._queue = queue
        self._setup = RunnerSetup(timers, handler, sleep, loop, isolation, admission, bootstrap)
        self._policy = policy or RunnerPolicy.default()
        self._clock = clock
        self._tick_lock = tick_lock or TickLock()
        self._concurrency = concurrency
        self._throttle = throttle
        self._lifecycle = RunnerLifecycle(worker)
        self._fatal: Exception | None = None
        self._commit_owner: CommitOwner | None = None
        self._create_parts()
        if isolation is not None:
            isolation.register(self)

    # -- life ----------------------------------------------------------------------------------

    @property
    def state(self) -> RunnerState:
        return self._lifecycle.state

    @property
    def queue(self) -> str:
        return self._queue

    @property
    def counters(self) -> RunnerCounters:
        return self.hooks.counters

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the loop of a started runner, if any."""
        return self._loop.failure

    @property
    def policy(self) -> RunnerPolicy:
        return self._policy

    @property
    def owner(self) -> str:
        """The owner name in claims. It is new at each boot, so that a restart fences its former self."""
        return self._claimer.owner

    def set_policy(self, policy: RunnerPolicy) -> None:
        """Replace the policy from the next tick on."""
        self._policy = policy

    def set_commit_owner(self, commit_owner: CommitOwner) -> None:
        """Set the commit owner, which settles outcomes in its own commits. Call before the start."""
        self._commit_owner = commit_owner

    def boot(self, layout: Mapping[str, int] | None = None) -> None:
        """Check the store and go from STOPPED to RUNNING. On an error the runner stays stopped."""

        def prepare() -> None:
            boot.check_key_spaces(boot.key_spaces() if layout is None else layout)
            self._store.transact(
                boot.ensure_marker, schema.SCHEMA_VERSION, bootstrap=self._setup.bootstrap
            )
            self._create_parts()

        self._lifecycle.boot(prepare)

    def start(self) -> None:
        """Boot if stopped, and run the loop in a new thread."""
        if self.state is RunnerState.STOPPED:
            self.boot()
        self._loop.start()

    def run(self) -> None:
        """Run the loop in this thread until a stop is requested and all items are settled."""
        self._loop.run()

    def request_stop(self) -> None:
        """Stop claiming. Any thread may call it, including a handler's."""
        self._lifecycle.request_stop()
        self._loop.wake()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the loop to end. Return False after the timeout. Raises the error that ended the loop."""
        return self._loop.join(timeout_s)

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Request a stop, settle the items in progress, and wait like `join`."""
        self.request_stop()
        return self._loop.finish(timeout_s)

    def halt(self) -> None:
        """End the lifecycle of the runner. Claims of unsettled items are left to expire."""
        self.request_stop()
        self._lifecycle.halt(self._supervisor.close)
        if self._setup.isolation is not None:
            self._setup.isolation.release(self)

    def __enter__(self) -> Runner:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _create_parts(self) -> None:
        owner = f"{self.worker}/{self._clock.entropy(6).hex()}"
        claim_demand = demand.ClaimDemand()
        self._claimer = Claimer(
            self._store,
            self._queue,
            self._setup.timers,
            claim_demand,
            owner=owner,
            extend=self._extend,
            hooks=self.hooks,
            admission=self._setup.admission,
        )
        self._supervisor = ClaimSupervisor(
            self._store,
            self._queue,
            self._claimer,
            member=self,
            hooks=self.hooks,
            clock=self._clock,
            make_executor=self._make_executor,
            on_outcome=self._on_outcome,
            has_executor=self._has_executor,
            isolation=self._setup.isolation,
            throttle=self._throttle,
        )
        self._settlement = SettlementBuffer(self._store, self.hooks)
        self._loop = RunnerLoop(
            self, self._store, self._claimer.names, claim_demand, sleep=self._setup.sleep
        )
        self._handoffs: HandoffQueue | None = None
        if self._commit_owner is not None:
            self._handoffs = HandoffQueue(
                self._commit_owner, self._settlement, self._claimer, self._clock, self._loop.wake
            )
        self._fatal = None

    # -- one tick ------------------------------------------------------------------------------

    @property
    def has_unsettled(self) -> bool:
        """Whether there are items in progress or finished items without a commit."""
        handoffs_busy = self._handoffs is not None and self._handoffs.busy
        return bool(self._settlement.outcomes) or handoffs_busy or self._supervisor.busy

    @property
    def under_way(self) -> int:
        """Number of items in the executor. Any thread may read it."""
        return self._supervisor.under_way

    @property
    def capacity(self) -> int:
        """Number of further items that may be claimed now."""
        supervisor = self._supervisor
        executor = supervisor.executor
        return demand.claim_capacity(
            blocked=supervisor.blocked,
            max_batch=self._policy.max_batch,
            rate_limited=None if self._throttle is None else len(supervisor.rate_limited),
            executor_capacity=None if executor is None else executor.capacity,
            concurrency=self._concurrency if self._has_executor else None,
        )

    def tick(self) -> TickStats:
        """Process up to one batch. Blocks on the store and, without an executor, on the handlers."""
        with self._tick_lock:
            if self.state is RunnerState.STOPPED:
                raise NotRunning(worker=self.worker)
            policy, tick = self._policy, TickStats()
            try:
                self._step(policy, tick)
            except Exception as error:
                # Logged here and not in the loop, so that a host that calls `tick` gets the same log.
                self.hooks.loop_error(error)
                self.logged_error = error
                raise
            return tick

    def _step(self, policy: RunnerPolicy, tick: TickStats) -> None:
        try:
            self._advance(policy, tick)
        except HoldfastError as error:
            if not can_repeat(error):
                raise
            # The store may fail at any call. Claims requested before that may exist.
            tick.busy += 1
            self._claimer.mark_uncertain()
        self._record_progress()
        self._apply_fatal_policy(policy)

    def _advance(self, policy: RunnerPolicy, tick: TickStats) -> None:
        supervisor = self._supervisor
        running = self._lifecycle.is_running
        supervisor.collect_finished(policy, tick, running=running)
        supervisor.supervise(policy, tick, running=running)
        if self._handoffs is not None:
            self._exchange_handoffs(self._handoffs, policy, tick)
        if self._has_executor and self._lifecycle.is_running and self._settlement.outcomes:
            self._settle_and_claim(policy, tick)
        self._settlement.settle(policy, tick)
        # While the store refuses the settlement, no item starts.
        if self._lifecycle.is_running and not self._settlement.outcomes:
            work_items = self._claim(policy, tick)
            if self._has_executor:
                supervisor.start_claimed(work_items, policy, tick)
            else:
                self._run_inline(work_items, policy, tick)
            self._settlement.settle(policy, tick)
        self._offer_capacity(policy, tick)

    def _exchange_handoffs(
        self, handoffs: HandoffQueue, policy: RunnerPolicy, tick: TickStats
    ) -> None:
        """Process the results of commit handoffs, and hand off finished outcomes."""
        running = self._lifecycle.is_running
        work_items = handoffs.collect(policy, tick, running=running)
        if work_items:
            self._supervisor.start_claimed(work_items, policy, tick)
        if running and (self._settlement.outcomes or handoffs.busy):
            # Rate-limited items are claimed only by this runner, which counts the tokens.
            capacity = self.capacity if self._throttle is None else 0
            handoffs.send(policy, capacity, self._expired_before_max(policy))

    def _offer_capacity(self, policy: RunnerPolicy, tick: TickStats) -> None:
        """Offer capacity before sleeping: the commit owner may claim new items for this runner."""
        idle = self._lifecycle.is_running and not tick.made_progress and not tick.busy
        if self._handoffs is not None and idle and self._throttle is None:
            self._handoffs.offer_capacity(policy, self.capacity, self._expired_before_max(policy))

    def _settle_and_claim(self, policy: RunnerPolicy, tick: TickStats) -> None:
        """Settle and claim in one commit, if both have work and no outcome is in doubt."""
        if not (
            self._settlement.is_certain and self._claimer.is_certain and self._claimer.has_work()
        ):
            return
        if self._handoffs is not None and not self._handoffs.cancel_offer():
            return
        limit = self._claim_limit(policy, tick)
        if limit <= 0:
            return
        request = self._claimer.new_request(limit, policy, self._expired_before_max(policy))
        batch = self._settlement.settle_and_claim(policy, tick, request)
        if batch is not None:
            self._supervisor.start_claimed(
                self._claimer.accept_requested(batch, tick), policy, tick
            )

    def _claim(self, policy: RunnerPolicy, tick: TickStats) -> deque[WorkItem]:
        limit = max(self._claim_limit(policy, tick), 0)
        expired_before_max = self._expired_before_max(policy)
        if self._handoffs is not None and not self._handoffs.cancel_offer():
            return deque()
        if self._handoffs is not None and self._handoffs.busy:
            # Claims of handoffs in flight must not be adopted, and the handoffs request new claims already.
            if self._handoffs.requested_claims or not self._claimer.is_certain:
                return deque()
        return self._claimer.claim(
            limit, policy, tick, self._supervisor.has_claim, expired_before_max
        )

    def _claim_limit(self, policy: RunnerPolicy, tick: TickStats) -> int:
        requested = 0 if self._handoffs is None else self._handoffs.requested_claims
        limit = min(policy.max_batch, self.capacity - requested)
        if self._throttle is not None and limit > 0:
            return self._supervisor.claim_limit(self._throttle, limit, tick)
        return limit

    def _expired_before_max(self, policy: RunnerPolicy) -> int | None:
        """The maximum number of items with expired claims to claim: as many as would start at once."""
        if not policy.extend_claims:
            return None
        executor = self._supervisor.executor
        return self._concurrency if executor is None else executor.free_workers

    @property
    def awaits_handoff(self) -> bool:
        """Whether a handoff in flight will return claims and wake the loop."""
        return self._handoffs is not None and self._handoffs.requested_claims > 0

    def next_check_s(self) -> float:
        """Return the time in seconds until the executor needs the next check."""
        return self._supervisor.next_check_s(self._policy) if self.has_unsettled else float("inf")

    def idle_sleep_ns(self) -> int:
        """Return the time until the next item is due, at most the policy's idle maximum."""
        with self._tick_lock:
            due_ns = self._claimer.next_due_ns()
        throttled_ns = (
            None if due_ns is None or self._throttle is None else self._throttle.wait_ns()
        )
        return demand.idle_ns(
            self._store.now_ns(),
            due_ns=due_ns,
            throttled_ns=throttled_ns,
            longest_ns=self._policy.idle_sleep_max_ms * MS,
        )

    def idle_sleep_ms(self) -> int:
        """Return `idle_sleep_ns` in milliseconds, rounded up."""
        return -(-self.idle_sleep_ns() // MS)

    @property
    def _has_executor(self) -> bool:
        return (
            self._concurrency > 1
            or self._setup.event_loop is not None
            or self._policy.extend_claims
        )

    def _make_executor(self, policy: RunnerPolicy) -> Executor:
        # A token is used at the start of a call, so rate-limited items are not prefetched.
        ahead_max = policy.max_batch if policy.extend_claims and self._throttle is None else 0
        if self._setup.event_loop is not None:
            return AsyncExecutor(
                self._concurrency,
                self._attempt_async,
                self._setup.event_loop(),
                on_begin=self.hooks.began,
                on_done=self._loop.wake,
                clock=self._clock,
                prefetch_max=ahead_max,
            )
        return ThreadExecutor(
            self._concurrency,
            self._attempt,
            name=self.worker,
            on_begin=self.hooks.began,
            on_done=self._loop.wake,
            clock=self._clock,
            prefetch_max=ahead_max,
        )

    def _run_inline(
        self, work_items: deque[WorkItem], policy: RunnerPolicy, tick: TickStats
    ) -> None:
        settle_at_ns = self._clock.mono_ns() + policy.settle_after_ms * MS
        # The first item starts if its claim is live, so that every batch makes progress. Later items start
        # only with half of the claim's TTL left.
        needs_ns = 0
        while work_items:
            if self._clock.mono_ns() >= settle_at_ns and not tick.busy:
                self._settlement.settle(policy, tick)
                settle_at_ns = self._clock.mono_ns() + policy.settle_after_ms * MS
            late = work_items[0].expires_ns <= self._store.now_ns() + needs_ns
            if late or self._must_stop_batch(policy):
                self._claimer.release_unstarted(work_items, tick)
                return
            work = work_items.popleft()
            self.hooks.began(work)
            self._on_outcome(self._attempt(work), policy, tick)
            self._record_progress()
            needs_ns = policy.lease_ttl_ns // 2

    def _attempt(self, work: WorkItem) -> WorkOutcome:
        return run_handler(work, self._setup.handler, self._clock)

    async def _attempt_async(self, work: WorkItem) -> WorkOutcome:
        return await run_handler_async(
            work, typing.cast(AsyncWorkHandler, self._setup.handler), self._clock
        )

    def _on_outcome(self, outcome: WorkOutcome, policy: RunnerPolicy, tick: TickStats) -> None:
        if outcome.work.lost:
            tick.lost += 1
            self.hooks.lost(outcome.work)
            return
        kind = policy.faults.classify(outcome.error)
        self.hooks.ended(outcome, kind)
        self._settlement.outcomes.append(outcome)
        if kind is ErrorKind.FATAL and self._fatal is None:
            self._fatal = outcome.error

    def _must_stop_batch(self, policy: RunnerPolicy) -> bool:
        has_fatal = self._fatal is not None and policy.on_fatal != "go_on"
        return has_fatal or not self._lifecycle.is_running

    def _apply_fatal_policy(self, policy: RunnerPolicy) -> None:
        """Apply the policy's `on_fatal` to a non-retryable error, after its item is settled."""
        if self._fatal is None or self._settlement.outcomes:
            return
        fatal, self._fatal = self._fatal, None
        if policy.on_fatal == "stop":
            self.request_stop()
        elif policy.on_fatal == "raise" and self._lifecycle.is_running:
            raise fatal

    def _extend(self, claim: Claim, ttl_ms: int | None) -> int | None:
        ttl_ns = self._policy.lease_ttl_ns if ttl_ms is None else ttl_ms * MS
        expiries: list[int | None] = self._store.transact(queues.extend, [claim.token], ttl_ns)
        self._record_progress()
        return expiries[0]

    def wake(self) -> None:
        """Wake the loop, after a change outside the store."""
        self._loop.wake()

    def _record_progress(self) -> None:
        self.last_progress_ns = self._clock.mono_ns()
