"""Backups of an embedded store: a hot copy, and a restore that invalidates every older lease.

A restored store is a new *generation*. Leases granted after the backup belong to an older generation
and are fenced. The new generation is greater than that of the replaced store and at least the wall
clock in milliseconds, so restoring the same backup twice yields two generations.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import lmdb

from holdfast import codec
from holdfast.clock import MS, SYSTEM
from holdfast.errors import HoldfastError, Invalid, NotFound, StoreCorrupt
from holdfast.store import schema, tuples
from holdfast.store.engine import check_outcomes, check_schema, read_meta_row
from holdfast.store.lmdb import permissions
from holdfast.store.lmdb.backend import LmdbBackend, prepare_directory, storage_error
from holdfast.store.lmdb.page_reader import PageReader, newest_meta
from holdfast.store.lmdb.redo_log import RedoRecovery, discard_logs
from holdfast.store.lmdb.writer import wait_for_lock

# A killed writer may take this long to exit.
WRITER_EXIT_WAIT_S = 2.0


def write_backup(backend: LmdbBackend, target: Path) -> None:
    """Write a consistent copy while commits continue. The target appears atomically."""
    if target.is_file():
        raise Invalid(what="backup", why="the target is a file", path=str(target))
    if target.exists() and any(target.iterdir()):
        raise Invalid(what="backup", why="the target is not empty", path=str(target))
    try:
        partial = _make_temp_beside(target)
    except OSError as error:
        raise storage_error(error, target) from error
    try:
        backend.env.copy(str(partial))
        permissions.apply_permissions(partial)
        _extend_to_full_length(backend, partial / "data.mdb")
        _fsync_path(partial / "data.mdb")
        os.replace(partial, target)
        _fsync_path(target.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise storage_error(error, target) from error


def restore_backup(source: Path, target: Path) -> int:
    """Restore the backup into the target as a new generation and return that generation.

    It replaces an existing store at the target. No process may have that store open.
    """
    permissions.check_access(source.absolute(), write=False)
    if not (source / "data.mdb").exists():
        raise NotFound(what="backup", path=str(source))
    _check_backup(source)
    prepare_directory(target)
    lock = wait_for_lock(target, WRITER_EXIT_WAIT_S)
    partial = target
    try:
        partial = _make_temp_beside(target)
        shutil.copyfile(source / "data.mdb", partial / "data.mdb")
        permissions.apply_permissions(partial)
        generation = _start_new_generation(partial, former=_read_generation(target))
        _fsync_path(partial / "data.mdb")
        if (target / "data.mdb").exists():
            # If the process dies before the next two steps, the old file is complete without its log.
            _fsync_path(target / "data.mdb")
        discard_logs(target)
        os.replace(partial / "data.mdb", target / "data.mdb")
        (target / "lock.mdb").unlink(missing_ok=True)
        permissions.apply_permissions(target)
        _fsync_path(target)
        return generation
    except (lmdb.Error, OSError) as error:
        raise storage_error(error, target) from error
    finally:
        if partial != target:
            shutil.rmtree(partial, ignore_errors=True)
        lock.close()


def _check_backup(source: Path) -> None:
    """Check the whole backup before it is used. LMDB would crash with SIGSEGV on damaged pages."""
    fd = os.open(source / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = PageReader(fd, newest_meta(fd))
        if not pages.is_whole:
            raise StoreCorrupt(path=str(source / "data.mdb"), why="the backup is cut off")
        pages.check_all()
        # The restored store keeps the version of the backup until it is opened.
        marker = pages.get(schema.MARKER_KEY)
        check_schema(marker, schema.SCHEMA_VERSION, bootstrap=False, allow_upgrade=True)
        if read_meta_row(pages) is None:
            raise NotFound(what="store", path=str(source))
        check_outcomes(pages)
    finally:
        os.close(fd)


def _make_temp_beside(target: Path) -> Path:
    """Create a temporary directory on the target's file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))


def _extend_to_full_length(backend: LmdbBackend, path: Path) -> None:
    """Extend the copy to its full length: LMDB does not write unused pages at the end.

    `restore_backup` can then detect a truncated backup by its length.
    """
    full_bytes = (backend.env.info()["last_pgno"] + 1) * backend.env.stat()["psize"]
    if path.stat().st_size < full_bytes:
        os.truncate(path, full_bytes)


def _read_generation(path: Path) -> int:
    """The generation of the store to be replaced, 0 if there is none or it is unreadable."""
    if not (path / "data.mdb").exists():
        return 0
    try:
        with RedoRecovery(path).open_view() as view:
            meta = None if view is None else read_meta_row(view)
        return 0 if meta is None else meta.generation
    except HoldfastError:
        return 0


def _start_new_generation(path: Path, *, former: int) -> int:
    backend = LmdbBackend(path, readonly=False)
    try:
        txn = backend.begin()
        try:
            meta = read_meta_row(txn)
            assert meta is not None, "the copy has changed under its restore"
            outcomes = txn.scan(schema.OUTCOME, tuples.prefix_end(schema.OUTCOME), None, False)
            for key, _ in outcomes:
                txn.delete(key)
            generation = max(meta.generation + 1, former + 1, SYSTEM.wall_ns() // MS)
            floor_ns = max([meta.floor_ns, *(codec.unpack(value)[2] for _, value in outcomes)])
            # The clock anchor is valid only for the boot of the backup.
            new_meta = schema.StoreMeta(meta.store_id, generation, "", 0, floor_ns)
            txn.put_many([(schema.META_KEY, codec.pack(new_meta))])
        except BaseException:
            txn.abort()
            raise
        txn.commit()
        return generation
    finally:
        backend.close()


def _fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
