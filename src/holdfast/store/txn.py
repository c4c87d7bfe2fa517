"""Transactions as buffers over a base: what a function read, and what it wants written.

`Overlay` is the common part: reads see the transaction's own writes first, in gets and in scans.
`ClientTxn` runs at the caller on a snapshot; it records what it read, so that the commit can be
validated, and leaves appends, counters, liveness and operations to the commit. `ApplyTxn` runs at
the commit itself, on the latest state, and does those at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Protocol, TypeVar

from holdfast.config import KEY_BYTES_MAX, VALUE_BYTES_MAX
from holdfast.errors import Fenced, Invalid, KeyTooLarge, ValueTooLarge
from holdfast.store import schema, tuples
from holdfast.store.api import AnyKey, Guard, Guarded, Operation, Pending, Row

T = TypeVar("T")

COUNT_MAX = (1 << 63) - 1


class Base(Protocol):
    """Rows to read from: a snapshot, or the state that a commit is applied to."""

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...


class Overlay:
    # Where it reads what it has not written.
    _fetch: Callable[[bytes], bytes | None]
    _range: Callable[[bytes, bytes, int | None, bool], list[Row]]

    def __init__(self, base: Base) -> None:
        self.base = base
        self.writes: dict[bytes, bytes | None] = {}
        self.topics: set[str] = set()
        # Their keys in order, for scans: as many as were looked at by the last one.
        self._ordered: list[bytes] = []
        # Only what is behind a network has one.
        self._prefetch: Callable[[Iterable[bytes]], None] | None = getattr(base, "prefetch", None)

    def get(self, key: AnyKey) -> bytes | None:
        if type(key) is not bytes:
            key = packed(key)
        if key in self.writes:
            return self.writes[key]
        return self._fetch(key)

    def prefetch(self, keys: Iterable[bytes]) -> None:
        fetch = self._prefetch
        if fetch is not None:
            writes = self.writes
            fetch([key for key in keys if key not in writes])

    def put(self, key: AnyKey, value: bytes) -> None:
        if type(key) is not bytes:
            key = packed(key)
        if type(value) is not bytes:
            raise Invalid(what="value", why="values are bytes", found=type(value).__name__)
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise _bad_key(key)
        if len(value) > VALUE_BYTES_MAX:
            raise ValueTooLarge(bytes=len(value), bytes_max=VALUE_BYTES_MAX, key=key[:64])
        self.writes[key] = value

    def delete(self, key: AnyKey) -> None:
        if type(key) is not bytes:
            key = packed(key)
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise _bad_key(key)
        self.writes[key] = None

    def scan(
        self, lo: AnyKey, hi: AnyKey, limit: int | None = None, reverse: bool = False
    ) -> list[Row]:
        if type(lo) is not bytes or type(hi) is not bytes:
            lo, hi = packed(lo), packed(hi)
        if limit is not None and limit <= 0:
            return []
        writes = self.writes
        if not writes:
            return self._range(lo, hi, limit, reverse)
        if len(writes) > len(self._ordered):
            # A key stays where it was first written: the new ones are the last.
            fresh = list(islice(reversed(writes), len(writes) - len(self._ordered)))
            sort_in(self._ordered, fresh)
        return merged(self._range, self._ordered, writes, lo, hi, limit, reverse)

    def count(self, key: AnyKey) -> int:
        value = self.get(key)
        return 0 if value is None else schema.int_of(value)

    def notify(self, topic: str) -> None:
        check_topic(topic)
        self.topics.add(topic)


class ClientTxn(Overlay):
    """A transaction at the caller: reads are recorded, operations deferred."""

    def __init__(
        self, base: Base, *, snapshot: int, generation: int, now: Callable[[], int]
    ) -> None:
        super().__init__(base)
        self.snapshot = snapshot
        self.generation = generation
        self._now = now
        self.reads: set[bytes] = set()
        self.ranges: list[tuple[bytes, bytes]] = []
        self.guards: list[Guard] = []
        self.appends: list[tuple[bytes, bytes]] = []
        self.adds: dict[bytes, int] = {}
        self.calls: list[tuple[Operation[Any, Any], tuple[Any, ...]]] = []
        self.slots: list[Pending[Any]] = []
        self.results: list[Pending[Any]] = []

    @property
    def now_ns(self) -> int:
        return self._now()

    @property
    def writing(self) -> bool:
        return bool(
            self.writes or self.appends or self.adds or self.calls or self.guards or self.topics
        )

    def append(self, space: AnyKey, value: bytes) -> Pending[int]:
        space = packed(space)
        if type(value) is not bytes:
            raise Invalid(what="value", why="values are bytes", found=type(value).__name__)
        if len(space) + 9 > KEY_BYTES_MAX:
            raise KeyTooLarge(bytes=len(space) + 9, bytes_max=KEY_BYTES_MAX, key=space[:64])
        if len(value) > VALUE_BYTES_MAX:
            raise ValueTooLarge(bytes=len(value), bytes_max=VALUE_BYTES_MAX, key=space[:64])
        slot: Pending[int] = Pending()
        self.appends.append((space, value))
        self.slots.append(slot)
        return slot

    def add(self, key: AnyKey, n: int) -> None:
        key = packed(key)
        if type(n) is not int or not -COUNT_MAX <= n <= COUNT_MAX:
            raise Invalid(what="counter", why="adds a 64-bit int", found=repr(n)[:64])
        self.adds[key] = self.adds.get(key, 0) + n

    def require_live(self, lease: Guarded) -> None:
        guard = lease.guard
        if type(guard) is not Guard:
            raise Invalid(what="lease", why="its guard is none", found=type(guard).__name__)
        # A fence that is lost stays lost, so a stale holder is told before it reads any further.
        if self.base.get(guard.fence_key) != guard.fence:
            raise Fenced(resource=guard.resource, why="another grant followed")
        self.guards.append(guard)

    def call(self, operation: Operation[Any, T], *args: Any) -> Pending[T]:
        result: Pending[T] = Pending()
        self.calls.append((operation, args))
        self.results.append(result)
        return result

    def _fetch(self, key: bytes) -> bytes | None:
        self.reads.add(key)
        return self.base.get(key)

    def _range(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        rows = self.base.scan(lo, hi, limit, reverse)
        if limit is not None and len(rows) >= limit:
            # Only what was seen can conflict: rows beyond the last one played no part.
            if reverse:
                lo = rows[-1][0]
            else:
                hi = rows[-1][0] + b"\x00"
        self.ranges.append((lo, hi))
        return rows


class ApplyTxn(Overlay):
    """A transaction at the commit: it sees the latest state and the exact store time."""

    def __init__(self, base: Base, *, now_ns: int, generation: int) -> None:
        super().__init__(base)
        self.now_ns = now_ns
        self.generation = generation
        self._fetch = base.get
        self._range = base.scan

    def append(self, space: AnyKey, value: bytes) -> Pending[int]:
        space = packed(space)
        seq = next_seq(self, space)
        self.put(space + tuples.pack_int(seq), value)
        slot: Pending[int] = Pending()
        return slot.fill(seq)

    def add(self, key: AnyKey, n: int) -> None:
        self.put(key, schema.int_bytes(self.count(key) + n))

    def require_live(self, lease: Guarded) -> None:
        check_guard(self, lease.guard, self.now_ns, self.generation)

    def call(self, operation: Operation[Any, T], *args: Any) -> Pending[T]:
        result: Pending[T] = Pending()
        return result.fill(operation.fn(self, *args))


def attempt(txn: Any, operation: Operation[Any, Any], *args: Any) -> Exception | None:
    """Run an operation inside another's commit; if it raises, nothing of it stays.

    For what joins a commit from outside (wills, joined operations): it must not be able to take the
    commit with it.
    """
    inner = ApplyTxn(txn, now_ns=txn.now_ns, generation=txn.generation)
    try:
        operation.fn(inner, *args)
    except Exception as error:
        return error
    # They were checked where they were written.
    txn.writes.update(inner.writes)
    txn.topics.update(inner.topics)
    return None


def check_topic(topic: object) -> None:
    """Refuse what cannot be sent to other processes, before it is joined with what others send."""
    if type(topic) is not str:
        raise Invalid(what="topic", why="a topic is text", found=type(topic).__name__)
    if not topic.isascii():
        try:
            topic.encode()
        except UnicodeEncodeError:
            raise Invalid(what="topic", why="it is not UTF-8", found=ascii(topic)[:64]) from None


def _bad_key(key: bytes) -> Invalid:
    if not key:
        return Invalid(what="key", why="a key has a byte at least")
    return KeyTooLarge(bytes=len(key), bytes_max=KEY_BYTES_MAX, key=key[:64])


def packed(key: AnyKey) -> bytes:
    if type(key) is bytes:
        return key
    if type(key) is tuple:
        return tuples.pack(key)
    raise Invalid(what="key", why="a key is bytes or a tuple", found=type(key).__name__)


def merged(
    fetch: Callable[[bytes, bytes, int | None, bool], list[Row]],
    ordered: list[bytes],
    writes: Mapping[bytes, bytes | None],
    lo: bytes,
    hi: bytes,
    limit: int | None,
    reverse: bool,
) -> list[Row]:
    """A scan of rows as if these writes, whose keys are in order, had been made.

    It costs as much as there are rows in the answer, and writes among them that hide others.
    """
    first, end = bisect_left(ordered, lo), bisect_left(ordered, hi)
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
        own = ordered[at]
        if i < len(page):
            key = page[i][0]
            if (key > own) if reverse else (key < own):
                rows.append(page[i])
                i += 1
                continue
            i += key == own
        value = writes[own]
        if value is not None:
            rows.append((own, value))
        at += step
    return rows


def sort_in(keys: list[bytes], fresh: list[bytes]) -> None:
    """Take fresh keys into those that are in order."""
    if len(fresh) > _SORT_ANEW:
        keys += fresh
        keys.sort()
    else:
        for key in fresh:
            insort(keys, key)
    fresh.clear()


# Above this many new keys it is cheaper to sort all than to insert each.
_SORT_ANEW = 64


def next_seq(txn: ApplyTxn, space: bytes) -> int:
    counter = schema.sequence_key(space)
    seq = txn.count(counter) + 1
    txn.put(counter, schema.int_bytes(seq))
    return seq


def check_guard(base: Base | Overlay, guard: Guard, now_ns: int, generation: int) -> None:
    """The fence: raise unless this holder, this epoch, and still live by store time."""
    if guard.generation != generation:
        raise Fenced(resource=guard.resource, why="the store was restored since")
    fence = base.get(guard.fence_key)
    if fence != guard.fence:
        raise Fenced(resource=guard.resource, why="another grant followed")
    expiry = base.get(guard.expiry_key)
    if expiry is None or now_ns >= schema.int_of(expiry):
        raise Fenced(resource=guard.resource, why="the lease expired")
