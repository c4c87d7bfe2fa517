"""Where the space of a store goes, as a document for `holdfast store usage` and the HTTP API.

The figures by universe, kind and type are of the last census (`workers.space_census`), with its time. Files and pages, or
relations on PostgreSQL, are the current figures of the backend. The call reads two rows and scans nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.clock import S
from holdfast.store.api import Store, Txn
from holdfast.store.urls import scheme_of
from holdfast.workers import space_census
from holdfast.workers.space_census import CensusProgress, SpaceCensus

FILES = ("data.mdb", "redo.0", "redo.1")
RELATIONS = ("rows", "index of rows", "commit records")


class UsageFigure(msgspec.Struct, frozen=True):
    """Rows of a universe, kind and type, and the bytes of their keys and values. The universe is empty for rows of
    several universes, the type for rows without one."""

    universe: str
    kind: str
    type: str
    rows: int
    bytes: int


class UsagePart(msgspec.Struct, frozen=True):
    """A file of the store, or a relation on a PostgreSQL server, with its size now."""

    name: str
    bytes: int


class CensusDocument(msgspec.Struct, frozen=True):
    """A census: a walk over all rows. A row was counted as it was when the walk reached it. Times are store time."""

    started_ns: int
    ended_ns: int
    age_s: float
    rows: int
    bytes: int


class UsageDocument(msgspec.Struct, frozen=True):
    """Where the space of a store goes. `census` is null before the first census. `counted_rows` is the progress of the
    census that is under way, null if none is. `free_bytes` waits in an embedded store for new rows; null on PostgreSQL,
    where `dead_rows` wait for a vacuum."""

    census: CensusDocument | None
    counted_rows: int | None
    figures: list[UsageFigure]
    parts: list[UsagePart]
    rows_now: int | None
    free_bytes: int | None
    dead_rows: int | None


def read_usage(store: Store, universe: str = "") -> UsageDocument:
    """Return the figures of the last census, of one universe if it is given, and the sizes of files or relations."""
    last, under_way = store.read(_read)
    figures = () if last is None else last.figures
    parts, rows_now, free_bytes, dead_rows = _backend_figures(store)
    return UsageDocument(
        census=None if last is None else _census_document(last, store.now_ns()),
        counted_rows=None if under_way is None else sum(one.rows for one in under_way.figures),
        figures=[
            UsageFigure(one.universe, one.kind, one.type, one.rows, one.bytes)
            for one in figures
            if not universe or one.universe == universe
        ],
        parts=parts,
        rows_now=rows_now,
        free_bytes=free_bytes,
        dead_rows=dead_rows,
    )


def _read(txn: Txn) -> tuple[SpaceCensus | None, CensusProgress | None]:
    return space_census.last_census(txn), space_census.progress(txn)


def _census_document(census: SpaceCensus, now_ns: int) -> CensusDocument:
    return CensusDocument(
        started_ns=census.started_ns,
        ended_ns=census.ended_ns,
        age_s=round(max(now_ns - census.ended_ns, 0) / S, 3),
        rows=sum(one.rows for one in census.figures),
        bytes=sum(one.bytes for one in census.figures),
    )


def _backend_figures(store: Store) -> tuple[list[UsagePart], int | None, int | None, int | None]:
    scheme = scheme_of(store.url)
    if scheme == "postgresql":
        from holdfast.store.postgres.store import PostgresStore

        assert isinstance(store, PostgresStore)
        *sizes, live, dead = store.relation_usage()
        parts = [UsagePart(name, size) for name, size in zip(RELATIONS, sizes, strict=True)]
        return parts, live, None, dead
    from holdfast.store.lmdb.store import LmdbStore

    if not isinstance(store, LmdbStore):
        return [], None, None, None
    directory = Path(store.url.removeprefix("lmdb:"))
    files = [directory / name for name in FILES]
    pages = store.page_usage()
    parts = [UsagePart(file.name, file.stat().st_size) for file in files if file.exists()]
    return parts, pages.rows, pages.free_bytes, None
