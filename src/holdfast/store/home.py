"""The directory of an open store: whether its path still leads to the files that are open.

A directory can be removed, moved or replaced while processes have the store open. Their files go on to exist without
a name, and a commit to them is a commit to nothing. Writer and clients compare the path with what they opened.

    gone        the path leads to no store: `StoreGone`, a `NotFound`
    replaced    it leads to other files: `StoreReplaced`

A file is known by device and inode. An inode is not given to another file while a process has it open. An error
other than a missing file (no permission any more, say) tells nothing about the store and counts as no change.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import StoreGone, StoreReplaced

DATA = "data.mdb"
# LMDB's table of snapshots. Processes that do not share it overwrite each other's.
READERS = "lock.mdb"

Identity = tuple[int, int]


class Home:
    def __init__(self, path: Path, names: Iterable[str] = (DATA, READERS)) -> None:
        """`names` are files of the directory that are open now."""
        self._path = path
        self._data = str(path / DATA)
        self._files = {str(path / name): _identity(str(path / name)) for name in names}

    @property
    def data(self) -> Identity | None:
        return self._files[self._data]

    def check(self) -> None:
        """Raise what has become of the store, if its path does not lead to it any more."""
        for file in self._files:
            self._check(file)

    def check_data(self) -> None:
        """The same by the file with the rows alone."""
        self._check(self._data)

    def _check(self, file: str) -> None:
        try:
            found = _identity(file)
        except OSError:
            return
        if found == self._files[file]:
            return
        name = os.path.basename(file)
        if name == DATA and found is None:
            raise StoreGone(path=str(self._path))
        raise StoreReplaced(path=str(self._path), file=name)


def _identity(file: str) -> Identity | None:
    """Device and inode; None if there is no such file."""
    try:
        found = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
