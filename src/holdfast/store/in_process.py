"""The in-process store: the commit engine runs in the caller's process (`memory:`, or LMDB without a writer).

One thread at a time runs a transaction, so threads never conflict. The simulator and the tests use
this store. Programs that share a directory use `LmdbStore`, whose engine has its own process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast.clock import Clock
from holdfast.config import TRANSACT_ATTEMPTS_MAX
from holdfast.errors import Conflict, Invalid, RequestCancelled, StoreClosed
from holdfast.store.api import unwrap
from holdfast.store.engine import StoreBackend, StoreEngine
from holdfast.store.futures import CommitFuture, complete_one
from holdfast.store.lmdb.protocol import as_parked, build_request, resolve_deferred
from holdfast.store.requests import PARKED, CommitAnswer, CommitRequest
from holdfast.store.subscription import (
    Sleepers,
    Subscription,
    release_once,
    sleep_on_gate,
    wait_once,
)
from holdfast.store.txn import ClientTxn, checked_topics, refuse_writes


class InProcessStore:
    def __init__(self, url: str, backend: StoreBackend, clock: Clock, **engine: Any) -> None:
        self.url = url
        self.clock = clock
        self.backend = backend
        self.engine = StoreEngine(backend, clock, **engine)
        self._lock = threading.RLock()
        self.sleepers = Sleepers()
        self._closed = False
        self._no = 0
        self._client = clock.entropy(8)
        self._parked: dict[int, InProcessParkedTransaction] = {}

    @property
    def generation(self) -> int:
        return self.engine.generation

    def now_ns(self) -> int:
        return self.engine.now_ns()

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            for _ in range(TRANSACT_ATTEMPTS_MAX):
                txn, result = self._run(fn, args, kwargs)
                if not txn.needs_commit:
                    return unwrap(result)
                self._no += 1
                answer = self._commit(build_request(txn, self._no, self._client))
                # Only a commit made by fn itself can conflict here.
                if answer.error is None or answer.error[0] != Conflict.code:
                    resolve_deferred(txn, answer)
                    return unwrap(result)
            raise Conflict(
                tries=TRANSACT_ATTEMPTS_MAX,
                why="the function commits to rows that it has read, by a second transaction",
            )

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            txn, result = self._run(fn, args, kwargs)
            refuse_writes(txn)
            return result

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CommitFuture:
        future = CommitFuture()
        try:
            complete_one(future, self.transact(fn, *args, **kwargs))
        except Exception as error:
            complete_one(future, error=error)
        return future

    def batched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit_when(
        self, topics: Sequence[str], fn: Callable[..., Any], *args: Any
    ) -> InProcessParkedTransaction:
        with self._lock:
            txn, result = self._run(fn, args, {})
            self._no += 1
            request = as_parked(build_request(txn, self._no, self._client), topics)
            parked = self._parked[self._no] = InProcessParkedTransaction(
                self, txn, result, self._no
            )
            self._commit(request)
            return parked

    def cancel_parked(self, no: int) -> CommitAnswer:
        with self._lock:
            self._parked.pop(no, None)
            return self._commit(
                CommitRequest(no, self._client, 0, resent=True, cancels_parked=True)
            )

    def wait(
        self,
        topic: str | Sequence[str],
        since: int,
        timeout: float,
        parked: InProcessParkedTransaction | None = None,
    ) -> int:
        try:
            return wait_once(self, checked_topics(topic), since, timeout, parked)
        except StoreClosed:
            return since

    def subscribe(self, topics: str | Sequence[str], since: int = 0) -> Subscription:
        return Subscription(self, checked_topics(topics), since)

    def backup(self, path: str) -> None:
        raise Invalid(what="backup", why="this store is in memory", url=self.url)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.sleepers.wake_all()

    def __enter__(self) -> InProcessStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the source of subscriptions -------------------------------------------------------------

    def mono_ns(self) -> int:
        return self.clock.mono_ns()

    def check(self) -> None:
        if self._closed:
            raise StoreClosed(url=self.url)

    def last_notified(self, topics: tuple[str, ...]) -> int | None:
        with self._lock:
            known, forgotten = self.engine.topics, self.engine.topics_unknown_until
            return max([known.get(name, forgotten) for name in topics], default=0)

    def is_new(self, last: int, since: int) -> bool:
        return last > since

    def sleep(self, subscription: Subscription, last: int | None, timeout_s: float) -> None:
        sleep_on_gate(self, subscription, last, timeout_s)

    def interrupt(self, subscription: Subscription) -> bool:
        """Return False: every thread sleeps on the gate of its subscription."""
        return False

    def start_delivery(self) -> None:
        """Do nothing: the committing thread wakes the sleepers."""

    def release(self, subscription: Subscription) -> None:
        """Do nothing: a subscription is registered only while it sleeps."""

    def _commit(self, request: CommitRequest) -> CommitAnswer:
        [answer] = self.engine.commit([request])
        overdue = self.engine.overdue
        if answer is not PARKED and request.park_topics:
            self._parked.pop(request.no).finish(answer)
        for unparked, unparked_answer in self.engine.unparked:
            self._parked.pop(unparked.no).finish(unparked_answer)
        self.sleepers.wake(self.engine.notified_topics)
        for overdue_request in overdue:
            self._commit(overdue_request)
        return answer

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        if self._closed:
            raise StoreClosed(url=self.url)
        snapshot = self.backend.snapshot()
        try:
            txn = ClientTxn(
                snapshot, snapshot=snapshot.id, generation=self.generation, now=self.now_ns
            )
            return txn, fn(txn, *args, **kwargs)
        finally:
            snapshot.close()


class InProcessParkedTransaction:
    def __init__(self, store: InProcessStore, txn: ClientTxn, result: Any, no: int) -> None:
        self._store = store
        self._txn = txn
        self._result = result
        self._no = no
        self.answer: CommitAnswer | None = None
        self.gate = threading.Lock()
        self.gate.acquire()

    def finish(self, answer: CommitAnswer) -> None:
        self.answer = answer
        release_once(self.gate)

    @property
    def is_answered(self) -> bool:
        return self.answer is not None

    def wait(self, topics: Sequence[str], since: int, timeout: float) -> int:
        return self._store.wait(topics, since, timeout, self)

    def result(self) -> Any:
        assert self.answer is not None, "not answered yet"
        resolve_deferred(self._txn, self.answer)
        return unwrap(self._result)

    def cancel(self) -> bool:
        if self.answer is None:
            self.answer = self._store.cancel_parked(self._no)
        return self.answer.error is not None and self.answer.error[0] == RequestCancelled.code
