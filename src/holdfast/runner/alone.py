"""Who may run while a suspect does: nobody else in this process.

An item that has outlived two claims may be what its workers died of. With others beside it, each of
them would be held to account for the next death. So a runner asks to be alone with a suspect: from
then on no runner of the group begins anything, and when what is under way has ended, the suspect
runs by itself. Those that ask at the same time have their turns in the order of asking. Every
handler has a bound on its time, so that is not for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

# Claims that may run out before an item is a suspect: the first may well be a machine's restart.
SUSPECT = 2


class Member(Protocol):
    @property
    def under_way(self) -> int: ...
    def wake(self) -> None: ...


class Alone:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._asking: list[Member] = []

    def enter(self, member: Member) -> None:
        with self._lock:
            self._members.append(member)

    @property
    def wanted(self) -> bool:
        """Whether somebody is, or wants to be, alone: then nothing else is begun."""
        return bool(self._asking)

    def ask(self, member: Member) -> bool:
        """Whether this one may run a suspect now. Asked once, nobody begins anything more."""
        with self._lock:
            if member not in self._asking:
                self._asking.append(member)
            return self._asking[0] is member and not any(one.under_way for one in self._members)

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
        for one in self._members:
            one.wake()
