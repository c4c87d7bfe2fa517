"""Work items: claimed queue items as handlers see them, and their outcomes.

A handler runs outside any transaction and may run again after a crash. It ends in one of three ways. It
returns (done). It raises (`error_policy` classifies the error). Or its claim expires first, and the next
claim holder settles the item.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from holdfast.clock import Clock
from holdfast.durable.queue import Claim
from holdfast.errors import ClaimLost, HoldfastError
from holdfast.store.api import Operation, Store

WorkKind = Literal["queue", "timer"]
JoinedCall = tuple[Operation[Any, Any], tuple[Any, ...]]


class WorkItem:
    """A claimed item. After `expires_ns` (store time) this claim can no longer settle it."""

    __slots__ = (
        "_clock",
        "_extend",
        "ack_operations",
        "attempt",
        "began_ns",
        "claim",
        "claim_lost_operations",
        "dropped",
        "expires_ns",
        "failure_operations",
        "kind",
        "limit_ns",
        "lost",
        "payload",
        "renew_ns",
        "seq",
        "taken_ns",
        "token",
    )  # fmt: skip

    def __init__(
        self,
        claim: Claim,
        payload: bytes,
        kind: WorkKind,
        extend: Callable[[Claim, int | None], int | None],
    ) -> None:
        self.claim = claim
        self.token = claim.token
        self.payload = payload
        self.kind: WorkKind = kind
        self.seq = claim.seq
        # Failures and expired claims count as attempts. A release does not.
        self.attempt = claim.failures + claim.expiries + 1
        self.expires_ns = claim.expires_ns
        # The time of the next extension.
        self.renew_ns = 0
        self.lost = False
        # Operations that commit with the ack: (operation, arguments).
        self.ack_operations: list[JoinedCall] = []
        # Operations that commit with the failure.
        self.failure_operations: list[JoinedCall] = []
        # Operations that commit separately if the claim is lost, or released after the start.
        self.claim_lost_operations: list[JoinedCall] = []
        self._extend = extend
        # Start time in the executor, and the time limit from there without a progress report. 0: only the
        # claim's TTL limits it.
        self.began_ns = 0
        self.limit_ns = 0
        # Abandoned: the item was cancelled or exceeded its time limit.
        self.dropped = False
        self.taken_ns = 0
        self._clock: Clock | None = None

    @property
    def deadline_ns(self) -> int:
        """The former name of `expires_ns`."""
        return self.expires_ns

    def begin(self, now_ns: int, clock: Clock) -> None:
        self.began_ns = now_ns
        self._clock = clock

    def progress(self) -> None:
        """Report progress: the time limit starts again from now."""
        if self._clock is not None:
            self.began_ns = self._clock.mono_ns()

    def on_ack(self, operation: Operation[Any, Any], *args: Any) -> None:
        """Join an operation to the ack of this item: both commit, or neither.

        It is dropped if the handler raises or the claim is lost. The operation must not raise.
        """
        self.ack_operations.append((operation, operation.bind_positional(args, {})))

    def on_failure(self, operation: Operation[Any, Any], *args: Any) -> None:
        """Join an operation to the failure of this attempt. The last call wins. It replaces the operation
        atomically, because the loop may end the attempt at any time."""
        self.failure_operations = [(operation, operation.bind_positional(args, {}))]

    def on_claim_lost(self, operation: Operation[Any, Any], *args: Any) -> None:
        """Set an operation to commit separately if the claim is lost. Best effort: it may run twice or not
        run. The last call wins."""
        self.claim_lost_operations = [(operation, operation.bind_positional(args, {}))]

    def abandon(self, store: Store) -> None:
        """Abandon this attempt: submit its operations for a lost claim."""
        for operation, args in self.claim_lost_operations:
            with contextlib.suppress(HoldfastError):
                store.submit(operation, *args)

    def extend(self, ttl_ms: int | None = None) -> int:
        """Extend the claim from now (by default by the policy's TTL), and return the new expiry."""
        expires_ns = self._extend(self.claim, ttl_ms)
        if expires_ns is None:
            self.lost = True
            raise ClaimLost(queue=self.claim.queue, seq=self.seq, number=self.claim.number)
        self.expires_ns = expires_ns
        return expires_ns


class WorkHandler(Protocol):
    def __call__(self, work: WorkItem, /) -> object: ...


class AsyncWorkHandler(Protocol):
    def __call__(self, work: WorkItem, /) -> Awaitable[object]: ...


@dataclass(slots=True, eq=False)
class WorkOutcome:
    """The outcome of one attempt, with the state of its settlement."""

    work: WorkItem
    error: Exception | None
    latency_ns: int
    # Settlement attempts that the store refused.
    refusals: int = 0
    # The settlement commit is in doubt: look it up before settling again.
    outcome_unknown: bool = False
    # The outcome was part of a handoff (see `commit_handoff`).
    handed_off: bool = False


async def run_handler_async(work: WorkItem, handler: AsyncWorkHandler, clock: Clock) -> WorkOutcome:
    """Run a coroutine handler like `run_handler`."""
    began_ns = clock.mono_ns()
    error: Exception | None = None
    try:
        await handler(work)
    except Exception as raised:
        error = raised
    return WorkOutcome(work, error, clock.mono_ns() - began_ns)


def run_handler(work: WorkItem, handler: WorkHandler, clock: Clock) -> WorkOutcome:
    """Run the handler. Only an Exception is an outcome. A BaseException (crash, interrupt) propagates."""
    began_ns = clock.mono_ns()
    error: Exception | None = None
    try:
        handler(work)
    except Exception as raised:
        error = raised
    return WorkOutcome(work, error, clock.mono_ns() - began_ns)
