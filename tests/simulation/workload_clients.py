"""Actors without a lease: producers that fill inboxes, and key-value clients that share rows.

A producer sends with a key, so it may resend until it knows the outcome. Key-value clients have
only the store's transactions to isolate them. They detect lost updates.
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
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.settings import RESEND_HORIZON_NS
from holdfast.store import schema, tuples
from holdfast.store.api import Txn

# A body above the blob threshold, always the same: one blob with many references.
LARGE = b"in" + b"." * 5000


class InboxProducer(Actor):
    """Sends keyed ingress, resends until it knows the outcome, and remembers pending messages
    across crashes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0
        self.pending: tuple[str, str | None, bytes, int | None, int] | None = None
        self.issued: tuple[str, str, bytes, int] | None = None

    def is_idle(self) -> bool:
        return self.pending is None

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            if self.pending is None:
                if incarnation.faults_stopped:
                    incarnation.sleep(S)
                    continue
                self.pending = self._draw_message(incarnation)
            world, key, body, issued_ns, since_ns = self.pending
            if incarnation.store.now_ns() - since_ns > RESEND_HORIZON_NS:
                incarnation.count_coverage("producer gave up")
                self.pending = None
                continue
            try:
                if issued_ns is None and incarnation.tape.chance(200):
                    # Twice in one transaction: the second put finds the first.
                    incarnation.store.transact(inbox.put_many, [(world, key, body)] * 2)
                else:
                    incarnation.store.transact(inbox.put, world, key, body, issued_ns)
            except (CommitUnknown, StoreFull, Conflict):
                if key is None:
                    self.pending = None  # without a key it cannot resend: at most once
                incarnation.pause(ms=100)
                continue
            except StoreReplaced:
                incarnation.store.reopen()
                self.pending = None
                continue
            except (KeyConflict, KeyExpired):
                incarnation.count_coverage("key refused")
            self.pending = None
            if key is not None and issued_ns is not None:
                self.issued = (world, key, body, issued_ns)
            if key is not None and incarnation.tape.chance(250):
                mistaken = incarnation.tape.chance(500)
                self._send_duplicate(
                    incarnation, world, key, b"other" if mistaken else body, issued_ns
                )
            elif self.issued is not None and incarnation.tape.chance(200):
                # A message issued by the runtime that was in flight for a long time.
                self._send_duplicate(incarnation, *self.issued)
            incarnation.pause(ms=250)

    def _draw_message(
        self, incarnation: Incarnation
    ) -> tuple[str, str | None, bytes, int | None, int]:
        self.sent += 1
        world = f"w{incarnation.tape.draw(incarnation.settings.worlds)}"
        kind = incarnation.tape.draw(10)
        key = None if kind == 1 else f"{self.name}-{self.sent}"
        body = (b"fx" if kind in (2, 3, 4) else b"in") + f"/{self.name}/{self.sent}".encode()
        if kind == 5:
            body = LARGE
        now_ns = incarnation.store.now_ns()
        return world, key, body, now_ns if kind == 6 else None, now_ns

    def _send_duplicate(
        self, incarnation: Incarnation, world: str, key: str, body: bytes, issued_ns: int | None
    ) -> None:
        """Send a duplicate, or reuse the key for another body by mistake."""
        try:
            incarnation.store.transact(inbox.put, world, key, body, issued_ns)
        except (KeyConflict, KeyExpired, CommitUnknown, StoreFull, Conflict):
            pass
        except StoreReplaced:
            incarnation.store.reopen()


REGISTER = (int(schema.Space.APP_STATE), "sim", "register")


def open_append(txn: Txn, subject: str, body: bytes) -> int:
    """Append at the head of the snapshot. Safe only if the commit validates the rows read."""
    height = journal.head(txn, subject).height
    return journal.append(txn, subject, [body], expected_head=height).height


def open_register(txn: Txn, subject: str) -> int:
    """Take the next number after the last row. Safe only if the commit validates ranges, too."""
    prefix = tuples.pack((*REGISTER, subject))
    rows = txn.scan(prefix, tuples.prefix_end(prefix), 1, reverse=True)
    number = 1 + (tuples.unpack_last_int(rows[0][0], len(prefix)) if rows else 0)
    txn.put(prefix + tuples.pack_int(number), b"")
    return number


class KeyValueClient(Actor):
    """Writes rows shared with other clients, isolated only by the store's transactions."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            if incarnation.faults_stopped:
                incarnation.sleep(S)
                continue
            try:
                if incarnation.tape.draw(2):
                    incarnation.store.transact(open_register, "numbers")
                else:
                    incarnation.store.transact(open_append, "ledger", self.name.encode())
            except (CommitUnknown, StoreFull, Conflict):
                incarnation.count_coverage("clerk refused")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=120)
