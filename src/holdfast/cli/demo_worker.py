"""`holdfast demo-worker`: one worker process of the demo. It leaves when its standard input ends.

On its standard output it says, a JSON object a line, that it is ready, that it got the shop's lease,
and in the end what it did.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from typing import Any

from msgspec.structs import astuple

from holdfast.cli import demo_jobs
from holdfast.clock import MS, SYSTEM
from holdfast.durable import lease as leases
from holdfast.errors import HoldfastError
from holdfast.runner import Runner
from holdfast.store import open as open_store
from holdfast.store.api import Store

LEASE_TTL_NS = 1_500 * MS
RENEW_S = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", required=True)
    parser.add_argument("--name", required=True)


def run(args: argparse.Namespace) -> int:
    with open_store(args.store, bootstrap=False) as store:
        runner = Runner(
            store,
            demo_jobs.QUEUE,
            demo_jobs.handler(store, args.name),
            worker=args.name,
            timers=demo_jobs.TIMERS,
            policy=demo_jobs.POLICY,
        )
        leaving = threading.Event()
        keeper = threading.Thread(target=_keep_shop, args=(store, args.name, leaving), daemon=True)
        with runner:
            keeper.start()
            _say("ready")
            sys.stdin.read()
        leaving.set()
        keeper.join()
        metrics = runner.counters.snapshot()
        _say("left", attempts=metrics.attempts, requeues=metrics.requeues, lost=metrics.lost)
    return 0


def _keep_shop(store: Store, name: str, leaving: threading.Event) -> None:
    """Hold the shop's lease, or wait for it. Only one of the workers can."""
    incarnation = SYSTEM.entropy(4).hex()
    held: leases.Lease | None = None
    while not leaving.wait(RENEW_S if held else RENEW_S / 4):
        try:
            if held is None:
                held = store.transact(
                    leases.acquire, demo_jobs.SHOP, name, incarnation, LEASE_TTL_NS
                )
                _say("lease", lease=astuple(held))
            else:
                [held] = store.transact(leases.renew, [held], LEASE_TTL_NS)
        except HoldfastError:
            # Held by another, or the writer was killed just now: the next look tells. Acquiring
            # twice gives the same lease, so an answer that got lost does no harm.
            continue
    if held is not None:
        store.transact(leases.release, held)


def _say(event: str, **told: Any) -> None:
    print(json.dumps({"event": event, **told}), flush=True)
