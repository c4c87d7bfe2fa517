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
from holdfast.config import MESSAGE_BYTES_MAX
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.effects.rate import Tokens
from holdfast.errors import HoldfastError, Invalid, Timeout
from holdfast.messages import FABRIC_SEND, Intent, Receipt, Status
from holdfast.roles.crew import RunnerRole, certain
from holdfast.roles.receipts import receive
from holdfast.runner import Policy, Runner, Work
from holdfast.runner.faults import Faults, Refused
from holdfast.runner.runner import Throttle
from holdfast.store import tuples
from holdfast.store.api import Store, Txn
from holdfast.world import publish

# A claim outlives the longest call by this much.
CLAIM_MARGIN_MS = 1_000
INLINE_BATCH = 200


class Adapter(Protocol):
    """An effect as the pool sees it."""

    kind: str
    attempts: int
    timeout_s: float
    concurrency: int
    rate_per_s: float | None

    def perform(self, intent: Intent, attempt: int, deadline_ns: int) -> Any:
        """Call the function: its result, or an awaitable of it."""

    def dump(self, result: Any) -> bytes:
        """The result's bytes, checked."""

    def cost_of(self, result: Any) -> float: ...


class BadResult(Refused):
    """Calling again would give, and cost, the same."""

    code = "bad_result"


class Exited(HoldfastError):
    code = "exited"
    retryable = True


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
                throttle=_throttle(store, universe, adapters[kind]),
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
                policy=certain(max_batch=100),
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
        timeout_s = intent.timeout_ns / 1e9 or adapter.timeout_s
        if timeout_s > adapter.timeout_s:
            # The intent asks for more time than its kind usually gets: so must the claim.
            work.extend(_claim_ms(timeout_s))
        try:
            result = adapter.perform(intent, work.attempt, work.deadline_ns)
            if inspect.isawaitable(result):
                result = self._pool.wait_for(result, timeout_s)
        except SystemExit as error:
            # An effect that wants to end the process ends its attempt.
            raise Exited(status=str(error.code)) from error
        value = adapter.dump(result)
        if len(value) > MESSAGE_BYTES_MAX:
            raise BadResult(
                kind=adapter.kind, why="too large", bytes=len(value), bytes_max=MESSAGE_BYTES_MAX
            )
        receipt = Receipt(
            intent.intent_hash,
            intent.effect_kind,
            Status.OK,
            value,
            attempts=work.attempt,
            tag=intent.tag,
            cost=adapter.cost_of(result),
            redrive_of=intent.redrive_of,
        )
        work.join(receive, intent, receipt)


def _throttle(store: Store, universe: str, adapter: Adapter) -> Throttle | None:
    name = publish.effects(universe, adapter.kind)
    if adapter.rate_per_s is not None:
        return _Rate(store, name, adapter.rate_per_s)
    return _Suspects(store, name) if adapter.concurrency == 1 else None


class _Suspects:
    """Of effects that are done in line, one that a worker may have died of is done alone.

    Else it would take its whole batch with it, every time, until all of them were given up.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._keys = items.keys_of(name)

    def allow(self, limit: int) -> int:
        return 1 if self._store.read(self._suspect) else limit

    def wait_ns(self) -> int:
        return 0

    def _suspect(self, txn: Txn) -> bool:
        """Whether a claim has run out, or what comes next has outlived one."""
        keys = self._keys
        if txn.scan(keys.claims, keys.claims + items.pack_int(txn.now_ns + 1), 1):
            return True
        head = txn.scan(keys.ready, tuples.after(keys.ready), 1)
        return bool(head) and items.load(txn, keys, head[0][1]).expiries > 0


class _Rate:
    """Begin no more of a kind than its rate, all pools together. Attempts count, not intents."""

    def __init__(self, store: Store, name: str, rate_per_s: float) -> None:
        self._store = store
        self._name = name
        self._tokens = Tokens(store, name, rate_per_s)

    def allow(self, limit: int) -> int:
        due_ns, counts = self._store.read(self._look)
        if due_ns is None or due_ns > self._store.now_ns():
            return limit  # there is nothing to begin, and no token to be spent on it
        return self._tokens.take(min(limit, max(1, counts.ready)))

    def wait_ns(self) -> int:
        return self._tokens.wait_ns()

    def _look(self, txn: Txn) -> tuple[int | None, queue.Counts]:
        return queue.next_due_ns(txn, self._name), queue.counts(txn, self._name)


def _claim_ms(timeout_s: float) -> int:
    """A claim outlives a call, by enough to bring the receipt."""
    return int(timeout_s * 1000) + CLAIM_MARGIN_MS


def policy_of(adapter: Adapter) -> Policy:
    """Whatever an effect raises is tried again, within its attempts."""
    return Policy(
        lease_ttl_ms=_claim_ms(adapter.timeout_s),
        retry_budget_max=adapter.attempts,
        # One at a time is done in line, a batch to a commit; several are done by a crew of threads.
        max_batch=adapter.concurrency if adapter.concurrency > 1 else INLINE_BATCH,
        on_fatal="go_on",
        faults=Faults().retrying(Exception),
    )


async def _within(result: Awaitable[Any], timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(result, timeout_s)
    except TimeoutError:
        raise Timeout(what="effect", waited_s=timeout_s) from None
