"""Who may run while a suspect does: nobody else in this process.

An item that has outlived two claims may be what its workers died of. With others beside it, each of
them would be held to account for the next death. So a runner asks to be alone with a suspect: from
then on no runner of the group begins anything, and when what is under way has ended, the suspect
runs by itself. Those that ask at the same time have their turns in the order of asking.

Nobody waits for ever: after `PATIENCE_NS` a suspect runs beside what is still under way, and whoever
has run for long by itself leaves (the runner's `SOLITUDE_NS`), so that others may begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.clock import MS

# Claims that may run out before an item is a suspect: the first may well be a machine's restart.
SUSPECT = 2
# How long a suspect waits for others to end.
PATIENCE_NS = 2_000 * MS


class Member(Protocol):
    @property
    def under_way(self) -> int: ...
    def wake(self) -> None: ...


class Alone:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._asking: list[Member] = []
        # Whose turn it is, and since when.
        self._first: Member | None = None
        self._since_ns = 0

    def enter(self, member: Member) -> None:
        with self._lock:
            self._members.append(member)

    @property
    def wanted(self) -> bool:
        """Whether somebody is, or wants to be, alone: then nothing else is begun."""
        return bool(self._asking)

    def ask(self, member: Member, now_ns: int = 0) -> bool:
        """Whether this one may run a suspect now. Asked once, nobody begins anything more."""
        with self._lock:
            if member not in self._asking:
                self._asking.append(member)
            if self._asking[0] is not member:
                return False
            if self._first is not member:
                self._first, self._since_ns = member, now_ns
            waited = now_ns - self._since_ns >= PATIENCE_NS
            granted = waited or not any(one.under_way for one in self._members)
            if granted:
                # Its next one waits anew, for this one too.
                self._first = None
            return granted

    def begin(self, give: Callable[[], None]) -> bool:
        """Begin what is no suspect; False if somebody wants to be alone. One or the other: whoever
        asks sees what was begun."""
        with self._lock:
            if self._asking:
                return False
            give()
            return True

    def leave(self, member: Member) -> None:
        """It has no suspect any more."""
        with self._lock:
            if member not in self._asking:
                return
            self._asking.remove(member)
            if self._first is member:
                self._first = None
        for one in self._members:
            one.wake()
