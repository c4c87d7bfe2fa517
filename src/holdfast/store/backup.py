"""Backups: a hot copy of the rows, and a restore that no old lease survives.

A restored store is a new *generation*: whatever was granted after the backup was taken belongs to
an older one and is refused. The generation is above that of the store it replaces, and at least the
wall clock's milliseconds, so that the same backup restored twice has two generations.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import lmdb

from holdfast import codec
from holdfast.clock import MS, SYSTEM
from holdfast.errors import HoldfastError, Invalid, NotFound, StoreCorrupt
from holdfast.store import schema, tuples
from holdfast.store.engine import guard_schema
from holdfast.store.redo import forget
from holdfast.store.rows import LmdbBackend, check_length, prepare, storage_error
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
    if not (source / "data.mdb").exists():
        raise NotFound(what="backup", path=str(source))
    prepare(target)
    lock = await_lock(target, DYING_S)
    partial = target
    try:
        partial = _beside(target)
        shutil.copyfile(source / "data.mdb", partial / "data.mdb")
        generation = _renew(partial, above=_generation_of(target))
        _sync(partial / "data.mdb")
        forget(target)
        os.replace(partial / "data.mdb", target / "data.mdb")
        (target / "lock.mdb").unlink(missing_ok=True)
        _sync(target)
        return generation
    except (lmdb.Error, OSError) as error:
        raise storage_error(error, target) from error
    finally:
        if partial != target:
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


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
        # Not for reading only: what its log has to add is added, so that the log can go.
        backend = LmdbBackend(path, readonly=False)
    except HoldfastError:
        return 0
    try:
        with closing(backend.snapshot()) as snapshot:
            found = snapshot.get(schema.META_KEY)
        return 0 if found is None else codec.unpack_as(schema.Meta, found).generation
    except HoldfastError:
        return 0
    finally:
        backend.close()


def _renew(path: Path, *, above: int) -> int:
    backend = LmdbBackend(path, readonly=False)
    try:
        if not check_length(backend):
            raise StoreCorrupt(path=str(path / "data.mdb"), why="the backup is cut off")
        txn = backend.begin()
        try:
            guard_schema(
                txn.get(schema.MARKER_KEY),
                (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR),
                bootstrap=False,
            )
            found = txn.get(schema.META_KEY)
            if found is None:
                raise NotFound(what="store", path=str(path))
            meta = codec.unpack_as(schema.Meta, found)
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
