"""A store in a database that was set back to an earlier time: it becomes a new generation.

PostgreSQL is backed up and restored by its own tools, which know nothing of leases. Whatever was granted
between the backup and its restore may still be held by somebody; after `renew` it is refused, as it is
after a `holdfast restore` of an embedded store.

Commit numbers leap. A process that outlived the restore knows commits that never happened here; with
numbers far above any of them it cannot mistake what it remembers for what there is.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from holdfast.clock import MS, SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.store import places, schema, urls
from holdfast.store.engine import guard_schema
from holdfast.store.places import Last

# More commits than are ever lost by a restore, and few enough for millions of restores.
LEAP = 10**12
# Sessions of processes that have just ended leave within moments.
PATIENCE_S = 3.0


class Renewed(NamedTuple):
    url: str
    before: int
    generation: int
    commit_no: int


def renew(url: str) -> Renewed:
    """Make it a new generation. Nobody may have it open: StoreBusy says who does."""
    if urls.scheme_of(url) == "lmdb":
        raise Invalid(
            what="store", why="`holdfast restore` makes an embedded store a new generation"
        )
    with closing(places.source(url, patience_s=PATIENCE_S)) as place:
        marker = place.marker()
        guard_schema(marker, (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR), bootstrap=False)
        meta = place.meta()
        if marker is None or meta is None:
            raise NotFound(what="store", url=place.url)
        last = place.last()
        generation = max(meta.generation + 1, SYSTEM.wall_ns() // MS)
        now = Last(last.commit_no + LEAP, max(last.at_ns, meta.floor_ns))
        renewed = schema.Meta(meta.store_id, generation, meta.boot_id, meta.offset_ns, now.at_ns)
        place.settle(marker, renewed, now)
        return Renewed(place.url, meta.generation, generation, now.commit_no)
