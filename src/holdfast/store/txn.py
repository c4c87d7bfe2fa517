"""Transactions as write buffers over base rows.

`WriteBuffer` is the common part: gets and scans see the transaction's own writes first. `ClientTxn`
runs at the caller on a snapshot. It records its read set for validation and defers appends, counters,
lease checks and operations to the commit. `ApplyTxn` runs in the commit on the latest state and
executes them immediately.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Protocol, TypeVar

from holdfast.config import KEY_BYTES_MAX, VALUE_BYTES_MAX
from holdfast.errors import Fenced, Invalid, KeyTooLarge, ValueTooLarge
from holdfast.store import schema, tuples
from holdfast.store.api import AnyKey, Deferred, HasLeaseGuard, LeaseGuard, Operation, Row

T = TypeVar("T")

COUNT_MAX = (1 << 63) - 1


class BaseRows(Protocol):
    """The rows below a write buffer: a snapshot, or the state that a commit is applied to."""

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...


class WriteBuffer:
    # Reads of the base rows.
    _read_base: Callable[[bytes], bytes | None]
    _scan_base: Callable[[bytes, bytes, int | None, bool], list[Row]]

    def __init__(self, base: BaseRows) -> None:
        self.base = base
        self.writes: dict[bytes, bytes | None] = {}
        self.topics: set[str] = set()
        # The written keys in order, for scans. Extended lazily by the next scan.
        self._sorted_keys: list[bytes] = []
        # Only remote stores have one.
        self._prefetch: Callable[[Iterable[bytes]], None] | None = getattr(base, "prefetch", None)

    def get(self, key: AnyKey) -> bytes | None:
        if type(key) is not bytes:
            key = pack_key(key)
        if key in self.writes:
            return self.writes[key]
        return self._read_base(key)

    def prefetch(self, keys: Iterable[bytes]) -> None:
        fetch = self._prefetch
        if fetch is not None:
            writes = self.writes
            fetch([key for key in keys if key not in writes])

    def put(self, key: AnyKey, value: bytes) -> None:
        if type(key) is not bytes:
            key = pack_key(key)
        if type(value) is not bytes:
            raise Invalid(what="value", why="values are bytes", found=type(value).__name__)
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise _bad_key(key)
        if len(value) > VALUE_BYTES_MAX:
            raise ValueTooLarge(bytes=len(value), bytes_max=VALUE_BYTES_MAX, key=key[:64])
        self.writes[key] = value

    def delete(self, key: AnyKey) -> None:
        if type(key) is not bytes:
            key = pack_key(key)
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise _bad_key(key)
        self.writes[key] = None

    def scan(
        self, lo: AnyKey, hi: AnyKey, limit: int | None = None, reverse: bool = False
    ) -> list[Row]:
        if type(lo) is not bytes or type(hi) is not bytes:
            lo, hi = pack_key(lo), pack_key(hi)
        if limit is not None and limit <= 0:
            return []
        writes = self.writes
        if not writes:
            return self._scan_base(lo, hi, limit, reverse)
        if len(writes) > len(self._sorted_keys):
            # A dict keeps insertion order: the new keys are last.
            fresh = list(islice(reversed(writes), len(writes) - len(self._sorted_keys)))
            insert_sorted(self._sorted_keys, fresh)
        return merged_scan(self._scan_base, self._sorted_keys, writes, lo, hi, limit, reverse)

    def count(self, key: AnyKey) -> int:
        value = self.get(key)
        return 0 if value is None else schema.decode_int(value)

    def notify(self, topic: str) -> None:
        check_topic(topic)
        self.topics.add(topic)


class ClientTxn(WriteBuffer):
    """A transaction at the caller: it records reads and defers operations."""

    def __init__(
        self, base: BaseRows, *, snapshot: int, generation: int, now: Callable[[], int]
    ) -> None:
        super().__init__(base)
        self.snapshot = snapshot
        self.generation = generation
        self._now = now
        self.reads: set[bytes] = set()
        self.ranges: list[tuple[bytes, bytes]] = []
        self.guards: list[LeaseGuard] = []
        self.appends: list[tuple[bytes, bytes]] = []
        self.adds: dict[bytes, int] = {}
        self.calls: list[tuple[Operation[Any, Any], tuple[Any, ...]]] = []
        self.append_results: list[Deferred[Any]] = []
        self.call_results: list[Deferred[Any]] = []

    @property
    def now_ns(self) -> int:
        return self._now()

    @property
    def needs_commit(self) -> bool:
        return bool(
            self.writes or self.appends or self.adds or self.calls or self.guards or self.topics
        )

    def append(self, space: AnyKey, value: bytes) -> Deferred[int]:
        space = pack_key(space)
        if type(value) is not bytes:
            raise Invalid(what="value", why="values are bytes", found=type(value).__name__)
        if len(space) + 9 > KEY_BYTES_MAX:
            raise KeyTooLarge(bytes=len(space) + 9, bytes_max=KEY_BYTES_MAX, key=space[:64])
        if len(value) > VALUE_BYTES_MAX:
            raise ValueTooLarge(bytes=len(value), bytes_max=VALUE_BYTES_MAX, key=space[:64])
        seq: Deferred[int] = Deferred()
        self.appends.append((space, value))
        self.append_results.append(seq)
        return seq

    def add(self, key: AnyKey, n: int) -> None:
        key = pack_key(key)
        if type(n) is not int or not -COUNT_MAX <= n <= COUNT_MAX:
            raise Invalid(what="counter", why="must be a 64-bit int", found=repr(n)[:64])
        self.adds[key] = self.adds.get(key, 0) + n

    def require_live(self, lease: HasLeaseGuard) -> None:
        guard = lease.guard
        if type(guard) is not LeaseGuard:
            raise Invalid(
                what="lease",
                why="expected a lease or a claim, an object with a LeaseGuard",
                found=type(guard).__name__,
            )
        # A lost fence stays lost, so a stale holder fails before it reads further.
        if self.base.get(guard.fence_key) != guard.fence:
            raise Fenced(resource=guard.resource, why="another grant followed")
        self.guards.append(guard)

    def call(self, operation: Operation[Any, T], *args: Any) -> Deferred[T]:
        result: Deferred[T] = Deferred()
        self.calls.append((operation, args))
        self.call_results.append(result)
        return result

    def _read_base(self, key: bytes) -> bytes | None:
        self.reads.add(key)
        return self.base.get(key)

    def _scan_base(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        rows = self.base.scan(lo, hi, limit, reverse)
        if limit is not None and len(rows) >= limit:
            # Only the returned range can conflict: rows beyond the last one were not read.
            if reverse:
                lo = rows[-1][0]
            else:
                hi = rows[-1][0] + b"\x00"
        self.ranges.append((lo, hi))
        return rows


class ApplyTxn(WriteBuffer):
    """A transaction at the commit: it sees the latest state and the exact store time."""

    def __init__(self, base: BaseRows, *, now_ns: int, generation: int) -> None:
        super().__init__(base)
        self.now_ns = now_ns
        self.generation = generation
        self._read_base = base.get
        self._scan_base = base.scan

    def append(self, space: AnyKey, value: bytes) -> Deferred[int]:
        space = pack_key(space)
        seq = next_seq(self, space)
        self.put(space + tuples.pack_int(seq), value)
        result: Deferred[int] = Deferred()
        return result.resolve(seq)

    def add(self, key: AnyKey, n: int) -> None:
        self.put(key, schema.encode_int(self.count(key) + n))

    def require_live(self, lease: HasLeaseGuard) -> None:
        check_guard(self, lease.guard, self.now_ns, self.generation)

    def call(self, operation: Operation[Any, T], *args: Any) -> Deferred[T]:
        result: Deferred[T] = Deferred()
        return result.resolve(operation.by_position(self, *args))


def run_in_savepoint(txn: Any, operation: Operation[Any, Any], *args: Any) -> Exception | None:
    """Run an operation in a savepoint of another operation's commit. An error discards its writes and is returned.

    Dead-letter callbacks and joined operations use it: their failure must not abort the commit.
    """
    inner = ApplyTxn(txn, now_ns=txn.now_ns, generation=txn.generation)
    try:
        operation.by_position(inner, *args)
    except Exception as error:
        return error
    # `inner` has validated these writes.
    txn.writes.update(inner.writes)
    txn.topics.update(inner.topics)
    return None


def check_topic(topic: object) -> None:
    """Refuse a topic that cannot be encoded, before it is batched with other requests."""
    if type(topic) is not str:
        raise Invalid(what="topic", why="a topic is text", found=type(topic).__name__)
    if not topic.isascii():
        try:
            topic.encode()
        except UnicodeEncodeError:
            raise Invalid(what="topic", why="it is not UTF-8", found=ascii(topic)[:64]) from None


def checked_topics(topic: object) -> tuple[str, ...]:
    """Validate the topics of a wait and return them as a tuple."""
    topics = (topic,) if isinstance(topic, str) else topic
    if not isinstance(topics, list | tuple):
        raise Invalid(what="topic", why="not a text or a list of texts", found=repr(topic)[:64])
    for name in topics:
        check_topic(name)
    return tuple(topics)


def refuse_writes(txn: ClientTxn) -> None:
    """Raise Invalid if a read transaction has written."""
    if txn.needs_commit:
        raise Invalid(what="read", why="a read does not write; use transact")


def _bad_key(key: bytes) -> Invalid:
    if not key:
        return Invalid(what="key", why="an empty key")
    return KeyTooLarge(bytes=len(key), bytes_max=KEY_BYTES_MAX, key=key[:64])


def pack_key(key: AnyKey) -> bytes:
    if type(key) is bytes:
        return key
    if type(key) is tuple:
        return tuples.pack(key)
    raise Invalid(what="key", why="a key is bytes or a tuple", found=type(key).__name__)


def merged_scan(
    fetch: Callable[[bytes, bytes, int | None, bool], list[Row]],
    sorted_keys: list[bytes],
    writes: Mapping[bytes, bytes | None],
    lo: bytes,
    hi: bytes,
    limit: int | None,
    reverse: bool,
) -> list[Row]:
    """Scan the rows merged with uncommitted writes, whose keys are sorted.

    The cost is proportional to the returned rows plus the writes in their range.
    """
    first, end = bisect_left(sorted_keys, lo), bisect_left(sorted_keys, hi)
    if first == end:
        return fetch(lo, hi, limit, reverse)
    at, stop, step = (end - 1, first - 1, -1) if reverse else (first, end, 1)
    page = fetch(lo, hi, limit, reverse)
    more = limit is not None and len(page) == limit
    rows: list[Row] = []
    i = 0
    while limit is None or len(rows) < limit:
        if i == len(page) and more:
            last = page[-1][0]
            lo, hi = (lo, last) if reverse else (last + b"\x00", hi)
            page, i = fetch(lo, hi, limit, reverse), 0
            more = len(page) == limit
        if at == stop:
            rows += page[i:] if limit is None else page[i : i + limit - len(rows)]
            i = len(page)
            if not more:
                break
            continue
        own_key = sorted_keys[at]
        if i < len(page):
            key = page[i][0]
            if (key > own_key) if reverse else (key < own_key):
                rows.append(page[i])
                i += 1
                continue
            i += key == own_key
        value = writes[own_key]
        if value is not None:
            rows.append((own_key, value))
        at += step
    return rows


def insert_sorted(keys: list[bytes], new_keys: list[bytes]) -> None:
    """Insert new keys into sorted keys and clear the new ones."""
    if len(new_keys) > _SORT_ALL_ABOVE:
        keys += new_keys
        keys.sort()
    else:
        for key in new_keys:
            insort(keys, key)
    new_keys.clear()


# Above this many new keys a full sort is cheaper than single inserts.
_SORT_ALL_ABOVE = 64


def next_seq(txn: ApplyTxn, space: bytes) -> int:
    counter = schema.sequence_key(space)
    seq = txn.count(counter) + 1
    txn.put(counter, schema.encode_int(seq))
    return seq


def check_guard(
    base: BaseRows | WriteBuffer, guard: LeaseGuard, now_ns: int, generation: int
) -> None:
    """Check a lease guard: raise Fenced unless generation and fencing token match and the lease is live."""
    if guard.generation != generation:
        raise Fenced(
            resource=guard.resource, why="the store was restored after this lease was granted"
        )
    fence = base.get(guard.fence_key)
    if fence != guard.fence:
        raise Fenced(resource=guard.resource, why="another grant followed")
    expiry = base.get(guard.expiry_key)
    if expiry is None or now_ns >= schema.decode_int(expiry):
        raise Fenced(resource=guard.resource, why="the lease expired")
