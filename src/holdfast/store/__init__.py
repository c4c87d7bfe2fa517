"""The store: an ordered, transactional key-value store.

    holdfast.store.open("./data")              embedded, durable, shared by processes of a machine
    holdfast.store.open("lmdb:./data")         the same
    holdfast.store.open("memory:")             gone with the process
    holdfast.store.open("postgresql://...")    shared by machines

`api` says what a store offers; `schema` shows every key space.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.clock import SYSTEM, Clock
from holdfast.config import WriterLimits
from holdfast.errors import BadUrl
from holdfast.store.api import Operation, Pending, Store, Txn, operation
from holdfast.store.urls import shown, split

__all__ = ["Operation", "Pending", "Store", "Txn", "open", "operation"]


def begin(url: str) -> None:
    """Get ready for an `open` that follows: an embedded store's writer is a process, and starts meanwhile."""
    scheme, rest = split(url)
    if scheme == "lmdb":
        from holdfast.store.reach import begin_writer
        from holdfast.store.rows import prepare

        path = Path(rest).absolute()
        prepare(path)
        begin_writer(path, limits=WriterLimits())


def open(
    url: str | os.PathLike[str],
    *,
    bootstrap: bool = True,
    limits: WriterLimits | None = None,
    clock: Clock = SYSTEM,
) -> Store:
    """Open the store at a URL or directory. Without `bootstrap` it must exist already."""
    scheme, rest = split(os.fspath(url))
    if scheme == "memory":
        from holdfast.store.local import LocalStore
        from holdfast.store.memory import MemoryBackend

        return LocalStore("memory:", MemoryBackend(), clock, bootstrap=bootstrap)
    if scheme == "lmdb":
        from holdfast.store.lmdb import LmdbStore

        return LmdbStore(Path(rest), bootstrap=bootstrap, limits=limits)
    if scheme in ("postgresql", "postgres"):
        try:
            from holdfast.store.postgres import PostgresStore
        except ImportError as error:
            if error.name not in ("psycopg", "psycopg_pool"):
                raise
            why = "psycopg is not installed: pip install 'holdfast[postgres]'"
            raise BadUrl(url=shown(os.fspath(url)), why=why) from None
        return PostgresStore(os.fspath(url), bootstrap=bootstrap, clock=clock)
    raise BadUrl(url=shown(os.fspath(url)), scheme=scheme)
