"""Leader notifications: the cursor up to which the leader has been notified of dispatch log events.

The leader (a person or an agent at a pane) is notified of finished dispatches. Pending
notifications are the events between the cursor and the head of the log. They survive crashes and
changes of leadership.

- The cursor is durable and moves in the commit that records the handled events.
- A handled event is recorded by its `event_id`. After a `rewind` it is recognised and not notified
  again. The newest `HANDLED_KEPT` ids are kept, and a rewind is limited to these.
- A notification that is not possible now is deferred with a reason (`defer_leader_notification`),
  which operators can see. It stays pending: deferring does not move the cursor.

Without a subscription (`subscribe`), no notification is pending.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.dispatch.request import DispatchEvent, log_subject, topic
from holdfast.durable import journal
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

# The number of handled event ids that are kept. A rewind within them notifies no event twice.
HANDLED_KEPT = BATCH_MAX


class NotificationDeferral(Record, frozen=True):
    """The reason why the leader is not notified, and since when."""

    code: str
    text: str
    since_ns: int


class ReplayState(Record, frozen=True):
    """The notification cursor of the leader."""

    # All events up to this height of the log are handled.
    cursor: int = 0
    # The highest value that the cursor has had.
    top: int = 0
    # The total number of event ids recorded so far.
    remembered: int = 0
    deferred: NotificationDeferral | None = None

    def advanced(self, cursor: int) -> ReplayState:
        if cursor < self.cursor:
            raise Invalid(
                what="cursor", why="the cursor only moves forward", found=cursor, min=self.cursor
            )
        return replace(self, cursor=cursor, top=max(self.top, cursor))

    def rewound(self, cursor: int) -> ReplayState:
        lowest = max(self.top - HANDLED_KEPT, 0)
        if not lowest <= cursor <= self.cursor:
            raise Invalid(
                what="cursor",
                why="a rewind is limited to the handled events that are kept",
                found=cursor,
                min=lowest,
                max=self.cursor,
            )
        return replace(self, cursor=cursor)

    def defer_leader_notification(self, code: str, text: str, now_ns: int) -> ReplayState:
        """Defer the notification for a reason. A repeated reason keeps its first time."""
        if not code:
            raise Invalid(what="deferral", why="a deferral needs a reason code")
        code, text = code[:ERROR_CODE_CHARS_MAX], text[:ERROR_TEXT_CHARS_MAX]
        was = self.deferred
        if was is not None and (was.code, was.text) == (code, text):
            return self
        return replace(self, deferred=NotificationDeferral(code, text, now_ns))

    def clear_deferred(self) -> ReplayState:
        return replace(self, deferred=None)


class LoggedEvent(Record, frozen=True):
    """An event ahead of the cursor, and whether it was handled before."""

    height: int
    event: DispatchEvent
    handled: bool


# -- operations ----------------------------------------------------------------------------------


@operation("notifications.subscribe")
def subscribe(txn: Txn, universe: str) -> ReplayState:
    """Subscribe the leader to events from now on. Repeating the call returns the current state."""
    found = read(txn, universe)
    if found is not None:
        return found
    height = journal.head(txn, log_subject(universe)).height
    return _write(txn, universe, ReplayState(height, height))


@operation("notifications.unsubscribe")
def unsubscribe(txn: Txn, universe: str) -> bool:
    """Unsubscribe the leader and drop its cursor. Return whether it was subscribed."""
    if read(txn, universe) is None:
        return False
    keys = _keys(universe)
    txn.delete(keys.state)
    for prefix in (keys.seen, keys.order):
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
            txn.delete(key)
    return True


@operation("notifications.advance")
def advance(txn: Txn, universe: str, was: int, cursor: int, event_ids: list[str]) -> ReplayState:
    """Move the cursor between two heights and record the handled event ids.

    If the cursor is no longer where the caller read it, it stays: a rewind happened meanwhile, and
    there are more events to handle than the caller saw.
    """
    check_limit(len(event_ids), "event_ids")
    height = journal.head(txn, log_subject(universe)).height
    if cursor > height:
        raise Invalid(what="cursor", why="above the height of the log", found=cursor, max=height)
    state = _require_state(txn, universe)
    moved = replace(state, cursor=was).advanced(cursor)
    if state.cursor == was:
        state = moved
    count = _record_handled(txn, universe, state.remembered, event_ids)
    return _write(txn, universe, replace(state, remembered=count))


@operation("notifications.rewind")
def rewind(txn: Txn, universe: str, cursor: int) -> ReplayState:
    """Move the cursor back to a height. Events that were handled are recognised and not notified
    again."""
    floor = journal.head(txn, log_subject(universe)).floor
    if cursor < floor - 1:
        raise Invalid(
            what="cursor", why="the log below this height was deleted", found=cursor, min=floor - 1
        )
    txn.notify(topic(universe))
    return _write(txn, universe, _require_state(txn, universe).rewound(cursor))


@operation("notifications.defer_leader_notification")
def defer_leader_notification(txn: Txn, universe: str, code: str, text: str) -> ReplayState:
    was = _require_state(txn, universe)
    return _write(txn, universe, was.defer_leader_notification(code, text, txn.now_ns), was)


@operation("notifications.clear_deferred")
def clear_deferred(txn: Txn, universe: str) -> ReplayState:
    was = _require_state(txn, universe)
    return _write(txn, universe, was.clear_deferred(), was)


# -- queries -------------------------------------------------------------------------------------


def read(txn: Txn, universe: str) -> ReplayState | None:
    """Return the notification state, or None without a subscription."""
    row = txn.get(_keys(universe).state)
    return None if row is None else codec.unpack_as(ReplayState, row)


def count_pending(txn: Txn, universe: str) -> int:
    """Return the number of events ahead of the cursor."""
    state = read(txn, universe)
    return 0 if state is None else journal.head(txn, log_subject(universe)).height - state.cursor


def next_events(txn: Txn, universe: str, limit: int) -> list[LoggedEvent]:
    """Return the next events in log order."""
    check_limit(limit)
    state = read(txn, universe)
    if state is None:
        return []
    subject = log_subject(universe)
    height = journal.head(txn, subject).height
    return [
        LoggedEvent(entry.height, event, was_handled(txn, universe, event.event_id))
        for entry in journal.read(txn, subject, state.cursor + 1, height + 1, limit)
        for event in [codec.unpack_as(DispatchEvent, entry.body)]
    ]


def was_handled(txn: Txn, universe: str, event_id: str) -> bool:
    """Whether an event was handled, as far as its id is kept."""
    return txn.get(_keys(universe).seen + _packed(event_id)) is not None


# -- inside --------------------------------------------------------------------------------------


class _NotificationKeys:
    """The keys of the notifications, in the app state space below "replay" <universe>:

    "state"             the cursor, and the reason of a deferral
    "seen" <event id>   handled events, with their number
    "order" <n>         the same by number, to expire the oldest
    """

    __slots__ = ("order", "seen", "state")

    def __init__(self, universe: str) -> None:
        check_name("universe", universe)
        self.state, self.seen, self.order = (
            schema.key_prefix(schema.Space.APP_STATE, "replay", universe, kind)
            for kind in ("state", "seen", "order")
        )


_keys = lru_cache(maxsize=1024)(_NotificationKeys)


def _packed(event_id: str) -> bytes:
    check_name("event_id", event_id)
    return tuples.pack((event_id,))


def _require_state(txn: Txn, universe: str) -> ReplayState:
    found = read(txn, universe)
    if found is None:
        raise NotFound(what="replay", universe=universe, why="no leader pane is set")
    return found


def _write(
    txn: Txn, universe: str, state: ReplayState, was: ReplayState | None = None
) -> ReplayState:
    if state != was:
        txn.put(_keys(universe).state, codec.pack(state))
    return state


def _record_handled(txn: Txn, universe: str, count: int, event_ids: list[str]) -> int:
    keys = _keys(universe)
    for event_id in event_ids:
        packed = _packed(event_id)
        if txn.get(keys.seen + packed) is not None:
            continue
        count += 1
        txn.put(keys.seen + packed, schema.encode_int(count))
        txn.put(keys.order + tuples.pack_int(count), packed)
        oldest = keys.order + tuples.pack_int(count - HANDLED_KEPT)
        forgotten = txn.get(oldest) if count > HANDLED_KEPT else None
        if forgotten is not None:
            txn.delete(oldest)
            txn.delete(keys.seen + forgotten)
    return count
