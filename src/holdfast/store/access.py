"""Access rights of an embedded store: the directory 0700, its files 0600.

`HOLDFAST_STORE_MODE` is the mode of the directory. 0770 shares the store with the directory's group. Files and the
writer's socket get the same bits without `x`. A process that does not own the directory follows the directory, so
that the owner alone sets the variable.

Rights are set when a store is opened for writing, after it was inspected: a refused open changes none. Files that
root makes in the store of another account belong to that account, else it could not open its store any more.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

from holdfast.config import STORE_MODE
from holdfast.errors import Invalid, StoreDenied

VARIABLE = "HOLDFAST_STORE_MODE"
# The files of a store. A directory with others in it is not ours alone: its own mode stays.
NAMES = (
    "data.mdb", "lock.mdb", "redo.0", "redo.1", "writer.lock", "writer.log", "writer.sock"
)  # fmt: skip
_FILE_BITS = 0o666
_GROUP_BITS = 0o070
_PATH_MAX = 256


def store_mode(path: Path) -> int:
    """The mode that the directory of this store is to have."""
    given = os.environ.get(VARIABLE)
    if given:
        try:
            mode = int(given, 8)
        except ValueError:
            mode = 0
        if not 0o700 <= mode <= 0o777:
            why = "octal digits that leave the owner all rights, as 0700 or 0770"
            raise Invalid(what=VARIABLE, why=why, found=given[:16])
        return mode
    with contextlib.suppress(OSError):
        found = os.stat(path)
        shared = found.st_mode & _GROUP_BITS == _GROUP_BITS
        if found.st_uid != os.geteuid() and shared:
            return STORE_MODE | _GROUP_BITS
    return STORE_MODE


def file_mode(path: Path) -> int:
    return store_mode(path) & _FILE_BITS


def make_directory(path: Path) -> None:
    """Make the directory of a store, if it is not there, for its owner alone or as it is to be shared."""
    mode = store_mode(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=mode & STORE_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    _set(path, _directory_mode(mode))


def tighten(path: Path) -> None:
    """Give the directory and its files the rights that they are to have, as far as they are ours to change."""
    mode = store_mode(path)
    with os.scandir(path) as found:
        entries = list(found)
    here = os.stat(path)
    sticky = here.st_mode & stat.S_ISVTX
    if not sticky and all(one.name in NAMES or one.name.startswith(".") for one in entries):
        _set(path, _directory_mode(mode))
    for one in entries:
        if one.name in NAMES and not one.is_symlink():
            _set(path / one.name, mode & _FILE_BITS)
            if mode & _GROUP_BITS:
                with contextlib.suppress(OSError):  # a file that was made before it was shared
                    os.chown(path / one.name, -1, here.st_gid)
            hand_over(path, one.name)


def hand_over(path: Path, name: str) -> None:
    """Give a file that root has made to the owner of the directory. Any other process changes nothing.

    The owner may put a link in the place of the file: what is given away is a file of root's that has no other
    name, by its inode. The descriptor has `O_PATH`, so closing it drops no lock of LMDB.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        owner = os.stat(path)
        if owner.st_uid == 0:
            return
        fd = os.open(path / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            plain = stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode)
            if plain and found.st_uid == 0 and found.st_nlink == 1:
                os.chown(f"/proc/self/fd/{fd}", owner.st_uid, owner.st_gid)
        finally:
            os.close(fd)


def check(path: Path, *, write: bool = True) -> None:
    """Raise StoreDenied if this process may not use what is there."""
    wanted = os.R_OK | os.W_OK * write
    for above in reversed(path.parents):
        if not os.access(above, os.X_OK, effective_ids=True):
            # A file in the place of a directory is another refusal.
            if not os.path.isdir(above):
                return
            raise denied(above)
    if not os.path.exists(path):
        return
    if os.path.isdir(path) and not _may(path, wanted | os.X_OK):
        raise denied(path)
    for name in NAMES:
        file = path / name
        if os.path.exists(file) and not _may(file, wanted):
            raise denied(file)


def denied(path: Path) -> StoreDenied:
    """The refusal, with the path, its owner and its mode."""
    try:
        found = os.stat(path)
    except OSError as error:
        return StoreDenied(path=str(path)[:_PATH_MAX], why=error.strerror)
    return StoreDenied(
        path=str(path),
        owner=_name(found.st_uid),
        mode=f"{stat.S_IMODE(found.st_mode):04o}",
        user=_name(os.geteuid()),
    )


def _may(path: Path, what: int) -> bool:
    # A disk that is read-only denies nothing: that is another refusal.
    return os.access(path, what, effective_ids=True) or bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _directory_mode(mode: int) -> int:
    """New files of a shared directory belong to its group."""
    return mode | (stat.S_ISGID if mode & _GROUP_BITS else 0)


def _set(path: Path, mode: int) -> None:
    with contextlib.suppress(OSError):  # another user's, or gone meanwhile
        if stat.S_IMODE(os.stat(path).st_mode) != mode:
            os.chmod(path, mode)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
