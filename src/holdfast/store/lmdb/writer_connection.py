"""The connection of a client to the current writer process.

`connect` starts a writer if none runs. A client never reconnects to another store: the connection knows the identity
of its store and directory, and it ends with a permanent error when the path leads elsewhere.
The connection kills a writer that owes an answer and is stopped or hung. It verifies pid and start time first, so
that it never kills another process.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast import failpoints
from holdfast.child_process import is_stopped, kill_verified
from holdfast.clock import SYSTEM, S
from holdfast.config import WriterLimits
from holdfast.errors import HoldfastError, StoreGone, StoreReplaced, WriterLost, from_wire
from holdfast.store import schema
from holdfast.store.lmdb.directory_identity import DirectoryIdentity
from holdfast.store.lmdb.protocol import WriterWelcome, new_frame_decoder, schema_mismatch
from holdfast.store.lmdb.writer_process import connect_or_start, peer_of

# How often a waiting reader checks for a stuck writer.
POLL_S = 0.25
# How often a client checks that the path still leads to the store.
IDENTITY_CHECK_NS = S
# One write to the event counter.
_ONE = (1).to_bytes(8, "little")


class WriterConnection:
    def __init__(
        self,
        path: Path,
        *,
        bootstrap: bool,
        limits: WriterLimits,
        oldest_unanswered_ns: Callable[[], int],
    ) -> None:
        """`oldest_unanswered_ns`: when the oldest unanswered request was sent; 0 if the writer owes no answer."""
        self.path = path
        self._bootstrap = bootstrap
        self._limits = limits
        self._oldest_unanswered_ns = oldest_unanswered_ns
        # The permanent error of this client: closed, or the store is gone or replaced.
        self.end_error: HoldfastError | None = None
        # The connection is lost and the reader has not reconnected yet: nothing is sent.
        self.is_broken = False
        self._identity: tuple[str, int] | None = None
        self._directory: DirectoryIdentity | None = None
        self._next_check_ns = 0
        self._received_ns = 0
        # A write to this event counter ends `poll_or_interrupt`, which is edge-triggered and reads no counter.
        self._interrupts = os.fdopen(
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "wb", buffering=0
        )
        self._interruptible_poll: select.epoll | None = None
        try:
            self.connect()
        except BaseException:
            self._close_interrupts()
            raise

    # -- the identity of the store ---------------------------------------------------------------

    def check(self) -> None:
        """Raise the permanent error of this client, if it has one."""
        if self.end_error is not None:
            raise self.end_error
        if SYSTEM.mono_ns() >= self._next_check_ns:
            self._check_directory()

    def _check_directory(self) -> None:
        """End the connection if the path no longer leads to the store."""
        self._next_check_ns = SYSTEM.mono_ns() + IDENTITY_CHECK_NS
        if self._directory is None:
            return
        try:
            self._directory.check()
        except (StoreGone, StoreReplaced) as error:
            self.end_error = error
            # Wakes the threads that read or wait.
            self.shut_down()
            raise

    def check_data(self) -> None:
        """Raise unless answers may be delivered. The writer checks the path that it was started with. This client
        may use another path (a link, a mount of another container) that now leads to another store."""
        try:
            if self._directory is not None:
                self._directory.check_data()
        except (StoreGone, StoreReplaced) as error:
            self.end_error = error
            raise

    # -- connecting ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the writer, or start one."""
        if failpoints.armed:
            failpoints.hit("lmdb.connect", self)
        if self._directory is None:
            sock, welcome = connect_or_start(
                self.path, bootstrap=self._bootstrap, limits=self._limits
            )
            self._attach(sock, welcome)
            return
        # Never create a store that existed before. An error may be due to its removal.
        self._check_directory()
        try:
            sock, welcome = connect_or_start(self.path, bootstrap=False, limits=self._limits)
            self._attach(sock, welcome)
        except HoldfastError:
            self._check_directory()
            raise

    def _attach(self, sock: socket.socket, welcome: WriterWelcome) -> None:
        if welcome.error is not None:
            sock.close()
            raise from_wire(welcome.error)
        if welcome.schema != schema.SCHEMA_VERSION:
            # The writer of an older build greets every client of its package version.
            sock.close()
            raise schema_mismatch(writer=welcome.schema, client=schema.SCHEMA_VERSION)
        identity = (welcome.store_id, welcome.generation)
        directory = self._directory or DirectoryIdentity(self.path)
        same_store = self._identity in (None, identity)
        if (
            not same_store
            or directory.data_identity is None
            or directory.data_identity[1] != welcome.inode
        ):
            sock.close()
            replaced = StoreReplaced(path=str(self.path))
            if self._identity is not None:
                self.end_error = replaced
            raise replaced
        # First: without a descriptor for it the former connection stays lost, and the next attempt connects again.
        self._register_interruptible_poll(sock)
        self._identity, self._directory = identity, directory
        self.sock = sock
        self.is_broken = False
        self._frames = new_frame_decoder()
        self._pid, self._start_time = peer_of(sock)
        sock.settimeout(None)
        timeout = struct.pack("ll", 0, int(POLL_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._received_ns = SYSTEM.mono_ns()
        self.welcome = welcome

    def _register_interruptible_poll(self, sock: socket.socket) -> None:
        try:
            poll = select.epoll()
        except OSError as error:
            sock.close()
            raise WriterLost(path=str(self.path), why=str(error)) from None
        poll.register(sock, select.EPOLLIN)
        poll.register(self._interrupts, select.EPOLLIN | select.EPOLLET)
        if self._interruptible_poll is not None:
            # Not the socket alone: a forked child may keep the former socket open, which keeps it registered.
            self._interruptible_poll.close()
        self._interruptible_poll = poll

    def shut_down(self) -> None:
        """Shut down the connection. The next reader reconnects and resends."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    @property
    def is_closed(self) -> bool:
        """Whether the socket is closed: by `close`, or by a reconnect that failed."""
        return self.sock.fileno() < 0

    def close(self) -> None:
        self.sock.close()
        self._close_interrupts()

    def _close_interrupts(self) -> None:
        if self._interruptible_poll is not None:
            self._interruptible_poll.close()
        self._interrupts.close()

    # -- sending and receiving -------------------------------------------------------------------

    def send(self, data: bytes) -> bool:
        """Send and return whether any byte was sent. The reader detects and replaces a broken connection."""
        if failpoints.armed:
            failpoints.hit("lmdb.send", self)
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                self.kill_stuck_writer()
            except OSError:
                return len(view) < len(data)
        return True

    def receive(self) -> Iterable[bytes]:
        """Receive and return the complete messages. BlockingIOError: none within POLL_S. ConnectionError: lost."""
        try:
            data = self.sock.recv(self._frames.recv_bytes)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        if not data:
            raise ConnectionError
        self._received_ns = SYSTEM.mono_ns()
        return self._frames.feed(data)

    def poll(self, timeout_s: float) -> bool:
        """Wait until a message can be received. False after the timeout."""
        return self.is_closed or bool(self._poll.poll(timeout_s * 1000))

    def poll_or_interrupt(self, timeout_s: float) -> tuple[bool, bool]:
        """`poll` that `interrupt` ends too. Return whether a message can be received, and whether the timeout ended
        the poll."""
        sock_fd = self.sock.fileno()
        if sock_fd < 0 or self._interruptible_poll is None:
            return True, False  # the next receive detects it
        if failpoints.armed:
            failpoints.hit("lmdb.poll", self)
        ready = self._interruptible_poll.poll(timeout_s, 2)
        for fd, _ in ready:
            if fd == sock_fd:
                return True, False
        return False, not ready

    def interrupt(self) -> None:
        """End the current `poll_or_interrupt`, or else the next one."""
        # ValueError: closed. No context manager: this runs for every wake-up.
        try:
            self._interrupts.write(_ONE)
        except (OSError, ValueError):
            return

    def kill_stuck_writer(self) -> None:
        """Kill a writer that has owed an answer for too long. The next read detects the lost connection."""
        oldest_ns = self._oldest_unanswered_ns()
        if not oldest_ns:
            return
        # A writer that still sends anything is busy, not stuck.
        unanswered_ns = SYSTEM.mono_ns() - max(oldest_ns, self._received_ns)
        stopped = unanswered_ns > self._limits.stopped_s * S and is_stopped(self._pid)
        if stopped or unanswered_ns > self._limits.hung_s * S:
            kill_verified(self._pid, self._start_time)
