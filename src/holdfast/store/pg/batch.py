"""The transactions of one commit, applied in order to the latest rows, each all or nothing.

Rows that are not known cost a round trip each. So when a transaction of several comes upon one, those
behind it are tried, too, only to find out what they need; then all of it is asked for at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from holdfast.errors import HoldfastError, to_wire
from holdfast.store.applying import Written, check_guards, execute
from holdfast.store.engine import Answer, Request, broken_by
from holdfast.store.pg.known import Known
from holdfast.store.pg.rows import Miss, PgTxn, Range, Reads

# How many are tried behind one that needs something, and how often each.
TRIED_MAX = 256
TRIES_MAX = 3


class Batch:
    def __init__(
        self, txn: PgTxn, reads: Reads, known: Known, now_ns: int, generation: int
    ) -> None:
        self.txn = txn
        self._reads = reads
        self._known = known
        self._now_ns = now_ns
        self._generation = generation
        self.written = Written(txn.id)
        self.topics: set[str] = set()
        self.done = 0

    @property
    def changing(self) -> bool:
        return bool(self.txn.writes or self.topics)

    def apply(self, requests: Sequence[Request]) -> list[Answer]:
        answers: list[Answer] = []
        # How often each was tried in vain; those that need nothing are tried no more.
        tries = [0] * len(requests)
        while len(answers) < len(requests):
            at = len(answers)
            request = requests[at]
            # One that needs ever more asks for itself.
            self._reads.gathering = len(requests) > 1 and tries[at] < TRIES_MAX
            try:
                answers.append(self._apply(request))
            except HoldfastError as error:
                answers.append(Answer(request.no, to_wire(error)))
            except psycopg.Error:
                raise
            except Exception as error:
                # Nothing of it is taken over yet, so it fails alone.
                answers.append(Answer(request.no, to_wire(broken_by(error))))
            except Miss as miss:
                self._gather(requests, at, tries, miss)
        return answers

    def write(self, writes: dict[bytes, bytes | None]) -> None:
        """Beside what was asked for."""
        self.txn.update(writes)
        self.written.add(writes)

    def _apply(self, request: Request) -> Answer:
        self._known.check(request, self.written)
        check_guards(self.txn, request, self._now_ns, self._generation)
        apply, seqs, results = execute(self.txn, request, self._now_ns, self._generation)
        self.write(apply.writes)
        self.topics.update(request.topics)
        self.topics.update(apply.topics)
        self.done += 1
        return Answer(request.no, None, self.txn.id, seqs, results)

    def _gather(self, requests: Sequence[Request], at: int, tries: list[int], miss: Miss) -> None:
        keys: dict[bytes, None] = dict.fromkeys(miss.keys)
        ranges: dict[Range, None] = dict.fromkeys(miss.ranges)
        tries[at] += 1
        for behind in range(at + 1, min(at + 1 + TRIED_MAX, len(requests))):
            if tries[behind] >= TRIES_MAX:
                continue
            try:
                check_guards(self.txn, requests[behind], self._now_ns, self._generation)
                execute(self.txn, requests[behind], self._now_ns, self._generation)
            except Miss as another:
                tries[behind] += 1
                keys.update(dict.fromkeys(another.keys))
                ranges.update(dict.fromkeys(another.ranges))
            except Exception:
                # It fails when its turn comes, or it does not, after those before it.
                tries[behind] = TRIES_MAX
            else:
                tries[behind] = TRIES_MAX
        self._reads.gathering = False
        self._reads.fetch(list(keys), list(ranges))
