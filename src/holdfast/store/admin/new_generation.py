"""A new generation for a store whose PostgreSQL database was restored to an earlier time.

The backup tools of PostgreSQL know nothing of leases. A process may still hold a lease granted between the
backup and the restore. After `start_new_generation` such a lease is fenced, as after `holdfast restore` of an
embedded store.

The commit number leaps. A process that outlived the restore remembers commits that the restore removed. New
numbers far above them keep its local state from matching the restored store.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from holdfast.clock import MS, SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.store import schema, urls
from holdfast.store.admin import raw_access
from holdfast.store.admin.raw_access import LastCommit
from holdfast.store.engine import check_schema

# More commits than any restore loses, and few enough for millions of restores.
COMMIT_NO_LEAP = 10**12
# Server sessions of exited processes end within this time.
LOCK_WAIT_S = 3.0


class GenerationStarted(NamedTuple):
    url: str
    former: int
    generation: int
    commit_no: int


def start_new_generation(url: str) -> GenerationStarted:
    """Start a new generation. No process may have the store open: StoreBusy lists the sessions."""
    if urls.scheme_of(url) == "lmdb":
        raise Invalid(
            what="store",
            why="use `holdfast restore` to start a new generation of an embedded store",
        )
    with closing(raw_access.open_source(url, lock_wait_s=LOCK_WAIT_S)) as raw_store:
        marker = raw_store.marker()
        # An older marker stays as it is: the next open for writing raises it.
        check_schema(marker, schema.SCHEMA_VERSION, bootstrap=False, allow_upgrade=True)
        meta = raw_store.meta()
        if marker is None or meta is None:
            raise NotFound(what="store", url=raw_store.url)
        last = raw_store.last_commit()
        generation = max(meta.generation + 1, SYSTEM.wall_ns() // MS)
        first_commit = LastCommit(last.commit_no + COMMIT_NO_LEAP, max(last.at_ns, meta.floor_ns))
        new_meta = schema.StoreMeta(
            meta.store_id, generation, meta.boot_id, meta.offset_ns, first_commit.at_ns
        )
        raw_store.finish(marker, new_meta, first_commit)
        return GenerationStarted(raw_store.url, meta.generation, generation, first_commit.commit_no)
