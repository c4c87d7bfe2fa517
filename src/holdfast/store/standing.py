"""STAND-IN, written from its callers because the original was overwritten: the lead's own replaces it.

Requests that stand: they could not be applied yet, and are tried again when a topic is notified.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.store.engine import Request

# Of those that a commit has notified, so many are tried in it; the others come after it.
TRIED_MAX = 64

Name = tuple[bytes, int]


class Standing:
    def __init__(self) -> None:
        self._requests: dict[Name, Request] = {}
        self._by_topic: dict[str, dict[Name, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        name = (request.client, request.no)
        self._requests[name] = request
        for topic in request.when:
            self._by_topic.setdefault(topic, {})[name] = None

    def remove(self, name: Name) -> bool:
        """Whether it stood."""
        request = self._requests.pop(name, None)
        if request is None:
            return False
        for topic in request.when:
            names = self._by_topic[topic]
            names.pop(name, None)
            if not names:
                del self._by_topic[topic]
        return True

    def of(self, topics: Iterable[str]) -> list[Request]:
        """Those that stand until one of these is notified, the oldest first."""
        found = {name for topic in topics for name in self._by_topic.get(topic, ())}
        return [self._requests[name] for name in self._requests if name in found]
