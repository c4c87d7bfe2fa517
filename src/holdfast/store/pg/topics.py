"""Topics over NOTIFY: one for each commit that rings any, with the names of the topics.

A hint may be lost: the server restarts, the connection is cut. Whoever listens again takes it that
everything has rung meanwhile. What this process rings itself it hears without the server.

A process has many who wait, and commits often: each ring wakes those alone whose topic it is.
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
from holdfast.store.pg.patience import Haste
from holdfast.store.pg.server import connect
from holdfast.store.pg.wire import Connection

PAYLOAD_BYTES_MAX = 7_000
TOPICS_MAX = 100_000
# A connection that was cut without a word is noticed by what the system says of it; this is for the rest.
LISTEN_S = 10.0
LISTENING_S = 1.0
JOIN_S = 5.0
# The same while the server is away: whoever tries to reach it cannot be called back.
JOIN_AWAY_S = 0.5
PAUSE_S = 0.5
# Stands for all topics.
ALL = "*"


def payload(client: bytes, commit_no: int, topics: Sequence[str]) -> str:
    """`client` is the process that commits: what it says begins with that."""
    packed = msgspec.json.encode([commit_no, *topics]).decode()
    if not packed.isascii():
        # A database may have another encoding than UTF-8. Escaped, every one of them holds any topic.
        packed = json.dumps([commit_no, *topics])
    if len(packed) > PAYLOAD_BYTES_MAX:
        packed = json.dumps([commit_no, ALL])
    return client.hex() + packed


CLIENT_CHARS = 16


class Topics:
    def __init__(
        self,
        conninfo: str,
        channel: str,
        last: Callable[[Connection], int],
        client: bytes,
        haste: Haste | None = None,
    ) -> None:
        """`last` reads the number of the last commit; `client` is this process, as it says in payloads."""
        self._client = client.hex().encode()
        self._conninfo = conninfo
        self._channel = channel
        self._last = last
        self._haste = haste
        self._rung: dict[str, int] = {}
        self._all = 0
        self._lock = threading.Lock()
        # By topic: the gates of those who wait for it. A gate is a lock that is let go once.
        self._waiting: dict[str, set[threading.Lock]] = {}
        # The last commit of others that the server has told of, and whether it would tell of one that rings.
        self.heard = 0
        self.hearing = False
        self._closed = False
        self._closing = threading.Event()
        self._listening = threading.Event()
        # A byte in it ends the listener's sleep.
        self._woken, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="holdfast-listen", daemon=True)
        self._started = False

    def ring(self, commit_no: int, topics: Sequence[str]) -> None:
        with self._lock:
            if len(self._rung) > TOPICS_MAX:
                self._rung.clear()
                topics = [*topics, ALL]
            for topic in topics:
                if topic == ALL:
                    self._all = max(self._all, commit_no)
                    self._wake(*self._waiting)
                elif self._rung.get(topic, 0) < commit_no:
                    self._rung[topic] = commit_no
                    self._wake(topic)

    def wait(
        self, topics: Sequence[str], since: int, timeout: float, now: Callable[[], int]
    ) -> int:
        self._start()
        deadline_ns = now() + int(timeout * 1e9)
        while True:
            with self._lock:
                last = max(self._all, *(self._rung.get(topic, 0) for topic in topics))
                if last > since:
                    return last
                left_ns = deadline_ns - now()
                if left_ns <= 0 or self._closed:
                    return since
                gate = threading.Lock()
                gate.acquire()
                for topic in topics:
                    self._waiting.setdefault(topic, set()).add(gate)
            try:
                gate.acquire(timeout=left_ns / 1e9)
            finally:
                with self._lock:
                    self._forget(gate, topics)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake(*self._waiting)
        self._closing.set()
        self._wakes.send(b"x")
        if self._started:
            self._thread.join(JOIN_S if self.hearing else JOIN_AWAY_S)
        if not self._thread.is_alive():
            self._woken.close()
            self._wakes.close()

    def _wake(self, *topics: str) -> None:
        """Wake those who wait for one of these. Under the lock."""
        for topic in topics:
            for gate in self._waiting.pop(topic, ()):
                if gate.locked():
                    gate.release()

    def _forget(self, gate: threading.Lock, topics: Sequence[str]) -> None:
        for topic in topics:
            gates = self._waiting.get(topic)
            if gates is not None:
                gates.discard(gate)
                if not gates:
                    del self._waiting[topic]

    def _start(self) -> None:
        if self._started:
            return
        with self._lock:
            first, self._started = not self._started, True
            if first:
                self._thread.start()
        if first:
            # A wait that begins before anybody listens would miss what is rung now.
            self._listening.wait(LISTENING_S)

    def _listen(self) -> None:
        while not self._closed:
            try:
                with connect(self._conninfo, self._haste) as connection:
                    # What comes while something else is asked.
                    connection.add_notify_handler(lambda told: self._hear(told.payload.encode()))
                    connection.execute(f"LISTEN {self._channel}")
                    # It may be another server, which knows of fewer.
                    self.heard = self._last(connection)
                    self.ring(self.heard, [ALL])
                    self.hearing = True
                    self._listening.set()
                    sleeping = select.poll()
                    sleeping.register(connection, select.POLLIN)
                    sleeping.register(self._woken, select.POLLIN)
                    while not self._closed:
                        if not sleeping.poll(LISTEN_S * 1000):
                            # Silence may be a network that swallows everything.
                            connection.execute("SELECT")
                        self._take(connection)
            except (psycopg.Error, HoldfastError):
                self.hearing = False
                self._closing.wait(PAUSE_S)

    def _take(self, connection: Connection) -> None:
        """Take what the server has told.

        Not by the library's generator: at this moment the committer of this process wants to go on, too.
        """
        connection.pgconn.consume_input()
        while (notify := connection.pgconn.notifies()) is not None:
            self._hear(notify.extra)

    def _hear(self, told: bytes) -> None:
        if told.startswith(self._client):
            return  # rung already, or about to be
        number, *topics = msgspec.json.decode(told[CLIENT_CHARS:])
        # Before anybody is woken: they look at it.
        self.heard = max(self.heard, number)
        self.ring(number, topics)
