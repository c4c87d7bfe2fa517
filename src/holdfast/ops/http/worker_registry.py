"""The registry of HTTP workers: sends heartbeats to the worker registry on behalf of HTTP clients.

A worker is identified by the name in its requests. The server registers it at its first request. It repeats
the heartbeat every few seconds while a request is open and for PRESENT_NS after the last one, because a
worker sends no requests while it computes. Any server of the universe removes names after an hour without
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from holdfast.clock import S
from holdfast.durable.validation import check_name
from holdfast.errors import HoldfastError
from holdfast.leadership import worker_registry
from holdfast.store.api import Store, Txn

# The incarnation of every HTTP worker: one name may cover many client processes.
INCARNATION = "http"
ROLES = ("task",)
HEARTBEAT_NS = 3 * S
TICK_S = 1.0
# How long a worker counts as live after its last request: about one lease duration.
PRESENT_NS = 60 * S
EXPIRED_NS = 3_600 * S
# The most names that one server registers. Further workers are served, but not listed.
WORKERS_MAX = 1_000


class _HttpWorker:
    __slots__ = ("heartbeat_ns", "last_request_ns", "open")

    def __init__(self) -> None:
        self.open = 0
        self.last_request_ns = self.heartbeat_ns = 0


class HttpWorkerRegistry:
    """The HTTP workers of one server. Used only in the server's event loop."""

    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        self._workers: dict[str, _HttpWorker] = {}

    @contextlib.contextmanager
    def request_open(self, name: str) -> Iterator[None]:
        """Mark a request of this worker as open while the context lasts."""
        check_name("worker", name)
        worker = self._workers.get(name)
        if worker is None:
            worker = _HttpWorker()
            if len(self._workers) < WORKERS_MAX:
                self._workers[name] = worker
        worker.open += 1
        worker.last_request_ns = self._store.now_ns()
        try:
            if name in self._workers:
                self._heartbeat(name, worker)
            yield
        finally:
            worker.open -= 1
            worker.last_request_ns = self._store.now_ns()

    async def run(self, run_in_thread: Callable[..., Awaitable[int]]) -> None:
        """Run the heartbeat loop: renew the registration of present workers and remove expired names."""
        next_sweep_ns = 0
        while True:
            await asyncio.sleep(TICK_S)
            now_ns = self._store.now_ns()
            for name, worker in list(self._workers.items()):
                if worker.open or now_ns < worker.last_request_ns + PRESENT_NS:
                    self._heartbeat(name, worker)
                else:
                    del self._workers[name]
            if now_ns >= next_sweep_ns:
                next_sweep_ns = now_ns + PRESENT_NS
                with contextlib.suppress(HoldfastError):
                    await run_in_thread(self._store.transact, _remove_expired, self._universe)

    def _heartbeat(self, name: str, worker: _HttpWorker) -> None:
        now_ns = self._store.now_ns()
        if now_ns >= worker.heartbeat_ns + HEARTBEAT_NS:
            worker.heartbeat_ns = now_ns
            # Best effort: the next heartbeat replaces a lost one.
            self._store.submit(worker_registry.heartbeat, self._universe, name, INCARNATION, ROLES)


def _remove_expired(txn: Txn, universe: str) -> int:
    before_ns = txn.now_ns - EXPIRED_NS
    expired = [
        record.worker
        for record in worker_registry.list_registered(txn, universe)
        if record.incarnation == INCARNATION and record.heartbeat_ns < before_ns
    ]
    for name in expired:
        worker_registry.remove(txn, universe, name, INCARNATION)
    return len(expired)
