"""The dispatch log of a universe: its requests, how many are in which state, and what happened.

Every change is an operation: the move is judged by the table where commits are applied, and the record,
its place by state and time, the counters and the event of the log are written together. So counters are
what a recount would give, and folding the log gives the records.

- A request is made once. The same id again is answered by the record there is; with another target or
  text it is `KeyConflict`.
- What moves a request twice in the same way (an answer that was lost) is told by the table, not undone:
  callers look at the record first.
- Requests that ended are kept for `KEPT_NS`, and removed a few at a time by those that come after them.
  One that nobody acknowledged for `ACKNOWLEDGED_WITHIN_NS` fails.
- The log is kept as far as the leader has not been told of it (`replay`), and `LOG_KEPT` beyond that.
  A leader that is `PENDING_MAX` behind makes new requests wait: `Overloaded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from holdfast import codec
from holdfast.authority import replay
from holdfast.authority.dispatch import (
    Backlog,
    DispatchEvent,
    DispatchRecord,
    DispatchStatus,
    begun,
    journal_of,
    mark_of,
    requested,
    topic,
)
from holdfast.authority.outcome import DispatchOutcomeReason, QueueTransition, transition_of
from holdfast.config import DEDUPE_RETENTION_NS, ERROR_TEXT_CHARS_MAX
from holdfast.durable import journal
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid, KeyConflict, NotFound, Overloaded
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn, operation

REQUEST_ID_BYTES_MAX = 150
METADATA_BYTES_MAX = 4096
# What ended is kept for longer than anybody repeats its request.
KEPT_NS = DEDUPE_RETENTION_NS
ACKNOWLEDGED_WITHIN_NS = DEDUPE_RETENTION_NS
UNACKNOWLEDGED = "unacknowledged"
# A request removes so many that are past their time.
SWEPT_PER_REQUEST = 4
# Events that the log keeps although the leader knows of them, and how often it is cut.
LOG_KEPT = 1000
LOG_CUT_EVERY = 100
# Events that the leader may be behind.
PENDING_MAX = 100_000
BEHIND_RETRY_S = 5.0


class DispatchLog:
    """The log as callers use it: a store, and a universe."""

    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self.universe = universe

    def request(
        self,
        request_id: str,
        target: str,
        metadata: Mapping[str, str] | None = None,
        *,
        digest: str = "",
    ) -> DispatchRecord:
        """A new request, pending; or the one there is."""
        given = dict(metadata or {})
        made: DispatchRecord = self._store.transact(
            request, self.universe, request_id, target, given, digest
        )
        return made

    def tried(self, request_id: str) -> DispatchRecord:
        """Typing begins."""
        return self._move(request_id, QueueTransition.TRIED, "")

    def concluded(
        self, request_id: str, reason: DispatchOutcomeReason, *, retries_left: int
    ) -> DispatchRecord:
        """An attempt came to this: what follows is in the table of outcomes."""
        transition = transition_of(reason, retries_left=retries_left)
        return self._move(request_id, transition, reason.value)

    def delivered(self, request_id: str, reason: str = "acknowledged") -> DispatchRecord:
        return self._move(request_id, QueueTransition.DELIVERED, reason)

    def failed(self, request_id: str, reason: str) -> DispatchRecord:
        return self._move(request_id, QueueTransition.FAILED, reason)

    def find(self, request_id: str) -> DispatchRecord | None:
        return self._store.read(find, self.universe, request_id)

    def backlog(self) -> Backlog:
        return self._store.read(backlog, self.universe)

    def _move(self, request_id: str, transition: QueueTransition, reason: str) -> DispatchRecord:
        moved: DispatchRecord = self._store.transact(
            move, self.universe, request_id, transition, reason
        )
        return moved


# -- operations ----------------------------------------------------------------------------------


@operation
def request(
    txn: Txn, universe: str, request_id: str, target: str, metadata: dict[str, str], digest: str
) -> DispatchRecord:
    _check_request(request_id, target, metadata)
    found = find(txn, universe, request_id)
    if found is not None:
        if (found.target, found.digest) != (target, digest):
            raise KeyConflict(what="dispatch", key=request_id)
        return found
    _sweep(txn, universe)
    behind = replay.pending(txn, universe)
    if behind >= PENDING_MAX:
        raise Overloaded(what="replay", pending=behind, retry_after_s=BEHIND_RETRY_S)
    event = requested(request_id, target, txn.now_ns, metadata, digest)
    made = begun(event)
    _put(txn, universe, None, made)
    txn.put(keys_of(universe).marks + tuples.pack((mark_of(request_id),)), request_id.encode())
    _log(txn, universe, event)
    return made


@operation
def move(
    txn: Txn, universe: str, request_id: str, transition: QueueTransition, reason: str
) -> DispatchRecord:
    """What happened to a request; InvalidTransition if it cannot have."""
    was = find(txn, universe, request_id)
    if was is None:
        raise NotFound(what="dispatch", universe=universe, request_id=request_id)
    return _move(txn, universe, was, transition, reason)


@operation
def abandon(txn: Txn, universe: str, request_id: str, reason: str) -> bool:
    """Nobody will try a pending request again: it fails. False when there is none, or it went on."""
    was = find(txn, universe, request_id)
    if was is None or was.status is not DispatchStatus.PENDING:
        return False
    _move(txn, universe, was, QueueTransition.FAILED, reason)
    return True


# -- reading -------------------------------------------------------------------------------------


def find(txn: Txn, universe: str, request_id: str) -> DispatchRecord | None:
    check_name("request_id", request_id)
    row = txn.get(keys_of(universe).records + tuples.pack((request_id,)))
    return None if row is None else codec.unpack_as(DispatchRecord, row)


def by_mark(txn: Txn, universe: str, mark: str) -> DispatchRecord | None:
    """The request whose text ends with this mark, as it stands in a pane."""
    check_name("mark", mark)
    row = txn.get(keys_of(universe).marks + tuples.pack((mark,)))
    return None if row is None else find(txn, universe, row.decode())


def listed(
    txn: Txn,
    universe: str,
    status: DispatchStatus,
    after: DispatchRecord | None = None,
    limit: int = 100,
) -> list[DispatchRecord]:
    """Requests in a state, those that have been in it longest first."""
    check_limit(limit)
    prefix = keys_of(universe).states[status]
    lo = prefix if after is None else place_of(universe, status, after) + b"\x00"
    rows = txn.scan(lo, tuples.after(prefix), limit)
    found = [find(txn, universe, row.decode()) for _, row in rows]
    return [one for one in found if one is not None]


def backlog(txn: Txn, universe: str) -> Backlog:
    keys = keys_of(universe)
    counts = {status.value: txn.count(key) for status, key in keys.counts.items()}
    return Backlog(**counts, deferred=txn.count(keys.deferred))


def events(txn: Txn, universe: str, after: int = 0, limit: int = 100) -> list[DispatchEvent]:
    """The log above a height, as far down as it is kept."""
    check_limit(limit)
    subject = journal_of(universe)
    head = journal.head(txn, subject)
    entries = journal.read(txn, subject, max(after + 1, head.floor), head.height + 1, limit)
    return [codec.unpack_as(DispatchEvent, entry.body) for entry in entries]


def rebuilt(found: list[DispatchEvent]) -> dict[str, DispatchRecord]:
    """The records that a log alone tells, from its first event on."""
    records: dict[str, DispatchRecord] = {}
    for event in found:
        was = records.get(event.request_id)
        records[event.request_id] = begun(event) if was is None else was.after(event)
    return records


# -- inside --------------------------------------------------------------------------------------


class Keys:
    """The space of app state has room for it: "dispatch" <u> and one of

    "r" <request id>                    records
    "s" <status> <since_ns> <id>        the same, by state and time
    "m" <mark>                          which request has this mark
    "n" <status>                        how many are in each state
    "deferred"                          how many of the pending ones wait for the leader's pane
    """

    __slots__ = ("counts", "deferred", "marks", "records", "states")

    def __init__(self, universe: str) -> None:
        check_name("universe", universe)

        def key(*path: tuples.Element) -> bytes:
            return schema.prefix(schema.Space.APP_STATE, "dispatch", universe, *path)

        self.records = key("r")
        self.marks = key("m")
        self.deferred = key("deferred")
        self.states = {status: key("s", status.value) for status in DispatchStatus}
        self.counts = {status: key("n", status.value) for status in DispatchStatus}


keys_of = lru_cache(maxsize=1024)(Keys)


def place_of(universe: str, status: DispatchStatus, record: DispatchRecord) -> bytes:
    prefix = keys_of(universe).states[status]
    return prefix + tuples.pack_int(record.since_ns) + tuples.pack((record.request_id,))


def _move(
    txn: Txn, universe: str, was: DispatchRecord, transition: QueueTransition, reason: str
) -> DispatchRecord:
    event = was.event(transition, txn.now_ns, reason[:ERROR_TEXT_CHARS_MAX])
    now = was.after(event)
    _put(txn, universe, was, now)
    _log(txn, universe, event)
    return now


def _put(txn: Txn, universe: str, was: DispatchRecord | None, now: DispatchRecord | None) -> None:
    """Replace a record, or make or remove one, with everything that is derived from it."""
    keys = keys_of(universe)
    if was is not None:
        txn.delete(place_of(universe, was.status, was))
        txn.add(keys.counts[was.status], -1)
    if now is not None:
        txn.put(keys.records + tuples.pack((now.request_id,)), codec.pack(now))
        txn.put(place_of(universe, now.status, now), now.request_id.encode())
        txn.add(keys.counts[now.status], 1)
    deferred = (now is not None and now.deferred) - (was is not None and was.deferred)
    if deferred:
        txn.add(keys.deferred, deferred)


def _log(txn: Txn, universe: str, event: DispatchEvent) -> None:
    subject = journal_of(universe)
    was = journal.head(txn, subject)
    head = journal.append(txn, subject, [codec.pack(event)], expected_head=was.height)
    txn.notify(topic(universe))
    if head.height % LOG_CUT_EVERY:
        return
    state = replay.read(txn, universe)
    told = head.height if state is None else state.cursor
    needed = min(told, head.height - LOG_KEPT)
    if needed > was.checkpoint:
        journal.checkpoint(txn, subject, needed)
        journal.truncate(txn, subject, 2 * LOG_CUT_EVERY)


def _sweep(txn: Txn, universe: str) -> None:
    """Remove some that ended long ago; let some fail that nobody acknowledges."""
    overdue = listed(txn, universe, DispatchStatus.NOTIFIED, None, SWEPT_PER_REQUEST)
    for one in overdue:
        if txn.now_ns - one.since_ns > ACKNOWLEDGED_WITHIN_NS:
            _move(txn, universe, one, QueueTransition.FAILED, UNACKNOWLEDGED)
    keys = keys_of(universe)
    for status in (DispatchStatus.DELIVERED, DispatchStatus.FAILED):
        for one in listed(txn, universe, status, None, SWEPT_PER_REQUEST):
            if txn.now_ns - one.since_ns > KEPT_NS:
                _put(txn, universe, one, None)
                txn.delete(keys.records + tuples.pack((one.request_id,)))
                txn.delete(keys.marks + tuples.pack((mark_of(one.request_id),)))


def _check_request(request_id: str, target: str, metadata: dict[str, str]) -> None:
    check_name("request_id", request_id)
    check_name("target", target)
    if len(request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise Invalid(what="request_id", why="too long", bytes_max=REQUEST_ID_BYTES_MAX)
    size = len(codec.pack(metadata))
    if size > METADATA_BYTES_MAX:
        raise Invalid(what="metadata", why="too large", bytes=size, bytes_max=METADATA_BYTES_MAX)
