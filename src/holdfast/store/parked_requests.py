"""Parked requests: operations that wait at the commit engine for a topic (like BLPOP, or a long poll).

The engine retries a parked request in the first commit that notifies one of its topics, after the requests of
that commit. A worker thus receives work in the commit that creates the work, without a separate commit.

An operation with nothing to do raises `NothingToDo`, and its request stays parked. A parked request belongs to
its connection and ends with it. It is never stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.store.requests import CommitRequest

# The parked requests that one commit retries. The next commit retries the rest.
UNPARK_TRIES_MAX = 16

RequestId = tuple[bytes, int]


class ParkedRequests:
    def __init__(self) -> None:
        # In order of arrival.
        self._requests: dict[RequestId, CommitRequest] = {}
        self._ids_by_topic: dict[str, set[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, name: RequestId) -> bool:
        return name in self._requests

    def add(self, request: CommitRequest) -> None:
        name = (request.client, request.no)
        # The engine tracks its outcome from now on, so a retry needs no lookup.
        request.resent = False
        self._requests[name] = request
        for topic in request.park_topics:
            self._ids_by_topic.setdefault(topic, set()).add(name)

    def remove(self, name: RequestId) -> CommitRequest | None:
        """Remove and return the request with this id, if it is parked."""
        request = self._requests.pop(name, None)
        if request is None:
            return None
        for topic in request.park_topics:
            names = self._ids_by_topic.get(topic)
            if names is not None:
                names.discard(name)
                if not names:
                    del self._ids_by_topic[topic]
        return request

    def waiting_for_topics(self, topics: Collection[str]) -> list[CommitRequest]:
        """The parked requests of these topics, in order of arrival."""
        request_ids: set[RequestId] = set()
        for topic in topics:
            request_ids |= self._ids_by_topic.get(topic, set())
        if not request_ids:
            return []
        return [request for name, request in self._requests.items() if name in request_ids]


def filter_by_topics(
    requests: Iterable[CommitRequest], topics: Collection[str]
) -> list[CommitRequest]:
    return [request for request in requests if not set(request.park_topics).isdisjoint(topics)]
