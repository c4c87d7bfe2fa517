"""Spool storage: a directory that all machines share, or an object store.

    put(name, data)       durable when it returns; an object is written once and never replaced
    get(name, lo, hi)     its bytes, or None if there is no such object
    listing(prefix)       the objects below a prefix
    delete(names)         missing objects are not an error

The tag of an object identifies its version. A different tag means that the object was replaced or copied.
It is only a hint to read and hash the object.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from holdfast.errors import Conflict
from holdfast.spark.errors import SpoolDenied, SpoolUnreachable
from holdfast.spark.sinks.location import Location
from holdfast.spark.sinks.object_store import error_text, obstore_library, open_bucket

TAG_BYTES = 8
# Bytes of an object. (collections.abc has a Buffer type since Python 3.12.)
Buffer = bytes | memoryview
LIST_OBJECTS = 1000
DELETE_OBJECTS = 500


class ListedObject(NamedTuple):
    name: str
    size: int
    tag: bytes
    modified_ns: int


class SpoolStorage(Protocol):
    def put(self, name: str, *parts: Buffer) -> bytes:
        """Write an object from these parts under a new name. Return its tag."""

    def get(self, name: str, lo: int = 0, hi: int | None = None) -> bytes | None: ...

    def list_objects(self, prefix: str) -> Iterator[ListedObject]: ...

    def delete(self, names: Iterable[str]) -> int: ...

    def remove_empty_prefix(self, prefix: str) -> None:
        """Remove empty directories of a prefix after its objects are deleted."""


def open_storage(location: Location) -> SpoolStorage:
    return (
        ObjectSpoolStorage(location)
        if location.local is None
        else DirectorySpoolStorage(location.local)
    )


def version_tag(version: str) -> bytes:
    return blake2b(version.encode(), digest_size=TAG_BYTES).digest()


# --- a directory --------------------------------------------------------------------------------


class DirectorySpoolStorage:
    """Spool storage in a directory. A file and its directory are synced before the file is
    referenced. A process that dies during the write leaves an unreferenced partial file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._created_directories: set[Path] = set()

    def put(self, name: str, *parts: Buffer) -> bytes:
        path = self._path / name
        with self._translate_errors():
            try:
                handle = self._create_file(path)
            except FileExistsError:
                return self._tag_if_same(path, b"".join(parts))
            try:
                with os.fdopen(handle, "wb") as file:
                    for data in parts:
                        file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    status = os.fstat(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
            _sync_directory(path.parent)
        return _file_tag(status)

    def get(self, name: str, lo: int = 0, hi: int | None = None) -> bytes | None:
        with self._translate_errors():
            try:
                with open(self._path / name, "rb") as file:
                    file.seek(lo)
                    return file.read(-1 if hi is None else hi - lo)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        with self._translate_errors():
            waiting = [prefix.rstrip("/")]
            while waiting:
                inside = waiting.pop()
                try:
                    entries = sorted(os.scandir(self._path / inside), key=lambda one: one.name)
                except (FileNotFoundError, NotADirectoryError):
                    # Distinguish a missing mount from an empty spool.
                    os.close(os.open(self._path, os.O_RDONLY | os.O_DIRECTORY))
                    continue
                for entry in entries:
                    name = f"{inside}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(name)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        tag = _file_tag(status)
                        yield ListedObject(name, status.st_size, tag, status.st_mtime_ns)

    def delete(self, names: Iterable[str]) -> int:
        count = 0
        with self._translate_errors():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (self._path / name).unlink()
                    count += 1
        return count

    def remove_empty_prefix(self, prefix: str) -> None:
        with self._translate_errors():
            for inside, _, _ in os.walk(self._path / prefix, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(inside)

    def _tag_if_same(self, path: Path, data: bytes) -> bytes:
        """Return the tag if the existing file has the same bytes; else raise Conflict."""
        if path.read_bytes() != data:
            raise Conflict(what="spool object", name=path.name, why="it is there with other bytes")
        return _file_tag(path.stat())

    def _create_file(self, path: Path) -> int:
        self._make_directory(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags, 0o640)
        except FileNotFoundError:
            # The directory was removed since this process created it.
            self._created_directories.discard(path.parent)
            self._make_directory(path.parent)
            return os.open(path, flags, 0o640)

    def _make_directory(self, directory: Path) -> None:
        if directory in self._created_directories:
            return
        missing = [one for one in (directory, *directory.parents) if not one.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for one in missing:
            _sync_directory(one.parent)
        self._created_directories.add(directory)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise SpoolDenied(spool=str(self._path), why=error.strerror or "") from None
        except OSError as error:
            raise SpoolUnreachable(spool=str(self._path), why=error.strerror or "") from None


def _file_tag(status: os.stat_result) -> bytes:
    return version_tag(f"{status.st_mtime_ns} {status.st_size}")


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- an object store ----------------------------------------------------------------------------


class ObjectSpoolStorage:
    """Spool storage in an object store. A put is conditional: it creates the object or fails."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open_store: Any = None

    def put(self, name: str, *parts: Buffer) -> bytes:
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        with self._translate_errors():
            try:
                # In one request: not every store supports a condition for multipart uploads.
                put = obstore_library().put(
                    self._bucket(), self._path(name), data, mode="create", use_multipart=False
                )
            except obstore_library().exceptions.AlreadyExistsError:
                return self._tag_if_same(name, data)
        return version_tag(put["e_tag"] or "")

    def get(self, name: str, lo: int = 0, hi: int | None = None) -> bytes | None:
        with self._translate_errors():
            try:
                if hi is None and not lo:
                    return bytes(obstore_library().get(self._bucket(), self._path(name)).bytes())
                if hi is None:
                    hi = int(obstore_library().head(self._bucket(), self._path(name))["size"])
                if lo >= hi:
                    return b""
                return bytes(
                    obstore_library().get_range(self._bucket(), self._path(name), start=lo, end=hi)
                )
            except (obstore_library().exceptions.NotFoundError, FileNotFoundError):
                return None
            except obstore_library().exceptions.GenericError:
                # The range exceeds the object, which is shorter than expected.
                if hi is None:
                    raise
                whole = bytes(obstore_library().get(self._bucket(), self._path(name)).bytes())
                return whole[lo:hi]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        prefix_path = f"{self._location.prefix}/"
        with self._translate_errors():
            pages = obstore_library().list(
                self._bucket(), self._path(prefix.rstrip("/") + "/"), chunk_size=LIST_OBJECTS
            )
            for page in pages:
                for one in page:
                    yield ListedObject(
                        one["path"].removeprefix(prefix_path),
                        int(one["size"]),
                        version_tag(one["e_tag"] or ""),
                        int(one["last_modified"].timestamp() * 1e9),
                    )

    def delete(self, names: Iterable[str]) -> int:
        count = 0
        batch: list[str] = []
        for name in names:
            batch.append(self._path(name))
            count += 1
            if len(batch) == DELETE_OBJECTS:
                self._delete_batch(batch)
                batch = []
        self._delete_batch(batch)
        return count

    def remove_empty_prefix(self, prefix: str) -> None: ...

    def _delete_batch(self, paths: list[str]) -> None:
        if not paths:
            return
        with self._translate_errors():
            try:
                obstore_library().delete(self._bucket(), paths)
            except (obstore_library().exceptions.NotFoundError, FileNotFoundError):
                for path in paths:
                    with contextlib.suppress(
                        obstore_library().exceptions.NotFoundError, FileNotFoundError
                    ):
                        obstore_library().delete(self._bucket(), path)

    def _tag_if_same(self, name: str, data: bytes) -> bytes:
        """Return the tag if the existing object has the same bytes (a repeated put after a lost
        reply); else raise Conflict.
        """
        existing = obstore_library().get(self._bucket(), self._path(name))
        if bytes(existing.bytes()) != data:
            raise Conflict(what="spool object", name=name, why="it is there with other bytes")
        return version_tag(existing.meta["e_tag"] or "")

    def _bucket(self) -> Any:
        if self._open_store is None:
            self._open_store = open_bucket(self._location)
        return self._open_store

    def _path(self, name: str) -> str:
        return f"{self._location.prefix}/{name}"

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors of the library. Their texts about headers are omitted."""
        wrong = obstore_library().exceptions
        try:
            yield
        except (wrong.PermissionDeniedError, wrong.UnauthenticatedError) as error:
            raise SpoolDenied(spool=self._location.url, why=error_text(error)) from None
        except (wrong.BaseError, ValueError, OSError) as error:
            raise SpoolUnreachable(spool=self._location.url, why=error_text(error)) from None
