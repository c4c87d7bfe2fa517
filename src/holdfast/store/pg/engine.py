"""The commit on PostgreSQL: many transactions of this process in one, each failing alone.

Commits of all processes follow each other: each has a number, and the lock of the store while it is made.
A process that has lately been the only one to commit makes its commits *at once*: it applies a batch to
what it knows, and sends the rows, the record and the NOTIFY as one statement. If others have committed
meanwhile the number is taken, nothing happened, and the batch is applied again, the other way:

    enter      the lock, what others have committed since, the time: one round trip
    validate   nothing that a transaction read was written since its snapshot
    apply      writes, appends, counters, operations; what is not known is asked for
    finish     rows, record, NOTIFY, commit: one round trip

The record of a commit (`holdfast_commit`) is also what tells a process whose connection was cut in
mid-commit whether it happened (see `doubt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from holdfast.errors import CommitUnknown, HoldfastError, Invalid, StoreReadOnly, to_wire
from holdfast.store.engine import Answer, Request, broken_by
from holdfast.store.pg import doubt, server
from holdfast.store.pg.batch import Batch
from holdfast.store.pg.doubt import InDoubt
from holdfast.store.pg.known import NEWS
from holdfast.store.pg.rows import PgTxn, Reads, parts, size_of
from holdfast.store.pg.server import Unreachable
from holdfast.store.pg.session import LAST, Session
from holdfast.store.pg.topics import ALL, payload
from holdfast.store.pg.wire import Arrays, Asked, Connection, ask, ask_all

# Keys that a commit names; of more, it says that all may have changed.
KEYS_NAMED_MAX = 50_000
COMMITS_KEPT = 20_000
PRUNE_EVERY = 1_000
# A process commits at once after so many commits in a row between which nobody else made one.
ALONE_AFTER = 3
# A commit made at once carries the time at which it was applied; it must come this soon after.
LATE_US = 250_000
# What is sent in one piece. With more, the library moves all that is left over each time it has sent a little.
PART_BYTES = 8 * 1024 * 1024
# How long a commit is tried again while the server is away.
AWAY_S = 20.0
PAUSE_S = 0.1

_ENTER = "SELECT holdfast_enter(%b::bigint)"
_APPLY = (
    "SELECT holdfast_apply(%b::bigint, %b::bigint, %b::bigint, %b, %b, %b, %b, %b, %b, %b, %b::text, "
    "%b::text, %b::bigint, %b::bigint)"
)


# Rows of a large commit, ahead of it; then its record names all of them.
_AHEAD = """
    INSERT INTO holdfast_row (key, value) SELECT * FROM unnest(%b::bytea[], %b::bytea[])
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
_NAME = "UPDATE holdfast_commit SET keys = %b::bytea[] || keys WHERE no = %b"


class PgEngine(Session):
    """One caller at a time."""

    # Whether the store is being closed: a server that is away is not waited for then.
    leaving = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._attempts = 0
        self._alone = 0
        super().__init__(*args, **kwargs)
        self._client = self._clock.entropy(8)

    @property
    def client(self) -> bytes:
        """This process, as its commits name it."""
        return self._client

    def commit(
        self, requests: Sequence[Request], histories: Sequence[int] | None = None
    ) -> list[Answer]:
        """Apply a batch in one durable commit, whatever happens to the connection meanwhile.

        `histories` says by which history's numbers each has noted what it read.
        """
        self._refuse_replaced()
        began_ns = self._clock.mono_ns()
        doubted: InDoubt | None = None
        while True:
            try:
                connection = self._connect()
                if doubted is not None:
                    answers = self._settle(connection, doubted)
                    if answers is not None:
                        return answers
                    doubted = None
                return self._try(connection, requests, histories)
            except _Broken:
                # A request broke the batch in a way it should not. One by one, only that one fails.
                known = histories or [self.history] * len(requests)
                return [self._by_itself(*one) for one in zip(requests, known, strict=True)]
            except _Forestalled:
                self.counters.forestalled += 1
                self._alone = 0
                continue
            except InDoubt as raised:
                doubted, error = raised, raised.error
            except (Unreachable, StoreReadOnly) as away:
                error = away
            self._disconnect()
            self.counters.retries += 1
            if self.leaving or self.away.over(began_ns, AWAY_S):
                if doubted is not None:
                    raise CommitUnknown(why=str(error), **self.away.fields())
                raise self.away.told(error)
            self._clock.sleep(PAUSE_S)

    def _by_itself(self, request: Request, history: int) -> Answer:
        """One of a broken batch. Those before it are durable, so its failure is its own."""
        try:
            [answer] = self.commit([request], [history])
        except HoldfastError as error:
            answer = Answer(request.no, to_wire(error))
        return answer

    def _outdate(self, requests: Sequence[Request], histories: Sequence[int]) -> None:
        for request, history in zip(requests, histories, strict=True):
            if history != self.history and (request.reads or request.ranges):
                # What it read is of a history that is no more: no number says what has changed since.
                request.snapshot = -1

    def _try(
        self,
        connection: Connection,
        requests: Sequence[Request],
        histories: Sequence[int] | None,
    ) -> list[Answer]:
        at_once = self._alone >= ALONE_AFTER
        try:
            if not at_once:
                self._enter(connection)
            if histories is not None:
                self._outdate(requests, histories)
            # Noted before anything is read: somebody else may hear of commits meanwhile.
            commit_no = self.commit_no + 1
            now_ns = self._tick()
            reads = Reads(connection, self.known, self.counters)
            txn = PgTxn(reads, self.known.cache, commit_no)
            batch = Batch(txn, reads, self.known, now_ns, self.generation)
            answers = batch.apply(requests)
            if not (batch.changing or (batch.done and self._anchor is not None)):
                # Nothing to keep (simulated, it is a commit, as in every other store). But the answers
                # must not be out of date.
                self._leave(connection, commit_no - 1, at_once)
                return answers
            batch.write(self._time_to_keep(txn.writes))
            if at_once and size_of(txn.writes) > PART_BYTES:
                # It would take too long to come in time.
                raise _Forestalled
            topics, taught = sorted(batch.topics), self.known.taught
            said = payload(self._client, commit_no, topics) if topics else ""
        except psycopg.Error as error:
            raise self._lost(error) from error
        except _Forestalled:
            raise
        except HoldfastError:
            self._disconnect()
            raise
        except Exception as error:
            # Rare, and a transaction ends with its connection for sure.
            self._disconnect()
            if len(requests) > 1:
                raise _Broken from error
            return [Answer(requests[0].no, to_wire(broken_by(error)))]
        try:
            self._finish(connection, txn, now_ns, commit_no, said, answers, at_once)
        except Invalid as error:
            # The server refuses what one of them is to write, and nothing was committed.
            if len(requests) > 1:
                raise _Broken from error
            raise
        self._time_kept(txn.writes)
        self.known.committed(batch.written, txn.writes, now_ns, taught)
        self.counters.commits += 1
        self.counters.transactions += batch.done
        self.counters.at_once += at_once
        self._ring_topics(commit_no, topics)
        return answers

    def _enter(self, connection: Connection) -> None:
        """Take the lock, learn what others have committed, and the time."""
        at, asked_ns = self.known.asking(), self._clock.boot_ns()
        _, [(micros,)], news = ask_all(
            connection,
            self.counters,
            [("BEGIN", ()), (_ENTER, (self._lock,)), (NEWS, at.values)],
        )
        self._alone = 0 if len(news) > (at.no > 0) else self._alone + 1
        self._catch_up(connection, at, news, latest=True)
        self._hear(int(micros), asked_ns)

    def _leave(self, connection: Connection, base_no: int, at_once: bool) -> None:
        if not at_once:
            # No ROLLBACK: the library forgets what it has prepared when it sees one.
            ask_all(connection, self.counters, [("COMMIT", ())])
            return
        [(no, _)] = ask(connection, self.counters, LAST) or [(0, 0)]
        if no != base_no:
            raise _Forestalled

    def _finish(
        self,
        connection: Connection,
        txn: PgTxn,
        now_ns: int,
        commit_no: int,
        said: str,
        answers: list[Answer],
        at_once: bool,
    ) -> None:
        """Send what the commit is made of, and commit."""
        puts = {key: value for key, value in txn.writes.items() if value is not None}
        gone = [key for key, value in txn.writes.items() if value is None]
        timed = at_once and self._anchor is None
        until_us = (now_ns - self._timing.lead_ns) // 1000 + LATE_US if timed else 0
        forget = commit_no - COMMITS_KEPT if commit_no % PRUNE_EVERY == 0 else 0
        self._attempts += 1
        client = self._client + self._attempts.to_bytes(8, "big")
        named = len(txn.writes) <= KEYS_NAMED_MAX
        # At once there is no transaction that would hold several together.
        *ahead, puts = [puts] if at_once else parts(puts, PART_BYTES)
        before = [key for part in ahead for key in part]
        naming = [(_NAME, (Arrays(before), commit_no))] if named and before else []
        puts, new = self.known.new_among(puts)
        arrays = [Arrays(list(some)) for some in (puts, puts.values(), new, new.values())]
        values = (
            self._lock, commit_no, now_ns, client, named, *arrays, Arrays(gone), self.channel, said, until_us,
            max(forget, 0),
        )  # fmt: skip
        asked_ns = self._clock.boot_ns()
        try:
            for part in ahead:
                rows = Arrays(list(part)), Arrays(list(part.values()))
                ask_all(connection, self.counters, [(_AHEAD, rows)])
            micros = self._send(connection, values, at_once, *naming)
        except psycopg.Error as error:
            refused = self._lost(error)
            if not isinstance(refused, Unreachable):
                # The server said no to a statement, so it did not commit.
                raise refused from error
            raise InDoubt(commit_no, client, answers, refused) from error
        self._hear(micros, asked_ns)
        doubt.refuse_alone(connection, commit_no, client, answers)

    def _send(
        self, connection: Connection, values: Sequence[Any], at_once: bool, *more: Asked
    ) -> int:
        if at_once:
            [(micros,)] = ask(connection, self.counters, _APPLY, *values)
            if micros is None:
                raise _Forestalled
        else:
            asked: list[Asked] = [(_APPLY, values), *more, ("COMMIT", ())]
            [(micros,)], *_ = ask_all(connection, self.counters, asked)
        return int(micros)

    def _settle(self, connection: Connection, doubted: InDoubt) -> list[Answer] | None:
        """The answers of a commit whose own was lost, if it did happen; None if it never will."""
        self.counters.doubts += 1
        try:
            happened = doubt.happened(connection, self.counters, doubted, self._lock, self._tick())
        except psycopg.Error as error:
            lost = self._lost(error)
            raise InDoubt(doubted.commit_no, doubted.client, doubted.answers, lost) from error
        doubt.refuse_alone(connection, doubted.commit_no, doubted.client, doubted.answers)
        if not happened:
            return None
        self._ring_topics(doubted.commit_no, [ALL])
        return doubted.answers

    def _disconnect(self) -> None:
        self._alone = 0
        super()._disconnect()

    def _lost(self, error: psycopg.Error) -> HoldfastError:
        """What an error of the server means. The transaction ends with its connection."""
        self._disconnect()
        return server.translated(error, self._conninfo)


class _Broken(Exception):
    """One request of several broke the batch."""


class _Forestalled(Exception):
    """Others have committed since: what was applied to what is known is void."""
