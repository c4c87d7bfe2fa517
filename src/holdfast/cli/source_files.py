"""The source files of an application: Python files and `holdfast.toml` below a directory, with their changes.

The files are read by polling. It needs no package, and it works on mounted directories, which send no notifications.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.config import CONFIG_FILE
from holdfast.errors import Invalid

FILES_MAX = 20_000
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})


class FileVersion(NamedTuple):
    modified_ns: int
    size: int
    inode: int


class SourceFiles:
    def __init__(self, root: Path, ignored: Path | None = None) -> None:
        """`ignored` is a directory below the root, such as that of the store."""
        self._root = root
        self._ignored = None if ignored is None else (root / ignored).resolve()
        self._versions = self._read()

    def changes(self) -> list[str]:
        """Return the files that were added, changed or removed since the last call, relative to the root."""
        last, self._versions = self._versions, self._read()
        paths = {*last, *self._versions}
        return sorted(path for path in paths if last.get(path) != self._versions.get(path))

    def _read(self) -> dict[str, FileVersion]:
        versions: dict[str, FileVersion] = {}
        for path in self._list(self._root):
            try:
                stat = os.stat(path)
            except OSError:
                continue  # removed meanwhile
            version = FileVersion(stat.st_mtime_ns, stat.st_size, stat.st_ino)
            versions[os.path.relpath(path, self._root)] = version
            if len(versions) > FILES_MAX:
                raise Invalid(
                    what="source files",
                    why="too many; start in the directory of the application",
                    directory=str(self._root),
                    max=FILES_MAX,
                )
        return versions

    def _list(self, directory: Path) -> Iterator[str]:
        """Yield the source files below a directory. It leaves out hidden directories and virtual environments."""
        pending = [str(directory)]
        while pending:
            try:
                entries = list(os.scandir(pending.pop()))
            except OSError:
                continue
            if any(entry.name == "pyvenv.cfg" for entry in entries):
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    hidden = entry.name.startswith(".") or entry.name in _LEFT_OUT
                    if not hidden and Path(entry.path) != self._ignored:
                        pending.append(entry.path)
                elif entry.name.endswith(".py") or entry.name == CONFIG_FILE:
                    yield entry.path
