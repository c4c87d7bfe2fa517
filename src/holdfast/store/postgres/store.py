"""The shared store: rows in PostgreSQL, for many machines.

A transaction runs in the caller's thread, on the local cache (`cached_snapshot`) or on a server snapshot. Its read
set and writes go to the committer, a thread that commits for all callers of the process (group commit, `engine`).
The whole store makes one commit at a time. Operations run in the committer.

Every call is bounded in time: while the server is unreachable it is retried until a deadline.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import psycopg
from psycopg.types.numeric import Int8

from holdfast import failpoints
from holdfast.clock import MS, SYSTEM, Clock
from holdfast.config import (
    COMMIT_ROWS_MAX,
    COMMIT_TXNS_MAX,
    TRANSACT_ATTEMPTS_MAX,
    TRANSACT_CONCURRENT_ATTEMPTS,
)
from holdfast.errors import Conflict, HoldfastError, Invalid, StoreClosed, StoreForked, to_wire
from holdfast.store.api import unwrap
from holdfast.store.futures import CallbackThread, CommitFuture, CompletionBatch, complete_one
from holdfast.store.latency_histogram import LatencyHistogram
from holdfast.store.lmdb.protocol import build_request, resolve_deferred
from holdfast.store.postgres import server
from holdfast.store.postgres.cached_snapshot import CachedSnapshot, ScanTooLarge
from holdfast.store.postgres.engine import PgEngine
from holdfast.store.postgres.notifications import NotificationListener
from holdfast.store.postgres.read_pool import (
    BORROW_WAIT_S,
    CoalescedReads,
    ReadPool,
    ServerSnapshot,
)
from holdfast.store.postgres.rows import GET_MANY, ROW_SIZES
from holdfast.store.postgres.server import READER_IDLE_S, PostgresUnreachable
from holdfast.store.postgres.statements import ByteaArray, CommitCounters
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.store.subscription import Subscription, wait_once
from holdfast.store.txn import ClientTxn, checked_topics, refuse_writes
from holdfast.store.urls import redact

# After this many tries on the cache a transaction runs on a server snapshot.
CACHED_TRIES_MAX = 2
# The size bound of one commit, small enough for any server and network.
COMMIT_BYTES_MAX = 32 * 1024 * 1024
RETRY_PAUSE_S = 0.1
# The staleness bound of `read_stale`.
STALENESS_MAX_NS = 100 * MS

OnAnswer = Callable[[CommitAnswer, CompletionBatch], None]

_SELECT_SIZE = """
    SELECT (SELECT coalesce(max(no), 0) FROM holdfast_commit),
           pg_total_relation_size('holdfast_row') + pg_total_relation_size('holdfast_commit')
"""


_SELECT_USAGE = """
    SELECT pg_table_size('holdfast_row'), pg_indexes_size('holdfast_row'), pg_total_relation_size('holdfast_commit'),
           coalesce(n_live_tup, 0), coalesce(n_dead_tup, 0)
    FROM (SELECT 1) AS one LEFT JOIN pg_stat_user_tables ON relid = 'holdfast_row'::regclass
"""


class PostgresStore:
    # See `api.reads_block`.
    reads_block = True

    def __init__(self, url: str, *, bootstrap: bool = True, clock: Clock = SYSTEM) -> None:
        self.url = redact(url)
        # The URL with its password, for child processes. Never displayed.
        self.address = url
        self._conninfo = server.build_conninfo(url)
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._engine = PgEngine(
            self._conninfo, clock, bootstrap=bootstrap, notify=self._notify_topics
        )
        engine = self._engine
        self._notifications = NotificationListener(
            self._conninfo,
            engine.channel,
            engine.last_commit_no,
            engine.client,
            check_open=self._check_open,
            mono_ns=clock.mono_ns,
            shutdown_deadline=engine.outage.shutdown_deadline,
        )
        self._read_pool = ReadPool(
            server.build_conninfo(url, idle_s=READER_IDLE_S), self._engine.outage
        )
        self._coalesced_reads = CoalescedReads(self._read_pool, self._engine.refresh)
        self._callback_thread = CallbackThread()
        self._client = clock.entropy(8)
        self._no = 0
        self._contention_lock = threading.RLock()
        self._queue: deque[tuple[CommitRequest, int, OnAnswer]] = deque()
        self._queue_changed = threading.Condition()
        # The durations of this process's commits. A commit has the transactions of several threads.
        self.commit_latencies = LatencyHistogram()
        # The time of the last refresh of remote commits.
        self._refreshed_ns = clock.mono_ns() - STALENESS_MAX_NS
        # Notifications that the committer delivers after its answers.
        self._pending_notifications: deque[tuple[int, Sequence[str]]] = deque()
        self._committer = threading.Thread(
            target=self._run_committer, name="holdfast-commit", daemon=True
        )
        self._committer.start()

    @property
    def generation(self) -> int:
        return self._engine.generation

    @property
    def retries(self) -> int:
        """The number of commits retried because the server was unreachable."""
        return self._engine.counters.retries

    @property
    def counters(self) -> CommitCounters:
        """The cost of this process's commits: round trips, statements, retries."""
        return self._engine.counters

    @property
    def away_since_ns(self) -> int:
        """The start of the current outage by the wall clock; 0 while the server answers."""
        return self._engine.outage.since_ns

    def now_ns(self) -> int:
        return self._engine.now_ns()

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for tries in range(TRANSACT_CONCURRENT_ATTEMPTS):
            done, result = self._try(fn, args, kwargs, tries)
            if done:
                return result
        # Conflicting threads of this process take turns, so one of them commits each round.
        with self._contention_lock:
            for tries in range(TRANSACT_CONCURRENT_ATTEMPTS, TRANSACT_ATTEMPTS_MAX):
                done, result = self._try(fn, args, kwargs, tries)
                if done:
                    return result
        raise Conflict(tries=TRANSACT_ATTEMPTS_MAX, why="other commits always came first")

    def _try(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tries: int
    ) -> tuple[bool, Any]:
        """Run and commit once. Return whether it committed, and its result."""
        history = self._engine.history_no
        txn, result = self._run(fn, args, kwargs, tries)
        if txn.needs_commit:
            gate = threading.Lock()
            gate.acquire()
            answers: list[CommitAnswer] = []

            def finish(
                answer: CommitAnswer,
                _: CompletionBatch,
                answers: list[CommitAnswer] = answers,
                gate: threading.Lock = gate,
            ) -> None:
                answers.append(answer)
                gate.release()

            self._enqueue(build_request(txn, self._next_no(), self._client), history, finish)
            gate.acquire()
            if answers[0].error is not None and answers[0].error[0] == Conflict.code:
                return False, None
            resolve_deferred(txn, answers[0])
        return True, unwrap(result)

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        txn, result = self._run_read(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def read_stale(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Bounded-staleness read (see `api.read_stale`) from the cache, if it includes all notified commits."""
        self._check_open()
        local_state, topics = self._engine.local_state, self._notifications
        is_fresh = self._clock.mono_ns() - self._refreshed_ns < STALENESS_MAX_NS
        if is_fresh and topics.is_listening and local_state.commit_no >= topics.last_remote_commit:
            with suppress(_CacheUnusable):
                run = self._run_on_cache(fn, args, kwargs)
                is_complete = not run.snapshot.used_server and local_state.is_current
                if run.error is None and is_complete and self._is_still_valid(run):
                    refuse_writes(run.txn)
                    return run.result
        return self.read(fn, *args, **kwargs)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CommitFuture:
        future = CommitFuture(self._check_not_forked)
        self._submit(future, fn, args, kwargs, 0)
        return future

    def batched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit_when(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> None:
        """Return None: every process commits for itself, so there is no central engine to park at."""
        return

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        self._check_open()
        try:
            return wait_once(self._notifications, checked_topics(topic), since, timeout)
        except StoreClosed:
            return since

    def subscribe(self, topics: str | Sequence[str], since: int = 0) -> Subscription:
        return Subscription(self._notifications, checked_topics(topics), since)

    def backup(self, path: str) -> None:
        raise Invalid(what="backup", why="use pg_basebackup or pg_dump to back up the database")

    def size(self) -> tuple[int, int]:
        """The number of the last commit, and the bytes of all rows on the server, indexes included."""
        self._check_open()
        with server.translate_errors(self._conninfo), server.connect(self._conninfo) as connection:
            [(last, size)] = connection.execute(_SELECT_SIZE).fetchall()
        return int(last), int(size)

    def row_sizes(self, lo: bytes, limit: int) -> list[tuple[bytes, int]]:
        """See `store.row_sizes`. The server reads the lengths without the values."""
        return self._fetch_uncached(ROW_SIZES, (lo, Int8(limit)))

    def peek_rows(self, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
        """See `store.row_sizes`."""
        rows = dict(self._fetch_uncached(GET_MANY, (ByteaArray(keys),)))
        return {key: rows.get(key) for key in keys}

    def relation_usage(self) -> tuple[int, ...]:
        """Return bytes of the rows, of their index, of the commit records, and the numbers of live and dead rows that
        the server last estimated."""
        [figures] = self._fetch_uncached(_SELECT_USAGE, ())
        return tuple(map(int, figures))

    def _fetch_uncached(self, statement: str, values: Sequence[Any]) -> list[Any]:
        self._check_open()
        try:
            return self._read_pool.fetch_all(statement, values)
        except psycopg.Error as error:
            raise server.to_store_error(error, self._conninfo) from error

    def stop_within(self, seconds: float) -> None:
        """Set the shutdown deadline: after it, no call waits for an unreachable or silent server."""
        self._engine.outage.shutdown_deadline.stop_within(seconds)

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        with self._queue_changed:
            self._closed = True
            self._queue_changed.notify_all()
        self._engine.is_closing = True
        self._committer.join()
        self._notifications.close()
        self._read_pool.close()
        self._engine.close()

    def __enter__(self) -> PostgresStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StoreForked(url=self.url)
        if self._closed:
            raise StoreClosed(url=self.url)

    def _check_not_forked(self) -> None:
        """Raise in a forked child, which receives no answers."""
        if os.getpid() != self._pid:
            self._check_open()

    def _notify_topics(self, commit_no: int, topics: Sequence[str]) -> None:
        if threading.current_thread() is self._committer:
            # Answer the committing callers first: they often do the work that the notification announces.
            self._pending_notifications.append((commit_no, topics))
        else:
            self._notifications.notify_local(commit_no, topics)

    def _next_no(self) -> int:
        with self._queue_changed:
            self._no += 1
            return self._no

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tries: int
    ) -> tuple[ClientTxn, Any]:
        """Run a transaction on the cache. If its reads may be stale, run it on a server snapshot."""
        self._check_open()
        if tries < CACHED_TRIES_MAX:
            with suppress(_CacheUnusable):
                run = self._run_on_cache(fn, args, kwargs)
                if not run.snapshot.has_read or (run.error is None and run.txn.needs_commit):
                    return run.result_or_raise()
                self._refresh()
                if self._is_still_valid(run):
                    return run.result_or_raise()
        return self._run_on_snapshot(fn, args, kwargs)

    def _run_read(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        """Run a read on the refreshed cache. If its reads do not validate, run it on a server snapshot."""
        self._check_open()
        with suppress(_CacheUnusable):
            for _ in range(CACHED_TRIES_MAX):
                self._refresh()
                run = self._run_on_cache(fn, args, kwargs)
                if run.snapshot.used_server or not self._engine.local_state.is_current:
                    # It may have read rows of commits that the local state does not include yet.
                    self._refresh()
                if self._is_still_valid(run):
                    return run.result_or_raise()
        return self._run_on_snapshot(fn, args, kwargs)

    def _run_on_cache(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _CachedRun:
        history = self._engine.history_no
        snapshot = CachedSnapshot(self._engine.local_state, self._coalesced_reads)
        txn = self._new_txn(snapshot)
        txn.snapshot = snapshot.id
        try:
            return _CachedRun(txn, fn(txn, *args, **kwargs), None, snapshot, history)
        except (psycopg.Error, PostgresUnreachable, ScanTooLarge):
            raise _CacheUnusable from None
        except Exception as error:
            return _CachedRun(txn, None, error, snapshot, history)

    def _is_still_valid(self, run: _CachedRun) -> bool:
        local_state = self._engine.local_state
        return run.history_no == self._engine.history_no and local_state.is_unchanged(
            run.snapshot.id, run.txn.reads, run.txn.ranges
        )

    def _refresh(self) -> None:
        started_ns = self._clock.mono_ns()
        try:
            self._coalesced_reads.refresh()
            self._refreshed_ns = started_ns
        except (psycopg.Error, PostgresUnreachable):
            raise _CacheUnusable from None

    def _run_on_snapshot(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        """Run on a server snapshot, and retry during an outage."""
        if failpoints.armed:
            failpoints.hit("postgres.snapshot", self)
        began_ns = self._clock.mono_ns()
        while True:
            self._check_open()
            history = self._engine.history_no
            snapshot = ServerSnapshot(self._read_pool)
            txn = self._new_txn(snapshot)
            try:
                result = fn(txn, *args, **kwargs)
                self._check_open()  # it may have forked
                txn.snapshot = snapshot.id
                if history == self._engine.history_no:
                    self._engine.local_state.fill(snapshot.id, snapshot.rows_read)
                return txn, result
            except psycopg.Error as raised:
                error = server.to_store_error(raised, self._conninfo)
                if not isinstance(error, PostgresUnreachable):
                    raise error from raised
            except PostgresUnreachable as raised:
                error = raised
            finally:
                snapshot.close()
            if self._engine.outage.is_over(began_ns, BORROW_WAIT_S):
                raise self._engine.outage.with_outage(error)
            self._clock.sleep(RETRY_PAUSE_S)

    def _new_txn(self, base: CachedSnapshot | ServerSnapshot) -> ClientTxn:
        return ClientTxn(base, snapshot=0, generation=self.generation, now=self.now_ns)

    def _enqueue(self, request: CommitRequest, history: int, finish: OnAnswer) -> None:
        with self._queue_changed:
            if self._closed:
                raise StoreClosed(url=self.url)
            self._queue.append((request, history, finish))
            if len(self._queue) == 1:
                self._queue_changed.notify()

    def _run_committer(self) -> None:
        """Commit queued requests until the store is closed and the queue is empty."""
        while True:
            with self._queue_changed:
                while not self._queue and not self._closed:
                    self._queue_changed.wait()
                if not self._queue:
                    return
                batch = self._take_batch()
            requests = [request for request, _, _ in batch]
            started_ns = self._clock.mono_ns()
            try:
                answers = self._engine.commit(requests, [history for _, history, _ in batch])
            except HoldfastError as error:
                answers = [CommitAnswer(request.no, to_wire(error)) for request in requests]
            except Exception as error:
                broken = Invalid(what="commit", why=f"{type(error).__name__}: {error}")
                answers = [CommitAnswer(request.no, to_wire(broken)) for request in requests]
            self.commit_latencies.add(self._clock.mono_ns() - started_ns)
            done = CompletionBatch()
            for (_, _, finish), answer in zip(batch, answers, strict=True):
                finish(answer, done)
            done.wake()
            while self._pending_notifications:
                self._notifications.notify_local(*self._pending_notifications.popleft())

    def _take_batch(self) -> list[tuple[CommitRequest, int, OnAnswer]]:
        """Take the next batch from the queue: at least one request."""
        batch: list[tuple[CommitRequest, int, OnAnswer]] = []
        rows = size = 0
        while self._queue and len(batch) < COMMIT_TXNS_MAX:
            puts = self._queue[0][0].puts
            rows += len(puts)
            size += sum(map(len, puts.values()))
            if batch and (rows > COMMIT_ROWS_MAX or size > COMMIT_BYTES_MAX):
                break
            batch.append(self._queue.popleft())
        return batch

    def _submit(
        self,
        future: CommitFuture,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        try:
            history = self._engine.history_no
            txn, result = self._run(fn, args, kwargs, tries)
            if not txn.needs_commit:
                complete_one(future, unwrap(result))
                return
            request = build_request(txn, self._next_no(), self._client)
        except Exception as error:
            complete_one(future, error=error)
            return

        def finish(answer: CommitAnswer, done: CompletionBatch) -> None:
            """Complete the future. Runs in the committer: must not block or run user code."""
            lost = answer.error is not None and answer.error[0] == Conflict.code
            if lost and tries + 1 < TRANSACT_ATTEMPTS_MAX:
                self._callback_thread.submit(
                    lambda: self._submit(future, fn, args, kwargs, tries + 1)
                )
                return
            try:
                resolve_deferred(txn, answer)
            except Exception as error:
                done.complete(future, error=error)
            else:
                done.complete(future, unwrap(result))

        try:
            self._enqueue(request, history, finish)
        except HoldfastError as error:
            complete_one(future, error=error)


class _CacheUnusable(Exception):
    """The cache cannot serve this read."""


class _CachedRun(NamedTuple):
    """A run of a function on the cache, with its result or error."""

    txn: ClientTxn
    result: Any
    error: Exception | None
    snapshot: CachedSnapshot
    history_no: int

    def result_or_raise(self) -> tuple[ClientTxn, Any]:
        if self.error is not None:
            raise self.error
        return self.txn, self.result
