"""One item of a queue: its states, its rows, and the counters over them.

    ready     in the ready index, by priority (larger first), then turn, then seq
    delayed   in the delayed index, by the time before which it must not run
    claimed   in the expiry index and in the owner index; a row beside the item's names the claim
    done      gone, counted
    dead      a dead letter, and no item any more (see `dead`)

Rows of items lie in the order in which they were put, and are claimed in another: those of many worlds
lie far apart. So a claim does not write there: it has a row of its own, among the few that are claimed
now, and the item's row is written again when the claim has ended in anything but an ack.

The table below is the only way from one to another, and the counters move by it, a whole batch at
a time: `Tally.move` is one step for n items. The values of the index rows are the packed seq, so
that a row found by an index leads to all others of its item by concatenation, without parsing.

Items may belong to groups, and groups take turns: an item's turn is one after that of the group's
item before it, and not before the turn that the queue is at, each priority by itself. So a group with a hundred thousand
items delays another's single one by a handful, and the index order alone is the schedule. What was
looked at and comes back (put off, failed, released, expired) takes its turn anew, among those of its
group that come back: ahead of its group's backlog, and not of others who have waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import (
    BLOB_THRESHOLD_BYTES,
    ERROR_CODE_CHARS_MAX,
    TRIED_ERROR_CHARS_MAX,
    TRIED_KEPT,
)
from holdfast.durable.bounds import check_name
from holdfast.errors import StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn
from holdfast.transitions import Transitions


class State(Enum):
    READY = "ready"
    DELAYED = "delayed"
    CLAIMED = "claimed"
    DEAD = "dead"
    DONE = "done"


class Event(Enum):
    DUE = "due"
    WITHDRAW = "withdraw"
    CLAIM = "claim"
    EXTEND = "extend"
    ACK = "ack"
    RETRY = "retry"
    DEFER = "defer"
    RELEASE = "release"
    EXPIRE = "expire"
    EXHAUST = "exhaust"
    BURY = "bury"


# Both ends absorb: a redrive is a new item that names the dead one.
ITEM = Transitions(
    "queue item",
    State.READY,
    {
        (State.DELAYED, Event.DUE): State.READY,
        (State.DELAYED, Event.WITHDRAW): State.DONE,
        (State.READY, Event.WITHDRAW): State.DONE,
        (State.READY, Event.DEFER): State.DELAYED,
        (State.READY, Event.BURY): State.DEAD,
        (State.CLAIMED, Event.WITHDRAW): State.DONE,
        (State.READY, Event.CLAIM): State.CLAIMED,
        (State.CLAIMED, Event.EXTEND): State.CLAIMED,
        (State.CLAIMED, Event.ACK): State.DONE,
        (State.CLAIMED, Event.RETRY): State.READY,
        (State.CLAIMED, Event.DEFER): State.DELAYED,
        (State.CLAIMED, Event.RELEASE): State.READY,
        (State.CLAIMED, Event.EXPIRE): State.READY,
        (State.CLAIMED, Event.EXHAUST): State.DEAD,
        (State.CLAIMED, Event.BURY): State.DEAD,
    },
)


class Tried(Record, frozen=True):
    """An attempt that came to nothing: whose it was, when, and how it ended."""

    number: int
    owner: str
    began_ns: int
    ended_ns: int
    # "failed", or "expired": its worker died or hung.
    end: str
    code: str = ""
    error: str = ""


class Hold(Record, frozen=True):
    """The row of a claim: its number, whose it is, from when until when, and the item's blob."""

    claims: int
    owner: str
    expires_ns: int
    claimed_ns: int
    blob: bytes = b""


class Item(Record, frozen=True):
    """An item, with its claim if it has one (`whole`): its row knows `claims`, the number of the last
    claim that has ended, and of a claim that stands nothing. Unclaimed when `expires_ns` is 0."""

    payload: bytes
    blob: bytes
    priority: int
    enqueued_ns: int
    not_before_ns: int = 0
    claims: int = 0
    failures: int = 0
    expiries: int = 0
    owner: str = ""
    expires_ns: int = 0
    redrive_of: int | None = None
    code: str = ""
    error: str = ""
    group: str = ""
    turn: int = 0
    # The operation that is told when the item dies, in the same commit (see `dead`).
    will: str = ""
    claimed_ns: int = 0
    # The last attempts, newest last.
    tried: tuple[Tried, ...] = ()


# What a new item is made of: payload, blob, priority, redrive_of, group, will.
Body = tuple[bytes, bytes, int, int | None, str, str]


class Counts(Record, frozen=True):
    """How many items are in each state; `done` and, until purged, `dead` ones stay counted."""

    ready: int = 0
    delayed: int = 0
    claimed: int = 0
    dead: int = 0
    done: int = 0


class Keys:
    """The packed prefixes of one queue."""

    __slots__ = (
        "claims", "counts", "dead", "delayed", "died", "groups", "holds", "items", "last_seq", "owners",
        "queue", "ready", "topic", "turn", "withdrawn",
    )  # fmt: skip

    def __init__(self, queue: str) -> None:
        check_name("queue", queue)
        self.queue = queue
        self.topic = topic(queue)
        self.items, self.ready, self.delayed, self.claims, self.owners, self.dead, self.died = (
            schema.prefix(schema.Space.QUEUE, queue, kind) for kind in "irdxozt"
        )
        self.holds = schema.prefix(schema.Space.QUEUE, queue, "h")
        self.counts = schema.prefix(schema.Space.QUEUE, queue, "n")
        self.groups = schema.prefix(schema.Space.QUEUE, queue, "g")
        self.turn = schema.prefix(schema.Space.QUEUE, queue, "turn")
        self.withdrawn = schema.prefix(schema.Space.QUEUE, queue, "withdrawn")
        self.last_seq = schema.sequence_key(self.items)

    def ready_key(self, priority: int, turn: int, packed_seq: bytes) -> bytes:
        return self.ready + tuples.pack_int(-priority) + tuples.pack_int(turn) + packed_seq


def topic(queue: str) -> str:
    return f"queue/{queue}"


keys_of = lru_cache(maxsize=4096)(Keys)
decode = codec.decoder(Item).decode
decode_hold = codec.decoder(Hold).decode
decode_counts = codec.decoder(Counts).decode
pack = codec.pack
pack_int = tuples.pack_int
# Beside the last turn of a group that of its items which have come back.
_BACK = tuples.pack(("back",))
# Those of one batch are the same for all of its items.
pack_time = lru_cache(maxsize=256)(tuples.pack_int)


@lru_cache(maxsize=4096)
def pack_owner(owner: str) -> bytes:
    return tuples.pack((owner,))


class Tally:
    """Moves of one operation, added to the queue's counters in one write."""

    __slots__ = ("_moved",)

    def __init__(self) -> None:
        self._moved: dict[State, int] = {}

    def enter(self, state: State, n: int) -> None:
        self._moved[state] = self._moved.get(state, 0) + n

    def move(self, before: State, event: Event, n: int = 1) -> State:
        after = ITEM.next(before, event)
        self.enter(before, -n)
        self.enter(after, n)
        return after

    def save(self, txn: Txn, keys: Keys) -> None:
        moved = self._moved
        if not any(moved.values()):
            return
        was = counts_of(txn, keys)
        txn.put(
            keys.counts,
            pack(
                Counts(
                    was.ready + moved.get(State.READY, 0),
                    was.delayed + moved.get(State.DELAYED, 0),
                    was.claimed + moved.get(State.CLAIMED, 0),
                    was.dead + moved.get(State.DEAD, 0),
                    was.done + moved.get(State.DONE, 0),
                )
            ),
        )


def counts_of(txn: Txn, keys: Keys) -> Counts:
    row = txn.get(keys.counts)
    return Counts() if row is None else decode_counts(row)


def insert(
    txn: Txn,
    keys: Keys,
    bodies: Sequence[Body],
    not_before_ns: int,
    *,
    turn: int = 0,
    hung: bool = False,
) -> list[int]:
    """New items, under numbers never given before.

    What is `hung` waits in the delayed index even if it is due, for it may go by another clock.
    """
    now_ns = txn.now_ns
    last = txn.count(keys.last_seq)
    seqs = list(range(last + 1, last + 1 + len(bodies)))
    delayed = not_before_ns > now_ns or hung
    due = keys.delayed + pack_int(not_before_ns)
    put, items = txn.put, keys.items
    for seq, (payload, blob, priority, redrive_of, group, will) in zip(seqs, bodies, strict=True):
        packed_seq = pack_int(seq)
        if group:
            turn = next_turn(txn, keys, priority, group)
        item = Item(
            payload,
            blob,
            priority,
            now_ns,
            not_before_ns,
            redrive_of=redrive_of,
            group=group,
            turn=turn,
            will=will,
        )
        put(items + packed_seq, pack(item))
        index = due + packed_seq if delayed else keys.ready_key(priority, turn, packed_seq)
        put(index, packed_seq)
    if seqs:
        put(keys.last_seq, schema.int_bytes(seqs[-1]))
        tally = Tally()
        tally.enter(State.DELAYED if delayed else State.READY, len(seqs))
        tally.save(txn, keys)
        txn.notify(keys.topic)
    return seqs


def next_turn(txn: Txn, keys: Keys, priority: int, group: str) -> int:
    """The turn of a group's next item, among those of its priority."""
    key = keys.groups + tuples.pack((priority, group))
    turn = max(txn.count(key), txn.count(keys.turn + pack_int(priority))) + 1
    txn.put(key, schema.int_bytes(turn))
    return turn


def take_turns(txn: Txn, keys: Keys, taken: Sequence[Item]) -> None:
    """The queue is at the turn of what was taken; a group's last item ends its record."""
    reached: dict[int, int] = {}
    for item in taken:
        reached[item.priority] = max(item.turn, reached.get(item.priority, 0))
        end_turns(txn, keys, item)
    for priority, turn in reached.items():
        key = keys.turn + pack_int(priority)
        if turn > txn.count(key):
            txn.put(key, schema.int_bytes(turn))


def end_turns(txn: Txn, keys: Keys, item: Item) -> None:
    """Forget a group's turn with the last of its items."""
    if item.group:
        key = keys.groups + tuples.pack((item.priority, item.group))
        if txn.count(key) == item.turn:
            txn.delete(key)
        if item.claims or item.not_before_ns:
            key += _BACK
            if txn.count(key) == item.turn:
                txn.delete(key)


def come_back(txn: Txn, keys: Keys, item: Item) -> Item:
    """The item with the turn at which it is ready again. The caller keeps its row.

    Those of one group come back one a turn: a thousand of them delay another's single item by one.
    """
    if not item.group:
        return item
    reached = txn.count(keys.turn + pack_int(item.priority))
    if item.turn > reached:
        return item  # it waited, and its turn is still to come
    end_turns(txn, keys, item)
    key = keys.groups + tuples.pack((item.priority, item.group)) + _BACK
    turn = max(txn.count(key), reached) + 1
    txn.put(key, schema.int_bytes(turn))
    return replace(item, turn=turn)


def place(txn: Txn, payload: bytes) -> tuple[bytes, bytes]:
    """What the row holds: the payload itself, or the hash of a blob."""
    if len(payload) <= BLOB_THRESHOLD_BYTES:
        return payload, b""
    return b"", blobs.put(txn, payload)


def tried(item: Item, end: str, ended_ns: int, code: str, error: str) -> tuple[Tried, ...]:
    """The attempts with the one that ends now."""
    latest = Tried(
        item.claims,
        item.owner,
        item.claimed_ns,
        ended_ns,
        end,
        code[:ERROR_CODE_CHARS_MAX],
        error[:TRIED_ERROR_CHARS_MAX],
    )
    return (*item.tried, latest)[-TRIED_KEPT:]


def load(txn: Txn, keys: Keys, packed_seq: bytes) -> Item:
    """The item that an index row of those that wait speaks of."""
    row = txn.get(keys.items + packed_seq)
    if row is None:
        raise StoreCorrupt(queue=keys.queue, seq=seq_of(packed_seq), why="indexed but not there")
    return decode(row)


def whole(txn: Txn, keys: Keys, packed_seq: bytes) -> Item:
    """The item, with its claim if it has one."""
    item = load(txn, keys, packed_seq)
    row = txn.get(keys.holds + packed_seq)
    if row is None:
        return item
    hold = decode_hold(row)
    return replace(
        item,
        claims=hold.claims,
        owner=hold.owner,
        expires_ns=hold.expires_ns,
        claimed_ns=hold.claimed_ns,
    )


def drop_claim(txn: Txn, keys: Keys, item: Item | Hold, packed_seq: bytes) -> None:
    txn.delete(keys.holds + packed_seq)
    txn.delete(keys.claims + pack_time(item.expires_ns) + packed_seq)
    txn.delete(keys.owners + pack_owner(item.owner) + packed_seq)


def seq_of(packed_seq: bytes) -> int:
    return int.from_bytes(packed_seq[1:], "big")
