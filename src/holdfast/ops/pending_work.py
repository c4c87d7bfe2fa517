"""Queries for pending work of worlds: effects by kind and by intent, timers by due time."""

from __future__ import annotations

from typing import NamedTuple

from holdfast import codec
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.item import QueueItem, keys_of, pack_int, seq_of
from holdfast.durable.validation import check_limit
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import Intent, TimerSet
from holdfast.ops import catalog_queries
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.world import catalog
from holdfast.world import intents as world_intents
from holdfast.world import timers as slots


class KindRow(NamedTuple):
    universe: str
    kind: str
    counts: queue.QueueCounts


class EffectRow(NamedTuple):
    """One intent with its state: ready, delayed, claimed, dead, or done."""

    universe: str
    intent_hash: bytes
    pending_effect: world_intents.PendingEffect
    state: str
    world: str
    item: QueueItem | None = None
    letter: queue.DeadLetter | None = None
    intent: Intent | None = None


class IntentRow(NamedTuple):
    """One intent in a list. By state, `time_ns` is when it was requested, is due, its claim expires, or it
    died."""

    seq: int
    intent: Intent
    world: str
    time_ns: int
    attempts: int
    owner: str
    code: str
    # The last error: why it waits or died.
    error: str = ""
    state: str = ""


class TimerRow(NamedTuple):
    universe: str
    world: str
    due_ns: int
    intent: Intent
    timer: TimerSet

    @property
    def clock(self) -> str:
        """The clock of the due time: wall time or store time."""
        return "store" if self.timer.wall_ns is None else "wall"


def kinds(
    txn: Txn, universe: str | None = None, kind: str | None = None, lanes: bool = False
) -> list[KindRow]:
    """Return the effect queues by universe and kind, with one seek per existing queue.

    With `lanes`, a kind also matches its peer queues: mail in transit to another store.
    """
    rows = []
    for name in iter_names(txn, (int(Space.QUEUE),)):
        queue_universe, _, queue_kind = name.partition("/effects/")
        accepted_kinds = (
            (None, queue_kind, queue_kind.partition(">")[0]) if lanes else (None, queue_kind)
        )
        if queue_kind and universe in (None, queue_universe) and kind in accepted_kinds:
            rows.append(KindRow(queue_universe, queue_kind, queue.counts(txn, name)))
    return rows


def queues(txn: Txn) -> list[tuple[str, queue.QueueCounts]]:
    """Return all queues by name, with one seek per queue."""
    names = iter_names(txn, (int(Space.QUEUE),))
    return [(name, queue.counts(txn, name)) for name in names]


def effect_queue(name: str) -> tuple[str, str] | None:
    """Return (universe, kind) of an effect queue; None for any other queue."""
    universe, _, kind = name.partition("/effects/")
    return (universe, kind) if universe and kind and "/" not in universe else None


def effect(txn: Txn, intent_hash: str, universe: str | None = None) -> EffectRow:
    """Return an intent by its hash in hexadecimal."""
    try:
        raw = bytes.fromhex(intent_hash)
    except ValueError:
        raise Invalid(what="intent", found=intent_hash[:80], expected="hexadecimal") from None
    for universe_name in catalog_queries.universes(txn) if universe is None else [universe]:
        pending_effect = world_intents.find_pending(txn, universe_name, raw) if raw else None
        if pending_effect is not None:
            return _effect(txn, universe_name, raw, pending_effect)
    raise NotFound(
        what="intent",
        found=intent_hash[:80],
        why="done (its world has the receipt), or never emitted",
    )


STATES = ("ready", "delayed", "claimed", "dead")


def intents_in_state(
    txn: Txn, universe: str, kind: str, state: str, after: int = 0, limit: int = 100
) -> list[IntentRow]:
    """Return the effects of a kind in one state: ready in execution order, dead by seq after `after`,
    delayed and claimed by time."""
    check_limit(limit)
    name = world_intents.effect_queue(universe, kind)
    if state == "dead":
        return [
            _letter_row(txn, universe, letter)._replace(state=state)
            for letter in queue.list_dead(txn, name, after, limit)
        ]
    keys = keys_of(name)
    index = _state_index(keys, state)
    rows = txn.scan(index, tuples.prefix_end(index), limit)
    found = [_item_row(txn, universe, keys, packed) for _, packed in rows]
    return [row._replace(state=state) for row in found]


def intent_of(txn: Txn, item_or_letter: QueueItem | queue.DeadLetter) -> Intent | None:
    """Decode the intent of an effect item or its dead letter; None if the payload is not an intent."""
    try:
        return codec.unpack_as(Intent, queue.payload_of(txn, item_or_letter))
    except HoldfastError:
        return None


def intents_page(
    txn: Txn, universe: str, kind: str, state: str, position: bytes, limit: int
) -> tuple[list[IntentRow], bytes]:
    """Return a page of the effects of a kind in one state, and the position of its last row; empty at the end."""
    check_limit(limit)
    name = world_intents.effect_queue(universe, kind)
    index = _state_index(keys_of(name), state)
    lo = position + b"\x00" if position else index
    if not index <= lo <= tuples.prefix_end(index):
        raise Invalid(what="cursor", why="the cursor belongs to another list")
    rows = txn.scan(lo, tuples.prefix_end(index), limit + 1)
    if state == "dead":
        seqs = [seq_of(key[len(index) :]) for key, _ in rows[:limit]]
        letters = [queue.list_dead(txn, name, seq - 1, 1)[0] for seq in seqs]
        found = [_letter_row(txn, universe, letter)._replace(state=state) for letter in letters]
    else:
        items_found = [
            _item_row(txn, universe, keys_of(name), packed) for _, packed in rows[:limit]
        ]
        found = [row._replace(state=state) for row in items_found]
    return found, rows[limit - 1][0] if len(rows) > limit else b""


def tagged_page(
    txn: Txn, universe: str, tag: str, state: str, after: bytes, limit: int
) -> tuple[list[IntentRow], bytes]:
    """Return a page of the effects with a tag, by intent, and the intent that the next page follows; empty at the end.
    With a state other effects are left out, so a page may be short."""
    check_limit(limit)
    if state and state not in STATES:
        raise Invalid(what="state", found=state[:40], expected=list(STATES))
    page = world_intents.tagged_page(txn, universe, tag, after, limit + 1)
    effects = [_effect(txn, universe, raw, pending) for raw, pending in page[:limit]]
    found = [_intent_row(row) for row in effects if state in ("", row.state)]
    return found, page[limit - 1][0] if len(page) > limit else b""


def world_page(
    txn: Txn, universe: str, world_id: str, after: bytes, limit: int, scanned_max: int
) -> tuple[list[IntentRow], bytes]:
    """Return a page of the open and dead effects of a world, by intent, and the intent that the next page follows; empty at
    the end. It reads at most `scanned_max` effects of the universe, so a page may be short."""
    check_limit(limit)
    page = world_intents.pending_page(txn, universe, after, scanned_max)
    mine = [(raw, pending) for raw, pending in page if pending.world_id == world_id]
    found = [_intent_row(_effect(txn, universe, raw, pending)) for raw, pending in mine[:limit]]
    if len(mine) > limit:
        return found, mine[limit - 1][0]
    return found, page[-1][0] if len(page) == scanned_max else b""


def world_timers(
    txn: Txn, universe: str, world_id: str, after: str, limit: int
) -> tuple[list[TimerRow], str]:
    """Return a page of the pending timers of a world, by key, and the key that the next page follows; empty at the end."""
    check_limit(limit)
    page = slots.list_slots(txn, universe, world_id, limit + 1, after)
    found = []
    for _, slot in page[:limit]:
        keys = keys_of(slot.queue(universe))
        row = txn.get(keys.items + pack_int(slot.seq))
        # The timer of a slot may be a dead letter.
        if row is not None:
            found.append(_timer(txn, universe, items.decode_item(row)))
    return found, page[limit - 1][0] if len(page) > limit else ""


def timers_page(
    txn: Txn, universe: str, position: tuple[int, bytes], limit: int
) -> tuple[list[TimerRow], tuple[int, bytes] | None]:
    """Return a page of pending timers, and the position of its last row; None at the end. Due timers come first, then
    timers of the store clock by time, then timers of the wall clock by time."""
    check_limit(limit)
    delay, calendar = keys_of(slots.delay_queue(universe)), keys_of(slots.calendar_queue(universe))
    parts = (
        (delay, delay.ready),
        (calendar, calendar.ready),
        (delay, delay.delayed),
        (calendar, calendar.delayed),
    )
    found: list[TimerRow] = []
    part, after = position
    while 0 <= part < len(parts):
        keys, index = parts[part]
        if after and not index <= after < tuples.prefix_end(index):
            raise Invalid(what="cursor", why="the cursor belongs to another list")
        rows = txn.scan(
            after + b"\x00" if after else index, tuples.prefix_end(index), limit - len(found) + 1
        )
        for key, packed in rows:
            if len(found) == limit:
                return found, (part, after)
            found.append(_timer(txn, universe, items.load_item(txn, keys, packed)))
            after = key
        part, after = part + 1, b""
    return found, None


def timers(txn: Txn, universe: str | None = None, limit: int = 100) -> list[TimerRow]:
    """Return pending timers, the next due first."""
    check_limit(limit)
    timer_rows: list[TimerRow] = []
    for universe_name in catalog_queries.universes(txn) if universe is None else [universe]:
        for keys in (
            keys_of(slots.delay_queue(universe_name)),
            keys_of(slots.calendar_queue(universe_name)),
        ):
            rows = txn.scan(keys.ready, tuples.prefix_end(keys.ready), limit)
            rows += txn.scan(keys.delayed, tuples.prefix_end(keys.delayed), limit)
            timer_rows += [
                _timer(txn, universe_name, items.load_item(txn, keys, packed)) for _, packed in rows
            ]
    return sorted(timer_rows, key=lambda row: row.due_ns)[:limit]


def timer(txn: Txn, world: str, key: str, universe: str | None = None) -> TimerRow:
    """Return the timer with this key of a world."""
    record = catalog_queries.resolve(txn, world, universe)
    slot = slots.find_slot(txn, record.universe, record.world_id, key)
    if slot is None:
        raise NotFound(what="timer", world=world, key=key)
    keys = keys_of(slot.queue(record.universe))
    row = txn.get(keys.items + pack_int(slot.seq))
    if row is None:
        raise NotFound(what="timer", world=world, key=key, why="it is dead", queue=keys.queue)
    return _timer(txn, record.universe, items.decode_item(row))


# -- inside --------------------------------------------------------------------------------------


def _effect(
    txn: Txn, universe: str, raw: bytes, pending_effect: world_intents.PendingEffect
) -> EffectRow:
    name = pending_effect.queue(universe)
    keys = keys_of(name)
    packed = pack_int(pending_effect.seq)
    world = _world_name(txn, universe, pending_effect.world_id)
    if pending_effect.starts_flow:
        return EffectRow(universe, raw, pending_effect, "flow", world)
    row = txn.get(keys.items + packed)
    if row is None:
        letters = queue.list_dead(txn, name, pending_effect.seq - 1, 1)
        letter = letters[0] if letters and letters[0].seq == seq_of(packed) else None
        state = "done" if letter is None else "dead"
        intent = None if letter is None else intent_of(txn, letter)
        return EffectRow(universe, raw, pending_effect, state, world, letter=letter, intent=intent)
    item = items.load_with_claim(txn, keys, packed)
    ready = txn.get(keys.ready_key(item.priority, item.fair_rank, packed)) is not None
    state = "claimed" if item.expires_ns else "ready" if ready else "delayed"
    intent = intent_of(txn, item)
    return EffectRow(universe, raw, pending_effect, state, world, item, intent=intent)


def _intent_row(row: EffectRow) -> IntentRow:
    """The row of a list for an effect that was read by its intent."""
    pending, item, letter = row.pending_effect, row.item, row.letter
    intent = row.intent or Intent(
        universe_id=row.universe,
        world_id=pending.world_id,
        intent_hash=row.intent_hash,
        effect_kind=pending.effect_kind,
        params=b"",
        origin_name="",
        policy_context_hash=b"",
        enqueued_at_ns=0,
        tag=pending.tag,
    )
    held = item or letter
    died_ns = letter.died_ns if letter else 0
    time_ns = (item.expires_ns or item.not_before_ns or item.enqueued_ns) if item else died_ns
    return IntentRow(
        seq=pending.seq,
        intent=intent,
        world=row.world,
        time_ns=time_ns,
        attempts=held.failures + held.expiries if held else 0,
        owner=held.owner if held else "",
        code=held.code if held else "",
        error=held.error if held else "",
        state=row.state,
    )


def _state_index(keys: items.QueueKeys, state: str) -> bytes:
    index = {
        "ready": keys.ready,
        "delayed": keys.delayed,
        "claimed": keys.by_expiry,
        "dead": keys.dead,
    }.get(state)
    if index is None:
        raise Invalid(what="state", found=state[:40], expected=list(STATES))
    return index


def _item_row(txn: Txn, universe: str, keys: items.QueueKeys, packed: bytes) -> IntentRow:
    item = items.load_with_claim(txn, keys, packed)
    intent = codec.unpack_as(Intent, queue.payload_of(txn, item))
    return IntentRow(
        seq=seq_of(packed),
        intent=intent,
        world=_world_name(txn, universe, intent.world_id),
        time_ns=item.expires_ns or item.not_before_ns or item.enqueued_ns,
        attempts=item.failures + item.expiries,
        owner=item.owner,
        code=item.code,
        error=item.error,
    )


def _letter_row(txn: Txn, universe: str, letter: queue.DeadLetter) -> IntentRow:
    unknown = Intent(
        universe_id=universe,
        world_id=letter.group,
        intent_hash=b"",
        effect_kind="",
        params=b"",
        origin_name="",
        policy_context_hash=b"",
        enqueued_at_ns=letter.enqueued_ns,
    )
    intent = intent_of(txn, letter) or unknown
    return IntentRow(
        seq=letter.seq,
        intent=intent,
        world=_world_name(txn, universe, intent.world_id),
        time_ns=letter.died_ns,
        attempts=letter.failures + letter.expiries,
        owner=letter.owner,
        code=letter.code,
        error=letter.error,
    )


def _timer(txn: Txn, universe: str, item: QueueItem) -> TimerRow:
    intent = codec.unpack_as(Intent, queue.payload_of(txn, item))
    timer = codec.unpack_as(TimerSet, intent.params)
    return TimerRow(
        universe, _world_name(txn, universe, intent.world_id), item.not_before_ns, intent, timer
    )


def _world_name(txn: Txn, universe: str, world_id: str) -> str:
    try:
        record = catalog.get_record(txn, universe, world_id)
    except NotFound:
        return world_id
    return f"{record.type}/{record.name}"
