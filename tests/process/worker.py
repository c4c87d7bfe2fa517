"""A worker that hammers one store until it is told to end, or is killed.

    python -m tests.process.worker STORE LOG NAME SEED

Three threads work: one under leases, one on a queue, one on counters, appends and a shared journal.
What the store acknowledged is written to LOG, which only grows: a line before each transaction
(`intend`), and one after it:

    acked      it is durable; nothing may ever lose it
    unknown    CommitUnknown: it may be there, once
    refused    any other error: nothing of it may be there

A line is one write to the file, so that SIGKILL leaves whole lines. `verdict` reads them.
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
from holdfast.store import probe
from holdfast.store.api import Store, Txn

LIMITS = WriterLimits(linger_s=1.0)
RESOURCES = ("north", "south", "east")
QUEUE = "work"
BUDGET = queue.Budget(failures_max=4, expiries_max=40)
COUNTERS = 3
SHARED = "shared"
# Where the worker keeps what the verdict counts against.
COUNT, MARK, LOG, DONE = (("chaos", name) for name in ("count", "mark", "log", "done"))
QUEUE_READY_MAX = 400


class Log:
    """Lines of one worker, and the names of its transactions."""

    def __init__(self, path: Path, name: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._name = name
        self._next = 0
        self._lock = threading.Lock()

    def name(self) -> str:
        with self._lock:
            self._next += 1
            return f"{self._name}.{self._next}"

    def write(self, how: str, what: str, id: str, **fields: Any) -> None:
        line = json.dumps([how, what, id, fields], default=msgspec.to_builtins) + "\n"
        os.write(self._fd, line.encode())


class Hand:
    """Does one transaction at a time and logs what became of it."""

    def __init__(self, store: Store, log: Log, name: str, seed: str) -> None:
        self.store = store
        self.log = log
        self.name = name
        self.random = random.Random(seed)

    def do(self, what: str, fn: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        """The result of a transaction `fn(txn, id, ...)`; raises what it ended with."""
        id = self.log.name()
        self.log.write("intend", what, id, **fields)
        try:
            result, told = self.store.transact(fn, id, *args)
        except CommitUnknown:
            self.log.write("unknown", what, id)
            raise
        except HoldfastError as error:
            self.log.write("refused", what, id, code=error.code, **fields)
            raise
        told = {name: getattr(value, "value", value) for name, value in told.items()}
        self.log.write("acked", what, id, **fields, **told)
        return getattr(result, "value", result)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def step(self) -> None:
        raise NotImplementedError


class Leaseholder(Hand):
    """Takes a lease, appends under it to the resource's journal, renews, releases, or oversleeps."""

    def step(self) -> None:
        resource = self.random.choice(RESOURCES)
        ttl_ns = self.random.randrange(150, 700) * MS
        try:
            held: lease.Lease = self.do("acquire", acquired, resource, self.name, ttl_ns)
        except Held as error:
            waits_s = (error.until_ns - self.store.now_ns()) / 1e9
            time.sleep(min(max(waits_s, 0.0), 0.05))
            return
        height = self.store.read(journal.head, resource).height
        try:
            for _ in range(self.random.randrange(1, 40)):
                if self.chance(0.02):
                    time.sleep(ttl_ns / 1e9)  # a hung worker: what it does next must be refused
                height = self._append(held, height)
                if self.chance(0.1):
                    self.do("renew", renewed, held, ttl_ns)
            if self.chance(0.7):
                self.do("release", released, held)
        except Fenced:
            with suppress(Fenced):
                self._append(held, height)  # stubborn: once fenced is fenced for ever

    def _append(self, held: lease.Lease, height: int) -> int:
        fields = {"resource": held.resource, "epoch": held.epoch}
        try:
            height = self.do("guarded", guarded, held, height, **fields)
        except HeadMoved:
            # A commit of unknown outcome, or the holder before: look, as a world's host would.
            return self.store.read(journal.head, held.resource).height
        return height


class Labourer(Hand):
    """Puts items, claims them, and acks, fails, gives back or forgets them."""

    _heard = 0

    def step(self) -> None:
        counts = self.store.read(queue.counts, QUEUE)
        if counts.ready < QUEUE_READY_MAX and self.chance(0.5):
            self.do("put", put, self.random.randrange(3))
        # Not logged: a claim that is not known to be held expires, and somebody else gets it.
        limit, ttl_ns = self.random.randrange(1, 6), self.random.choice((50, 300, 2000)) * MS
        claims = self.store.transact(queue.claim, QUEUE, self.name, limit, ttl_ns, BUDGET)
        if not claims:
            self._heard = self.store.wait(queue.topic(QUEUE), self._heard, 0.02)
        for claim in claims:
            with suppress(ClaimLost, CommitUnknown):
                self._end(claim)

    def _end(self, claim: queue.Claim) -> None:
        way = self.random.random()
        fields = {"seq": claim.seq, "number": claim.number}
        if way < 0.75:
            self.do("ack", acked, claim, **fields)
        elif way < 0.85:
            self.do("fail", failed, claim, self.random.choice((0, 20 * MS)), **fields)
        elif way < 0.95:
            self.do("give_back", given_back, claim, **fields)


class Clerk(Hand):
    """Counts, appends, and writes with everybody else to one journal without a lease."""

    def step(self) -> None:
        with suppress(CommitUnknown):
            self.do("count", counted, self.random.randrange(COUNTERS))
        with suppress(CommitUnknown):
            self.do("append", appended)
        if self.chance(0.3):
            with suppress(CommitUnknown):
                self.do("shared", shared)


# -- transactions: each answers (result, what the log is told) -------------------------------------

Told = tuple[Any, dict[str, Any]]


def acquired(txn: Txn, id: str, resource: str, name: str, ttl_ns: int) -> Told:
    # The whole name is worker and incarnation: a restarted worker is somebody else.
    worker, _, incarnation = name.partition("#")
    granted = lease.acquire(txn, resource, worker, incarnation, ttl_ns)
    return granted, {"lease": granted}


def renewed(txn: Txn, id: str, held: lease.Lease, ttl_ns: int) -> Told:
    lease.renew(txn, [held], ttl_ns)
    return None, {"resource": held.resource, "epoch": held.epoch}


def released(txn: Txn, id: str, held: lease.Lease) -> Told:
    return lease.release(txn, held), {"resource": held.resource, "epoch": held.epoch}


def guarded(txn: Txn, id: str, held: lease.Lease, height: int) -> Told:
    txn.require_live(held)
    body = json.dumps([id, held.epoch, held.worker, held.incarnation]).encode()
    now = journal.append(txn, held.resource, [body], expected_head=height)
    return now.height, {"height": now.height, "at_ns": probe.now(txn)}


def put(txn: Txn, id: str, priority: int) -> Told:
    seq = queue.put(txn, QUEUE, id.encode(), priority)
    return seq, {"seq": seq}


def acked(txn: Txn, id: str, claim: queue.Claim) -> Told:
    queue.ack(txn, [claim.token])
    return txn.append(DONE, json.dumps([claim.seq, claim.payload.decode(), id]).encode()), {}


def failed(txn: Txn, id: str, claim: queue.Claim, delay_ns: int) -> Told:
    end = queue.fail(txn, claim.token, "chaos", "told to", True, delay_ns, BUDGET)
    return end, {"end": end}


def given_back(txn: Txn, id: str, claim: queue.Claim) -> Told:
    return queue.release(txn, [claim.token]), {}


def counted(txn: Txn, id: str, counter: int) -> Told:
    txn.add((*COUNT, counter), 1)
    txn.put((*MARK, counter, id), b"")
    return None, {"counter": counter}


def appended(txn: Txn, id: str) -> Told:
    seq = txn.append(LOG, id.encode())
    return seq, {"seq": seq}


def shared(txn: Txn, id: str) -> Told:
    height = journal.head(txn, SHARED).height
    now = journal.append(txn, SHARED, [id.encode()], expected_head=height)
    return None, {"height": now.height}


# -- the process -----------------------------------------------------------------------------------


def work(hand: Hand, ending: threading.Event) -> None:
    try:
        while not ending.is_set():
            with suppress(CommitUnknown):
                hand.step()
    except BaseException:
        # One line for whoever watches, the rest for whoever reads; nobody hides a failure here.
        print("failed", type(hand).__name__, traceback.format_exc(), flush=True)
        os._exit(3)


def main(argv: list[str]) -> int:
    path, log_path, name, seed = argv
    try:
        store = stores.open(path, limits=LIMITS)
    except HoldfastError as error:
        print("failed to open:", type(error).__name__, error, flush=True)
        return 2
    print("ready", flush=True)
    log = Log(Path(log_path), name)
    ending = threading.Event()
    hands = [
        kind(store, log, name, f"{seed} {kind.__name__}") for kind in (Leaseholder, Labourer, Clerk)
    ]
    threads = [threading.Thread(target=work, args=(hand, ending), daemon=True) for hand in hands]
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
