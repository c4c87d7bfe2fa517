"""LMDB reader locks that survive a `close` of the lock file elsewhere in the process.

LMDB marks a reading process with two POSIX locks on `lock.mdb`: a shared lock on byte 0 and a lock on the byte of its
pid. POSIX locks belong to the process and the file. The process loses them when it closes any descriptor of that
file, for example in a backup tool or by `open(...).close()`. The writer would then consider the process dead and
reuse pages of its snapshots, and recovery would consider the store unused.

This module locks the same bytes with an open file description lock (Linux, `F_OFD_SETLK`). LMDB's checks see it like
their own lock. Only the end of the process or closing the descriptor releases it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

import lmdb

from holdfast import failpoints
from holdfast.errors import LocksUnsupported, NetworkFilesystem
from holdfast.store.lmdb.directory_identity import READER_TABLE_FILE

_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
# struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def acquire_reader_locks(path: Path, env: lmdb.Environment) -> int:
    """Replace LMDB's locks of this process. The returned descriptor holds the locks until it is closed."""
    fd = os.open(path / READER_TABLE_FILE, os.O_RDWR | os.O_CLOEXEC)
    try:
        _lock(fd, fcntl.F_RDLCK, 0)
        # LMDB locks the byte of the pid only at its first snapshot.
        env.begin().abort()
        # Closing the file drops LMDB's locks, which frees the byte for our lock.
        os.close(os.open(path / READER_TABLE_FILE, os.O_RDONLY | os.O_CLOEXEC))
        _lock(fd, fcntl.F_WRLCK, os.getpid())
    except OSError as error:
        os.close(fd)
        if error.errno in _UNSUPPORTED:
            why = "no open file description locks"
            if not _kernel_has_ofd_locks():
                raise LocksUnsupported(path=str(path), kernel=os.uname().release) from None
            raise NetworkFilesystem(path=str(path), why=why) from None
        raise
    except BaseException:
        os.close(fd)
        raise
    try:
        env.begin().abort()
    except lmdb.BadRslotError:
        # The writer cleared the slot between the two steps. The next snapshot takes a new slot.
        env.begin().abort()
    return fd


def _kernel_has_ofd_locks() -> bool:
    """Whether the kernel grants such a lock on a memory file. If so, only the file system lacks them."""
    fd = os.memfd_create("holdfast-locks", os.MFD_CLOEXEC)
    try:
        _lock(fd, fcntl.F_WRLCK, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _lock(fd: int, kind: int, start: int) -> None:
    if failpoints.armed:
        failpoints.hit("lmdb.lock_reader", fd)
    fcntl.fcntl(fd, _SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
