"""The embedded store: rows in LMDB, read directly by every process, written by one writer process.

A client runs a transaction on an LMDB snapshot and sends the read set and the writes to the
writer process. The writer validates, applies and commits the transactions of all clients together
(group commit). A single operation needs no snapshot: it runs in the writer.
A client cannot leave a lock behind or delay other clients, even if it dies.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lmdb

from holdfast.clock import SYSTEM
from holdfast.config import TRANSACT_ATTEMPTS_MAX, TRANSACT_CONCURRENT_ATTEMPTS, WriterLimits
from holdfast.errors import (
    Conflict,
    HoldfastError,
    NotFound,
    RequestCancelled,
    StoreClosed,
    StoreForked,
    StoreReplaced,
)
from holdfast.store.api import Operation
from holdfast.store.futures import CallbackThread, CommitFuture, complete_one
from holdfast.store.latency_histogram import LatencyHistogram
from holdfast.store.lmdb import backup as backups
from holdfast.store.lmdb import permissions
from holdfast.store.lmdb.backend import LmdbBackend, PageUsage, prepare_directory, storage_error
from holdfast.store.lmdb.protocol import OperationCall, TransactionCall, as_parked
from holdfast.store.lmdb.writer_client import PendingCall, WriterClient
from holdfast.store.requests import CommitAnswer
from holdfast.store.subscription import Subscription
from holdfast.store.txn import ClientTxn, checked_topics, refuse_writes

# A computing thread yields the interpreter only at this interval. With the default (5 ms) such a
# program loses nine tenths of its commit rate.
SWITCH_INTERVAL_S = 5e-5


class LmdbStore:
    def __init__(
        self, path: Path, *, bootstrap: bool = True, limits: WriterLimits | None = None
    ) -> None:
        self.path = path.absolute()
        self.url = f"lmdb:{self.path}"
        self._end_error: type[StoreClosed] | type[StoreForked] | None = None
        self._forked = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        permissions.check_access(self.path)
        if not bootstrap and not (self.path / "data.mdb").exists():
            raise NotFound(
                what="store",
                path=str(self.path),
                why="no store in this directory, and bootstrap is off",
            )
        prepare_directory(self.path)
        self._client = WriterClient(self.path, bootstrap=bootstrap, limits=limits or WriterLimits())
        try:
            self._backend = _share_backend(self.path, self._client.welcome.inode)
        except BaseException:
            self._client.close()
            raise
        self._snapshot = self._backend.snapshot
        self._last_ns = 0
        self._contention_lock = threading.RLock()
        self._callback_thread = CallbackThread()
        _stores.add(self)

    @property
    def generation(self) -> int:
        return self._client.welcome.generation

    @property
    def commit_latencies(self) -> LatencyHistogram:
        """The durations of this process's commits, as its threads see them."""
        return self._client.latencies

    def now_ns(self) -> int:
        now_ns = SYSTEM.boot_ns() + self._client.welcome.offset_ns
        self._last_ns = max(self._last_ns, now_ns)
        return self._last_ns

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _ in range(TRANSACT_CONCURRENT_ATTEMPTS):
            done, result = self._try(fn, args, kwargs)
            if done:
                return result
        # Conflicting threads of this process take turns, so one of them commits each round.
        with self._contention_lock:
            for _ in range(TRANSACT_ATTEMPTS_MAX):
                done, result = self._try(fn, args, kwargs)
                if done:
                    return result
        raise Conflict(tries=TRANSACT_ATTEMPTS_MAX, why="other commits always came first")

    def _try(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        transaction = self._prepare(fn, args, kwargs)
        if not transaction.needs_commit:
            return True, transaction.result_of(None)
        answer = self._client.call(
            transaction.build_request(self._client.next_no(), self._client.client)
        )
        if answer.error is not None and answer.error[0] == Conflict.code:
            return False, None
        return True, transaction.result_of(answer)

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        txn, result = self._run(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def row_sizes(self, lo: bytes, limit: int) -> list[tuple[bytes, int]]:
        """See `store.row_sizes`."""
        self._check_open()
        self._client.check()
        try:
            return self._backend.row_sizes(lo, limit)
        except lmdb.Error as error:
            self._check_open()  # another thread may have closed the store
            raise storage_error(error, self.path) from None

    def page_usage(self) -> PageUsage:
        """Return exact figures of the file, without a scan."""
        self._check_open()
        return self._backend.page_usage()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CommitFuture:
        future = CommitFuture(self._ensure_sent)
        self._submit(future, fn, args, kwargs, TRANSACT_ATTEMPTS_MAX)
        return future

    def batched(self) -> AbstractContextManager[None]:
        return self._client.batched()

    def submit_when(
        self, topics: Sequence[str], fn: Callable[..., Any], *args: Any
    ) -> LmdbParkedTransaction:
        transaction = self._prepare(fn, args, {})
        request = as_parked(
            transaction.build_request(self._client.next_no(), self._client.client), topics
        )
        return LmdbParkedTransaction(self._client, self._client.park(request), transaction)

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        self._check_open()
        return self._client.wait(checked_topics(topic), since, timeout)

    def subscribe(self, topics: str | Sequence[str], since: int = 0) -> Subscription:
        return self._client.subscribe(checked_topics(topics), since)

    def backup(self, path: str) -> None:
        self._check_open()
        backups.write_backup(self._backend, Path(path))

    def check(self) -> None:
        """Raise if this store is permanently unusable: closed, forked, or its path removed or replaced."""
        self._check_open()
        self._client.check()

    def close(self) -> None:
        if self._end_error is None:
            self._end_error = StoreClosed
            self._client.close()
            _release_backend(self._backend)

    def __enter__(self) -> LmdbStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._end_error is not None:
            raise self._end_error(path=str(self.path))

    def _ensure_sent(self) -> None:
        """Send the requests of waiting futures. Raise in a forked child, which receives no answers."""
        if self._forked:
            self._check_open()
        self._client.flush()

    def _prepare(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TransactionCall | OperationCall:
        """Run the function, or wrap the operation, for a request without a number yet."""
        if type(fn) is not Operation:
            return TransactionCall(*self._run(fn, args, kwargs))
        args = fn.bind_positional(args, kwargs)
        self._check_open()
        self._client.check()
        try:
            return OperationCall(fn, args, self._backend.last_id())
        except lmdb.Error as error:
            self._check_open()  # another thread may have closed the store
            raise storage_error(error, self.path) from None

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        if self._end_error is not None:
            raise self._end_error(path=str(self.path))
        self._client.check()
        snapshot = self._snapshot()
        try:
            txn = ClientTxn(
                snapshot, snapshot=snapshot.id, generation=self.generation, now=self.now_ns
            )
            result = fn(txn, *args, **kwargs)
        except lmdb.Error as error:
            self._check_open()  # another thread may have closed the store
            raise storage_error(error, self.path) from None
        finally:
            if not self._forked:
                snapshot.close()
        if self._forked:
            self._check_open()  # the function forked, and this is the child
        return txn, result

    def _submit(
        self,
        future: CommitFuture,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        completions = self._client.completions
        try:
            transaction = self._prepare(fn, args, kwargs)
            if not transaction.needs_commit:
                complete_one(future, transaction.result_of(None))
                return
            request = transaction.build_request(self._client.next_no(), self._client.client)
        except Exception as error:
            complete_one(future, error=error)
            return

        def finish(answer: CommitAnswer) -> None:
            """Complete the future. Runs in the receiver thread: must not block or run user code."""
            if answer.error is not None and answer.error[0] == Conflict.code and tries > 1:
                self._callback_thread.submit(
                    lambda: self._submit_again(future, fn, args, kwargs, tries - 1)
                )
                return
            try:
                result = transaction.result_of(answer)
            except Exception as error:
                completions.complete(future, error=error)
            else:
                completions.complete(future, result)

        try:
            self._client.submit(request, finish)
        except HoldfastError as error:
            # Another thread has closed the store, or its directory is gone.
            complete_one(future, error=error)

    def _submit_again(
        self,
        future: CommitFuture,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        try:
            self._submit(future, fn, args, kwargs, tries)
        except BaseException as error:
            complete_one(future, error=error)


class LmdbParkedTransaction:
    def __init__(
        self, client: WriterClient, call: PendingCall, transaction: TransactionCall | OperationCall
    ) -> None:
        self._client = client
        self._call = call
        self._transaction = transaction

    @property
    def is_answered(self) -> bool:
        return self._call.answer is not None

    def wait(self, topics: Sequence[str], since: int, timeout: float) -> int:
        return self._client.wait(checked_topics(topics), since, timeout, self._call)

    def result(self) -> Any:
        assert self._call.answer is not None, "not answered yet"
        return self._transaction.result_of(self._call.answer)

    def cancel(self) -> bool:
        answer = self._client.cancel_parked(self._call)
        return answer.error is not None and answer.error[0] == RequestCancelled.code


# LMDB forbids opening an environment twice in one process, so stores of one directory share it.
_shared_backends: dict[tuple[int, ...], tuple[LmdbBackend, int]] = {}
_shared_lock = threading.Lock()
_stores: weakref.WeakSet[LmdbStore] = weakref.WeakSet()


def _share_backend(path: Path, inode: int) -> LmdbBackend:
    with _shared_lock:
        data_file = os.stat(path / "data.mdb")
        if data_file.st_ino != inode:
            raise StoreReplaced(path=str(path))
        identity = (data_file.st_dev, data_file.st_ino, os.stat(path / "lock.mdb").st_ino)
        backend, users = _shared_backends.get(identity, (None, 0))
        if backend is None:
            backend = LmdbBackend(path, readonly=True)
        _shared_backends[identity] = (backend, users + 1)
        return backend


def _release_backend(backend: LmdbBackend) -> None:
    with _shared_lock:
        for identity, (shared, users) in list(_shared_backends.items()):
            if shared is backend:
                if users == 1:
                    del _shared_backends[identity]
                    backend.close()
                else:
                    _shared_backends[identity] = (backend, users - 1)


def _disown_stores_in_child() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared_backends.clear()
    for store in _stores:
        store._end_error, store._forked = StoreForked, True
        store._client.disown_in_child(StoreForked(path=str(store.path)))


os.register_at_fork(after_in_child=_disown_stores_in_child)
