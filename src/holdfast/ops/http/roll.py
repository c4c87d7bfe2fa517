"""The roll of HTTP workers: those that lease and report over HTTP are in the list of workers, too.

A worker is known by the name in its requests. The server registers it in the registry of workers: at its
first request, and again every few seconds while one of its requests is open or its last one is not long ago,
for a worker that computes says nothing meanwhile. Names that were silent for an hour are removed, by any
server of the universe.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from holdfast.authority import workers
from holdfast.clock import S
from holdfast.durable.bounds import check_name
from holdfast.errors import HoldfastError
from holdfast.store.api import Store, Txn

# What stands in the place of an incarnation: a client may be many processes, and says nothing of them.
INCARNATION = "http"
ROLES = ("task",)
BEAT_NS = 3 * S
TICK_S = 1.0
# How long after its last request a worker counts as alive: about as long as a lease lasts.
PRESENT_NS = 60 * S
FORGOTTEN_NS = 3_600 * S
# Names that one server keeps on the roll. Further ones are served, and not listed.
NAMES_MAX = 1_000


class _Worker:
    __slots__ = ("beat_ns", "heard_ns", "open")

    def __init__(self) -> None:
        self.open = 0
        self.heard_ns = self.beat_ns = 0


class Roll:
    """Used in the server's loop only."""

    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        self._workers: dict[str, _Worker] = {}

    @contextlib.contextmanager
    def present(self, name: str) -> Iterator[None]:
        """A request of this worker is open."""
        check_name("worker", name)
        found = self._workers.get(name)
        if found is None:
            found = _Worker()
            if len(self._workers) < NAMES_MAX:
                self._workers[name] = found
        found.open += 1
        found.heard_ns = self._store.now_ns()
        try:
            if name in self._workers:
                self._beat(name, found)
            yield
        finally:
            found.open -= 1
            found.heard_ns = self._store.now_ns()

    async def keep(self, aside: Callable[..., Awaitable[int]]) -> None:
        """Register those that are present, again and again, and remove those that are long gone."""
        sweep_ns = 0
        while True:
            await asyncio.sleep(TICK_S)
            now_ns = self._store.now_ns()
            for name, worker in list(self._workers.items()):
                if worker.open or now_ns < worker.heard_ns + PRESENT_NS:
                    self._beat(name, worker)
                else:
                    del self._workers[name]
            if now_ns >= sweep_ns:
                sweep_ns = now_ns + PRESENT_NS
                with contextlib.suppress(HoldfastError):
                    await aside(self._store.transact, _sweep, self._universe)

    def _beat(self, name: str, worker: _Worker) -> None:
        now_ns = self._store.now_ns()
        if now_ns >= worker.beat_ns + BEAT_NS:
            worker.beat_ns = now_ns
            # Advisory: a commit that is lost is followed by the next one.
            self._store.submit(workers.heartbeat, self._universe, name, INCARNATION, ROLES)


def _sweep(txn: Txn, universe: str) -> int:
    before_ns = txn.now_ns - FORGOTTEN_NS
    gone = [
        one.worker
        for one in workers.known(txn, universe)
        if one.incarnation == INCARNATION and one.heartbeat_ns < before_ns
    ]
    for name in gone:
        workers.forget(txn, universe, name, INCARNATION)
    return len(gone)
