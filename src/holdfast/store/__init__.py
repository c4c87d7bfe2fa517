"""The store: an ordered, transactional key-value store.

    holdfast.store.open("./data")              embedded, durable, shared by processes of a machine
    holdfast.store.open("lmdb:./data")         the same
    holdfast.store.open("memory:")             not durable, ends with the process
    holdfast.store.open("postgresql://...")    shared by machines

`api` defines the interface of a store. `schema` lists every key space.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.clock import SYSTEM, Clock
from holdfast.config import WriterLimits
from holdfast.errors import BadUrl
from holdfast.store.api import Deferred, Operation, Store, Txn, operation
from holdfast.store.urls import redact, split_scheme

__all__ = ["Deferred", "Operation", "Store", "Txn", "open", "operation"]


def prestart(url: str) -> None:
    """Start the writer process of an embedded store ahead of the `open` that follows."""
    scheme, rest = split_scheme(url)
    if scheme == "lmdb":
        from holdfast.store.lmdb.backend import prepare_directory
        from holdfast.store.lmdb.writer_process import prestart_writer

        path = Path(rest).absolute()
        prepare_directory(path)
        prestart_writer(path, limits=WriterLimits())


def open(
    url: str | os.PathLike[str],
    *,
    bootstrap: bool = True,
    limits: WriterLimits | None = None,
    clock: Clock = SYSTEM,
) -> Store:
    """Open the store at a URL or directory. Without `bootstrap` the store must already exist."""
    scheme, rest = split_scheme(os.fspath(url))
    if scheme == "memory":
        from holdfast.store.in_process import InProcessStore
        from holdfast.store.memory_backend import MemoryBackend

        return InProcessStore("memory:", MemoryBackend(), clock, bootstrap=bootstrap)
    if scheme == "lmdb":
        from holdfast.store.lmdb.store import LmdbStore

        return LmdbStore(Path(rest), bootstrap=bootstrap, limits=limits)
    if scheme in ("postgresql", "postgres"):
        try:
            from holdfast.store.postgres.store import PostgresStore
        except ImportError as error:
            if error.name not in ("psycopg", "psycopg_pool"):
                raise
            why = "psycopg is not installed: pip install 'holdfast[postgres]'"
            raise BadUrl(url=redact(os.fspath(url)), why=why) from None
        return PostgresStore(os.fspath(url), bootstrap=bootstrap, clock=clock)
    raise BadUrl(url=redact(os.fspath(url)), scheme=scheme)
