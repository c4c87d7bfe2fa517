"""The adapter pool: does what worlds want from outside, and brings back receipts (role 3).

One Runner for each kind of effect, so that a slow kind delays no other. The effect's function runs
under a claim, outside any transaction; its receipt is committed with the ack. If the process dies
after the call and before that, the claim expires and the call is made again with the same
idempotency key: one receipt, and at least one call.

- A claim is short, and extended while its call is within its time: how soon a dead pool is noticed
  does not depend on how long calls may take. A call beyond its time ends as `timeout`.
- What fails is tried again with backoff until its attempts are used up; then it is a dead letter,
  and the will of the item delivers a receipt `error` or `timeout` in the same commit.
- An effect that several pools died with runs by itself (`Alone`), until it has used up its claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from holdfast import codec
from holdfast.clock import SYSTEM, Clock, S
from holdfast.config import BATCH_MAX
from holdfast.durable import queue
from holdfast.durable.queue import Admission
from holdfast.effects import budget
from holdfast.effects.rate import Tokens
from holdfast.errors import Invalid, Timeout
from holdfast.roles import admission
from holdfast.roles.crew import RunnerRole
from holdfast.roles.doing import (
    INLINE_MARGIN_MS,
    Adapter,
    BadResult,
    Billing,
    Doing,
    Hold,
)
from holdfast.roles.fabric import Fabric
from holdfast.roles.peers import Vouch
from holdfast.runner import Policy, Runner, Work
from holdfast.runner.alone import SUSPECT, Alone
from holdfast.runner.faults import Faults
from holdfast.runner.parcel import Carrier
from holdfast.runner.tending import Throttle
from holdfast.store.api import Store
from holdfast.world import publish

__all__ = ["Adapter", "AdapterPool", "BadResult", "Billing", "Hold"]

# How long a claim lasts unless it is extended: how late a dead pool's calls are made again.
CLAIM_S = 10.0
CLAIM_S_MAX = 3600.0
BATCH = 500
# How often a thread that waits for a coroutine looks whether anybody waits for itself.
WATCH_S = 0.05
# Reservations that nobody settled are booked in full: after this, and twice the longest call.
LAPSE_S = 600.0


class AdapterPool(RunnerRole):
    name = "adapter"

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        adapters: Mapping[str, Adapter],
        worker: str,
        kinds: Sequence[str] | None = None,
        stores: Mapping[str, str | Store] | None = None,
        routes: Callable[[str], str | None] | None = None,
        vouch: Vouch | None = None,
        claim_s: float = CLAIM_S,
        inline: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        """`kinds` says which effects to do, if not all; `stores` where other universes are, and `routes`
        where those are that it does not name; `vouch` looks at a store before it gets mail for one.

        `inline` does one call at a time, in the thread that ticks, and starts no other.
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
        self._starting = threading.Lock()
        self._closed = False
        self._inline = inline
        self._claim_s = claim_s
        self._alone = Alone()
        self._clock = clock
        # Only pools whose effects are billed have reservations to look after.
        billed = [adapters[kind] for kind in wanted if adapters[kind].billing() is not None]
        self._lapse_ns = int((LAPSE_S + 2 * max((a.timeout_s for a in billed), default=0)) * S)
        self._lapse_at_ns = 0 if billed else None
        self._effects = [self._runner(adapters[kind], worker) for kind in wanted]
        self._fabric = Fabric(
            store,
            universe=universe,
            worker=worker,
            peers=stores,
            routes=routes,
            vouch=vouch,
            clock=clock,
        )
        self._fabric.hire = self._hire
        self._leaving = False
        super().__init__([*self._effects, *self._fabric.runners])

    def ride(self, carrier: Carrier) -> None:
        """Let a world worker of this process settle what its worlds go on with."""
        for runner in self._effects:
            runner.ride(carrier)

    def request_stop(self) -> None:
        with self._starting:
            self._leaving = True
        super().request_stop()

    def _hire(self, runner: Runner) -> bool:
        with self._starting:
            if self._leaving:
                return False
            runner.start()
            self.runners.append(runner)
        return True

    def join(self, timeout_s: float | None = None) -> None:
        try:
            super().join(timeout_s)
        finally:
            self._fabric.close()
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def wait_for(self, result: Awaitable[Any], work: Work) -> Any:
        """Run a coroutine in the pool's event loop, or here, and wait for it."""
        if self._inline:
            return asyncio.run(_within(result, work.limit_ns / 1e9))
        running = asyncio.run_coroutine_threadsafe(_awaited(result), self._events())
        while not wait([running], WATCH_S).done:
            if work.dropped:
                running.cancel()
                raise Timeout(what="effect", waited_s=work.limit_ns / 1e9)
        return running.result()

    def _runner(self, adapter: Adapter, worker: str) -> Runner:
        doing = Doing(self._store, adapter, self.wait_for, inline=self._inline)
        name = publish.effects(self._universe, adapter.kind)
        tasks = adapter.asynchronous and not self._inline
        return Runner(
            self._store,
            name,
            doing.run if tasks else doing,
            worker=f"{worker}/{adapter.kind}",
            policy=self._policy_of(adapter),
            concurrency=1 if self._inline else adapter.concurrency,
            loop=self._events if tasks else None,
            alone=None if self._inline else self._alone,
            throttle=self._throttle(adapter, name),
            admission=lambda: self._admission(adapter),
            clock=self._clock,
        )

    def _policy_of(self, adapter: Adapter) -> Policy:
        """Whatever an effect raises is tried again, within its attempts."""
        # In line nothing extends a claim: it must outlive the call.
        inline_ms = int(adapter.timeout_s * 1000) + INLINE_MARGIN_MS
        return Policy(
            lease_ttl_ms=inline_ms if self._inline else max(int(self._claim_s * 1000), 100),
            retry_budget_max=adapter.attempts,
            max_batch=BATCH,
            alone_from=SUSPECT,
            tend=not self._inline,
            on_fatal="go_on",
            faults=Faults().retrying(Exception),
        )

    def _throttle(self, adapter: Adapter, name: str) -> Throttle | None:
        if adapter.rate_per_s is not None:
            return _Rate(self._store, name, adapter.rate_per_s)
        return None

    def _admission(self, adapter: Adapter) -> Admission:
        self._lapse()
        terms = admission.Terms(self._universe, adapter.billing())
        undo = "" if terms.billing is None else admission.undo.name
        return Admission(admission.admit.name, codec.pack(terms), undo)

    def _lapse(self) -> None:
        """Now and then, book what was reserved for calls that never came to an end."""
        now_ns = self._store.now_ns()
        if self._lapse_at_ns is None or now_ns < self._lapse_at_ns:
            return
        self._lapse_at_ns = now_ns + self._lapse_ns // 10
        self._store.transact(budget.lapse, self._universe, self._lapse_ns, BATCH_MAX)

    def _events(self) -> asyncio.AbstractEventLoop:
        """The one event loop that all coroutines of the pool run in."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._run_events, name="holdfast-effects", daemon=True
                ).start()
            return self._loop

    def _run_events(self) -> None:
        """An effect that stops the loop, or breaks it, stops it for nobody else."""
        assert self._loop is not None
        while not self._closed:
            with contextlib.suppress(BaseException):
                self._loop.run_forever()


class _Rate:
    """Begin no more of a kind than its rate, all pools together. Attempts count, not intents."""

    def __init__(self, store: Store, name: str, rate_per_s: float) -> None:
        self._store = store
        self._name = name
        self._tokens = Tokens(store, name, rate_per_s)

    def stock(self, wanted: int) -> int:
        ready = self._store.read(queue.counts, self._name).ready
        return self._tokens.stock(min(wanted, max(1, ready)))

    def take(self, wanted: int) -> int:
        return self._tokens.take(wanted)

    def wait_ns(self) -> int:
        return self._tokens.wait_ns()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def _within(result: Awaitable[Any], timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(result, timeout_s)
    except TimeoutError:
        raise Timeout(what="effect", waited_s=timeout_s) from None
