"""Backups: a hot copy of the rows, and a restore that no old lease survives.

A restored store is a new *generation*: whatever was granted after the backup was taken belongs to
an older one and is refused. The generation is above that of the store it replaces, and at least the
wall clock's milliseconds, so that the same backup restored twice has two generations.
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
from holdfast.store import access, schema, tuples
from holdfast.store.engine import check_outcomes, guard_schema, meta_row
from holdfast.store.pages import Pages, newest
from holdfast.store.redo import Recovery, forget
from holdfast.store.rows import LmdbBackend, prepare, storage_error
from holdfast.store.writer import await_lock

# A writer that was killed may take this long to be gone.
DYING_S = 2.0


def copy(backend: LmdbBackend, target: Path) -> None:
    """Write a consistent copy while others go on. The target appears whole or not at all."""
    if target.is_file():
        raise Invalid(what="backup", why="the target is a file", path=str(target))
    if target.exists() and any(target.iterdir()):
        raise Invalid(what="backup", why="the target is not empty", path=str(target))
    try:
        partial = _beside(target)
    except OSError as error:
        raise storage_error(error, target) from error
    try:
        backend.env.copy(str(partial))
        access.tighten(partial)
        _fill_up(backend, partial / "data.mdb")
        _sync(partial / "data.mdb")
        os.replace(partial, target)
        _sync(target.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise storage_error(error, target) from error


def restore(source: Path, target: Path) -> int:
    """Make the target a store with the backup's rows, as a new generation; returns that.

    An existing store at the target is replaced; nobody may have it open.
    """
    access.check(source.absolute(), write=False)
    if not (source / "data.mdb").exists():
        raise NotFound(what="backup", path=str(source))
    _check(source)
    prepare(target)
    lock = await_lock(target, DYING_S)
    partial = target
    try:
        partial = _beside(target)
        shutil.copyfile(source / "data.mdb", partial / "data.mdb")
        access.tighten(partial)
        generation = _renew(partial, above=_generation_of(target))
        _sync(partial / "data.mdb")
        if (target / "data.mdb").exists():
            # If this ends before the next two steps are done, the old file is whole without its log.
            _sync(target / "data.mdb")
        forget(target)
        os.replace(partial / "data.mdb", target / "data.mdb")
        (target / "lock.mdb").unlink(missing_ok=True)
        access.tighten(target)
        _sync(target)
        return generation
    except (lmdb.Error, OSError) as error:
        raise storage_error(error, target) from error
    finally:
        if partial != target:
            shutil.rmtree(partial, ignore_errors=True)
        lock.close()


def _check(source: Path) -> None:
    """Read the whole backup before anything is made of it. LMDB would follow damaged pages into SIGSEGV."""
    fd = os.open(source / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = Pages(fd, newest(fd))
        if not pages.is_whole:
            raise StoreCorrupt(path=str(source / "data.mdb"), why="the backup is cut off")
        pages.check_all()
        expected = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)
        guard_schema(pages.get(schema.MARKER_KEY), expected, bootstrap=False)
        if meta_row(pages) is None:
            raise NotFound(what="store", path=str(source))
        check_outcomes(pages)
    finally:
        os.close(fd)


def _beside(target: Path) -> Path:
    """A new directory on the file system of the target; nothing that is there is touched."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))


def _fill_up(backend: LmdbBackend, path: Path) -> None:
    """Give the copy the length its pages speak of: LMDB leaves unused ones at the end unwritten.

    So a backup that is shorter than that has been cut off, and `restore` can say so.
    """
    whole = (backend.env.info()["last_pgno"] + 1) * backend.env.stat()["psize"]
    if path.stat().st_size < whole:
        os.truncate(path, whole)


def _generation_of(path: Path) -> int:
    """The generation of the store that is about to be replaced; 0 if there is none to be read."""
    if not (path / "data.mdb").exists():
        return 0
    try:
        with Recovery(path).looking() as view:
            meta = None if view is None else meta_row(view)
        return 0 if meta is None else meta.generation
    except HoldfastError:
        return 0


def _renew(path: Path, *, above: int) -> int:
    backend = LmdbBackend(path, readonly=False)
    try:
        txn = backend.begin()
        try:
            meta = meta_row(txn)
            assert meta is not None, "the copy has changed under its restore"
            outcomes = txn.scan(schema.OUTCOME, tuples.after(schema.OUTCOME), None, False)
            for key, _ in outcomes:
                txn.delete(key)
            generation = max(meta.generation + 1, above + 1, SYSTEM.wall_ns() // MS)
            floor_ns = max([meta.floor_ns, *(codec.unpack(value)[2] for _, value in outcomes)])
            # The anchor goes with the boot that the backup was taken under.
            renewed = schema.Meta(meta.store_id, generation, "", 0, floor_ns)
            txn.put_many([(schema.META_KEY, codec.pack(renewed))])
        except BaseException:
            txn.abort()
            raise
        txn.commit()
        return generation
    finally:
        backend.close()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
