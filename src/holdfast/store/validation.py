"""Optimistic validation and execution of commit requests, common to all commit engines.

`RecentCommits` keeps the write sets of the last commits. It validates that no key or range read by a transaction
was written after its snapshot. `execute` applies a request to the latest state: writes, appends, counters,
operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec

from holdfast import codec
from holdfast.config import RECENT_COMMITS_MAX, RECENT_KEYS_MAX
from holdfast.errors import Conflict, Invalid
from holdfast.store.api import LeaseGuard, find_operation
from holdfast.store.txn import ApplyTxn, BaseRows, check_guard, insert_sorted


class ApplicableRequest(Protocol):
    """The part of a commit request that validation and execution use (see `requests.CommitRequest`)."""

    reads: list[bytes]
    ranges: list[tuple[bytes, bytes]]
    snapshot: int
    guards: list[LeaseGuard]
    puts: dict[bytes, bytes]
    deletes: list[bytes]
    appends: list[tuple[bytes, bytes]]
    adds: dict[bytes, int]
    calls: list[tuple[str, msgspec.Raw]]


def check_guards(base: BaseRows, request: ApplicableRequest, now_ns: int, generation: int) -> None:
    for guard in request.guards:
        check_guard(base, guard, now_ns, generation)


def execute(
    base: BaseRows, request: ApplicableRequest, now_ns: int, generation: int
) -> tuple[ApplyTxn, list[int], list[msgspec.Raw]]:
    """Apply a request. Return the transaction with its writes and topics, the sequence numbers of its appends and
    the results of its operations."""
    txn = ApplyTxn(base, now_ns=now_ns, generation=generation)
    txn.writes.update(request.puts)
    txn.writes.update(dict.fromkeys(request.deletes))
    seqs = [txn.append(space, value).value for space, value in request.appends]
    for key, n in request.adds.items():
        txn.add(key, n)
    results = []
    for name, args in request.calls:
        operation = find_operation(name)
        try:
            arguments = operation.decode_args(bytes(args))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Invalid(what="operation", name=name, why=str(error)) from None
        results.append(msgspec.Raw(codec.pack(operation.by_position(txn, *arguments))))
    return txn, seqs, results


class RecentCommits:
    """The write sets of the last commits, bounded in commits and in keys."""

    def __init__(self, oldest: int) -> None:
        # The write sets of commits up to this one are unknown.
        self._unknown_until = oldest
        self._commits: deque[WriteSet] = deque()
        self._key_count = 0

    def check(self, request: ApplicableRequest, current: WriteSet) -> None:
        """Raise Conflict if this commit or one since the snapshot wrote a key or range that the request read."""
        reads, ranges, snapshot = request.reads, request.ranges, request.snapshot
        if not reads and not ranges:
            return
        if snapshot < self._unknown_until:
            raise Conflict(why="the snapshot is too old to be validated")
        if current.keys:
            current.check(reads, ranges)
        for past in reversed(self._commits):
            if past.id <= snapshot:
                break
            past.check(reads, ranges)

    def unwritten_keys(self, keys: Iterable[bytes], since: int) -> set[bytes]:
        """The keys that no commit after `since` wrote. Empty if the write sets since then are unknown."""
        if since < self._unknown_until:
            return set()
        unwritten = set(keys)
        for past in reversed(self._commits):
            if past.id <= since or not unwritten:
                break
            unwritten -= past.keys
        return unwritten

    def is_range_unwritten(self, lo: bytes, hi: bytes, since: int) -> bool:
        """Whether provably no commit after `since` wrote a key of this range."""
        if since < self._unknown_until:
            return False
        try:
            for past in reversed(self._commits):
                if past.id <= since:
                    break
                past.check([], [(lo, hi)])
        except Conflict:
            return False
        return True

    def add(self, written: WriteSet) -> None:
        self._commits.append(written)
        self._key_count += len(written.keys)
        while len(self._commits) > RECENT_COMMITS_MAX or self._key_count > RECENT_KEYS_MAX:
            if len(self._commits) == 1:
                break
            dropped = self._commits.popleft()
            self._key_count -= len(dropped.keys)
            self._unknown_until = dropped.id

    def reset_to(self, id: int) -> None:
        """Drop all write sets. Those of commits up to this one are unknown."""
        self._commits.clear()
        self._key_count = 0
        self._unknown_until = id


class WriteSet:
    """The write set of one commit: its keys, used to validate reads of later transactions."""

    __slots__ = ("_sorted_keys", "_unsorted", "id", "keys", "topics")

    def __init__(self, id: int) -> None:
        self.id = id
        self.keys: set[bytes] = set()
        self.topics: set[str] = set()
        # Sorted lazily, when the first range is checked.
        self._sorted_keys: list[bytes] = []
        self._unsorted: list[bytes] = []

    def add(self, keys: Iterable[bytes]) -> None:
        self.keys.update(keys)
        self._unsorted.extend(keys)

    def check(self, reads: list[bytes], ranges: list[tuple[bytes, bytes]]) -> None:
        if not self.keys.isdisjoint(reads):
            raise Conflict(why="a key that was read has changed")
        for lo, hi in ranges:
            insert_sorted(self._sorted_keys, self._unsorted)
            at = bisect_left(self._sorted_keys, lo)
            if at < len(self._sorted_keys) and self._sorted_keys[at] < hi:
                raise Conflict(why="a range that was read has changed")
