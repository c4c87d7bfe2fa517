"""The effect worker pool: runs the effects of worlds and delivers their receipts (role 3).

The pool has one Runner per effect kind, so a slow kind delays no other kind. The effect's function
runs under a claim, outside any transaction. Its receipt is committed with the ack. If the process
dies between the call and that commit, the claim expires and the call is repeated with the same
idempotency key: exactly one receipt, at least one call.

- A claim is short and extended while the call is within its timeout. The detection time of a dead
  pool therefore does not depend on call durations. A call past its timeout ends as `timeout`.
- A failed call is retried with backoff until its attempts are used up. Then it becomes a dead
  letter, and the item's `on_dead` callback delivers an `error` or `timeout` receipt in the same
  commit.
- An effect whose pools died repeatedly runs isolated (`IsolationLock`) until its claims are used
  up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from holdfast import codec
from holdfast.app_hooks import NO_HOOKS, AppHooks
from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import BATCH_MAX
from holdfast.durable import queue
from holdfast.durable.queue import Admission
from holdfast.effects import budget
from holdfast.effects.rate import RateTokens
from holdfast.errors import Invalid, Timeout
from holdfast.runner import Runner, RunnerPolicy, WorkItem
from holdfast.runner.claim_supervisor import Throttle
from holdfast.runner.commit_handoff import CommitOwner
from holdfast.runner.error_policy import ErrorPolicy
from holdfast.runner.hooks import runner_options
from holdfast.runner.isolation import SUSPECT_EXPIRIES, IsolationLock
from holdfast.store.api import Store
from holdfast.workers.effects import admission
from holdfast.workers.effects.handler import (
    INLINE_MARGIN_MS,
    BadResult,
    CallControl,
    CostEstimator,
    EffectAdapter,
    EffectHandler,
)
from holdfast.workers.mail.delivery import MailDelivery
from holdfast.workers.mail.peers import VerifyPeer
from holdfast.workers.runner_service import RunnerService
from holdfast.world import intents

__all__ = ["BadResult", "CallControl", "CostEstimator", "EffectAdapter", "EffectWorkerPool"]

# The claim time without extension: the delay until the calls of a dead pool are repeated.
CLAIM_S = 10.0
CLAIM_S_MAX = 3600.0
BATCH = 500
# How often a thread that waits for a coroutine checks whether its work item is abandoned.
WATCH_S = 0.05
# Unsettled reservations are charged in full after this time plus twice the longest timeout.
WRITE_OFF_S = 600.0


class EffectWorkerPool(RunnerService):
    name = "adapter"

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        adapters: Mapping[str, EffectAdapter],
        worker: str,
        kinds: Sequence[str] | None = None,
        stores: Mapping[str, str | Store] | None = None,
        routes: Callable[[str], str | None] | None = None,
        verify_peer: VerifyPeer | None = None,
        claim_s: float = CLAIM_S,
        inline: bool = False,
        hooks: AppHooks = NO_HOOKS,
        clock: Clock = SYSTEM,
    ) -> None:
        """`kinds` selects the effects to run, by default all. `stores` maps other universes to
        their stores, and `routes` returns the store of any other universe. `verify_peer` checks a
        store before the first mail to it.

        `inline` runs one call at a time in the thread that ticks, and starts no other threads.
        """
        wanted = list(adapters) if kinds is None else list(kinds)
        unknown = sorted(set(wanted) - set(adapters))
        if unknown:
            raise Invalid(what="kinds", found=unknown, expected=sorted(adapters))
        if not 0 < claim_s <= CLAIM_S_MAX:
            raise Invalid(what="claim_s", found=claim_s, min=0, max=CLAIM_S_MAX)
        self._store = store
        self._universe = universe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._inline = inline
        self._claim_s = claim_s
        self._isolation = IsolationLock()
        self._clock = clock
        # Only pools with billed effects have reservations to write off.
        billed = [adapters[kind] for kind in wanted if adapters[kind].billing() is not None]
        self._write_off_ns = int(
            (WRITE_OFF_S + 2 * max((a.timeout_s for a in billed), default=0)) * S
        )
        self._write_off_at_ns = 0 if billed else None
        self._hooks = hooks
        self._effect_runners = [self._new_runner(adapters[kind], worker) for kind in wanted]
        self._mail = MailDelivery(
            store,
            universe=universe,
            worker=worker,
            peers=stores,
            routes=routes,
            verify_peer=verify_peer,
            hooks=hooks,
            clock=clock,
        )
        self._mail.start_runner = self._start_runner
        self._stop_requested = False
        super().__init__([*self._effect_runners, *self._mail.runners])

    def set_commit_owner(self, commit_owner: CommitOwner) -> None:
        """Let the world worker of this process settle effects in its fused commits."""
        for runner in self._effect_runners:
            runner.set_commit_owner(commit_owner)

    def request_stop(self) -> None:
        with self._lock:
            self._stop_requested = True
        super().request_stop()

    def _start_runner(self, runner: Runner) -> bool:
        with self._lock:
            if self._stop_requested:
                return False
            runner.start()
            self.runners.append(runner)
        return True

    def join(self, timeout_s: float | None = None) -> None:
        try:
            super().join(timeout_s)
        finally:
            self._mail.close()
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def await_result(self, result: Awaitable[Any], work: WorkItem) -> Any:
        """Run a coroutine in the pool's event loop, or inline, and wait for its result."""
        if self._inline:
            return asyncio.run(_await_within(result, work.limit_ns / 1e9))
        running = asyncio.run_coroutine_threadsafe(_as_coroutine(result), self._event_loop())
        while not wait([running], WATCH_S).done:
            if work.dropped:
                running.cancel()
                raise Timeout(what="effect", waited_s=work.limit_ns / 1e9)
        return running.result()

    def _new_runner(self, adapter: EffectAdapter, worker: str) -> Runner:
        handler = EffectHandler(self._store, adapter, self.await_result, inline=self._inline)
        name = intents.effect_queue(self._universe, adapter.kind)
        in_event_loop = adapter.asynchronous and not self._inline
        return Runner(
            self._store,
            name,
            handler.run if in_event_loop else handler,
            worker=f"{worker}/{adapter.kind}",
            policy=self._policy_of(adapter),
            concurrency=1 if self._inline else adapter.concurrency,
            loop=self._event_loop if in_event_loop else None,
            isolation=None if self._inline else self._isolation,
            throttle=self._throttle(adapter, name),
            admission=lambda: self._admission(adapter),
            clock=self._clock,
            **runner_options(self._hooks),
        )

    def _policy_of(self, adapter: EffectAdapter) -> RunnerPolicy:
        """Return the runner policy: every exception is retried within the attempts."""
        # An inline claim is not extended, so it must outlive the call.
        inline_ms = int(adapter.timeout_s * 1000) + INLINE_MARGIN_MS
        return RunnerPolicy(
            lease_ttl_ms=inline_ms if self._inline else max(int(self._claim_s * 1000), 100),
            retry_budget_max=adapter.attempts,
            expiries_max=adapter.expiries_max,
            max_batch=BATCH,
            isolate_from_expiries=SUSPECT_EXPIRIES,
            extend_claims=not self._inline,
            on_fatal="go_on",
            faults=ErrorPolicy().with_retryable(Exception),
        )

    def _throttle(self, adapter: EffectAdapter, name: str) -> Throttle | None:
        if adapter.rate_per_s is not None:
            return _RateThrottle(self._store, name, adapter.rate_per_s)
        return None

    def _admission(self, adapter: EffectAdapter) -> Admission:
        self._write_off_reservations()
        terms = admission.AdmissionTerms(self._universe, adapter.billing())
        undo = "" if terms.billing is None else admission.undo_admission.name
        return Admission(admission.admit.name, codec.pack(terms), undo)

    def _write_off_reservations(self) -> None:
        """Charge stale reservations of calls that never ended, at intervals."""
        now_ns = self._store.now_ns()
        if self._write_off_at_ns is None or now_ns < self._write_off_at_ns:
            return
        self._write_off_at_ns = now_ns + self._write_off_ns // 10
        self._store.transact(budget.write_off, self._universe, self._write_off_ns, BATCH_MAX)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the pool's coroutines. Starts it on first use."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._run_event_loop, name="holdfast-effects", daemon=True
                ).start()
            return self._loop

    def _run_event_loop(self) -> None:
        """Restart the event loop if an effect stops or breaks it."""
        assert self._loop is not None
        while not self._closed:
            with contextlib.suppress(BaseException):
                self._loop.run_forever()


class _RateThrottle:
    """The throttle of an effect kind: a rate limit over all pools. It counts attempts, not intents."""

    def __init__(self, store: Store, name: str, rate_per_s: float) -> None:
        self._store = store
        self._name = name
        self._tokens = RateTokens(store, name, rate_per_s)

    def available(self, wanted: int) -> int:
        ready = self._store.read(queue.counts, self._name).ready
        return self._tokens.available(min(wanted, max(1, ready)))

    def acquire(self, wanted: int) -> int:
        return self._tokens.acquire(wanted)

    def wait_ns(self) -> int:
        return self._tokens.wait_ns()


async def _as_coroutine(result: Awaitable[Any]) -> Any:
    return await result


async def _await_within(result: Awaitable[Any], timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(result, timeout_s)
    except TimeoutError:
        raise Timeout(what="effect", waited_s=timeout_s) from None
