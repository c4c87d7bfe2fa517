"""What worlds want and have not got yet: effects by kind and by intent, timers by their time."""

from __future__ import annotations

from typing import NamedTuple

from holdfast import codec
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.bounds import check_limit
from holdfast.durable.item import Item, keys_of, pack_int, seq_of
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import Intent, TimerSet
from holdfast.ops import inventory
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.world import catalog, publish
from holdfast.world import timers as slots


class KindRow(NamedTuple):
    universe: str
    kind: str
    counts: queue.Counts


class EffectRow(NamedTuple):
    """One intent, and where it is: ready, delayed, claimed, dead, or done."""

    universe: str
    intent_hash: bytes
    wanted: publish.Pending
    state: str
    world: str
    item: Item | None = None
    letter: queue.Dead | None = None
    intent: Intent | None = None


class IntentRow(NamedTuple):
    """One intent in a list. `time_ns`: when it was wanted, is due, runs out or died, by its state."""

    seq: int
    intent: Intent
    world: str
    time_ns: int
    attempts: int
    owner: str
    code: str
    # Why it waits, or died.
    error: str = ""


class TimerRow(NamedTuple):
    universe: str
    world: str
    due_ns: int
    intent: Intent
    timer: TimerSet

    @property
    def clock(self) -> str:
        """The clock that it is due by: the one on the wall, or store time."""
        return "store" if self.timer.wall_ns is None else "wall"


def kinds(
    txn: Txn, universe: str | None = None, kind: str | None = None, lanes: bool = False
) -> list[KindRow]:
    """Queues of effects, by universe and kind: one seek for each queue that there is.

    With `lanes` those of a kind are found with it: mail on its way to another store.
    """
    found = []
    for name in inventory.names_after(txn, (int(Space.QUEUE),)):
        where, _, what = name.partition("/effects/")
        asked = (None, what, what.partition(">")[0]) if lanes else (None, what)
        if what and universe in (None, where) and kind in asked:
            found.append(KindRow(where, what, queue.counts(txn, name)))
    return found


def queues(txn: Txn) -> list[tuple[str, queue.Counts]]:
    """Every queue that there is, by name: one seek for each."""
    names = inventory.names_after(txn, (int(Space.QUEUE),))
    return [(name, queue.counts(txn, name)) for name in names]


def effect_queue(name: str) -> tuple[str, str] | None:
    """(universe, kind) of a queue of effects; None for another queue."""
    universe, _, kind = name.partition("/effects/")
    return (universe, kind) if universe and kind and "/" not in universe else None


def effect(txn: Txn, intent_hash: str, universe: str | None = None) -> EffectRow:
    """An intent by its hash, in hexadecimal."""
    try:
        raw = bytes.fromhex(intent_hash)
    except ValueError:
        raise Invalid(what="intent", found=intent_hash[:80], expected="hexadecimal") from None
    for where in inventory.universes(txn) if universe is None else [universe]:
        known = publish.pending(txn, where, raw) if raw else None
        if known is not None:
            return _effect(txn, where, raw, known)
    raise NotFound(
        what="intent",
        found=intent_hash[:80],
        why="done (its world has the receipt), or never dispatched",
    )


STATES = ("ready", "delayed", "claimed", "dead")


def intents(
    txn: Txn, universe: str, kind: str, state: str, after: int = 0, limit: int = 100
) -> list[IntentRow]:
    """Effects of a kind in one state: those ready in the order they will be done, those dead by
    number, after one; the others by their time."""
    check_limit(limit)
    name = publish.effects(universe, kind)
    if state == "dead":
        return [_letter_row(txn, universe, found) for found in queue.dead(txn, name, after, limit)]
    keys = keys_of(name)
    index = {"ready": keys.ready, "delayed": keys.delayed, "claimed": keys.claims}.get(state)
    if index is None:
        raise Invalid(what="state", found=state[:40], expected=list(STATES))
    rows = txn.scan(index, tuples.after(index), limit)
    return [_item_row(txn, universe, keys, packed) for _, packed in rows]


def wanted_in(txn: Txn, held: Item | queue.Dead) -> Intent | None:
    """The intent that an item of a queue of effects, or its letter, is about; None if it is none."""
    try:
        return codec.unpack_as(Intent, queue.payload_of(txn, held))
    except HoldfastError:
        return None


def timers(txn: Txn, universe: str | None = None, limit: int = 100) -> list[TimerRow]:
    """Pending timers, the next one first."""
    check_limit(limit)
    found: list[TimerRow] = []
    for where in inventory.universes(txn) if universe is None else [universe]:
        for keys in (keys_of(slots.delays(where)), keys_of(slots.calendar(where))):
            rows = txn.scan(keys.ready, tuples.after(keys.ready), limit)
            rows += txn.scan(keys.delayed, tuples.after(keys.delayed), limit)
            found += [_timer(txn, where, items.load(txn, keys, packed)) for _, packed in rows]
    return sorted(found, key=lambda row: row.due_ns)[:limit]


def timer(txn: Txn, world: str, key: str, universe: str | None = None) -> TimerRow:
    """What a world's timer key holds."""
    record = inventory.resolve(txn, world, universe)
    slot = slots.slot(txn, record.universe, record.world_id, key)
    if slot is None:
        raise NotFound(what="timer", world=world, key=key)
    keys = keys_of(slot.queue(record.universe))
    row = txn.get(keys.items + pack_int(slot.seq))
    if row is None:
        raise NotFound(what="timer", world=world, key=key, why="it is dead", queue=keys.queue)
    return _timer(txn, record.universe, items.decode(row))


# -- inside --------------------------------------------------------------------------------------


def _effect(txn: Txn, universe: str, raw: bytes, known: publish.Pending) -> EffectRow:
    name = known.queue(universe)
    keys = keys_of(name)
    packed = pack_int(known.seq)
    world = _world(txn, universe, known.world_id)
    row = txn.get(keys.items + packed)
    if row is None:
        letters = queue.dead(txn, name, known.seq - 1, 1)
        letter = letters[0] if letters and letters[0].seq == seq_of(packed) else None
        state = "done" if letter is None else "dead"
        intent = None if letter is None else wanted_in(txn, letter)
        return EffectRow(universe, raw, known, state, world, letter=letter, intent=intent)
    item = items.whole(txn, keys, packed)
    ready = txn.get(keys.ready_key(item.priority, item.turn, packed)) is not None
    state = "claimed" if item.expires_ns else "ready" if ready else "delayed"
    intent = wanted_in(txn, item)
    return EffectRow(universe, raw, known, state, world, item, intent=intent)


def _item_row(txn: Txn, universe: str, keys: items.Keys, packed: bytes) -> IntentRow:
    item = items.whole(txn, keys, packed)
    intent = codec.unpack_as(Intent, queue.payload_of(txn, item))
    return IntentRow(
        seq_of(packed),
        intent,
        _world(txn, universe, intent.world_id),
        item.expires_ns or item.not_before_ns or item.enqueued_ns,
        item.failures + item.expiries,
        item.owner,
        item.code,
        item.error,
    )


def _letter_row(txn: Txn, universe: str, letter: queue.Dead) -> IntentRow:
    unknown = Intent(universe, letter.group, b"", "", b"", "", b"", letter.enqueued_ns)
    intent = wanted_in(txn, letter) or unknown
    return IntentRow(
        letter.seq,
        intent,
        _world(txn, universe, intent.world_id),
        letter.died_ns,
        letter.failures + letter.expiries,
        letter.owner,
        letter.code,
        letter.error,
    )


def _timer(txn: Txn, universe: str, item: Item) -> TimerRow:
    intent = codec.unpack_as(Intent, queue.payload_of(txn, item))
    timer = codec.unpack_as(TimerSet, intent.params)
    return TimerRow(
        universe, _world(txn, universe, intent.world_id), item.not_before_ns, intent, timer
    )


def _world(txn: Txn, universe: str, world_id: str) -> str:
    try:
        record = catalog.record(txn, universe, world_id)
    except NotFound:
        return world_id
    return f"{record.type}/{record.name}"
