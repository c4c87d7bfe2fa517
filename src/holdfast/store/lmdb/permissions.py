"""File permissions of an embedded store: the directory has mode 0700, its files 0600.

`HOLDFAST_STORE_MODE` sets the mode of the directory. 0770 shares the store with the directory's group. Files and
the writer's socket get the same bits without `x`. A process that does not own the directory derives the mode from
the directory, so only the owner has to set the variable.

The store applies permissions when it is opened for writing, after the inspection. A refused open changes none.
Files that root creates in another account's store are assigned to that account. Otherwise the account could not
open its store again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

from holdfast.config import STORE_MODE
from holdfast.errors import Invalid, StoreDenied

MODE_VARIABLE = "HOLDFAST_STORE_MODE"
# The files of a store. A directory that contains other files keeps its mode.
STORE_FILES = (
    "data.mdb", "lock.mdb", "redo.0", "redo.1", "writer.lock", "writer.log", "writer.sock"
)  # fmt: skip
_FILE_BITS = 0o666
_GROUP_BITS = 0o070
_PATH_MAX = 256


def store_mode(path: Path) -> int:
    """The required mode of this store's directory."""
    configured = os.environ.get(MODE_VARIABLE)
    if configured:
        try:
            mode = int(configured, 8)
        except ValueError:
            mode = 0
        if not 0o700 <= mode <= 0o777:
            why = "not an octal mode with all rights for the owner, such as 0700 or 0770"
            raise Invalid(what=MODE_VARIABLE, why=why, found=configured[:16])
        return mode
    with contextlib.suppress(OSError):
        directory = os.stat(path)
        shared = directory.st_mode & _GROUP_BITS == _GROUP_BITS
        if directory.st_uid != os.geteuid() and shared:
            return STORE_MODE | _GROUP_BITS
    return STORE_MODE


def file_mode(path: Path) -> int:
    return store_mode(path) & _FILE_BITS


def make_directory(path: Path) -> None:
    """Create the directory of a store if it is missing, with its required mode."""
    mode = store_mode(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=mode & STORE_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    _chmod_if_needed(path, _directory_mode(mode))


def apply_permissions(path: Path) -> None:
    """Set the required permissions on the directory and its files, where this process may change them."""
    mode = store_mode(path)
    with os.scandir(path) as scanned:
        entries = list(scanned)
    directory = os.stat(path)
    sticky = directory.st_mode & stat.S_ISVTX
    if not sticky and all(
        entry.name in STORE_FILES or entry.name.startswith(".") for entry in entries
    ):
        _chmod_if_needed(path, _directory_mode(mode))
    for entry in entries:
        if entry.name in STORE_FILES and not entry.is_symlink():
            _chmod_if_needed(path / entry.name, mode & _FILE_BITS)
            if mode & _GROUP_BITS:
                with contextlib.suppress(OSError):  # a file created before the store was shared
                    os.chown(path / entry.name, -1, directory.st_gid)
            chown_to_directory_owner(path, entry.name)


def chown_to_directory_owner(path: Path, name: str) -> None:
    """As root, change the owner of a file to the owner of the directory. Other users change nothing.

    The directory owner could replace the file with a link. The change therefore applies to the inode, and only to a
    file of root's with a single link. The descriptor has `O_PATH`, so closing it releases no lock of LMDB.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        owner = os.stat(path)
        if owner.st_uid == 0:
            return
        fd = os.open(path / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            file = os.fstat(fd)
            is_plain_file = stat.S_ISREG(file.st_mode) or stat.S_ISSOCK(file.st_mode)
            if is_plain_file and file.st_uid == 0 and file.st_nlink == 1:
                os.chown(f"/proc/self/fd/{fd}", owner.st_uid, owner.st_gid)
        finally:
            os.close(fd)


def check_access(path: Path, *, write: bool = True) -> None:
    """Raise StoreDenied if this process lacks permission on the store's path or files."""
    rights = os.R_OK | os.W_OK * write
    for parent in reversed(path.parents):
        if not os.access(parent, os.X_OK, effective_ids=True):
            # A file in place of a directory is reported elsewhere.
            if not os.path.isdir(parent):
                return
            raise access_denied(parent)
    if not os.path.exists(path):
        return
    if os.path.isdir(path) and not _has_access(path, rights | os.X_OK):
        raise access_denied(path)
    for name in STORE_FILES:
        file = path / name
        if os.path.exists(file) and not _has_access(file, rights):
            raise access_denied(file)


def access_denied(path: Path) -> StoreDenied:
    """A StoreDenied with the path, its owner and its mode."""
    try:
        status = os.stat(path)
    except OSError as error:
        return StoreDenied(path=str(path)[:_PATH_MAX], why=error.strerror)
    return StoreDenied(
        path=str(path),
        owner=_user_name(status.st_uid),
        mode=f"{stat.S_IMODE(status.st_mode):04o}",
        user=_user_name(os.geteuid()),
    )


def _has_access(path: Path, rights: int) -> bool:
    # A read-only disk is reported as StoreReadOnly, not as StoreDenied.
    return os.access(path, rights, effective_ids=True) or bool(
        os.statvfs(path).f_flag & os.ST_RDONLY
    )


def _directory_mode(mode: int) -> int:
    """The mode with setgid for a shared directory, so that new files belong to its group."""
    return mode | (stat.S_ISGID if mode & _GROUP_BITS else 0)


def _chmod_if_needed(path: Path, mode: int) -> None:
    with contextlib.suppress(OSError):  # owned by another user, or removed concurrently
        if stat.S_IMODE(os.stat(path).st_mode) != mode:
            os.chmod(path, mode)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
