"""The commit engine on PostgreSQL: group commit of this process's transactions, each of which fails alone.

Commits of all processes are serial: each has a number and holds the commit lock. A process that was lately
the only committer commits *optimistically*: it applies a batch to its local state and sends rows, record and
NOTIFY as one statement. If another process committed first, the number is taken, the statement changes
nothing, and the batch is applied again under the lock:

    lock       take the commit lock, read remote commits and the time: one round trip
    validate   no commit since the snapshot wrote a key or range that a transaction read
    apply      writes, appends, counters, operations; cache misses are fetched
    finish     send rows, record, NOTIFY and COMMIT: one round trip

The record of a commit (`holdfast_commit`) also resolves an in-doubt commit after a lost connection (see
`in_doubt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from holdfast import failpoints
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, StoreReadOnly, to_wire
from holdfast.store.engine import invalid_transaction
from holdfast.store.postgres import in_doubt as postgres_in_doubt
from holdfast.store.postgres import server
from holdfast.store.postgres.batch import CommitBatch
from holdfast.store.postgres.in_doubt import InDoubt
from holdfast.store.postgres.local_state import REMOTE_COMMITS
from holdfast.store.postgres.notifications import ALL_TOPICS, encode_payload
from holdfast.store.postgres.rows import CommitReads, PgTxn, split_by_size, written_bytes
from holdfast.store.postgres.server import PostgresUnreachable
from holdfast.store.postgres.session import SELECT_LAST, PostgresSession
from holdfast.store.postgres.statements import (
    ByteaArray,
    PostgresConnection,
    Statement,
    run_pipelined,
    run_statement,
)
from holdfast.store.requests import CommitAnswer, CommitRequest

# Bound of the keys in a commit record. A larger commit invalidates all rows.
KEYS_NAMED_MAX = 50_000
COMMITS_KEPT = 20_000
PRUNE_EVERY = 1_000
# A process commits optimistically after this many consecutive commits without a remote one.
OPTIMISTIC_AFTER = 3
# An optimistic commit carries its apply time and must reach the server within this time.
OPTIMISTIC_DEADLINE_US = 250_000
# Bound of one statement. libpq moves the whole remaining buffer after each partial send.
PART_BYTES = 8 * 1024 * 1024
# How long a commit is retried during an outage.
AWAY_S = 20.0
RETRY_PAUSE_S = 0.1

_LOCK_COMMIT = "SELECT holdfast_enter(%b::bigint)"
_APPLY = (
    "SELECT holdfast_apply(%b::bigint, %b::bigint, %b::bigint, %b, %b, %b, %b, %b, %b, %b, %b::text, "
    "%b::text, %b::bigint, %b::bigint)"
)


# Earlier parts of a large commit, and the addition of their keys to its record.
_PUT_EARLIER = """
    INSERT INTO holdfast_row (key, value) SELECT * FROM unnest(%b::bytea[], %b::bytea[])
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
_ADD_KEYS = "UPDATE holdfast_commit SET keys = %b::bytea[] || keys WHERE no = %b"


class PgEngine(PostgresSession):
    """The commit engine of one process. One caller at a time."""

    # Whether the store is closing: the engine then does not wait for an unreachable server.
    is_closing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._attempts = 0
        self._solo_commits = 0
        super().__init__(*args, **kwargs)
        self._client = self._clock.entropy(8)

    @property
    def client(self) -> bytes:
        """The id of this process in commit records."""
        return self._client

    def commit(
        self, requests: Sequence[CommitRequest], history_nos: Sequence[int] | None = None
    ) -> list[CommitAnswer]:
        """Apply a batch in one durable commit, across reconnects.

        `history_nos` has the history in which each request's snapshot number is valid.
        """
        self._refuse_replaced()
        began_ns = self._clock.mono_ns()
        in_doubt: InDoubt | None = None
        while True:
            try:
                connection = self._connect()
                if in_doubt is not None:
                    answers = self._resolve_in_doubt(connection, in_doubt)
                    if answers is not None:
                        return answers
                    in_doubt = None
                return self._try_commit(connection, requests, history_nos)
            except _BatchBroken:
                # A request broke the whole batch. Committed one by one, only that request fails.
                all_history_nos = history_nos or [self.history_no] * len(requests)
                return [
                    self._commit_alone(*one) for one in zip(requests, all_history_nos, strict=True)
                ]
            except _LostRace:
                self.counters.lost_races += 1
                self._solo_commits = 0
                continue
            except InDoubt as raised:
                in_doubt, error = raised, raised.error
            except (PostgresUnreachable, StoreReadOnly) as unreachable:
                error = unreachable
            self._disconnect()
            self.counters.retries += 1
            if self.is_closing or self.outage.is_over(began_ns, AWAY_S):
                if in_doubt is not None:
                    raise CommitUnknown(why=str(error), **self.outage.fields())
                raise self.outage.with_outage(error)
            self._clock.sleep(RETRY_PAUSE_S)

    def _commit_alone(self, request: CommitRequest, history: int) -> CommitAnswer:
        """Commit one request of a broken batch. Earlier requests are durable, so only this one can fail."""
        try:
            [answer] = self.commit([request], [history])
        except HoldfastError as error:
            answer = CommitAnswer(request.no, to_wire(error))
        return answer

    def _invalidate_reads(
        self, requests: Sequence[CommitRequest], histories: Sequence[int]
    ) -> None:
        for request, history in zip(requests, histories, strict=True):
            if history != self.history_no and (request.reads or request.ranges):
                # Its reads belong to a lost history and cannot be validated: force a conflict.
                request.snapshot = -1

    def _try_commit(
        self,
        connection: PostgresConnection,
        requests: Sequence[CommitRequest],
        histories: Sequence[int] | None,
    ) -> list[CommitAnswer]:
        optimistic = self._solo_commits >= OPTIMISTIC_AFTER
        try:
            if not optimistic:
                self._lock_and_sync(connection)
            if histories is not None:
                self._invalidate_reads(requests, histories)
            # Read first: another thread may apply remote commits meanwhile.
            commit_no = self.commit_no + 1
            now_ns = self._next_commit_ns()
            reads = CommitReads(connection, self.local_state, self.counters)
            txn = PgTxn(reads, self.local_state.cache, commit_no)
            batch = CommitBatch(txn, reads, self.local_state, now_ns, self.generation)
            answers = batch.apply(requests)
            if not (batch.has_changes or (batch.applied and self._anchor is not None)):
                # Nothing to write (in the simulator it is a commit, as in every other store). But the
                # answers must not be stale.
                self._end_without_writes(connection, commit_no - 1, optimistic)
                return answers
            batch.add_writes(self._clock_row_to_write(txn.writes))
            if optimistic and written_bytes(txn.writes) > PART_BYTES:
                # Too large to arrive before the deadline.
                raise _LostRace
            topics, fills = sorted(batch.topics), self.local_state.fills
            notification = encode_payload(self._client, commit_no, topics) if topics else ""
        except psycopg.Error as error:
            raise self._disconnect_and_translate(error) from error
        except _LostRace:
            raise
        except HoldfastError:
            self._disconnect()
            raise
        except Exception as error:
            # Rare. Closing the connection reliably ends the transaction.
            self._disconnect()
            if len(requests) > 1:
                raise _BatchBroken from error
            return [CommitAnswer(requests[0].no, to_wire(invalid_transaction(error)))]
        try:
            self._send_commit(connection, txn, now_ns, commit_no, notification, answers, optimistic)
        except Invalid as error:
            # The server refused the writes of one request, and nothing was committed.
            if len(requests) > 1:
                raise _BatchBroken from error
            raise
        self._on_clock_row_written(txn.writes)
        self.local_state.record_own_commit(batch.written, txn.writes, now_ns, fills)
        self.counters.commits += 1
        self.counters.transactions += batch.applied
        self.counters.optimistic += optimistic
        self._notify_topics(commit_no, topics)
        return answers

    def _lock_and_sync(self, connection: PostgresConnection) -> None:
        """Take the commit lock, apply remote commits and observe the server's clock."""
        position, started_ns = self.local_state.position(), self._clock.boot_ns()
        _, [(micros,)], remote_commits = run_pipelined(
            connection,
            self.counters,
            [("BEGIN", ()), (_LOCK_COMMIT, (self._lock,)), (REMOTE_COMMITS, position.parameters)],
        )
        self._solo_commits = (
            0 if len(remote_commits) > (position.no > 0) else self._solo_commits + 1
        )
        self._apply_remote_commits(connection, position, remote_commits, latest=True)
        self._observe_clock(int(micros), started_ns)

    def _end_without_writes(
        self, connection: PostgresConnection, base_no: int, optimistic: bool
    ) -> None:
        if not optimistic:
            # No ROLLBACK: it makes psycopg drop its prepared statements.
            run_pipelined(connection, self.counters, [("COMMIT", ())])
            return
        [(no, _)] = run_statement(connection, self.counters, SELECT_LAST) or [(0, 0)]
        if no != base_no:
            raise _LostRace

    def _send_commit(
        self,
        connection: PostgresConnection,
        txn: PgTxn,
        now_ns: int,
        commit_no: int,
        notification: str,
        answers: list[CommitAnswer],
        optimistic: bool,
    ) -> None:
        """Send rows and record, and commit."""
        puts = {key: value for key, value in txn.writes.items() if value is not None}
        deletes = [key for key, value in txn.writes.items() if value is None]
        timed = optimistic and self._anchor is None
        until_us = (
            (now_ns - self._store_clock.lead_ns) // 1000 + OPTIMISTIC_DEADLINE_US if timed else 0
        )
        prune_until = commit_no - COMMITS_KEPT if commit_no % PRUNE_EVERY == 0 else 0
        self._attempts += 1
        client = self._client + self._attempts.to_bytes(8, "big")
        named = len(txn.writes) <= KEYS_NAMED_MAX
        # An optimistic commit is a single statement and cannot be split.
        *earlier_parts, puts = [puts] if optimistic else split_by_size(puts, PART_BYTES)
        earlier_keys = [key for part in earlier_parts for key in part]
        naming = (
            [(_ADD_KEYS, (ByteaArray(earlier_keys), commit_no))] if named and earlier_keys else []
        )
        puts, inserts = self.local_state.split_inserts(puts)
        arrays = [
            ByteaArray(list(some)) for some in (puts, puts.values(), inserts, inserts.values())
        ]
        values = (
            self._lock, commit_no, now_ns, client, named, *arrays, ByteaArray(deletes), self.channel, notification, until_us,
            max(prune_until, 0),
        )  # fmt: skip
        started_ns = self._clock.boot_ns()
        try:
            for part in earlier_parts:
                rows = ByteaArray(list(part)), ByteaArray(list(part.values()))
                run_pipelined(connection, self.counters, [(_PUT_EARLIER, rows)])
                if failpoints.armed:
                    failpoints.hit("postgres.part_sent", connection, rows)
            micros = self._send(connection, values, optimistic, *naming)
        except psycopg.Error as error:
            failure = self._disconnect_and_translate(error)
            if not isinstance(failure, PostgresUnreachable):
                # The server rejected a statement, so it did not commit.
                raise failure from error
            raise InDoubt(commit_no, client, answers, failure) from error
        self._observe_clock(micros, started_ns)
        postgres_in_doubt.require_standby(connection, commit_no, client, answers)

    def _send(
        self,
        connection: PostgresConnection,
        values: Sequence[Any],
        optimistic: bool,
        *more: Statement,
    ) -> int:
        if failpoints.armed:
            failpoints.hit("postgres.send", connection, values, more)
        if optimistic:
            [(micros,)] = run_statement(connection, self.counters, _APPLY, *values)
            if micros is None:
                raise _LostRace
        else:
            statements: list[Statement] = [(_APPLY, values), *more, ("COMMIT", ())]
            [(micros,)], *_ = run_pipelined(connection, self.counters, statements)
        if failpoints.armed:
            failpoints.hit("postgres.sent", connection)
        return int(micros)

    def _resolve_in_doubt(
        self, connection: PostgresConnection, in_doubt: InDoubt
    ) -> list[CommitAnswer] | None:
        """Resolve an in-doubt commit: its answers if it happened; None if it never will."""
        self.counters.resolved_in_doubt += 1
        try:
            committed = postgres_in_doubt.resolve_in_doubt(
                connection, self.counters, in_doubt, self._lock, self._next_commit_ns()
            )
        except psycopg.Error as error:
            lost = self._disconnect_and_translate(error)
            raise InDoubt(in_doubt.commit_no, in_doubt.client, in_doubt.answers, lost) from error
        postgres_in_doubt.require_standby(
            connection, in_doubt.commit_no, in_doubt.client, in_doubt.answers
        )
        if not committed:
            return None
        self._notify_topics(in_doubt.commit_no, [ALL_TOPICS])
        return in_doubt.answers

    def _disconnect(self) -> None:
        self._solo_commits = 0
        super()._disconnect()

    def _disconnect_and_translate(self, error: psycopg.Error) -> HoldfastError:
        """Disconnect, which ends the transaction, and translate the error."""
        self._disconnect()
        return server.to_store_error(error, self._conninfo)


class _BatchBroken(Exception):
    """One request of several broke the batch."""


class _LostRace(Exception):
    """Another process committed first: the optimistic batch is void."""
