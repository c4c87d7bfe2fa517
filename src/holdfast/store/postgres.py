"""The shared store: rows in PostgreSQL, for many machines.

A transaction runs at its caller, on what this process knows (`pg.view`) or on a snapshot of its own; what
it read and wrote goes to the committer of its process, a thread that commits for all callers of the process
at once, one commit at a time in the whole store (`pg.engine`). Operations run there, in this process.

Whatever the server does, a call ends: it is tried again while the server is away, for a while.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import psycopg

from holdfast.clock import MS, SYSTEM, Clock
from holdfast.config import (
    COMMIT_ROWS_MAX,
    COMMIT_TXNS_MAX,
    TRANSACT_TRIES_FREE,
    TRANSACT_TRIES_MAX,
)
from holdfast.errors import Conflict, HoldfastError, Invalid, StoreClosed, StoreForked, to_wire
from holdfast.store.api import settled
from holdfast.store.engine import Answer, Request
from holdfast.store.future import Aside, Completions, Submitted, complete
from holdfast.store.local import refuse_writes, topics_of
from holdfast.store.pg import server
from holdfast.store.pg.engine import PgEngine
from holdfast.store.pg.readers import READER_S, Asking, Readers, Snapshot
from holdfast.store.pg.server import READER_IDLE_S, Unreachable
from holdfast.store.pg.topics import Topics
from holdfast.store.pg.view import TooMuch, View
from holdfast.store.pg.wire import Counters
from holdfast.store.txn import ClientTxn
from holdfast.store.urls import shown
from holdfast.store.wire import fill, request_of

# After so many conflicts a transaction runs on a snapshot.
TRIES_ON_VIEW = 2
# What one commit takes at most, so that a server or a network of any size stands it.
COMMIT_BYTES_MAX = 32 * 1024 * 1024
PAUSE_S = 0.1
# A glance shows nothing older than this.
GLANCE_NS = 100 * MS

Finish = Callable[[Answer, Completions], None]

_SIZE = """
    SELECT (SELECT coalesce(max(no), 0) FROM holdfast_commit),
           pg_total_relation_size('holdfast_row') + pg_total_relation_size('holdfast_commit')
"""


class PostgresStore:
    # See `api.reads_block`.
    reads_block = True

    def __init__(self, url: str, *, bootstrap: bool = True, clock: Clock = SYSTEM) -> None:
        self.url = shown(url)
        # For processes that this one starts; never shown.
        self.address = url
        self._conninfo = server.parse(url)
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._engine = PgEngine(self._conninfo, clock, bootstrap=bootstrap, ring=self._ring)
        engine = self._engine
        self._topics = Topics(
            self._conninfo, engine.channel, engine.last, engine.client, engine.away.haste
        )
        self._readers = Readers(server.parse(url, idle_s=READER_IDLE_S), self._engine.away)
        self._asking = Asking(self._readers, self._engine.refresh)
        self._aside = Aside()
        self._client = clock.entropy(8)
        self._no = 0
        self._contended = threading.RLock()
        self._work: deque[tuple[Request, int, Finish]] = deque()
        self._came = threading.Condition()
        # When we were last told of others' commits.
        self._told_ns = clock.mono_ns() - GLANCE_NS
        # What the committer has to ring after its answers.
        self._rings: deque[tuple[int, Sequence[str]]] = deque()
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
        return self._engine.counters.retries

    @property
    def counters(self) -> Counters:
        """What the commits of this process took: round trips, statements, retries."""
        return self._engine.counters

    @property
    def away_since_ns(self) -> int:
        """Since when the server does not answer, by the clock on the wall; 0 while it does."""
        return self._engine.away.since_ns

    def now_ns(self) -> int:
        return self._engine.now_ns()

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for tries in range(TRANSACT_TRIES_FREE):
            done, result = self._try(fn, args, kwargs, tries)
            if done:
                return result
        # Threads that keep losing to each other take turns: one of them wins each round.
        with self._contended:
            for tries in range(TRANSACT_TRIES_FREE, TRANSACT_TRIES_MAX):
                done, result = self._try(fn, args, kwargs, tries)
                if done:
                    return result
        raise Conflict(tries=TRANSACT_TRIES_MAX, why="others always committed first")

    def _try(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tries: int
    ) -> tuple[bool, Any]:
        """Whether it came through, and what it returned."""
        history = self._engine.history
        txn, result = self._run(fn, args, kwargs, tries)
        if txn.writing:
            gate = threading.Lock()
            gate.acquire()
            answers: list[Answer] = []

            def finish(
                answer: Answer,
                _: Completions,
                answers: list[Answer] = answers,
                gate: threading.Lock = gate,
            ) -> None:
                answers.append(answer)
                gate.release()

            self._post(request_of(txn, self._next_no(), self._client), history, finish)
            gate.acquire()
            if answers[0].error is not None and answers[0].error[0] == Conflict.code:
                return False, None
            fill(txn, answers[0])
        return True, settled(result)

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        txn, result = self._run_reading(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def glance(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `api.glance`: what is known here, if all that has rung here is known."""
        self._check()
        known, topics = self._engine.known, self._topics
        told = self._clock.mono_ns() - self._told_ns < GLANCE_NS
        if told and topics.hearing and known.commit_no >= topics.heard:
            with suppress(_NoView):
                ran = self._on_view(fn, args, kwargs)
                whole = not ran.view.asked and known.settled
                if ran.error is None and whole and self._holds(ran):
                    refuse_writes(ran.txn)
                    return ran.result
        return self.read(fn, *args, **kwargs)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Submitted:
        future = Submitted(self._nudge)
        self._submit(future, fn, args, kwargs, 0)
        return future

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stand(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> None:
        """Commits are made in every process: there is no one place to stand at."""
        return

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        self._check()
        return self._topics.wait(topics_of(topic), since, timeout, self._clock.mono_ns)

    def backup(self, path: str) -> None:
        raise Invalid(what="backup", why="back the database up with pg_basebackup or pg_dump")

    def size(self) -> tuple[int, int]:
        """The number of the last commit, and the bytes of all rows on the server, indexes included."""
        self._check()
        with server.typed(self._conninfo), server.connect(self._conninfo) as connection:
            [(last, size)] = connection.execute(_SIZE).fetchall()
        return int(last), int(size)

    def stop_within(self, seconds: float) -> None:
        """Say that this process stops: after so long a server that is away, or silent, is not waited for."""
        self._engine.away.haste.stop_within(seconds)

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        with self._came:
            self._closed = True
            self._came.notify_all()
        self._engine.leaving = True
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

    def _nudge(self) -> None:
        """A forked child has nothing to wait for: no answer reaches it."""
        if os.getpid() != self._pid:
            self._check()

    def _ring(self, commit_no: int, topics: Sequence[str]) -> None:
        if threading.current_thread() is self._committer:
            # Those whose commit it is go first: often it is they who do what the others are woken for.
            self._rings.append((commit_no, topics))
        else:
            self._topics.ring(commit_no, topics)

    def _next_no(self) -> int:
        with self._came:
            self._no += 1
            return self._no

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tries: int
    ) -> tuple[ClientTxn, Any]:
        """Run a transaction on what is known here; if that may have misled it, on a snapshot."""
        self._check()
        if tries < TRIES_ON_VIEW:
            with suppress(_NoView):
                ran = self._on_view(fn, args, kwargs)
                if not ran.view.read or (ran.error is None and ran.txn.writing):
                    return ran.ended()
                self._refresh()
                if self._holds(ran):
                    return ran.ended()
        return self._on_snapshot(fn, args, kwargs)

    def _run_reading(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        """Run on all that was committed before, as it is known here; if that does not hold, on a snapshot."""
        self._check()
        with suppress(_NoView):
            for _ in range(TRIES_ON_VIEW):
                self._refresh()
                ran = self._on_view(fn, args, kwargs)
                if ran.view.asked or not self._engine.known.settled:
                    # It may have seen more than is known of.
                    self._refresh()
                if self._holds(ran):
                    return ran.ended()
        return self._on_snapshot(fn, args, kwargs)

    def _on_view(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Ran:
        history = self._engine.history
        view = View(self._engine.known, self._asking)
        txn = self._txn(view)
        txn.snapshot = view.id
        try:
            return _Ran(txn, fn(txn, *args, **kwargs), None, view, history)
        except (psycopg.Error, Unreachable, TooMuch):
            raise _NoView from None
        except Exception as error:
            return _Ran(txn, None, error, view, history)

    def _holds(self, ran: _Ran) -> bool:
        known = self._engine.known
        return ran.history == self._engine.history and known.holds(
            ran.view.id, ran.txn.reads, ran.txn.ranges
        )

    def _refresh(self) -> None:
        asked_ns = self._clock.mono_ns()
        try:
            self._asking.refresh()
            self._told_ns = asked_ns
        except (psycopg.Error, Unreachable):
            raise _NoView from None

    def _on_snapshot(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        """Run on a snapshot, and again while the server is away."""
        began_ns = self._clock.mono_ns()
        while True:
            self._check()
            history = self._engine.history
            snapshot = Snapshot(self._readers)
            txn = self._txn(snapshot)
            try:
                result = fn(txn, *args, **kwargs)
                self._check()  # it may have forked
                txn.snapshot = snapshot.id
                if history == self._engine.history:
                    self._engine.known.teach(snapshot.id, snapshot.seen)
                return txn, result
            except psycopg.Error as raised:
                error = server.translated(raised, self._conninfo)
                if not isinstance(error, Unreachable):
                    raise error from raised
            except Unreachable as raised:
                error = raised
            finally:
                snapshot.close()
            if self._engine.away.over(began_ns, READER_S):
                raise self._engine.away.told(error)
            self._clock.sleep(PAUSE_S)

    def _txn(self, base: View | Snapshot) -> ClientTxn:
        return ClientTxn(base, snapshot=0, generation=self.generation, now=self.now_ns)

    def _post(self, request: Request, history: int, finish: Finish) -> None:
        with self._came:
            if self._closed:
                raise StoreClosed(url=self.url)
            self._work.append((request, history, finish))
            if len(self._work) == 1:
                self._came.notify()

    def _commit_all(self) -> None:
        """Commit what has come, until closed and nothing is left."""
        while True:
            with self._came:
                while not self._work and not self._closed:
                    self._came.wait()
                if not self._work:
                    return
                batch = self._take()
            requests = [request for request, _, _ in batch]
            try:
                answers = self._engine.commit(requests, [history for _, history, _ in batch])
            except HoldfastError as error:
                answers = [Answer(request.no, to_wire(error)) for request in requests]
            except Exception as error:
                broken = Invalid(what="commit", why=f"{type(error).__name__}: {error}")
                answers = [Answer(request.no, to_wire(broken)) for request in requests]
            done = Completions()
            for (_, _, finish), answer in zip(batch, answers, strict=True):
                finish(answer, done)
            done.wake()
            while self._rings:
                self._topics.ring(*self._rings.popleft())

    def _take(self) -> list[tuple[Request, int, Finish]]:
        """The next batch: one request at least."""
        batch: list[tuple[Request, int, Finish]] = []
        rows = size = 0
        while self._work and len(batch) < COMMIT_TXNS_MAX:
            puts = self._work[0][0].puts
            rows += len(puts)
            size += sum(map(len, puts.values()))
            if batch and (rows > COMMIT_ROWS_MAX or size > COMMIT_BYTES_MAX):
                break
            batch.append(self._work.popleft())
        return batch

    def _submit(
        self,
        future: Submitted,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        try:
            history = self._engine.history
            txn, result = self._run(fn, args, kwargs, tries)
            if not txn.writing:
                complete(future, settled(result))
                return
            request = request_of(txn, self._next_no(), self._client)
        except Exception as error:
            complete(future, error=error)
            return

        def finish(answer: Answer, done: Completions) -> None:
            """Runs in the committer: nothing here may wait, and no user's code runs."""
            lost = answer.error is not None and answer.error[0] == Conflict.code
            if lost and tries + 1 < TRANSACT_TRIES_MAX:
                self._aside.run(lambda: self._submit(future, fn, args, kwargs, tries + 1))
                return
            try:
                fill(txn, answer)
            except Exception as error:
                done.complete(future, error=error)
            else:
                done.complete(future, settled(result))

        try:
            self._post(request, history, finish)
        except HoldfastError as error:
            complete(future, error=error)


class _NoView(Exception):
    """What is known here does not do."""


class _Ran(NamedTuple):
    """A function that was run on a view, and how it ended."""

    txn: ClientTxn
    result: Any
    error: Exception | None
    view: View
    history: int

    def ended(self) -> tuple[ClientTxn, Any]:
        if self.error is not None:
            raise self.error
        return self.txn, self.result
