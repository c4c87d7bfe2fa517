"""Deduplication by idempotency key: a repeated call gets the result of the first.

- A record stores the hash of the body. The same key with another body is `KeyConflict`, never a silent
  drop.
- Records expire by time, oldest first, and the scope's floor rises to the time of the last expired one.
  The floor makes expiry safe. A system key carries its time of issue. If that is below the floor, its
  record may have expired, so the key is refused as `KeyExpired`. A user's key carries no time and counts
  as new after expiry.

An expired system key is therefore never accepted as new, whatever retention each `expire` call used.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.validation import check_limit, check_name, check_time
from holdfast.errors import Invalid, KeyConflict, KeyExpired
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.prefix_scan import iter_names

_REQUESTS = "/api"


class DedupeRecord(Record, frozen=True):
    body_hash: bytes
    value: bytes
    time_ns: int


def check(
    txn: Txn, scope: str, key: str, body_hash: bytes, *, issued_ns: int | None = None
) -> bytes | None:
    """Return the value of the first use, or None when the key is new."""
    check_time("issued_ns", issued_ns or 0)
    record = lookup(txn, scope, key)
    if record is not None:
        if record.body_hash != body_hash:
            raise KeyConflict(scope=scope, key=key)
        return record.value
    if issued_ns is not None:
        floor_ns = txn.count(_keys(scope).floor)
        if issued_ns < floor_ns:
            raise KeyExpired(scope=scope, key=key, issued_ns=issued_ns, floor_ns=floor_ns)
    return None


def remember(
    txn: Txn, scope: str, key: str, body_hash: bytes, value: bytes, *, issued_ns: int | None = None
) -> None:
    """Record the first use of a key. A repeat changes nothing."""
    keys = _keys(scope)
    if check(txn, scope, key, body_hash, issued_ns=issued_ns) is not None:
        return
    time_ns = txn.now_ns if issued_ns is None else issued_ns
    packed = tuples.pack((key,))
    txn.put(keys.records + packed, codec.pack(DedupeRecord(body_hash, value, time_ns)))
    txn.put(keys.times + tuples.pack_int(time_ns) + packed, packed)


def lookup(txn: Txn, scope: str, key: str) -> DedupeRecord | None:
    if not key:
        raise Invalid(what="key", why="empty", scope=scope)
    row = txn.get(_keys(scope).records + tuples.pack((key,)))
    return None if row is None else codec.unpack_as(DedupeRecord, row)


@operation("dedupe.expire")
def expire(txn: Txn, scope: str, older_than_ns: int, limit: int) -> int:
    """Remove records whose key was issued or first used longer ago than this, oldest first. Return their number."""
    keys = _keys(scope)
    check_time("older_than_ns", older_than_ns)
    check_limit(limit)
    until_ns = txn.now_ns - older_than_ns
    rows = txn.scan(keys.times, keys.times + tuples.pack_int(until_ns), limit)
    for by_time, packed in rows:
        txn.delete(by_time)
        txn.delete(keys.records + packed)
    if rows and len(rows) == limit:
        # More records may be due, so the floor rises only to the last removed one.
        until_ns = _time_of_key(rows[-1][0], keys.times) + 1
    if limit and until_ns > txn.count(keys.floor):
        txn.put(keys.floor, schema.encode_int(until_ns))
    return len(rows)


def request_scope(universe: str) -> str:
    """The scope of the idempotency keys that requests to the API have."""
    return f"{universe}{_REQUESTS}"


def list_expired_scopes(txn: Txn, older_than_ns: int) -> list[str]:
    """Return the scopes of requests that have a record older than this."""
    due_ns = txn.now_ns - older_than_ns
    scopes = iter_names(txn, (int(schema.Space.DEDUPE),))
    return [
        scope
        for scope in scopes
        if scope.endswith(_REQUESTS)
        and txn.scan(_keys(scope).times, _keys(scope).times + tuples.pack_int(due_ns), 1)
    ]


def has_records(txn: Txn, scope: str) -> bool:
    prefix = _keys(scope).times
    return bool(txn.scan(prefix, tuples.prefix_end(prefix), 1))


def erase(txn: Txn, scope: str, key_prefix: str, limit: int) -> int:
    """Remove records by key prefix, at any age, after their subject was deleted. Return their number."""
    check_limit(limit)
    keys = _keys(scope)
    # Without the terminator byte of a packed text, the key matches as a prefix.
    lo = keys.records + tuples.pack((key_prefix,))[:-1]
    rows = txn.scan(lo, tuples.prefix_end(lo), limit)
    for key, row in rows:
        packed = key[len(keys.records) :]
        txn.delete(key)
        txn.delete(keys.times + tuples.pack_int(_decode_record(row).time_ns) + packed)
    return len(rows)


# -- inside --------------------------------------------------------------------------------------


class _DedupeKeys:
    __slots__ = ("floor", "records", "times")

    def __init__(self, scope: str) -> None:
        check_name("scope", scope)
        self.records = schema.key_prefix(schema.Space.DEDUPE, scope, "k")
        self.times = schema.key_prefix(schema.Space.DEDUPE, scope, "t")
        self.floor = schema.key_prefix(schema.Space.DEDUPE, scope, "floor")


_keys = lru_cache(maxsize=4096)(_DedupeKeys)
_decode_record = codec.decoder(DedupeRecord).decode


def _time_of_key(key: bytes, prefix: bytes) -> int:
    time_ns = tuples.unpack(key[len(prefix) :])[0]
    assert isinstance(time_ns, int)
    return time_ns
