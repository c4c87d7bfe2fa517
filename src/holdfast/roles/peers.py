"""The stores of other universes, opened when mail for them comes first.

A store that cannot be reached is an `Unreachable` of the mail that goes there, and of nothing else. Before a
universe is first sent to, somebody may vouch that this is where it lives: mail makes worlds, and a universe
that lives in another store would be in two from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from holdfast import store as stores
from holdfast.errors import HoldfastError, StoreError, StoreGone
from holdfast.store.api import Store


class Unreachable(HoldfastError):
    code = "unreachable"
    retryable = True
    hint = "the mail waits here and goes on by itself once the store can be reached"


def open_existing(url: str) -> Store:
    return stores.open(url, bootstrap=False)


@runtime_checkable
class Hasty(Protocol):
    """A store whose server may be away."""

    @property
    def away_since_ns(self) -> int: ...
    def stop_within(self, seconds: float) -> None: ...


# Raises if a universe does not live in a store that it is said to be in.
Vouch = Callable[[str, Store], None]


class Peers:
    """Other stores, opened when they are first needed, one for each URL."""

    def __init__(
        self,
        peers: Mapping[str, str | Store],
        open: Callable[[str], Store],
        vouch: Vouch | None = None,
    ) -> None:
        self._peers = dict(peers)
        self._open = open
        self._vouch = vouch
        self._vouched: set[str] = set()
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
            found = self._opened[where]
        if self._vouch is not None and universe not in self._vouched:
            self._vouch(universe, found)
            self._vouched.add(universe)
        return found

    def drop(self, universe: str, store: Store, error: Exception) -> None:
        """Open it anew next time, if this one is of no use any more. Others may have done so meanwhile: what
        they have opened is left to them."""
        where = self._peers[universe]
        # One that was removed is not made anew by its peers: it is opened once it is there again.
        back = isinstance(error, StoreGone) and (Path(error.path) / "data.mdb").exists()
        if not isinstance(where, str) or not (isinstance(error, StoreError) or back):
            return
        with self._locks[where]:
            if self._opened.get(where) is not store:
                return
            del self._opened[where]
        store.close()

    def stop_within(self, seconds: float) -> None:
        """This process stops: after so long no server that is away is waited for."""
        for store in list(self._opened.values()):
            if isinstance(store, Hasty):
                store.stop_within(seconds)

    def close(self) -> None:
        self._closed = True
        for where, lock in list(self._locks.items()):
            with lock:
                found = self._opened.pop(where, None)
            if found is not None:
                found.close()
