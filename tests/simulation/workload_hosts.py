"""Actors of primitives: hosts that process an inbox under a lease.

A host's cycle has the shape of every guarded writer: read, compute outside the transaction, then
commit cursor, journal entries and effects in one transaction, guarded by the lease and the expected
head.
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
from holdfast.sim.actor import Actor, Incarnation, ProcessHalted
from holdfast.sim.settings import LEASE_NS, PROGRESS_NS
from holdfast.store.api import Txn
from tests.simulation.check_journals import fold

Ingress = list[tuple[int, str | None, bytes]]

BATCH = 4
SWEEP_MAX = 4
SNAPSHOTS_KEPT = 1
# Size of bodies above the blob threshold.
LARGE = 5000


# -- transactions of a host ----------------------------------------------------------------------


def host_cycle(
    txn: Txn, lease: Lease, world: str, expected_head: int, ingress: Ingress, effects: list[bytes]
) -> None:
    """Advance the inbox, append entries and publish effects in one transaction."""
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
    """Return height and state: the baseline snapshot plus the journal after it."""
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


class HostActor(Actor):
    """A worker that serves any world it gets a lease on."""

    def run_process(self, incarnation: Incarnation) -> None:
        worlds = [f"w{n}" for n in range(incarnation.settings.worlds)]
        previous: Lease | None = None
        for turn in itertools.count():
            world = incarnation.tape.pick(worlds, turn)
            try:
                current = incarnation.store.transact(
                    lease.acquire, world, self.name, incarnation.incarnation_id, LEASE_NS
                )
            except Held:
                incarnation.pause(ms=600)
                continue
            except (CommitUnknown, StoreFull, Conflict):
                incarnation.pause(ms=50)
                continue
            except StoreReplaced:
                incarnation.store.reopen()
                continue
            _HostLease(incarnation, world, current, previous).serve()
            previous = current
            incarnation.pause(ms=100)


class _HostLease:
    """Work of a host on one world under one lease."""

    def __init__(
        self, incarnation: Incarnation, world: str, lease: Lease, former_lease: Lease | None
    ) -> None:
        self.incarnation = incarnation
        self.world = world
        self.lease = lease
        self.former_lease = former_lease
        self.last_commit_no = 0
        self.height = 0
        self.state = b""
        self.is_current = False  # whether height and state are current
        self.note_progress()

    def note_progress(self) -> None:
        self.progress_ns = self.incarnation.clock.mono_ns()
        self.incarnation.record("progress", boot_ns=self.progress_ns)

    def serve(self) -> None:
        for _ in range(3 + self.incarnation.tape.draw(12)):
            try:
                if self.step():
                    return
            except (CommitUnknown, HeadMoved, Conflict):
                self.is_current = False
            except StoreFull:
                self.incarnation.pause(ms=100)
            except StoreReplaced:
                # The process continues with a lease of the former generation.
                self.incarnation.store.reopen()
                self.is_current = False
            except Fenced:
                self.halt()

    def step(self) -> bool:
        """Take one step. True after releasing the lease."""
        if not self.is_current:
            self.height, self.state = self.incarnation.store.read(restore_world, self.world)
            self.is_current = True
        choice = self.incarnation.tape.draw(16)
        if choice < 8:
            self.cycle()
        elif choice < 11:
            self.renew()
        elif choice == 11 and self.height:
            self.transact(save_snapshot, self.height, self.state, self.incarnation.tape.chance(600))
        elif choice == 12:
            sweep = truncate_journal if self.incarnation.tape.draw(2) else compact_journal
            self.transact(sweep, 1 + self.incarnation.tape.draw(SWEEP_MAX))
        elif choice == 13:
            self.transact(prune_snapshots, SNAPSHOTS_KEPT)
        elif choice == 14 and not self.incarnation.faults_stopped:
            self.incarnation.sleep((200 + self.incarnation.tape.draw(3000)) * MS)
        elif choice == 15:
            self.incarnation.store.transact(lease.release, self.lease)
            return True
        return False

    def cycle(self) -> None:
        ingress = self.incarnation.store.read(drain, self.world)
        if not ingress:
            self.last_commit_no = self.incarnation.store.wait(
                inbox.topic(self.world), self.last_commit_no, 0.3
            )
            return
        effects = [
            msgspec.msgpack.encode([self.world, self.height + 1 + index, index])
            for index, (_, _, body) in enumerate(ingress)
            if body[:2] == b"fx"
        ]
        try:
            self.transact(host_cycle, self.height, ingress, effects)
        except CommitUnknown:
            if self.incarnation.tape.chance(500):
                raise
            # Retry without reading first: `expected_head` protects against a duplicate.
            self.transact(host_cycle, self.height, ingress, effects)
        for item in ingress:
            self.state = fold(self.state, entry_of(item))
        self.height += len(ingress)
        self.note_progress()

    def renew(self) -> None:
        """Renew the lease only after recent progress."""
        now_ns = self.incarnation.clock.mono_ns()
        if now_ns - self.progress_ns > PROGRESS_NS:
            self.incarnation.count_coverage("renewal withheld for lack of progress")
            self.incarnation.store.read(drain, self.world)
            self.note_progress()  # reading the inbox counts as progress
            return
        self.incarnation.record("renewing", boot_ns=now_ns)
        leases = [self.lease]
        if self.former_lease is not None and self.incarnation.tape.chance(300):
            leases.append(
                self.former_lease
            )  # perhaps expired: each lease is answered independently
        renewed = self.incarnation.store.transact(lease.renew, leases, LEASE_NS)[0]
        if renewed is None:
            self.incarnation.count_coverage("renewal refused")
            self.halt()
        self.lease = renewed

    def transact(self, fn: Any, *args: Any) -> None:
        self.incarnation.store.transact(fn, self.lease, self.world, *args)

    def halt(self) -> None:
        """Stop after being fenced. At times simulate a buggy host that continues, which the store
        must refuse."""
        self.incarnation.count_coverage("host fenced")
        if self.incarnation.tape.chance(300):
            for _ in range(2):
                try:
                    self.incarnation.pause(ms=800)
                    head, _ = self.incarnation.store.read(restore_world, self.world)
                    ingress = self.incarnation.store.read(drain, self.world)
                    if ingress:
                        self.transact(host_cycle, head, ingress, [])
                    else:
                        self.transact(truncate_journal, 1)
                except (Fenced, CommitUnknown, Conflict, StoreFull, HeadMoved):
                    self.incarnation.count_coverage("stubborn host refused")
                except StoreReplaced:
                    self.incarnation.store.reopen()
        raise ProcessHalted
