"""What a handler gets, and what came of it.

A `Work` is one claimed item in a handler's hands. Its handler runs outside any transaction, may run
again after a crash, and ends in one of three ways: it returns (done), it raises (`faults` says what
that means), or its claim runs out first and whatever it did is somebody else's to settle.
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

Kind = Literal["queue", "timer"]
Joined = tuple[Operation[Any, Any], tuple[Any, ...]]


class Work:
    """`deadline_ns` is store time: what is not settled by then was not done by us."""

    __slots__ = (
        "_clock", "_extend", "attempt", "began_ns", "claim", "deadline_ns", "dropped", "joined",
        "joined_failing", "joined_lost", "kind", "limit_ns", "lost", "payload", "seq", "taken_ns",
        "token",
    )  # fmt: skip

    def __init__(
        self,
        claim: Claim,
        payload: bytes,
        kind: Kind,
        extend: Callable[[Claim, int | None], int | None],
    ) -> None:
        self.claim = claim
        self.token = claim.token
        self.payload = payload
        self.kind: Kind = kind
        self.seq = claim.seq
        # Failures and expired claims are attempts; an item that was given back unharmed had none.
        self.attempt = claim.failures + claim.expiries + 1
        self.deadline_ns = claim.expires_ns
        self.lost = False
        # What is committed together with the ack: (operation, arguments).
        self.joined: list[Joined] = []
        # The same for its failure.
        self.joined_failing: list[Joined] = []
        # What is committed by itself if the claim is lost, or given back in the middle.
        self.joined_lost: list[Joined] = []
        self._extend = extend
        # When a hand of the crew began with it, and how long it may go on from then without a sign
        # of progress; 0 is no bound but the claim's.
        self.began_ns = 0
        self.limit_ns = 0
        # Nobody waits for it any more: it was cancelled, or is out of time.
        self.dropped = False
        self.taken_ns = 0
        self._clock: Clock | None = None

    def begin(self, now_ns: int, clock: Clock) -> None:
        self.began_ns = now_ns
        self._clock = clock

    def progress(self) -> None:
        """Say that it goes on: it has its whole time again from now."""
        if self._clock is not None:
            self.began_ns = self._clock.mono_ns()

    def join(self, operation: Operation[Any, Any], *args: Any) -> None:
        """Commit an operation with the ack of this item: both happen, or neither.

        It is dropped if the handler raises, and if the claim is lost. It must not raise itself.
        """
        self.joined.append((operation, operation.positional(args, {})))

    def join_failing(self, operation: Operation[Any, Any], *args: Any) -> None:
        """Commit an operation if this attempt ends in a failure, together with that; the last one
        that was said. The loop may end the attempt at any time, so it is said in one step."""
        self.joined_failing = [(operation, operation.positional(args, {}))]

    def join_lost(self, operation: Operation[Any, Any], *args: Any) -> None:
        """Commit an operation if the claim turns out not to be ours to settle: by itself, as far as
        the store takes it, and perhaps twice. The last one that was said."""
        self.joined_lost = [(operation, operation.positional(args, {}))]

    def lose(self, store: Store) -> None:
        """Nobody will settle this attempt: commit what was said for that."""
        for operation, args in self.joined_lost:
            with contextlib.suppress(HoldfastError):
                store.submit(operation, *args)

    def extend(self, ttl_ms: int | None = None) -> int:
        """Ask for more time from now on (the policy's lease by default); the new deadline."""
        deadline_ns = self._extend(self.claim, ttl_ms)
        if deadline_ns is None:
            self.lost = True
            raise ClaimLost(queue=self.claim.queue, seq=self.seq, number=self.claim.number)
        self.deadline_ns = deadline_ns
        return deadline_ns


class Handler(Protocol):
    def __call__(self, work: Work, /) -> object: ...


class AsyncHandler(Protocol):
    def __call__(self, work: Work, /) -> Awaitable[object]: ...


@dataclass(slots=True, eq=False)
class Outcome:
    """How one attempt ended, and how far its settlement got."""

    work: Work
    error: Exception | None
    latency_ns: int
    # Settlements that the store refused so far.
    refusals: int = 0
    # True after a commit of unknown outcome: look before it is settled again.
    unsure: bool = False
    # It was in a parcel (see `parcel`).
    sent: bool = False


async def attempt_async(work: Work, handler: AsyncHandler, clock: Clock) -> Outcome:
    """`attempt`, of a coroutine."""
    began_ns = clock.mono_ns()
    error: Exception | None = None
    try:
        await handler(work)
    except Exception as raised:
        error = raised
    return Outcome(work, error, clock.mono_ns() - began_ns)


def attempt(work: Work, handler: Handler, clock: Clock) -> Outcome:
    """Run the handler. Only an Exception is an outcome: a crash or an interrupt goes right through."""
    began_ns = clock.mono_ns()
    error: Exception | None = None
    try:
        handler(work)
    except Exception as raised:
        error = raised
    return Outcome(work, error, clock.mono_ns() - began_ns)
