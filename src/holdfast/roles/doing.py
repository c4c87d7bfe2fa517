"""Doing one effect: call its function under a claim, and turn what comes of it into a receipt.

The receipt, and what the call is billed at, are committed with the ack. What a call raises is its
attempt's failure, whatever it is: an effect cannot end its pool. A call that nobody waits for any
more (cancelled, or out of time) brings no receipt, but its bill is booked.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from holdfast import codec, forks
from holdfast.clock import MS
from holdfast.codec import Record
from holdfast.config import MESSAGE_BYTES_MAX
from holdfast.effects import budget
from holdfast.effects.budget import Charge
from holdfast.messages import Intent, Receipt, Status
from holdfast.roles.receipts import book_late, receive
from holdfast.runner import Work
from holdfast.runner.faults import Exited, Refused
from holdfast.store.api import Store


class Hold(Protocol):
    """How a call and whoever waits for it reach each other."""

    @property
    def dropped(self) -> bool: ...
    def progress(self) -> None: ...


class Billing(Record, frozen=True):
    """What says how much a call can cost at most: an operation, given parameters, `args`, and whether
    an account that the call is charged to has a limit."""

    operation: str
    args: bytes = b""


class Adapter(Protocol):
    """An effect as the pool sees it."""

    kind: str
    attempts: int
    timeout_s: float
    concurrency: int
    rate_per_s: float | None
    asynchronous: bool

    def within(self, store: Store) -> Adapter:
        """The same effect, done by a pool of this store."""

    def perform(self, intent: Intent, attempt: int, deadline_ns: int, hold: Hold) -> Any:
        """Call the function: its result, or an awaitable of it."""

    def dump(self, result: Any) -> bytes:
        """The result's bytes, checked."""

    def cost_of(self, result: Any) -> float: ...

    def billing(self) -> Billing | None:
        """How its calls are charged to budgets; None: they are not."""

    def bill(self, intent: Intent, result: Any) -> list[Charge]:
        """What a call did cost."""

    def unbilled(self, error: Exception) -> bool:
        """Whether a call that ended so has cost nothing for certain."""


class BadResult(Refused):
    """Calling again would give, and cost, the same."""

    code = "bad_result"


# What code raises in line to end more than itself: other than these, the thread's owner decides.
_ENDING = (SystemExit, GeneratorExit, asyncio.CancelledError)
# A claim outlives a call that is made in line by this much.
INLINE_MARGIN_MS = 1_000
# Waits for what a plain function gave instead of a result, for as long as somebody waits for the work.
Waiter = Callable[[Awaitable[Any], Work], Any]


class Doing:
    """The handler of one kind; `run` is the same for coroutines."""

    def __init__(
        self, store: Store, adapter: Adapter, wait_for: Waiter, *, inline: bool = False
    ) -> None:
        self._inline = inline
        # Real interrupts reach the main thread: a call in line may be there, another never is.
        self._ending: tuple[type[BaseException], ...] = _ENDING if inline else (BaseException,)
        self._store = store
        self._adapter = adapter.within(store)
        self._wait_for = wait_for
        self._billed = adapter.billing() is not None
        self._limit_ns = int(adapter.timeout_s * 1e9)

    def __call__(self, work: Work) -> None:
        intent = self._begin(work)
        result, raised = None, None
        before = forks.made
        try:
            result = self._perform(work, intent)
            if inspect.isawaitable(result):
                result = self._wait_for(result, work)
        except Exception as error:
            raised = error
        except self._ending as error:
            if forks.made != before:
                forks.leave(error)
            raised = _exited(error)
        if forks.made != before:
            forks.leave(raised)
        self._end(work, intent, result, raised)

    async def run(self, work: Work) -> None:
        intent = self._begin(work)
        result, raised = None, None
        try:
            result = await self._perform(work, intent)
        except Exception as error:
            raised = error
        except self._ending as error:
            if isinstance(error, asyncio.CancelledError) and work.dropped:
                self._late(work, intent, None, None)
                raise
            raised = _exited(error)
        self._end(work, intent, result, raised)

    def _begin(self, work: Work) -> Intent:
        intent: Intent = _decode(work.payload)
        work.limit_ns = intent.timeout_ns or self._limit_ns
        if self._inline and work.limit_ns > self._limit_ns:
            # Nobody extends the claim meanwhile, and it was made for the time of its kind.
            work.extend(work.limit_ns // MS + INLINE_MARGIN_MS)
        if self._billed:
            # If it is out of time, nobody knows the bill: then it is the most that it can be.
            work.join_failing(budget.close, *_account(intent), None)
            work.join_lost(book_late, intent, work.claim.number, None)
        return intent

    def _perform(self, work: Work, intent: Intent) -> Any:
        deadline_ns = self._store.now_ns() + work.limit_ns
        return self._adapter.perform(intent, work.attempt, deadline_ns, work)

    def _end(self, work: Work, intent: Intent, result: Any, raised: Exception | None) -> None:
        if work.dropped:
            self._late(work, intent, result, raised)
            return
        if raised is not None:
            if self._billed:
                bill: list[Charge] | None = [] if self._adapter.unbilled(raised) else None
                work.join_failing(budget.close, *_account(intent), bill)
                work.join_lost(book_late, intent, work.claim.number, bill)
            raise raised
        adapter = self._adapter
        charges = adapter.bill(intent, result) if self._billed else None
        if charges is not None:
            work.join(budget.close, *_account(intent), charges)
            work.join_failing(budget.close, *_account(intent), charges)
            work.join_lost(book_late, intent, work.claim.number, charges)
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
            tried=work.claim.tried,
        )
        work.join(receive, intent, receipt)

    def _late(self, work: Work, intent: Intent, result: Any, raised: Exception | None) -> None:
        """Nobody waits for this call any more: only its bill counts, as far as it is known. What was
        out of time has been booked at its most."""
        if not self._billed or not work.lost:
            return
        charges = None if result is None else self._adapter.bill(intent, result)
        if raised is not None and self._adapter.unbilled(raised):
            charges = []
        self._store.submit(book_late, intent, work.claim.number, charges)


def _account(intent: Intent) -> tuple[str, str]:
    return intent.universe_id, intent.intent_hash.hex()


def _exited(error: BaseException) -> Exited:
    told = error.code if isinstance(error, SystemExit) else None
    return Exited(raised=type(error).__name__, status=told if isinstance(told, int) else 1)


_decode = codec.decoder(Intent).decode
