"""The shared store: rows in PostgreSQL, for many machines.

A client runs a transaction on a snapshot of its own; what it read and wrote goes to the committer of its
process, a thread that commits for all callers of the process at once, one commit at a time in the whole
store (`pg.engine`). Operations run there, in this process, under the lock of the commit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout

from holdfast.clock import SYSTEM, Clock
from holdfast.config import COMMIT_TXNS_MAX, TRANSACT_TRIES_MAX
from holdfast.errors import Conflict, HoldfastError, Invalid, StoreClosed, StoreForked, to_wire
from holdfast.store.api import settled
from holdfast.store.engine import Answer, Request
from holdfast.store.future import Aside, Completions, Submitted, complete
from holdfast.store.local import refuse_writes, topics_of
from holdfast.store.pg import server
from holdfast.store.pg.engine import PgEngine
from holdfast.store.pg.rows import Snapshot
from holdfast.store.pg.server import Unreachable
from holdfast.store.pg.topics import Topics
from holdfast.store.txn import ClientTxn
from holdfast.store.wire import fill, request_of

READERS_MAX = 8
READER_S = 30.0

Finish = Callable[[Answer], None]


class PostgresStore:
    def __init__(self, url: str, *, bootstrap: bool = True, clock: Clock = SYSTEM) -> None:
        self.url = server.without_password(url)
        self._conninfo = server.parse(url)
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._engine = PgEngine(self._conninfo, clock, bootstrap=bootstrap, ring=self._ring)
        self._topics = Topics(self._conninfo, self._engine.channel, self._engine.last)
        self._readers: ConnectionPool[Any] = ConnectionPool(
            self._conninfo,
            min_size=0,
            max_size=READERS_MAX,
            kwargs={"autocommit": True},
            open=True,
            timeout=READER_S,
            name="holdfast-readers",
        )
        self._aside = Aside()
        self._client = clock.entropy(8)
        self._no = 0
        self._work: list[tuple[Request, Finish]] = []
        self._came = threading.Condition()
        self._committer = threading.Thread(
            target=self._commit_all, name="holdfast-commit", daemon=True
        )
        self._committer.start()

    @property
    def generation(self) -> int:
        return self._engine.generation

    @property
    def retries(self) -> int:
        """How often a commit was tried again because the server was away."""
        return self._engine.retries

    def now_ns(self) -> int:
        return self._engine.now_ns()

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _ in range(TRANSACT_TRIES_MAX):
            txn, result = self._run(fn, args, kwargs)
            if not txn.writing:
                return settled(result)
            gate = threading.Lock()
            gate.acquire()
            answers: list[Answer] = []

            def finish(
                answer: Answer, answers: list[Answer] = answers, gate: threading.Lock = gate
            ) -> None:
                answers.append(answer)
                gate.release()

            self._post(request_of(txn, self._next_no(), self._client), finish)
            gate.acquire()
            if answers[0].error is None or answers[0].error[0] != Conflict.code:
                fill(txn, answers[0])
                return settled(result)
        raise Conflict(tries=TRANSACT_TRIES_MAX, why="others always committed first")

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        txn, result = self._run(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Submitted:
        future = Submitted()
        self._submit(future, fn, args, kwargs, TRANSACT_TRIES_MAX)
        return future

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        self._check()
        return self._topics.wait(topics_of(topic), since, timeout, self._clock.mono_ns)

    def backup(self, path: str) -> None:
        raise Invalid(what="backup", why="back the database up with pg_basebackup or pg_dump")

    def close(self) -> None:
        if self._closed:
            return
        with self._came:
            self._closed = True
            self._came.notify_all()
        if os.getpid() != self._pid:
            return
        self._committer.join()
        self._topics.close()
        self._readers.close()
        self._engine.close()

    def __enter__(self) -> PostgresStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise StoreForked(url=self.url)
        if self._closed:
            raise StoreClosed(url=self.url)

    def _ring(self, commit_no: int, topics: Sequence[str]) -> None:
        self._topics.ring(commit_no, topics)

    def _next_no(self) -> int:
        with self._came:
            self._no += 1
            return self._no

    def _borrow(self) -> AbstractContextManager[Any]:
        try:
            return self._readers.connection()
        except PoolTimeout as error:
            raise Unreachable(url=self.url, why=str(error)) from None

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        self._check()
        snapshot = Snapshot(self._borrow)
        try:
            txn = ClientTxn(snapshot, snapshot=0, generation=self.generation, now=self.now_ns)
            result = fn(txn, *args, **kwargs)
            txn.snapshot = snapshot.id
            return txn, result
        except psycopg.Error as error:
            raise server.translated(error, self._conninfo) from error
        except PoolTimeout as error:
            raise Unreachable(url=self.url, why=str(error)) from None
        finally:
            snapshot.close()

    def _post(self, request: Request, finish: Finish) -> None:
        with self._came:
            if self._closed:
                raise StoreClosed(url=self.url)
            self._work.append((request, finish))
            self._came.notify()

    def _commit_all(self) -> None:
        """Commit what has come, until closed and nothing is left."""
        while True:
            with self._came:
                while not self._work and not self._closed:
                    self._came.wait()
                batch, self._work = self._work[:COMMIT_TXNS_MAX], self._work[COMMIT_TXNS_MAX:]
                if not batch:
                    return
            requests = [request for request, _ in batch]
            try:
                answers = self._engine.commit(requests)
            except HoldfastError as error:
                answers = [Answer(request.no, to_wire(error)) for request in requests]
            except Exception as error:
                broken = Invalid(what="commit", why=f"{type(error).__name__}: {error}")
                answers = [Answer(request.no, to_wire(broken)) for request in requests]
            for (_, finish), answer in zip(batch, answers, strict=True):
                finish(answer)

    def _submit(
        self,
        future: Submitted,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        try:
            txn, result = self._run(fn, args, kwargs)
            if not txn.writing:
                complete(future, settled(result))
                return
            request = request_of(txn, self._next_no(), self._client)
        except Exception as error:
            complete(future, error=error)
            return

        def finish(answer: Answer) -> None:
            """Runs in the committer: nothing here may wait, and no user's code runs."""
            if answer.error is not None and answer.error[0] == Conflict.code and tries > 1:
                self._aside.run(lambda: self._submit(future, fn, args, kwargs, tries - 1))
                return
            done = Completions()
            try:
                fill(txn, answer)
            except Exception as error:
                done.complete(future, error=error)
            else:
                done.complete(future, settled(result))
            done.wake()

        try:
            self._post(request, finish)
        except HoldfastError as error:
            complete(future, error=error)
