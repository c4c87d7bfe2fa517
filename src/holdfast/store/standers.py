"""Requests that stand: each waits where commits are made, until one of its topics is notified.

It is then applied in the commit that notified it, after what that commit was made for. So whoever waits
for work has it with the commit that brings the work, and not with one of its own.

An operation that finds nothing to do raises `NotYet`: the request stands on. What stands belongs to the
connection it came by and is gone with it; nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.store.engine import Request

# How many a commit tries; the others are tried by the next.
TRIED_MAX = 16

Name = tuple[bytes, int]


class Standers:
    def __init__(self) -> None:
        # In the order in which they came.
        self._requests: dict[Name, Request] = {}
        self._topics: dict[str, set[Name]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, name: Name) -> bool:
        return name in self._requests

    def add(self, request: Request) -> None:
        name = (request.client, request.no)
        # It is known from now on what became of it.
        request.resent = False
        self._requests[name] = request
        for topic in request.when:
            self._topics.setdefault(topic, set()).add(name)

    def remove(self, name: Name) -> Request | None:
        """What stood here under this name."""
        request = self._requests.pop(name, None)
        if request is None:
            return None
        for topic in request.when:
            names = self._topics.get(topic)
            if names is not None:
                names.discard(name)
                if not names:
                    del self._topics[topic]
        return request

    def of(self, topics: Collection[str]) -> list[Request]:
        """Those that wait for one of these, first come first."""
        found: set[Name] = set()
        for topic in topics:
            found |= self._topics.get(topic, set())
        if not found:
            return []
        return [request for name, request in self._requests.items() if name in found]


def waiting_for(requests: Iterable[Request], topics: Collection[str]) -> list[Request]:
    return [request for request in requests if not set(request.when).isdisjoint(topics)]
