"""Places that hold the objects of a spool: a directory that all machines share, or an object store.

    put(name, data)       durable when it returns; an object is written once and never replaced
    get(name, lo, hi)     bytes of it, None when there is no such object
    listing(prefix)       what is there, below a prefix
    delete(names)         objects that are gone already are no error

The tag of an object tells its version: another one means that somebody replaced it, or that it was copied.
It is a hint to read and hash the object, and proves nothing by itself.
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
from holdfast.spark.sinks.object_store import library, open_bucket, told

TAG_BYTES = 8
# What has the bytes of a part of an object. (collections.abc has a name for it since Python 3.12.)
Buffer = bytes | memoryview
LIST_OBJECTS = 1000
DELETE_OBJECTS = 500


class Listed(NamedTuple):
    name: str
    size: int
    tag: bytes
    modified_ns: int


class SpoolPlace(Protocol):
    def put(self, name: str, *parts: Buffer) -> bytes:
        """Write an object of these bytes, one after another, under a name that is new; its tag."""

    def get(self, name: str, lo: int = 0, hi: int | None = None) -> bytes | None: ...

    def listing(self, prefix: str) -> Iterator[Listed]: ...

    def delete(self, names: Iterable[str]) -> int: ...

    def drop(self, prefix: str) -> None:
        """Remove what is left of a prefix when its objects are gone: empty directories."""


def open_place(place: Location) -> SpoolPlace:
    return ObjectPlace(place) if place.local is None else DirectoryPlace(place.local)


def tag_of(version: str) -> bytes:
    return blake2b(version.encode(), digest_size=TAG_BYTES).digest()


# --- a directory --------------------------------------------------------------------------------


class DirectoryPlace:
    """A file is whole before it is named to anybody: it is synced, and its directory too. A process that
    dies over it leaves a part that nothing references."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: set[Path] = set()

    def put(self, name: str, *parts: Buffer) -> bytes:
        path = self._path / name
        with self._typed():
            try:
                handle = self._created(path)
            except FileExistsError:
                return self._same(path, b"".join(parts))
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
            _sync(path.parent)
        return _file_tag(status)

    def get(self, name: str, lo: int = 0, hi: int | None = None) -> bytes | None:
        with self._typed():
            try:
                with open(self._path / name, "rb") as file:
                    file.seek(lo)
                    return file.read(-1 if hi is None else hi - lo)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

    def listing(self, prefix: str) -> Iterator[Listed]:
        with self._typed():
            waiting = [prefix.rstrip("/")]
            while waiting:
                inside = waiting.pop()
                try:
                    entries = sorted(os.scandir(self._path / inside), key=lambda one: one.name)
                except (FileNotFoundError, NotADirectoryError):
                    # A mount that is missing is no spool without objects.
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
                        yield Listed(name, status.st_size, tag, status.st_mtime_ns)

    def delete(self, names: Iterable[str]) -> int:
        count = 0
        with self._typed():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (self._path / name).unlink()
                    count += 1
        return count

    def drop(self, prefix: str) -> None:
        with self._typed():
            for inside, _, _ in os.walk(self._path / prefix, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(inside)

    def _same(self, path: Path, data: bytes) -> bytes:
        """The name is taken: by the same bytes, or it is refused."""
        if path.read_bytes() != data:
            raise Conflict(what="spool object", name=path.name, why="it is there with other bytes")
        return _file_tag(path.stat())

    def _created(self, path: Path) -> int:
        self._make(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags, 0o640)
        except FileNotFoundError:
            # Its directory was removed since this process made it.
            self._made.discard(path.parent)
            self._make(path.parent)
            return os.open(path, flags, 0o640)

    def _make(self, directory: Path) -> None:
        if directory in self._made:
            return
        missing = [one for one in (directory, *directory.parents) if not one.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for one in missing:
            _sync(one.parent)
        self._made.add(directory)

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise SpoolDenied(spool=str(self._path), why=error.strerror or "") from None
        except OSError as error:
            raise SpoolUnreachable(spool=str(self._path), why=error.strerror or "") from None


def _file_tag(status: os.stat_result) -> bytes:
    return tag_of(f"{status.st_mtime_ns} {status.st_size}")


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- an object store ----------------------------------------------------------------------------


class ObjectPlace:
    """A put is conditional: it creates the object or is refused."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._opened: Any = None

    def put(self, name: str, *parts: Buffer) -> bytes:
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        with self._typed():
            try:
                # In one request: an upload in parts has no condition everywhere.
                put = library().put(
                    self._bucket(), self._path(name), data, mode="create", use_multipart=False
                )
            except library().exceptions.AlreadyExistsError:
                return self._same(name, data)
        return tag_of(put["e_tag"] or "")

    def get(self, name: str, lo: int = 0, hi: int | None = None) -> bytes | None:
        with self._typed():
            try:
                if hi is None and not lo:
                    return bytes(library().get(self._bucket(), self._path(name)).bytes())
                if hi is None:
                    hi = int(library().head(self._bucket(), self._path(name))["size"])
                if lo >= hi:
                    return b""
                return bytes(
                    library().get_range(self._bucket(), self._path(name), start=lo, end=hi)
                )
            except (library().exceptions.NotFoundError, FileNotFoundError):
                return None
            except library().exceptions.GenericError:
                # A range beyond the end of an object that is shorter than it was.
                if hi is None:
                    raise
                whole = bytes(library().get(self._bucket(), self._path(name)).bytes())
                return whole[lo:hi]

    def listing(self, prefix: str) -> Iterator[Listed]:
        home = f"{self._place.prefix}/"
        with self._typed():
            pages = library().list(
                self._bucket(), self._path(prefix.rstrip("/") + "/"), chunk_size=LIST_OBJECTS
            )
            for page in pages:
                for one in page:
                    yield Listed(
                        one["path"].removeprefix(home),
                        int(one["size"]),
                        tag_of(one["e_tag"] or ""),
                        int(one["last_modified"].timestamp() * 1e9),
                    )

    def delete(self, names: Iterable[str]) -> int:
        count = 0
        lot: list[str] = []
        for name in names:
            lot.append(self._path(name))
            count += 1
            if len(lot) == DELETE_OBJECTS:
                self._delete(lot)
                lot = []
        self._delete(lot)
        return count

    def drop(self, prefix: str) -> None: ...

    def _delete(self, paths: list[str]) -> None:
        if not paths:
            return
        with self._typed():
            try:
                library().delete(self._bucket(), paths)
            except (library().exceptions.NotFoundError, FileNotFoundError):
                for path in paths:
                    with contextlib.suppress(library().exceptions.NotFoundError, FileNotFoundError):
                        library().delete(self._bucket(), path)

    def _same(self, name: str, data: bytes) -> bytes:
        """The name is taken: by the same bytes (an answer got lost, and the put was repeated), or it is refused."""
        found = library().get(self._bucket(), self._path(name))
        if bytes(found.bytes()) != data:
            raise Conflict(what="spool object", name=name, why="it is there with other bytes")
        return tag_of(found.meta["e_tag"] or "")

    def _bucket(self) -> Any:
        if self._opened is None:
            self._opened = open_bucket(self._place)
        return self._opened

    def _path(self, name: str) -> str:
        return f"{self._place.prefix}/{name}"

    @contextlib.contextmanager
    def _typed(self) -> Iterator[None]:
        """Errors of the library, as ours. What they say of headers is left out."""
        wrong = library().exceptions
        try:
            yield
        except (wrong.PermissionDeniedError, wrong.UnauthenticatedError) as error:
            raise SpoolDenied(spool=self._place.url, why=told(error)) from None
        except (wrong.BaseError, ValueError, OSError) as error:
            raise SpoolUnreachable(spool=self._place.url, why=told(error)) from None
