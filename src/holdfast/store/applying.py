"""What every commit engine does with a transaction, whatever holds the rows.

`Ring` remembers which keys the last commits wrote, and says whether a transaction has read one of them
since its snapshot. `execute` applies a request on the latest state: writes, appends, counters, operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec

from holdfast import codec
from holdfast.config import RING_COMMITS_MAX, RING_KEYS_MAX
from holdfast.errors import Conflict, Invalid
from holdfast.store.api import Guard, resolve
from holdfast.store.txn import ApplyTxn, Base, check_guard, sort_in


class Applicable(Protocol):
    """What a caller sends: see `engine.Request`."""

    reads: list[bytes]
    ranges: list[tuple[bytes, bytes]]
    snapshot: int
    guards: list[Guard]
    puts: dict[bytes, bytes]
    deletes: list[bytes]
    appends: list[tuple[bytes, bytes]]
    adds: dict[bytes, int]
    calls: list[tuple[str, msgspec.Raw]]


def check_guards(base: Base, request: Applicable, now_ns: int, generation: int) -> None:
    for guard in request.guards:
        check_guard(base, guard, now_ns, generation)


def execute(
    base: Base, request: Applicable, now_ns: int, generation: int
) -> tuple[ApplyTxn, list[int], list[msgspec.Raw]]:
    """Apply a request: what it wrote and notified, the numbers of its appends, its operations' answers."""
    apply = ApplyTxn(base, now_ns=now_ns, generation=generation)
    apply.writes.update(request.puts)
    apply.writes.update(dict.fromkeys(request.deletes))
    seqs = [apply.append(space, value).value for space, value in request.appends]
    for key, n in request.adds.items():
        apply.add(key, n)
    results = []
    for name, args in request.calls:
        called = resolve(name)
        try:
            arguments = called.decode_args(bytes(args))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Invalid(what="operation", name=name, why=str(error)) from None
        results.append(msgspec.Raw(codec.pack(called.fn(apply, *arguments))))
    return apply, seqs, results


class Ring:
    """The last commits, bounded in number and in keys."""

    def __init__(self, oldest: int) -> None:
        # Of commits up to this one it is not known what they wrote.
        self._oldest = oldest
        self._commits: deque[Written] = deque()
        self._keys = 0

    def check(self, request: Applicable, written: Written) -> None:
        """Raise Conflict if something that was read has been written since, in this commit or before."""
        reads, ranges, snapshot = request.reads, request.ranges, request.snapshot
        if not reads and not ranges:
            return
        if snapshot < self._oldest:
            raise Conflict(why="the snapshot is too old to be validated")
        if written.keys:
            written.check(reads, ranges)
        for past in reversed(self._commits):
            if past.id <= snapshot:
                break
            past.check(reads, ranges)

    def unchanged(self, keys: Iterable[bytes], since: int) -> set[bytes]:
        """Those of the keys that no commit after this one has written; none if that is not known."""
        if since < self._oldest:
            return set()
        left = set(keys)
        for past in reversed(self._commits):
            if past.id <= since or not left:
                break
            left -= past.keys
        return left

    def untouched(self, lo: bytes, hi: bytes, since: int) -> bool:
        """Whether it is known that no commit after this one has written a key of this range."""
        if since < self._oldest:
            return False
        try:
            for past in reversed(self._commits):
                if past.id <= since:
                    break
                past.check([], [(lo, hi)])
        except Conflict:
            return False
        return True

    def add(self, written: Written) -> None:
        self._commits.append(written)
        self._keys += len(written.keys)
        while len(self._commits) > RING_COMMITS_MAX or self._keys > RING_KEYS_MAX:
            if len(self._commits) == 1:
                break
            dropped = self._commits.popleft()
            self._keys -= len(dropped.keys)
            self._oldest = dropped.id

    def forget(self, id: int) -> None:
        """Nothing is known of what was written up to this commit."""
        self._commits.clear()
        self._keys = 0
        self._oldest = id


class Written:
    """The keys of one commit, to validate later readers against."""

    __slots__ = ("_fresh", "_sorted", "id", "keys", "topics")

    def __init__(self, id: int) -> None:
        self.id = id
        self.keys: set[bytes] = set()
        self.topics: set[str] = set()
        # In order, for ranges; filled when the first range is looked at.
        self._sorted: list[bytes] = []
        self._fresh: list[bytes] = []

    def add(self, keys: Iterable[bytes]) -> None:
        self.keys.update(keys)
        self._fresh.extend(keys)

    def check(self, reads: list[bytes], ranges: list[tuple[bytes, bytes]]) -> None:
        if not self.keys.isdisjoint(reads):
            raise Conflict(why="a key that was read has changed")
        for lo, hi in ranges:
            sort_in(self._sorted, self._fresh)
            at = bisect_left(self._sorted, lo)
            if at < len(self._sorted) and self._sorted[at] < hi:
                raise Conflict(why="a range that was read has changed")
