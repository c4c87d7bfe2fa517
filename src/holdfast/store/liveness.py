"""The locks by which others know that a process reads a store: held so that no `close` elsewhere drops them.

LMDB marks a process that reads by two locks on `lock.mdb`: a shared one on byte 0, and one on the byte of its pid.
They are POSIX locks. Such locks belong to process and file, and the process loses all of them when it closes any
descriptor of that file: a backup tool in the same process, or a plain `open(...).close()`, is enough. The writer
then takes the process for dead and reuses pages of its snapshots, and recovery takes the store for unused.

So the same bytes are locked by an open file description of our own (Linux, `F_OFD_SETLK`). LMDB's checks see these
locks like its own, and only the end of the process or `close` here releases them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

import lmdb

from holdfast.errors import LocksUnsupported, NetworkFilesystem
from holdfast.store.home import READERS

_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
# struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def hold(path: Path, env: lmdb.Environment) -> int:
    """Take LMDB's locks of this process over. The descriptor holds them until it is closed."""
    fd = os.open(path / READERS, os.O_RDWR | os.O_CLOEXEC)
    try:
        _lock(fd, fcntl.F_RDLCK, 0)
        # LMDB locks the byte of the pid with its first snapshot, and never again.
        env.begin().abort()
        # A close of the file drops LMDB's locks; the byte can be locked by us then.
        os.close(os.open(path / READERS, os.O_RDONLY | os.O_CLOEXEC))
        _lock(fd, fcntl.F_WRLCK, os.getpid())
    except OSError as error:
        os.close(fd)
        if error.errno in _UNSUPPORTED:
            why = "it has no open file description locks"
            if not _kernel_has_locks():
                raise LocksUnsupported(path=str(path), kernel=os.uname().release) from None
            raise NetworkFilesystem(path=str(path), why=why) from None
        raise
    except BaseException:
        os.close(fd)
        raise
    try:
        env.begin().abort()
    except lmdb.BadRslotError:
        # The writer looked between the two steps, and the slot is another's. The next snapshot takes a new one.
        env.begin().abort()
    return fd


def _kernel_has_locks() -> bool:
    """Whether such a lock can be had on a file in memory: then it is the file system that has none."""
    fd = os.memfd_create("holdfast-locks", os.MFD_CLOEXEC)
    try:
        _lock(fd, fcntl.F_WRLCK, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _lock(fd: int, kind: int, start: int) -> None:
    fcntl.fcntl(fd, _SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
