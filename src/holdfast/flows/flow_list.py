"""The flow list: pages of flows by state, name and tag, newest first, and the counters of each flow name.

A filter by tag reads the index of tags, one by name that of names, one by state that of states. Of a name and a state,
the index with fewer rows is read. Without a filter the heads are read. No record of a flow is read. A page scans at most
`SCANNED_MAX` flows. It may therefore be short or empty and still have a cursor for the next page.

A universe with flows of an older version has no complete index of names until its rows are rebuilt. A filter by name
reads the states or the heads there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from holdfast import codec, failpoints
from holdfast.durable.creation_times import ANY_TIME, TimeRange, seq_range
from holdfast.durable.tags import pack_tag
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid
from holdfast.flows import name_index
from holdfast.flows.model import (
    FlowBodyRow,
    FlowCounts,
    FlowHeadRow,
    FlowId,
    FlowKeys,
    decode_body,
    decode_head,
    keys_of,
    pack_int,
)
from holdfast.flows.states import FlowState
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names, iter_rows
from holdfast.store.schema import Space

SCANNED_MAX = 1_000
# The names whose flows are searched for a key.
NAMES_MAX = 1_000
# The rows of the first and of each further read of an index.
_SCAN_FIRST, _SCAN_PAGE = 100, 500
STATE_FILTERS = tuple(state.name.lower() for state in FlowState)


class FlowRow(NamedTuple):
    seq: int
    body: FlowBodyRow
    head: FlowHeadRow

    @property
    def id(self) -> FlowId:
        return FlowId(self.body.generation, self.seq)

    @property
    def state(self) -> FlowState:
        return FlowState(self.head.state)


class FlowPage(NamedTuple):
    rows: list[FlowRow]
    # The start of the next page. Empty on the last page.
    cursor: str


class NameCounts(NamedTuple):
    """The number of flows of one name in each state."""

    name: str
    counts: FlowCounts


def list_counts(txn: Txn, universe: str) -> list[NameCounts]:
    keys = keys_of(universe)
    return [
        NameCounts(str(tuples.unpack(key)[-1]), codec.unpack_as(FlowCounts, row))
        for key, row in iter_rows(txn, keys.counts)
    ]


def list_flows(
    txn: Txn,
    universe: str,
    state: str = "",
    name: str = "",
    cursor: str = "",
    limit: int = 100,
    tag: str = "",
    times: TimeRange = ANY_TIME,
) -> FlowPage:
    """Return a page of flows by state, name, tag and time of the start, newest first. An empty filter matches every flow."""
    check_limit(limit)
    if state and state not in STATE_FILTERS:
        raise Invalid(what="state", found=state[:64], expected=list(STATE_FILTERS))
    if tag:
        check_name("tag", tag)
    keys = keys_of(universe)
    # The counters know the number of matches, so that a scan can stop at the last one.
    remaining = SCANNED_MAX + 1 if cursor else _expected_count(txn, universe, state, name)
    rows: list[FlowRow] = []
    if not limit or not remaining:
        return FlowPage([], "")
    prefix = _index_prefix(txn, keys, state, name, tag)
    end = txn.count(keys.seq_counter) + 1
    first, end = seq_range(txn, keys.bodies, end, times, _created_ns)
    before = min(_decode_cursor(cursor) or end, end)
    for scanned, seq in enumerate(_iter_seqs(txn, prefix, first, before), 1):
        if failpoints.armed:
            failpoints.hit("flows.read_listed", seq)
        row = get_flow(txn, keys, seq)
        if row is not None and _matches(row, state, name):
            rows.append(row)
            remaining -= 1
        if not remaining:
            break
        if len(rows) == limit or scanned == SCANNED_MAX:
            return FlowPage(rows, str(seq))
    return FlowPage(rows, "")


def get_flow(txn: Txn, keys: FlowKeys, seq: int) -> FlowRow | None:
    body, head = txn.get(keys.bodies + pack_int(seq)), txn.get(keys.heads + pack_int(seq))
    if body is None or head is None:
        return None
    return FlowRow(seq, decode_body(body), decode_head(head))


def find_by_key(txn: Txn, universe: str, key: str) -> list[FlowRow]:
    """Return the flows with a key, by name. At most `NAMES_MAX` names are read."""
    check_name("key", key)
    keys = keys_of(universe)
    names = iter_names(txn, (int(Space.FLOW), universe, "k"))
    packed = [txn.get(keys.keys + tuples.pack((name, key))) for name in islice(names, NAMES_MAX)]
    if next(names, None) is not None:
        raise Invalid(what="key", why=f"more than {NAMES_MAX:,} names have keys: use NAME/KEY")
    rows = [get_flow(txn, keys, tuples.unpack_last_int(seq, 0)) for seq in packed if seq]
    return [row for row in rows if row is not None]


def list_children(txn: Txn, universe: str, seq: int, limit: int) -> list[FlowRow]:
    """Return the child flows of a flow that still exist, oldest first."""
    check_limit(limit)
    keys = keys_of(universe)
    prefix = keys.children + pack_int(seq)
    seqs = [
        int(tuples.unpack(key)[-1]) for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), limit)
    ]
    rows = [get_flow(txn, keys, child) for child in seqs]
    return [row for row in rows if row is not None]


def _matches(row: FlowRow, state: str, name: str) -> bool:
    return name in ("", row.body.spec.name) and state in ("", row.state.name.lower())


def _index_prefix(txn: Txn, keys: FlowKeys, state: str, name: str, tag: str) -> bytes:
    if tag:
        return keys.tags + pack_tag(tag)
    if name and name_index.is_complete(txn, keys.universe):
        of_name = _expected_count(txn, keys.universe, "", name)
        if not state or of_name <= _expected_count(txn, keys.universe, state, ""):
            return name_index.prefix_of(keys.universe) + tuples.pack((name,))
    return keys.states + pack_int(STATE_FILTERS.index(state)) if state else keys.heads


def _created_ns(row: bytes) -> int:
    return decode_body(row).created_ns


def _iter_seqs(txn: Txn, prefix: bytes, first: int, before: int) -> Iterator[int]:
    """Yield the seqs from `first` to below `before` in the index rows under a prefix, the largest first."""
    start, end = prefix + pack_int(first), prefix + pack_int(before)
    limit = _SCAN_FIRST
    while start < end and (found := txn.scan(start, end, limit, True)):
        limit = _SCAN_PAGE
        for key, _ in found:
            seq = tuples.unpack(key)[-1]
            assert isinstance(seq, int)
            yield seq
        end = found[-1][0]


def _expected_count(txn: Txn, universe: str, state: str, name: str) -> int:
    rows = [row for row in list_counts(txn, universe) if name in ("", row.name)]
    fields = [state] if state else list(STATE_FILTERS)
    return sum(getattr(row.counts, field) for row in rows for field in fields)


def _decode_cursor(text: str) -> int:
    if text and not (text.isdecimal() and 0 < int(text) < 1 << 63):
        raise Invalid(what="cursor", found=text[:64], why="malformed cursor")
    return int(text or 0)
