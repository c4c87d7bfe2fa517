"""Who may run while a suspect does: nobody else in this process.

An item that has outlived two claims may be what its workers died of. With others beside it, each of
them would be held to account for the next death. So a runner asks to be alone with a suspect: from
then on no runner of the group begins anything, and when what is under way has ended, the suspect
runs by itself. Every handler has a bound on its time, so that is not for ever.
"""

from __future__ import annotations

import threading
from typing import Protocol

# Claims that may run out before an item is a suspect: the first may well be a machine's restart.
SUSPECT = 2


class Member(Protocol):
    @property
    def under_way(self) -> int: ...


class Alone:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._asked: Member | None = None

    def enter(self, member: Member) -> None:
        with self._lock:
            self._members.append(member)

    def ask(self, member: Member) -> bool:
        """Whether this one may run a suspect now. Asked once, the others begin nothing more."""
        with self._lock:
            if self._asked is None:
                self._asked = member
            return self._asked is member and not any(one.under_way for one in self._members)

    def leave(self, member: Member) -> None:
        """It has no suspect any more."""
        with self._lock:
            if self._asked is member:
                self._asked = None

    def bars(self, member: Member) -> bool:
        """Whether another of the group wants to be alone."""
        asked = self._asked
        return asked is not None and asked is not member
