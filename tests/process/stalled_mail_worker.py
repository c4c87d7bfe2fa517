"""A mail worker that stalls between its two commits: mail delivered to the peer, receipt not committed.

    python -m tests.process.stalled_mail_worker STORE PEER_URL

It prints `ready`, then `delivered N` after each commit in the peer store, and blocks until it is killed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from holdfast import store as stores
from holdfast.workers.mail import delivery
from holdfast.workers.runner_service import RunnerService
from tests.process.conftest import LIMITS

CLAIM_MS = 1_000


class HaltingStore:
    """A store client that blocks after each durable commit instead of returning the result."""

    def __init__(self, url: str) -> None:
        self._store = stores.open(url, bootstrap=False, limits=LIMITS)

    def transact(self, fn: Any, *args: Any) -> Any:
        replies = self._store.transact(fn, *args)
        print(f"delivered {len(replies)}", flush=True)
        os.read(0, 1)
        return replies

    def close(self) -> None:
        self._store.close()


def main(url: str, peer: str) -> None:
    # A test waits for the expiry of the claims of a killed worker.
    delivery.PEER_LEASE_MS = CLAIM_MS
    with stores.open(url, limits=LIMITS) as store:
        fabric = delivery.MailDelivery(
            store, universe="north", worker="courier", peers={"south": peer}, open=HaltingStore
        )
        role = RunnerService(fabric.runners)
        role.start()
        print("ready", flush=True)
        role.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
