"""The effect handler: calls the function of one effect under a claim and turns the result into a
receipt.

The receipt and the cost are committed with the ack. Any exception of the call fails only the
attempt, so an effect cannot end its pool. A cancelled or timed-out call delivers no receipt, but
its cost is recorded.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from holdfast import codec, forks, logs, traces
from holdfast.clock import MS
from holdfast.codec import Record
from holdfast.config import MESSAGE_BYTES_MAX
from holdfast.effects import budget
from holdfast.effects.budget import Cost
from holdfast.messages import Intent, IntentReceipt, ReceiptStatus
from holdfast.runner import WorkItem
from holdfast.runner.error_policy import HandlerExited, Refused, code_of
from holdfast.store.api import Store
from holdfast.workers.effects.receipts import deliver_receipt, record_late_cost


class CallControl(Protocol):
    """The control handle of a running call: cancellation and progress."""

    @property
    def dropped(self) -> bool: ...
    def progress(self) -> None: ...


class CostEstimator(Record, frozen=True):
    """The operation that computes the cost bound of a call from its parameters, `args`, and whether
    an affected account has a limit.
    """

    operation: str
    args: bytes = b""


class EffectAdapter(Protocol):
    """The interface of an effect to the pool."""

    kind: str
    attempts: int
    expiries_max: int
    timeout_s: float
    concurrency: int
    rate_per_s: float | None
    asynchronous: bool

    def within(self, store: Store) -> EffectAdapter:
        """Return this effect bound to the pool's store."""

    def perform(self, intent: Intent, attempt: int, deadline_ns: int, hold: CallControl) -> Any:
        """Call the function. Returns its result or an awaitable."""

    def dump(self, result: Any) -> bytes:
        """Validate and encode the result."""

    def cost_of(self, result: Any) -> float: ...

    def billing(self) -> CostEstimator | None:
        """The cost estimator for budgets. None if calls are not charged."""

    def bill(self, intent: Intent, result: Any) -> list[Cost]:
        """Return the actual cost of a call."""

    def unbilled(self, error: Exception) -> bool:
        """Whether a call that raised this error certainly cost nothing."""


class BadResult(Refused):
    """A result that cannot be stored. Not retried, because a retry costs again and returns the
    same.
    """

    code = "bad_result"


# Exit errors that an inline handler converts to a failure. Other exit errors reach the thread's
# owner.
_EXIT_ERRORS = (SystemExit, GeneratorExit, asyncio.CancelledError)
# The margin by which a claim outlives an inline call.
INLINE_MARGIN_MS = 1_000
# Waits for an awaitable returned by a plain function, until the work item is abandoned.
AwaitResult = Callable[[Awaitable[Any], WorkItem], Any]


class EffectHandler:
    """The handler of one effect kind. `run` is the variant for coroutines."""

    def __init__(
        self,
        store: Store,
        adapter: EffectAdapter,
        await_result: AwaitResult,
        *,
        inline: bool = False,
    ) -> None:
        self._inline = inline
        # Real interrupts reach only the main thread. An inline call may run there, other calls
        # never do.
        self._exit_errors: tuple[type[BaseException], ...] = (
            _EXIT_ERRORS if inline else (BaseException,)
        )
        self._store = store
        self._adapter = adapter.within(store)
        self._await_result = await_result
        self._billed = adapter.billing() is not None
        self._limit_ns = int(adapter.timeout_s * 1e9)

    def __call__(self, work: WorkItem) -> None:
        intent = self._begin(work)
        result, raised = None, None
        before = forks.fork_count
        traced = _enter_trace(work, intent)
        mark = logs.RUNNING.set(partial(_log_ids, work, intent))
        try:
            result = self._perform(work, intent)
            if inspect.isawaitable(result):
                result = self._await_result(result, work)
        except Exception as error:
            raised = error
        except self._exit_errors as error:
            if forks.fork_count != before:
                forks.exit_child(error)
            raised = _handler_exited(error)
        finally:
            logs.RUNNING.reset(mark)
            if traced is not None:
                traced.leave()
        if forks.fork_count != before:
            forks.exit_child(raised)
        self._finish_traced(work, intent, result, raised, traced)

    async def run(self, work: WorkItem) -> None:
        intent = self._begin(work)
        result, raised = None, None
        # A coroutine has its own context, which ends with it.
        traced = _enter_trace(work, intent)
        logs.RUNNING.set(partial(_log_ids, work, intent))
        try:
            result = await self._perform(work, intent)
        except Exception as error:
            raised = error
        except self._exit_errors as error:
            if isinstance(error, asyncio.CancelledError) and work.dropped:
                self._bill_late(work, intent, None, None)
                if traced is not None:
                    traced.end("cancelled")
                raise
            raised = _handler_exited(error)
        self._finish_traced(work, intent, result, raised, traced)

    def _begin(self, work: WorkItem) -> Intent:
        intent: Intent = _decode(work.payload)
        work.limit_ns = intent.timeout_ns or self._limit_ns
        if self._inline and work.limit_ns > self._limit_ns:
            # An inline claim is not extended in the background and covers only the default timeout.
            work.extend(work.limit_ns // MS + INLINE_MARGIN_MS)
        if self._billed:
            # The cost of a timed-out call is unknown, so the full cost bound is charged.
            work.on_failure(budget.settle_by_claim, *_budget_key(intent), None)
            work.on_claim_lost(record_late_cost, intent, work.claim.number, None)
        return intent

    def _perform(self, work: WorkItem, intent: Intent) -> Any:
        deadline_ns = self._store.now_ns() + work.limit_ns
        return self._adapter.perform(intent, work.attempt, deadline_ns, work)

    def _finish_traced(
        self,
        work: WorkItem,
        intent: Intent,
        result: Any,
        raised: Exception | None,
        traced: traces.TraceScope | None,
    ) -> None:
        """Finish the call and end its span. The span is the parent of what follows from the receipt."""
        if traced is None or traced.span is None:
            self._finish(work, intent, result, raised)
            return
        code = error_text = ""
        try:
            self._finish(work, replace(intent, trace=traced.span.context), result, raised)
        except Exception as error:
            code, error_text = code_of(error), str(error)
            raise
        finally:
            traced.end(code or ("cancelled" if work.dropped else ""), error_text)

    def _finish(
        self, work: WorkItem, intent: Intent, result: Any, raised: Exception | None
    ) -> None:
        if work.dropped:
            self._bill_late(work, intent, result, raised)
            return
        if raised is not None:
            if self._billed:
                bill: list[Cost] | None = [] if self._adapter.unbilled(raised) else None
                work.on_failure(budget.settle_by_claim, *_budget_key(intent), bill)
                work.on_claim_lost(record_late_cost, intent, work.claim.number, bill)
            raise raised
        adapter = self._adapter
        charges = adapter.bill(intent, result) if self._billed else None
        if charges is not None:
            work.on_ack(budget.settle_by_claim, *_budget_key(intent), charges)
            work.on_failure(budget.settle_by_claim, *_budget_key(intent), charges)
            work.on_claim_lost(record_late_cost, intent, work.claim.number, charges)
        value = adapter.dump(result)
        if len(value) > MESSAGE_BYTES_MAX:
            raise BadResult(
                kind=adapter.kind, why="too large", bytes=len(value), bytes_max=MESSAGE_BYTES_MAX
            )
        receipt = IntentReceipt(
            intent.intent_hash,
            intent.effect_kind,
            ReceiptStatus.OK,
            value,
            attempts=work.attempt,
            tag=intent.tag,
            cost=adapter.cost_of(result),
            redrive_of=intent.redrive_of,
            failed_attempts=work.claim.failed_attempts,
        )
        work.on_ack(deliver_receipt, intent, receipt)

    def _bill_late(
        self, work: WorkItem, intent: Intent, result: Any, raised: Exception | None
    ) -> None:
        """Record the known cost of an abandoned call. A timed-out call was already charged its cost
        bound.
        """
        if not self._billed or not work.lost:
            return
        charges = None if result is None else self._adapter.bill(intent, result)
        if raised is not None and self._adapter.unbilled(raised):
            charges = []
        self._store.submit(record_late_cost, intent, work.claim.number, charges)


def _log_ids(work: WorkItem, intent: Intent) -> logs.Ids:
    return {
        "universe": intent.universe_id,
        "world_id": intent.world_id,
        "effect": intent.effect_kind,
        "intent": intent.intent_hash.hex(),
        "attempt": work.attempt,
    }


def _enter_trace(work: WorkItem, intent: Intent) -> traces.TraceScope | None:
    """Start the span of a call, if its intent has a trace context or the process has a tracer."""
    if not traces.makes_span(intent.trace):
        return traces.pass_on(intent.trace)
    attributes: dict[str, str | int | bool] = {
        "holdfast.universe": intent.universe_id,
        "holdfast.world_id": intent.world_id,
        "holdfast.effect": intent.effect_kind,
        "holdfast.intent": intent.intent_hash.hex(),
        "holdfast.attempt": work.attempt,
    }
    return traces.enter(intent.trace, f"call {intent.effect_kind}", traces.CLIENT, attributes)


def _budget_key(intent: Intent) -> tuple[str, str]:
    return intent.universe_id, intent.intent_hash.hex()


def _handler_exited(error: BaseException) -> HandlerExited:
    exit_code = error.code if isinstance(error, SystemExit) else None
    return HandlerExited(
        raised=type(error).__name__, status=exit_code if isinstance(exit_code, int) else 1
    )


_decode = codec.decoder(Intent).decode
