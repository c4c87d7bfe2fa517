"""The identity of an open store's directory: whether its path still leads to the open files.

A directory can be removed, moved or replaced while processes have the store open. The open files then exist without
a name, and a commit to them is lost. The writer and the clients compare the path with their open files.

    gone        the path leads to no store: `StoreGone`, a `NotFound`
    replaced    the path leads to other files: `StoreReplaced`

Device and inode identify a file. The system does not reuse the inode while a process has the file open. An error
other than a missing file, such as a revoked permission, is no evidence and counts as no change.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import StoreGone, StoreReplaced

DATA_FILE = "data.mdb"
# LMDB's reader table. Processes with different tables overwrite each other's snapshots.
READER_TABLE_FILE = "lock.mdb"

FileIdentity = tuple[int, int]


class DirectoryIdentity:
    def __init__(self, path: Path, names: Iterable[str] = (DATA_FILE, READER_TABLE_FILE)) -> None:
        """`names` are the files whose identity `check` compares."""
        self._path = path
        self._data_file = str(path / DATA_FILE)
        self._files = {str(path / name): _file_identity(str(path / name)) for name in names}

    @property
    def data_identity(self) -> FileIdentity | None:
        return self._files[self._data_file]

    def check(self) -> None:
        """Raise StoreGone or StoreReplaced if the path no longer leads to the open files."""
        for file in self._files:
            self._check_file(file)

    def check_data(self) -> None:
        """Check only the data file."""
        self._check_file(self._data_file)

    def _check_file(self, file: str) -> None:
        try:
            current = _file_identity(file)
        except OSError:
            return
        if current == self._files[file]:
            return
        name = os.path.basename(file)
        if name == DATA_FILE and current is None:
            raise StoreGone(path=str(self._path))
        raise StoreReplaced(path=str(self._path), file=name)


def _file_identity(file: str) -> FileIdentity | None:
    """Device and inode of a file; None if it is missing."""
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
