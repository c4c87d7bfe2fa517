"""Actors around worlds: hosts that work under a lease, producers that feed inboxes.

A host's cycle is the shape of every guarded writer to come: look, compute outside the transaction,
then commit cursor, journal entries and effects in one, under the lease and the expected head.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from holdfast.clock import MS
from holdfast.durable import inbox, journal, lease, queue, snapshot
from holdfast.durable.lease import Lease
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    Fenced,
    HeadMoved,
    Held,
    StoreFull,
    StoreReplaced,
)
from holdfast.sim.actor import Actor, Halted, Life
from holdfast.sim.check_world import fold
from holdfast.sim.settings import LEASE_NS, PROGRESS_NS
from holdfast.store.api import Txn

Ingress = list[tuple[int, str | None, bytes]]

BATCH = 4
SWEEP_MAX = 4
SNAPSHOTS_KEPT = 1
# Bodies above the blob threshold, now and then.
LARGE = 5000


# -- transactions of a host ----------------------------------------------------------------------


def host_cycle(
    txn: Txn, lease: Lease, world: str, expected_head: int, ingress: Ingress, effects: list[bytes]
) -> None:
    """Drain, append, publish: one transaction."""
    txn.require_live(lease)
    bodies = [entry_of(item) for item in ingress]
    journal.append(txn, world, bodies, expected_head=expected_head)
    inbox.advance(txn, world, ingress[-1][0])
    if effects:
        queue.put_many(txn, "fx", effects)


def save_snapshot(
    txn: Txn, lease: Lease, world: str, height: int, state: bytes, baseline: bool
) -> None:
    txn.require_live(lease)
    found = journal.head(txn, world).height
    if found != height:
        raise HeadMoved(subject=world, expected=height, found=found)
    snapshot.save(txn, world, height, state)
    if baseline:
        snapshot.set_baseline(txn, world, height)
        journal.checkpoint(txn, world, height)


def truncate_journal(txn: Txn, lease: Lease, world: str, limit: int) -> None:
    txn.require_live(lease)
    journal.truncate(txn, world, limit)


def compact_journal(txn: Txn, lease: Lease, world: str, limit: int) -> None:
    txn.require_live(lease)
    journal.compact(txn, world, limit)


def prune_snapshots(txn: Txn, lease: Lease, world: str, keep: int) -> None:
    txn.require_live(lease)
    snapshot.prune(txn, world, keep)


def restore_world(txn: Txn, world: str) -> tuple[int, bytes]:
    """Height and state: the baseline, and the journal after it."""
    base = snapshot.baseline(txn, world)
    height = 0 if base is None else base.height
    state = b"" if base is None else snapshot.load(txn, world, height)
    head = journal.head(txn, world).height
    for entry in journal.read(txn, world, height + 1, head + 1, 10_000):
        state = fold(state, entry.body)
    return head, state


def drain(txn: Txn, world: str) -> Ingress:
    return [(item.seq, item.key, item.body) for item in inbox.read(txn, world, BATCH)]


def entry_of(item: tuple[int, str | None, bytes]) -> bytes:
    return msgspec.msgpack.encode(list(item))


class Host(Actor):
    """A worker that serves whichever world it gets a lease on."""

    def live(self, life: Life) -> None:
        worlds = [f"w{n}" for n in range(life.settings.worlds)]
        former: Lease | None = None
        for turn in itertools.count():
            world = life.tape.pick(worlds, turn)
            try:
                held = life.store.transact(
                    lease.acquire, world, self.name, life.incarnation, LEASE_NS
                )
            except Held:
                life.rest(ms=600)
                continue
            except (CommitUnknown, StoreFull, Conflict):
                life.rest(ms=50)
                continue
            except StoreReplaced:
                life.store.reopen()
                continue
            _Service(life, world, held, former).serve()
            former = held
            life.rest(ms=100)


class _Service:
    """A host's work on one world under one lease."""

    def __init__(self, life: Life, world: str, held: Lease, former: Lease | None) -> None:
        self.life = life
        self.world = world
        self.held = held
        self.former = former
        self.heard = 0
        self.height = 0
        self.state = b""
        self.known = False  # whether height and state are what the store has
        self.progress()

    def progress(self) -> None:
        self.progress_ns = self.life.clock.mono_ns()
        self.life.note("progress", boot_ns=self.progress_ns)

    def serve(self) -> None:
        for _ in range(3 + self.life.tape.draw(12)):
            try:
                if self.act():
                    return
            except (CommitUnknown, HeadMoved, Conflict):
                self.known = False
            except StoreFull:
                self.life.rest(ms=100)
            except StoreReplaced:
                # The process lives on, with a lease of the generation that is gone.
                self.life.store.reopen()
                self.known = False
            except Fenced:
                self.halt()

    def act(self) -> bool:
        """One step; True when the lease was given back."""
        if not self.known:
            self.height, self.state = self.life.store.read(restore_world, self.world)
            self.known = True
        choice = self.life.tape.draw(16)
        if choice < 8:
            self.cycle()
        elif choice < 11:
            self.renew()
        elif choice == 11 and self.height:
            self.transact(save_snapshot, self.height, self.state, self.life.tape.chance(600))
        elif choice == 12:
            sweep = truncate_journal if self.life.tape.draw(2) else compact_journal
            self.transact(sweep, 1 + self.life.tape.draw(SWEEP_MAX))
        elif choice == 13:
            self.transact(prune_snapshots, SNAPSHOTS_KEPT)
        elif choice == 14 and not self.life.calm:
            self.life.sleep((200 + self.life.tape.draw(3000)) * MS)
        elif choice == 15:
            self.life.store.transact(lease.release, self.held)
            return True
        return False

    def cycle(self) -> None:
        ingress = self.life.store.read(drain, self.world)
        if not ingress:
            self.heard = self.life.store.wait(inbox.topic(self.world), self.heard, 0.3)
            return
        effects = [
            msgspec.msgpack.encode([self.world, self.height + 1 + index, index])
            for index, (_, _, body) in enumerate(ingress)
            if body[:2] == b"fx"
        ]
        try:
            self.transact(host_cycle, self.height, ingress, effects)
        except CommitUnknown:
            if self.life.tape.chance(500):
                raise
            # Not looking first is what `expected_head` is there for.
            self.transact(host_cycle, self.height, ingress, effects)
        for item in ingress:
            self.state = fold(self.state, entry_of(item))
        self.height += len(ingress)
        self.progress()

    def renew(self) -> None:
        """Only a loop that gets on keeps its lease."""
        now_ns = self.life.clock.mono_ns()
        if now_ns - self.progress_ns > PROGRESS_NS:
            self.life.seen("renewal withheld for lack of progress")
            self.life.store.read(drain, self.world)
            self.progress()  # looking at the inbox is progress, too
            return
        self.life.note("renewing", boot_ns=now_ns)
        leases = [self.held]
        if self.former is not None and self.life.tape.chance(300):
            leases.append(self.former)  # perhaps long gone: each is answered for itself
        renewed = self.life.store.transact(lease.renew, leases, LEASE_NS)[0]
        if renewed is None:
            self.life.seen("renewal refused")
            self.halt()
        self.held = renewed

    def transact(self, fn: Any, *args: Any) -> None:
        self.life.store.transact(fn, self.held, self.world, *args)

    def halt(self) -> None:
        """Fenced: stop. At times, a buggy host that does not, which the store must refuse."""
        self.life.seen("host fenced")
        if self.life.tape.chance(300):
            for _ in range(2):
                try:
                    self.life.rest(ms=800)
                    head, _ = self.life.store.read(restore_world, self.world)
                    ingress = self.life.store.read(drain, self.world)
                    if ingress:
                        self.transact(host_cycle, head, ingress, [])
                    else:
                        self.transact(truncate_journal, 1)
                except (Fenced, CommitUnknown, Conflict, StoreFull, HeadMoved):
                    self.life.seen("stubborn host refused")
                except StoreReplaced:
                    self.life.store.reopen()
        raise Halted
