"""The stores of other universes, opened when mail for them comes first.

A store that cannot be reached is an `Unreachable` of the mail that goes there, and of nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from holdfast import store as stores
from holdfast.errors import HoldfastError, StoreError
from holdfast.store.api import Store


class Unreachable(HoldfastError):
    code = "unreachable"
    retryable = True
    hint = "the mail waits here and goes on by itself once the store can be reached"


def open_existing(url: str) -> Store:
    return stores.open(url, bootstrap=False)


class Peers:
    """Other stores, opened when they are first needed, one for each URL."""

    def __init__(self, peers: Mapping[str, str | Store], open: Callable[[str], Store]) -> None:
        self._peers = dict(peers)
        self._open = open
        self._opened: dict[str, Store] = {}
        self._locks = {url: threading.Lock() for url in peers.values() if isinstance(url, str)}
        self._closed = False

    def add(self, universe: str, url: str) -> None:
        """One that was not known before."""
        self._locks.setdefault(url, threading.Lock())
        self._peers[universe] = url

    def store(self, universe: str) -> Store:
        where = self._peers[universe]
        if not isinstance(where, str):
            return where
        # Each URL has its own lock: one that takes long to open holds up nobody else.
        with self._locks[where]:
            if self._closed:
                raise Unreachable(universe=universe, why="this pool is closed")
            if where not in self._opened:
                self._opened[where] = self._open(where)
            return self._opened[where]

    def drop(self, universe: str, error: Exception) -> None:
        """Open it anew next time, if this one is of no use any more."""
        where = self._peers[universe]
        if isinstance(where, str) and isinstance(error, StoreError):
            with self._locks[where]:
                gone = self._opened.pop(where, None)
            if gone is not None:
                gone.close()

    def close(self) -> None:
        self._closed = True
        for where, lock in list(self._locks.items()):
            with lock:
                found = self._opened.pop(where, None)
            if found is not None:
                found.close()
