"""A store whose engine runs in this process: `memory:`, and LMDB without a writer process.

One thread at a time runs a transaction, so threads never conflict. The simulator and the tests
use it; programs that share a directory use `LmdbStore`, which has a process for the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast.clock import Clock, S
from holdfast.config import TRANSACT_TRIES_MAX
from holdfast.errors import Conflict, Invalid, StoreClosed, Withdrawn
from holdfast.store.api import settled
from holdfast.store.engine import STANDS, Answer, Backend, Engine, Request
from holdfast.store.future import Submitted, complete
from holdfast.store.txn import ClientTxn, check_topic
from holdfast.store.wire import fill, request_of, standing


class LocalStore:
    def __init__(self, url: str, backend: Backend, clock: Clock, **engine: Any) -> None:
        self.url = url
        self.clock = clock
        self.backend = backend
        self.engine = Engine(backend, clock, **engine)
        self._lock = threading.RLock()
        self._rung = threading.Condition(self._lock)
        self._closed = False
        self._no = 0
        self._client = clock.entropy(8)
        self._standing: dict[int, LocalStanding] = {}

    @property
    def generation(self) -> int:
        return self.engine.generation

    def now_ns(self) -> int:
        return self.engine.now_ns()

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            for _ in range(TRANSACT_TRIES_MAX):
                txn, result = self._run(fn, args, kwargs)
                if not txn.writing:
                    return settled(result)
                self._no += 1
                answer = self._commit(request_of(txn, self._no, self._client))
                # Only a commit that fn itself made meanwhile can conflict here.
                if answer.error is None or answer.error[0] != Conflict.code:
                    fill(txn, answer)
                    return settled(result)
            raise Conflict(
                tries=TRANSACT_TRIES_MAX, why="the function itself commits what it reads"
            )

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            txn, result = self._run(fn, args, kwargs)
            refuse_writes(txn)
            return result

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Submitted:
        future = Submitted()
        try:
            complete(future, self.transact(fn, *args, **kwargs))
        except Exception as error:
            complete(future, error=error)
        return future

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stand(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> LocalStanding:
        with self._lock:
            txn, result = self._run(fn, args, {})
            self._no += 1
            request = standing(request_of(txn, self._no, self._client), topics)
            stands = self._standing[self._no] = LocalStanding(self, txn, result, self._no)
            self._commit(request)
            return stands

    def withdraw(self, no: int) -> Answer:
        with self._lock:
            self._standing.pop(no, None)
            return self._commit(Request(no, self._client, 0, resent=True, withdrawn=True))

    def wait(
        self,
        topic: str | Sequence[str],
        since: int,
        timeout: float,
        standing: LocalStanding | None = None,
    ) -> int:
        topics = topics_of(topic)
        deadline_ns = self.clock.mono_ns() + int(timeout * S)
        with self._rung:
            while True:
                known, forgotten = self.engine.topics, self.engine.topics_forgotten
                last = max(known.get(one, forgotten) for one in topics)
                if last > since:
                    return last
                if standing is not None and standing.answered:
                    return since
                left_ns = deadline_ns - self.clock.mono_ns()
                if left_ns <= 0 or self._closed:
                    return since
                self._rung.wait(left_ns / S)

    def backup(self, path: str) -> None:
        raise Invalid(what="backup", why="this store lives in memory", url=self.url)

    def close(self) -> None:
        with self._rung:
            self._closed = True
            self._rung.notify_all()

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _commit(self, request: Request) -> Answer:
        [answer] = self.engine.commit([request])
        late = self.engine.late
        if answer is not STANDS and request.when:
            self._standing.pop(request.no).answer = answer
        for stood, its in self.engine.stood:
            self._standing.pop(stood.no).answer = its
        for one in late:
            self._commit(one)
        self._rung.notify_all()
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


class LocalStanding:
    def __init__(self, store: LocalStore, txn: ClientTxn, result: Any, no: int) -> None:
        self._store = store
        self._txn = txn
        self._result = result
        self._no = no
        self.answer: Answer | None = None

    @property
    def answered(self) -> bool:
        return self.answer is not None

    def wait(self, topics: Sequence[str], since: int, timeout: float) -> int:
        return self._store.wait(topics, since, timeout, self)

    def result(self) -> Any:
        assert self.answer is not None, "not answered yet"
        fill(self._txn, self.answer)
        return settled(self._result)

    def withdraw(self) -> bool:
        if self.answer is None:
            self.answer = self._store.withdraw(self._no)
        return self.answer.error is not None and self.answer.error[0] == Withdrawn.code


def topics_of(topic: object) -> tuple[str, ...]:
    """The topics that a wait is for, checked."""
    topics = (topic,) if isinstance(topic, str) else topic
    if not isinstance(topics, list | tuple):
        raise Invalid(what="topic", why="text, or several", found=repr(topic)[:64])
    for one in topics:
        check_topic(one)
    return tuple(topics)


def refuse_writes(txn: ClientTxn) -> None:
    if txn.writing:
        raise Invalid(what="read", why="a read does not write; use transact")
