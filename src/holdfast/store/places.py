"""A place where a store is or shall be: all its rows, held by one process alone, without the engine.

It is for moving a store as a whole. Who has a place open has the lock of its writer (LMDB) or of its
commits (PostgreSQL), so nobody else commits there meanwhile.

- Rows are read in pages and written in batches, in key order; neither is ever larger than
  `PAGE_BYTES`, plus one value.
- What a backend keeps for itself is no row of the store: the marker, the meta row and outcomes are not
  among the pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import lmdb

from holdfast import codec
from holdfast.clock import SYSTEM, Anchor
from holdfast.config import KEY_BYTES_MAX, OUTCOMES_KEPT
from holdfast.errors import BadUrl, Invalid, NotFound
from holdfast.store import access, schema, tuples, urls
from holdfast.store.api import Row
from holdfast.store.engine import meta_row
from holdfast.store.memory import MemoryBackend
from holdfast.store.redo import Recovery
from holdfast.store.rows import LmdbBackend, prepare, storage_error
from holdfast.store.txn import Base
from holdfast.store.writer import await_lock

PAGE_ROWS = 5_000
PAGE_BYTES = 8 * 1024 * 1024
FIRST = b"\x00"
END = b"\xff" * (KEY_BYTES_MAX + 1)
LOOK_S = 0.1
_EMPTY = MemoryBackend().snapshot()


class Last(NamedTuple):
    """The last commit: numbers and times go on after it."""

    commit_no: int
    at_ns: int


class Place(Protocol):
    """One caller at a time."""

    url: str

    def marker(self) -> bytes | None: ...
    def meta(self) -> schema.Meta | None: ...
    def last(self) -> Last: ...
    def now_ns(self) -> int: ...

    def about(self) -> int | None:
        """About how many rows there are, if that is known."""

    def last_key(self) -> bytes:
        """The key of the last row; empty if there is none."""

    def reading(self) -> AbstractContextManager[Base]:
        """The rows, to look things up in."""

    def pages(self, after: bytes) -> Iterator[list[Row]]: ...

    def put(self, rows: list[Row]) -> None:
        """Add rows, durably."""

    def change(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Write rows, and remove those without a value, in one commit."""

    def empty(self, marker: bytes) -> None:
        """Make it a place without rows that has this marker, whatever was there before."""

    def settle(self, marker: bytes, meta: schema.Meta, last: Last) -> None:
        """Write what the backend needs to go on from here, and the marker, in one commit."""

    def mark(self, marker: bytes) -> None: ...

    def close_down(self, marker: bytes) -> None:
        """Mark a store that has moved, so that nobody commits here any more, not even a process that
        has had it open for long."""

    def close(self) -> None: ...


def source(url: str, *, patience_s: float = 0.0) -> Place:
    """The place of a store that is there; StoreBusy if somebody has it open for longer than that."""
    if urls.scheme_of(url) == "lmdb":
        path = path_of(url)
        access.check(path.absolute())
        if not (path / "data.mdb").exists():
            raise NotFound(what="store", path=str(path))
        return LmdbPlace(path, patience_s=patience_s)
    return _elsewhere(url, create=False, patience_s=patience_s)


def target(url: str, *, patience_s: float = 0.0) -> Place:
    """A place for a store; it may be empty, and may not even be there yet."""
    if urls.scheme_of(url) == "lmdb":
        return LmdbPlace(path_of(url), patience_s=patience_s)
    return _elsewhere(url, create=True, patience_s=patience_s)


def own(key: bytes) -> bool:
    """Whether a row is the backend's and not the store's."""
    return key in (schema.MARKER_KEY, schema.META_KEY) or key.startswith(schema.OUTCOME)


def paged(rows: Iterable[Row]) -> Iterator[list[Row]]:
    page: list[Row] = []
    size = 0
    for row in rows:
        if own(row[0]):
            continue
        page.append(row)
        size += len(row[0]) + len(row[1])
        if len(page) == PAGE_ROWS or size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


class LmdbPlace:
    def __init__(self, path: Path, *, patience_s: float) -> None:
        self.path = path.absolute()
        self.url = f"lmdb:{self.path}"
        prepare(self.path)
        self._lock = await_lock(self.path, patience_s)
        # Opened by the first call that needs more than a look: a refused copy changes no file.
        self._opened: LmdbBackend | None = None
        try:
            with self.reading():
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

    def meta(self) -> schema.Meta | None:
        with self.reading() as base:
            return meta_row(base)

    def last(self) -> Last:
        meta = self.meta()
        last = Last(0, 0 if meta is None else meta.floor_ns)
        with self.reading() as base:
            for _, row in base.scan(schema.OUTCOME, tuples.after(schema.OUTCOME), None, False):
                commit_no, _, at_ns = codec.unpack(row)[:3]
                last = Last(max(last.commit_no, commit_no), max(last.at_ns, at_ns))
        return last

    def now_ns(self) -> int:
        meta = self.meta()
        last_ns = self.last().at_ns
        if meta is None or meta.boot_id != SYSTEM.boot_id():
            return max(SYSTEM.wall_ns(), last_ns)
        return max(Anchor(meta.boot_id, meta.offset_ns).now_ns(SYSTEM.boot_ns()), last_ns)

    def about(self) -> int | None:
        return int(self._backend.env.stat()["entries"])

    def last_key(self) -> bytes:
        with self.reading() as base:
            # The backend's own rows are few, once outcomes are gone.
            found = base.scan(FIRST, END, 4, True)
        return next((key for key, _ in found if not own(key)), b"")

    @contextmanager
    def reading(self) -> Iterator[Base]:
        if self._opened is None:
            try:
                with Recovery(self.path).looking() as view:
                    yield view or _EMPTY
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
                    yield from paged(cursor.iternext())
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def put(self, rows: list[Row]) -> None:
        self._write(rows)

    def change(self, rows: Mapping[bytes, bytes | None]) -> None:
        txn = self._backend.begin()
        try:
            txn.put_many([(key, value) for key, value in rows.items() if value is not None])
            for key in [key for key, value in rows.items() if value is None]:
                txn.delete(key)
        except BaseException:
            txn.abort()
            raise
        txn.commit()

    def empty(self, marker: bytes) -> None:
        try:
            with self._backend.env.begin(write=True) as txn:
                txn.drop(self._backend.env.open_db(), delete=False)
                txn.put(schema.MARKER_KEY, marker)
        except lmdb.Error as error:
            raise storage_error(error, self.path) from None

    def settle(self, marker: bytes, meta: schema.Meta, last: Last) -> None:
        # The engine numbers commits by their outcomes, which lie in slots in turn: the next turn begins.
        commit_no = -(-last.commit_no // OUTCOMES_KEPT) * OUTCOMES_KEPT
        rows = [(schema.META_KEY, codec.pack(meta)), (schema.MARKER_KEY, marker)]
        if commit_no:
            outcome = codec.pack([commit_no, self._backend.last_id() + 1, last.at_ns, [], []])
            rows.append((schema.OUTCOME + tuples.pack_int(0), outcome))
        self._write(rows)

    def mark(self, marker: bytes) -> None:
        self._write([(schema.MARKER_KEY, marker)])

    # Whoever has had it open needs a writer to commit, and the next one looks at the marker first.
    close_down = mark

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._lock.close()

    def _get(self, key: bytes) -> bytes | None:
        with self.reading() as base:
            return base.get(key)

    def _write(self, rows: list[Row]) -> None:
        txn = self._backend.begin()
        try:
            txn.put_many(rows)
        except BaseException:
            txn.abort()
            raise
        txn.commit()


def path_of(url: str) -> Path:
    return Path(urls.split(url)[1])


def _elsewhere(url: str, *, create: bool, patience_s: float) -> Place:
    scheme = urls.scheme_of(url)
    if scheme == "memory":
        raise Invalid(what="store", why="a store in memory is gone with its process", scheme=scheme)
    if scheme != "postgresql":
        raise BadUrl(url=urls.shown(url), scheme=scheme)
    from holdfast.store.pg.place import PgPlace

    return PgPlace(url, create=create, patience_s=patience_s)
