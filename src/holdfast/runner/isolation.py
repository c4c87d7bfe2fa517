"""The isolation lock: while a poison suspect runs, no other item runs in this process.

An item with two expired claims may have crashed its workers. If it crashes the process again, every item
that runs beside it is charged with an expiry too. A runner therefore requests isolation for a suspect.
From then on no runner of the group starts an item. When the items in progress have ended, the suspect
runs alone. Concurrent requests are served in order.

Both waits are bounded. After `ISOLATION_WAIT_NS` a suspect runs beside the items still in progress. A
suspect that has run for `claim_supervisor.ISOLATION_MAX_NS` loses its isolation, so that the other
runners can start items.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.clock import MS

# Expired claims that make an item a suspect. One expiry may be a restart of the machine.
SUSPECT_EXPIRIES = 2
# Maximum time that a suspect waits for the items in progress.
ISOLATION_WAIT_NS = 2_000 * MS


class IsolationMember(Protocol):
    @property
    def under_way(self) -> int: ...
    def wake(self) -> None: ...


class IsolationLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: list[IsolationMember] = []
        self._waiting: list[IsolationMember] = []
        # The member at the head of the queue, and since when.
        self._head: IsolationMember | None = None
        self._since_ns = 0

    def register(self, member: IsolationMember) -> None:
        with self._lock:
            self._members.append(member)

    @property
    def is_requested(self) -> bool:
        """Whether isolation is held or requested. Then no other item may start."""
        return bool(self._waiting)

    def try_isolate(self, member: IsolationMember, now_ns: int = 0) -> bool:
        """Request isolation, and return whether the member may run a suspect now. The request blocks new
        starts until `release`."""
        with self._lock:
            if member not in self._waiting:
                self._waiting.append(member)
            if self._waiting[0] is not member:
                return False
            if self._head is not member:
                self._head, self._since_ns = member, now_ns
            waited_enough = now_ns - self._since_ns >= ISOLATION_WAIT_NS
            granted = waited_enough or not any(other.under_way for other in self._members)
            if granted:
                # The member's next suspect waits again, also for this one.
                self._head = None
            return granted

    def start_unless_requested(self, start: Callable[[], None]) -> bool:
        """Start items that are no suspects. Return False if isolation is requested. The lock makes this
        atomic: a request sees every started item."""
        with self._lock:
            if self._waiting:
                return False
            start()
            return True

    def release(self, member: IsolationMember) -> None:
        """Release isolation, or cancel the request, and wake all members."""
        with self._lock:
            if member not in self._waiting:
                return
            self._waiting.remove(member)
            if self._head is member:
                self._head = None
        for other in self._members:
            other.wake()
