"""Exclusive raw access to all rows of a store, without the commit engine, for copy and move.

A raw store holds the writer lock (LMDB) or the commit lock (PostgreSQL), so no other process can
commit.

- Rows are read in pages and written in batches, in key order. Both are bounded by `PAGE_BYTES` plus
  one value.
- Pages exclude the rows of the backend itself: the marker, the meta row and the outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import lmdb

from holdfast import codec
from holdfast.clock import SYSTEM, ClockAnchor
from holdfast.config import KEY_BYTES_MAX, OUTCOMES_KEPT
from holdfast.errors import BadUrl, Invalid, NotFound
from holdfast.store import schema, tuples, urls
from holdfast.store.api import Row
from holdfast.store.engine import read_meta_row
from holdfast.store.lmdb import permissions
from holdfast.store.lmdb.backend import LmdbBackend, prepare_directory, storage_error
from holdfast.store.lmdb.redo_log import RedoRecovery
from holdfast.store.lmdb.writer import wait_for_lock
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.txn import BaseRows

PAGE_ROWS = 5_000
PAGE_BYTES = 8 * 1024 * 1024
FIRST_KEY = b"\x00"
END_KEY = b"\xff" * (KEY_BYTES_MAX + 1)
# The poll interval of a process that waits for the lock of a store. It grows from the first value to the last.
LOCK_POLL_S, LOCK_POLL_S_MAX = 0.002, 0.1
_NO_ROWS = MemoryBackend().snapshot()


class LastCommit(NamedTuple):
    """The last commit. Commit numbers and times continue after it."""

    commit_no: int
    at_ns: int


class RawStore(Protocol):
    """A store opened for exclusive raw access. One caller at a time."""

    url: str

    def marker(self) -> bytes | None: ...
    def meta(self) -> schema.StoreMeta | None: ...
    def last_commit(self) -> LastCommit: ...
    def now_ns(self) -> int: ...

    def estimate_rows(self) -> int | None:
        """The estimated number of rows, or None."""

    def last_key(self) -> bytes:
        """The key of the last row; empty if there is none."""

    def open_rows(self) -> AbstractContextManager[BaseRows]:
        """Open the rows for lookups."""

    def pages(self, after: bytes) -> Iterator[list[Row]]: ...

    def put(self, rows: list[Row]) -> None:
        """Add rows, durably."""

    def apply_changes(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Write rows in one commit. A None value deletes the row."""

    def clear(self, marker: bytes) -> None:
        """Delete all rows and write this marker."""

    def finish(self, marker: bytes, meta: schema.StoreMeta, last: LastCommit) -> None:
        """Write the meta row, the last commit and the marker in one commit."""

    def write_marker(self, marker: bytes) -> None: ...

    def mark_moved(self, marker: bytes) -> None:
        """Mark the store as moved. No process can commit afterwards, not even one that already had it open."""

    def close(self) -> None: ...


def open_source(url: str, *, lock_wait_s: float = 0.0) -> RawStore:
    """Open an existing store; StoreBusy if another process keeps it open longer than `lock_wait_s`."""
    if urls.scheme_of(url) == "lmdb":
        path = directory_of_url(url)
        permissions.check_access(path.absolute())
        if not (path / "data.mdb").exists():
            raise NotFound(what="store", path=str(path))
        return LmdbRawStore(path, lock_wait_s=lock_wait_s)
    return _open_postgres(url, create=False, lock_wait_s=lock_wait_s)


def open_target(url: str, *, lock_wait_s: float = 0.0) -> RawStore:
    """Open the target of a copy. It may be empty or missing."""
    if urls.scheme_of(url) == "lmdb":
        return LmdbRawStore(directory_of_url(url), lock_wait_s=lock_wait_s)
    return _open_postgres(url, create=True, lock_wait_s=lock_wait_s)


def is_backend_row(key: bytes) -> bool:
    """Whether a row belongs to the backend and not to the store."""
    return key in (schema.MARKER_KEY, schema.META_KEY) or key.startswith(schema.OUTCOME)


def split_into_pages(rows: Iterable[Row]) -> Iterator[list[Row]]:
    page: list[Row] = []
    size = 0
    for row in rows:
        if is_backend_row(row[0]):
            continue
        page.append(row)
        size += len(row[0]) + len(row[1])
        if len(page) == PAGE_ROWS or size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


class LmdbRawStore:
    def __init__(self, path: Path, *, lock_wait_s: float) -> None:
        self.path = path.absolute()
        self.url = f"lmdb:{self.path}"
        prepare_directory(self.path)
        self._lock = wait_for_lock(self.path, lock_wait_s)
        # Opened by the first call that writes or scans: a refused copy changes no file.
        self._opened: LmdbBackend | None = None
        try:
            with self.open_rows():
                pass
        except BaseException:
            self._lock.close()
            raise

    @property
    def _backend(self) -> LmdbBackend:
        if self._opened is None:
            self._opened = LmdbBackend(self.path, readonly=False)
        return self._opened

    def marker(self) -> bytes | None:
        return self._get(schema.MARKER_KEY)

    def meta(self) -> schema.StoreMeta | None:
        with self.open_rows() as base:
            return read_meta_row(base)

    def last_commit(self) -> LastCommit:
        meta = self.meta()
        last = LastCommit(0, 0 if meta is None else meta.floor_ns)
        with self.open_rows() as base:
            for _, row in base.scan(schema.OUTCOME, tuples.prefix_end(schema.OUTCOME), None, False):
                commit_no, _, at_ns = codec.unpack(row)[:3]
                last = LastCommit(max(last.commit_no, commit_no), max(last.at_ns, at_ns))
        return last

    def now_ns(self) -> int:
        meta = self.meta()
        last_ns = self.last_commit().at_ns
        if meta is None or meta.boot_id != SYSTEM.boot_id():
            return max(SYSTEM.wall_ns(), last_ns)
        return max(ClockAnchor(meta.boot_id, meta.offset_ns).now_ns(SYSTEM.boot_ns()), last_ns)

    def estimate_rows(self) -> int | None:
        return int(self._backend.env.stat()["entries"])

    def last_key(self) -> bytes:
        with self.open_rows() as base:
            # Few backend rows remain after the outcomes are deleted.
            found = base.scan(FIRST_KEY, END_KEY, 4, True)
        return next((key for key, _ in found if not is_backend_row(key)), b"")

    @contextmanager
    def open_rows(self) -> Iterator[BaseRows]:
        if self._opened is None:
            try:
                with RedoRecovery(self.path).open_view() as view:
                    yield view or _NO_ROWS
            except OSError as error:
                raise storage_error(error, self.path) from None
            return
        snapshot = self._opened.snapshot()
        try:
            yield snapshot
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None
        finally:
            snapshot.close()

    def pages(self, after: bytes) -> Iterator[list[Row]]:
        try:
            with self._backend.env.begin() as txn, txn.cursor() as cursor:
                if cursor.set_range(after + b"\x00"):
                    yield from split_into_pages(cursor.iternext())
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def put(self, rows: list[Row]) -> None:
        self._write(rows)

    def apply_changes(self, rows: Mapping[bytes, bytes | None]) -> None:
        txn = self._backend.begin()
        try:
            txn.put_many([(key, value) for key, value in rows.items() if value is not None])
            for key in [key for key, value in rows.items() if value is None]:
                txn.delete(key)
        except BaseException:
            txn.abort()
            raise
        txn.commit()

    def clear(self, marker: bytes) -> None:
        try:
            with self._backend.env.begin(write=True) as txn:
                txn.drop(self._backend.env.open_db(), delete=False)
                txn.put(schema.MARKER_KEY, marker)
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def finish(self, marker: bytes, meta: schema.StoreMeta, last: LastCommit) -> None:
        # The engine derives the commit number from the outcome slots (a ring). Round up to slot 0.
        commit_no = -(-last.commit_no // OUTCOMES_KEPT) * OUTCOMES_KEPT
        rows = [(schema.META_KEY, codec.pack(meta)), (schema.MARKER_KEY, marker)]
        if commit_no:
            outcome = codec.pack([commit_no, self._backend.last_id() + 1, last.at_ns, [], []])
            rows.append((schema.OUTCOME + tuples.pack_int(0), outcome))
        self._write(rows)

    def write_marker(self, marker: bytes) -> None:
        self._write([(schema.MARKER_KEY, marker)])

    # A client with the store open needs a writer to commit, and each new writer reads the marker first.
    mark_moved = write_marker

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._lock.close()

    def _get(self, key: bytes) -> bytes | None:
        with self.open_rows() as base:
            return base.get(key)

    def _write(self, rows: list[Row]) -> None:
        txn = self._backend.begin()
        try:
            txn.put_many(rows)
        except BaseException:
            txn.abort()
            raise
        txn.commit()


def directory_of_url(url: str) -> Path:
    return Path(urls.split_scheme(url)[1])


def _open_postgres(url: str, *, create: bool, lock_wait_s: float) -> RawStore:
    scheme = urls.scheme_of(url)
    if scheme == "memory":
        raise Invalid(what="store", why="a store in memory ends with its process", scheme=scheme)
    if scheme != "postgresql":
        raise BadUrl(url=urls.redact(url), scheme=scheme)
    from holdfast.store.postgres.raw_store import PostgresRawStore

    return PostgresRawStore(url, create=create, lock_wait_s=lock_wait_s)
