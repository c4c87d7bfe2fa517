"""The writer process of an embedded store: the only process that commits.

The writer holds two locks: one on the directory, which no process can remove, and one on `writer.lock`, which older
versions check. It serves a Unix socket. Transactions that arrive together share one durable commit
(group commit). The writer runs only operations of this package and no user code. It exits after some
time without clients. If it dies, the next client starts another writer. A client that does not read,
or sends half a frame, delays no other client.

The writer reports its start with one line on standard output: `ready`, `held` (another process is the
writer), or `error` and the error as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from holdfast import __version__, gc_control
from holdfast.clock import SYSTEM, S
from holdfast.config import COMMIT_ROWS_MAX, COMMIT_TXNS_MAX, WriterLimits
from holdfast.errors import (
    Busy,
    HoldfastError,
    Invalid,
    NotFound,
    StoreBusy,
    StoreFull,
    StoreGone,
    StoreReplaced,
    to_wire,
)
from holdfast.store import schema
from holdfast.store.engine import StoreEngine
from holdfast.store.lmdb import permissions
from holdfast.store.lmdb.backend import LmdbBackend, prepare_directory, storage_error
from holdfast.store.lmdb.directory_identity import DATA_FILE, READER_TABLE_FILE, DirectoryIdentity
from holdfast.store.lmdb.inspection import inspect_store
from holdfast.store.lmdb.protocol import (
    PROTOCOL,
    WriterMessage,
    WriterWelcome,
    decode_client_message,
    decode_hello,
    encode,
    encode_frame,
    new_frame_decoder,
    schema_mismatch,
)
from holdfast.store.lmdb.redo_log import LOG_FILES as LOGS
from holdfast.store.lmdb.writer_address import (
    LOG_FILE,
    SOCKET_FILE,
    WRITER_LOCK_FILE,
    WriterArguments,
    redirect_stderr_to_log,
    short_directory,
)
from holdfast.store.parked_requests import RequestId
from holdfast.store.requests import PARKED, CommitAnswer, CommitRequest

# Modules of common operations, imported while the writer is idle and not while a client waits. A client waits for at
# most one import, so the dependencies of large modules are listed before them.
_PRELOADED_MODULES = (
    "holdfast.tasks.events", "holdfast.tasks.leases", "holdfast.tasks.operations",
    "holdfast.leadership.worker_registry", "holdfast.durable.queue", "holdfast.world.timers",
    "holdfast.world.cycle", "holdfast.workers.orchestrator",
)  # fmt: skip
_PRELOAD_POLL_S = 0.001
# How often the writer checks the identity of all files.
_DIRECTORY_CHECK_NS = S
# After this long without a batch, the writer checks the data file before the next batch.
_IDLE_CHECK_NS = S // 100
# The poll interval of a process that waits for the lock. It grows from the first value to the last.
_LOCK_POLL_S, _LOCK_POLL_S_MAX = 0.002, 0.05


class ClientConnection:
    __slots__ = (
        "answers",
        "events",
        "frames",
        "is_dropped",
        "is_greeted",
        "out",
        "parked",
        "sock",
        "topics",
        "watched",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.events = select.EPOLLIN
        self.is_dropped = False
        self.frames = new_frame_decoder()
        self.is_greeted = False
        self.out = bytearray()
        self.answers: list[CommitAnswer] = []
        self.topics: dict[str, int] = {}
        self.watched: set[str] = set()
        self.parked: set[RequestId] = set()


class Writer:
    def __init__(
        self, path: Path, backend: LmdbBackend, engine: StoreEngine, limits: WriterLimits
    ) -> None:
        self._path = path
        self._backend = backend
        self._engine = engine
        self._limits = limits
        self._epoll = select.epoll()
        # By file descriptor.
        self._connections: dict[int, ClientConnection] = {}
        self._watchers: dict[str, set[ClientConnection]] = {}
        self._queue: list[tuple[ClientConnection, CommitRequest]] = []
        self._parked_clients: dict[RequestId, ClientConnection] = {}
        self._start_commit_no = engine.commit_no
        self._stopping = False
        self._listener = listen(path)
        self._socket_status = os.stat(path / SOCKET_FILE)
        # A commit is valid only if a new client would find it: the writer checks the data file after each batch and
        # all files periodically.
        self._data_identity = DirectoryIdentity(path, (DATA_FILE,))
        self._data_checked_ns = 0
        self._directory_identity = DirectoryIdentity(
            path, (DATA_FILE, WRITER_LOCK_FILE, SOCKET_FILE, READER_TABLE_FILE, *LOGS)
        )
        self._spare_fd = os.open(os.devnull, os.O_RDONLY)
        self._epoll.register(self._listener, select.EPOLLIN)

    def stop(self, *_: object) -> None:
        self._stopping = True

    def serve(self) -> None:
        idle_since_ns = SYSTEM.mono_ns()
        checked_ns, checked_no, directory_checked_ns = 0, -1, 0
        to_import = list(_PRELOADED_MODULES)
        while not self._stopping:
            wait_s = _PRELOAD_POLL_S if to_import else self._limits.reader_check_s
            events = self._epoll.poll(0 if self._queue else wait_s)
            if to_import and not events and not self._queue:
                importlib.import_module(to_import.pop(0))
                if not to_import:
                    gc_control.disable_automatic()
            for fd, mask in events:
                connection = self._connections.get(fd)
                if connection is None:
                    # The event may belong to a connection that was just dropped.
                    if fd == self._listener.fileno():
                        self._accept()
                elif mask != select.EPOLLOUT:
                    self._receive(connection)
                else:
                    self._send(connection)
            if self._queue:
                if SYSTEM.mono_ns() - self._data_checked_ns >= _IDLE_CHECK_NS:
                    self._data_identity.check()
                self._commit()
                gc_control.collect_between_batches(busy=bool(self._queue))
            self._backend.tick()
            now_ns = SYSTEM.mono_ns()
            if self._connections:
                idle_since_ns = now_ns
            elif now_ns - idle_since_ns > self._limits.idle_exit_s * S:
                return
            if now_ns - directory_checked_ns >= _DIRECTORY_CHECK_NS:
                self._directory_identity.check()
                directory_checked_ns = now_ns
            if (
                now_ns - checked_ns > self._limits.reader_check_s * S
                and checked_no != self._engine.commit_no
            ):
                self._backend.env.reader_check()
                checked_ns, checked_no = now_ns, self._engine.commit_no

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # The directory may have been replaced, and the socket may belong to another writer.
            if os.path.samestat(self._socket_status, os.stat(self._path / SOCKET_FILE)):
                (self._path / SOCKET_FILE).unlink()
        self._listener.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._epoll.close()
        self._backend.close()

    # -- commit --------------------------------------------------------------------------------

    def _commit(self) -> None:
        count = 1 if len(self._queue) == 1 else self._batch_size()
        batch, self._queue = self._queue[:count], self._queue[count:]
        # Unparked requests are answered last: a client woken with work may take the CPU from the writer and delay
        # the remaining answers.
        to_reply: dict[ClientConnection, None] = {}
        try:
            answers = self._engine.apply_batch([request for _, request in batch])
        except StoreFull as error:
            answers = [CommitAnswer(request.no, to_wire(error)) for _, request in batch]
        # If the path was replaced during the commit, the writer exits without an answer.
        self._data_identity.check()
        self._data_checked_ns = SYSTEM.mono_ns()
        for connection, request in batch:
            if request.park_topics or request.cancels_parked:
                self._track_parked(connection, (request.client, request.no))
        for (connection, _), answer in zip(batch, answers, strict=True):
            if answer is not PARKED:
                connection.answers.append(answer)
                to_reply[connection] = None
        if self._engine.unparked or self._engine.overdue:
            senders = {
                (request.client, request.no): connection
                for connection, request in batch
                if request.park_topics or request.cancels_parked
            }
            for request, answer in self._engine.unparked:
                connection = senders.get((request.client, request.no)) or self._untrack_parked(
                    request
                )
                connection.answers.append(answer)
                to_reply[connection] = None
            # Before later requests: one of them may cancel an overdue request.
            self._queue[:0] = [
                (
                    senders.get((request.client, request.no)) or self._untrack_parked(request),
                    request,
                )
                for request in self._engine.overdue
            ]
        for topic in self._engine.notified_topics:
            for connection in self._watchers.get(topic, ()):
                connection.topics[topic] = self._engine.commit_no
                to_reply[connection] = None
        for connection in to_reply:
            if not connection.is_dropped:
                self._reply(connection)
        self._engine.record_commit()

    def _track_parked(self, connection: ClientConnection, request_id: RequestId) -> None:
        """Record the connection of a request if it is parked."""
        former = self._parked_clients.pop(request_id, None)
        if former is not None:
            former.parked.discard(request_id)
        if request_id in self._engine.parked_requests:
            self._parked_clients[request_id] = connection
            connection.parked.add(request_id)

    def _untrack_parked(self, request: CommitRequest) -> ClientConnection:
        """Remove an unparked request from its connection and return the connection."""
        request_id = (request.client, request.no)
        connection = self._parked_clients.pop(request_id)
        connection.parked.discard(request_id)
        return connection

    def _batch_size(self) -> int:
        """The number of queued requests for one commit, bounded in requests and rows."""
        rows = 0
        for count, (_, request) in enumerate(self._queue[:COMMIT_TXNS_MAX], start=1):
            rows += len(request.puts) + len(request.deletes) + len(request.appends)
            # The writes of an operation are unknown here. Estimate them from the size of its arguments.
            rows += sum(8 + len(bytes(args)) // 64 for _, args in request.calls)
            if rows > COMMIT_ROWS_MAX:
                return count
        return COMMIT_TXNS_MAX

    # -- connections ---------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._reject_client()
            return
        sock.setblocking(False)
        connection = ClientConnection(sock)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock, connection.events)

    def _reject_client(self) -> None:
        """Reject a client for lack of descriptors, using the spare one to send the error."""
        os.close(self._spare_fd)
        with contextlib.suppress(OSError), self._listener.accept()[0] as sock:
            busy = Busy(what="writer", why="no file descriptors left for clients")
            sock.sendall(encode_frame(encode(self._welcome(to_wire(busy)))))
        self._spare_fd = os.open(os.devnull, os.O_RDONLY)

    def _receive(self, connection: ClientConnection) -> None:
        try:
            data = connection.sock.recv(connection.frames.recv_bytes)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            for body in connection.frames.feed(data):
                if connection.is_dropped:
                    break
                if connection.is_greeted:
                    self._enqueue_requests(connection, body)
                else:
                    self._handshake(connection, body)
        except (msgspec.MsgspecError, Invalid, UnicodeError, RecursionError) as error:
            # Drop a peer that violates the protocol and keep serving.
            print(f"dropped a client: {error}", file=sys.stderr, flush=True)
            self._drop(connection)

    def _enqueue_requests(self, connection: ClientConnection, body: bytes) -> None:
        message = decode_client_message(body)
        for request in message.requests:
            self._queue.append((connection, request))
        for topic in message.unwatch:
            self._unwatch(connection, topic)
        if message.watch:
            for topic in message.watch:
                connection.watched.add(topic)
                self._watchers.setdefault(topic, set()).add(connection)
                # After a takeover the last notification is unknown: report an upper bound, and the client reads again.
                connection.topics[topic] = self._engine.topics.get(
                    topic, self._notifications_unknown_until()
                )
            self._reply(connection)

    def _notifications_unknown_until(self) -> int:
        """The last commit whose notified topics are unknown."""
        return max(self._start_commit_no, self._engine.topics_unknown_until)

    def _unwatch(self, connection: ClientConnection, topic: str) -> None:
        connection.watched.discard(topic)
        connection.topics.pop(topic, None)
        watchers = self._watchers.get(topic)
        if watchers is not None:
            watchers.discard(connection)
            if not watchers:
                del self._watchers[topic]

    def _handshake(self, connection: ClientConnection, body: bytes) -> None:
        hello = decode_hello(body)
        # A writer whose path leads elsewhere ends now. A client that reached it through the moved directory starts
        # another writer there.
        self._directory_identity.check()
        error = None
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            running, yours = f"{__version__}/{PROTOCOL}", f"{hello.version}/{hello.protocol}"
            error = to_wire(Invalid(what="version and protocol", running=running, yours=yours))
        elif hello.schema != schema.SCHEMA_VERSION:
            error = to_wire(schema_mismatch(writer=schema.SCHEMA_VERSION, client=hello.schema))
        connection.is_greeted = error is None
        connection.out += encode_frame(encode(self._welcome(error)))
        self._send(connection)

    def _welcome(self, error: list[Any] | None) -> WriterWelcome:
        data_identity = self._data_identity.data_identity
        assert data_identity is not None, "the writer has opened the data file"
        return WriterWelcome(
            store_id=self._engine.store_id,
            generation=self._engine.generation,
            commit_no=self._engine.commit_no,
            offset_ns=self._engine.anchor.offset_ns,
            boot_id=self._engine.anchor.boot_id,
            pid=os.getpid(),
            inode=data_identity[1],
            error=error,
            schema=schema.SCHEMA_VERSION,
        )

    def _reply(self, connection: ClientConnection) -> None:
        body = encode(WriterMessage(connection.answers, connection.topics))
        connection.answers, connection.topics = [], {}
        data = encode_frame(body)
        if not connection.out:
            try:
                sent = connection.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(connection)
                return
            if sent == len(data):
                return
            data = data[sent:]
        connection.out += data
        if len(connection.out) > self._limits.backlog_bytes:
            self._drop(connection)
            return
        self._watch_writable(connection)

    def _send(self, connection: ClientConnection) -> None:
        try:
            sent = connection.sock.send(connection.out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        del connection.out[:sent]
        self._watch_writable(connection)

    def _watch_writable(self, connection: ClientConnection) -> None:
        events = select.EPOLLIN | (select.EPOLLOUT if connection.out else 0)
        if connection.events != events:
            connection.events = events
            self._epoll.modify(connection.sock, events)

    def _drop(self, connection: ClientConnection) -> None:
        if connection.is_dropped:
            return
        connection.is_dropped = True
        del self._connections[connection.sock.fileno()]
        # The client resends its unanswered requests: they must not be applied twice.
        self._queue = [
            (owner, request) for owner, request in self._queue if owner is not connection
        ]
        for name in connection.parked:
            self._engine.parked_requests.remove(name)
            del self._parked_clients[name]
        for topic in list(connection.watched):
            self._unwatch(connection, topic)
        self._epoll.unregister(connection.sock)
        connection.sock.close()


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        (path / SOCKET_FILE).unlink()
    with short_directory(path) as directory:
        listener.bind(f"{directory}/{SOCKET_FILE}")
    os.chmod(path / SOCKET_FILE, permissions.file_mode(path))
    permissions.chown_to_directory_owner(path, SOCKET_FILE)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


class WriterLock:
    """The writer lock of a directory, held until it is closed or the process ends.

    `writer.lock` can be deleted and created again while a writer holds it. The directory cannot: a process that
    reaches the same `data.mdb` by the same path finds the same lock.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []

    def try_acquire(self, path: Path) -> bool:
        """Acquire the lock; False if another process holds it."""
        try:
            for file, flags in (
                (path, os.O_RDONLY | os.O_DIRECTORY),
                (path / WRITER_LOCK_FILE, os.O_RDWR | os.O_CREAT),
            ):
                self._fds.append(os.open(file, flags | os.O_CLOEXEC, 0o600))
                fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        except OSError:
            self.close()
            raise
        return True

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def try_lock(path: Path) -> WriterLock | None:
    """Acquire the writer lock; None if another process holds it."""
    lock = WriterLock()
    return lock if lock.try_acquire(path) else None


def wait_for_lock(path: Path, lock_wait_s: float) -> WriterLock:
    """Wait for the writer lock. An idle writer exits after some time, and a killed one may first finish a sync."""
    deadline_ns = SYSTEM.mono_ns() + int(lock_wait_s * S)
    poll_s = _LOCK_POLL_S
    while True:
        try:
            lock = try_lock(path)
        except OSError as error:
            raise storage_error(error, path) from None
        if lock is not None:
            return lock
        if SYSTEM.mono_ns() >= deadline_ns:
            raise StoreBusy(path=str(path))
        SYSTEM.sleep(poll_s)
        poll_s = min(poll_s * 1.5, _LOCK_POLL_S_MAX)


def open_engine(path: Path, *, bootstrap: bool) -> tuple[LmdbBackend, StoreEngine]:
    """Open the backend and the engine of a directory. The caller holds the writer lock."""
    recovery = inspect_store(path, bootstrap=bootstrap)
    backend = LmdbBackend(path, readonly=False, logged=True, recovery=recovery)
    try:
        return backend, StoreEngine(backend, SYSTEM, bootstrap=bootstrap)
    except lmdb.Error as error:
        backend.close()
        raise storage_error(error, path) from None
    except BaseException:
        backend.close()
        raise


def main(argv: list[str]) -> int:
    arguments = msgspec.json.decode(argv[0], type=WriterArguments)
    path = Path(arguments.path)
    limits = WriterLimits(
        idle_exit_s=arguments.linger_s,
        backlog_bytes=arguments.backlog_bytes,
        reader_check_s=arguments.reader_check_s,
    )
    try:
        if not arguments.bootstrap and not (path / DATA_FILE).exists():
            raise NotFound(
                what="store", path=str(path), why="no store in this directory, and bootstrap is off"
            )
        prepare_directory(path)
        if not (path / WRITER_LOCK_FILE).exists():
            # Inspect first: a refused store gets no lock file.
            try:
                inspect_store(path, bootstrap=arguments.bootstrap)
            except HoldfastError:
                # Another writer may be creating the store: the lock holder inspects it again.
                if not (path / WRITER_LOCK_FILE).exists():
                    raise
        try:
            lock = try_lock(path)
        except OSError as error:
            raise storage_error(error, path) from None
        if lock is None:
            report_status("held")
            return 0
        backend, engine = open_engine(path, bootstrap=arguments.bootstrap)
        writer = Writer(path, backend, engine, limits)
        redirect_stderr_to_log(path, permissions.file_mode(path))
        permissions.chown_to_directory_owner(path, LOG_FILE)
    except HoldfastError as error:
        report_status("error " + msgspec.json.encode(to_wire(error)).decode())
        return 1
    _raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, writer.stop)
    report_status("ready")
    try:
        writer.serve()
    except (StoreGone, StoreReplaced) as error:
        # Each client checks the path itself when its connection ends.
        print(f"holdfast: the writer ends: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        writer.close()
    return 0


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit: each client needs a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def report_status(line: str) -> None:
    # The starting process may have exited.
    with contextlib.suppress(OSError):
        os.write(1, line.encode() + b"\n")
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
