"""The embedded store: rows in LMDB, read directly by every process, written by one.

A client runs a transaction on an LMDB snapshot of its own and sends what it read and wrote to the
writer process, which validates, applies and commits it together with those of all other clients. An
operation by itself needs no snapshot: it runs at the writer.
Nothing a client does, dying included, can leave a lock behind or hold up the others.
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
from holdfast.config import TRANSACT_TRIES_FREE, TRANSACT_TRIES_MAX, WriterLimits
from holdfast.errors import (
    Conflict,
    NotFound,
    StoreClosed,
    StoreForked,
    StoreReplaced,
    Withdrawn,
)
from holdfast.store import access
from holdfast.store import backup as backups
from holdfast.store.api import Operation
from holdfast.store.engine import Answer
from holdfast.store.future import Aside, Submitted, complete
from holdfast.store.link import Call, Link
from holdfast.store.local import refuse_writes, topics_of
from holdfast.store.rows import LmdbBackend, prepare, storage_error
from holdfast.store.txn import ClientTxn
from holdfast.store.wire import Called, Ran, standing

# With a thread that computes, others get the interpreter only this often; the default (5 ms) would
# cost such a program nine tenths of its commits.
SWITCH_INTERVAL_S = 5e-5


class LmdbStore:
    def __init__(
        self, path: Path, *, bootstrap: bool = True, limits: WriterLimits | None = None
    ) -> None:
        self.path = path.absolute()
        self.url = f"lmdb:{self.path}"
        self._gone: type[StoreClosed] | type[StoreForked] | None = None
        self._forked = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        access.check(self.path)
        if not bootstrap and not (self.path / "data.mdb").exists():
            raise NotFound(what="store", path=str(self.path), why="none here, and bootstrap is off")
        prepare(self.path)
        self._link = Link(self.path, bootstrap=bootstrap, limits=limits or WriterLimits())
        try:
            self._backend = _share(self.path, self._link.welcome.inode)
        except BaseException:
            self._link.close()
            raise
        self._snapshot = self._backend.snapshot
        self._last_ns = 0
        self._contended = threading.RLock()
        self._aside = Aside()
        _stores.add(self)

    @property
    def generation(self) -> int:
        return self._link.welcome.generation

    def now_ns(self) -> int:
        now_ns = SYSTEM.boot_ns() + self._link.welcome.offset_ns
        self._last_ns = max(self._last_ns, now_ns)
        return self._last_ns

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _ in range(TRANSACT_TRIES_FREE):
            done, result = self._try(fn, args, kwargs)
            if done:
                return result
        # Threads that keep losing to each other take turns: one of them wins each round.
        with self._contended:
            for _ in range(TRANSACT_TRIES_MAX):
                done, result = self._try(fn, args, kwargs)
                if done:
                    return result
        raise Conflict(tries=TRANSACT_TRIES_MAX, why="others always committed first")

    def _try(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        run = self._begin(fn, args, kwargs)
        if not run.writing:
            return True, run.answered(None)
        answer = self._link.call(run.request(self._link.next_no(), self._link.client))
        if answer.error is not None and answer.error[0] == Conflict.code:
            return False, None
        return True, run.answered(answer)

    def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        txn, result = self._run(fn, args, kwargs)
        refuse_writes(txn)
        return result

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Submitted:
        future = Submitted(self._nudge)
        self._submit(future, fn, args, kwargs, TRANSACT_TRIES_MAX)
        return future

    def together(self) -> AbstractContextManager[None]:
        return self._link.together()

    def stand(self, topics: Sequence[str], fn: Callable[..., Any], *args: Any) -> LmdbStanding:
        run = self._begin(fn, args, {})
        request = standing(run.request(self._link.next_no(), self._link.client), topics)
        return LmdbStanding(self._link, self._link.stand(request), run)

    def wait(self, topic: str | Sequence[str], since: int, timeout: float) -> int:
        self._check()
        return self._link.wait(topics_of(topic), since, timeout)

    def backup(self, path: str) -> None:
        self._check()
        backups.copy(self._backend, Path(path))

    def check(self) -> None:
        """Raise what has ended this store for good: closed, forked, removed or replaced at its path."""
        self._check()
        self._link.check()

    def close(self) -> None:
        if self._gone is None:
            self._gone = StoreClosed
            self._link.close()
            _unshare(self._backend)

    def __enter__(self) -> LmdbStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone(path=str(self.path))

    def _nudge(self) -> None:
        """Send what a future waits for. A forked child has nothing to wait for: no answer reaches it."""
        if self._forked:
            self._check()
        self._link.flush()

    def _begin(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ran | Called:
        """What is to be sent, before it has a number."""
        if type(fn) is not Operation:
            return Ran(*self._run(fn, args, kwargs))
        args = fn.positional(args, kwargs)
        self._check()
        self._link.check()
        try:
            return Called(fn, args, self._backend.last_id())
        except lmdb.Error as error:
            self._check()  # closed meanwhile, by another thread
            raise storage_error(error, self.path) from None

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ClientTxn, Any]:
        if self._gone is not None:
            raise self._gone(path=str(self.path))
        self._link.check()
        snapshot = self._snapshot()
        try:
            txn = ClientTxn(
                snapshot, snapshot=snapshot.id, generation=self.generation, now=self.now_ns
            )
            result = fn(txn, *args, **kwargs)
        except lmdb.Error as error:
            self._check()  # closed meanwhile, by another thread
            raise storage_error(error, self.path) from None
        finally:
            if not self._forked:
                snapshot.close()
        if self._forked:
            self._check()  # the function forked, and this is the child
        return txn, result

    def _submit(
        self,
        future: Submitted,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        completions = self._link.completions
        try:
            run = self._begin(fn, args, kwargs)
            if not run.writing:
                complete(future, run.answered(None))
                return
            request = run.request(self._link.next_no(), self._link.client)
        except Exception as error:
            complete(future, error=error)
            return

        def finish(answer: Answer) -> None:
            """Runs where answers are read: nothing here may wait, and no user's code runs."""
            if answer.error is not None and answer.error[0] == Conflict.code and tries > 1:
                self._aside.run(lambda: self._submit_again(future, fn, args, kwargs, tries - 1))
                return
            try:
                result = run.answered(answer)
            except Exception as error:
                completions.complete(future, error=error)
            else:
                completions.complete(future, result)

        self._link.post(request, finish)

    def _submit_again(
        self,
        future: Submitted,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        try:
            self._submit(future, fn, args, kwargs, tries)
        except BaseException as error:
            complete(future, error=error)


class LmdbStanding:
    def __init__(self, link: Link, call: Call, run: Ran | Called) -> None:
        self._link = link
        self._call = call
        self._run = run

    @property
    def answered(self) -> bool:
        return self._call.answer is not None

    def wait(self, topics: Sequence[str], since: int, timeout: float) -> int:
        return self._link.wait(topics_of(topics), since, timeout, self._call)

    def result(self) -> Any:
        assert self._call.answer is not None, "not answered yet"
        return self._run.answered(self._call.answer)

    def withdraw(self) -> bool:
        answer = self._link.withdraw(self._call)
        return answer.error is not None and answer.error[0] == Withdrawn.code


# LMDB forbids a process to open an environment twice, so stores of one directory share it.
_shared: dict[tuple[int, ...], tuple[LmdbBackend, int]] = {}
_shared_lock = threading.Lock()
_stores: weakref.WeakSet[LmdbStore] = weakref.WeakSet()


def _share(path: Path, inode: int) -> LmdbBackend:
    with _shared_lock:
        found = os.stat(path / "data.mdb")
        if found.st_ino != inode:
            raise StoreReplaced(path=str(path))
        identity = (found.st_dev, found.st_ino, os.stat(path / "lock.mdb").st_ino)
        backend, users = _shared.get(identity, (None, 0))
        if backend is None:
            backend = LmdbBackend(path, readonly=True)
        _shared[identity] = (backend, users + 1)
        return backend


def _unshare(backend: LmdbBackend) -> None:
    with _shared_lock:
        for identity, (shared, users) in list(_shared.items()):
            if shared is backend:
                if users == 1:
                    del _shared[identity]
                    backend.close()
                else:
                    _shared[identity] = (backend, users - 1)


def _disown_in_child() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared.clear()
    for store in _stores:
        store._gone, store._forked = StoreForked, True
        store._link.disown(StoreForked(path=str(store.path)))


os.register_at_fork(after_in_child=_disown_in_child)
