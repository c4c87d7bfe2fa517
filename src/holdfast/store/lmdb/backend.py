"""The LMDB backend: opening the files, snapshots, and the engine's write transaction.

Only this module translates errors of LMDB and the file system into store errors. Nothing is written
before the files have been checked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

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
from holdfast.store.api import Row
from holdfast.store.lmdb import permissions, reader_locks
from holdfast.store.lmdb.redo_log import Change, RedoLog, RedoRecovery, discard_logs

NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"}
    | {"ocfs2", "gfs2", "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs"}
    | {"fuse.gcsfuse", "fuse.rclone", "fuse.davfs"}
)
# The mounts of this process, in the format of proc(5).
MOUNTINFO = "/proc/self/mountinfo"


# Locks and shared memory of a FUSE mount depend on its daemon: only these local ones are known to work.
LOCAL_FUSE_FILESYSTEMS = frozenset(
    {
        "fuseblk",
        "fuse.ntfs-3g",
        "fuse.fuse-overlayfs",
        "fuse.gocryptfs",
        "fuse.encfs",
        "fuse.bindfs",
    }
)

# Without `buffers=True` LMDB returns bytes, which its type stubs do not express.
GetRow = Callable[[bytes], bytes | None]


class LmdbCursor(Protocol):
    def set_range(self, key: bytes, /) -> bool: ...
    def prev(self) -> bool: ...
    def last(self) -> bool: ...
    def item(self) -> Row: ...
    def iternext(self) -> Iterator[Row]: ...
    def iterprev(self) -> Iterator[Row]: ...
    def putmulti(self, items: Iterable[Row], /) -> object: ...


class LmdbBackend:
    """The LMDB environment of one directory. One per process and directory, never shared across a fork.

    A writing process holds the writer lock. With `logged`, a redo log makes commits durable; otherwise LMDB
    syncs each commit. `recovery` has already checked the directory. Without it the constructor checks the
    directory before it writes.
    """

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool,
        logged: bool = False,
        recovery: RedoRecovery | None = None,
    ) -> None:
        self.path = path
        self._redo_log: RedoLog | None = None
        self._reader_locks_fd = -1
        try:
            if not readonly:
                if recovery is None:
                    recovery = RedoRecovery(path)
                    with recovery.open_view():
                        pass
                # Set permissions first, so that no other account can read the following writes.
                permissions.apply_permissions(path)
                recovery.restore_base()
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
                mode=permissions.file_mode(path),
            )
            if recovery is not None:
                self._recover(recovery, logged)
                permissions.apply_permissions(path)
            if readonly:
                self._acquire_reader_locks()
        except (lmdb.Error, OSError) as error:
            raise storage_error(error, path) from None
        self._begin = self.env.begin
        self._pid = os.getpid()
        _open_backends.add(self)

    def _recover(self, recovery: RedoRecovery, logged: bool) -> None:
        try:
            recovery.replay(self.env)
            if logged:
                self._redo_log = RedoLog(
                    self.path, self.env, epoch=recovery.next_epoch, version=recovery.version
                )
            elif recovery.has_logs:
                discard_logs(self.path)
        except BaseException:
            self.env.close()
            raise

    def _acquire_reader_locks(self) -> None:
        """Hold reader locks that survive a close of the lock file by user code in this process."""
        try:
            self._reader_locks_fd = reader_locks.acquire_reader_locks(self.path, self.env)
        except BaseException:
            self.env.close()
            raise

    def tick(self) -> None:
        """Run periodic checkpoints. The committing process calls this."""
        if self._redo_log is not None:
            self._redo_log.tick()

    def begin(self) -> LmdbTxn:
        try:
            txn = self.env.begin(write=True, buffers=False)
            return LmdbTxn(txn, self.path, self._redo_log)
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def snapshot(self) -> LmdbSnapshot:
        try:
            try:
                return LmdbSnapshot(self._begin())
            except lmdb.BadRslotError:
                # The writer cleared the slot of an idle snapshot as dead. The retry takes a new slot.
                return LmdbSnapshot(self._begin())
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def row_sizes(self, lo: bytes, limit: int) -> list[tuple[bytes, int]]:
        """Return keys and lengths of values from a key on, without a copy of the values."""
        try:
            txn = self._begin(buffers=True)
        except lmdb.BadRslotError:
            txn = self._begin(buffers=True)  # see `snapshot`
        with txn, txn.cursor() as cursor:
            found = cursor.set_range(lo)
            rows = islice(cursor.iternext(), limit) if found else ()
            return [(bytes(key), len(value)) for key, value in rows]

    def page_usage(self) -> PageUsage:
        stat, info = self.env.stat(), self.env.info()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        used = pages * stat["psize"]
        free = (info["last_pgno"] + 1 - META_PAGES) * stat["psize"] - used
        return PageUsage(int(stat["entries"]), used, max(free, 0))

    def last_id(self) -> int:
        return int(self.env.info()["last_txnid"])

    def to_store_error(self, error: Exception) -> HoldfastError | None:
        return storage_error(error, self.path) if isinstance(error, lmdb.Error) else None

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child never calls into LMDB
        _open_backends.discard(self)
        try:
            if self._redo_log is not None:
                self._redo_log.close()
        finally:
            self.env.close()
            if self._reader_locks_fd >= 0:
                os.close(self._reader_locks_fd)


class PageUsage(NamedTuple):
    """Rows of a store, bytes of the pages that hold them, and bytes of the pages that wait for new rows."""

    rows: int
    used_bytes: int
    free_bytes: int


class LmdbSnapshot:
    __slots__ = ("_txn", "close", "get", "id")

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn
        self.id: int = txn.id()
        self.get = cast(GetRow, txn.get)
        self.close = txn.abort

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        return scan(self._txn, lo, hi, limit, reverse)


class LmdbTxn:
    __slots__ = ("_changes", "_cursor", "_path", "_redo_log", "_txn", "get", "id")

    def __init__(self, txn: lmdb.Transaction, path: Path, redo_log: RedoLog | None) -> None:
        self._txn = txn
        self._path = path
        self._redo_log = redo_log
        self._changes: list[Change] = []
        self.id: int = txn.id()
        self.get = cast(GetRow, txn.get)
        self._cursor: LmdbCursor = cast(LmdbCursor, txn.cursor())

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        if limit == 1 and not reverse:
            # Operations often check whether a range has any row: one cursor serves all of these.
            if lo < hi and self._cursor.set_range(lo):
                row = self._cursor.item()
                if row[0] < hi:
                    return [row]
            return []
        return scan(self._txn, lo, hi, limit, reverse)

    def put_many(self, rows: Iterable[Row]) -> None:
        if self._redo_log is not None:
            rows = list(rows)
            self._changes += rows
        try:
            self._cursor.putmulti(rows)
        except lmdb.Error as error:
            raise storage_error(error, self._path) from None

    def delete(self, key: bytes) -> None:
        if self._redo_log is not None:
            self._changes.append((key, None))
        try:
            self._txn.delete(key)
        except lmdb.Error as error:
            raise storage_error(error, self._path) from None

    def commit(self) -> None:
        redo_log = self._redo_log
        if redo_log is not None:
            try:
                redo_log.append(self.id, self._changes)
            except BaseException as error:
                self._txn.abort()
                if isinstance(error, lmdb.Error | OSError):
                    raise storage_error(error, self._path) from None
                raise
        try:
            self._txn.commit()
        except lmdb.Error as error:
            if redo_log is not None:
                redo_log.undo_append()
            raise storage_error(error, self._path) from None
        if redo_log is not None:
            redo_log.on_committed()

    def abort(self) -> None:
        self._txn.abort()


def scan(
    txn: lmdb.Transaction, lo: bytes, hi: bytes, limit: int | None, reverse: bool
) -> list[Row]:
    rows: list[Row] = []
    if lo >= hi:
        return rows
    with txn.cursor() as opened:
        cursor: LmdbCursor = opened  # type: ignore[assignment]
        if reverse:
            positioned = cursor.prev() if cursor.set_range(hi) else cursor.last()
            if positioned:
                for row in cursor.iterprev():
                    if row[0] < lo:
                        break
                    rows.append(row)
                    if len(rows) == limit:
                        break
        elif cursor.set_range(lo):
            for row in cursor.iternext():
                if row[0] >= hi:
                    break
                rows.append(row)
                if len(rows) == limit:
                    break
    return rows


# -- opening -----------------------------------------------------------------------------------


def prepare_directory(path: Path) -> None:
    """Refuse a path that cannot hold a store, then create the directory if missing. Changes no file."""
    permissions.check_access(path)
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    filesystem = filesystem_of(existing, _mountinfo())
    if filesystem in NETWORK_FILESYSTEMS or (
        filesystem.startswith("fuse") and filesystem not in LOCAL_FUSE_FILESYSTEMS
    ):
        raise NetworkFilesystem(path=str(path), filesystem=filesystem)
    try:
        permissions.make_directory(path)
    except (FileExistsError, NotADirectoryError):
        raise Invalid(
            what="store", why="the path is a file, not a directory", path=str(path)
        ) from None
    except OSError as error:
        raise storage_error(error, path) from None
    data = path / "data.mdb"
    if data.exists() and data.stat().st_size == 0 and not _is_being_created(path):
        raise StoreCorrupt(path=str(data), why="the file is empty")
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise StoreReadOnly(path=str(path))


def _is_being_created(path: Path) -> bool:
    """Whether a writer is currently creating the empty data file."""
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
        # Octal escapes encode bytes, not characters.
        escaped = os.fsencode(fields[4]).decode("unicode_escape")
        mount = os.fsdecode(escaped.encode("latin-1"))
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def storage_error(error: Exception, path: Path) -> HoldfastError:
    """Translate an error of LMDB or the system into a store error."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    where = str(path)
    if (
        isinstance(error, lmdb.MapFullError | lmdb.DiskError)
        or number in _FULL_ERRNOS
        or any(words in text for words in ("No space", "Disk quota"))
        # LMDB reports a short write as an I/O error, and only a full disk causes one.
        or ("Input/output error" in text and _is_full(path))
    ):
        return StoreFull(path=where, why=text)
    if number in _DENIED_ERRNOS or "Permission denied" in text:
        return permission_error(path)
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


def permission_error(path: Path) -> HoldfastError:
    """A StoreDenied for the inaccessible file, the directory or one of its parents."""
    try:
        permissions.check_access(path)
    except StoreDenied as error:
        return error
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return permissions.access_denied(existing)


def _reserve_lock_file(path: Path) -> None:
    """Reserve the disk space of the reader table: on a full disk, access to a hole raises SIGBUS."""
    fd = os.open(
        path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, permissions.file_mode(path)
    )
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
# Pages of a file that hold no rows and are never free.
META_PAGES = 2
# The layout of LMDB's lock file.
_LOCK_HEADER_BYTES = 128
_READER_BYTES = 64
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_DENIED_ERRNOS = (errno.EACCES, errno.EPERM)


def _mountinfo() -> str:
    try:
        return Path(MOUNTINFO).read_text(errors="surrogateescape")
    except OSError:
        return ""


# -- fork --------------------------------------------------------------------------------------

# The open environments of this process.
_open_backends: weakref.WeakSet[LmdbBackend] = weakref.WeakSet()


def _import_before_fork() -> None:
    """Import the modules that the child needs: in the child an import may block on a thread that does not exist."""
    if _open_backends:
        import ctypes  # noqa: F401


def _disown_backends_in_child() -> None:
    """Keep the parent's environments in a forked child and never call into them.

    Closing one would wait for threads of the parent inside LMDB, which do not exist in the child. Ending a snapshot
    would clear its slot in the reader table, which parent and child share. Each environment therefore gets a
    permanent extra reference: its finalizer never runs, not even at interpreter exit.
    """
    if not _open_backends:
        return
    import ctypes

    for backend in _open_backends:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend.env))
        if backend._reader_locks_fd >= 0:
            # The lock is shared with the parent, and the child would keep it after the parent ends.
            os.close(backend._reader_locks_fd)
    _open_backends.clear()
    # py-lmdb refuses to open a file twice in one process, and counts the parent's environments as the child's.
    identities: Any = sys.modules.get("lmdb._envid")
    if identities is not None:
        keys_of, pid = identities.env_keys, os.getpid()
        identities.env_keys = lambda path, subdir: tuple(
            (*key, pid) for key in keys_of(path, subdir)
        )


os.register_at_fork(before=_import_before_fork, after_in_child=_disown_backends_in_child)
