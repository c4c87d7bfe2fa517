"""The task list: pages of tasks filtered by state, queue, name, tag and time.

A list has the order of its index: tasks of a tag newest first, waiting tasks by queue and priority, delayed tasks by time,
leased tasks by the end of the lease, tasks by queue, name and final state newest first (`list_index`). Further filters
apply to the tasks of that index. A page reads at most `SCANNED_MAX` tasks. It may therefore be short or empty and still
have a cursor for the next page. The creation of a task gives it its seq, so a range of time is a range of seqs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from holdfast import failpoints
from holdfast.durable.creation_times import ANY_TIME, TimeRange, seq_range
from holdfast.durable.tags import pack_tag
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.tasks import list_index
from holdfast.tasks.model import (
    WAIT_STATES,
    TaskKeys,
    decode_body,
    get_counts,
    keys_of,
    pack_int,
    pack_text,
)
from holdfast.tasks.queries import TaskRow, get_row, list_queues
from holdfast.tasks.row_ranges import (
    RangeLeaseTable,
    index_prefix_of,
    iter_range,
    load_expiry_batch,
)
from holdfast.tasks.states import TaskState

SCANNED_MAX = 1_000
# The names whose tasks are searched for a key.
NAMES_MAX = 1_000
# The rows of the first and of each further read of an index.
_SCAN_FIRST, _SCAN_PAGE = 100, 500
# The filter values: a task state, or the wait state of a waiting task.
STATE_FILTERS = ("waiting", *WAIT_STATES, "leased", "completed", "failed", "dead")


class TaskPage(NamedTuple):
    rows: list[TaskRow]
    # The start of the next page. Empty on the last page.
    cursor: str


def list_tasks(
    txn: Txn,
    universe: str,
    where: str = "",
    queue: str = "",
    name: str = "",
    cursor: str = "",
    limit: int = 100,
    owned: bool = True,
    tag: str = "",
    times: TimeRange = ANY_TIME,
) -> TaskPage:
    """Return a page of tasks by state, queue, name, tag and time. An empty filter matches every task. Without `owned`,
    tasks that another layer submitted for itself are left out: the activations of flows."""
    check_limit(limit)
    if where and where not in STATE_FILTERS:
        raise Invalid(what="state", found=where[:64], expected=list(STATE_FILTERS))
    for what, text in (("queue", queue), ("tag", tag)):
        if text:
            check_name(what, text)
    keys = keys_of(universe)
    remaining = SCANNED_MAX + 1 if cursor else _expected_count(txn, keys, where, queue)
    rows: list[TaskRow] = []
    if not limit or not remaining:
        return TaskPage([], "")
    if failpoints.armed:
        failpoints.hit("tasks.list_scan", where)
    leases = RangeLeaseTable(txn, keys)
    filters = _Filters(where, queue, name, owned, tag, times)
    walk = _iter_candidates(txn, keys, filters, _decode_cursor(cursor))
    for scanned, (position, packed_seq, lease) in enumerate(walk, 1):
        row = get_row(txn, keys, packed_seq, leases)
        if row is not None and _matches(row, where, queue) and lease in (0, row.status.lease):
            remaining -= 1
            if name in ("", row.spec.name) and (owned or not row.spec.owner):
                rows.append(row)
        if not remaining:
            return TaskPage(rows, "")
        if len(rows) == limit or scanned == SCANNED_MAX:
            return TaskPage(rows, _encode_cursor(position))
    return TaskPage(rows, "")


def find_by_key(txn: Txn, universe: str, key: str, name: str = "") -> list[TaskRow]:
    """Return the tasks with an idempotency key, by name. The search of all names reads at most `NAMES_MAX` of them."""
    check_name("key", key)
    if name:
        check_name("name", name)
    keys = keys_of(universe)
    prefix = keys.idempotency_keys
    names = (name,) if name else _names_with_keys(txn, universe)
    found = (txn.get(prefix + tuples.pack((one, key))) for one in names)
    leases = RangeLeaseTable(txn, keys)
    rows = (get_row(txn, keys, packed_seq, leases) for packed_seq in found if packed_seq)
    return [row for row in rows if row is not None]


def _names_with_keys(txn: Txn, universe: str) -> Iterator[str]:
    names = iter_names(txn, (int(Space.TASK), universe, "k"))
    yield from islice(names, NAMES_MAX)
    if next(names, None) is not None:
        raise Invalid(what="key", why=f"more than {NAMES_MAX:,} names have keys: give the name too")


# -- inside --------------------------------------------------------------------------------------


class _CursorPosition(NamedTuple):
    """The position of a scan: a key and, in a row with several tasks, the last seq returned."""

    key: bytes
    seq: int


class _Filters(NamedTuple):
    where: str
    queue: str
    name: str
    owned: bool
    tag: str
    times: TimeRange


def _iter_candidates(
    txn: Txn, keys: TaskKeys, filters: _Filters, start: _CursorPosition | None
) -> Iterator[tuple[_CursorPosition, bytes, int]]:
    """Yield the candidates after a position as (position, packed seq, lease), from the index of the filters."""
    where, queue = filters.where, filters.queue
    by_pair = where in ("", "waiting", "blocked", *list_index.ENDED)
    if where == "delayed" and not filters.owned:
        by_pair = bool(queue or filters.name)
    if not filters.tag and not by_pair:
        if filters.times != ANY_TIME:
            raise Invalid(
                what="since_ns", why=f"the list of {where} tasks has no order by creation"
            )
        yield from _waiting_or_leased(txn, keys, where, queue, start)
        return
    end = txn.count(keys.seq_counter) + 1
    first, end = seq_range(txn, keys.bodies, end, filters.times, _created_ns)
    if filters.tag:
        yield from _tagged_candidates(txn, keys, filters.tag, start, first, end)
        return
    if not filters.owned:
        pairs = list_index.list_pairs(txn, keys, queue, filters.name)
        since = list_index.indexed_since(txn, keys)
        if pairs is not None and since is not None:
            yield from _indexed_candidates(txn, keys, where, pairs, start, max(since, first), end)
            end = min(end, since)
    yield from _created_candidates(txn, keys, start, first, end)


def _indexed_candidates(
    txn: Txn,
    keys: TaskKeys,
    where: str,
    pairs: list[list_index.Pair],
    start: _CursorPosition | None,
    first: int,
    end: int,
) -> Iterator[tuple[_CursorPosition, bytes, int]]:
    """Yield the tasks of these queues and names, newest first."""
    before = end
    if start is not None:
        before = min(end, _seq_in(keys.bodies, start))
    for seq in list_index.iter_seqs(txn, keys, pairs, where, before, first):
        packed_seq = pack_int(seq)
        yield _CursorPosition(keys.bodies + packed_seq, 0), packed_seq, 0


def _created_candidates(
    txn: Txn, keys: TaskKeys, start: _CursorPosition | None, first: int, end: int
) -> Iterator[tuple[_CursorPosition, bytes, int]]:
    """Yield the tasks of a range of seqs, newest first."""
    space = keys.bodies
    for key, _ in _scan_rows(
        txn, space, start, newest_first=True, bounds=(pack_int(first), pack_int(end))
    ):
        yield _CursorPosition(key, 0), key[len(space) :], 0


def _waiting_or_leased(
    txn: Txn, keys: TaskKeys, where: str, queue: str, start: _CursorPosition | None
) -> Iterator[tuple[_CursorPosition, bytes, int]]:
    """Yield the candidates of the index of a wait state or of the leases.

    The lease is 0 if the index does not hold it. The caller skips a lease that is no longer
    current.
    """
    indexes = {
        "suspect": keys.quarantined,
        "parked": keys.throttled,
        "stray": keys.unroutable,
    }
    if where == "ready":
        yield from _ready_candidates(txn, keys, queue, start)
    elif where in indexes:
        space = indexes[where] + (pack_text(queue) if queue else b"")
        for key, packed_seq in _scan_rows(txn, space, start):
            yield _CursorPosition(key, 0), packed_seq, 0
    elif where == "delayed":
        for key, _ in _scan_rows(txn, keys.delayed, start):
            yield _CursorPosition(key, 0), _packed_seq_in(key, len(keys.delayed)), 0
    else:
        # The last page may have ended inside a row: read that row again.
        for key, row in _scan_rows(txn, keys.expiries, start, include_start=True):
            batch, seqs = load_expiry_batch(txn, keys, key, row)
            done = start.seq if start is not None and start.key == key else 0
            for seq in seqs:
                if seq > done:
                    yield _CursorPosition(key, seq), pack_int(seq), batch.lease


def _tagged_candidates(
    txn: Txn, keys: TaskKeys, tag: str, start: _CursorPosition | None, first: int, end: int
) -> Iterator[tuple[_CursorPosition, bytes, int]]:
    """Yield the tasks of a tag, newest first."""
    space = keys.tags + pack_tag(tag)
    for key, _ in _scan_rows(
        txn, space, start, newest_first=True, bounds=(pack_int(first), pack_int(end))
    ):
        yield _CursorPosition(key, 0), key[len(space) :], 0


def _ready_candidates(
    txn: Txn, keys: TaskKeys, queue: str, start: _CursorPosition | None
) -> Iterator[tuple[_CursorPosition, bytes, int]]:
    """Yield the ready tasks: those without a limit key, then those with one."""
    of_queue = pack_text(queue) if queue else b""
    fair = keys.fair + of_queue
    if start is None or not start.key.startswith(fair):
        for key, row in _range_rows(txn, keys.ready + of_queue, start):
            for index_key, seq in iter_range(index_prefix_of(key, row), row):
                if start is None or index_key > start.key:
                    yield _CursorPosition(index_key, 0), pack_int(seq), 0
        start = None
    for key, packed_seq in _scan_rows(txn, fair, start):
        yield _CursorPosition(key, 0), packed_seq, 0


def _range_rows(
    txn: Txn, space: bytes, start: _CursorPosition | None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield rows of a queue index, starting with the row whose range may contain the start
    position.
    """
    rows = _scan_rows(txn, space, start)
    if start is not None and space <= start.key < tuples.prefix_end(space):
        yield from txn.scan(space, start.key + b"\x00", 1, True)
    yield from rows


def _scan_rows(
    txn: Txn,
    space: bytes,
    start: _CursorPosition | None,
    *,
    newest_first: bool = False,
    include_start: bool = False,
    bounds: tuple[bytes, bytes] | None = None,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of a space after a position. `bounds`: only keys from the first to before the second."""
    lo, hi = space, tuples.prefix_end(space)
    low, high = (lo, hi) if bounds is None else (space + bounds[0], space + bounds[1])
    if start is not None:
        if not lo <= start.key < hi or start.seq < 0:
            raise Invalid(what="cursor", why="the cursor belongs to another list")
        first = start.key if include_start else start.key + b"\x00"
        lo, hi = (lo, start.key) if newest_first else (first, hi)
    lo, hi = max(lo, low), min(hi, high)
    limit = _SCAN_FIRST
    while lo < hi and (rows := txn.scan(lo, hi, limit, newest_first)):
        limit = _SCAN_PAGE
        yield from rows
        last = rows[-1][0]
        lo, hi = (lo, last) if newest_first else (last + b"\x00", hi)


def _matches(row: TaskRow, where: str, queue: str) -> bool:
    return queue in ("", row.spec.queue) and (
        where in ("", row.where) or (where == "waiting" and row.state is TaskState.WAITING)
    )


def _expected_count(txn: Txn, keys: TaskKeys, where: str, queue: str) -> int:
    """Return the number of matches by the counters, so that a scan can stop at the last match."""
    if not where:
        return SCANNED_MAX + 1
    names = [queue] if queue else [row.queue for row in list_queues(txn, keys.universe)]
    return sum(getattr(get_counts(txn, keys, name), where) for name in names)


def _seq_in(space: bytes, position: _CursorPosition) -> int:
    """Return the seq of a position in the list of all tasks."""
    key = position.key
    if not key.startswith(space) or position.seq < 0:
        raise Invalid(what="cursor", why="the cursor belongs to another list")
    seq = tuples.unpack(key[len(space) :])
    if len(seq) != 1 or not isinstance(seq[0], int):
        raise Invalid(what="cursor", why="malformed cursor")
    return seq[0]


def _created_ns(row: bytes) -> int:
    return decode_body(row).created_ns


def _packed_seq_in(key: bytes, prefix_len: int) -> bytes:
    return pack_int(int(tuples.unpack(key[prefix_len:])[-1]))


def _encode_cursor(position: _CursorPosition) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(position)).decode().rstrip("=")


def _decode_cursor(text: str) -> _CursorPosition | None:
    if not text:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.msgpack.decode(raw, type=_CursorPosition)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise Invalid(what="cursor", found=text[:64], why="malformed cursor") from None
