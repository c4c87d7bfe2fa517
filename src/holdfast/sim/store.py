"""One incarnation's store, and every way it can let its caller down.

It does what the embedded store's client does in production: it runs a function on a snapshot, lets
others commit meanwhile, sends what was read and written to the engine, runs the function again on
a conflict, sends the request again when the answer is lost. At each commit the plan may crash the
caller, stall it, or keep the outcome from it. All of it goes to the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast.clock import MS, S
from holdfast.config import TRANSACT_TRIES_MAX
from holdfast.durable.lease import Lease
from holdfast.errors import CommitUnknown, Conflict, HoldfastError, StoreReplaced, to_wire
from holdfast.sim.clocks import ActorClock
from holdfast.sim.faults import Fault
from holdfast.sim.machine import URL, SimStore
from holdfast.sim.record import Call, Scribe, Sent
from holdfast.sim.scheduler import Killed
from holdfast.store.api import settled
from holdfast.store.engine import Answer, Request
from holdfast.store.future import Completions, Submitted
from holdfast.store.local import refuse_writes
from holdfast.store.txn import ClientTxn
from holdfast.store.wire import fill, request_of

# A stalled actor sleeps for one of these, in units of the longest lease of the run.
STALLS = (0.4, 1.1, 3.0)
# A client sends again at once, or when its process or the network comes back.
RESENDS_NS = (5 * MS, 400 * MS)
# Between two looks at the world an actor may be anywhere: it yields before this share of its calls.
PRE_YIELD_MILLE = 350
# Of the transactions, this share waits a little for others to share its commit.
LINGER_MILLE = 300


class FaultingStore:
    """One incarnation's store."""

    def __init__(self, shared: SimStore, actor: str, incarnation: str, clock: ActorClock) -> None:
        self.url = URL
        self.actor = actor
        self.incarnation = incarnation
        self.clock = clock
        self._shared = shared
        self._scheduler = shared.scheduler
        self._client = clock.entropy(8)
        self._no = 0
        self._opened = shared.opened
        # Whether commits of this incarnation may go wrong.
        self.mortal = True
        # Transactions whose answers are lost more often than those of others.
        self.doubtful: Sequence[Callable[..., Any]] = ()
        self._scribe = Scribe(shared.history, actor, incarnation, shared.engine_now_ns)

    @property
    def generation(self) -> int:
        return self._shared.engine.generation

    @property
    def acting(self) -> Callable[[Any], Lease | None]:
        """Under which lease a function acts, for the history."""
        return self._scribe.acting

    @acting.setter
    def acting(self, told: Callable[[Any], Lease | None]) -> None:
        self._scribe.acting = told

    def now_ns(self) -> int:
        return self._shared.engine.now_ns()

    def reopen(self) -> None:
        """After StoreReplaced: the same process, on the restored store."""
        self._opened = self._shared.opened

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = Call(self._scribe, fn, args, kwargs)
        if self._scheduler.tape.chance(PRE_YIELD_MILLE):
            self._scheduler.yield_()
        for _ in range(TRANSACT_TRIES_MAX):
            try:
                txn, result = self._run(fn, args, kwargs)
            except HoldfastError as error:
                call.failed(error)
                raise
            if not txn.writing:
                return settled(result)
            call.result = result
            answer = self._send(call, txn)
            if answer.error is None:
                return settled(result)
            if answer.error[0] != Conflict.code:
                fill(txn, answer)  # raises
        raise Conflict(tries=TRANSACT_TRIES_MAX, why="others always committed first")

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._scheduler.yield_()
        txn, result = self._run(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def peek(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A read while time stands still: for those who only watch."""
        txn, result = self._run(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Submitted:
        future = Submitted()
        try:
            Completions().complete(future, self.transact(fn, *args, **kwargs))
        except Exception as error:
            Completions().complete(future, error=error)
        return future

    def stand(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> None:
        """Whoever waits here asks for himself."""
        return

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        self._check()
        topics = [topic] if isinstance(topic, str) else list(topic)
        return self._shared.wait(topics, since, int(timeout * S))

    def backup(self, path: str) -> None:
        raise NotImplementedError("the nemesis takes backups")

    def close(self) -> None: ...

    def __enter__(self) -> FaultingStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def replaced(self) -> bool:
        """Whether a backup was restored, and this process has not noticed."""
        return self._opened != self._shared.opened

    def _check(self) -> None:
        if self.replaced:
            raise StoreReplaced(path=self.url)

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        self._check()
        snapshot = self._shared.disk.snapshot()
        try:
            txn = ClientTxn(
                snapshot, snapshot=snapshot.id, generation=self.generation, now=self.now_ns
            )
            return txn, fn(txn, *args, **kwargs)
        finally:
            snapshot.close()

    def _send(self, call: Call, txn: ClientTxn) -> Answer:
        """One request to the engine, through whatever the plan has in store for it."""
        shared = self._shared
        fault = shared.plan.next(doubtful=call.fn in self.doubtful) if self.mortal else None
        self._no = call.txn_no = self._no + 1
        request = request_of(txn, self._no, self._client)
        if fault is Fault.STALL:
            self._scribe.fault(fault.value, shared.plan.boundary)
            share = self._scheduler.tape.pick(STALLS)
            self._scheduler.sleep(int(share * shared.lease_ns))
        else:
            self._scheduler.yield_()
        try:
            self._check()
            return self._deliver(call, txn, request, fault)
        except CommitUnknown:
            raise
        except HoldfastError as error:
            call.failed(error)
            raise

    def _deliver(self, call: Call, txn: ClientTxn, request: Request, fault: Fault | None) -> Answer:
        shared = self._shared
        if fault is not None and fault is not Fault.STALL:
            self._scribe.fault(fault.value, shared.plan.boundary)
        if fault is Fault.CRASH_BEFORE:
            call.unknown()
            self._die()
        if fault is Fault.UNKNOWN_BEFORE:
            call.unknown()
            raise CommitUnknown(txn_no=request.no)
        if fault is Fault.CONFLICT:
            injected = Conflict(why="injected")
            call.failed(injected)
            return Answer(request.no, to_wire(injected))
        if fault is Fault.LOST_BEFORE:
            self._lose(request)
        sent = Sent(request, call, txn)
        linger = shared.group and self._scheduler.tape.chance(LINGER_MILLE)
        answer = shared.commit(sent, linger=linger, full=fault is Fault.FULL)
        if answer.error is not None:
            return answer
        if fault is Fault.CRASH_AFTER:
            self._die()
        if fault is Fault.UNKNOWN_AFTER:
            raise CommitUnknown(txn_no=request.no)
        if fault is Fault.LOST_AFTER:
            self._lose(request)
            again = Sent(request, call, txn, first=sent)
            answer = shared.commit(again, linger=False)
            if answer.error is not None:
                return answer
        for event in sent.events:
            event.result = "ok"
        return answer

    def _lose(self, request: Request) -> None:
        """The connection broke; at times because the writer died. Ask again, a little later."""
        request.resent = True
        if self._scheduler.tape.chance(500):
            self._shared.takeover()
        self._scheduler.sleep(self._scheduler.tape.pick(RESENDS_NS))
        self._check()

    def _die(self) -> None:
        task = self._scheduler.current
        assert task is not None
        task.killed = True
        raise Killed
