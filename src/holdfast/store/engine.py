"""The commit engine: group commit of many transactions, each of which fails alone.

    validate   no commit since the snapshot wrote a key or range that the transaction read
    guard      the leases of the transaction are live by store time
    apply      writes, appends, counters and operations
    commit     one durable commit for the whole batch, before any answer

A failed transaction changes nothing and does not affect the rest of its batch. The engine is
synchronous and has one caller at a time. Below it a `StoreBackend` holds the rows (LMDB or memory).

The commit itself records the outcomes under (client, number). A client that lost an answer sends the
request again and receives the recorded outcome from the current writer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from holdfast import codec
from holdfast.clock import Clock, ClockAnchor, anchor_at_open
from holdfast.config import OUTCOME_BYTES_MAX, OUTCOME_REPLIES_MAX, OUTCOMES_KEPT, TOPICS_MAX
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    Invalid,
    NotFound,
    NothingToDo,
    RequestCancelled,
    SchemaMismatch,
    StoreCorrupt,
    StoreError,
    StoreFull,
    to_wire,
)
from holdfast.store import clock_leap, schema, tuples
from holdfast.store.admin import marker as admin_marker
from holdfast.store.api import Row
from holdfast.store.parked_requests import (
    UNPARK_TRIES_MAX,
    ParkedRequests,
    RequestId,
    filter_by_topics,
)
from holdfast.store.requests import PARKED, CommitAnswer, CommitRequest
from holdfast.store.validation import RecentCommits, WriteSet, check_guards, execute


class BackendWriteTxn(Protocol):
    """An open write transaction of a backend. It sees its own writes."""

    @property
    def id(self) -> int: ...

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...
    def put_many(self, rows: Iterable[Row]) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class BackendSnapshot(Protocol):
    """The rows as they were after one commit."""

    @property
    def id(self) -> int: ...

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...
    def close(self) -> None: ...


class StoredRows(Protocol):
    """Readable rows: of a snapshot, a write transaction, or a store before recovery."""

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...


class StoreBackend(Protocol):
    def begin(self) -> BackendWriteTxn: ...
    def snapshot(self) -> BackendSnapshot: ...
    def last_id(self) -> int: ...

    def to_store_error(self, error: Exception) -> HoldfastError | None:
        """Translate an error of the storage library; None for any other error."""


class CommitAttempt:
    """One attempt to commit a batch: its open transaction, and the changes of the engine if it commits."""

    __slots__ = (
        "answers",
        "commit_no",
        "committed_ids",
        "newly_parked",
        "now_ns",
        "outcomes",
        "removed_overdue",
        "removed_parked",
        "retried",
        "retrying",
        "topics",
        "txn",
        "unparked",
        "written",
    )

    def __init__(self, txn: BackendWriteTxn, now_ns: int, commit_no: int) -> None:
        self.txn = txn
        self.now_ns = now_ns
        self.commit_no = commit_no
        self.written = WriteSet(txn.id)
        self.topics: set[str] = set()
        self.answers: list[CommitAnswer] = []
        # The requests that this commit applies, and their outcomes to record.
        self.committed_ids: list[RequestId] = []
        self.outcomes: list[CommitAnswer] = []
        self.newly_parked: list[CommitRequest] = []
        self.unparked: list[tuple[CommitRequest, CommitAnswer]] = []
        # The parked requests that were retried, and the one that is being retried.
        self.retried: list[CommitRequest] = []
        self.retrying: CommitRequest | None = None
        # Parked and overdue requests that a copy replaced. An abort restores them.
        self.removed_parked: list[CommitRequest] = []
        self.removed_overdue: list[CommitRequest] = []

    def add_committed(
        self, request_id: RequestId, request: CommitRequest, answer: CommitAnswer
    ) -> None:
        self.committed_ids.append(request_id)
        self.outcomes.append(outcome_to_keep(answer))
        self.topics.update(request.topics)


class StoreEngine:
    def __init__(
        self,
        backend: StoreBackend,
        clock: Clock,
        *,
        bootstrap: bool = True,
        schema_version: tuple[int, int] = schema.SCHEMA_VERSION,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self.commit_no = 0
        self.topics: dict[str, int] = {}
        # The topics notified by commits up to this one are unknown.
        self.topics_unknown_until = 0
        # The topics that the last `commit` or `apply_batch` notified.
        self.notified_topics: set[str] = set()
        self.parked_requests = ParkedRequests()
        # Parked requests that the last batch applied, with their answers, and notified ones that exceeded its
        # retry bound.
        self.unparked: list[tuple[CommitRequest, CommitAnswer]] = []
        self.overdue: list[CommitRequest] = []
        self._last_ns = 0
        self._outcomes: dict[tuple[bytes, int], CommitAnswer] = {}
        self._outcome_commits: deque[tuple[int, list[tuple[bytes, int]]]] = deque()
        # The last commit before `record_commit`: write set, request ids, outcomes, topics.
        self._unrecorded_commit: (
            tuple[WriteSet, list[tuple[bytes, int]], list[CommitAnswer], set[str]] | None
        ) = None
        # Outcome rows that expired. The next commit deletes them.
        self._stale_outcome_keys: list[bytes] = []
        # Outcomes of commits up to this backend id are unknown.
        self._outcomes_unknown_until = 0
        self._open(bootstrap, schema_version)
        # The write sets of a former writer are unknown, so older snapshots cannot be validated.
        self._recent_commits = RecentCommits(backend.last_id())

    # -- time ----------------------------------------------------------------------------------

    @property
    def anchor(self) -> ClockAnchor:
        return self._anchor

    def now_ns(self) -> int:
        now_ns = self._clock.boot_ns() + self._anchor.offset_ns
        return now_ns if now_ns > self._last_ns else self._last_ns

    # -- commit --------------------------------------------------------------------------------

    def commit(self, requests: Sequence[CommitRequest]) -> list[CommitAnswer]:
        """Apply a batch in one durable commit. An error of the backend fails the whole batch."""
        answers = self.apply_batch(requests)
        self.record_commit()
        return answers

    def apply_batch(self, requests: Sequence[CommitRequest]) -> list[CommitAnswer]:
        """`commit` without `record_commit`, so that the answers can be sent before the bookkeeping."""
        self.notified_topics, self.unparked, self.overdue = set(), [], []
        answers = self._try_commit(requests)
        if answers is None:
            # A request broke the whole batch. Committed one by one, only that request fails.
            answers = [self._commit_alone(request) for request in requests]
        return answers

    def _commit_alone(self, request: CommitRequest) -> CommitAnswer:
        """Commit one request of a broken batch. Earlier requests are durable, so only this one can fail."""
        try:
            [answer] = self._try_commit([request]) or [CommitAnswer(request.no)]
        except StoreFull as error:
            answer = CommitAnswer(request.no, to_wire(error))
        return answer

    def _try_commit(self, requests: Sequence[CommitRequest]) -> list[CommitAnswer] | None:
        self.record_commit()
        now_ns = self._last_ns = max(self.now_ns(), self._last_ns + 1)
        attempt = CommitAttempt(self._backend.begin(), now_ns, self.commit_no + 1)
        try:
            for request in requests:
                attempt.answers.append(self._answer(attempt, request))
            if not attempt.committed_ids:
                attempt.txn.abort()
                self._park(attempt.newly_parked)
                return attempt.answers
            attempt.topics.update(attempt.written.topics)
            if self.parked_requests or attempt.newly_parked:
                self._retry_parked(attempt)
            self._write_outcomes(attempt)
        except Exception as error:
            return self._abort(attempt, requests, error)
        attempt.txn.commit()
        self._stale_outcome_keys = []
        self.commit_no = attempt.commit_no
        self.notified_topics |= attempt.topics
        self._unrecorded_commit = (
            attempt.written,
            attempt.committed_ids,
            attempt.outcomes,
            attempt.topics,
        )
        if attempt.newly_parked:
            self._park(attempt.newly_parked)
        if self.parked_requests:
            self._unpark(attempt.unparked, attempt.topics, attempt.retried)
        return attempt.answers

    def _answer(self, attempt: CommitAttempt, request: CommitRequest) -> CommitAnswer:
        """Apply a request of the batch and return its answer, or PARKED."""
        request_id = (request.client, request.no)
        if request.resent and request_id in attempt.committed_ids:
            # Both copies of a resent request are in one batch: apply it once.
            return attempt.outcomes[attempt.committed_ids.index(request_id)]
        if request.park_topics or request.cancels_parked:
            was_parked = self._remove_parked(attempt, request_id)
            if request.cancels_parked and was_parked:
                return CommitAnswer(request.no, to_wire(RequestCancelled(txn_no=request.no)))
        try:
            answer = self._apply(
                attempt.txn, request, attempt.written, attempt.now_ns, attempt.commit_no
            )
        except HoldfastError as error:
            if request.park_topics and isinstance(error, NothingToDo):
                attempt.newly_parked.append(request)
                return PARKED
            return CommitAnswer(request.no, to_wire(error))
        if answer.commit_no == attempt.commit_no:
            attempt.add_committed(request_id, request, answer)
        return answer

    def _remove_parked(self, attempt: CommitAttempt, request_id: RequestId) -> bool:
        """Remove the copy of a request that was parked before, also over an earlier connection."""
        former = self.parked_requests.remove(request_id)
        if former is not None:
            attempt.removed_parked.append(former)
        overdue = _remove_by_id(self.overdue, request_id)
        attempt.removed_overdue += overdue
        newly_parked = _remove_by_id(attempt.newly_parked, request_id)
        return bool(former is not None or overdue or newly_parked)

    def _retry_parked(self, attempt: CommitAttempt) -> None:
        """Retry the parked requests whose topics the batch notifies."""
        # Also retry requests parked in this batch: a later request may have notified them.
        attempt.retried = (
            self.parked_requests.waiting_for_topics(attempt.topics)
            + filter_by_topics(attempt.newly_parked, attempt.topics)
        )[:UNPARK_TRIES_MAX]
        for request in attempt.retried:
            attempt.retrying = request
            try:
                answer = self._apply(
                    attempt.txn, request, attempt.written, attempt.now_ns, attempt.commit_no
                )
            except NothingToDo:
                continue
            except HoldfastError as error:
                answer = CommitAnswer(request.no, to_wire(error))
            else:
                attempt.add_committed((request.client, request.no), request, answer)
            attempt.unparked.append((request, answer))
        attempt.retrying = None
        attempt.topics.update(attempt.written.topics)

    def _write_outcomes(self, attempt: CommitAttempt) -> None:
        txn = attempt.txn
        clients = [client for client, _ in attempt.committed_ids]
        row = codec.pack([attempt.commit_no, txn.id, attempt.now_ns, clients, attempt.outcomes])
        slot = _outcome_key(attempt.commit_no)
        _write(txn, [(slot, row)], [key for key in self._stale_outcome_keys if key != slot])

    def _abort(
        self, attempt: CommitAttempt, requests: Sequence[CommitRequest], error: Exception
    ) -> list[CommitAnswer] | None:
        """Undo an attempt that a request broke. None if its requests must be committed one by one."""
        attempt.txn.abort()
        if isinstance(error, _PartialWrite) and isinstance(error.error, StoreError):
            raise error.error from None
        self._park(attempt.removed_parked)
        self.overdue += attempt.removed_overdue
        refused = self._backend.to_store_error(error) or invalid_transaction(error)
        parked = attempt.retrying
        if (
            parked is not None
            and self.parked_requests.remove((parked.client, parked.no)) is not None
        ):
            # A parked request broke the batch: retry the batch without it.
            self.unparked.append((parked, CommitAnswer(parked.no, to_wire(refused))))
            return self._try_commit(requests)
        if len(requests) > 1:
            return None
        return [CommitAnswer(requests[0].no, to_wire(refused))]

    def _park(self, requests: list[CommitRequest]) -> None:
        for request in requests:
            self.parked_requests.add(request)

    def _unpark(
        self,
        unparked: list[tuple[CommitRequest, CommitAnswer]],
        topics: set[str],
        retried: list[CommitRequest],
    ) -> None:
        for request, _ in unparked:
            self.parked_requests.remove((request.client, request.no))
        self.unparked += unparked
        retried_ids = {(request.client, request.no) for request in retried}
        for request in self.parked_requests.waiting_for_topics(topics):
            if (request.client, request.no) not in retried_ids:
                self.parked_requests.remove((request.client, request.no))
                self.overdue.append(request)

    def _apply(
        self,
        txn: BackendWriteTxn,
        request: CommitRequest,
        written: WriteSet,
        now_ns: int,
        commit_no: int,
    ) -> CommitAnswer:
        if request.resent:
            known = self._outcomes.get((request.client, request.no))
            if known is not None:
                return known
            if request.snapshot < self._outcomes_unknown_until:
                raise CommitUnknown(txn_no=request.no)
        if request.cancels_parked:
            raise RequestCancelled(txn_no=request.no)
        self._recent_commits.check(request, written)
        check_guards(txn, request, now_ns, self.generation)
        if request.calls or request.appends or request.adds:
            return self._execute(txn, request, written, now_ns, commit_no)
        _write(txn, request.puts.items(), request.deletes)
        written.add(request.puts)
        written.add(request.deletes)
        return CommitAnswer(request.no, None, commit_no)

    def _execute(
        self,
        txn: BackendWriteTxn,
        request: CommitRequest,
        written: WriteSet,
        now_ns: int,
        commit_no: int,
    ) -> CommitAnswer:
        try:
            apply, seqs, results = execute(txn, request, now_ns, self.generation)
        except HoldfastError:
            raise
        except Exception as error:
            if self._backend.to_store_error(error) is not None:
                raise
            # Nothing is written yet, so only this request fails.
            raise invalid_transaction(error) from error
        writes = apply.writes
        puts = [(key, value) for key, value in writes.items() if value is not None]
        deletes = [key for key, value in writes.items() if value is None]
        _write(txn, puts, deletes)
        written.add(writes)
        written.topics.update(apply.topics)
        return CommitAnswer(request.no, None, commit_no, seqs, results)

    def record_commit(self) -> None:
        """Record the write set, outcomes and topics of the last commit in memory."""
        if self._unrecorded_commit is None:
            return
        written, committed_ids, outcomes, topics = self._unrecorded_commit
        self._unrecorded_commit = None
        self._recent_commits.add(written)
        self._outcomes.update(zip(committed_ids, outcomes, strict=True))
        self._outcome_commits.append((written.id, committed_ids))
        while len(self._outcome_commits) >= OUTCOMES_KEPT or (
            len(self._outcomes) > OUTCOME_REPLIES_MAX and len(self._outcome_commits) > 1
        ):
            self._outcomes_unknown_until, forgotten = self._outcome_commits.popleft()
            oldest = self.commit_no - len(self._outcome_commits)
            # The latest commit has already overwritten the slot of an older one.
            if oldest > self.commit_no - OUTCOMES_KEPT:
                self._stale_outcome_keys.append(_outcome_key(oldest))
            for name in forgotten:
                self._outcomes.pop(name, None)
        if topics:
            if len(self.topics) > TOPICS_MAX:
                self.topics.clear()
                self.topics_unknown_until = self.commit_no
            self.topics.update(dict.fromkeys(topics, self.commit_no))

    # -- opening -------------------------------------------------------------------------------

    def _open(self, bootstrap: bool, expected: tuple[int, int]) -> None:
        txn = self._backend.begin()
        try:
            marker_current = check_schema(
                txn.get(schema.MARKER_KEY), expected, bootstrap=bootstrap, allow_upgrade=True
            )
            self._load_outcomes(scan_outcomes(txn))
            meta = read_meta_row(txn)
            last = None if meta is None else ClockAnchor(meta.boot_id, meta.offset_ns)
            floor_ns = max(self._last_ns, 0 if meta is None else meta.floor_ns)
            leap_ns = clock_leap.checked_leap_ns(self._clock, meta, floor_ns)
            self._anchor = anchor_at_open(self._clock, last=last, floor_ns=floor_ns)
            self._last_ns = floor_ns
            self.store_id = self._clock.entropy(16).hex() if meta is None else meta.store_id
            self.generation = 1 if meta is None else meta.generation
            new_meta = schema.StoreMeta(
                self.store_id,
                self.generation,
                self._anchor.boot_id,
                self._anchor.offset_ns,
                floor_ns,
                leap_ns,
            )
            if meta == new_meta and marker_current:
                txn.abort()
                return
            # Before any request: older code refuses the store from this commit on.
            txn.put_many(
                [
                    (schema.META_KEY, codec.pack(new_meta)),
                    (schema.MARKER_KEY, schema.encode_marker(*expected)),
                ]
            )
        except BaseException:
            txn.abort()
            raise
        txn.commit()

    def _load_outcomes(self, rows: list[Row]) -> None:
        """Load the outcomes of the former writer, newest first, within the bounds."""
        try:
            heads = sorted(
                ((_OUTCOME_HEAD.decode(row), row) for _, row in rows),
                key=lambda found: found[0][0],
                reverse=True,
            )
            for (commit_no, id, at_ns, _, _), row in heads:
                self.commit_no = max(self.commit_no, commit_no)
                self._last_ns = max(self._last_ns, at_ns)
                if len(self._outcomes) > OUTCOME_REPLIES_MAX:
                    self._outcomes_unknown_until = id
                    return
                clients, answers = _OUTCOME_ROW.decode(row)[3:]
                names = [(client, one.no) for client, one in zip(clients, answers, strict=True)]
                self._outcomes.update(zip(names, answers, strict=True))
                self._outcome_commits.appendleft((id, names))
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreCorrupt(what="outcome row", why=str(error)) from None
        if heads and self.commit_no > len(heads):
            self._outcomes_unknown_until = heads[-1][0][1] - 1


def scan_outcomes(rows: StoredRows) -> list[Row]:
    return rows.scan(schema.OUTCOME, tuples.prefix_end(schema.OUTCOME), None, False)


def read_meta_row(rows: StoredRows) -> schema.StoreMeta | None:
    return decode_meta(rows.get(schema.META_KEY))


def decode_meta(row: bytes | None) -> schema.StoreMeta | None:
    try:
        return None if row is None else codec.unpack_as(schema.StoreMeta, row)
    except Invalid as error:
        raise StoreCorrupt(what="meta row", why=error.why) from None


def check_outcomes(rows: StoredRows) -> int:
    """Raise StoreCorrupt if an outcome row is unreadable. Return the time of the last commit."""
    try:
        return max((_OUTCOME_ROW.decode(row)[2] for _, row in scan_outcomes(rows)), default=0)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreCorrupt(what="outcome row", why=str(error)) from None


def _outcome_key(commit_no: int) -> bytes:
    return schema.OUTCOME + tuples.pack_int(commit_no % OUTCOMES_KEPT)


def outcome_to_keep(answer: CommitAnswer) -> CommitAnswer:
    """The outcome to record for an answer: the answer, or CommitUnknown if it is too large."""
    if sum([len(bytes(result)) for result in answer.results]) <= OUTCOME_BYTES_MAX:
        return answer
    unknown = CommitUnknown(txn_no=answer.no, why="committed, but the answer was too large to keep")
    return CommitAnswer(answer.no, to_wire(unknown), answer.commit_no)


def invalid_transaction(error: Exception) -> Invalid:
    """The Invalid error of a transaction whose operation raised an unexpected exception."""
    why = f"{type(error).__name__}: {error}"
    return Invalid(what="transaction", why=why.encode(errors="backslashreplace").decode())


def _remove_by_id(requests: list[CommitRequest], request_id: RequestId) -> list[CommitRequest]:
    """Remove and return the requests with this id."""
    matching = [request for request in requests if (request.client, request.no) == request_id]
    for request in matching:
        requests.remove(request)
    return matching


class _PartialWrite(Exception):
    """The backend failed after part of the writes: the whole batch is void."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.error = error


def _write(txn: BackendWriteTxn, puts: Iterable[Row], deletes: Iterable[bytes]) -> None:
    try:
        txn.put_many(puts)
        for key in deletes:
            txn.delete(key)
    except HoldfastError as error:
        raise _PartialWrite(error) from None


def check_schema(
    marker: bytes | None,
    expected: tuple[int, int],
    *,
    bootstrap: bool,
    allow_upgrade: bool = False,
) -> bool:
    """Check the schema marker (document 001): a match passes, a missing marker needs `bootstrap`, all else is
    refused. With `allow_upgrade` an older version that this code reads passes too.

    Return whether the marker is current. An open for writing writes a marker that is not.
    """
    if marker is None:
        if not bootstrap:
            why = "no Holdfast store, and bootstrap is off"
            raise NotFound(what="schema marker", key=schema.MARKER_NAME, why=why)
        return False
    admin_marker.refuse_unopenable(marker)
    try:
        version = schema.decode_marker(marker)
    except Invalid:
        raise SchemaMismatch(found=marker[:16], expected=list(expected)) from None
    match = schema.compare_versions(version, expected)
    if match is schema.SchemaMatch.UPGRADE and allow_upgrade:
        return False
    if match is not schema.SchemaMatch.SAME:
        raise SchemaMismatch(found=list(version), expected=list(expected))
    return True


_OUTCOME_HEAD = msgspec.msgpack.Decoder(tuple[int, int, int, msgspec.Raw, msgspec.Raw])
_OUTCOME_ROW = msgspec.msgpack.Decoder(tuple[int, int, int, list[bytes], list[CommitAnswer]])
