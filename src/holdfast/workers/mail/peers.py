"""Peer stores: the stores of other universes, opened on the first mail to them.

An unreachable store fails only its own mail, with `PeerUnreachable`. Before the first mail to a
universe, an optional check verifies that the universe belongs to this store. Mail creates worlds,
so mail to the wrong store would split the universe over two stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from holdfast import store as stores
from holdfast.errors import HoldfastError, StoreError, StoreGone
from holdfast.store.api import Store


class PeerUnreachable(HoldfastError):
    code = "unreachable"
    retryable = True
    hint = "the mail stays queued here and is delivered when the store is reachable"


def open_existing(url: str) -> Store:
    return stores.open(url, bootstrap=False)


@runtime_checkable
class OutageAwareStore(Protocol):
    """A store whose server may be unavailable."""

    @property
    def away_since_ns(self) -> int: ...
    def stop_within(self, seconds: float) -> None: ...


# Raises if the universe does not belong to the store.
VerifyPeer = Callable[[str, Store], None]


class PeerStores:
    """Peer stores by universe, opened on first use, one per URL."""

    def __init__(
        self,
        peers: Mapping[str, str | Store],
        open: Callable[[str], Store],
        verify: VerifyPeer | None = None,
    ) -> None:
        self._peers = dict(peers)
        self._open = open
        self._verify = verify
        self._verified: set[str] = set()
        self._opened: dict[str, Store] = {}
        self._locks = {url: threading.Lock() for url in peers.values() if isinstance(url, str)}
        self._closed = False

    def add(self, universe: str, url: str) -> None:
        """Add a universe by the URL of its store."""
        self._locks.setdefault(url, threading.Lock())
        self._peers[universe] = url

    def store(self, universe: str) -> Store:
        url_or_store = self._peers[universe]
        if not isinstance(url_or_store, str):
            return url_or_store
        # One lock per URL: a slow open does not block other peers.
        with self._locks[url_or_store]:
            if self._closed:
                raise PeerUnreachable(universe=universe, why="this pool is closed")
            if url_or_store not in self._opened:
                self._opened[url_or_store] = self._open(url_or_store)
            opened = self._opened[url_or_store]
        if self._verify is not None and universe not in self._verified:
            self._verify(universe, opened)
            self._verified.add(universe)
        return opened

    def discard(self, universe: str, store: Store, error: Exception) -> None:
        """Discard a broken store, so that the next use reopens it. A store that another thread has
        reopened is kept.
        """
        url_or_store = self._peers[universe]
        # A deleted store is not recreated: it is reopened when its file exists again.
        is_restored = isinstance(error, StoreGone) and (Path(error.path) / "data.mdb").exists()
        if not isinstance(url_or_store, str) or not (isinstance(error, StoreError) or is_restored):
            return
        with self._locks[url_or_store]:
            if self._opened.get(url_or_store) is not store:
                return
            del self._opened[url_or_store]
        store.close()

    def stop_within(self, seconds: float) -> None:
        """Bound the wait for unavailable servers, because this process stops."""
        for store in list(self._opened.values()):
            if isinstance(store, OutageAwareStore):
                store.stop_within(seconds)

    def close(self) -> None:
        self._closed = True
        for url, lock in list(self._locks.items()):
            with lock:
                opened = self._opened.pop(url, None)
            if opened is not None:
                opened.close()
