"""The redo log of an embedded store: a commit is durable by one append and one sync.

LMDB below it commits without syncing. What that needs to survive a power cut:

- A *base*: a commit of LMDB whose pages are all on disk. A snapshot of it is kept open, so LMDB reuses
  none of its pages, and a copy of its meta page is kept here, because LMDB overwrites that.
- Every commit since, as a record that was synced before LMDB was told to commit: nobody ever sees what
  could be lost.

A *checkpoint* makes the latest commit the base, beside the commits that go on: it syncs LMDB's file, then
says so in the header of the log. There are two logs that take turns; commits go into one while the other's
are still needed. Recovery puts the meta page of the base back and commits the records after it again, with
the numbers they had.

If others have the store open, the machine has not lost what LMDB wrote: then only a commit that was logged,
and that LMDB was not told of any more, is made up for.

Recovery reads first and writes after: `Recovery.looking` shows the rows as they are going to be, and checks every
page that the replay touches. Each round has a random salt, which its records begin with, so that nothing that a
caller stored is ever taken for a record.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec

from holdfast.clock import SYSTEM
from holdfast.config import REDO_BYTES, REDO_BYTES_MAX, REDO_COMMITS, REDO_COMMITS_MAX, REDO_NS
from holdfast.errors import SchemaMismatch, StoreCorrupt, StoreError
from holdfast.store import schema
from holdfast.store.pages import META_BYTES, META_COUNT, Pages, metas, newest, read_meta
from holdfast.store.view import View

FILES = ("redo.0", "redo.1")
_BESIDE = "if the machine has not lost power since, data.mdb is whole without it: remove redo.0 and redo.1"
DATA = "data.mdb"
LOCK = "lock.mdb"

# A key and its value, None if it was deleted.
Change = tuple[bytes, bytes | None]

_FAMILY = b"holdfast redo "
_MAGIC = _FAMILY + b"1\n"
_HEADER_BYTES = 4096
# A header lies in one sector, so that a power cut leaves the old one or the new one.
_SECTOR_BYTES = 512
_SALT_BYTES = 8
_SCHEMA = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)
# The base, and the one that is to follow it.
_BASES_MAX = 2
# A header is never written over one that is needed: the first says that a round has begun, or that the log
# is closed, the second that its base is on disk.
_BEGUN_AT, _BASED_AT = _HEADER_PLACES = (0, 2048)
# CRC-32 of what follows it, and its length.
_HEAD = struct.Struct("<II")
# The same, the round of the log, the number of the commit. The salt of the round comes before it.
_RECORD = struct.Struct("<IIQQ")
_encode = msgspec.msgpack.Encoder().encode
_changes: msgspec.msgpack.Decoder[list[Change]] = msgspec.msgpack.Decoder(list[Change])

# A page begins with its own number.
_PGNO = struct.Struct("<Q")


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What a log says of itself. `meta` is the base's; while it is empty, the base is the other log's.
    A log that is `closed` is not needed: all there is has been synced, and `meta` is that of the last commit.
    Logs of earlier versions have neither a schema nor a salt."""

    round: int
    base: int
    meta: bytes = b""
    closed: bool = False
    schema: tuple[int, int] | None = None
    salt: bytes = b""


_header: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


class Redo:
    """The log of an open environment. One thread commits; a second one syncs beside it."""

    def __init__(self, path: Path, env: lmdb.Environment, *, round: int) -> None:
        self._env = env
        self._psize = int(env.stat()["psize"])
        self._data = os.open(path / DATA, os.O_RDONLY | os.O_CLOEXEC)
        self._files = [_open(path / name) for name in FILES]
        self._round = round
        self._salt = b""
        # The number of the next commit, and where its record will be.
        self._next = 0
        self._at = self._last_at = _HEADER_BYTES
        self._commits = 0
        self._since_ns = 0
        self._failure: BaseException | None = None
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Set while no checkpoint is under way.
        self._settled = threading.Event()
        self._settled.set()
        self._bases: list[lmdb.Transaction] = []
        _sync_directory(path)
        self._thread = threading.Thread(target=self._serve, name="holdfast-redo", daemon=True)
        self._thread.start()
        self.checkpoint()
        self._wait()

    # -- the committing thread -------------------------------------------------------------------

    def append(self, id: int, changes: Sequence[Change]) -> None:
        """Make a commit durable. If that fails, nothing has happened."""
        if self._at > REDO_BYTES_MAX or self._commits >= REDO_COMMITS_MAX:
            self._wait()
            self.checkpoint()
        self._check()
        if id != self._next:
            raise StoreCorrupt(what="commit", why="out of order", expected=self._next, found=id)
        body = _encode(changes)
        record = _record(self._salt, self._round, id, body)
        file = self._file
        _write(file, record + body, self._at)
        try:
            os.fdatasync(file)
        except OSError as error:
            # It may be there after all: nobody may be told that it failed.
            self._failure = error
            self._check()
        self._last_at, self._at = self._at, self._at + len(record) + len(body)

    def void(self) -> None:
        """The last append did not happen: LMDB could not commit it."""
        self._at = self._last_at
        _write(self._file, bytes(_SALT_BYTES + _RECORD.size), self._at)
        os.fdatasync(self._file)

    def committed(self) -> None:
        """LMDB has committed what was appended. Whatever goes wrong now is for the next one to hear."""
        self._next += 1
        if not self._commits:
            self._since_ns = SYSTEM.mono_ns()
        self._commits += 1
        if self._commits >= REDO_COMMITS or self._at >= REDO_BYTES:
            try:
                self.checkpoint()
            except Exception as error:
                self._failure = error

    def tick(self) -> None:
        """To be called now and then: what was committed does not wait for ever to be checkpointed."""
        self._check()
        if self._commits and SYSTEM.mono_ns() - self._since_ns >= REDO_NS:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Begin to make the latest commit the base, unless the last one is still on its way."""
        if not self._settled.is_set():
            return
        self._check()
        while len(self._bases) >= _BASES_MAX:
            self._bases.pop(0).abort()
        try:
            base = self._env.begin()
        except lmdb.ReadersFullError:
            if not self._bases:
                raise
            return  # the log grows until there is room for another snapshot
        self._bases.append(base)
        id = base.id()
        meta = self._meta_of(id)
        self._round += 1
        self._salt = salt = SYSTEM.entropy(_SALT_BYTES)
        self._next = id + 1
        self._at = self._last_at = _HEADER_BYTES
        self._commits = 0
        file, round = self._file, self._round
        other = self._files[(round + 1) % len(self._files)]
        # Records of this round count if those of the one before it lead up to them.
        _write(file, _headed(Header(round, id, schema=_SCHEMA, salt=salt)), _BEGUN_AT)

        def settle() -> None:
            self._env.sync(True)
            _write(file, _headed(Header(round, id, meta, schema=_SCHEMA, salt=salt)), _BASED_AT)
            os.fdatasync(file)
            # Not before: until now it was needed.
            if os.fstat(other).st_size > REDO_BYTES_MAX:
                os.ftruncate(other, REDO_BYTES_MAX)

        self._settled.clear()
        self._asked.put(settle)

    def close(self) -> None:
        """Leave nothing to recover."""
        self._wait()
        # No checkpoint: for that there may be no room.
        self._env.sync(True)
        for base in self._bases:
            base.abort()
        self._asked.put(None)
        self._thread.join()
        last = self._next - 1
        closed = Header(self._round, last, self._meta_of(last), closed=True, schema=_SCHEMA)
        _write(self._file, _headed(closed), _BEGUN_AT)
        os.fdatasync(self._file)
        self.abandon()

    def abandon(self) -> None:
        """Close without a word, as if killed."""
        self._asked.put(None)
        for file in (*self._files, self._data):
            os.close(file)

    def _meta_of(self, id: int) -> bytes:
        """The meta page of one of the last two commits."""
        meta = os.pread(self._data, META_BYTES, (id % META_COUNT) * self._psize)
        if read_meta(meta).txn != id:
            raise StoreCorrupt(what="meta page", why="it is not where it should be", commit=id)
        return meta

    @property
    def _file(self) -> int:
        return self._files[self._round % len(self._files)]

    def _wait(self) -> None:
        self._settled.wait()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            # What the system could not write it does not try again: only a new start knows what is there.
            raise StoreError(what="sync", why=str(self._failure)) from self._failure

    # -- the syncing thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        while (settle := self._asked.get()) is not None:
            try:
                settle()
            except BaseException as error:
                self._failure = error
            self._settled.set()


class Recovery:
    """What the logs of a directory have to say, before LMDB's file is opened. The caller holds the writer's
    lock. Nothing is written before `put_back`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # How long the file should be, if it was found to be shorter.
        self._full_bytes = 0
        found = [_log(path / name) for name in FILES]
        logs = [header for header in found if header is not None]
        self.found = bool(logs)
        last = max((log.round for log in logs), default=0)
        # A round is left out between one start and the next: a record of it may be there, without its header,
        # and what was there before does not count once the file has been synced and a log begun.
        self.round = last + len(FILES)
        closed = [log for log in logs if log.closed and log.round == last]
        self._closed = closed[0] if closed else None
        in_use = [] if closed else [log for log in logs if log.round >= last - 1]
        for log in in_use:
            if log.schema not in (None, _SCHEMA):
                # Records of another version are not ours to commit.
                raise SchemaMismatch(path=str(path), found=log.schema, expected=list(_SCHEMA))
        # Both files get a header before either is used.
        if None in found and any(log.salt for log in in_use):
            missing = path / FILES[found.index(None)]
            raise StoreCorrupt(path=str(missing), why="the log has lost its header; " + _BESIDE)
        based = [log for log in in_use if log.meta]
        self._base = max(based, key=lambda log: log.round, default=None)

    @contextmanager
    def looking(self) -> Iterator[View | None]:
        """The rows as they are going to be, None if there is no file yet. Whatever keeps the store from being
        recovered is raised here."""
        try:
            fd = os.open(self._path / DATA, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._base is not None or (self._closed is not None and self._closed.base):
                why = "it is not there, and its log is"
                raise StoreCorrupt(path=str(self._path / DATA), why=why) from None
            yield None
            return
        try:
            yield self._look(fd) if os.fstat(fd).st_size else None
        finally:
            os.close(fd)

    def _look(self, fd: int) -> View:
        meta = newest(fd)
        if self._closed is not None and self._closed.meta:
            # LMDB has no checksums: the log has a copy of the page that all others hang on. Each meta page begins with
            # its own number, and after a recovery both of them hold the same commit.
            same = meta[_PGNO.size :] == self._closed.meta[_PGNO.size :]
            if not same and read_meta(meta).txn == self._closed.base:
                raise StoreCorrupt(path=str(self._path / DATA), why="its meta page is damaged")
        records: list[tuple[int, bytes]] = []
        if self._base is not None:
            records = list(_records(self._path, self._base))
            with _alone(self._path, create=False) as alone:
                if alone:
                    _check_range(self._path, fd, self._base, records)
                    meta = self._base.meta
        pages = Pages(fd, meta)
        left = [(id, _decoded(self._path, body)) for id, body in records if id > pages.id]
        if left and left[0][0] != pages.id + 1:
            raise StoreCorrupt(path=str(self._path), why="the log does not go on from the file")
        changes = [change for _, some in left for change in some]
        if not pages.is_whole:
            # Pages at the end may be unused, and were never written then.
            pages.check_all()
            self._full_bytes = pages.full_bytes
        pages.check_paths([key for key, _ in changes])
        return View(pages, changes)

    def put_back(self) -> None:
        """Make the base the latest commit of LMDB's file again, unless others have it open."""
        if self._full_bytes:
            # A hole in the place of pages that are not in use: the next open need not read all the others.
            _lengthen(self._path / DATA, self._full_bytes)
        if self._base is not None and (self._path / DATA).exists():
            with _alone(self._path, create=True) as alone:
                if alone:
                    _put_back(self._path, self._base, list(_records(self._path, self._base)))

    def replay(self, env: lmdb.Environment) -> None:
        """Commit again what LMDB's file does not have."""
        # Whoever died in the last step of a commit has left the lock file one behind: this mends it. (The
        # snapshots that it left stay as they are: if others have the file open, they keep the base.)
        env.begin(write=True).abort()
        if self._base is None:
            return
        # The base is what the next one recovers from, if this one is killed: its pages are kept.
        with env.begin() as kept:
            at = kept.id()
            for id, body in _records(self._path, self._base):
                if id > at:
                    self._commit(env, id, body)
            env.sync(True)

    def _commit(self, env: lmdb.Environment, id: int, body: bytes) -> None:
        with env.begin(write=True) as txn:
            if txn.id() != id:
                why = "the log does not go on from the file"
                raise StoreCorrupt(path=str(self._path), why=why)
            for key, value in _decoded(self._path, body):
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, value)


def forget(path: Path) -> None:
    """What the logs say does not count any more. At no moment may one of them count without the other."""
    files = [path / name for name in FILES if (path / name).exists()]
    last = max((log.round for file in files for log in _headers(file)), default=0)
    for file in files:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            _write(fd, _headed(Header(last + 1, 0, closed=True)), _BEGUN_AT)
            os.fdatasync(fd)
        finally:
            os.close(fd)
    for file in files:
        file.unlink()
    _sync_directory(path)


def _records(path: Path, base: Header) -> Iterator[tuple[int, bytes]]:
    """The commits after the base, in order, from its log and from the one after it."""
    id = base.base
    for round in (base.round, base.round + 1):
        file = path / FILES[round % len(FILES)]
        header = _log(file)
        if header is None or header.round != round:
            return
        if header.base > id:
            # A log begins when all before it is in the other one.
            why = f"the log has no commit {id + 1}; {_BESIDE}"
            raise StoreCorrupt(path=str(file), why=why)
        data = file.read_bytes()
        at, salt = _HEADER_BYTES, header.salt
        while (body := _body_at(data, at, salt, round, id + 1)) is not None:
            id += 1
            at += len(salt) + _RECORD.size + len(body)
            yield id, body
        if salt and _has_record(data, at + 1, salt, round):
            # Each is synced before the next is written, so that only the last one can be torn.
            why = f"the record of commit {id + 1} is damaged; {_BESIDE}"
            raise StoreCorrupt(path=str(file), why=why)


def _body_at(data: bytes, at: int, salt: bytes, round: int, id: int | None) -> bytes | None:
    """What the record holds that begins here, if it is whole and the one that is to come."""
    start = at + len(salt)
    if start + _RECORD.size > len(data) or not data.startswith(salt, at):
        return None
    _, size, of_round, of_id = _RECORD.unpack_from(data, start)
    if of_round != round or (id is not None and of_id != id):
        return None
    begin = start + _RECORD.size
    body = data[begin : begin + size]
    if len(body) != size or data[at:begin] != _record(salt, round, of_id, body):
        return None
    return body


def _has_record(data: bytes, at: int, salt: bytes, round: int) -> bool:
    """Whether a whole record of this round lies behind here."""
    while (at := data.find(salt, at)) >= 0:
        if _body_at(data, at, salt, round, None) is not None:
            return True
        at += 1
    return False


def _record(salt: bytes, round: int, id: int, body: bytes) -> bytes:
    tail = _RECORD.pack(0, len(body), round, id)[4:]
    crc = zlib.crc32(body, zlib.crc32(tail, zlib.crc32(salt)))
    return salt + struct.pack("<I", crc) + tail


def _decoded(path: Path, body: bytes) -> list[Change]:
    try:
        return _changes.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreCorrupt(path=str(path), what="record of the log", why=str(error)) from None


def _headed(header: Header) -> bytes:
    body = _encode(header)
    return _MAGIC + _HEAD.pack(zlib.crc32(body), len(body)) + body


def _log(file: Path) -> Header | None:
    """The latest thing that a log says of itself; None for one that is not there, or hardly begun."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(_HEADER_BYTES + _SECTOR_BYTES)
    except FileNotFoundError:
        return None
    for at in _HEADER_PLACES:
        place = data[at : at + _SECTOR_BYTES]
        if _header_at(data, at) is None and any(place):
            if place.startswith(_FAMILY) and not place.startswith(_MAGIC):
                found = place[len(_FAMILY) : len(_MAGIC)].decode(errors="replace").strip()
                raise SchemaMismatch(path=str(file), found=f"redo log {found}", expected="1")
            raise StoreCorrupt(path=str(file), why=f"a header of the log is damaged; {_BESIDE}")
    found_here = _headers_in(data)
    if not found_here and any(data[_HEADER_BYTES:]):
        raise StoreCorrupt(path=str(file), why=f"the log has lost its header; {_BESIDE}")
    return max(found_here, key=_order, default=None)


def _headers(file: Path) -> list[Header]:
    """What can be read of a log's headers."""
    with open(file, "rb") as opened:
        return _headers_in(opened.read(_HEADER_BYTES))


def _headers_in(data: bytes) -> list[Header]:
    return [header for at in _HEADER_PLACES if (header := _header_at(data, at)) is not None]


def _order(header: Header) -> tuple[int, bool, bool]:
    return header.round, header.closed, bool(header.meta)


def _header_at(data: bytes, at: int) -> Header | None:
    start = at + len(_MAGIC) + _HEAD.size
    if not data.startswith(_MAGIC, at) or len(data) < start:
        return None
    crc, size = _HEAD.unpack_from(data, at + len(_MAGIC))
    body = data[start : start + size]
    if len(body) != size or zlib.crc32(body) != crc:
        return None
    try:
        return _header.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return None


@contextmanager
def _alone(path: Path, *, create: bool) -> Iterator[bool]:
    """Whether no other process has LMDB's file open: each has a lock on the first byte of its lock file. A
    process that comes to open it waits."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT * create | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(fd)


def _put_back(path: Path, base: Header, records: list[tuple[int, bytes]]) -> None:
    """Make the base the latest commit of LMDB's file again."""
    fd = os.open(path / DATA, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_range(path, fd, base, records)
        size = read_meta(base.meta).page_bytes
        for n in range(META_COUNT):
            _write(fd, _PGNO.pack(n) + base.meta[_PGNO.size :], n * size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _lengthen(file: Path, size: int) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _check_range(path: Path, fd: int, base: Header, records: list[tuple[int, bytes]]) -> None:
    """Refuse a file that is not the one that the log belongs to."""
    at = max(read_meta(meta).txn for meta in metas(fd))
    last = records[-1][0] if records else base.base
    if not base.base <= at <= last:
        raise StoreCorrupt(
            path=str(path / DATA),
            why=f"the log has commits {base.base} to {last}, and the file is at {at}; "
            "if the file was replaced on purpose, remove redo.0 and redo.1",
        )


def _open(file: Path) -> int:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _reserve(fd)
    if not any(os.pread(fd, _SECTOR_BYTES, _BEGUN_AT)):
        # A log without a header is a damaged one from now on.
        _write(fd, _headed(Header(0, 0, closed=True, schema=_SCHEMA)), _BEGUN_AT)
        os.fdatasync(fd)
    return fd


def _reserve(fd: int) -> None:
    """Take disk space now: on a disk that is full, what frees space has to be logged, too."""
    os.posix_fallocate(fd, 0, _HEADER_BYTES + REDO_BYTES)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        wrote = os.pwrite(fd, view, at)
        view, at = view[wrote:], at + wrote


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
