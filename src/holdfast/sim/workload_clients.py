"""Actors without a lease: producers that feed inboxes, clerks that share rows.

A producer has a key for what it sends, so it may send it again until it knows. Clerks have nothing
but the store's transactions to keep them apart: they are there to lose updates, if any can be lost.
"""

from __future__ import annotations

from holdfast.clock import S
from holdfast.durable import inbox, journal
from holdfast.errors import (
    CommitUnknown,
    Conflict,
    KeyConflict,
    KeyExpired,
    StoreFull,
    StoreReplaced,
)
from holdfast.sim.actor import Actor, Life
from holdfast.sim.settings import HORIZON_NS
from holdfast.store import schema, tuples
from holdfast.store.api import Txn

# A body above the blob threshold, always the same one: one blob, many references.
LARGE = b"in" + b"." * 5000


class Producer(Actor):
    """Sends keyed ingress, again and again until it knows, and remembers that across crashes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0
        self.pending: tuple[str, str | None, bytes, int | None, int] | None = None
        self.issued: tuple[str, str, bytes, int] | None = None

    def idle(self) -> bool:
        return self.pending is None

    def live(self, life: Life) -> None:
        while True:
            if self.pending is None:
                if life.calm:
                    life.sleep(S)
                    continue
                self.pending = self._new(life)
            world, key, body, issued_ns, since_ns = self.pending
            if life.store.now_ns() - since_ns > HORIZON_NS:
                life.seen("producer gave up")
                self.pending = None
                continue
            try:
                if issued_ns is None and life.tape.chance(200):
                    # Twice in one: the second finds the first.
                    life.store.transact(inbox.put_many, [(world, key, body)] * 2)
                else:
                    life.store.transact(inbox.put, world, key, body, issued_ns)
            except (CommitUnknown, StoreFull, Conflict):
                if key is None:
                    self.pending = None  # without a key nobody can tell: at most once
                life.rest(ms=100)
                continue
            except StoreReplaced:
                life.store.reopen()
                self.pending = None
                continue
            except (KeyConflict, KeyExpired):
                life.seen("key refused")
            self.pending = None
            if key is not None and issued_ns is not None:
                self.issued = (world, key, body, issued_ns)
            if key is not None and life.tape.chance(250):
                mistaken = life.tape.chance(500)
                self._again(life, world, key, b"other" if mistaken else body, issued_ns)
            elif self.issued is not None and life.tape.chance(200):
                # A message of the system's that was under way for a long time.
                self._again(life, *self.issued)
            life.rest(ms=250)

    def _new(self, life: Life) -> tuple[str, str | None, bytes, int | None, int]:
        self.sent += 1
        world = f"w{life.tape.draw(life.settings.worlds)}"
        kind = life.tape.draw(10)
        key = None if kind == 1 else f"{self.name}-{self.sent}"
        body = (b"fx" if kind in (2, 3, 4) else b"in") + f"/{self.name}/{self.sent}".encode()
        if kind == 5:
            body = LARGE
        now_ns = life.store.now_ns()
        return world, key, body, now_ns if kind == 6 else None, now_ns

    def _again(self, life: Life, world: str, key: str, body: bytes, issued_ns: int | None) -> None:
        """A doubled message, or the same key by mistake for something else."""
        try:
            life.store.transact(inbox.put, world, key, body, issued_ns)
        except (KeyConflict, KeyExpired, CommitUnknown, StoreFull, Conflict):
            pass
        except StoreReplaced:
            life.store.reopen()


REGISTER = (int(schema.Space.APP_STATE), "sim", "register")


def open_append(txn: Txn, subject: str, body: bytes) -> int:
    """Append on the head of the snapshot: safe only if the commit validates what was read."""
    height = journal.head(txn, subject).height
    return journal.append(txn, subject, [body], expected_head=height).height


def open_register(txn: Txn, subject: str) -> int:
    """The next number by looking at the last row: safe only if ranges are validated, too."""
    prefix = tuples.pack((*REGISTER, subject))
    rows = txn.scan(prefix, tuples.after(prefix), 1, reverse=True)
    number = 1 + (tuples.unpack_last_int(rows[0][0], len(prefix)) if rows else 0)
    txn.put(prefix + tuples.pack_int(number), b"")
    return number


class Clerk(Actor):
    """Writes what others write, too, with nothing but the store's transactions to keep order."""

    def live(self, life: Life) -> None:
        while True:
            if life.calm:
                life.sleep(S)
                continue
            try:
                if life.tape.draw(2):
                    life.store.transact(open_register, "numbers")
                else:
                    life.store.transact(open_append, "ledger", self.name.encode())
            except (CommitUnknown, StoreFull, Conflict):
                life.seen("clerk refused")
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=120)
