"""One worker process of part 1: `python -m examples.demo.worker`. It shuts down when its stdin closes.

It writes JSON objects to stdout, one per line: when it is ready, when it acquires the shop's lease,
and its counters at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
from typing import Any

from msgspec.structs import astuple

from examples.demo import orders
from holdfast.clock import MS, SYSTEM
from holdfast.durable import lease as leases
from holdfast.errors import HoldfastError
from holdfast.runner import Runner
from holdfast.store import open as open_store
from holdfast.store.api import Store

LEASE_TTL_NS = 1_500 * MS
RENEW_S = 0.2


def run(args: argparse.Namespace) -> None:
    with open_store(args.store, bootstrap=False) as store:
        runner = Runner(
            store,
            orders.QUEUE,
            orders.handler(store, args.name),
            worker=args.name,
            timers=orders.TIMERS,
            policy=orders.POLICY,
        )
        stopping = threading.Event()
        lease_thread = threading.Thread(
            target=_hold_lease, args=(store, args.name, stopping), daemon=True
        )
        with runner:
            lease_thread.start()
            _write_event("ready")
            sys.stdin.read()
        stopping.set()
        lease_thread.join()
        metrics = runner.counters.snapshot()
        _write_event(
            "left", attempts=metrics.attempts, requeues=metrics.requeues, lost=metrics.lost
        )


def _hold_lease(store: Store, name: str, stopping: threading.Event) -> None:
    """Acquire the shop's lease, renew it until the stop, release it. Retry while another worker holds it."""
    incarnation = SYSTEM.entropy(4).hex()
    lease: leases.Lease | None = None
    while not stopping.wait(RENEW_S if lease else RENEW_S / 4):
        try:
            if lease is None:
                got = store.transact(leases.acquire, orders.SHOP, name, incarnation, LEASE_TTL_NS)
                _write_event("lease", lease=astuple(got))
                lease = got
            else:
                [lease] = store.transact(leases.renew, [lease], LEASE_TTL_NS)
        except HoldfastError:
            # Another worker holds it, or the writer was just killed: retry. Acquiring twice returns
            # the same lease, so a lost answer does no harm.
            continue
    if lease is not None:
        store.transact(leases.release, lease)


def _write_event(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    # The demo prints the dead letter and the lost claims itself.
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--name", required=True)
    run(parser.parse_args())
