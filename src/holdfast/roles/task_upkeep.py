"""Upkeep of tasks: forget those whose retention is over, remove the blobs that this leaves without a
reference, and make the checkpoints of the log.

Every role that uses the coordinator does it: the task worker, the HTTP server, the orchestrator. Any one
of them suffices, and two at a time take turns, commit by commit. A commit forgets `BATCH` tasks at most, so
that others wait for a few milliseconds; there are as many commits as it takes. A round that has forgotten
`ROUND` tasks looks whether the log needs a checkpoint, so that a long backlog does not hold that up.

`TaskUpkeep` does it in a thread of its own: leases must be extended meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from holdfast.clock import S
from holdfast.config import BLOB_GRACE_NS
from holdfast.errors import HoldfastError
from holdfast.store import blobs
from holdfast.store.api import Store, Txn
from holdfast.tasks import checkpoint, look
from holdfast.tasks import coordinator as tasks

# Tasks that one commit forgets, and those of one round.
BATCH = 250
ROUND = 50_000
# Between two looks: while tasks come to the end of their retention, and while none does.
OFTEN_NS = 1 * S
SELDOM_NS = 10 * S
# How long a role that stops waits for the commit that is under way.
STOP_S = 2.0


class Due(NamedTuple):
    """What there is to do, and when to look again."""

    retention: bool
    blobs: bool
    checkpoint: bool
    next_ns: int


def due(txn: Txn, universe: str) -> Due:
    now_ns = txn.now_ns
    ended_ns, idle_ns = look.next_retention_ns(txn, universe), blobs.next_idle_ns(txn)
    times = [
        now_ns + SELDOM_NS if ended_ns is None else ended_ns,
        now_ns + SELDOM_NS if idle_ns is None else idle_ns + BLOB_GRACE_NS,
    ]
    overdue, unused = (at_ns <= now_ns for at_ns in times)
    next_ns = min(max(min(times), now_ns + OFTEN_NS), now_ns + SELDOM_NS)
    return Due(overdue, unused, checkpoint.due_in(txn, universe), next_ns)


def tend(store: Store, universe: str, going: Callable[[], bool] = lambda: True) -> bool:
    """One round; whether there may be more. It ends early when `going` says so."""
    found = store.read(due, universe)
    more = found.retention and _repeat(
        going, lambda: store.transact(tasks.maintain, universe, BATCH)
    )
    if found.blobs or found.retention:
        more |= _repeat(going, lambda: store.transact(blobs.collect, BLOB_GRACE_NS, BATCH))
    if found.checkpoint and going():
        checkpoint.make(store, universe, going)
    return more


def _repeat(going: Callable[[], bool], step: Callable[[], int]) -> bool:
    """Steps until one finds less than a batch; whether there may be more after a round of them."""
    left = ROUND
    while left > 0:
        if not going():
            return True
        done = step()
        if done < BATCH:
            return False
        left -= done
    return True


class TaskUpkeep:
    """Rounds in a thread of their own, begun by the loop that calls `attend`."""

    def __init__(self, store: Store, universe: str, *, with_blobs: bool = True) -> None:
        """A role that removes unused blobs by itself says so."""
        self._store = store
        self._universe = universe
        self._with_blobs = with_blobs
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # When to look next, by store time.
        self.next_ns = 0

    def attend(self, now_ns: int) -> None:
        if now_ns < self.next_ns or self._stopping.is_set():
            return
        if self._thread is not None and self._thread.is_alive():
            self.next_ns = now_ns + OFTEN_NS
            return
        found = self._store.read(due, self._universe)
        self.next_ns = found.next_ns
        if found.retention or found.checkpoint or (found.blobs and self._with_blobs):
            self._thread = threading.Thread(
                target=self._tend, name="holdfast-task-upkeep", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _going(self) -> bool:
        return not self._stopping.is_set()

    def _tend(self) -> None:
        # A store that is busy or gone: the next look is for that.
        with contextlib.suppress(HoldfastError):
            while tend(self._store, self._universe, self._going) and self._going():
                pass
