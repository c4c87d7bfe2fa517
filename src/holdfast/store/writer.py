"""The writer process of an embedded store: the one process that commits.

The process that holds the lock is the writer: a lock on the directory, which cannot be removed from it, and one on
`writer.lock`, by which older versions know each other. It serves a Unix socket: transactions of all
clients that arrive together share one durable commit. It runs no user code and only operations of
this package. It leaves when it has had no client for a while; when it dies, the next client starts
another. A client that reads nothing or sends half a frame delays nobody.

On its standard output it says one line: `ready`, `held` (another is the writer), or `error` and
the error as JSON.
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

from holdfast import __version__, garbage
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
from holdfast.store import access
from holdfast.store.address import LOCK, LOG, SOCKET, Arguments, directory_of, keep_log
from holdfast.store.engine import STANDS, Answer, Engine, Request
from holdfast.store.home import DATA, READERS, Home
from holdfast.store.inspection import inspect
from holdfast.store.redo import FILES as LOGS
from holdfast.store.rows import LmdbBackend, prepare, storage_error
from holdfast.store.standers import Name
from holdfast.store.wire import (
    PROTOCOL,
    Frames,
    ToClient,
    Welcome,
    decode_hello,
    decode_to_writer,
    encode,
    frame,
)

# What most clients call first: imported in the first idle moments, not while one of them waits for it. Whoever
# comes then waits for one of these at most, so that the large ones are preceded by what they import.
_OPERATIONS = (
    "holdfast.tasks.records", "holdfast.tasks.lease", "holdfast.tasks.coordinator",
    "holdfast.authority.workers", "holdfast.durable.queue", "holdfast.world.timers",
    "holdfast.world.cycle", "holdfast.roles.orchestrator",
)  # fmt: skip
_MOMENT_S = 0.001
# How often all files of the directory are looked for at their path.
_HOME_LOOK_NS = S
# A batch that comes after this long without one is preceded by a look.
_IDLE_NS = S // 100
# How often whoever waits for the lock looks.
_LOOK_S = 0.05


class Connection:
    __slots__ = (
        "answers", "dropped", "events", "frames", "greeted", "out", "sock", "standing", "topics",
        "watched",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.events = select.EPOLLIN
        self.dropped = False
        self.frames = Frames()
        self.greeted = False
        self.out = bytearray()
        self.answers: list[Answer] = []
        self.topics: dict[str, int] = {}
        self.watched: set[str] = set()
        self.standing: set[Name] = set()


class Writer:
    def __init__(
        self, path: Path, backend: LmdbBackend, engine: Engine, limits: WriterLimits
    ) -> None:
        self._path = path
        self._backend = backend
        self._engine = engine
        self._limits = limits
        self._epoll = select.epoll()
        # By their descriptors.
        self._connections: dict[int, Connection] = {}
        self._watchers: dict[str, set[Connection]] = {}
        self._work: list[tuple[Connection, Request]] = []
        self._standers: dict[Name, Connection] = {}
        self._born_commit_no = engine.commit_no
        self._stopping = False
        self._listener = listen(path)
        self._socket = os.stat(path / SOCKET)
        # A commit counts if a newcomer would find it: one file says so after each batch, all of them now and then.
        self._home = Home(path, (DATA,))
        self._home_ns = 0
        self._whole_home = Home(path, (DATA, LOCK, SOCKET, READERS, *LOGS))
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._epoll.register(self._listener, select.EPOLLIN)

    def stop(self, *_: object) -> None:
        self._stopping = True

    def serve(self) -> None:
        alone_since_ns = SYSTEM.mono_ns()
        checked_ns, checked_no, home_ns = 0, -1, 0
        ahead = list(_OPERATIONS)
        while not self._stopping:
            wait_s = _MOMENT_S if ahead else self._limits.reader_check_s
            events = self._epoll.poll(0 if self._work else wait_s)
            if ahead and not events and not self._work:
                importlib.import_module(ahead.pop(0))
                if not ahead:
                    garbage.take_over()
            for fd, mask in events:
                connection = self._connections.get(fd)
                if connection is None:
                    # One that was dropped a moment ago may be told of, too.
                    if fd == self._listener.fileno():
                        self._accept()
                elif mask != select.EPOLLOUT:
                    self._receive(connection)
                else:
                    self._send(connection)
            if self._work:
                if SYSTEM.mono_ns() - self._home_ns >= _IDLE_NS:
                    self._home.check()
                self._commit()
                garbage.collect(busy=bool(self._work))
            self._backend.tick()
            now_ns = SYSTEM.mono_ns()
            if self._connections:
                alone_since_ns = now_ns
            elif now_ns - alone_since_ns > self._limits.linger_s * S:
                return
            if now_ns - home_ns >= _HOME_LOOK_NS:
                self._whole_home.check()
                home_ns = now_ns
            if (
                now_ns - checked_ns > self._limits.reader_check_s * S
                and checked_no != self._engine.commit_no
            ):
                self._backend.env.reader_check()
                checked_ns, checked_no = now_ns, self._engine.commit_no

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # The directory may have been removed and made anew: then this is another's.
            if os.path.samestat(self._socket, os.stat(self._path / SOCKET)):
                (self._path / SOCKET).unlink()
        self._listener.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._epoll.close()
        self._backend.close()

    # -- commit --------------------------------------------------------------------------------

    def _commit(self) -> None:
        count = 1 if len(self._work) == 1 else self._batch_size()
        batch, self._work = self._work[:count], self._work[count:]
        # Whoever stood is answered last: a process that is woken with work to do may take the processor from
        # us, and the others would wait for that.
        touched: dict[Connection, None] = {}
        try:
            answers = self._engine.decide([request for _, request in batch])
        except StoreFull as error:
            answers = [Answer(request.no, to_wire(error)) for _, request in batch]
        # Committed, but not where a newcomer looks: then there is no answer, and this writer ends.
        self._home.check()
        self._home_ns = SYSTEM.mono_ns()
        for connection, request in batch:
            if request.when or request.withdrawn:
                self._follow(connection, (request.client, request.no))
        for (connection, _), answer in zip(batch, answers, strict=True):
            if answer is not STANDS:
                connection.answers.append(answer)
                touched[connection] = None
        if self._engine.stood or self._engine.late:
            came = {
                (request.client, request.no): connection
                for connection, request in batch
                if request.when or request.withdrawn
            }
            for request, answer in self._engine.stood:
                connection = came.get((request.client, request.no)) or self._step_down(request)
                connection.answers.append(answer)
                touched[connection] = None
            # Before what came meanwhile: it may be that one of them is called back there.
            self._work[:0] = [
                (came.get((request.client, request.no)) or self._step_down(request), request)
                for request in self._engine.late
            ]
        for topic in self._engine.rung:
            for connection in self._watchers.get(topic, ()):
                connection.topics[topic] = self._engine.commit_no
                touched[connection] = None
        for connection in touched:
            if not connection.dropped:
                self._reply(connection)
        self._engine.remember()

    def _follow(self, connection: Connection, name: Name) -> None:
        """Keep in mind whose it is that stands, if it does."""
        former = self._standers.pop(name, None)
        if former is not None:
            former.standing.discard(name)
        if name in self._engine.standers:
            self._standers[name] = connection
            connection.standing.add(name)

    def _step_down(self, request: Request) -> Connection:
        """Whose it was that stands no more."""
        name = (request.client, request.no)
        connection = self._standers.pop(name)
        connection.standing.discard(name)
        return connection

    def _batch_size(self) -> int:
        """How many of those that wait go into one commit: bounded in number and in rows."""
        rows = 0
        for count, (_, request) in enumerate(self._work[:COMMIT_TXNS_MAX], start=1):
            rows += len(request.puts) + len(request.deletes) + len(request.appends)
            # What an operation writes is not known before; its arguments tell the size.
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
                self._turn_away()
            return
        sock.setblocking(False)
        connection = Connection(sock)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock, connection.events)

    def _turn_away(self) -> None:
        """No descriptor is left for another client: say so with the one kept for this."""
        os.close(self._spare)
        with contextlib.suppress(OSError), self._listener.accept()[0] as sock:
            busy = Busy(what="writer", why="it has no more file descriptors for clients")
            sock.sendall(frame(encode(self._welcome(to_wire(busy)))))
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(connection.frames.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            for body in connection.frames.feed(data):
                if connection.dropped:
                    break
                if connection.greeted:
                    self._take(connection, body)
                else:
                    self._greet(connection, body)
        except (msgspec.MsgspecError, Invalid, UnicodeError, RecursionError) as error:
            # A peer that breaks the protocol is not one of ours: hang up, keep serving.
            print(f"dropped a client: {error}", file=sys.stderr, flush=True)
            self._drop(connection)

    def _take(self, connection: Connection, body: bytes) -> None:
        message = decode_to_writer(body)
        for request in message.requests:
            self._work.append((connection, request))
        for topic in message.unwatch:
            self._unwatch(connection, topic)
        if message.watch:
            for topic in message.watch:
                connection.watched.add(topic)
                self._watchers.setdefault(topic, set()).add(connection)
                # When it rang last may not be known, as after a take-over: say now, they will look again.
                connection.topics[topic] = self._engine.topics.get(topic, self._rung_before())
            self._reply(connection)

    def _rung_before(self) -> int:
        """The last commit of which it is not known what it notified."""
        return max(self._born_commit_no, self._engine.topics_forgotten)

    def _unwatch(self, connection: Connection, topic: str) -> None:
        connection.watched.discard(topic)
        connection.topics.pop(topic, None)
        watchers = self._watchers.get(topic)
        if watchers is not None:
            watchers.discard(connection)
            if not watchers:
                del self._watchers[topic]

    def _greet(self, connection: Connection, body: bytes) -> None:
        hello = decode_hello(body)
        error = None
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            error = to_wire(Invalid(what="version", running=__version__, yours=hello.version))
        connection.greeted = error is None
        connection.out += frame(encode(self._welcome(error)))
        self._send(connection)

    def _welcome(self, error: list[Any] | None) -> Welcome:
        return Welcome(
            self._engine.store_id,
            self._engine.generation,
            self._engine.commit_no,
            self._engine.anchor.offset_ns,
            self._engine.anchor.boot_id,
            os.getpid(),
            os.stat(self._path / "data.mdb").st_ino,
            error,
        )

    def _reply(self, connection: Connection) -> None:
        body = encode(ToClient(connection.answers, connection.topics))
        connection.answers, connection.topics = [], {}
        data = frame(body)
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

    def _send(self, connection: Connection) -> None:
        try:
            sent = connection.sock.send(connection.out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        del connection.out[:sent]
        self._watch_writable(connection)

    def _watch_writable(self, connection: Connection) -> None:
        events = select.EPOLLIN | (select.EPOLLOUT if connection.out else 0)
        if connection.events != events:
            connection.events = events
            self._epoll.modify(connection.sock, events)

    def _drop(self, connection: Connection) -> None:
        if connection.dropped:
            return
        connection.dropped = True
        del self._connections[connection.sock.fileno()]
        # What it had sent and was not answered its client sends again: it must not count twice.
        self._work = [(of, request) for of, request in self._work if of is not connection]
        for name in connection.standing:
            self._engine.standers.remove(name)
            del self._standers[name]
        for topic in list(connection.watched):
            self._unwatch(connection, topic)
        self._epoll.unregister(connection.sock)
        connection.sock.close()


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        (path / SOCKET).unlink()
    with directory_of(path) as directory:
        listener.bind(f"{directory}/{SOCKET}")
    os.chmod(path / SOCKET, access.file_mode(path))
    access.hand_over(path, SOCKET)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


class WriterLock:
    """The writer's lock of a directory, until it is closed or its process ends.

    `writer.lock` can be removed and made anew while a writer has it locked. The directory cannot: a process that
    reaches the same `data.mdb` by the same path finds the same lock.
    """

    def __init__(self) -> None:
        self._held: list[int] = []

    def take(self, path: Path) -> bool:
        """Whether no other process has it."""
        try:
            for file, flags in (
                (path, os.O_RDONLY | os.O_DIRECTORY),
                (path / LOCK, os.O_RDWR | os.O_CREAT),
            ):
                self._held.append(os.open(file, flags | os.O_CLOEXEC, 0o600))
                fcntl.flock(self._held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        except OSError:
            self.close()
            raise
        return True

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())


def take_lock(path: Path) -> WriterLock | None:
    """The writer's lock, or None when another process has it."""
    lock = WriterLock()
    return lock if lock.take(path) else None


def await_lock(path: Path, patience_s: float) -> WriterLock:
    """The writer's lock. A writer that nobody needs any more leaves after a while; one that was killed may
    have a sync to end first."""
    deadline_ns = SYSTEM.mono_ns() + int(patience_s * S)
    while True:
        try:
            lock = take_lock(path)
        except OSError as error:
            raise storage_error(error, path) from None
        if lock is not None:
            return lock
        if SYSTEM.mono_ns() >= deadline_ns:
            raise StoreBusy(path=str(path))
        SYSTEM.sleep(_LOOK_S)


def open_engine(path: Path, *, bootstrap: bool) -> tuple[LmdbBackend, Engine]:
    """The rows and the engine of a directory. The caller holds the lock."""
    recovery = inspect(path, bootstrap=bootstrap)
    backend = LmdbBackend(path, readonly=False, logged=True, recovery=recovery)
    try:
        return backend, Engine(backend, SYSTEM, bootstrap=bootstrap)
    except lmdb.Error as error:
        backend.close()
        raise storage_error(error, path) from None
    except BaseException:
        backend.close()
        raise


def main(argv: list[str]) -> int:
    arguments = msgspec.json.decode(argv[0], type=Arguments)
    path = Path(arguments.path)
    limits = WriterLimits(
        linger_s=arguments.linger_s,
        backlog_bytes=arguments.backlog_bytes,
        reader_check_s=arguments.reader_check_s,
    )
    try:
        if not arguments.bootstrap and not (path / DATA).exists():
            raise NotFound(what="store", path=str(path), why="none here, and bootstrap is off")
        prepare(path)
        if not (path / LOCK).exists():
            # A store that is refused gets no lock file either.
            try:
                inspect(path, bootstrap=arguments.bootstrap)
            except HoldfastError:
                # Another writer may be making the store meanwhile: whoever has the lock looks again.
                if not (path / LOCK).exists():
                    raise
        try:
            lock = take_lock(path)
        except OSError as error:
            raise storage_error(error, path) from None
        if lock is None:
            say("held")
            return 0
        backend, engine = open_engine(path, bootstrap=arguments.bootstrap)
        writer = Writer(path, backend, engine, limits)
        keep_log(path, access.file_mode(path))
        access.hand_over(path, LOG)
    except HoldfastError as error:
        say("error " + msgspec.json.encode(to_wire(error)).decode())
        return 1
    _take_all_descriptors()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, writer.stop)
    say("ready")
    try:
        writer.serve()
    except (StoreGone, StoreReplaced) as error:
        # Each client looks for itself at the path when its connection ends.
        print(f"holdfast: the writer ends: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        writer.close()
    return 0


def _take_all_descriptors() -> None:
    """Each client takes one: as many as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def say(line: str) -> None:
    # Whoever started us may be gone already.
    with contextlib.suppress(OSError):
        os.write(1, line.encode() + b"\n")
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
