"""The size of a store, and the space that it has left."""

from __future__ import annotations

import shutil
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

from holdfast import codec
from holdfast.config import MAP_BYTES, OUTCOMES_KEPT
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.urls import scheme_of


class StoreSize(NamedTuple):
    commit_no: int
    bytes: int
    disk_bytes: int


class StoreSpace(NamedTuple):
    """The limits of an embedded store."""

    limit_bytes: int
    disk_bytes: int
    disk_free_bytes: int


def store_size(store: Store) -> StoreSize:
    if (directory := _directory(store)) is not None:
        file = (directory / "data.mdb").stat()
        return StoreSize(store.read(last_commit_no), file.st_size, file.st_blocks * 512)
    if scheme_of(store.url) != "postgresql":
        return StoreSize(store.read(last_commit_no), 0, 0)
    from holdfast.store.postgres.store import PostgresStore

    assert isinstance(store, PostgresStore)
    commit_no, bytes = store.size()
    return StoreSize(commit_no, bytes, bytes)


def store_space(store: Store) -> StoreSpace | None:
    """Return the limits of an embedded store. None: another process knows the disk."""
    if (directory := _directory(store)) is None:
        return None
    disk = shutil.disk_usage(directory)
    return StoreSpace(MAP_BYTES, disk.total, disk.free)


def _directory(store: Store) -> Path | None:
    url = store.url
    return Path(url.removeprefix("lmdb:")) if scheme_of(url) == "lmdb" else None


def last_commit_no(txn: Txn) -> int:
    """Return the number of the last commit: the last slot of the outcome ring that continues slot 0."""

    def commit_in(slot: int) -> int:
        row = txn.get(schema.OUTCOME + tuples.pack_int(slot))
        return -1 if row is None else int(codec.unpack(row)[0])

    first = max(commit_in(0), 0)
    continued = bisect_left(
        range(1, OUTCOMES_KEPT), True, key=lambda slot: commit_in(slot) != first + slot
    )
    return first + continued
