"""Topic notifications over LISTEN/NOTIFY: one NOTIFY per commit, with the names of its topics.

Notifications may be lost, for example when the server restarts or the connection is cut. After a reconnect the
listener therefore notifies all topics. Commits of this process notify local waiters without the server.

A process has many waiters and commits often: a notification wakes only the waiters of its topics.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec
import psycopg

from holdfast.errors import HoldfastError
from holdfast.store.postgres.server import connect
from holdfast.store.postgres.statements import PostgresConnection
from holdfast.store.postgres.watchdog import ShutdownDeadline
from holdfast.store.subscription import Sleepers, Subscription, sleep_on_gate

PAYLOAD_BYTES_MAX = 7_000
TOPICS_MAX = 100_000
# The interval of probes on an idle connection, for failures that the kernel does not report.
LISTEN_S = 10.0
LISTEN_START_S = 1.0
JOIN_S = 5.0
# The same during an outage: a connection attempt cannot be cancelled.
JOIN_OUTAGE_S = 0.5
RECONNECT_PAUSE_S = 0.5
# All topics.
ALL_TOPICS = "*"


def encode_payload(client: bytes, commit_no: int, topics: Sequence[str]) -> str:
    """Encode a NOTIFY payload. It starts with the id of the committing process."""
    packed = msgspec.json.encode([commit_no, *topics]).decode()
    if not packed.isascii():
        # The encoding of the database may not be UTF-8. ASCII escapes work in every encoding.
        packed = json.dumps([commit_no, *topics])
    if len(packed) > PAYLOAD_BYTES_MAX:
        packed = json.dumps([commit_no, ALL_TOPICS])
    return client.hex() + packed


CLIENT_CHARS = 16


class NotificationListener:
    def __init__(
        self,
        conninfo: str,
        channel: str,
        read_last_commit_no: Callable[[PostgresConnection], int],
        client: bytes,
        *,
        check_open: Callable[[], None],
        mono_ns: Callable[[], int],
        shutdown_deadline: ShutdownDeadline | None = None,
    ) -> None:
        """`read_last_commit_no` reads the number of the last commit; `client` is the id of this process in
        payloads; `check_open` raises when the store is closed or forked."""
        self._check_open = check_open
        self._mono_ns = mono_ns
        self._client = client.hex().encode()
        self._conninfo = conninfo
        self._channel = channel
        self._read_last_commit_no = read_last_commit_no
        self._shutdown_deadline = shutdown_deadline
        self._topic_commits: dict[str, int] = {}
        self._all_topics_commit = 0
        self._lock = threading.Lock()
        self.sleepers = Sleepers()
        # The last remote commit that the server notified, and whether this process is listening.
        self.last_remote_commit = 0
        self.is_listening = False
        self._closed = False
        self._closing = threading.Event()
        self._listening = threading.Event()
        # A byte in this socket wakes the listener.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="holdfast-listen", daemon=True)
        self._started = False

    def notify_local(self, commit_no: int, topics: Sequence[str]) -> None:
        with self._lock:
            if len(self._topic_commits) > TOPICS_MAX:
                self._topic_commits.clear()
                topics = [*topics, ALL_TOPICS]
            for topic in topics:
                if topic == ALL_TOPICS:
                    self._all_topics_commit = max(self._all_topics_commit, commit_no)
                elif self._topic_commits.get(topic, 0) < commit_no:
                    self._topic_commits[topic] = commit_no
        if ALL_TOPICS in topics:
            self.sleepers.wake_all()
        else:
            self.sleepers.wake(topics)

    # -- the source of subscriptions -------------------------------------------------------------

    def mono_ns(self) -> int:
        return self._mono_ns()

    def check(self) -> None:
        self._check_open()

    def last_notified(self, topics: tuple[str, ...]) -> int | None:
        if not self._started:
            self.start_delivery()
            self._listening.wait(LISTEN_START_S)
        with self._lock:
            commits = [self._topic_commits.get(topic, 0) for topic in topics]
            return max([self._all_topics_commit, *commits])

    def is_new(self, last: int, since: int) -> bool:
        return last > since

    def sleep(self, subscription: Subscription, last: int | None, timeout_s: float) -> None:
        sleep_on_gate(self, subscription, last, timeout_s)

    def interrupt(self, subscription: Subscription) -> bool:
        """Return False: every thread sleeps on the gate of its subscription."""
        return False

    def start_delivery(self) -> None:
        """Start the listener thread. It notifies all topics when it listens, so nothing is lost before."""
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.start()

    def release(self, subscription: Subscription) -> None:
        """Do nothing: a subscription is registered only while it sleeps."""

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.sleepers.wake_all()
        self._closing.set()
        self._wake_sender.send(b"x")
        if self._started:
            self._thread.join(JOIN_S if self.is_listening else JOIN_OUTAGE_S)
        if not self._thread.is_alive():
            self._wake_receiver.close()
            self._wake_sender.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                with connect(self._conninfo, self._shutdown_deadline) as connection:
                    # For notifications that arrive during another statement.
                    connection.add_notify_handler(
                        lambda notify: self._on_notify(notify.payload.encode())
                    )
                    connection.execute(f"LISTEN {self._channel}")
                    # It may be another server with fewer commits.
                    self.last_remote_commit = self._read_last_commit_no(connection)
                    self.notify_local(self.last_remote_commit, [ALL_TOPICS])
                    self.is_listening = True
                    self._listening.set()
                    poll = select.poll()
                    poll.register(connection, select.POLLIN)
                    poll.register(self._wake_receiver, select.POLLIN)
                    while not self._closed:
                        if not poll.poll(LISTEN_S * 1000):
                            # Probe: the network may drop everything silently.
                            connection.execute("SELECT")
                        self._receive_notifications(connection)
            except (psycopg.Error, HoldfastError):
                self.is_listening = False
                self._closing.wait(RECONNECT_PAUSE_S)

    def _receive_notifications(self, connection: PostgresConnection) -> None:
        """Process the received notifications.

        Not with psycopg's generator, which is slower: the committer thread competes for the GIL at this moment.
        """
        connection.pgconn.consume_input()
        while (notify := connection.pgconn.notifies()) is not None:
            self._on_notify(notify.extra)

    def _on_notify(self, payload: bytes) -> None:
        if payload.startswith(self._client):
            return  # an own commit, notified locally
        commit_no, *topics = msgspec.json.decode(payload[CLIENT_CHARS:])
        # Set before waking the waiters, which read it.
        self.last_remote_commit = max(self.last_remote_commit, commit_no)
        self.notify_local(commit_no, topics)
