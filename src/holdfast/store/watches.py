"""The topics that a client watches at the writer: a subscription each, bounded in number.

A topic is watched while a thread waits for it, and for some time after, since the next wait is often for the
same one. Of those that no thread waits for, the least recently used beyond `WATCHED_IDLE_MAX` are dropped.

The writer must hear of changes in the order in which they were made: they are queued here, under the lock, and
whoever sends takes all of them at once (`take`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from holdfast.config import WATCHED_IDLE_MAX


class Watches:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        # How many wait for each; and those that none waits for, the least recently used first.
        self._waits: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        # What the writer has not been told: whether a topic is watched now.
        self._changes: dict[str, bool] = {}

    def __contains__(self, topic: str) -> bool:
        return topic in self._waits or topic in self._idle

    def __len__(self) -> int:
        return len(self._waits) + len(self._idle)

    def begin(self, topics: Iterable[str]) -> bool:
        """Wait for these; whether the writer is to be told of any."""
        with self._lock:
            for topic in topics:
                waits = self._waits.get(topic, 0)
                if not waits and topic not in self._idle:
                    self._changes[topic] = True
                self._waits[topic] = waits + 1
                self._idle.pop(topic, None)
            # That one is dropped can be told with the next that is new.
            return any(self._changes.values())

    def end(self, topics: Iterable[str], forget: Callable[[str], None]) -> None:
        """Wait for these no longer; forget those that are watched no more.

        `forget` runs under the lock: a thread that watches one of them again does so before, or after.
        """
        with self._lock:
            for topic in topics:
                waits = self._waits.pop(topic) - 1
                if waits:
                    self._waits[topic] = waits
                else:
                    self._idle[topic] = None
            while len(self._idle) > WATCHED_IDLE_MAX:
                topic, _ = self._idle.popitem(last=False)
                self._changes[topic] = False
                forget(topic)

    def take(self, *, anew: bool = False) -> tuple[list[str], list[str]]:
        """The topics that the writer is to watch, and those that it is to forget; `anew`: it knows none."""
        with self._lock:
            changes, self._changes = self._changes, {}
            if anew:
                return [*self._waits, *self._idle], []
        return (
            [topic for topic, watched in changes.items() if watched],
            [topic for topic, watched in changes.items() if not watched],
        )
