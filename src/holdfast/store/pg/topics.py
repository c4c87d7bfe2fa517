"""Topics over NOTIFY: one for each commit that rings any, with the names of the topics.

A hint may be lost: the server restarts, the connection is cut. Whoever listens again takes it that
everything has rung meanwhile. What this process rings itself it hears without the server.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec
import psycopg

from holdfast.errors import HoldfastError
from holdfast.store.pg.server import connect
from holdfast.store.pg.wire import Connection

PAYLOAD_BYTES_MAX = 7_000
TOPICS_MAX = 100_000
# A connection that was cut without a word is noticed by what the system says of it; this is for the rest.
LISTEN_S = 10.0
LISTENING_S = 1.0
JOIN_S = 5.0
PAUSE_S = 0.5
# Stands for all topics.
ALL = "*"


def payload(commit_no: int, topics: Sequence[str]) -> str:
    packed = msgspec.json.encode([commit_no, *topics])
    if len(packed) > PAYLOAD_BYTES_MAX:
        packed = msgspec.json.encode([commit_no, ALL])
    return packed.decode()


class Topics:
    def __init__(self, conninfo: str, channel: str, last: Callable[[Connection], int]) -> None:
        """`last` reads the number of the last commit."""
        self._conninfo = conninfo
        self._channel = channel
        self._last = last
        self._rung: dict[str, int] = {}
        self._all = 0
        self._changed = threading.Condition()
        self._closed = False
        self._listening = threading.Event()
        # A byte in it ends the listener's sleep.
        self._woken, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="holdfast-listen", daemon=True)
        self._started = False

    def ring(self, commit_no: int, topics: Sequence[str]) -> None:
        with self._changed:
            if len(self._rung) > TOPICS_MAX:
                self._rung.clear()
                self._all = max(self._all, commit_no)
            for topic in topics:
                if topic == ALL:
                    self._all = max(self._all, commit_no)
                else:
                    self._rung[topic] = max(self._rung.get(topic, 0), commit_no)
            self._changed.notify_all()

    def wait(
        self, topics: Sequence[str], since: int, timeout: float, now: Callable[[], int]
    ) -> int:
        self._start()
        deadline_ns = now() + int(timeout * 1e9)
        with self._changed:
            while True:
                last = max(self._all, *(self._rung.get(topic, 0) for topic in topics))
                if last > since:
                    return last
                left_ns = deadline_ns - now()
                if left_ns <= 0 or self._closed:
                    return since
                self._changed.wait(left_ns / 1e9)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wakes.send(b"x")
        if self._started:
            self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._woken.close()
            self._wakes.close()

    def _start(self) -> None:
        with self._changed:
            first, self._started = not self._started, True
            if first:
                self._thread.start()
        if first:
            # A wait that begins before anybody listens would miss what is rung now.
            self._listening.wait(LISTENING_S)

    def _listen(self) -> None:
        while not self._closed:
            try:
                with connect(self._conninfo) as connection:
                    connection.execute(f"LISTEN {self._channel}")
                    self.ring(self._last(connection), [ALL])
                    self._listening.set()
                    sleeping = select.poll()
                    sleeping.register(connection, select.POLLIN)
                    sleeping.register(self._woken, select.POLLIN)
                    while not self._closed:
                        if not sleeping.poll(LISTEN_S * 1000):
                            # Silence may be a network that swallows everything.
                            connection.execute("SELECT")
                        for notify in connection.notifies(timeout=0):
                            number, *topics = msgspec.json.decode(notify.payload)
                            self.ring(number, topics)
            except (psycopg.Error, HoldfastError):
                with self._changed:
                    if not self._closed:
                        self._changed.wait(PAUSE_S)
