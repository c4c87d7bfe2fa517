"""The redo log of an embedded store: one append and one sync make a commit durable.

LMDB commits without syncing. Durability across a power failure needs:

- A *base*: an LMDB commit whose pages are all on disk. An open snapshot of it keeps LMDB from reusing its
  pages, and the log keeps a copy of its meta page, because LMDB overwrites that.
- A record of every commit since the base, synced before LMDB commits: no reader ever sees a commit that a
  power failure could lose.

A *checkpoint* makes the latest commit the base, concurrently with new commits: it syncs LMDB's file and then
records that in the header of the log. Two logs alternate: commits go to one while the records of the other
are still needed. Recovery restores the meta page of the base and replays the records after it with their
commit numbers.

If other processes have the store open, the machine did not lose LMDB's writes. Recovery then replays only a
commit that was logged but did not reach LMDB.

Recovery reads before it writes: `RedoRecovery.open_view` presents the rows after the replay and checks every page
that the replay touches. Each epoch of the log has a random salt at the start of its records, so that stored user
data is never mistaken for a record.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec

from holdfast import failpoints
from holdfast.clock import SYSTEM
from holdfast.config import REDO_BYTES, REDO_BYTES_MAX, REDO_COMMITS, REDO_COMMITS_MAX, REDO_NS
from holdfast.errors import Invalid, SchemaMismatch, StoreCorrupt, StoreError
from holdfast.store import schema
from holdfast.store.lmdb.page_reader import (
    META_BYTES,
    META_COUNT,
    PageReader,
    decode_meta_page,
    newest_meta,
    read_meta_pages,
)
from holdfast.store.lmdb.recovered_view import RecoveredView

LOG_FILES = ("redo.0", "redo.1")
_REMOVE_LOGS_HINT = "if the machine has not lost power since, data.mdb is complete without it: remove redo.0 and redo.1"
DATA_FILE = "data.mdb"
READER_TABLE_FILE = "lock.mdb"

# A key and its value; None for a deletion.
Change = tuple[bytes, bytes | None]

_MAGIC_PREFIX = b"holdfast redo "
_MAGIC = _MAGIC_PREFIX + b"1\n"
_HEADER_BYTES = 4096
# A header fits into one sector, so that a power failure leaves the old or the new one.
_SECTOR_BYTES = 512
_SALT_BYTES = 8
# The base and its successor.
_BASES_MAX = 2
# Two header slots, so that no needed header is overwritten. The first records the begin of an epoch or a clean
# close, the second that the base of the epoch is on disk.
_BEGUN_HEADER_AT, _BASE_HEADER_AT = _HEADER_OFFSETS = (0, 2048)
# CRC-32 and length of the body.
_HEADER_HEAD = struct.Struct("<II")
# CRC-32, length of the body, epoch of the log, commit number. The salt of the epoch precedes it.
_RECORD_HEAD = struct.Struct("<IIQQ")
_encode = msgspec.msgpack.Encoder().encode
_changes_decoder: msgspec.msgpack.Decoder[list[Change]] = msgspec.msgpack.Decoder(list[Change])

# The page number at the start of a page.
_PGNO = struct.Struct("<Q")


class RedoHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a log file. The base is the commit in the data file to which the records of the log are added.

    `meta` is the LMDB meta page of the base. If it is empty, the header of the other log file has it. A `closed` log is
    not needed for recovery: all pages are synced, and `meta` belongs to the last commit. `schema` is the schema version
    of the base. A record of the log may write a newer schema marker. Logs of earlier versions have no schema and no
    salt."""

    epoch: int
    base: int
    meta: bytes = b""
    closed: bool = False
    schema: tuple[int, int] | None = None
    salt: bytes = b""


_header_decoder: msgspec.msgpack.Decoder[RedoHeader] = msgspec.msgpack.Decoder(RedoHeader)


class RedoLog:
    """The redo log of an open environment. One thread commits and a second one syncs."""

    def __init__(
        self,
        path: Path,
        env: lmdb.Environment,
        *,
        epoch: int,
        version: tuple[int, int] = schema.SCHEMA_VERSION,
    ) -> None:
        """`version` is the schema version of the store at this moment."""
        self._env = env
        self._base_version = version
        self._page_bytes = int(env.stat()["psize"])
        self._data_fd = os.open(path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        self._log_fds = [_open_log(path / name) for name in LOG_FILES]
        self._epoch = epoch
        self._salt = b""
        # The number of the next commit and the offset of its record.
        self._next_commit = 0
        self._append_at = self._last_append_at = _HEADER_BYTES
        self._commits = 0
        self._since_ns = 0
        self._failure: BaseException | None = None
        self._sync_jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Set while no checkpoint runs.
        self._checkpoint_done = threading.Event()
        self._checkpoint_done.set()
        self._bases: list[lmdb.Transaction] = []
        if failpoints.armed:
            failpoints.hit("redo_log.open", self)
        _sync_directory(path)
        self._thread = threading.Thread(
            target=self._run_sync_jobs, name="holdfast-redo", daemon=True
        )
        self._thread.start()
        self.checkpoint()
        self._wait_for_checkpoint()

    # -- the committing thread -------------------------------------------------------------------

    def append(self, id: int, changes: Sequence[Change]) -> None:
        """Make a commit durable. If it raises, the commit did not happen."""
        if failpoints.armed:
            failpoints.hit("redo_log.append", self)
        if self._append_at > REDO_BYTES_MAX or self._commits >= REDO_COMMITS_MAX:
            self._wait_for_checkpoint()
            self.checkpoint()
        self._check_failure()
        if id != self._next_commit:
            raise StoreCorrupt(
                what="commit", why="out of order", expected=self._next_commit, found=id
            )
        body = _encode(changes)
        record = _encode_record_head(self._salt, self._epoch, id, body)
        file = self._log_fd
        _write(file, record + body, self._append_at)
        try:
            os.fdatasync(file)
        except OSError as error:
            # The record may still be on disk: the log must not report a definite failure and continue.
            self._failure = error
            self._check_failure()
        self._last_append_at, self._append_at = (
            self._append_at,
            self._append_at + len(record) + len(body),
        )

    def undo_append(self) -> None:
        """Erase the record of the last append because LMDB could not commit it."""
        self._append_at = self._last_append_at
        _write(self._log_fd, bytes(_SALT_BYTES + _RECORD_HEAD.size), self._append_at)
        os.fdatasync(self._log_fd)

    def on_committed(self) -> None:
        """Note that LMDB committed the last append. The next commit raises an error that occurs here."""
        self._next_commit += 1
        if not self._commits:
            self._since_ns = SYSTEM.mono_ns()
        self._commits += 1
        if self._commits >= REDO_COMMITS or self._append_at >= REDO_BYTES:
            try:
                self.checkpoint()
            except Exception as error:
                self._failure = error

    def tick(self) -> None:
        """Checkpoint commits that are older than a bound. The writer calls this periodically."""
        self._check_failure()
        if self._commits and SYSTEM.mono_ns() - self._since_ns >= REDO_NS:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Start to make the latest commit the base, unless a checkpoint is still running."""
        if not self._checkpoint_done.is_set():
            return
        self._check_failure()
        while len(self._bases) >= _BASES_MAX:
            self._bases.pop(0).abort()
        try:
            base = self._env.begin()
        except lmdb.ReadersFullError:
            if not self._bases:
                raise
            return  # the log grows until a reader slot is free
        self._bases.append(base)
        id = base.id()
        meta = self._read_meta_page(id)
        # The first commit after an open raises an older marker, so every later base has the current version.
        version, self._base_version = self._base_version, schema.SCHEMA_VERSION
        self._epoch += 1
        self._salt = salt = SYSTEM.entropy(_SALT_BYTES)
        self._next_commit = id + 1
        self._append_at = self._last_append_at = _HEADER_BYTES
        self._commits = 0
        file, epoch = self._log_fd, self._epoch
        other = self._log_fds[(epoch + 1) % len(self._log_fds)]
        if failpoints.armed:
            failpoints.hit("redo_log.begin_epoch", self)
        # Records of this epoch are valid if the records of the former epoch reach its base.
        _write(
            file, _encode_header(RedoHeader(epoch, id, schema=version, salt=salt)), _BEGUN_HEADER_AT
        )

        def finish_checkpoint() -> None:
            self._env.sync(True)
            _write(
                file,
                _encode_header(RedoHeader(epoch, id, meta, schema=version, salt=salt)),
                _BASE_HEADER_AT,
            )
            os.fdatasync(file)
            # Only now is the other log no longer needed.
            if os.fstat(other).st_size > REDO_BYTES_MAX:
                os.ftruncate(other, REDO_BYTES_MAX)

        self._checkpoint_done.clear()
        self._sync_jobs.put(finish_checkpoint)
        if failpoints.armed:
            failpoints.hit("redo_log.checkpoint_started", self)

    def close(self) -> None:
        """Sync everything and mark the log as closed, so that nothing needs recovery."""
        self._wait_for_checkpoint()
        # No checkpoint: the disk may be full.
        self._env.sync(True)
        for base in self._bases:
            base.abort()
        self._sync_jobs.put(None)
        self._thread.join()
        last = self._next_commit - 1
        closed = RedoHeader(
            self._epoch, last, self._read_meta_page(last), closed=True, schema=schema.SCHEMA_VERSION
        )
        _write(self._log_fd, _encode_header(closed), _BEGUN_HEADER_AT)
        os.fdatasync(self._log_fd)
        self.close_files()

    def close_files(self) -> None:
        """Close the files without a sync, as after a kill."""
        self._sync_jobs.put(None)
        for file in (*self._log_fds, self._data_fd):
            os.close(file)

    def _read_meta_page(self, id: int) -> bytes:
        """The meta page of one of the last two commits."""
        meta = os.pread(self._data_fd, META_BYTES, (id % META_COUNT) * self._page_bytes)
        if decode_meta_page(meta).txn != id:
            raise StoreCorrupt(what="meta page", why="not at its expected position", commit=id)
        return meta

    @property
    def _log_fd(self) -> int:
        return self._log_fds[self._epoch % len(self._log_fds)]

    def _wait_for_checkpoint(self) -> None:
        if failpoints.armed:
            failpoints.hit("redo_log.checkpoint_wait", self)
        self._checkpoint_done.wait()
        self._check_failure()

    def _check_failure(self) -> None:
        if self._failure is not None:
            # The kernel does not retry a failed write. Only a restart can determine the state on disk.
            raise StoreError(what="sync", why=str(self._failure)) from self._failure

    # -- the syncing thread ----------------------------------------------------------------------

    def _run_sync_jobs(self) -> None:
        while (job := self._sync_jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._failure = error
            self._checkpoint_done.set()


class RedoRecovery:
    """The recovery of a directory from its logs, before LMDB opens the file. The caller holds the writer lock.
    Nothing is written before `restore_base`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The full length of a file that is too short.
        self._full_bytes = 0
        # The schema version of the rows, known after `open_view`.
        self.version = schema.SCHEMA_VERSION
        headers: list[RedoHeader | None] = []
        for name in LOG_FILES:
            headers.append(_read_latest_header(path / name))
            if failpoints.armed:
                failpoints.hit("redo_log.header_read", path)
        logs = [header for header in headers if header is not None]
        self.has_logs = bool(logs)
        last = max((log.epoch for log in logs), default=0)
        # A restart skips one epoch: the log may contain a record of that epoch without its header. Older records
        # are void after the file is synced and a new epoch has begun.
        self.next_epoch = last + len(LOG_FILES)
        closed = [log for log in logs if log.closed and log.epoch == last]
        self._closed = closed[0] if closed else None
        in_use = [] if closed else [log for log in logs if log.epoch >= last - 1]
        for log in in_use:
            refused = schema.SchemaMatch.REFUSE
            if log.schema is not None and schema.compare_versions(log.schema) is refused:
                # Records of a version that this code does not read must not be replayed.
                expected = list(schema.SCHEMA_VERSION)
                raise SchemaMismatch(path=str(path), found=log.schema, expected=expected)
        # Both files have a header before either is used.
        if None in headers and any(log.salt for log in in_use):
            missing = path / LOG_FILES[headers.index(None)]
            raise StoreCorrupt(
                path=str(missing), why="the log has lost its header; " + _REMOVE_LOGS_HINT
            )
        based = [log for log in in_use if log.meta]
        self._base = max(based, key=lambda log: log.epoch, default=None)

    @contextmanager
    def open_view(self) -> Iterator[RecoveredView | None]:
        """Yield the rows as they will be after recovery, None if there is no file yet. Raises every error that
        prevents the recovery."""
        try:
            fd = os.open(self._path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._base is not None or (self._closed is not None and self._closed.base):
                why = "the file is missing, and its log exists"
                raise StoreCorrupt(path=str(self._path / DATA_FILE), why=why) from None
            yield None
            return
        try:
            yield self._build_view(fd) if os.fstat(fd).st_size else None
        finally:
            os.close(fd)

    def _build_view(self, fd: int) -> RecoveredView:
        meta = newest_meta(fd)
        if self._closed is not None and self._closed.meta:
            # LMDB has no checksums, so the log has a copy of the meta page, on which all other pages depend. The page
            # number is not compared: after a recovery both meta pages hold the same commit.
            is_same_meta = meta[_PGNO.size :] == self._closed.meta[_PGNO.size :]
            if not is_same_meta and decode_meta_page(meta).txn == self._closed.base:
                raise StoreCorrupt(path=str(self._path / DATA_FILE), why="its meta page is damaged")
        records: list[tuple[int, bytes]] = []
        if self._base is not None:
            records = list(_iter_records(self._path, self._base))
            with _exclusive_access(self._path, create=False) as is_exclusive:
                if is_exclusive:
                    _check_log_matches_file(self._path, fd, self._base, records)
                    meta = self._base.meta
        pages = PageReader(fd, meta)
        to_replay = [
            (id, _decode_changes(self._path, body)) for id, body in records if id > pages.id
        ]
        if to_replay and to_replay[0][0] != pages.id + 1:
            raise StoreCorrupt(
                path=str(self._path),
                why="the first record of the redo log does not follow the last commit of data.mdb",
            )
        changes = [change for _, body_changes in to_replay for change in body_changes]
        if not pages.is_whole:
            # Unused pages at the end may never have been written.
            pages.check_all()
            self._full_bytes = pages.full_bytes
        pages.check_paths([key for key, _ in changes])
        view = RecoveredView(pages, changes)
        self.version = _version_of(view)
        return view

    def restore_base(self) -> None:
        """Make the base the latest commit of LMDB's file again, unless other processes have it open."""
        if self._full_bytes:
            # Add a hole for the unused pages, so that the next open need not check the whole file.
            _extend_file(self._path / DATA_FILE, self._full_bytes)
        if self._base is not None and (self._path / DATA_FILE).exists():
            with _exclusive_access(self._path, create=True) as is_exclusive:
                if is_exclusive:
                    _restore_meta_pages(
                        self._path, self._base, list(_iter_records(self._path, self._base))
                    )

    def replay(self, env: lmdb.Environment) -> None:
        """Replay the commits that LMDB's file lacks."""
        if failpoints.armed:
            failpoints.hit("redo_log.replay", self)
        # A writer that died in the last step of a commit left the lock file one commit behind. An empty write
        # transaction corrects it. (Its snapshots stay: if other processes have the file open, they keep the base.)
        env.begin(write=True).abort()
        if self._base is None:
            return
        # If this recovery is killed, the next one starts from the base, so its pages must be kept.
        with env.begin() as base_snapshot:
            at = base_snapshot.id()
            if failpoints.armed:
                failpoints.hit("redo_log.base_pinned", base_snapshot)
            for id, body in _iter_records(self._path, self._base):
                if id > at:
                    self._replay_commit(env, id, body)
            env.sync(True)
        if failpoints.armed:
            failpoints.hit("redo_log.replayed", self)

    def _replay_commit(self, env: lmdb.Environment, id: int, body: bytes) -> None:
        if failpoints.armed:
            failpoints.hit("redo_log.replay_commit", id)
        with env.begin(write=True) as txn:
            if txn.id() != id:
                why = "the next record of the redo log does not follow the last commit of data.mdb"
                raise StoreCorrupt(path=str(self._path), why=why)
            for key, value in _decode_changes(self._path, body):
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, value)
        if failpoints.armed:
            failpoints.hit("redo_log.commit_replayed", id)


def discard_logs(path: Path) -> None:
    """Invalidate and remove the logs. At no moment may only one of them be valid."""
    files = [path / name for name in LOG_FILES if (path / name).exists()]
    last = max((log.epoch for file in files for log in _read_headers(file)), default=0)
    for file in files:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            _write(fd, _encode_header(RedoHeader(last + 1, 0, closed=True)), _BEGUN_HEADER_AT)
            os.fdatasync(fd)
        finally:
            os.close(fd)
    for file in files:
        file.unlink()
    _sync_directory(path)


def _iter_records(path: Path, base: RedoHeader) -> Iterator[tuple[int, bytes]]:
    """Yield the commits after the base in order, from its log and from the following log."""
    if failpoints.armed:
        failpoints.hit("redo_log.read_records", path, base)
    id = base.base
    for epoch in (base.epoch, base.epoch + 1):
        file = path / LOG_FILES[epoch % len(LOG_FILES)]
        header = _read_latest_header(file)
        if header is None or header.epoch != epoch:
            return
        if header.base > id:
            # A log begins only after all earlier commits are in the other log.
            why = f"the log has no commit {id + 1}; {_REMOVE_LOGS_HINT}"
            raise StoreCorrupt(path=str(file), why=why)
        data = file.read_bytes()
        at, salt = _HEADER_BYTES, header.salt
        while (body := _decode_record(data, at, salt, epoch, id + 1)) is not None:
            id += 1
            at += len(salt) + _RECORD_HEAD.size + len(body)
            yield id, body
        if salt and _has_record(data, at + 1, salt, epoch):
            # Each record is synced before the next is written, so only the last one can be torn.
            why = f"the record of commit {id + 1} is damaged; {_REMOVE_LOGS_HINT}"
            raise StoreCorrupt(path=str(file), why=why)


def _decode_record(data: bytes, at: int, salt: bytes, epoch: int, id: int | None) -> bytes | None:
    """The body of the record at this offset, if it is complete and has the expected epoch and commit number."""
    start = at + len(salt)
    if start + _RECORD_HEAD.size > len(data) or not data.startswith(salt, at):
        return None
    _, size, record_epoch, record_id = _RECORD_HEAD.unpack_from(data, start)
    if record_epoch != epoch or (id is not None and record_id != id):
        return None
    begin = start + _RECORD_HEAD.size
    body = data[begin : begin + size]
    if len(body) != size or data[at:begin] != _encode_record_head(salt, epoch, record_id, body):
        return None
    return body


def _has_record(data: bytes, at: int, salt: bytes, epoch: int) -> bool:
    """Whether a complete record of this epoch follows this offset."""
    while (at := data.find(salt, at)) >= 0:
        if _decode_record(data, at, salt, epoch, None) is not None:
            return True
        at += 1
    return False


def _encode_record_head(salt: bytes, epoch: int, id: int, body: bytes) -> bytes:
    tail = _RECORD_HEAD.pack(0, len(body), epoch, id)[4:]
    crc = zlib.crc32(body, zlib.crc32(tail, zlib.crc32(salt)))
    return salt + struct.pack("<I", crc) + tail


def _version_of(rows: RecoveredView) -> tuple[int, int]:
    """The schema version of the rows; that of this code if they have no version marker."""
    marker = rows.get(schema.MARKER_KEY)
    try:
        return schema.SCHEMA_VERSION if marker is None else schema.decode_marker(marker)
    except Invalid:
        return schema.SCHEMA_VERSION


def _decode_changes(path: Path, body: bytes) -> list[Change]:
    try:
        return _changes_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreCorrupt(path=str(path), what="record of the log", why=str(error)) from None


def _encode_header(header: RedoHeader) -> bytes:
    body = _encode(header)
    return _MAGIC + _HEADER_HEAD.pack(zlib.crc32(body), len(body)) + body


def _read_latest_header(file: Path) -> RedoHeader | None:
    """Read the latest header of a log; None if the log is missing or has no header yet."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(_HEADER_BYTES + _SECTOR_BYTES)
    except FileNotFoundError:
        return None
    for at in _HEADER_OFFSETS:
        sector = data[at : at + _SECTOR_BYTES]
        if _decode_header(data, at) is None and any(sector):
            if sector.startswith(_MAGIC_PREFIX) and not sector.startswith(_MAGIC):
                found = sector[len(_MAGIC_PREFIX) : len(_MAGIC)].decode(errors="replace").strip()
                raise SchemaMismatch(path=str(file), found=f"redo log {found}", expected="1")
            raise StoreCorrupt(
                path=str(file), why=f"a header of the log is damaged; {_REMOVE_LOGS_HINT}"
            )
    headers = _decode_headers(data)
    if not headers and any(data[_HEADER_BYTES:]):
        raise StoreCorrupt(path=str(file), why=f"the log has lost its header; {_REMOVE_LOGS_HINT}")
    return max(headers, key=_header_order, default=None)


def _read_headers(file: Path) -> list[RedoHeader]:
    """Read the valid headers of a log."""
    with open(file, "rb") as opened:
        return _decode_headers(opened.read(_HEADER_BYTES))


def _decode_headers(data: bytes) -> list[RedoHeader]:
    return [header for at in _HEADER_OFFSETS if (header := _decode_header(data, at)) is not None]


def _header_order(header: RedoHeader) -> tuple[int, bool, bool]:
    return header.epoch, header.closed, bool(header.meta)


def _decode_header(data: bytes, at: int) -> RedoHeader | None:
    start = at + len(_MAGIC) + _HEADER_HEAD.size
    if not data.startswith(_MAGIC, at) or len(data) < start:
        return None
    crc, size = _HEADER_HEAD.unpack_from(data, at + len(_MAGIC))
    body = data[start : start + size]
    if len(body) != size or zlib.crc32(body) != crc:
        return None
    try:
        return _header_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return None


@contextmanager
def _exclusive_access(path: Path, *, create: bool) -> Iterator[bool]:
    """Yield whether no other process has LMDB's file open: each holds a lock on the first byte of the lock file.
    A process that tries to open the file waits meanwhile."""
    try:
        fd = os.open(
            path / READER_TABLE_FILE, os.O_RDWR | os.O_CREAT * create | os.O_CLOEXEC, 0o600
        )
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            is_exclusive = True
        except OSError:
            is_exclusive = False
        yield is_exclusive
    finally:
        os.close(fd)


def _restore_meta_pages(path: Path, base: RedoHeader, records: list[tuple[int, bytes]]) -> None:
    """Make the base the latest commit of LMDB's file again."""
    if failpoints.armed:
        failpoints.hit("redo_log.restore_meta", path)
    fd = os.open(path / DATA_FILE, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_log_matches_file(path, fd, base, records)
        size = decode_meta_page(base.meta).page_bytes
        for n in range(META_COUNT):
            _write(fd, _PGNO.pack(n) + base.meta[_PGNO.size :], n * size)
        os.fsync(fd)
    finally:
        os.close(fd)
    if failpoints.armed:
        failpoints.hit("redo_log.meta_restored", path)


def _extend_file(file: Path, size: int) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _check_log_matches_file(
    path: Path, fd: int, base: RedoHeader, records: list[tuple[int, bytes]]
) -> None:
    """Refuse a data file that does not belong to the log."""
    at = max(decode_meta_page(meta).txn for meta in read_meta_pages(fd))
    last = records[-1][0] if records else base.base
    if not base.base <= at <= last:
        raise StoreCorrupt(
            path=str(path / DATA_FILE),
            why=f"the log has commits {base.base} to {last}, and the file is at {at}; "
            "if the file was replaced on purpose, remove redo.0 and redo.1",
        )


def _open_log(file: Path) -> int:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _reserve_space(fd)
    if not any(os.pread(fd, _SECTOR_BYTES, _BEGUN_HEADER_AT)):
        # From now on a log without a header is damaged.
        header = RedoHeader(0, 0, closed=True, schema=schema.SCHEMA_VERSION)
        _write(fd, _encode_header(header), _BEGUN_HEADER_AT)
        os.fdatasync(fd)
    return fd


def _reserve_space(fd: int) -> None:
    """Reserve disk space: on a full disk, deletions that free space must be logged too."""
    os.posix_fallocate(fd, 0, _HEADER_BYTES + REDO_BYTES)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        wrote = os.pwrite(fd, view, at)
        view, at = view[wrote:], at + wrote


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
