"""Replay: how far the leader has been told of what the dispatch log says, and why no further.

The leader (a person or an agent at a pane) is told of dispatches that ended. What it has not been
told lies between the cursor and the head of the log, and waits through crashes and changes of hands.

- The cursor is durable and moves with what was handled, in one commit.
- An event that was handled is remembered by its `event_id`: replayed from further back (`rewind`), it
  is known and not told again. The newest `DEDUPE_KEPT` are remembered, and a rewind goes no further.
- A notification that cannot be made now is deferred in so many words (`defer_leader_notification`), so
  that an observer sees why. It stays pending: deferring moves no cursor.

Nobody who is to be told (`follow` was never called): nothing is pending.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.authority.dispatch import DispatchEvent, journal_of, topic
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import journal
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

# Event ids that are remembered: so far back may be replayed without telling anything twice.
DEDUPE_KEPT = BATCH_MAX


class Deferral(Record, frozen=True):
    """Why the leader is not told, and since when."""

    code: str
    text: str
    since_ns: int


class ReplayState(Record, frozen=True):
    # The height of the log up to which all is handled.
    cursor: int = 0
    # The highest that the cursor ever was.
    top: int = 0
    # How many event ids were ever remembered.
    remembered: int = 0
    deferred: Deferral | None = None

    def advanced(self, cursor: int) -> ReplayState:
        if cursor < self.cursor:
            raise Invalid(what="cursor", why="it moves up", found=cursor, min=self.cursor)
        return replace(self, cursor=cursor, top=max(self.top, cursor))

    def rewound(self, cursor: int) -> ReplayState:
        lowest = max(self.top - DEDUPE_KEPT, 0)
        if not lowest <= cursor <= self.cursor:
            raise Invalid(
                what="cursor",
                why="back to where it was, as far as events are remembered",
                found=cursor,
                min=lowest,
                max=self.cursor,
            )
        return replace(self, cursor=cursor)

    def defer_leader_notification(self, code: str, text: str, now_ns: int) -> ReplayState:
        """Held back, for this reason. The same reason again keeps its time."""
        if not code:
            raise Invalid(what="deferral", why="it names its reason")
        code, text = code[:ERROR_CODE_CHARS_MAX], text[:ERROR_TEXT_CHARS_MAX]
        was = self.deferred
        if was is not None and (was.code, was.text) == (code, text):
            return self
        return replace(self, deferred=Deferral(code, text, now_ns))

    def clear_deferred(self) -> ReplayState:
        return replace(self, deferred=None)


class Replayed(Record, frozen=True):
    """An event that lies ahead of the cursor, and whether it was handled before."""

    height: int
    event: DispatchEvent
    seen: bool


# -- operations ----------------------------------------------------------------------------------


@operation
def follow(txn: Txn, universe: str) -> ReplayState:
    """Tell the leader of what happens from now on. Again: as it stands."""
    found = read(txn, universe)
    if found is not None:
        return found
    height = journal.head(txn, journal_of(universe)).height
    return _write(txn, universe, ReplayState(height, height))


@operation
def unfollow(txn: Txn, universe: str) -> bool:
    """Tell nobody any more; what was not told is forgotten. Whether anybody was told."""
    if read(txn, universe) is None:
        return False
    keys = _keys(universe)
    txn.delete(keys.state)
    for prefix in (keys.seen, keys.order):
        for key, _ in txn.scan(prefix, tuples.after(prefix)):
            txn.delete(key)
    return True


@operation
def advance(txn: Txn, universe: str, was: int, cursor: int, event_ids: list[str]) -> ReplayState:
    """What lies between two heights is handled; the events by these ids are remembered.

    If the cursor is not where the caller found it, it stays: somebody has rewound it meanwhile, and
    there is more to handle than the caller saw.
    """
    check_limit(len(event_ids), "event_ids")
    height = journal.head(txn, journal_of(universe)).height
    if cursor > height:
        raise Invalid(what="cursor", why="above the log", found=cursor, max=height)
    state = _the(txn, universe)
    moved = replace(state, cursor=was).advanced(cursor)
    if state.cursor == was:
        state = moved
    count = _remember(txn, universe, state.remembered, event_ids)
    return _write(txn, universe, replace(state, remembered=count))


@operation
def rewind(txn: Txn, universe: str, cursor: int) -> ReplayState:
    """Go over the log again from a height on. What was handled is known and not told again."""
    floor = journal.head(txn, journal_of(universe)).floor
    if cursor < floor - 1:
        raise Invalid(what="cursor", why="below what the log keeps", found=cursor, min=floor - 1)
    txn.notify(topic(universe))
    return _write(txn, universe, _the(txn, universe).rewound(cursor))


@operation
def defer_leader_notification(txn: Txn, universe: str, code: str, text: str) -> ReplayState:
    was = _the(txn, universe)
    return _write(txn, universe, was.defer_leader_notification(code, text, txn.now_ns), was)


@operation
def clear_deferred(txn: Txn, universe: str) -> ReplayState:
    was = _the(txn, universe)
    return _write(txn, universe, was.clear_deferred(), was)


# -- reading -------------------------------------------------------------------------------------


def read(txn: Txn, universe: str) -> ReplayState | None:
    """None when nobody is to be told."""
    row = txn.get(_keys(universe).state)
    return None if row is None else codec.unpack_as(ReplayState, row)


def pending(txn: Txn, universe: str) -> int:
    """How many events lie ahead of the cursor."""
    state = read(txn, universe)
    return 0 if state is None else journal.head(txn, journal_of(universe)).height - state.cursor


def ahead(txn: Txn, universe: str, limit: int) -> list[Replayed]:
    """The next events, in the order of the log."""
    check_limit(limit)
    state = read(txn, universe)
    if state is None:
        return []
    subject = journal_of(universe)
    height = journal.head(txn, subject).height
    return [
        Replayed(entry.height, event, remembers(txn, universe, event.event_id))
        for entry in journal.read(txn, subject, state.cursor + 1, height + 1, limit)
        for event in [codec.unpack_as(DispatchEvent, entry.body)]
    ]


def remembers(txn: Txn, universe: str, event_id: str) -> bool:
    """Whether an event was handled, as far as that is remembered."""
    return txn.get(_keys(universe).seen + _packed(event_id)) is not None


# -- inside --------------------------------------------------------------------------------------


class _Keys:
    """The space of app state has room for it: "replay" <u> and one of

    "state"             the cursor, and why it does not move
    "seen" <event id>   handled; its number
    "order" <n>         the same, oldest first, to be forgotten
    """

    __slots__ = ("order", "seen", "state")

    def __init__(self, universe: str) -> None:
        check_name("universe", universe)
        self.state, self.seen, self.order = (
            schema.prefix(schema.Space.APP_STATE, "replay", universe, kind)
            for kind in ("state", "seen", "order")
        )


_keys = lru_cache(maxsize=1024)(_Keys)


def _packed(event_id: str) -> bytes:
    check_name("event_id", event_id)
    return tuples.pack((event_id,))


def _the(txn: Txn, universe: str) -> ReplayState:
    found = read(txn, universe)
    if found is None:
        raise NotFound(what="replay", universe=universe, why="no leader's pane was named")
    return found


def _write(
    txn: Txn, universe: str, state: ReplayState, was: ReplayState | None = None
) -> ReplayState:
    if state != was:
        txn.put(_keys(universe).state, codec.pack(state))
    return state


def _remember(txn: Txn, universe: str, count: int, event_ids: list[str]) -> int:
    keys = _keys(universe)
    for event_id in event_ids:
        packed = _packed(event_id)
        if txn.get(keys.seen + packed) is not None:
            continue
        count += 1
        txn.put(keys.seen + packed, schema.int_bytes(count))
        txn.put(keys.order + tuples.pack_int(count), packed)
        oldest = keys.order + tuples.pack_int(count - DEDUPE_KEPT)
        forgotten = txn.get(oldest) if count > DEDUPE_KEPT else None
        if forgotten is not None:
            txn.delete(oldest)
            txn.delete(keys.seen + forgotten)
    return count
