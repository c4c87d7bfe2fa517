"""The adapter pool: does what worlds want from outside, and brings back receipts (role 3).

One Runner for each kind of effect, so that a slow kind delays no other. The effect's function runs
under a claim, outside any transaction; its receipt is committed with the ack. If the process dies
after the call and before that, the claim expires and the call is made again with the same
idempotency key: one receipt, and at least one call.

What fails is tried again with backoff until its attempts are used up; then it is a dead letter, and
the will of the item delivers a receipt `error` or `timeout` in the same commit.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from holdfast import codec
from holdfast.clock import SYSTEM, Clock
from holdfast.errors import Invalid, Timeout
from holdfast.messages import FABRIC_SEND, Intent, Receipt, Status
from holdfast.roles.crew import RunnerRole
from holdfast.roles.receipts import receive
from holdfast.runner import Policy, Runner, Work
from holdfast.runner.faults import Faults
from holdfast.store.api import Store
from holdfast.world import publish


class Adapter(Protocol):
    """An effect as the pool sees it."""

    kind: str
    attempts: int
    timeout_s: float
    concurrency: int

    def perform(self, intent: Intent, attempt: int, deadline_ns: int) -> Any:
        """Call the function: its result, or an awaitable of it."""

    def dump(self, result: Any) -> bytes:
        """The result's bytes, checked."""

    def cost_of(self, result: Any) -> float: ...


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
        clock: Clock = SYSTEM,
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        wanted = list(adapters) if kinds is None else list(kinds)
        unknown = sorted(set(wanted) - set(adapters))
        if unknown:
            raise Invalid(what="kinds", found=unknown, expected=sorted(adapters))
        runners = [
            Runner(
                store,
                publish.effects(universe, adapters[kind].kind),
                _Doing(self, adapters[kind]),
                worker=f"{worker}/{kind}",
                policy=policy_of(adapters[kind]),
                concurrency=adapters[kind].concurrency,
                clock=clock,
            )
            for kind in wanted
        ]
        runners.append(
            Runner(
                store,
                publish.effects(universe, FABRIC_SEND),
                self._send_again,
                worker=f"{worker}/{FABRIC_SEND}",
                clock=clock,
            )
        )
        super().__init__(runners)

    def join(self, timeout_s: float | None = None) -> None:
        super().join(timeout_s)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def wait_for(self, result: Awaitable[Any], timeout_s: float) -> Any:
        """Run a coroutine in the pool's one event loop and wait for it."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="holdfast-effects", daemon=True
                ).start()
        future = asyncio.run_coroutine_threadsafe(_within(result, timeout_s), self._loop)
        return future.result()

    def _send_again(self, work: Work) -> None:
        """Mail that found its destination full when it was sent."""
        work.join(publish.send_again, codec.unpack_as(Intent, work.payload))


class _Doing:
    """The handler of one kind."""

    def __init__(self, pool: AdapterPool, adapter: Adapter) -> None:
        self._pool = pool
        self._adapter = adapter

    def __call__(self, work: Work) -> None:
        intent = codec.unpack_as(Intent, work.payload)
        adapter = self._adapter
        result = adapter.perform(intent, work.attempt, work.deadline_ns)
        if inspect.isawaitable(result):
            timeout_s = intent.timeout_ns / 1e9 or adapter.timeout_s
            result = self._pool.wait_for(result, timeout_s)
        receipt = Receipt(
            intent.intent_hash,
            intent.effect_kind,
            Status.OK,
            adapter.dump(result),
            attempts=work.attempt,
            tag=intent.tag,
            cost=adapter.cost_of(result),
        )
        work.join(receive, intent, receipt)


def policy_of(adapter: Adapter) -> Policy:
    """Whatever an effect raises is tried again, within its attempts; a claim outlives a call."""
    return Policy(
        lease_ttl_ms=int(adapter.timeout_s * 1000) + 5000,
        retry_budget_max=adapter.attempts,
        max_batch=max(adapter.concurrency, 1),
        on_fatal="go_on",
        faults=Faults().retrying(Exception),
    )


async def _within(result: Awaitable[Any], timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(result, timeout_s)
    except TimeoutError:
        raise Timeout(what="effect", waited_s=timeout_s) from None
