"""The dispatch log of a universe: its requests, their counters by state, and the log of events.

Every change is an operation. It checks the transition table where commits are applied, and writes
the record, its index by state and time, the counters and the log event together. So the counters
always match the records, and folding the log gives the records.

- A request is created once. The same id again returns the existing record. With another target or
  text it raises `KeyConflict`.
- A repeated transition (after a lost answer) is refused by the table. Callers read the record
  first.
- Finished requests are kept for `ENDED_KEPT_NS`. Each new request removes a few expired ones. A
  request that is not acknowledged within `ACKNOWLEDGED_WITHIN_NS` fails.
- The log keeps all events that the leader has not been notified of (`notifications`), and
  `LOG_KEPT` more. If the leader is `PENDING_MAX` events behind, new requests raise `Overloaded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from holdfast import codec, failpoints
from holdfast.config import DEDUPE_RETENTION_NS, ERROR_TEXT_CHARS_MAX
from holdfast.dispatch import notifications
from holdfast.dispatch.outcomes import DispatchOutcomeReason, QueueTransition, transition_of
from holdfast.dispatch.request import (
    DispatchBacklog,
    DispatchEvent,
    DispatchRecord,
    DispatchStatus,
    log_subject,
    make_record,
    make_request_event,
    mark_of,
    topic,
)
from holdfast.durable import journal
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, KeyConflict, NotFound, Overloaded
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn, operation

REQUEST_ID_BYTES_MAX = 150
METADATA_BYTES_MAX = 4096
# Longer than any client repeats its request.
ENDED_KEPT_NS = DEDUPE_RETENTION_NS
ACKNOWLEDGED_WITHIN_NS = DEDUPE_RETENTION_NS
UNACKNOWLEDGED = "unacknowledged"
# The number of expired requests of each state that a new request removes.
SWEPT_PER_REQUEST = 4
# The number of notified events that the log keeps, and the number of events between two cuts.
LOG_KEPT = 1000
LOG_CUT_EVERY = 100
# The maximum number of events that the leader may be behind.
PENDING_MAX = 100_000
OVERLOADED_RETRY_S = 5.0


class DispatchLog:
    """The dispatch log of a universe in a store, as clients use it."""

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
        """Create a pending request, or return the existing one."""
        given = dict(metadata or {})
        made: DispatchRecord = self._store.transact(
            request, self.universe, request_id, target, given, digest
        )
        return made

    def tried(self, request_id: str) -> DispatchRecord:
        """Record that an attempt to type starts."""
        return self._move(request_id, QueueTransition.TRIED, "")

    def concluded(
        self, request_id: str, reason: DispatchOutcomeReason, *, retries_left: int
    ) -> DispatchRecord:
        """Record the outcome of an attempt. The outcome table determines the transition."""
        transition = transition_of(reason, retries_left=retries_left)
        return self._move(request_id, transition, reason.value)

    def delivered(self, request_id: str, reason: str = "acknowledged") -> DispatchRecord:
        return self._move(request_id, QueueTransition.DELIVERED, reason)

    def failed(self, request_id: str, reason: str) -> DispatchRecord:
        return self._move(request_id, QueueTransition.FAILED, reason)

    def find(self, request_id: str) -> DispatchRecord | None:
        return self._store.read(find, self.universe, request_id)

    def backlog(self) -> DispatchBacklog:
        return self._store.read(backlog, self.universe)

    def _move(self, request_id: str, transition: QueueTransition, reason: str) -> DispatchRecord:
        if failpoints.armed:
            failpoints.hit("dispatch.log_transition", request_id, transition)
        moved: DispatchRecord = self._store.transact(
            move, self.universe, request_id, transition, reason
        )
        if failpoints.armed:
            failpoints.hit("dispatch.transition_logged", request_id, transition)
        return moved


# -- operations ----------------------------------------------------------------------------------


@operation("dispatch.request")
def request(
    txn: Txn, universe: str, request_id: str, target: str, metadata: dict[str, str], digest: str
) -> DispatchRecord:
    """Create a pending request, or return the existing one."""
    _check_request(request_id, target, metadata)
    found = find(txn, universe, request_id)
    if found is not None:
        if (found.target, found.digest) != (target, digest):
            raise KeyConflict(what="dispatch", key=request_id)
        return found
    _expire_requests(txn, universe)
    pending_notifications = notifications.count_pending(txn, universe)
    if pending_notifications >= PENDING_MAX:
        raise Overloaded(
            what="replay", pending=pending_notifications, retry_after_s=OVERLOADED_RETRY_S
        )
    event = make_request_event(request_id, target, txn.now_ns, metadata, digest)
    made = make_record(event)
    _replace_record(txn, universe, None, made)
    txn.put(keys_of(universe).marks + tuples.pack((mark_of(request_id),)), request_id.encode())
    _append_event(txn, universe, event)
    return made


@operation("dispatch.move")
def move(
    txn: Txn, universe: str, request_id: str, transition: QueueTransition, reason: str
) -> DispatchRecord:
    """Apply a transition to a request. Raise InvalidTransition if the table does not allow it."""
    was = find(txn, universe, request_id)
    if was is None:
        raise NotFound(what="dispatch", universe=universe, request_id=request_id)
    return _apply_transition(txn, universe, was, transition, reason)


@operation("dispatch.abandon")
def abandon(txn: Txn, universe: str, request_id: str, reason: str) -> bool:
    """Fail a pending request that will not be retried. Return False if there is none, or if it is
    not pending."""
    was = find(txn, universe, request_id)
    if was is None or was.status is not DispatchStatus.PENDING:
        return False
    _apply_transition(txn, universe, was, QueueTransition.FAILED, reason)
    return True


# -- queries -------------------------------------------------------------------------------------


def find(txn: Txn, universe: str, request_id: str) -> DispatchRecord | None:
    """Return the record of a request, or None."""
    check_name("request_id", request_id)
    row = txn.get(keys_of(universe).records + tuples.pack((request_id,)))
    return None if row is None else codec.unpack_as(DispatchRecord, row)


def find_by_mark(txn: Txn, universe: str, mark: str) -> DispatchRecord | None:
    """Return the request whose text ends with this mark in a pane."""
    check_name("mark", mark)
    row = txn.get(keys_of(universe).marks + tuples.pack((mark,)))
    return None if row is None else find(txn, universe, row.decode())


def list_by_status(
    txn: Txn,
    universe: str,
    status: DispatchStatus,
    after: DispatchRecord | None = None,
    limit: int = 100,
) -> list[DispatchRecord]:
    """Return requests in a state, the longest in that state first."""
    check_limit(limit)
    prefix = keys_of(universe).states[status]
    lo = prefix if after is None else index_key(universe, status, after) + b"\x00"
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    found = [find(txn, universe, row.decode()) for _, row in rows]
    return [one for one in found if one is not None]


def backlog(txn: Txn, universe: str) -> DispatchBacklog:
    """Return the number of requests by state."""
    keys = keys_of(universe)
    counts = {status.value: txn.count(key) for status, key in keys.counts.items()}
    return DispatchBacklog(**counts, deferred=txn.count(keys.deferred))


def events(txn: Txn, universe: str, after: int = 0, limit: int = 100) -> list[DispatchEvent]:
    """Return the kept log events above a height."""
    check_limit(limit)
    subject = log_subject(universe)
    head = journal.head(txn, subject)
    entries = journal.read(txn, subject, max(after + 1, head.floor), head.height + 1, limit)
    return [codec.unpack_as(DispatchEvent, entry.body) for entry in entries]


def rebuild(found: list[DispatchEvent]) -> dict[str, DispatchRecord]:
    """Rebuild all records from a complete log."""
    records: dict[str, DispatchRecord] = {}
    for event in found:
        was = records.get(event.request_id)
        records[event.request_id] = make_record(event) if was is None else was.after(event)
    return records


# -- inside --------------------------------------------------------------------------------------


class DispatchKeys:
    """The keys of the dispatch log, in the app state space below "dispatch" <universe>:

    "r" <request id>                    records
    "s" <status> <since_ns> <id>        index by state and time
    "m" <mark>                          request id by mark
    "n" <status>                        number of requests by state
    "deferred"                          number of pending requests that wait for the leader's pane
    """

    __slots__ = ("counts", "deferred", "marks", "records", "states")

    def __init__(self, universe: str) -> None:
        check_name("universe", universe)

        def key(*path: tuples.Element) -> bytes:
            return schema.key_prefix(schema.Space.APP_STATE, "dispatch", universe, *path)

        self.records = key("r")
        self.marks = key("m")
        self.deferred = key("deferred")
        self.states = {status: key("s", status.value) for status in DispatchStatus}
        self.counts = {status: key("n", status.value) for status in DispatchStatus}


keys_of = lru_cache(maxsize=1024)(DispatchKeys)


def index_key(universe: str, status: DispatchStatus, record: DispatchRecord) -> bytes:
    """The index key of a record by state and time."""
    prefix = keys_of(universe).states[status]
    return prefix + tuples.pack_int(record.since_ns) + tuples.pack((record.request_id,))


def _apply_transition(
    txn: Txn, universe: str, was: DispatchRecord, transition: QueueTransition, reason: str
) -> DispatchRecord:
    event = was.event(transition, txn.now_ns, reason[:ERROR_TEXT_CHARS_MAX])
    now = was.after(event)
    _replace_record(txn, universe, was, now)
    _append_event(txn, universe, event)
    return now


def _replace_record(
    txn: Txn, universe: str, was: DispatchRecord | None, now: DispatchRecord | None
) -> None:
    """Replace, create or remove a record, with its index entries and counters."""
    keys = keys_of(universe)
    if was is not None:
        txn.delete(index_key(universe, was.status, was))
        txn.add(keys.counts[was.status], -1)
    if now is not None:
        txn.put(keys.records + tuples.pack((now.request_id,)), codec.pack(now))
        txn.put(index_key(universe, now.status, now), now.request_id.encode())
        txn.add(keys.counts[now.status], 1)
    deferred = (now is not None and now.deferred) - (was is not None and was.deferred)
    if deferred:
        txn.add(keys.deferred, deferred)


def _append_event(txn: Txn, universe: str, event: DispatchEvent) -> None:
    subject = log_subject(universe)
    was = journal.head(txn, subject)
    head = journal.append(txn, subject, [codec.pack(event)], expected_head=was.height)
    txn.notify(topic(universe))
    if head.height % LOG_CUT_EVERY:
        return
    state = notifications.read(txn, universe)
    notified_height = head.height if state is None else state.cursor
    needed = min(notified_height, head.height - LOG_KEPT)
    if needed > was.checkpoint:
        journal.checkpoint(txn, subject, needed)
        journal.truncate(txn, subject, 2 * LOG_CUT_EVERY)


def _expire_requests(txn: Txn, universe: str) -> None:
    """Remove some expired finished requests, and fail some that were not acknowledged in time."""
    overdue = list_by_status(txn, universe, DispatchStatus.NOTIFIED, None, SWEPT_PER_REQUEST)
    for one in overdue:
        if txn.now_ns - one.since_ns > ACKNOWLEDGED_WITHIN_NS:
            _apply_transition(txn, universe, one, QueueTransition.FAILED, UNACKNOWLEDGED)
    keys = keys_of(universe)
    for status in (DispatchStatus.DELIVERED, DispatchStatus.FAILED):
        for one in list_by_status(txn, universe, status, None, SWEPT_PER_REQUEST):
            if txn.now_ns - one.since_ns > ENDED_KEPT_NS:
                _replace_record(txn, universe, one, None)
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
