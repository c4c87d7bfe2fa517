"""A load worker: commits to one store until it reads a line from stdin or is killed.

    python -m tests.process.load_worker STORE LOG NAME SEED

Three threads commit: one under leases, one on a queue, one to counters, appends and a shared journal.
The worker appends to LOG one line before each transaction (`intend`) and one after it:

    acked      the commit is durable and must not be lost
    unknown    CommitUnknown: the commit is applied at most once
    refused    any other error: the commit must not be applied

Each line is one write, so that SIGKILL leaves whole lines. `invariant_checks` reads them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast import store as stores
from holdfast.clock import MS
from holdfast.config import WriterLimits
from holdfast.durable import journal, lease, queue
from holdfast.errors import (
    ClaimLost,
    CommitUnknown,
    Fenced,
    HeadMoved,
    Held,
    HoldfastError,
)
from holdfast.store.api import Store, Txn
from tests import probe_operations
from tests.probe_writer import start_probe_writers

LIMITS = WriterLimits(idle_exit_s=1.0)
RESOURCES = ("north", "south", "east")
QUEUE = "work"
BUDGET = queue.RetryBudget(failures_max=4, expiries_max=40)
COUNTERS = 3
SHARED = "shared"
# Key spaces that `invariant_checks` compares with the logs.
COUNT, MARK, LOG, DONE = (("chaos", name) for name in ("count", "mark", "log", "done"))
QUEUE_READY_MAX = 400


class TransactionLog:
    """The log file of one worker, and the ids of its transactions."""

    def __init__(self, path: Path, name: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._name = name
        self._next = 0
        self._lock = threading.Lock()

    def next_id(self) -> str:
        with self._lock:
            self._next += 1
            return f"{self._name}.{self._next}"

    def write(self, outcome: str, operation: str, id: str, **fields: Any) -> None:
        line = json.dumps([outcome, operation, id, fields], default=msgspec.to_builtins) + "\n"
        os.write(self._fd, line.encode())


class TransactionLoad:
    """Runs one transaction at a time and logs its outcome."""

    def __init__(self, store: Store, log: TransactionLog, name: str, seed: str) -> None:
        self.store = store
        self.log = log
        self.name = name
        self.random = random.Random(seed)

    def run(self, operation: str, fn: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        """Run a transaction `fn(txn, id, ...)`, log its outcome, and return its result or raise its error."""
        id = self.log.next_id()
        self.log.write("intend", operation, id, **fields)
        try:
            result, logged = self.store.transact(fn, id, *args)
        except CommitUnknown:
            self.log.write("unknown", operation, id)
            raise
        except HoldfastError as error:
            self.log.write("refused", operation, id, code=error.code, **fields)
            raise
        logged = {name: getattr(value, "value", value) for name, value in logged.items()}
        self.log.write("acked", operation, id, **fields, **logged)
        return getattr(result, "value", result)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def step(self) -> None:
        raise NotImplementedError


class LeaseLoad(TransactionLoad):
    """Acquires a lease, appends to the resource's journal under it, renews, releases, or lets it expire."""

    def step(self) -> None:
        resource = self.random.choice(RESOURCES)
        ttl_ns = self.random.randrange(150, 700) * MS
        try:
            granted: lease.Lease = self.run("acquire", acquired, resource, self.name, ttl_ns)
        except Held as error:
            waits_s = (error.until_ns - self.store.now_ns()) / 1e9
            time.sleep(min(max(waits_s, 0.0), 0.05))
            return
        height = self.store.read(journal.head, resource).height
        try:
            for _ in range(self.random.randrange(1, 40)):
                if self.chance(0.02):
                    time.sleep(ttl_ns / 1e9)  # a hung worker: its next append must be refused
                height = self._append(granted, height)
                if self.chance(0.1):
                    self.run("renew", renewed, granted, ttl_ns)
            if self.chance(0.7):
                self.run("release", released, granted)
        except Fenced:
            with suppress(Fenced):
                self._append(granted, height)  # a fenced lease stays fenced

    def _append(self, granted: lease.Lease, height: int) -> int:
        fields = {"resource": granted.resource, "epoch": granted.epoch}
        try:
            height = self.run("guarded", guarded, granted, height, **fields)
        except HeadMoved:
            # An unknown commit or the former holder moved the head: read it again.
            return self.store.read(journal.head, granted.resource).height
        return height


class QueueLoad(TransactionLoad):
    """Puts items, claims them, and acks, fails, releases or abandons them."""

    _seen_version = 0

    def step(self) -> None:
        counts = self.store.read(queue.counts, QUEUE)
        if counts.ready < QUEUE_READY_MAX and self.chance(0.5):
            self.run("put", put, self.random.randrange(3))
        # Claims are not logged: an abandoned claim expires and the item is claimed again.
        limit, ttl_ns = self.random.randrange(1, 6), self.random.choice((50, 300, 2000)) * MS
        claims = self.store.transact(queue.claim, QUEUE, self.name, limit, ttl_ns, BUDGET)
        if not claims:
            self._seen_version = self.store.wait(queue.topic(QUEUE), self._seen_version, 0.02)
        for claim in claims:
            with suppress(ClaimLost, CommitUnknown):
                self._end(claim)

    def _end(self, claim: queue.Claim) -> None:
        choice = self.random.random()
        fields = {"seq": claim.seq, "number": claim.number}
        if choice < 0.75:
            self.run("ack", acked, claim, **fields)
        elif choice < 0.85:
            self.run("fail", failed, claim, self.random.choice((0, 20 * MS)), **fields)
        elif choice < 0.95:
            self.run("give_back", given_back, claim, **fields)


class CounterLoad(TransactionLoad):
    """Adds to counters, appends, and writes to a journal shared by all workers without a lease."""

    def step(self) -> None:
        with suppress(CommitUnknown):
            self.run("count", counted, self.random.randrange(COUNTERS))
        with suppress(CommitUnknown):
            self.run("append", appended)
        if self.chance(0.3):
            with suppress(CommitUnknown):
                self.run("shared", shared)


# -- transactions: each returns (result, fields for the log) ---------------------------------------

LoggedResult = tuple[Any, dict[str, Any]]


def acquired(txn: Txn, id: str, resource: str, name: str, ttl_ns: int) -> LoggedResult:
    # The full name is WORKER#INCARNATION: a restarted worker is a different lease holder.
    worker, _, incarnation = name.partition("#")
    granted = lease.acquire(txn, resource, worker, incarnation, ttl_ns)
    return granted, {"lease": granted}


def renewed(txn: Txn, id: str, granted: lease.Lease, ttl_ns: int) -> LoggedResult:
    lease.renew(txn, [granted], ttl_ns)
    return None, {"resource": granted.resource, "epoch": granted.epoch}


def released(txn: Txn, id: str, granted: lease.Lease) -> LoggedResult:
    return lease.release(txn, granted), {"resource": granted.resource, "epoch": granted.epoch}


def guarded(txn: Txn, id: str, granted: lease.Lease, height: int) -> LoggedResult:
    txn.require_live(granted)
    body = json.dumps([id, granted.epoch, granted.worker, granted.incarnation]).encode()
    now = journal.append(txn, granted.resource, [body], expected_head=height)
    return now.height, {"height": now.height, "at_ns": probe_operations.now(txn)}


def put(txn: Txn, id: str, priority: int) -> LoggedResult:
    seq = queue.put(txn, QUEUE, id.encode(), priority)
    return seq, {"seq": seq}


def acked(txn: Txn, id: str, claim: queue.Claim) -> LoggedResult:
    queue.ack(txn, [claim.token])
    return txn.append(DONE, json.dumps([claim.seq, claim.payload.decode(), id]).encode()), {}


def failed(txn: Txn, id: str, claim: queue.Claim, delay_ns: int) -> LoggedResult:
    end = queue.fail(txn, claim.token, "chaos", "told to", True, delay_ns, BUDGET)
    return end, {"end": end}


def given_back(txn: Txn, id: str, claim: queue.Claim) -> LoggedResult:
    return queue.release(txn, [claim.token]), {}


def counted(txn: Txn, id: str, counter: int) -> LoggedResult:
    txn.add((*COUNT, counter), 1)
    txn.put((*MARK, counter, id), b"")
    return None, {"counter": counter}


def appended(txn: Txn, id: str) -> LoggedResult:
    seq = txn.append(LOG, id.encode())
    return seq, {"seq": seq}


def shared(txn: Txn, id: str) -> LoggedResult:
    height = journal.head(txn, SHARED).height
    now = journal.append(txn, SHARED, [id.encode()], expected_head=height)
    return None, {"height": now.height}


# -- the process -----------------------------------------------------------------------------------


def run_load(load: TransactionLoad, ending: threading.Event) -> None:
    try:
        while not ending.is_set():
            with suppress(CommitUnknown):
                load.step()
    except BaseException:
        # The parent process reads this output. Any failure ends the worker.
        print("failed", type(load).__name__, traceback.format_exc(), flush=True)
        os._exit(3)


def main(argv: list[str]) -> int:
    path, log_path, name, seed = argv
    start_probe_writers()
    try:
        store = stores.open(path, limits=LIMITS)
    except HoldfastError as error:
        print("failed to open:", type(error).__name__, error, flush=True)
        return 2
    print("ready", flush=True)
    log = TransactionLog(Path(log_path), name)
    ending = threading.Event()
    loads = [
        kind(store, log, name, f"{seed} {kind.__name__}")
        for kind in (LeaseLoad, QueueLoad, CounterLoad)
    ]
    threads = [
        threading.Thread(target=run_load, args=(hand, ending), daemon=True) for hand in loads
    ]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    ending.set()
    for thread in threads:
        thread.join()
    store.close()
    print("ended", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
