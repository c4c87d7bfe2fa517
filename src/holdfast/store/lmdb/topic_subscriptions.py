"""Topic subscriptions of a client at the writer, bounded in number, with the last commit of each topic.

A topic is subscribed while a thread waits for it, and stays subscribed for some time, since the next wait is often
for the same topic. Beyond `WATCHED_IDLE_MAX` the least recently used topics without a waiter are unsubscribed.

The writer must receive changes in order. They are queued under the lock, and the sender takes all of them at once
(`take_changes`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from holdfast.config import IDLE_TOPICS_MAX
from holdfast.store.subscription import Sleepers


class TopicSubscriptions:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The number of waiters of each subscribed topic. `record` reads it without the lock, so a topic leaves it only
        # when it is unsubscribed.
        self._waiter_counts: dict[str, int] = {}
        # The topics without a waiter, least recently used first.
        self._idle: OrderedDict[str, None] = OrderedDict()
        # Changes not yet sent to the writer: whether a topic is subscribed.
        self._unsent_changes: dict[str, bool] = {}
        # An unsubscription alone can wait for the next subscription.
        self.has_unsent_subscription = False
        # The last commit that notified each topic, as far as the writer has reported it.
        self._commits: dict[str, int] = {}
        self.sleepers = Sleepers()

    def __contains__(self, topic: str) -> bool:
        return topic in self._waiter_counts

    def __len__(self) -> int:
        return len(self._waiter_counts)

    @property
    def waiting(self) -> dict[str, int]:
        """The number of waiters of each topic that has one."""
        with self._lock:
            return {topic: waits for topic, waits in self._waiter_counts.items() if waits}

    def add_waiter(self, topics: Iterable[str]) -> bool:
        """Add a waiter for these topics. Return whether a new subscription must be sent."""
        with self._lock:
            for topic in topics:
                waits = self._waiter_counts.get(topic)
                if waits is None:
                    self._unsent_changes[topic] = True
                    self.has_unsent_subscription = True
                self._waiter_counts[topic] = (waits or 0) + 1
                self._idle.pop(topic, None)
            return self.has_unsent_subscription

    def remove_waiter(self, topics: Iterable[str]) -> None:
        """Remove a waiter of these topics and unsubscribe excess idle topics."""
        with self._lock:
            for topic in topics:
                waits = self._waiter_counts[topic] = self._waiter_counts[topic] - 1
                if not waits:
                    self._idle[topic] = None
            while len(self._idle) > IDLE_TOPICS_MAX:
                topic, _ = self._idle.popitem(last=False)
                del self._waiter_counts[topic]
                self._unsent_changes[topic] = False
                self._commits.pop(topic, None)

    def record(self, commits: Mapping[str, int]) -> None:
        """Record the commits that the writer reports, and wake the sleepers of their topics."""
        for topic, commit_no in commits.items():
            # The writer may still report a topic that was just unsubscribed.
            if topic in self:
                self._commits[topic] = commit_no
        self.sleepers.wake(commits)

    def last_notified(self, topics: tuple[str, ...]) -> int | None:
        """The last commit that notified any of the topics; None until the writer has reported all of them."""
        if len(topics) == 1:
            return self._commits.get(topics[0])
        commits = [self._commits[topic] for topic in topics if topic in self._commits]
        return max(commits, default=0) if len(commits) == len(topics) else None

    def take_changes(self, *, all_topics: bool = False) -> tuple[list[str], list[str]]:
        """Take the unsent changes: topics to subscribe and topics to unsubscribe. `all_topics`: for a new writer,
        which knows none."""
        with self._lock:
            changes, self._unsent_changes = self._unsent_changes, {}
            self.has_unsent_subscription = False
            if all_topics:
                return list(self._waiter_counts), []
        return (
            [topic for topic, watched in changes.items() if watched],
            [topic for topic, watched in changes.items() if not watched],
        )
