"""The endpoint of ended work per minute, for histograms and rates."""

from __future__ import annotations

import msgspec

from holdfast.durable import ended_counts
from holdfast.durable.ended_counts import KEPT_MINUTES, KINDS, MINUTE_NS, EndedCount
from holdfast.errors import Invalid
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall, NoIndex
from holdfast.ops.api.endpoint import Endpoint, EndpointOptions, Page, PageQuery, Scope
from holdfast.store.api import Txn

RANGE_MINUTES = 60


class EndedQuery(PageQuery):
    """Minutes from `since_ns` to `until_ns`, by default the last hour, at most 24 hours. With `queue` only this queue is
    read; `kind` then is task or flow, by default task."""

    since_ns: int = 0
    until_ns: int = 0
    kind: str = ""
    queue: str = ""


class EndedDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The work of a queue that ended in the minute that begins at `minute_ns`. `queue` is null for the ends of queues
    beyond the counted ones."""

    minute_ns: int
    kind: str
    queue: str | None
    completed: int
    failed: int
    dead: int
    cancelled: int


def list_ended(call: ApiCall) -> Page[EndedDocument]:
    query: EndedQuery = call.query
    limit = cursors.page_limit(query)
    if query.kind and query.kind not in KINDS:
        raise Invalid(what="kind", found=query.kind[:64], expected=list(KINDS))
    if query.kind and not query.queue:
        raise NoIndex(what="kind", why="needs queue", indexed=["queue", "since_ns", "until_ns"])

    def read(txn: Txn) -> tuple[list[EndedCount], str | None]:
        first, last = minutes_of(query.since_ns, query.until_ns, txn.now_ns)
        if query.queue:
            start = max(first, cursors.decode(query.cursor, int) or 0)
            kind = query.kind or ended_counts.TASK
            end = min(last, start + limit - 1)
            rows = ended_counts.queue_counts(txn, call.universe, kind, query.queue, start, end)
            return rows, cursors.encode(end + 1) if end < last else None
        after = cursors.decode(query.cursor, bytes) or b""
        found = ended_counts.list_counts(txn, call.universe, first, last, after, limit + 1)
        next = cursors.encode(found[limit - 1][0]) if len(found) > limit else None
        return [count for _, count in found[:limit]], next

    rows, next = call.read(read)
    return Page(items=[ended_document(row) for row in rows], next=next)


def minutes_of(since_ns: int, until_ns: int, now_ns: int) -> tuple[int, int]:
    """Return the first and the last minute of a range. 0 is the default of each end."""
    last = (until_ns or now_ns) // MINUTE_NS
    first = since_ns // MINUTE_NS if since_ns else last - RANGE_MINUTES + 1
    if not 0 <= last - first < KEPT_MINUTES or first < 0:
        raise Invalid(what="range", found=[since_ns, until_ns], minutes_max=KEPT_MINUTES)
    return first, last


def ended_document(row: EndedCount) -> EndedDocument:
    return EndedDocument(row.minute * MINUTE_NS, row.kind, row.queue or None, *row.ended)


ENDPOINTS = (
    Endpoint("GET", "/v1/ended", Scope.READ, list_ended, Page[EndedDocument],
             "List how many tasks and flows ended per minute, by queue and outcome",
             EndpointOptions(query=EndedQuery)),
)  # fmt: skip
