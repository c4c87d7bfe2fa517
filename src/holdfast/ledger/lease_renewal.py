"""Keeps a lease alive while its holder does something that takes long and commits nothing: spools have many objects."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from holdfast.durable import lease
from holdfast.errors import HoldfastError
from holdfast.store.api import Store


@contextlib.contextmanager
def renewed(store: Store, held: lease.Lease, ttl_ns: int) -> Iterator[None]:
    """Renew the lease four times in its time, in a thread, while this lasts."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(ttl_ns / 4e9):
            with contextlib.suppress(HoldfastError):
                store.transact(lease.renew, [held], ttl_ns)

    thread = threading.Thread(target=renew, name="renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
