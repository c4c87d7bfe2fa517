"""Rows in LMDB: opening the files, snapshots, and the write transaction that the engine uses.

What goes wrong with a file is turned into a typed error here and nowhere else. Nothing is written
before the file was found sound.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import lmdb

from holdfast.config import MAP_BYTES, READERS_MAX
from holdfast.errors import (
    Busy,
    HoldfastError,
    Invalid,
    NetworkFilesystem,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from holdfast.store import access, liveness
from holdfast.store.api import Row
from holdfast.store.redo import Change, Recovery, Redo, forget

NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"}
    | {"ocfs2", "gfs2", "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs"}
    | {"fuse.gcsfuse", "fuse.rclone", "fuse.davfs"}
)


# What a FUSE mount does with locks and shared memory is up to its daemon: only those of local disks are known to do.
LOCAL_FUSE = frozenset(
    {
        "fuseblk",
        "fuse.ntfs-3g",
        "fuse.fuse-overlayfs",
        "fuse.gocryptfs",
        "fuse.encfs",
        "fuse.bindfs",
    }
)

# Without `buffers=True` LMDB answers with bytes; its stubs do not say so.
Get = Callable[[bytes], bytes | None]


class Cursor(Protocol):
    def set_range(self, key: bytes, /) -> bool: ...
    def prev(self) -> bool: ...
    def last(self) -> bool: ...
    def item(self) -> Row: ...
    def iternext(self) -> Iterator[Row]: ...
    def iterprev(self) -> Iterator[Row]: ...
    def putmulti(self, items: Iterable[Row], /) -> object: ...


class LmdbBackend:
    """The environment of one directory. One per process and directory, never across a fork.

    Whoever writes holds the writer's lock. With `logged`, commits are made durable by a redo log; without,
    LMDB syncs each. `recovery` is one that has looked at the directory already; else it is looked at here,
    before anything is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool,
        logged: bool = False,
        recovery: Recovery | None = None,
    ) -> None:
        self.path = path
        self._redo: Redo | None = None
        self._held = -1
        try:
            if not readonly:
                if recovery is None:
                    recovery = Recovery(path)
                    with recovery.looking():
                        pass
                # From here on it is ours: rights first, so that no other account reads what is written next.
                access.tighten(path)
                recovery.put_back()
                _reserve_lock_file(path)
            self.env = lmdb.open(
                str(path),
                map_size=MAP_BYTES,
                max_readers=READERS_MAX,
                max_dbs=0,
                readonly=readonly,
                lock=True,
                readahead=False,
                max_spare_txns=64,
                create=not readonly,
                sync=not logged,
                mode=access.file_mode(path),
            )
            if recovery is not None:
                self._take_up(recovery, logged)
                access.tighten(path)
            if readonly:
                self._hold()
        except (lmdb.Error, OSError) as error:
            raise storage_error(error, path) from None
        self._begin = self.env.begin
        self._pid = os.getpid()
        _open_backends.add(self)

    def _take_up(self, recovery: Recovery, logged: bool) -> None:
        try:
            recovery.replay(self.env)
            if logged:
                self._redo = Redo(self.path, self.env, round=recovery.round)
            elif recovery.found:
                forget(self.path)
        except BaseException:
            self.env.close()
            raise

    def _hold(self) -> None:
        """A process that runs code of users may close a file of the store at any time."""
        try:
            self._held = liveness.hold(self.path, self.env)
        except BaseException:
            self.env.close()
            raise

    def tick(self) -> None:
        """To be called now and then by whoever commits."""
        if self._redo is not None:
            self._redo.tick()

    def begin(self) -> LmdbTxn:
        try:
            txn = self.env.begin(write=True, buffers=False)
            return LmdbTxn(txn, self.path, self._redo)
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def snapshot(self) -> LmdbSnapshot:
        try:
            try:
                return LmdbSnapshot(self._begin())
            except lmdb.BadRslotError:
                # The slot of an idle snapshot was taken for a dead process's. Another one is taken now.
                return LmdbSnapshot(self._begin())
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def last_id(self) -> int:
        return int(self.env.info()["last_txnid"])

    def typed(self, error: Exception) -> HoldfastError | None:
        return storage_error(error, self.path) if isinstance(error, lmdb.Error) else None

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child never calls into LMDB
        _open_backends.discard(self)
        try:
            if self._redo is not None:
                self._redo.close()
        finally:
            self.env.close()
            if self._held >= 0:
                os.close(self._held)


class LmdbSnapshot:
    __slots__ = ("_txn", "close", "get", "id")

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn
        self.id: int = txn.id()
        self.get = cast(Get, txn.get)
        self.close = txn.abort

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        return scan(self._txn, lo, hi, limit, reverse)


class LmdbTxn:
    __slots__ = ("_changes", "_cursor", "_path", "_redo", "_txn", "get", "id")

    def __init__(self, txn: lmdb.Transaction, path: Path, redo: Redo | None) -> None:
        self._txn = txn
        self._path = path
        self._redo = redo
        self._changes: list[Change] = []
        self.id: int = txn.id()
        self.get = cast(Get, txn.get)
        self._cursor: Cursor = cast(Cursor, txn.cursor())

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        if limit == 1 and not reverse:
            # Operations ask again and again whether there is anything: one cursor does for that.
            if lo < hi and self._cursor.set_range(lo):
                row = self._cursor.item()
                if row[0] < hi:
                    return [row]
            return []
        return scan(self._txn, lo, hi, limit, reverse)

    def put_many(self, rows: Iterable[Row]) -> None:
        if self._redo is not None:
            rows = list(rows)
            self._changes += rows
        try:
            self._cursor.putmulti(rows)
        except lmdb.Error as error:
            raise storage_error(error, self._path) from None

    def delete(self, key: bytes) -> None:
        if self._redo is not None:
            self._changes.append((key, None))
        try:
            self._txn.delete(key)
        except lmdb.Error as error:
            raise storage_error(error, self._path) from None

    def commit(self) -> None:
        redo = self._redo
        if redo is not None:
            try:
                redo.append(self.id, self._changes)
            except BaseException as error:
                self._txn.abort()
                if isinstance(error, lmdb.Error | OSError):
                    raise storage_error(error, self._path) from None
                raise
        try:
            self._txn.commit()
        except lmdb.Error as error:
            if redo is not None:
                redo.void()
            raise storage_error(error, self._path) from None
        if redo is not None:
            redo.committed()

    def abort(self) -> None:
        self._txn.abort()


def scan(
    txn: lmdb.Transaction, lo: bytes, hi: bytes, limit: int | None, reverse: bool
) -> list[Row]:
    found: list[Row] = []
    if lo >= hi:
        return found
    with txn.cursor() as made:
        cursor: Cursor = made  # type: ignore[assignment]
        if reverse:
            placed = cursor.prev() if cursor.set_range(hi) else cursor.last()
            if placed:
                for row in cursor.iterprev():
                    if row[0] < lo:
                        break
                    found.append(row)
                    if len(found) == limit:
                        break
        elif cursor.set_range(lo):
            for row in cursor.iternext():
                if row[0] >= hi:
                    break
                found.append(row)
                if len(found) == limit:
                    break
    return found


# -- opening -----------------------------------------------------------------------------------


def prepare(path: Path) -> None:
    """Refuse what cannot hold a store, then make the directory if need be. Changes no file."""
    access.check(path)
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    kind = filesystem_of(there, _mountinfo())
    if kind in NETWORK_FILESYSTEMS or (kind.startswith("fuse") and kind not in LOCAL_FUSE):
        raise NetworkFilesystem(path=str(path), filesystem=kind)
    try:
        access.make_directory(path)
    except (FileExistsError, NotADirectoryError):
        raise Invalid(
            what="store", why="the path is a file, not a directory", path=str(path)
        ) from None
    except OSError as error:
        raise storage_error(error, path) from None
    data = path / "data.mdb"
    if data.exists() and data.stat().st_size == 0 and not _being_made(path):
        raise StoreCorrupt(path=str(data), why="the file is empty")
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise StoreReadOnly(path=str(path))


def _being_made(path: Path) -> bool:
    """Whether a file that was found empty is one that a writer has just begun."""
    try:
        fd = os.open(path / "writer.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return (path / "data.mdb").stat().st_size > 0


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that holds the path, from /proc/self/mountinfo."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        # Octal escapes stand for bytes, not for characters.
        escaped = os.fsencode(fields[4]).decode("unicode_escape")
        mount = os.fsdecode(escaped.encode("latin-1"))
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def storage_error(error: Exception, path: Path) -> HoldfastError:
    """The typed error for what LMDB or the system said."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    where = str(path)
    if (
        isinstance(error, lmdb.MapFullError | lmdb.DiskError)
        or number in _FULL
        or any(words in text for words in ("No space", "Disk quota"))
        # LMDB calls a write that was cut short an I/O error, and only a full disk cuts one short.
        or ("Input/output error" in text and _is_full(path))
    ):
        return StoreFull(path=where, why=text)
    if number in _DENIED or "Permission denied" in text:
        return denied_below(path)
    if isinstance(error, lmdb.ReadonlyError) or number == errno.EROFS or "Read-only" in text:
        return StoreReadOnly(path=where, why=text)
    if isinstance(
        error,
        lmdb.InvalidError
        | lmdb.CorruptedError
        | lmdb.VersionMismatchError
        | lmdb.PageNotFoundError,
    ):
        return StoreCorrupt(path=where, why=text)
    if isinstance(error, lmdb.ReadersFullError):
        return Busy(path=where, why=text)
    if isinstance(error, lmdb.BadValsizeError):
        return Invalid(what="row", why=text)
    return StoreError(path=where, why=f"{type(error).__name__}: {text}")


def denied_below(path: Path) -> HoldfastError:
    """The refusal that names what cannot be used: a file of the store, its directory, or one above it."""
    try:
        access.check(path)
    except StoreDenied as error:
        return error
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    return access.denied(there)


def _reserve_lock_file(path: Path) -> None:
    """Give the reader table its disk space now: touching a hole of it on a full disk is SIGBUS."""
    fd = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, access.file_mode(path))
    try:
        os.posix_fallocate(fd, 0, _LOCK_HEADER_BYTES + READERS_MAX * _READER_BYTES)
    finally:
        os.close(fd)


def _is_full(path: Path) -> bool:
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < DISK_FULL_BYTES


DISK_FULL_BYTES = 1 << 20
# The layout of LMDB's lock file.
_LOCK_HEADER_BYTES = 128
_READER_BYTES = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)


def _mountinfo() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""


# -- fork --------------------------------------------------------------------------------------

# Environments that are open in this process.
_open_backends: weakref.WeakSet[LmdbBackend] = weakref.WeakSet()


def _before_fork() -> None:
    """Import what the child needs. In the child an import may wait for a thread that is not there."""
    if _open_backends:
        import ctypes  # noqa: F401


def _disown_in_child() -> None:
    """Keep the parent's environments and never call into them.

    Closing one would wait for threads of the parent that are inside LMDB and do not exist here. Ending a snapshot
    would clear its slot in the reader table, which parent and child share. So each environment gets a
    reference that is never given up: its finalizer does not run, not even when the interpreter exits.
    """
    if not _open_backends:
        return
    import ctypes

    for backend in _open_backends:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend.env))
        if backend._held >= 0:
            # It is shared with the parent, and would outlive it here.
            os.close(backend._held)
    _open_backends.clear()
    # py-lmdb refuses to open a file twice in one process, and counts the parent's environments as the child's.
    identities: Any = sys.modules.get("lmdb._envid")
    if identities is not None:
        keys_of, pid = identities.env_keys, os.getpid()
        identities.env_keys = lambda path, subdir: tuple(
            (*key, pid) for key in keys_of(path, subdir)
        )


os.register_at_fork(before=_before_fork, after_in_child=_disown_in_child)
