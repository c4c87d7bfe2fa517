"""Background lease renewal for long work that commits nothing, such as deleting the objects of a
spool.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from holdfast.durable import lease
from holdfast.errors import HoldfastError
from holdfast.store.api import Store


@contextlib.contextmanager
def renew_in_background(store: Store, run_lease: lease.Lease, ttl_ns: int) -> Iterator[None]:
    """Renew the lease four times per TTL in a thread while the context is open."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(ttl_ns / 4e9):
            with contextlib.suppress(HoldfastError):
                store.transact(lease.renew, [run_lease], ttl_ns)

    thread = threading.Thread(target=renew, name="lease-renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
