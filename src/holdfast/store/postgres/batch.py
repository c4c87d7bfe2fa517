"""The transactions of one group commit, applied in order to the latest rows, each atomically.

Each cache miss costs a round trip. When a transaction of a batch misses a row, the batch also dry-runs the
following transactions to collect their misses, and then fetches all missing rows in one round trip.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from holdfast.errors import HoldfastError, to_wire
from holdfast.store.engine import invalid_transaction
from holdfast.store.postgres.local_state import LocalState
from holdfast.store.postgres.rows import CacheMiss, CommitReads, PgTxn, ScanRange
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.store.validation import WriteSet, check_guards, execute

# Bounds of the dry runs after a miss: transactions, and tries per transaction.
LOOKAHEAD_MAX = 256
PREFETCH_TRIES_MAX = 3


class CommitBatch:
    def __init__(
        self, txn: PgTxn, reads: CommitReads, local_state: LocalState, now_ns: int, generation: int
    ) -> None:
        self.txn = txn
        self._reads = reads
        self._local_state = local_state
        self._now_ns = now_ns
        self._generation = generation
        self.written = WriteSet(txn.id)
        self.topics: set[str] = set()
        self.applied = 0

    @property
    def has_changes(self) -> bool:
        return bool(self.txn.writes or self.topics)

    def apply(self, requests: Sequence[CommitRequest]) -> list[CommitAnswer]:
        answers: list[CommitAnswer] = []
        # Misses per request. A request without further misses is not dry-run again.
        tries = [0] * len(requests)
        while len(answers) < len(requests):
            at = len(answers)
            request = requests[at]
            # After too many misses a request reads from the server directly.
            self._reads.raises_misses = len(requests) > 1 and tries[at] < PREFETCH_TRIES_MAX
            try:
                answers.append(self._apply(request))
            except HoldfastError as error:
                answers.append(CommitAnswer(request.no, to_wire(error)))
            except psycopg.Error:
                raise
            except Exception as error:
                # Its writes are not in the batch yet, so only this request fails.
                answers.append(CommitAnswer(request.no, to_wire(invalid_transaction(error))))
            except CacheMiss as miss:
                self._prefetch_misses(requests, at, tries, miss)
        return answers

    def add_writes(self, writes: dict[bytes, bytes | None]) -> None:
        """Add writes to the commit."""
        self.txn.update(writes)
        self.written.add(writes)

    def _apply(self, request: CommitRequest) -> CommitAnswer:
        self._local_state.check(request, self.written)
        check_guards(self.txn, request, self._now_ns, self._generation)
        apply, seqs, results = execute(self.txn, request, self._now_ns, self._generation)
        self.add_writes(apply.writes)
        self.topics.update(request.topics)
        self.topics.update(apply.topics)
        self.applied += 1
        return CommitAnswer(request.no, None, self.txn.id, seqs, results)

    def _prefetch_misses(
        self, requests: Sequence[CommitRequest], at: int, tries: list[int], first_miss: CacheMiss
    ) -> None:
        keys: dict[bytes, None] = dict.fromkeys(first_miss.keys)
        ranges: dict[ScanRange, None] = dict.fromkeys(first_miss.ranges)
        tries[at] += 1
        for following in range(at + 1, min(at + 1 + LOOKAHEAD_MAX, len(requests))):
            if tries[following] >= PREFETCH_TRIES_MAX:
                continue
            try:
                check_guards(self.txn, requests[following], self._now_ns, self._generation)
                execute(self.txn, requests[following], self._now_ns, self._generation)
            except CacheMiss as following_miss:
                tries[following] += 1
                keys.update(dict.fromkeys(following_miss.keys))
                ranges.update(dict.fromkeys(following_miss.ranges))
            except Exception:
                # Ignore errors of a dry run: earlier transactions may still change the result.
                tries[following] = PREFETCH_TRIES_MAX
            else:
                tries[following] = PREFETCH_TRIES_MAX
        self._reads.raises_misses = False
        self._reads.fetch(list(keys), list(ranges))
