"""What a key was used for, so that a repeat is answered with the first answer.

- A key is remembered with the hash of its body: the same key with another body is `KeyConflict`,
  never a silent drop.
- Records are collected by time, oldest first; the scope's floor rises with what was collected. It
  is what makes forgetting safe: a key that carries its time of issue (those the system makes) and
  was issued below the floor may have been used and forgotten, so it is refused as `KeyExpired`. A
  user's key carries no time and is simply new again.

So what is removed can never be mistaken for new, whatever retention each collector was given.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.bounds import check_limit, check_name, check_time
from holdfast.errors import Invalid, KeyConflict, KeyExpired
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation


class Remembered(Record, frozen=True):
    body_hash: bytes
    value: bytes
    time_ns: int


def check(
    txn: Txn, scope: str, key: str, body_hash: bytes, *, issued_ns: int | None = None
) -> bytes | None:
    """The value of the first use, or None when the key is new."""
    check_time("issued_ns", issued_ns or 0)
    found = recall(txn, scope, key)
    if found is not None:
        if found.body_hash != body_hash:
            raise KeyConflict(scope=scope, key=key)
        return found.value
    if issued_ns is not None:
        floor_ns = txn.count(_keys(scope).floor)
        if issued_ns < floor_ns:
            raise KeyExpired(scope=scope, key=key, issued_ns=issued_ns, floor_ns=floor_ns)
    return None


def remember(
    txn: Txn, scope: str, key: str, body_hash: bytes, value: bytes, *, issued_ns: int | None = None
) -> None:
    """Keep the first use of a key. Once kept, it is not replaced: a repeat changes nothing."""
    keys = _keys(scope)
    if check(txn, scope, key, body_hash, issued_ns=issued_ns) is not None:
        return
    time_ns = txn.now_ns if issued_ns is None else issued_ns
    packed = tuples.pack((key,))
    txn.put(keys.records + packed, codec.pack(Remembered(body_hash, value, time_ns)))
    txn.put(keys.times + tuples.pack_int(time_ns) + packed, packed)


def recall(txn: Txn, scope: str, key: str) -> Remembered | None:
    if not key:
        raise Invalid(what="key", why="empty", scope=scope)
    row = txn.get(_keys(scope).records + tuples.pack((key,)))
    return None if row is None else codec.unpack_as(Remembered, row)


@operation
def collect(txn: Txn, scope: str, older_than_ns: int, limit: int) -> int:
    """Forget keys issued, or first used, longer ago than this, oldest first; how many."""
    keys = _keys(scope)
    check_time("older_than_ns", older_than_ns)
    check_limit(limit)
    until_ns = txn.now_ns - older_than_ns
    rows = txn.scan(keys.times, keys.times + tuples.pack_int(until_ns), limit)
    for by_time, packed in rows:
        txn.delete(by_time)
        txn.delete(keys.records + packed)
    if rows and len(rows) == limit:
        # There may be more: the floor rises over what is gone, and no further.
        until_ns = _time_in(rows[-1][0], keys.times) + 1
    if limit and until_ns > txn.count(keys.floor):
        txn.put(keys.floor, schema.int_bytes(until_ns))
    return len(rows)


def erase(txn: Txn, scope: str, beginning: str, limit: int) -> int:
    """Forget keys that begin with a text, whatever their age; how many. Their subject is gone."""
    check_limit(limit)
    keys = _keys(scope)
    # A text in a key ends with a byte that is not part of it.
    lo = keys.records + tuples.pack((beginning,))[:-1]
    rows = txn.scan(lo, tuples.after(lo), limit)
    for key, row in rows:
        packed = key[len(keys.records) :]
        txn.delete(key)
        txn.delete(keys.times + tuples.pack_int(_decode(row).time_ns) + packed)
    return len(rows)


# -- inside --------------------------------------------------------------------------------------


class _Keys:
    __slots__ = ("floor", "records", "times")

    def __init__(self, scope: str) -> None:
        check_name("scope", scope)
        self.records = schema.prefix(schema.Space.DEDUPE, scope, "k")
        self.times = schema.prefix(schema.Space.DEDUPE, scope, "t")
        self.floor = schema.prefix(schema.Space.DEDUPE, scope, "floor")


_keys = lru_cache(maxsize=4096)(_Keys)
_decode = codec.decoder(Remembered).decode


def _time_in(key: bytes, prefix: bytes) -> int:
    time_ns = tuples.unpack(key[len(prefix) :])[0]
    assert isinstance(time_ns, int)
    return time_ns
