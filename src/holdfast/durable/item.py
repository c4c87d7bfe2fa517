"""Queue items: their states, rows, indexes and counters, and fair sharing between groups.

    ready     in the ready index, by priority (larger first), then fair rank, then seq
    delayed   in the delayed index, by the time before which it must not run
    claimed   in the expiry index and the owner index; a separate claim row describes the claim
    done      removed, counted
    dead      a dead letter, no longer an item (see `dead_letters`)

Item rows are stored in insertion order but claimed in a different order, so the claimed rows are far
apart. A claim therefore does not rewrite item rows. It writes a claim row into a small dense key range.
The item row is rewritten only when a claim ends without an ack.

The table below defines all transitions. The counters follow it, one step for n items
(`QueueCounterDelta.transition`). The value of an index row is the packed seq, so all other keys of an
item are built by concatenation, without parsing.

Items may belong to groups that share the queue fairly. The fair rank of an item is one above the rank of
its group's previous item, and above the rank that the queue has reached, per priority. A group with
100,000 items therefore delays a single item of another group by only a few items, and the index order
alone is the schedule. A requeued item (deferred, failed, released, expired) gets a new rank among the
requeued items of its group. It runs before its group's backlog, but not before waiting items of other
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import (
    ATTEMPT_ERROR_CHARS_MAX,
    ATTEMPTS_KEPT,
    BLOB_THRESHOLD_BYTES,
    ERROR_CODE_CHARS_MAX,
)
from holdfast.durable import load_limits
from holdfast.durable.validation import check_name
from holdfast.errors import StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn
from holdfast.transitions import Transitions


class ItemState(Enum):
    READY = "ready"
    DELAYED = "delayed"
    CLAIMED = "claimed"
    DEAD = "dead"
    DONE = "done"


class ItemEvent(Enum):
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


# DONE and DEAD are terminal. A redrive inserts a new item that references the dead one.
ITEM_TRANSITIONS = Transitions(
    "queue item",
    ItemState.READY,
    {
        (ItemState.DELAYED, ItemEvent.DUE): ItemState.READY,
        (ItemState.DELAYED, ItemEvent.WITHDRAW): ItemState.DONE,
        (ItemState.READY, ItemEvent.WITHDRAW): ItemState.DONE,
        (ItemState.READY, ItemEvent.DEFER): ItemState.DELAYED,
        (ItemState.READY, ItemEvent.BURY): ItemState.DEAD,
        (ItemState.CLAIMED, ItemEvent.WITHDRAW): ItemState.DONE,
        (ItemState.READY, ItemEvent.CLAIM): ItemState.CLAIMED,
        (ItemState.CLAIMED, ItemEvent.EXTEND): ItemState.CLAIMED,
        (ItemState.CLAIMED, ItemEvent.ACK): ItemState.DONE,
        (ItemState.CLAIMED, ItemEvent.RETRY): ItemState.READY,
        (ItemState.CLAIMED, ItemEvent.DEFER): ItemState.DELAYED,
        (ItemState.CLAIMED, ItemEvent.RELEASE): ItemState.READY,
        (ItemState.CLAIMED, ItemEvent.EXPIRE): ItemState.READY,
        (ItemState.CLAIMED, ItemEvent.EXHAUST): ItemState.DEAD,
        (ItemState.CLAIMED, ItemEvent.BURY): ItemState.DEAD,
    },
)


class FailedAttempt(Record, frozen=True):
    """A failed attempt: its owner, times and outcome."""

    number: int
    owner: str
    began_ns: int
    ended_ns: int
    # "failed", or "expired" if its worker crashed or hung.
    end: str
    code: str = ""
    error: str = ""


class ClaimRow(Record, frozen=True):
    """The stored claim: its number, owner, start and expiry, and the item's blob."""

    claims: int
    owner: str
    expires_ns: int
    claimed_ns: int
    blob: bytes = b""


class QueueItem(Record, frozen=True):
    """A queue item. The stored row has no fields of a live claim: `claims` is the number of the last claim that
    ended, and `expires_ns` is 0. `load_with_claim` fills these fields from the live claim."""

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
    fair_rank: int = 0
    # The operation that runs when the item becomes a dead letter, in the same commit (see `dead_letters`).
    on_dead: str = ""
    claimed_ns: int = 0
    # The last failed attempts, newest last.
    failed_attempts: tuple[FailedAttempt, ...] = ()


# Fields of a new item: payload, blob, priority, redrive_of, group, on_dead.
NewItemFields = tuple[bytes, bytes, int, int | None, str, str]


class QueueCounts(Record, frozen=True):
    """Number of items per state. `done` counts all completed items, `dead` the dead letters until a purge."""

    ready: int = 0
    delayed: int = 0
    claimed: int = 0
    dead: int = 0
    done: int = 0

    @property
    def open(self) -> int:
        return self.ready + self.delayed + self.claimed


class QueueKeys:
    """The packed prefixes of one queue."""

    __slots__ = (
        "by_expiry",
        "by_owner",
        "cancelled",
        "claim_rows",
        "counts",
        "dead",
        "dead_by_time",
        "delayed",
        "group_ranks",
        "items",
        "last_seq",
        "limited_universe",
        "queue",
        "reached_ranks",
        "ready",
        "topic",
    )  # fmt: skip

    def __init__(self, queue: str) -> None:
        check_name("queue", queue)
        self.queue = queue
        self.topic = topic(queue)
        (
            self.items,
            self.ready,
            self.delayed,
            self.by_expiry,
            self.by_owner,
            self.dead,
            self.dead_by_time,
        ) = (schema.key_prefix(schema.Space.QUEUE, queue, kind) for kind in "irdxozt")
        self.claim_rows = schema.key_prefix(schema.Space.QUEUE, queue, "h")
        self.counts = schema.key_prefix(schema.Space.QUEUE, queue, "n")
        self.group_ranks = schema.key_prefix(schema.Space.QUEUE, queue, "g")
        self.reached_ranks = schema.key_prefix(schema.Space.QUEUE, queue, "turn")
        self.cancelled = schema.key_prefix(schema.Space.QUEUE, queue, "withdrawn")
        self.last_seq = schema.sequence_key(self.items)
        # The universe whose load limits count the items: that of a queue of effects, or "".
        universe, is_effects, _ = queue.partition("/effects/")
        self.limited_universe = universe if is_effects else ""

    def ready_key(self, priority: int, fair_rank: int, packed_seq: bytes) -> bytes:
        return self.ready + tuples.pack_int(-priority) + tuples.pack_int(fair_rank) + packed_seq


def topic(queue: str) -> str:
    return f"queue/{queue}"


keys_of = lru_cache(maxsize=4096)(QueueKeys)
decode_item = codec.decoder(QueueItem).decode
decode_claim_row = codec.decoder(ClaimRow).decode
decode_counts = codec.decoder(QueueCounts).decode
pack = codec.pack
pack_int = tuples.pack_int
# Key suffix of the last rank of a group's requeued items.
_REQUEUED_SUFFIX = tuples.pack(("back",))
# Cached, because all items of a batch have the same time.
pack_time = lru_cache(maxsize=256)(tuples.pack_int)


@lru_cache(maxsize=4096)
def pack_owner(owner: str) -> bytes:
    return tuples.pack((owner,))


_OPEN_STATES = (ItemState.READY, ItemState.DELAYED, ItemState.CLAIMED)


class QueueCounterDelta:
    """State transitions of one operation, added to the queue's counters in one write."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: dict[ItemState, int] = {}

    def add(self, state: ItemState, count: int) -> None:
        self._changes[state] = self._changes.get(state, 0) + count

    def transition(self, before: ItemState, event: ItemEvent, count: int = 1) -> ItemState:
        after = ITEM_TRANSITIONS.next(before, event)
        self.add(before, -count)
        self.add(after, count)
        return after

    def apply(self, txn: Txn, keys: QueueKeys) -> None:
        changes = self._changes
        if not any(changes.values()):
            return
        current = counts_of(txn, keys)
        if keys.limited_universe:
            limits = load_limits.find(txn, keys.limited_universe)
            if limits is not None and limits.effects:
                self._count_open(txn, keys.limited_universe)
        txn.put(
            keys.counts,
            pack(
                QueueCounts(
                    current.ready + changes.get(ItemState.READY, 0),
                    current.delayed + changes.get(ItemState.DELAYED, 0),
                    current.claimed + changes.get(ItemState.CLAIMED, 0),
                    current.dead + changes.get(ItemState.DEAD, 0),
                    current.done + changes.get(ItemState.DONE, 0),
                )
            ),
        )

    def _count_open(self, txn: Txn, universe: str) -> None:
        """Add the change of the number of open items to the counter of the universe."""
        opened = sum(self._changes.get(state, 0) for state in _OPEN_STATES)
        if opened:
            load_limits.add_to(txn, universe, load_limits.EFFECTS, opened)


def counts_of(txn: Txn, keys: QueueKeys) -> QueueCounts:
    row = txn.get(keys.counts)
    return QueueCounts() if row is None else decode_counts(row)


def insert(
    txn: Txn,
    keys: QueueKeys,
    bodies: Sequence[NewItemFields],
    not_before_ns: int,
    *,
    fair_rank: int = 0,
    keep_delayed: bool = False,
) -> list[int]:
    """Insert items under new seqs, and return the seqs.

    With `keep_delayed`, items enter the delayed index even if they are due by store time, because their
    queue may use another clock.
    """
    now_ns = txn.now_ns
    last = txn.count(keys.last_seq)
    seqs = list(range(last + 1, last + 1 + len(bodies)))
    delayed = not_before_ns > now_ns or keep_delayed
    due = keys.delayed + pack_int(not_before_ns)
    put, items = txn.put, keys.items
    for seq, (payload, blob, priority, redrive_of, group, on_dead) in zip(
        seqs, bodies, strict=True
    ):
        packed_seq = pack_int(seq)
        if group:
            fair_rank = next_fair_rank(txn, keys, priority, group)
        item = QueueItem(
            payload,
            blob,
            priority,
            now_ns,
            not_before_ns,
            redrive_of=redrive_of,
            group=group,
            fair_rank=fair_rank,
            on_dead=on_dead,
        )
        put(items + packed_seq, pack(item))
        index = due + packed_seq if delayed else keys.ready_key(priority, fair_rank, packed_seq)
        put(index, packed_seq)
    if seqs:
        put(keys.last_seq, schema.encode_int(seqs[-1]))
        delta = QueueCounterDelta()
        delta.add(ItemState.DELAYED if delayed else ItemState.READY, len(seqs))
        delta.apply(txn, keys)
        txn.notify(keys.topic)
    return seqs


def next_fair_rank(txn: Txn, keys: QueueKeys, priority: int, group: str) -> int:
    """Assign the fair rank of a group's next item within its priority."""
    key = keys.group_ranks + tuples.pack((priority, group))
    rank = max(txn.count(key), txn.count(keys.reached_ranks + pack_int(priority))) + 1
    txn.put(key, schema.encode_int(rank))
    return rank


def advance_groups(txn: Txn, keys: QueueKeys, claimed: Sequence[QueueItem]) -> None:
    """Advance the queue's reached rank to the claimed items, and drop the ranks of drained groups."""
    reached: dict[int, int] = {}
    for item in claimed:
        reached[item.priority] = max(item.fair_rank, reached.get(item.priority, 0))
        drop_group(txn, keys, item)
    for priority, rank in reached.items():
        key = keys.reached_ranks + pack_int(priority)
        if rank > txn.count(key):
            txn.put(key, schema.encode_int(rank))


def drop_group(txn: Txn, keys: QueueKeys, item: QueueItem) -> None:
    """Delete the rank row of a group with the last of its items."""
    if item.group:
        key = keys.group_ranks + tuples.pack((item.priority, item.group))
        if txn.count(key) == item.fair_rank:
            txn.delete(key)
        if item.claims or item.not_before_ns:
            key += _REQUEUED_SUFFIX
            if txn.count(key) == item.fair_rank:
                txn.delete(key)


def assign_requeue_rank(txn: Txn, keys: QueueKeys, item: QueueItem) -> QueueItem:
    """Return the item with its rank for requeueing. The caller writes the row.

    Requeued items of one group get consecutive ranks, so 1,000 of them delay another group's single item
    by one.
    """
    if not item.group:
        return item
    reached = txn.count(keys.reached_ranks + pack_int(item.priority))
    if item.fair_rank > reached:
        return item  # its rank is still ahead
    drop_group(txn, keys, item)
    key = keys.group_ranks + tuples.pack((item.priority, item.group)) + _REQUEUED_SUFFIX
    rank = max(txn.count(key), reached) + 1
    txn.put(key, schema.encode_int(rank))
    return replace(item, fair_rank=rank)


def inline_or_blob(txn: Txn, payload: bytes) -> tuple[bytes, bytes]:
    """Return (payload, b"") for a small payload, or (b"", hash) after storing a large one as a blob."""
    if len(payload) <= BLOB_THRESHOLD_BYTES:
        return payload, b""
    return b"", blobs.put(txn, payload)


def add_failed_attempt(
    item: QueueItem, end_kind: str, ended_ns: int, code: str, error: str
) -> tuple[FailedAttempt, ...]:
    """Return the failed attempts plus the one that ends now."""
    latest = FailedAttempt(
        item.claims,
        item.owner,
        item.claimed_ns,
        ended_ns,
        end_kind,
        code[:ERROR_CODE_CHARS_MAX],
        error[:ATTEMPT_ERROR_CHARS_MAX],
    )
    return (*item.failed_attempts, latest)[-ATTEMPTS_KEPT:]


def load_item(txn: Txn, keys: QueueKeys, packed_seq: bytes) -> QueueItem:
    """Load an item by its packed seq, without its claim."""
    row = txn.get(keys.items + packed_seq)
    if row is None:
        raise StoreCorrupt(
            queue=keys.queue,
            seq=seq_of(packed_seq),
            why="an index names an item that does not exist",
        )
    return decode_item(row)


def load_with_claim(txn: Txn, keys: QueueKeys, packed_seq: bytes) -> QueueItem:
    """Load an item with the fields of its claim, if it has one."""
    item = load_item(txn, keys, packed_seq)
    row = txn.get(keys.claim_rows + packed_seq)
    if row is None:
        return item
    claim_row = decode_claim_row(row)
    return replace(
        item,
        claims=claim_row.claims,
        owner=claim_row.owner,
        expires_ns=claim_row.expires_ns,
        claimed_ns=claim_row.claimed_ns,
    )


def delete_claim(txn: Txn, keys: QueueKeys, item: QueueItem | ClaimRow, packed_seq: bytes) -> None:
    txn.delete(keys.claim_rows + packed_seq)
    txn.delete(keys.by_expiry + pack_time(item.expires_ns) + packed_seq)
    txn.delete(keys.by_owner + pack_owner(item.owner) + packed_seq)


def seq_of(packed_seq: bytes) -> int:
    return int.from_bytes(packed_seq[1:], "big")
