"""Lists of tasks, a page at a time, by where they are, their queue and their name.

They go by an index where there is one, in its order: what waits, by queue and priority; what is delayed,
by time; what is leased, by the end of the lease. Whatever else is asked for is found by walking over
tasks, newest first. A page looks at `LOOKED_MAX` tasks and no more: it may be short, or empty, and still
have a cursor from which to go on.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks.look import TaskRow, queues, row_of
from holdfast.tasks.rows import PLACES, Keys, counts_of, keys_of, pack_int, packed_text
from holdfast.tasks.runs import Leases, batch_of, lane_of, members
from holdfast.tasks.states import State

LOOKED_MAX = 20_000
_PAGE = 500
# What tasks may be asked for by: a state, or, of those that wait, the place where they do.
WHERE = ("waiting", *PLACES, "leased", "completed", "failed", "dead")


class Page(NamedTuple):
    rows: list[TaskRow]
    # Where to go on; empty at the end.
    cursor: str


def page(
    txn: Txn,
    universe: str,
    where: str = "",
    queue: str = "",
    name: str = "",
    cursor: str = "",
    limit: int = 100,
) -> Page:
    """Tasks by where they are, their queue and their name; empty conditions hold for all."""
    check_limit(limit)
    if where and where not in WHERE:
        raise Invalid(what="state", found=where[:64], expected=list(WHERE))
    if queue:
        check_name("queue", queue)
    keys = keys_of(universe)
    left = LOOKED_MAX + 1 if cursor else _wanted(txn, keys, where, queue)
    rows: list[TaskRow] = []
    if not limit or not left:
        return Page([], "")
    leases = Leases(txn, keys)
    walk = _walk(txn, keys, where, queue, _read_cursor(cursor))
    for looked, (at, packed_seq, lease) in enumerate(walk, 1):
        row = row_of(txn, keys, packed_seq, leases)
        if row is not None and _fits(row, where, queue) and lease in (0, row.status.lease):
            left -= 1
            if name in ("", row.spec.name):
                rows.append(row)
        if not left:
            return Page(rows, "")
        if len(rows) == limit or looked == LOOKED_MAX:
            return Page(rows, _cursor_text(at))
    return Page(rows, "")


# -- inside --------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a walk is: a key, and, in a row that holds several tasks, the seq it has come to."""

    key: bytes
    seq: int


def _walk(
    txn: Txn, keys: Keys, where: str, queue: str, start: _Place | None
) -> Iterator[tuple[_Place, bytes, int]]:
    """The tasks that are worth a look, after a place: the place of each, its seq, and its lease if the
    index knows: of those that have been leased again meanwhile, only the last one counts."""
    indexes = {
        "suspect": keys.suspects,
        "parked": keys.parked,
        "stray": keys.strays,
    }
    if where == "ready":
        space = keys.ready + (packed_text(queue) if queue else b"")
        for key, row in _run_rows(txn, space, start):
            for own, seq in members(lane_of(key, row), row):
                if start is None or own > start.key:
                    yield _Place(own, 0), pack_int(seq), 0
    elif where in indexes:
        space = indexes[where] + (packed_text(queue) if queue else b"")
        for key, packed_seq in _rows(txn, space, start):
            yield _Place(key, 0), packed_seq, 0
    elif where == "delayed":
        for key, _ in _rows(txn, keys.delayed, start):
            yield _Place(key, 0), _last(key, len(keys.delayed)), 0
    elif where == "leased":
        # The row that was stopped in is read again, for the rest of it.
        for key, row in _rows(txn, keys.expiries, start, again=True):
            batch, seqs = batch_of(txn, keys, key, row)
            done = start.seq if start is not None and start.key == key else 0
            for seq in seqs:
                if seq > done:
                    yield _Place(key, seq), pack_int(seq), batch.lease
    else:
        for key, _ in _rows(txn, keys.bodies, start, newest_first=True):
            yield _Place(key, 0), key[len(keys.bodies) :], 0


def _run_rows(txn: Txn, space: bytes, start: _Place | None) -> Iterator[tuple[bytes, bytes]]:
    """Rows of lanes; first of all the one that may name both a task and those after it."""
    rows = _rows(txn, space, start)
    if start is not None and space <= start.key < tuples.after(space):
        yield from txn.scan(space, start.key + b"\x00", 1, True)
    yield from rows


def _rows(
    txn: Txn,
    space: bytes,
    start: _Place | None,
    *,
    newest_first: bool = False,
    again: bool = False,
) -> Iterator[tuple[bytes, bytes]]:
    lo, hi = space, tuples.after(space)
    if start is not None:
        if not lo <= start.key < hi or start.seq < 0:
            raise Invalid(what="cursor", why="of another list")
        first = start.key if again else start.key + b"\x00"
        lo, hi = (lo, start.key) if newest_first else (first, hi)
    while rows := txn.scan(lo, hi, _PAGE, newest_first):
        yield from rows
        last = rows[-1][0]
        lo, hi = (lo, last) if newest_first else (last + b"\x00", hi)


def _fits(row: TaskRow, where: str, queue: str) -> bool:
    return queue in ("", row.spec.queue) and (
        where in ("", row.where) or (where == "waiting" and row.state is State.WAITING)
    )


def _wanted(txn: Txn, keys: Keys, where: str, queue: str) -> int:
    """How many there are to be found, so that a walk ends with the last of them."""
    if not where:
        return LOOKED_MAX + 1
    names = [queue] if queue else [row.queue for row in queues(txn, keys.universe)]
    return sum(getattr(counts_of(txn, keys, name), where) for name in names)


def _last(key: bytes, prefix_len: int) -> bytes:
    return pack_int(int(tuples.unpack(key[prefix_len:])[-1]))


def _cursor_text(at: _Place) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(at)).decode().rstrip("=")


def _read_cursor(text: str) -> _Place | None:
    if not text:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.msgpack.decode(raw, type=_Place)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise Invalid(what="cursor", found=text[:64], why="not one of ours") from None
