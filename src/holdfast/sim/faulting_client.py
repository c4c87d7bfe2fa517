"""Store client of one incarnation, with injected faults.

It behaves as the client of the embedded store does in production: it runs a function on a snapshot,
lets other actors commit meanwhile, sends the read and write sets to the engine, reruns the function
on a conflict, and resends the request when the answer is lost. At each commit the fault plan may
crash the caller, stall it, or withhold the outcome. The history records every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from holdfast.clock import MS, S
from holdfast.config import TRANSACT_ATTEMPTS_MAX
from holdfast.durable.lease import Lease
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    HoldfastError,
    StoreReplaced,
    to_wire,
)
from holdfast.sim.actor_clock import ActorClock
from holdfast.sim.faults import Fault
from holdfast.sim.history_recorder import HistoryRecorder, RecordedCall, SentTransaction
from holdfast.sim.process_loop import LoopSubscription
from holdfast.sim.scheduler import ProcessKilled
from holdfast.sim.sim_store import URL, SimStore
from holdfast.store.api import unwrap
from holdfast.store.futures import CommitFuture, CompletionBatch
from holdfast.store.lmdb.protocol import build_request, resolve_deferred
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.store.subscription import Subscription
from holdfast.store.txn import ClientTxn, refuse_writes

# Durations of a stall, in units of the longest lease of the run.
STALL_FACTORS = (0.4, 1.1, 3.0)
# Delays before a resend: at once, or after the process or network has recovered.
RESEND_DELAYS_NS = (5 * MS, 400 * MS)
# Share of calls before which the actor yields, so that other actors run between its calls.
PRE_YIELD_MILLE = 350
# Share of transactions that wait for others to share their commit (group commit).
GROUP_COMMIT_MILLE = 300


class FaultingClient:
    """Store client of one incarnation."""

    def __init__(self, shared: SimStore, actor: str, incarnation: str, clock: ActorClock) -> None:
        self.url = URL
        self.actor = actor
        self.incarnation = incarnation
        self.clock = clock
        self._shared = shared
        self._scheduler = shared.scheduler
        self._client = clock.entropy(8)
        self._txn_no = 0
        self._store_no = shared.store_no
        # Whether commits of this incarnation may fail.
        self.faults_enabled = True
        # Transactions whose answers are lost more often.
        self.loss_prone: Sequence[Callable[..., Any]] = ()
        self._recorder = HistoryRecorder(shared.history, actor, incarnation, shared.engine_now_ns)

    @property
    def generation(self) -> int:
        return self._shared.engine.generation

    @property
    def acting_lease(self) -> Callable[[Any], Lease | None]:
        """Returns the lease under which a function acts, for the history."""
        return self._recorder.acting_lease

    @acting_lease.setter
    def acting_lease(self, lease_of: Callable[[Any], Lease | None]) -> None:
        self._recorder.acting_lease = lease_of

    def now_ns(self) -> int:
        return self._shared.engine.now_ns()

    def reopen(self) -> None:
        """Reopen the restored store in the same process, after StoreReplaced."""
        self._store_no = self._shared.store_no

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = RecordedCall(self._recorder, fn, args, kwargs)
        if self._scheduler.tape.chance(PRE_YIELD_MILLE):
            self._scheduler.yield_()
        for _ in range(TRANSACT_ATTEMPTS_MAX):
            try:
                txn, result = self._run_on_snapshot(fn, args, kwargs)
            except HoldfastError as error:
                call.record_failure(error)
                raise
            if not txn.needs_commit:
                return unwrap(result)
            call.result = result
            answer = self._send(call, txn)
            if answer.error is None:
                return unwrap(result)
            if answer.error[0] != Conflict.code:
                resolve_deferred(txn, answer)  # raises
        raise Conflict(tries=TRANSACT_ATTEMPTS_MAX, why="other commits always came first")

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._scheduler.yield_()
        txn, result = self._run_on_snapshot(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def peek(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read without yielding or advancing the clock. For observers."""
        txn, result = self._run_on_snapshot(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CommitFuture:
        future = CommitFuture()
        try:
            CompletionBatch().complete(future, self.transact(fn, *args, **kwargs))
        except Exception as error:
            CompletionBatch().complete(future, error=error)
        return future

    def submit_when(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> None:
        """Do nothing: requests are not parked in the simulator, callers poll."""
        return

    def batched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        self._check_not_replaced()
        topics = [topic] if isinstance(topic, str) else list(topic)
        return self._shared.wait(topics, since, int(timeout * S))

    def subscribe(self, topics: str | Sequence[str], since: int = 0) -> Subscription:
        names = [topics] if isinstance(topics, str) else list(topics)
        return cast(Subscription, LoopSubscription(self, names, since))

    def backup(self, path: str) -> None:
        raise NotImplementedError("the nemesis takes backups")

    def close(self) -> None: ...

    def __enter__(self) -> FaultingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_replaced(self) -> bool:
        """Whether a backup was restored since this client opened the store."""
        return self._store_no != self._shared.store_no

    def _check_not_replaced(self) -> None:
        if self.is_replaced:
            raise StoreReplaced(path=self.url)

    def _run_on_snapshot(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        self._check_not_replaced()
        snapshot = self._shared.disk.snapshot()
        try:
            txn = ClientTxn(
                snapshot, snapshot=snapshot.id, generation=self.generation, now=self.now_ns
            )
            return txn, fn(txn, *args, **kwargs)
        finally:
            snapshot.close()

    def _send(self, call: RecordedCall, txn: ClientTxn) -> CommitAnswer:
        """Send one request to the engine, with the fault that the plan picks for it."""
        shared = self._shared
        fault = (
            shared.plan.next_fault(loss_prone=call.fn in self.loss_prone)
            if self.faults_enabled
            else None
        )
        self._txn_no = call.txn_no = self._txn_no + 1
        request = build_request(txn, self._txn_no, self._client)
        if fault is Fault.STALL:
            self._recorder.add_fault(fault.value, shared.plan.boundary)
            share = self._scheduler.tape.pick(STALL_FACTORS)
            self._scheduler.sleep(int(share * shared.lease_ns))
        else:
            self._scheduler.yield_()
        try:
            self._check_not_replaced()
            return self._deliver(call, txn, request, fault)
        except CommitUnknown:
            raise
        except HoldfastError as error:
            call.record_failure(error)
            raise

    def _deliver(
        self, call: RecordedCall, txn: ClientTxn, request: CommitRequest, fault: Fault | None
    ) -> CommitAnswer:
        shared = self._shared
        if fault is not None and fault is not Fault.STALL:
            self._recorder.add_fault(fault.value, shared.plan.boundary)
        if fault is Fault.CRASH_BEFORE:
            call.record_unknown()
            self._crash()
        if fault is Fault.UNKNOWN_BEFORE:
            call.record_unknown()
            raise CommitUnknown(txn_no=request.no)
        if fault is Fault.CONFLICT:
            injected = Conflict(why="injected")
            call.record_failure(injected)
            return CommitAnswer(request.no, to_wire(injected))
        if fault is Fault.LOST_BEFORE:
            self._lose_connection(request)
        transaction = SentTransaction(request, call, txn)
        wait_for_group = shared.group and self._scheduler.tape.chance(GROUP_COMMIT_MILLE)
        answer = shared.commit(transaction, wait_for_group=wait_for_group, full=fault is Fault.FULL)
        if answer.error is not None:
            return answer
        if fault is Fault.CRASH_AFTER:
            self._crash()
        if fault is Fault.UNKNOWN_AFTER:
            raise CommitUnknown(txn_no=request.no)
        if fault is Fault.LOST_AFTER:
            self._lose_connection(request)
            resent = SentTransaction(request, call, txn, first_send=transaction)
            answer = shared.commit(resent, wait_for_group=False)
            if answer.error is not None:
                return answer
        for event in transaction.events:
            event.result = "ok"
        return answer

    def _lose_connection(self, request: CommitRequest) -> None:
        """Drop the connection, at times because the writer died. Resend after a delay."""
        request.resent = True
        if self._scheduler.tape.chance(500):
            self._shared.takeover()
        self._scheduler.sleep(self._scheduler.tape.pick(RESEND_DELAYS_NS))
        self._check_not_replaced()

    def _crash(self) -> None:
        task = self._scheduler.current
        assert task is not None
        task.killed = True
        raise ProcessKilled
