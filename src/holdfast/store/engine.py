"""The commit engine: many transactions, one durable commit, each failing alone.

    validate   nothing that the transaction read was written since its snapshot
    guard      its leases are live, now, by store time
    apply      its writes, appends, counters and operations
    commit     once, for all of the batch; only then does anybody get an answer

A transaction that fails leaves no trace; the others of its batch go on. The engine is synchronous
and has one caller at a time. Below it is a `Backend` that holds the rows (LMDB, or memory).

Outcomes are recorded in the commit itself, under (client, number), so that a client that lost the
answer gets it from whoever is the writer then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from holdfast import codec
from holdfast.clock import Anchor, Clock, anchor
from holdfast.config import (
    OUTCOME_ANSWERS_MAX,
    OUTCOME_BYTES_MAX,
    OUTCOMES_KEPT,
    TOPICS_MAX,
)
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    Invalid,
    NotFound,
    NotYet,
    SchemaMismatch,
    StoreCorrupt,
    StoreError,
    StoreFull,
    Withdrawn,
    to_wire,
)
from holdfast.store import calendar, marks, schema, tuples
from holdfast.store.api import Guard, Row
from holdfast.store.applying import Ring, Written, check_guards, execute
from holdfast.store.standers import TRIED_MAX, Name, Standers, waiting_for


class WriteTxn(Protocol):
    """An open write transaction of a backend: it sees its own writes."""

    @property
    def id(self) -> int: ...

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...
    def put_many(self, rows: Iterable[Row]) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class Snapshot(Protocol):
    """The rows as they were after one commit."""

    @property
    def id(self) -> int: ...

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...
    def close(self) -> None: ...


class Rows(Protocol):
    """What can be looked at: a snapshot, a write transaction, a store that is not open yet."""

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]: ...


class Backend(Protocol):
    def begin(self) -> WriteTxn: ...
    def snapshot(self) -> Snapshot: ...
    def last_id(self) -> int: ...

    def typed(self, error: Exception) -> HoldfastError | None:
        """What an error of the rows below means, if it is one."""


class Request(msgspec.Struct, array_like=True, gc=False):
    """One transaction, as its caller sends it."""

    no: int
    client: bytes
    snapshot: int
    # True when an earlier answer may have been lost: look the outcome up before anything else.
    resent: bool = False
    reads: list[bytes] = []
    ranges: list[tuple[bytes, bytes]] = []
    guards: list[Guard] = []
    puts: dict[bytes, bytes] = {}
    deletes: list[bytes] = []
    appends: list[tuple[bytes, bytes]] = []
    adds: dict[bytes, int] = {}
    calls: list[tuple[str, msgspec.Raw]] = []
    topics: list[str] = []
    # It stands until one of these is notified (see `standers`).
    when: list[str] = []
    # One that stands is to stand no more. If it was applied, this is answered as it was.
    withdrawn: bool = False


class Answer(msgspec.Struct, array_like=True, gc=False):
    """What became of it: `error` is (code, fields), or None when it is committed."""

    no: int
    error: list[Any] | None = None
    commit_no: int = 0
    seqs: list[int] = []
    results: list[msgspec.Raw] = []


# The answer to a request that stands, which is none yet.
STANDS = Answer(0)


class Engine:
    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        *,
        bootstrap: bool = True,
        schema_version: tuple[int, int] = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR),
    ) -> None:
        self._backend = backend
        self._clock = clock
        self.commit_no = 0
        self.topics: dict[str, int] = {}
        # What the commits up to this one notified is known no more.
        self.topics_forgotten = 0
        # The topics that the last call of `commit`, or of `decide`, notified.
        self.rung: set[str] = set()
        self.standers = Standers()
        # Requests that stood and were applied by it, with their answers, and those that were notified and
        # are still to be tried.
        self.stood: list[tuple[Request, Answer]] = []
        self.late: list[Request] = []
        self._last_ns = 0
        self._outcomes: dict[tuple[bytes, int], Answer] = {}
        self._outcome_ring: deque[tuple[int, list[tuple[bytes, int]]]] = deque()
        # Keys, names and answers of the last commit, and its topics.
        self._unremembered: (
            tuple[Written, list[tuple[bytes, int]], list[Answer], set[str]] | None
        ) = None
        # Rows of outcomes that are forgotten; the next commit removes them.
        self._stale_rows: list[bytes] = []
        # What was committed after this backend id, and only that, can be looked up.
        self._forgotten_id = 0
        self._open(bootstrap, schema_version)
        # Older snapshots were taken under a former writer: what it wrote is not known.
        self._ring = Ring(backend.last_id())

    # -- time ----------------------------------------------------------------------------------

    @property
    def anchor(self) -> Anchor:
        return self._anchor

    def now_ns(self) -> int:
        now_ns = self._clock.boot_ns() + self._anchor.offset_ns
        return now_ns if now_ns > self._last_ns else self._last_ns

    # -- commit --------------------------------------------------------------------------------

    def commit(self, requests: Sequence[Request]) -> list[Answer]:
        """Apply a batch in one durable commit. An error of the backend fails all of them."""
        answers = self.decide(requests)
        self.remember()
        return answers

    def decide(self, requests: Sequence[Request]) -> list[Answer]:
        """`commit`, but for `remember`: whoever waits for the answers need not wait for that."""
        self.rung, self.stood, self.late = set(), [], []
        answers = self._try(requests)
        if answers is None:
            # A request broke the batch in a way it should not. One by one, only that one fails.
            answers = [self._try_alone(request) for request in requests]
        return answers

    def _try_alone(self, request: Request) -> Answer:
        """One of a broken batch. Those before it are durable, so its failure is its own."""
        try:
            [answer] = self._try([request]) or [Answer(request.no)]
        except StoreFull as error:
            answer = Answer(request.no, to_wire(error))
        return answer

    def _try(self, requests: Sequence[Request]) -> list[Answer] | None:
        self.remember()
        now_ns = self._last_ns = max(self.now_ns(), self._last_ns + 1)
        commit_no = self.commit_no + 1
        txn = self._backend.begin()
        written = Written(txn.id)
        topics: set[str] = set()
        answers: list[Answer] = []
        done: list[tuple[bytes, int]] = []
        kept: list[Answer] = []
        stays: list[Request] = []
        stood: list[tuple[Request, Answer]] = []
        tried: list[Request] = []
        trying: Request | None = None
        called_back: list[Request] = []
        was_late: list[Request] = []
        try:
            for request in requests:
                name = (request.client, request.no)
                if request.resent and name in done:
                    # Sent again so soon that both copies are in one batch: it is one transaction.
                    answers.append(kept[done.index(name)])
                    continue
                if request.when or request.withdrawn:
                    # What came by an earlier connection stands no more, if it still did.
                    former = self.standers.remove(name)
                    if former is not None:
                        called_back.append(former)
                    late = _take_out(self.late, name)
                    was_late += late
                    stood_here = _take_out(stays, name) or late or former is not None
                    if request.withdrawn and stood_here:
                        answers.append(Answer(request.no, to_wire(Withdrawn(txn_no=request.no))))
                        continue
                try:
                    answer = self._apply(txn, request, written, now_ns, commit_no)
                except HoldfastError as error:
                    if request.when and isinstance(error, NotYet):
                        stays.append(request)
                        answer = STANDS
                    else:
                        answer = Answer(request.no, to_wire(error))
                else:
                    if answer.commit_no == commit_no:
                        done.append(name)
                        kept.append(keepable(answer))
                        topics.update(request.topics)
                answers.append(answer)
            if not done:
                txn.abort()
                self._stand(stays)
                return answers
            topics.update(written.topics)
            if self.standers or stays:
                # Those that came in this batch, perhaps before what they wait for, are tried again.
                tried = (self.standers.of(topics) + waiting_for(stays, topics))[:TRIED_MAX]
                for request in tried:
                    trying = request
                    try:
                        answer = self._apply(txn, request, written, now_ns, commit_no)
                    except NotYet:
                        continue
                    except HoldfastError as error:
                        answer = Answer(request.no, to_wire(error))
                    else:
                        done.append((request.client, request.no))
                        kept.append(keepable(answer))
                        topics.update(request.topics)
                    stood.append((request, answer))
                trying = None
                topics.update(written.topics)
            row = codec.pack([commit_no, txn.id, now_ns, [client for client, _ in done], kept])
            slot = _outcome_key(commit_no)
            _write(txn, [(slot, row)], [key for key in self._stale_rows if key != slot])
        except Exception as error:
            txn.abort()
            if isinstance(error, _Unwritable) and isinstance(error.error, StoreError):
                raise error.error from None
            self._stand(called_back)
            self.late += was_late
            refused = self._backend.typed(error) or broken_by(error)
            if trying is not None and self.standers.remove((trying.client, trying.no)) is not None:
                # It stood here, and is no fault of theirs: all of it once more, without it.
                self.stood.append((trying, Answer(trying.no, to_wire(refused))))
                return self._try(requests)
            if len(requests) > 1:
                return None
            return [Answer(requests[0].no, to_wire(refused))]
        txn.commit()
        self._stale_rows = []
        self.commit_no = commit_no
        self.rung |= topics
        self._unremembered = written, done, kept, topics
        self._stand(stays)
        self._step_forward(stood, topics, tried)
        return answers

    def _stand(self, requests: list[Request]) -> None:
        for request in requests:
            self.standers.add(request)

    def _step_forward(
        self, stood: list[tuple[Request, Answer]], topics: set[str], tried: list[Request]
    ) -> None:
        for request, _ in stood:
            self.standers.remove((request.client, request.no))
        self.stood += stood
        names = {(request.client, request.no) for request in tried}
        for request in self.standers.of(topics):
            if (request.client, request.no) not in names:
                self.standers.remove((request.client, request.no))
                self.late.append(request)

    def _apply(
        self, txn: WriteTxn, request: Request, written: Written, now_ns: int, commit_no: int
    ) -> Answer:
        if request.resent:
            known = self._outcomes.get((request.client, request.no))
            if known is not None:
                return known
            if request.snapshot < self._forgotten_id:
                raise CommitUnknown(txn_no=request.no)
        if request.withdrawn:
            raise Withdrawn(txn_no=request.no)
        self._ring.check(request, written)
        check_guards(txn, request, now_ns, self.generation)
        if request.calls or request.appends or request.adds:
            return self._execute(txn, request, written, now_ns, commit_no)
        _write(txn, request.puts.items(), request.deletes)
        written.add(request.puts)
        written.add(request.deletes)
        return Answer(request.no, None, commit_no)

    def _execute(
        self, txn: WriteTxn, request: Request, written: Written, now_ns: int, commit_no: int
    ) -> Answer:
        try:
            apply, seqs, results = execute(txn, request, now_ns, self.generation)
        except HoldfastError:
            raise
        except Exception as error:
            if self._backend.typed(error) is not None:
                raise
            # Nothing is written yet, so it fails alone.
            raise broken_by(error) from error
        writes = apply.writes
        puts = [(key, value) for key, value in writes.items() if value is not None]
        deletes = [key for key, value in writes.items() if value is None]
        _write(txn, puts, deletes)
        written.add(writes)
        written.topics.update(apply.topics)
        return Answer(request.no, None, commit_no, seqs, results)

    def remember(self) -> None:
        """Take note of what the last commit wrote, answered and notified."""
        if self._unremembered is None:
            return
        written, done, kept, topics = self._unremembered
        self._unremembered = None
        self._ring.add(written)
        self._outcomes.update(zip(done, kept, strict=True))
        self._outcome_ring.append((written.id, done))
        while len(self._outcome_ring) >= OUTCOMES_KEPT or (
            len(self._outcomes) > OUTCOME_ANSWERS_MAX and len(self._outcome_ring) > 1
        ):
            self._forgotten_id, forgotten = self._outcome_ring.popleft()
            oldest = self.commit_no - len(self._outcome_ring)
            # An older one has been overwritten already: its slot is the latest commit's.
            if oldest > self.commit_no - OUTCOMES_KEPT:
                self._stale_rows.append(_outcome_key(oldest))
            for name in forgotten:
                self._outcomes.pop(name, None)
        if topics:
            if len(self.topics) > TOPICS_MAX:
                self.topics.clear()
                self.topics_forgotten = self.commit_no
            self.topics.update(dict.fromkeys(topics, self.commit_no))

    # -- opening -------------------------------------------------------------------------------

    def _open(self, bootstrap: bool, expected: tuple[int, int]) -> None:
        txn = self._backend.begin()
        try:
            guard_schema(txn.get(schema.MARKER_KEY), expected, bootstrap=bootstrap)
            self._load_outcomes(outcome_rows(txn))
            meta = meta_row(txn)
            last = None if meta is None else Anchor(meta.boot_id, meta.offset_ns)
            floor_ns = max(self._last_ns, 0 if meta is None else meta.floor_ns)
            leap_ns = calendar.leap_ns(self._clock, meta, floor_ns)
            self._anchor = anchor(self._clock, last=last, floor_ns=floor_ns)
            self._last_ns = floor_ns
            self.store_id = self._clock.entropy(16).hex() if meta is None else meta.store_id
            self.generation = 1 if meta is None else meta.generation
            fresh = schema.Meta(
                self.store_id,
                self.generation,
                self._anchor.boot_id,
                self._anchor.offset_ns,
                floor_ns,
                leap_ns,
            )
            if meta == fresh:
                txn.abort()
                return
            txn.put_many(
                [
                    (schema.META_KEY, codec.pack(fresh)),
                    (schema.MARKER_KEY, schema.marker(*expected)),
                ]
            )
        except BaseException:
            txn.abort()
            raise
        txn.commit()

    def _load_outcomes(self, rows: list[Row]) -> None:
        """Take up the outcomes of the writer before, newest first, within the bounds."""
        try:
            heads = sorted(
                ((_OUTCOME_HEAD.decode(row), row) for _, row in rows),
                key=lambda found: found[0][0],
                reverse=True,
            )
            for (commit_no, id, at_ns, _, _), row in heads:
                self.commit_no = max(self.commit_no, commit_no)
                self._last_ns = max(self._last_ns, at_ns)
                if len(self._outcomes) > OUTCOME_ANSWERS_MAX:
                    self._forgotten_id = id
                    return
                clients, answers = _OUTCOME_ROW.decode(row)[3:]
                names = [(client, one.no) for client, one in zip(clients, answers, strict=True)]
                self._outcomes.update(zip(names, answers, strict=True))
                self._outcome_ring.appendleft((id, names))
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreCorrupt(what="outcome row", why=str(error)) from None
        if heads and self.commit_no > len(heads):
            self._forgotten_id = heads[-1][0][1] - 1


def outcome_rows(rows: Rows) -> list[Row]:
    return rows.scan(schema.OUTCOME, tuples.after(schema.OUTCOME), None, False)


def meta_row(rows: Rows) -> schema.Meta | None:
    return meta_of(rows.get(schema.META_KEY))


def meta_of(found: bytes | None) -> schema.Meta | None:
    try:
        return None if found is None else codec.unpack_as(schema.Meta, found)
    except Invalid as error:
        raise StoreCorrupt(what="meta row", why=error.why) from None


def check_outcomes(rows: Rows) -> int:
    """Raise what keeps the outcomes of earlier commits from being read; the time of the last one."""
    try:
        return max((_OUTCOME_ROW.decode(row)[2] for _, row in outcome_rows(rows)), default=0)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreCorrupt(what="outcome row", why=str(error)) from None


def _outcome_key(commit_no: int) -> bytes:
    return schema.OUTCOME + tuples.pack_int(commit_no % OUTCOMES_KEPT)


def keepable(answer: Answer) -> Answer:
    """What a lost answer is replaced by: itself, unless that would take too much room."""
    if sum([len(bytes(result)) for result in answer.results]) <= OUTCOME_BYTES_MAX:
        return answer
    told = CommitUnknown(
        txn_no=answer.no, why="it was committed, but its answer was too large to keep"
    )
    return Answer(answer.no, to_wire(told), answer.commit_no)


def broken_by(error: Exception) -> Invalid:
    """The refusal of a transaction whose operation raised what it should not."""
    why = f"{type(error).__name__}: {error}"
    return Invalid(what="transaction", why=why.encode(errors="backslashreplace").decode())


def _take_out(requests: list[Request], name: Name) -> list[Request]:
    """Those of this name that were among them."""
    found = [one for one in requests if (one.client, one.no) == name]
    for one in found:
        requests.remove(one)
    return found


class _Unwritable(Exception):
    """The backend took only part of the writes: the whole batch is void."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.error = error


def _write(txn: WriteTxn, puts: Iterable[Row], deletes: Iterable[bytes]) -> None:
    try:
        txn.put_many(puts)
        for key in deletes:
            txn.delete(key)
    except HoldfastError as error:
        raise _Unwritable(error) from None


def guard_schema(found: bytes | None, expected: tuple[int, int], *, bootstrap: bool) -> None:
    """Document 001's guard: matching goes on, missing needs bootstrap, anything else refuses."""
    if found is None:
        if not bootstrap:
            why = "no store of ours, and bootstrap is off"
            raise NotFound(what="schema marker", key=schema.MARKER_NAME, why=why)
        return
    marks.refuse(found)
    try:
        version = schema.read_marker(found)
    except Invalid:
        raise SchemaMismatch(found=found[:16], expected=list(expected)) from None
    if version != expected:
        raise SchemaMismatch(found=list(version), expected=list(expected))


_OUTCOME_HEAD = msgspec.msgpack.Decoder(tuple[int, int, int, msgspec.Raw, msgspec.Raw])
_OUTCOME_ROW = msgspec.msgpack.Decoder(tuple[int, int, int, list[bytes], list[Answer]])
